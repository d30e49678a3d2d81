"""The clipped surrogate, the clipped value loss and their metrics."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses

GOLDEN_DUAL = [(5.0, -1.0, 3.0), (0.5, -1.0, 0.8), (1.5, 1.0, -1.2), (0.5, 1.0, -0.5)]


@functools.cache
def surrogate_and_gradient(**options):
    def total(log_probs, old_log_probs, advantages):
        per_token = losses.clipped_surrogate(log_probs, old_log_probs, advantages, **options)
        return jnp.sum(per_token), per_token

    return jax.jit(jax.grad(total, has_aux=True))


def test_dual_clip_golden():
    ratios, advantages, golden = np.array(GOLDEN_DUAL).T
    with jax.enable_x64(True):
        gradient, found = surrogate_and_gradient(dual_clip=3.0)(
            np.log(ratios), np.zeros(4), advantages
        )
        gradient, found = np.asarray(gradient), np.asarray(found)
    np.testing.assert_allclose(found, golden, rtol=1e-12)
    np.testing.assert_allclose(gradient, [0, 0, 0, -0.5], atol=1e-12)  # only the last is not bound


def surrogate_oracle(ratio, advantage, low, high, dual):
    below = 0.0 if low is None else 1 - low
    above = math.inf if high is None else 1 + high
    loss = max(-advantage * ratio, -advantage * min(max(ratio, below), above))
    return min(loss, -advantage * dual) if dual is not None and advantage < 0 else loss


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(
    ("low", "high"), [(0.2, 0.2), (0.1, 0.3), (0.0, 0.0), (None, 0.3), (None, None)]
)
def test_surrogate_equals_the_formula(rng, low, high, dual):
    ratios = np.concatenate([rng.uniform(0.3, 2, 30), rng.uniform(2, 9, 10)])
    advantages = rng.normal(size=40)
    expected = [surrogate_oracle(*x, low, high, dual) for x in zip(ratios, advantages, strict=True)]
    options = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    with jax.enable_x64(True):
        _, found = surrogate_and_gradient(**options)(np.log(ratios), np.zeros(40), advantages)
        found = np.asarray(found)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_on_policy_gradient_is_the_policy_gradient(rng):
    advantages = rng.normal(size=12)
    with jax.enable_x64(True):
        log_probs = rng.normal(size=12)
        gradient, loss = surrogate_and_gradient()(log_probs, log_probs, advantages)
        np.testing.assert_allclose(gradient, -advantages, rtol=1e-12)
        np.testing.assert_allclose(loss, -advantages, rtol=1e-12)


@pytest.mark.parametrize("log_ratio", [1e3, -1e3, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["new", "old"])
def test_extreme_log_ratios_are_finite(log_ratio, side):
    extreme, zeros = np.full(2, log_ratio, np.float32), np.zeros(2, np.float32)
    arguments = (extreme, zeros) if side == "new" else (zeros, -extreme)
    for options in ({}, {"dual_clip": 3.0}, {"clip_low": None, "clip_high": None}):
        gradient, loss = surrogate_and_gradient(**options)(*arguments, np.array([1, -1], "f4"))
        assert np.isfinite(loss).all()
        np.testing.assert_array_equal(gradient, zeros)


def test_the_log_ratio_bound_can_be_moved_and_removed():
    log_probs = np.array([2.0], np.float32)
    options = {"clip_low": None, "clip_high": None}
    run = functools.partial(surrogate_and_gradient, **options)
    for bound, ratio, alive in ((1.0, math.e, False), (None, math.e**2, True)):
        gradient, loss = run(log_ratio_clip=bound)(log_probs, np.zeros(1), np.ones(1))
        np.testing.assert_allclose(loss, [-ratio], rtol=1e-6)
        assert (gradient[0] != 0) == alive


@pytest.mark.parametrize("value_clip", [0.2, 0.0, None])
def test_value_loss_equals_the_formula_in_value_and_gradient(rng, value_clip):
    values, old_values, returns = rng.normal(size=(3, 50))
    clipped = np.clip(values, old_values - (value_clip or 0), old_values + (value_clip or 0))
    plain, bounded = (values - returns) ** 2, (clipped - returns) ** 2
    inside = values == clipped
    if value_clip is None:
        expected, slope = 0.5 * plain, values - returns
    else:
        expected = 0.5 * np.maximum(plain, bounded)
        slope = np.where((plain >= bounded) | inside, values - returns, 0)

    @functools.partial(jax.grad, has_aux=True)
    def run(values):
        per_token = losses.clipped_value_loss(
            values, jnp.asarray(old_values), jnp.asarray(returns), value_clip=value_clip
        )
        return jnp.sum(per_token), per_token

    with jax.enable_x64(True):
        gradient, found = run(jnp.asarray(values))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_allclose(gradient, slope, rtol=1e-12, atol=1e-12)


def test_value_loss_without_old_values():
    values, returns = jnp.array([1.0, 2.0]), jnp.array([0.0, 0.0])
    found = losses.clipped_value_loss(values, None, returns, value_clip=None)
    np.testing.assert_array_equal(found, [0.5, 2])
    with pytest.raises(ValueError, match="old_values"):
        losses.clipped_value_loss(values, None, returns)


def test_clip_fractions_tell_the_sides_apart():
    log_probs = np.log(np.array([0.7, 0.7, 1.4, 1.4, 1.0, 1.25], np.float32))
    advantages = np.array([1, -1, 1, -1, 1, 1], np.float32)
    mask = np.array([1, 1, 1, 1, 1, 0], bool)
    names = ("clip_low", "clip_high")
    fractions = functools.partial(
        jax.jit(losses.clip_fractions, static_argnames=names), log_probs, np.zeros(6), advantages
    )
    low, high = fractions(clip_low=0.2, clip_high=0.2, mask=mask)
    np.testing.assert_array_equal(low, [0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(high, [0, 0, 1, 0, 0, 0])
    wide = fractions(clip_low=0.4, clip_high=0.3)
    np.testing.assert_array_equal(wide.low, np.zeros(6))
    np.testing.assert_array_equal(wide.high, [0, 0, 1, 0, 0, 0])
    none = fractions(clip_low=None, clip_high=None)
    assert not np.any(none)
    gradient, _ = surrogate_and_gradient()(log_probs, np.zeros(6), advantages)
    flat = fractions(clip_low=0.2, clip_high=0.2)
    np.testing.assert_array_equal(gradient == 0, np.sum(flat, axis=0) > 0)


def test_approx_kl_is_the_kl_from_the_sampling_policy(rng):
    """By enumeration: both estimates, averaged over the old policy, give KL(old, new)."""
    logits = rng.normal(size=(2, 9))
    old, new = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    with jax.enable_x64(True):
        k1, k3 = map(np.asarray, jax.jit(losses.approx_kl)(new, old))
    for estimate in (k1, k3):
        np.testing.assert_allclose(
            np.sum(np.exp(old) * estimate), np.sum(np.exp(old) * (old - new)), rtol=1e-12
        )
    assert (k1 < 0).any()
    assert (k3 >= 0).all()


def test_explained_variance():
    returns = np.array([1.0, 2, 3, 4, np.nan])
    mask = np.array([1, 1, 1, 1, 0], bool)
    explained_variance = jax.jit(losses.explained_variance)

    def of(values) -> float:
        return float(explained_variance(np.array(values), returns, mask))

    assert of([1.0, 2, 3, 4, 7]) == 1
    assert of([5.0, 5, 5, 5, np.inf]) == 0
    np.testing.assert_allclose(of([4.0, 3, 2, 1, 0]), -3, rtol=1e-6)
    np.testing.assert_allclose(of([2.0, 3, 4, 5, 0]), 1, rtol=1e-6)  # a bias is not counted
    assert explained_variance(returns, np.full(5, 0.3), mask) == 0
    assert explained_variance(returns, returns, np.zeros(5, bool)) == 0
