"""Supervised examples as right-padded numpy arrays, shaped like ``types.TokenBatch``."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxrlhf.data.chat import Example
from jaxrlhf.data.prompts import epoch_order


class TokenArrays(NamedTuple):
    """The fields of ``types.TokenBatch`` in its order: ``TokenBatch(*arrays)``.

    Attributes:
      tokens: i32[B, T], right-padded.
      positions: i32[B, T], from 0 in every segment; 0 on padding.
      segment_ids: i32[B, T], 1, 2, … in each row, one for each example; 0 on padding.
      loss_weights: f32[B, T], 1/N on each of the batch's N answer tokens: they sum to 1.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    loss_weights: np.ndarray


def bucket_length(length: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that holds ``length`` tokens."""
    return -(-length // multiple) * multiple


def pad_examples(
    examples: Sequence[Example], *, pad_id: int, length: int | None = None, multiple: int = 32
) -> TokenArrays:
    """One example a row, padded on the right; every answer token of the batch weighs the same.

    Args:
      examples: from ``encode_example``; at least one.
      pad_id: what fills the rest; may be the eos id.
      length: T; None for the longest example's bucket.
      multiple: of which that bucket is a multiple.

    Raises:
      ValueError: as in ``pack_examples``.
    """
    if not examples:
        raise ValueError("a batch needs at least one example; give more demonstrations.")
    longest = max(len(example.tokens) for example in examples)
    width = bucket_length(longest, multiple) if length is None else length
    return pack_examples([[example] for example in examples], pad_id=pad_id, length=width)


def pack_examples(
    rows: Sequence[Sequence[Example]], *, pad_id: int, length: int, num_rows: int | None = None
) -> TokenArrays:
    """Several examples a row, one after the other; every answer token of the batch weighs the same.

    A row's examples are its segments 1, 2, …, and positions restart with each of them, so that none
    sees another. What is left of a row is padding.

    Args:
      rows: the examples of each row; none for a row of padding alone.
      pad_id: what fills the rest; may be the eos id.
      length: T.
      num_rows: B; rows of padding fill the batch up to it. None: as many as there are.

    Raises:
      ValueError: a row's examples do not fit in it, there are more rows than ``num_rows``, an
        example starts with an answer token (nothing predicts a segment's first token), or no
        example has an answer.
    """
    height = len(rows) if num_rows is None else num_rows
    if len(rows) > height:
        raise ValueError(f"{len(rows)} rows do not fit in a batch of {height}; raise num_rows.")
    tokens = np.full((height, length), pad_id, np.int32)
    positions, segment_ids = np.zeros((2, height, length), np.int32)
    answers = np.zeros((height, length), bool)
    for row, examples in enumerate(rows):
        start = 0
        for segment, example in enumerate(examples, start=1):
            _check_example(example, row, length - start, length)
            here = np.s_[row, start : start + len(example.tokens)]
            tokens[here], answers[here] = example
            positions[here], segment_ids[here] = np.arange(len(example.tokens)), segment
            start += len(example.tokens)
    if not answers.any():
        raise ValueError("no example of the batch has an answer token; check the answer masks.")
    weights = (answers / answers.sum()).astype(np.float32)
    return TokenArrays(tokens, positions, segment_ids, loss_weights=weights)


def _check_example(example: Example, row: int, room: int, length: int) -> None:
    n = len(example.tokens)
    if n > room:
        taken = f", {length - room} of them taken" if room < length else ""
        raise ValueError(
            f"an example of row {row} has {n} tokens; raise the length (now {length}{taken}) or "
            "leave it out."
        )
    if example.answer_mask[:1].any():
        raise ValueError(f"an example of row {row} starts with an answer token; give it a prompt.")


def example_batches(
    examples: Sequence[Example],
    *,
    batch_size: int,
    num_batches: int,
    seed: int,
    pad_id: int,
    multiple: int = 32,
) -> Iterator[TokenArrays]:
    """Shuffled supervised batches, all of one shape, under the same rule as ``PromptIterator``.

    Raises:
      ValueError: the batch is larger than the number of examples.
    """
    if not 0 < batch_size <= len(examples):
        raise ValueError(
            f"a batch of {batch_size} examples cannot be drawn from {len(examples)}; lower the "
            "batch size or give more examples."
        )
    length = bucket_length(max(len(example.tokens) for example in examples), multiple)
    per_epoch = len(examples) // batch_size
    for step in range(num_batches):
        epoch, batch = divmod(step, per_epoch)
        order = epoch_order(seed, epoch, len(examples))
        rows = order[batch * batch_size : (batch + 1) * batch_size]
        yield pad_examples([examples[i] for i in rows], pad_id=pad_id, length=length)
