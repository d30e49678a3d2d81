"""Metrics of answers against enumeration, confidence intervals, votes, extremes of ratios."""

import collections
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses

WIDTH = 6


def mean_best_of_subsets(scores, k: int) -> float:
    """The definition: every subset of k answers is as likely as any other."""
    return float(np.mean([max(subset) for subset in itertools.combinations(scores, k)]))


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_best_and_pass_at_k_equal_the_mean_over_all_subsets(rng, k):
    """Also of incomplete groups: an absent answer's score is never looked at."""
    scores = rng.normal(size=(8, WIDTH)).round(1)
    mask = rng.random((8, WIDTH)) < 0.7
    mask[0], mask[1] = True, False
    right = scores > 0.3
    counts = mask.sum(-1)
    with jax.enable_x64(True):
        best = jax.jit(losses.best_at_k, static_argnames="k")(
            np.where(mask, scores, np.nan), mask, k=k
        )
        passed = losses.pass_at_k((right & mask).sum(-1, dtype=float), counts.astype(float), k=k)
        passed_as_best = losses.best_at_k(right.astype(float), mask, k=k)
    best, passed = np.asarray(best), np.asarray(passed)
    enough = counts >= k
    assert enough.any()
    for i in np.flatnonzero(enough):
        expected = mean_best_of_subsets(scores[i, mask[i]], k)
        np.testing.assert_allclose(best[i], expected, rtol=1e-12, atol=1e-14)
        expected = mean_best_of_subsets(right[i, mask[i]].astype(float), k)
        np.testing.assert_allclose(passed[i], expected, rtol=1e-12, atol=1e-14)
    assert np.isnan(best[~enough]).all()
    assert np.isnan(passed[~enough]).all()
    np.testing.assert_allclose(passed_as_best, passed, rtol=1e-12, atol=1e-14)
    assert (passed[enough] <= 1).all()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_pass_at_k_is_unbiased_over_all_outcomes(k):
    """Expectation over all right-wrong patterns of five answers: 1 - (1 - p)^k exactly."""
    p = 0.3
    patterns = np.array(list(itertools.product([0, 1], repeat=5)))
    chance = np.prod(np.where(patterns == 1, p, 1 - p), axis=-1)
    with jax.enable_x64(True):
        estimates = losses.pass_at_k(
            patterns.sum(-1, dtype=float), np.full(len(patterns), 5.0), k=k
        )
    np.testing.assert_allclose(np.sum(chance * np.asarray(estimates)), 1 - (1 - p) ** k, rtol=1e-12)


def test_large_k_in_float32_stays_a_probability():
    n, c = np.array([1024, 1024, 256]), np.array([1, 900, 0])
    ours = np.asarray(losses.pass_at_k(c, n, k=256))
    np.testing.assert_allclose(ours, [0.25, 1, 0], rtol=1e-4, atol=1e-6)


def test_best_at_k_is_not_differentiated_and_keeps_rows_apart(rng):
    scores = rng.normal(size=(3, WIDTH)).astype(np.float32)
    assert (jax.grad(lambda s: jnp.sum(losses.best_at_k(s, k=2)))(scores) == 0).all()
    mapped = jax.vmap(lambda s: losses.best_at_k(s, k=2))(scores)
    np.testing.assert_allclose(mapped, losses.best_at_k(scores, k=2), rtol=1e-6)
    for function in (losses.best_at_k, lambda s, k: losses.pass_at_k(s, s, k=k)):
        with pytest.raises(ValueError, match="at least 1"):
            function(scores, k=0)


def test_interval_equals_numpy_and_covers_as_often_as_it_says(rng):
    values = rng.normal(size=50)
    mask = rng.random(50) < 0.8
    kept = values[mask]
    half = 1.959963984540054 * kept.std(ddof=1) / np.sqrt(len(kept))
    with jax.enable_x64(True):
        interval = losses.mean_interval(np.where(mask, values, np.nan), mask)
        np.testing.assert_allclose(
            interval, [kept.mean(), kept.mean() - half, kept.mean() + half], rtol=1e-12
        )
    draws = (rng.random((2000, 60)) < 0.4).astype(np.float32)
    at_80 = jax.jit(jax.vmap(lambda x: losses.mean_interval(x, confidence=0.8)))(draws)
    covered = np.mean((at_80.low <= 0.4) & (at_80.high >= 0.4))
    assert abs(covered - 0.8) < 0.04  # discrete means: 0.80 is met to about 0.02
    np.testing.assert_array_equal(losses.mean_interval(jnp.ones(5)), [1, 1, 1])
    np.testing.assert_array_equal(losses.mean_interval(jnp.ones(5), jnp.zeros(5, bool)), [0] * 3)


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=WIDTH, max_size=WIDTH)
)
def test_majority_vote_equals_a_counter(votes):
    """Counter.most_common keeps the order in which answers were first seen among equals."""
    answers = np.array([answer for answer, _ in votes], np.int32)
    mask = np.array([kept for _, kept in votes])
    scores = np.arange(1.0, WIDTH + 1, dtype=np.float32)
    ours = losses.majority_vote(answers, np.where(mask, scores, np.nan), mask)
    counted = collections.Counter(answers[mask].tolist()).most_common(1)
    if not counted:
        assert ours == 0
        return
    first = next(i for i in range(WIDTH) if mask[i] and answers[i] == counted[0][0])
    assert ours == scores[first]


def test_majority_vote_by_rows_without_mask():
    answers = jnp.array([[3, 3, 5], [1, 2, 2], [0, 1, 2]])
    scores = jnp.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.5, 0.0, 0.0]])
    np.testing.assert_array_equal(losses.majority_vote(answers, scores), [1, 1, 0.5])
    np.testing.assert_array_equal(jax.vmap(losses.majority_vote)(answers, scores), [1, 1, 0.5])
    with pytest.raises(ValueError, match="scores"):
        losses.majority_vote(answers, scores[:2])


def test_ratio_extremes_look_under_no_mask():
    old = jnp.zeros((2, 3))
    new = jnp.array([[0.5, -1.0, 1e3], [jnp.nan, 0.0, -jnp.inf]])
    mask = jnp.array([[True, True, False], [False, True, False]])
    lowest, highest = losses.ratio_extremes(new, old, mask)
    np.testing.assert_allclose([lowest, highest], np.exp([-1.0, 0.5]), rtol=1e-6)
    np.testing.assert_array_equal(losses.ratio_extremes(new, old, jnp.zeros_like(mask)), [1, 1])
    bounded = losses.ratio_extremes(new, old, jnp.ones_like(mask).at[1, 0].set(False))
    np.testing.assert_allclose(bounded, np.exp([-20.0, 20.0]), rtol=1e-5)
