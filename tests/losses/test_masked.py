"""Masked reductions, whitening and token weights against float64 oracles on subsets."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses
from jaxrlhf.losses.masked import AGGREGATIONS

GOLDEN_LOSSES = np.array([[1.0, 2, 3, 4], [10, np.nan, np.inf, -np.inf]])
GOLDEN_MASK = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
GOLDEN = {
    "token_mean": 4.0,
    "token_sum": 20.0,
    "seq_mean_token_sum": 10.0,
    "seq_mean_token_mean": 6.25,
    "seq_mean_token_sum_norm": 2.5,
}


def norm_of(mode: str) -> float | None:
    return 4.0 if mode == "seq_mean_token_sum_norm" else None


def with_garbage(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The same numbers with NaN, inf and huge values wherever the mask is off."""
    garbage = itertools.cycle([np.nan, np.inf, -np.inf, 1e30])
    return np.where(mask, x, np.array([next(garbage) for _ in range(x.size)]).reshape(x.shape))


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1)])
def test_reductions_equal_numpy_on_the_subset(rng, axis):
    mask = rng.random((5, 7)) < 0.5
    mask[1], mask[:, 2], mask[2], mask[2, 4] = False, False, False, True
    x = with_garbage(rng.normal(size=mask.shape) + 3, mask)
    rows = {None: [0], (0, 1): [0], 0: range(7)}.get(axis, range(5))

    def subset(i: int) -> np.ndarray:
        if axis in (None, (0, 1)):
            return x[mask]
        return x[mask[:, i], i] if axis == 0 else x[i, mask[i]]

    def expect(function) -> list[float]:
        return [function(subset(i)) for i in rows]

    @jax.jit
    def reductions(x, mask):
        return {
            "sum": losses.masked_sum(x, mask, axis),
            "mean": losses.masked_mean(x, mask, axis),
            "var": losses.masked_var(x, mask, axis),
            "var0": losses.masked_var(x, mask, axis, ddof=0),
        }

    with jax.enable_x64(True):
        found = reductions(x, mask)
    oracles = {
        "sum": np.sum,
        "mean": lambda s: s.mean() if s.size else 0.0,
        "var": lambda s: s.var(ddof=1) if s.size > 1 else 0.0,
        "var0": lambda s: s.var() if s.size else 0.0,
    }
    for name, oracle in oracles.items():
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(
            np.ravel(found[name]), expect(oracle), rtol=1e-12, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.float32])
def test_results_are_at_least_float32(dtype):
    x = jnp.full((1, 4096), 3, dtype)
    mask = jnp.ones(x.shape, bool)
    mean = jax.jit(losses.masked_mean)(x, mask)
    assert mean.dtype == jnp.float32
    assert mean == 3  # a bfloat16 sum of 4096 threes stops at 1024
    assert jax.eval_shape(losses.whiten, x, mask).dtype == jnp.float32
    assert jax.eval_shape(losses.weighted_sum, x, x).dtype == jnp.float32


@pytest.mark.parametrize("options", [{}, {"ddof": 0}, {"floor": 1e-8}, {"shift_mean": False}])
def test_whiten_equals_the_formula(rng, options):
    mask = rng.random((3, 9)) < 0.6
    x = with_garbage(rng.normal(2, 5, size=mask.shape), mask)
    values = x[mask]
    variance = values.var(ddof=options.get("ddof", 1))
    scale = (
        np.sqrt(max(variance, options["floor"])) if "floor" in options else np.sqrt(variance + 1e-8)
    )
    expected = (values - values.mean()) / scale
    if not options.get("shift_mean", True):
        expected = expected + values.mean()
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(functools.partial(losses.whiten, **options))(x, mask))
    np.testing.assert_allclose(found[mask], expected, rtol=1e-12, atol=1e-12)
    assert (found[~mask] == 0).all()


def test_whiten_floor_and_addend_differ_where_the_variance_is_small():
    x = jnp.array([1.0, 1.0 + 1e-4])
    mask = jnp.ones(2, bool)
    floored = losses.whiten(x, mask, ddof=0, floor=1e-4)
    added = losses.whiten(x, mask, ddof=0, eps=1e-4)
    with_floor = 5e-5 / np.sqrt(1e-4)
    np.testing.assert_allclose(floored, [-with_floor, with_floor], rtol=1e-2)
    np.testing.assert_allclose(added, np.array([-1, 1]) * 5e-5 / np.sqrt(1e-4 + 2.5e-9), rtol=1e-2)


whiten = jax.jit(losses.whiten)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    value=st.floats(-(2.0**100), 2.0**100, width=32),
    bits=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_whiten_of_equal_elements_is_exactly_zero(value, bits):
    x = np.full(8, value, np.float32)
    whitened = np.asarray(whiten(x, np.array(bits)))
    assert (whitened == 0).all()
    assert losses.masked_var(x, np.array(bits)) == 0


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(value=st.floats(-(2.0**20), 2.0**20, width=32), index=st.integers(0, 7))
def test_whiten_of_one_element_is_zero(value, index):
    x, mask = np.full(8, np.nan, np.float32), np.zeros(8, bool)
    x[index], mask[index] = value, True
    assert (np.asarray(whiten(x, mask)) == 0).all()


def test_masks_must_be_boolean_and_of_the_same_shape():
    x = jnp.ones((2, 3))
    with pytest.raises(TypeError, match="boolean"):
        losses.masked_sum(x, jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="boolean"):
        losses.token_weights(jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        losses.masked_mean(x, jnp.ones((2, 1), bool))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_golden(mode):
    arguments = jnp.asarray(GOLDEN_LOSSES, jnp.float32), jnp.asarray(GOLDEN_MASK)
    total = jax.jit(functools.partial(losses.aggregate, mode=mode, norm=norm_of(mode)))
    assert total(*arguments) == GOLDEN[mode]
    value, gradient = jax.value_and_grad(total)(arguments[0], np.zeros_like(GOLDEN_MASK))
    assert value == 0
    assert (gradient == 0).all()


def test_aggregation_errors():
    mask = jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="seq_mean_token_mean"):  # the list of what there is
        losses.token_weights(mask, mode="batch_mean")
    with pytest.raises(ValueError, match="norm"):
        losses.token_weights(mask, mode="seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="norm"):
        losses.token_weights(mask, mode="token_mean", norm=4.0)
    with pytest.raises(ValueError, match="segment_ids"):
        losses.token_weights(mask, jnp.ones((2, 4), jnp.int32), mode="seq_mean_token_sum")
    with pytest.raises(ValueError, match="weights"):
        losses.weighted_sum(jnp.ones((2, 3)), jnp.ones((2, 1)))


def aggregate_oracle(sequences: list[np.ndarray], mode: str, norm: float | None) -> float:
    """The definition on a list of each sequence's unmasked losses."""
    sequences = [s for s in sequences if s.size]
    everything = np.concatenate([*sequences, np.zeros(0)])
    if not everything.size:
        return 0.0
    return {
        "token_mean": everything.mean(),
        "token_sum": everything.sum(),
        "seq_mean_token_sum": np.mean([s.sum() for s in sequences]),
        "seq_mean_token_mean": np.mean([s.mean() for s in sequences]),
        "seq_mean_token_sum_norm": np.mean([s.sum() / (norm or 1) for s in sequences]),
    }[mode]


def pack(sequences: list[tuple[np.ndarray, np.ndarray]], rows: int, length: int, rng):
    """First-fit packing of (losses, mask) sequences; garbage and id 0 in the rest."""
    losses_, masks = np.full((rows, length), np.nan), np.zeros((rows, length), bool)
    segments, used, count = np.zeros((rows, length), np.int32), [0] * rows, [0] * rows
    for values, mask in sequences:
        row = next(r for r in rng.permutation(rows) if used[r] + len(values) <= length)
        span = slice(used[row], used[row] + len(values))
        count[row] += 1
        losses_[row, span], masks[row, span], segments[row, span] = values, mask, count[row]
        used[row] = span.stop
    return losses_, masks, segments


@functools.cache
def weights_and_totals(mode: str):
    """One compiled function of a mode: packed weights, unpacked weights, and the loss in 4 ways."""
    options = {"mode": mode, "norm": norm_of(mode)}

    def compute(packed, mask, segments, single, single_mask, order):
        weights = losses.token_weights(mask, segments, **options)
        alone = losses.token_weights(single_mask, **options)
        shuffled = packed[order].reshape(3, -1, packed.shape[1])
        micro_batches = jax.vmap(losses.weighted_sum)(
            shuffled, weights[order].reshape(shuffled.shape)
        )
        columns = [losses.weighted_sum(packed[:, c], weights[:, c]) for c in (COLUMNS_A, COLUMNS_B)]
        totals = (
            losses.aggregate(packed, mask, segment_ids=segments, **options),
            losses.aggregate(single, single_mask, **options),
            jnp.sum(micro_batches),
            columns[0] + columns[1],
        )
        return weights, alone, totals

    return jax.jit(compute)


COLUMNS_A, COLUMNS_B = slice(0, 7), slice(7, 12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_weights_do_not_see_packing_filler_rows_or_the_split(mode, seed):
    rng = np.random.default_rng(seed)
    sequences = [(rng.normal(size=n), rng.random(n) < 0.6) for n in rng.integers(1, 7, size=6)]
    expected = aggregate_oracle([x[m] for x, m in sequences], mode, norm_of(mode))
    packed, mask, segments = pack(sequences, rows=9, length=12, rng=rng)  # at least 3 filler rows
    single, single_mask = np.full((9, 12), np.nan), np.zeros((9, 12), bool)
    for row, (values, marks) in enumerate(sequences):
        single[row, : len(values)], single_mask[row, : len(values)] = values, marks
    with jax.enable_x64(True):
        results = weights_and_totals(mode)(
            packed, mask, segments, single, single_mask, rng.permutation(9)
        )
        weights, alone, totals = jax.tree.map(np.asarray, results)
    assert weights.dtype == np.float64
    assert (weights[~mask] == 0).all()
    np.testing.assert_allclose(np.sort(weights[mask]), np.sort(alone[single_mask]), rtol=1e-12)
    np.testing.assert_allclose(totals, expected, rtol=1e-12, atol=1e-12)


def test_weights_count_neighbouring_runs_apart_and_take_any_leading_axes():
    segments = jnp.array([[1, 1, 2, 2, 2, 1]])  # the last token is a sequence of its own
    mask = jnp.array([[1, 1, 1, 0, 1, 1]], bool)
    weigh = jax.jit(lambda *x: losses.token_weights(*x, mode="seq_mean_token_mean"))
    weights = weigh(mask, segments)
    np.testing.assert_allclose(weights, np.array([[1, 1, 1, 0, 1, 2]]) / 6, rtol=1e-6)
    np.testing.assert_array_equal(weigh(mask[None], segments[None])[0], weights)
    np.testing.assert_array_equal(weigh(mask[0], segments[0]), weights[0])


def test_weighted_sum_looks_at_weighted_tokens_only():
    def total(x, weights):
        return losses.weighted_sum(x, weights)

    x, weights = jnp.array([2.0, jnp.nan, jnp.inf, 3.0]), jnp.array([0.5, 0, 0, 2])
    value, (by_x, by_weights) = jax.value_and_grad(total, (0, 1))(x, weights)
    assert value == 7
    np.testing.assert_array_equal(by_x, weights)
    np.testing.assert_array_equal(by_weights, np.zeros(4))


last_action, one_past_end = jax.jit(losses.last_action), jax.jit(losses.one_past_end)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), packed=st.booleans())
def test_last_action_and_one_past_end_equal_a_loop(seed, packed):
    rng = np.random.default_rng(seed)
    mask = rng.random((4, 8)) < rng.random((4, 1))
    segments = np.cumsum(rng.random((4, 8)) < 0.3, axis=1) if packed else np.zeros((4, 8), int)
    last, past = np.zeros_like(mask), np.zeros_like(mask)
    for row, ids in enumerate(segments):
        for segment in set(ids):
            set_bits = np.flatnonzero(mask[row] & (ids == segment))
            last[row, set_bits[-1:]] = True
            past[row, np.minimum(set_bits[-1:] + 1, 7)] = True
    found = last_action(mask, segments) if packed else last_action(mask)
    np.testing.assert_array_equal(found, last)
    if not packed:
        np.testing.assert_array_equal(one_past_end(mask), past)


def test_garbage_is_replaced_not_multiplied_away():
    """Without XLA's help, which may turn a product with a mask into a selection."""
    with jax.disable_jit():
        x, mask = jnp.array([jnp.nan, 1.0, jnp.inf]), jnp.array([False, True, False])
        assert losses.masked_sum(x, mask) == 1
        assert losses.weighted_sum(x, mask.astype(jnp.float32)) == 1
