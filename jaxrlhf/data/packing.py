"""Which examples share a row, and batches of such rows whose position can be saved.

An epoch is one pass over all examples: every one is in exactly one row of one batch, whole. Which
examples meet, and the order of the rows, is drawn from (seed, epoch). Batches have one shape; the
rows are spread over them evenly, and rows of padding fill each up.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrlhf.data.batching import TokenArrays, pack_examples
from jaxrlhf.data.chat import Example
from jaxrlhf.data.prompts import check_position, checksum, epoch_order


def first_fit_decreasing(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Items into rows: the longest first, each into the first row that has room for it.

    Args:
      lengths: of the items; those of equal length keep their order.
      room: what a row holds.

    Returns:
      The items' indices, row by row. How many rows there are depends on the lengths alone, and not
      on their order.

    Raises:
      ValueError: an item is longer than a row.
    """
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) and sizes.max() > room:
        raise ValueError(
            f"an example of {sizes.max()} tokens does not fit in a row of {room}; filter or cut it."
        )
    free = np.full(len(sizes), room, np.int64)
    rows: list[list[int]] = []
    for item in np.argsort(-sizes, kind="stable").tolist():
        row = int(np.argmax(free[: len(rows) + 1] >= sizes[item]))
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        free[row] -= sizes[item]
    return rows


def packed_rows(lengths: Sequence[int], room: int, packing: bool = True) -> list[list[int]]:
    """``first_fit_decreasing``, or without packing one item a row."""
    return first_fit_decreasing(lengths, room) if packing else [[i] for i in range(len(lengths))]


class PackedBatch(NamedTuple):
    """One optimiser batch, the examples in it (in the order of the rows), and their epoch."""

    arrays: TokenArrays
    example_ids: list[int]
    epoch: int


def pass_over(
    examples: Sequence[Example],
    rows: Sequence[Sequence[int]],
    batch_size: int,
    *,
    length: int,
    pad_id: int,
) -> Iterator[PackedBatch]:
    """All rows once, in their order, in batches of one shape; the last is filled with padding.

    Args:
      examples: what the rows are made of.
      rows: ids of examples, from ``packed_rows``.
      batch_size, length, pad_id: as in ``PackedIterator``.
    """
    shape = {"length": length, "num_rows": batch_size, "pad_id": pad_id}
    for start in range(0, len(rows), batch_size):
        yield _batch(examples, rows[start : start + batch_size], **shape)


def _batch(
    examples: Sequence[Example],
    rows: Sequence[Sequence[int]],
    *,
    length: int,
    num_rows: int,
    pad_id: int,
    epoch: int = 0,
) -> PackedBatch:
    arrays = pack_examples(
        [[examples[i] for i in row] for row in rows],
        pad_id=pad_id,
        length=length,
        num_rows=num_rows,
    )
    return PackedBatch(arrays, [i for row in rows for i in row], epoch)


class PackedIterator:
    """Endless batches of examples; the number of batches drawn is the whole position.

    Args:
      examples: each of at most ``length`` tokens.
      batch_size: rows in a batch.
      length: tokens in a row.
      seed: of the shuffles; not negative.
      pad_id: what fills the rows.
      packing: False for one example a row.

    Raises:
      ValueError: there are no examples, one is too long, or the seed is negative.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        batch_size: int,
        length: int,
        seed: int,
        pad_id: int,
        packing: bool = True,
    ):
        if not examples or seed < 0:
            raise ValueError("give at least one example, and a seed of at least 0.")
        self._examples, self._lengths = examples, [len(e.tokens) for e in examples]
        self._batch_size, self._length, self._seed = batch_size, length, seed
        self._pad_id, self._packing = pad_id, packing
        self._drawn = 0
        self._checksum = checksum(example.tokens.tolist() for example in examples)
        self._epoch, self._batches = 0, self._plan(0)
        self.rows_per_epoch = sum(map(len, self._batches))
        self.batches_per_epoch = len(self._batches)

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        epoch, index = divmod(self._drawn, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._plan(epoch)
        self._drawn += 1
        return _batch(
            self._examples,
            self._batches[index],
            pad_id=self._pad_id,
            length=self._length,
            num_rows=self._batch_size,
            epoch=epoch,
        )

    def next(self) -> PackedBatch:
        """The next batch; the same as ``next(iterator)``."""
        return self.__next__()

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        """The epoch's batches, each a list of rows of example ids."""
        order = epoch_order(self._seed, epoch, len(self._examples)).tolist()
        packed = packed_rows([self._lengths[i] for i in order], self._length, self._packing)
        # Shuffled, or the first batch would have the longest.
        shuffle = np.random.default_rng([self._seed, epoch, 1]).permutation(len(packed))
        rows = [[order[i] for i in packed[row]] for row in shuffle]
        batches = np.array_split(np.arange(len(rows)), -(-len(rows) // self._batch_size))
        return [[rows[i] for i in batch] for batch in batches]

    def state(self) -> dict[str, int]:
        """The position, and what it is a position in."""
        return {
            "batches_drawn": self._drawn,
            "batch_size": self._batch_size,
            "length": self._length,
            "packing": int(self._packing),
            "seed": self._seed,
            "examples": len(self._examples),
            "checksum": self._checksum,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues where ``state`` was taken.

        Raises:
          ValueError: a key is missing, or something else than the position differs.
        """
        check_position(self.state(), state)
        self._drawn = int(state["batches_drawn"])
