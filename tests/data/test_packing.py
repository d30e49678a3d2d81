import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrlhf.data.chat import Example
from jaxrlhf.data.packing import PackedIterator, first_fit_decreasing


def _examples(lengths):
    """Example i is made of tokens i * 100, i * 100 + 1, …; its later half is trained on."""
    return [
        Example(np.arange(n, dtype=np.int32) + 100 * i, np.arange(n) >= (n + 1) // 2)
        for i, n in enumerate(lengths)
    ]


def _iterator(lengths, **changes):
    options = {"batch_size": 2, "length": 12, "seed": 0, "pad_id": 0} | changes
    return PackedIterator(_examples(lengths), **options)


LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, batch_size=st.integers(1, 5), packing=st.booleans(), seed=st.integers(0, 3))
def test_an_epoch_has_every_example_once_and_whole(lengths, batch_size, packing, seed):
    data = _iterator(lengths, batch_size=batch_size, packing=packing, seed=seed)
    for epoch in range(2):
        seen, rows_with = Counter(), []
        for batch in itertools.islice(data, data.batches_per_epoch):
            tokens, positions, segments, weights = batch.arrays
            assert {x.shape for x in batch.arrays} == {(batch_size, 12)}
            assert batch.epoch == epoch
            np.testing.assert_allclose(weights.sum(dtype=np.float64), 1, atol=1e-6)
            assert len(set(weights[weights > 0].tolist())) == 1  # the mean over trained tokens
            rows_with.append(int((segments > 0).any(axis=1).sum()))
            found = []
            for row in range(batch_size):
                for segment in range(1, segments[row].max() + 1):
                    (here,) = np.nonzero(segments[row] == segment)
                    example = int(tokens[row, here[0]]) // 100
                    n = lengths[example]
                    assert here.tolist() == list(range(here[0], here[0] + n))
                    assert tokens[row, here].tolist() == [100 * example + i for i in range(n)]
                    assert positions[row, here].tolist() == list(range(n))
                    trained = weights[row, here] > 0
                    assert trained.tolist() == [i >= (n + 1) // 2 for i in range(n)]
                    found.append(example)
                used = (segments[row] > 0).sum()
                assert (segments[row, :used] > 0).all()
                assert not weights[row, used:].any()
                assert not positions[row, used:].any()
            assert found == batch.example_ids
            seen.update(found)
        assert seen == Counter(range(len(lengths)))  # nothing lost, nothing doubled
        assert sum(rows_with) == data.rows_per_epoch
        assert max(rows_with) - min(rows_with) <= 1  # no epoch ends in a small batch


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS)
def test_first_fit_decreasing(lengths):
    """Against the rule in its plainest form; the number of rows does not depend on the order."""
    rows: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[item] <= 12:
                row.append(item)
                break
        else:
            rows.append([item])
    assert first_fit_decreasing(lengths, 12) == rows
    assert len(first_fit_decreasing(sorted(lengths), 12)) == len(rows)
    assert 2 * sum(lengths) > 12 * (len(rows) - 1)  # at most one row is less than half full


def test_an_example_that_no_row_holds():
    with pytest.raises(ValueError, match="an example of 9 tokens does not fit in a row of 8"):
        first_fit_decreasing([3, 9], 8)
    with pytest.raises(ValueError, match="at least one example"):
        _iterator([])


def test_epochs_differ_and_the_position_can_be_saved():
    lengths = [2, 3, 4, 5, 6, 7, 8, 9] * 3
    data, again = _iterator(lengths), _iterator(lengths)
    per_epoch = data.batches_per_epoch
    ids = [batch.example_ids for batch in itertools.islice(data, 2 * per_epoch)]
    assert ids[:per_epoch] != ids[per_epoch:]
    assert _iterator(lengths, seed=1).__next__().example_ids != ids[0]
    again.restore({**_iterator(lengths).state(), "batches_drawn": per_epoch - 1})
    rest = [batch.example_ids for batch in itertools.islice(again, per_epoch + 1)]
    assert rest == ids[per_epoch - 1 :]
    assert again.state() == data.state()
    for changes in ({"batch_size": 3}, {"length": 13}, {"packing": False}, {"seed": 1}):
        with pytest.raises(ValueError, match=f"of other data: {next(iter(changes))} was"):
            _iterator(lengths, **changes).restore(data.state())
    with pytest.raises(ValueError, match="of other data: checksum was"):
        _iterator(lengths[::-1]).restore(data.state())
