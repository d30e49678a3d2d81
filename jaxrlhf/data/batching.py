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
      positions: i32[B, T], from 0 in every row; 0 on padding.
      segment_ids: i32[B, T], 1 on the row's tokens, 0 on padding.
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
    """Pads examples on the right and gives every answer token of the batch the same weight.

    Args:
      examples: from ``encode_example``; at least one.
      pad_id: what fills the rest; may be the eos id.
      length: T; None for the longest example's bucket.
      multiple: of which that bucket is a multiple.

    Raises:
      ValueError: an example is longer than ``length``, or starts with an answer token (nothing
        predicts a row's first token), or no example has an answer.
    """
    if not examples:
        raise ValueError("a batch needs at least one example; give more demonstrations.")
    lengths = np.asarray([len(example.tokens) for example in examples])
    width = bucket_length(int(lengths.max()), multiple) if length is None else length
    if lengths.max() > width:
        raise ValueError(
            f"example {int(lengths.argmax())} has {int(lengths.max())} tokens; raise the length "
            f"(now {width}) or leave it out."
        )
    tokens = np.full((len(examples), width), pad_id, np.int32)
    answers = np.zeros((len(examples), width), bool)
    for row, (example, n) in enumerate(zip(examples, lengths, strict=True)):
        tokens[row, :n] = example.tokens
        answers[row, :n] = example.answer_mask
    if answers[:, 0].any():
        row = int(answers[:, 0].argmax())
        raise ValueError(f"example {row} starts with an answer token; give it a prompt.")
    if not answers.any():
        raise ValueError("no example of the batch has an answer token; check the answer masks.")
    real = np.arange(width) < lengths[:, None]
    return TokenArrays(
        tokens=tokens,
        positions=np.where(real, np.arange(width), 0).astype(np.int32),
        segment_ids=real.astype(np.int32),
        loss_weights=(answers / answers.sum()).astype(np.float32),
    )


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
