"""Tokenised prompts, and an iterator over them whose position can be saved.

An epoch is one shuffled pass, its order drawn from (seed, epoch). Batches are full: what is left
at the end of an epoch and does not fill one is dropped, and the next epoch is shuffled anew, so
over epochs no prompt is favoured.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.data.chat import encode_prompt
from jaxrlhf.data.tables import PathLike, Record, encoding, where

OVERLONG = ("filter", "truncate", "error")


@dataclass(frozen=True)
class PromptDataset:
    """Records and their token ids; entry ``i`` is the prompt with id ``i``.

    Attributes:
      records: the rows that are used.
      token_ids: their prompts, each of 1 to ``max_prompt_length`` tokens.
      rows: where each stood in the table that it came from.
      filtered: how many rows were left out because their prompt was too long.
      truncated: how many prompts were cut.
      source: the table's file, for messages.
    """

    records: list[Record]
    token_ids: list[list[int]]
    rows: list[int]
    filtered: int = 0
    truncated: int = 0
    source: PathLike = "records"

    def __len__(self) -> int:
        return len(self.records)

    def place(self, prompt_id: int) -> str:
        """Where a prompt's record stands, for messages."""
        return where(self.source, self.rows[prompt_id])


class PromptBatch(NamedTuple):
    """P prompts: ids i32[P] into the dataset, their tokens and records, the epoch, their places."""

    prompt_ids: np.ndarray
    token_ids: list[list[int]]
    records: list[Record]
    epoch: int
    places: list[str]


def tokenize_prompts(
    records: Sequence[Record],
    tokenizer: Any,
    *,
    max_prompt_length: int,
    overlong: str = "filter",
    source: PathLike = "records",
    template_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> PromptDataset:
    """Tokenises every prompt once.

    Args:
      records: from ``read_table``.
      tokenizer: from ``load_tokenizer``.
      max_prompt_length: in tokens, those of the template included.
      overlong: what to do with a longer prompt. "filter" leaves the row out; "truncate" keeps the
        last ``max_prompt_length`` tokens, so the question's end and the start of the assistant's
        turn stay and the beginning (BOS and system text too) is lost; "error" refuses it.
      source: the records' file, for messages.
      template_options: as in ``encode_prompt``.
      on_progress: called with (prompts done, prompts in all).

    Raises:
      ValueError: an overlong prompt under "error" or an empty one (file and row are named), a
        list of messages but no chat template, or no prompt is left.
      TableError: a prompt that the template or the tokenizer does not take.
    """
    if overlong not in OVERLONG:
        raise ValueError(f"overlong={overlong!r} is unknown; use one of {', '.join(OVERLONG)}.")
    _check_template(records, tokenizer, source)
    encoded = []
    for row, record in enumerate(records):
        place = where(source, row)
        encoded.append(_encode(tokenizer, record, template_options, place))
        if overlong == "error" and len(encoded[-1]) > max_prompt_length:
            raise ValueError(
                f"{place}: prompt has {len(encoded[-1])} tokens; raise max_prompt_length "
                f"(now {max_prompt_length}) or set overlong to filter or truncate."
            )
        if on_progress is not None:
            on_progress(row + 1, len(records))
    long = [len(ids) > max_prompt_length for ids in encoded]
    rows = [i for i, is_long in enumerate(long) if not (is_long and overlong == "filter")]
    if not rows:
        raise ValueError(
            f"{source}: no prompt of {len(records)} fits max_prompt_length {max_prompt_length}; "
            "raise it."
        )
    return PromptDataset(
        records=[records[i] for i in rows],
        token_ids=[encoded[i][-max_prompt_length:] for i in rows],
        rows=rows,
        filtered=len(records) - len(rows),
        truncated=sum(long) if overlong == "truncate" else 0,
        source=source,
    )


class PromptIterator:
    """Endless batches of a dataset; the number of batches drawn is the whole position.

    Args:
      dataset: from ``tokenize_prompts``.
      batch_size: prompts in a batch.
      seed: of the shuffles; not negative.

    Raises:
      ValueError: the batch is larger than the dataset, or the seed is negative.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, seed: int):
        if not 0 < batch_size <= len(dataset):
            raise ValueError(
                f"a batch of {batch_size} prompts cannot be drawn from {len(dataset)}; "
                "lower train_batch_size or give more prompts."
            )
        if seed < 0:
            raise ValueError(f"seed {seed} is negative; use 0 or more.")
        self.dataset = dataset
        self.batches_per_epoch = len(dataset) // batch_size
        self._batch_size = batch_size
        self._seed = seed
        self._drawn = 0
        self._checksum = checksum(dataset.token_ids)
        self._epoch = -1  # the epoch that _order belongs to
        self._order = np.zeros(0, np.int32)

    def __iter__(self) -> Iterator[PromptBatch]:
        return self

    def __next__(self) -> PromptBatch:
        epoch, batch = divmod(self._drawn, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self._seed, epoch, len(self.dataset))
        ids = self._order[batch * self._batch_size : (batch + 1) * self._batch_size]
        self._drawn += 1
        return PromptBatch(
            prompt_ids=ids.copy(),
            token_ids=[self.dataset.token_ids[i] for i in ids],
            records=[self.dataset.records[i] for i in ids],
            epoch=epoch,
            places=[self.dataset.place(i) for i in ids],
        )

    def next(self) -> PromptBatch:
        """The next batch; the same as ``next(iterator)``."""
        return self.__next__()

    def state(self) -> dict[str, int]:
        """The position, and what it is a position in."""
        return {
            "batches_drawn": self._drawn,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "prompts": len(self.dataset),
            "checksum": self._checksum,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues where ``state`` was taken.

        Raises:
          ValueError: a key is missing, or the batch size, the seed or the prompts differ.
        """
        check_position(self.state(), state)
        self._drawn = int(state["batches_drawn"])


def check_position(own: Mapping[str, int], saved: Mapping[str, int]) -> None:
    """Refuses an iterator's saved state that is of other data than its own.

    Raises:
      ValueError: a key is missing, or one beside ``batches_drawn`` differs.
    """
    if saved.keys() != own.keys():
        raise ValueError(
            f"the saved data position has the keys {sorted(saved)}, not {sorted(own)}; "
            "resume with the version that saved it."
        )
    changed = [k for k in own if k != "batches_drawn" and own[k] != saved[k]]
    if changed:
        raise ValueError(
            f"the saved data position is of other data: {changed[0]} was {saved[changed[0]]} "
            f"and is {own[changed[0]]}; resume with the same files, batch size and seed."
        )


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of ``size`` items in one epoch, i32[size]: a function of (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(size).astype(np.int32)


def _check_template(records: Sequence[Record], tokenizer: Any, source: PathLike) -> None:
    chats = (row for row, record in enumerate(records) if not isinstance(record["prompt"], str))
    row = next(chats, None)
    if row is not None and tokenizer.chat_template is None:
        raise ValueError(
            f"{tokenizer.name_or_path}: has no chat template, and the prompt of "
            f"{where(source, row)} is a list of messages; add a chat_template.jinja to the "
            "tokenizer's directory or write all prompts as plain text."
        )


def _encode(
    tokenizer: Any, record: Record, options: Mapping[str, Any] | None, place: str
) -> list[int]:
    with encoding(place, "prompt"):
        ids = encode_prompt(tokenizer, record["prompt"], template_options=options)
    if not ids:
        raise ValueError(f"{place}: prompt has no tokens; remove the row.")
    return ids


def checksum(token_ids: Iterable[Sequence[int]]) -> int:
    """A checksum of lists of ids, the places where they end included."""
    total = 0
    for ids in token_ids:
        total = zlib.crc32(np.asarray([len(ids), *ids], np.int64).tobytes(), total)
    return total
