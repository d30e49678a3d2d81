"""Preference tables: pairs of answers of which one was preferred, checked, tokenised and padded.

A row of a .parquet or .jsonl file has ``chosen`` and ``rejected``, and maybe

  prompt       messages, or a plain text; ``messages`` is read in its place
  margin       number of at least 0: by how much the chosen answer is better; 0 when absent
  source       str, the name of a part of the data (``data_source`` is read in its place)

in any of these forms (whatever else a row holds is kept):

  prompt       chosen and rejected
  messages     a text each: the assistant's answer (verl's and LLaMA-Factory's columns)
  messages     messages each, with or without the prompt before them (TRL's form)
  absent       messages each: what both begin with is the prompt (TRL's implicit prompt); a text
               under ``prompt`` may repeat one of its messages
  text         a text each, to be tokenised as they are, without a chat template
  absent       a text each, that hold the prompt themselves
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.data.chat import encode_example
from jaxrlhf.data.prompts import OVERLONG, PromptDataset
from jaxrlhf.data.tables import (
    PathLike,
    Record,
    TableError,
    check_chat_template,
    check_prompt,
    check_text,
    encoding,
    plain_values,
    read_rows,
    where,
    wrong_type,
)

NO_SOURCE = "unnamed"


def read_preferences(path: PathLike) -> list[Record]:
    """Reads a file of pairs and checks every row; see the module's docstring and ``check_pair``.

    Raises:
      TableError: the file is missing, unreadable or empty, or a row is no pair; names the row.
    """
    return [check_pair(row, where(path, i)) for i, row in enumerate(read_rows(path))]


def check_pair(record: Mapping[str, Any], place: str) -> Record:
    """Brings one row into one form, or says what is wrong with it.

    Args:
      record: one row.
      place: how messages name the row, such as ``pairs.parquet: row 3``.

    Returns:
      The row with ``prompt`` messages and ``chosen`` and ``rejected`` messages that follow it, the
      first and the last of which are the assistant's; or all three plain texts, ``prompt`` empty
      where the answers hold it themselves. ``margin`` is a float and ``source`` a string.

    Raises:
      TableError: names the place and the key.
    """
    row = plain_values(record)
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            kind = "is null" if key in row else "is missing"
            raise TableError(f"{place}: {key} {kind}; every pair needs chosen and rejected.")
    answers = [check_prompt(row[key], f"{place}: {key}") for key in ("chosen", "rejected")]
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise TableError(f"{place}: chosen and rejected differ in kind; make both texts or lists.")
    prompt = next((row[k] for k in ("prompt", "messages") if row.get(k) not in (None, "", [])), "")
    prompt = prompt and check_prompt(prompt, f"{place}: prompt")
    if isinstance(answers[0], str):
        row |= _with_text_answers(prompt, answers)
    elif isinstance(prompt, str):
        row |= _with_implicit_prompt(prompt, answers, place)
    else:
        row |= _with_message_answers(prompt, answers, place)
    return row | {"margin": _margin(row, place), "source": _source(row, place)}


def _with_text_answers(prompt: Any, answers: Sequence[Any]) -> Record:
    if isinstance(prompt, list):
        answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def _with_implicit_prompt(text: str, answers: Sequence[Any], place: str) -> Record:
    chosen, rejected = answers
    shorter = min(len(chosen), len(rejected))
    shared = (k for k in range(shorter) if chosen[k] != rejected[k])
    end = next(shared, shorter - 1)
    while end > 0 and not chosen[end]["role"] == rejected[end]["role"] == "assistant":
        end -= 1
    if end == 0:
        raise TableError(
            f"{place}: prompt is no list of messages, and chosen and rejected do not begin with "
            "messages that they share up to a turn of the assistant; give the prompt."
        )
    prompt = chosen[:end]
    if text and not any(message["content"] == text for message in prompt):
        raise TableError(
            f"{place}: prompt is a text that is no message of chosen and rejected; give it as a "
            "list of messages, or leave it out where the two hold it."
        )
    return _with_message_answers(prompt, answers, place)


def _with_message_answers(prompt: Any, answers: Sequence[Any], place: str) -> Record:
    if all(answer[: len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt) :] for answer in answers]
    for key, answer in zip(("chosen", "rejected"), answers, strict=True):
        roles = [message["role"] for message in answer]
        if not roles or {roles[0], roles[-1]} != {"assistant"}:
            raise TableError(
                f"{place}: {key} has after the prompt messages of {', '.join(roles) or 'nobody'}; "
                "make the first and the last of them the assistant's."
            )
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def _margin(row: Record, place: str) -> float:
    value = row.get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(f"{place}: margin", value, "a number, or leave it out")
    if not 0 <= value < math.inf:
        raise TableError(
            f"{place}: margin is {value}; make it a number of at least 0 (where the rejected "
            "answer is better, exchange the two)."
        )
    return float(value)


def _source(row: Record, place: str) -> str:
    for key in ("source", "data_source"):
        if row.get(key) is not None:
            return check_text(row[key], f"{place}: {key}")
    return NO_SOURCE


@dataclass(frozen=True)
class PreferenceDataset:
    """Pairs and their token ids; entry ``i`` is the pair with id ``i``.

    Attributes:
      records: the rows that are used, as ``check_pair`` returns them.
      chosen, rejected: token ids of the whole rows, prompt and answer.
      prompt_lengths: how many tokens both begin with: those of the prompt (where the answers are
        texts that hold it themselves, those that they share).
      rows: where each stood in the table that it came from.
      filtered: how many pairs were left out because a row was too long.
      truncated: how many lost the beginning of their prompt.
      identical: how many were left out because both answers are the same tokens.
      source: the table's file, for messages.
    """

    records: list[Record]
    chosen: list[list[int]]
    rejected: list[list[int]]
    prompt_lengths: list[int]
    rows: list[int]
    filtered: int = 0
    truncated: int = 0
    identical: int = 0
    source: PathLike = "records"

    def __len__(self) -> int:
        return len(self.records)

    def place(self, pair_id: int) -> str:
        """Where a pair's record stands, for messages."""
        return where(self.source, self.rows[pair_id])

    def take(self, pair_ids: Sequence[int]) -> "PreferenceDataset":
        """These pairs alone, as a dataset."""
        return PreferenceDataset(
            records=[self.records[i] for i in pair_ids],
            chosen=[self.chosen[i] for i in pair_ids],
            rejected=[self.rejected[i] for i in pair_ids],
            prompt_lengths=[self.prompt_lengths[i] for i in pair_ids],
            rows=[self.rows[i] for i in pair_ids],
            source=self.source,
        )

    def as_prompts(self) -> PromptDataset:
        """Each pair as one entry of both rows' tokens: what iterators and fingerprints take."""
        ids = [a + b for a, b in zip(self.chosen, self.rejected, strict=True)]
        return PromptDataset(self.records, ids, self.rows, source=self.source)


class Pair(NamedTuple):
    """Token ids of both rows, and how many of them are the common prompt's."""

    chosen: list[int]
    rejected: list[int]
    prompt_length: int


def encode_pair(
    tokenizer: Any,
    record: Mapping[str, Any],
    *,
    stop_ids: Collection[int] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Pair:
    """Both rows of a pair, each up to the stop token that ends its answer (a text's: eos).

    Args:
      tokenizer: from ``load_tokenizer``.
      record: from ``check_pair``.
      stop_ids, template_options: as in ``encode_example``.

    Raises:
      ValueError: see ``encode_example``.
    """
    chosen, rejected = (
        encode_example(
            tokenizer,
            record["prompt"],
            record[key],
            stop_ids=stop_ids,
            template_options=template_options,
        )
        for key in ("chosen", "rejected")
    )
    rows = chosen.tokens.tolist(), rejected.tokens.tolist()
    if record["prompt"] == "":
        return Pair(*rows, _shared_tokens(*rows))
    return Pair(*rows, int(np.argmax(chosen.answer_mask)))


def _shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with, the last one of the shorter row left to the answer."""
    end = min(len(a), len(b)) - 1
    return next((i for i in range(end) if a[i] != b[i]), end)


def tokenize_preferences(
    records: Sequence[Record],
    tokenizer: Any,
    *,
    max_length: int,
    overlong: str = "filter",
    source: PathLike = "records",
    stop_ids: Collection[int] | None = None,
    template_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> PreferenceDataset:
    """Tokenises every pair once; pairs of two equal rows are left out and counted.

    Args:
      records: from ``read_preferences``.
      tokenizer: from ``load_tokenizer``.
      max_length: of a row, prompt and answer with the template's tokens.
      overlong: what to do with a pair that has a longer row. "filter" leaves it out; "truncate"
        cuts as many tokens from the beginning of both as the longer one has too many, and leaves
        the pair out where that would be all of the prompt; "error" refuses it.
      source: the records' file, for messages.
      stop_ids, template_options: as in ``encode_example``.
      on_progress: called with (pairs done, pairs in all).

    Raises:
      ValueError: an overlong pair under "error", or no pair is left.
      TableError: a pair that the template or the tokenizer does not take; names file and row.
    """
    if overlong not in OVERLONG:
        raise ValueError(f"overlong={overlong!r} is unknown; use one of {', '.join(OVERLONG)}.")
    kept: list[tuple[int, Pair]] = []
    truncated = identical = 0
    for row, record in enumerate(records):
        place = where(source, row)
        pair = _encode(tokenizer, record, stop_ids, template_options, place)
        excess = max(len(pair.chosen), len(pair.rejected)) - max_length
        if excess > 0 and overlong == "error":
            raise ValueError(
                f"{place}: its longer answer makes {excess + max_length} tokens; raise max_length "
                f"(now {max_length}) or set overlong to filter or truncate."
            )
        if pair.chosen == pair.rejected:
            identical += 1
        elif excess <= 0:
            kept.append((row, pair))
        elif overlong == "truncate" and excess < pair.prompt_length:
            truncated += 1
            chosen, rejected, prompt = pair
            kept.append((row, Pair(chosen[excess:], rejected[excess:], prompt - excess)))
        if on_progress is not None:
            on_progress(row + 1, len(records))
    if not kept:
        raise ValueError(
            f"{source}: of {len(records)} pairs {identical} are of two equal answers and none of "
            f"the others fits max_length {max_length}; raise it or correct the file."
        )
    return PreferenceDataset(
        records=[records[row] for row, _ in kept],
        chosen=[pair.chosen for _, pair in kept],
        rejected=[pair.rejected for _, pair in kept],
        prompt_lengths=[pair.prompt_length for _, pair in kept],
        rows=[row for row, _ in kept],
        filtered=len(records) - len(kept) - identical,
        truncated=truncated,
        identical=identical,
        source=source,
    )


def _encode(
    tokenizer: Any,
    record: Record,
    stop_ids: Collection[int] | None,
    options: Mapping[str, Any] | None,
    place: str,
) -> Pair:
    if not isinstance(record["prompt"], str):
        check_chat_template(tokenizer, place, "pairs")
    with encoding(place, "the pair"):
        return encode_pair(tokenizer, record, stop_ids=stop_ids, template_options=options)


class PairArrays(NamedTuple):
    """The fields of ``types.PreferenceBatch`` in its order: ``PreferenceBatch(*arrays)``.

    Attributes:
      tokens: i32[B, 2, T], right-padded, the chosen row first.
      lengths: i32[B, 2], tokens of each row.
      prompt_lengths: i32[B], tokens of the common prompt.
      margins: f32[B].
      loss_weights: f32[B], 1/B each: they sum to 1.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    margins: np.ndarray
    loss_weights: np.ndarray


def pad_pairs(
    dataset: PreferenceDataset, pair_ids: Sequence[int], *, pad_id: int, multiple: int = 32
) -> PairArrays:
    """The pairs with these ids as one batch, as wide as its longest row needs.

    The width is ``multiple`` times a power of two, or halfway to the next one, so that few shapes
    occur.

    Args:
      dataset: from ``tokenize_preferences``.
      pair_ids: at least one.
      pad_id: what fills the rest; may be the eos id.
      multiple: the smallest width.
    """
    rows = [(dataset.chosen[i], dataset.rejected[i]) for i in pair_ids]
    lengths = np.asarray([[len(row) for row in pair] for pair in rows], np.int32)
    width = _width(int(lengths.max()), multiple)
    tokens = np.full((len(rows), 2, width), pad_id, np.int32)
    for b, pair in enumerate(rows):
        for side, row in enumerate(pair):
            tokens[b, side, : len(row)] = row
    return PairArrays(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=np.asarray([dataset.prompt_lengths[i] for i in pair_ids], np.int32),
        margins=np.asarray([dataset.records[i]["margin"] for i in pair_ids], np.float32),
        loss_weights=np.full(len(rows), 1 / len(rows), np.float32),
    )


def _width(length: int, multiple: int) -> int:
    blocks = -(-length // multiple)
    power = 1 << (blocks - 1).bit_length()
    between = power * 3 // 4
    return multiple * (between if 2 < blocks <= between else power)
