import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrlhf.data.batching import bucket_length, example_batches, pack_examples, pad_examples
from jaxrlhf.data.chat import Example
from jaxrlhf.losses import token_weights
from jaxrlhf.types import TokenBatch


def _example(prompt, answer, start=1):
    n = prompt + answer
    return Example(np.arange(start, start + n, dtype=np.int32), np.arange(n) >= prompt)


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES.filter(lambda s: any(a for _, a in s)), pad_id=st.integers(0, 3))
def test_padding_and_weights(sizes, pad_id):
    """Whatever the pad id is, and where it occurs among the tokens."""
    examples = [_example(p, a) for p, a in sizes]
    batch = pad_examples(examples, pad_id=pad_id, multiple=8)
    width = bucket_length(max(p + a for p, a in sizes), 8)
    assert {x.shape for x in batch} == {(len(sizes), width)}
    assert [x.dtype for x in batch] == [np.int32, np.int32, np.int32, np.float32]
    for row, (example, (p, a)) in enumerate(zip(examples, sizes, strict=True)):
        n = p + a
        assert batch.tokens[row, :n].tolist() == example.tokens.tolist()
        assert set(batch.tokens[row, n:].tolist()) <= {pad_id}
        assert batch.positions[row].tolist() == [*range(n), *[0] * (width - n)]
        assert batch.segment_ids[row].tolist() == [1] * n + [0] * (width - n)
        assert (batch.loss_weights[row] > 0).tolist() == [p <= t < n for t in range(width)]
    np.testing.assert_allclose(batch.loss_weights.sum(dtype=np.float64), 1, atol=1e-6)


def test_the_weights_are_those_of_the_losses():
    batch = pad_examples([_example(2, 3), _example(1, 1)], pad_id=0, multiple=4)
    ours = token_weights(jnp.asarray(batch.loss_weights > 0), mode="token_mean")
    np.testing.assert_allclose(batch.loss_weights, ours, rtol=1e-6)
    assert TokenBatch(*batch).segment_ids is batch.segment_ids  # the same order of fields


@pytest.mark.parametrize(("length", "bucket"), [(1, 8), (8, 8), (9, 16)])
def test_buckets(length, bucket):
    assert bucket_length(length, 8) == bucket


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "at least one example"),
        (
            [_example(1, 2), _example(3, 6)],
            "example of row 1 has 9 tokens; raise the length .now 8. or",
        ),
        ([_example(1, 2), _example(0, 2)], "an example of row 1 starts with an answer token"),
        ([_example(3, 0)], "no example of the batch has an answer token"),
    ],
)
def test_examples_that_cannot_be_trained_on(examples, message):
    with pytest.raises(ValueError, match=message):
        pad_examples(examples, pad_id=0, length=8)


def test_batches_have_one_shape_and_use_every_example():
    examples = [_example(1, 1 + i, start=100 * i) for i in range(7)]
    batches = list(
        example_batches(examples, batch_size=3, num_batches=4, seed=0, pad_id=0, multiple=4)
    )
    assert {b.tokens.shape for b in batches} == {(3, 8)}
    firsts = [(b.tokens[:, 0] // 100).tolist() for b in batches]
    assert len(set(firsts[0] + firsts[1])) == 6  # an epoch of two full batches
    assert firsts[:2] != firsts[2:]
    again = example_batches(examples, batch_size=3, num_batches=4, seed=0, pad_id=0, multiple=4)
    assert all((a.tokens == b.tokens).all() for a, b in zip(batches, again, strict=True))
    with pytest.raises(ValueError, match="batch of 8 examples cannot be drawn from 7"):
        next(example_batches(examples, batch_size=8, num_batches=1, seed=0, pad_id=0))


def test_rows_that_do_not_hold_their_examples():
    pair = [_example(1, 2), _example(2, 4)]
    assert pack_examples([pair], pad_id=0, length=9).segment_ids.tolist() == [[1] * 3 + [2] * 6]
    with pytest.raises(ValueError, match=r"row 0 has 6 tokens; raise the length .now 8, 3 of them"):
        pack_examples([pair], pad_id=0, length=8)
    with pytest.raises(ValueError, match="2 rows do not fit in a batch of 1"):
        pack_examples([pair, pair], pad_id=0, length=9, num_rows=1)
