"""Metrics of sampled answers and of importance ratios; nothing here is differentiated."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.kl import log_ratio_between
from jaxrlhf.losses.masked import as_float, check_shapes, masked_mean, masked_var, zero_outside

Scalar = float | jax.Array


class RatioExtremes(NamedTuple):
    """The smallest and the largest importance ratio of a batch, float32 scalars."""

    lowest: jax.Array
    highest: jax.Array


def ratio_extremes(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    mask: jax.Array,
    *,
    log_ratio_clip: Scalar | None = 20.0,
) -> RatioExtremes:
    """Range of exp(log_probs - old_log_probs) over the unmasked tokens.

    Args:
      log_probs: float[..., T], of the policy that is trained.
      old_log_probs: float[..., T], of the policy that sampled.
      mask: bool[..., T], True on action tokens.
      log_ratio_clip: bound of the log-ratio before exp, may be traced; None for none.

    Returns:
      RatioExtremes; both 1 where nothing is unmasked. Combine micro-batches by min and max.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    TRL logs the mean and variance of the ratio instead (``val/ratio``).
    """
    check_shapes({"log_probs": log_probs, "old_log_probs": old_log_probs})
    log_ratio = log_ratio_between(log_probs, old_log_probs, clip=log_ratio_clip, mask=mask)
    some = jnp.any(mask)
    lowest = jnp.min(log_ratio, where=mask, initial=jnp.inf)
    highest = jnp.max(log_ratio, where=mask, initial=-jnp.inf)
    extremes = (jnp.exp(jnp.where(some, x, 0)) for x in (lowest, highest))
    return RatioExtremes(*(lax.stop_gradient(x) for x in extremes))


def pass_at_k(successes: jax.Array, samples: jax.Array, *, k: int) -> jax.Array:
    """Unbiased estimate of the chance that one of k answers is right, per prompt.

    1 - C(n - c, k) / C(n, k) = 1 - prod_{i<k} (n - c - i) / (n - i), for c right ones among n.

    Args:
      successes: i32[...], right answers c of each prompt.
      samples: i32[...], scored answers n of each prompt.
      k: answers that one may try, static.

    Returns:
      float32[...] in [0, 1]; NaN for a prompt with fewer than k answers, of which no unbiased
      estimate exists: leave it out (see `mean_interval`). Not differentiated.

    Raises:
      ValueError: k is below 1, or the shapes differ.

    References: arXiv:2107.03374, equation 1. verl draws k answers with replacement, which is biased
    and random; TRL and OpenRLHF have none.
    """
    if k < 1:
        raise ValueError(f"k is {k}: give at least 1.")
    successes, samples = as_float(successes), as_float(samples)
    if successes.shape != samples.shape:
        raise ValueError(f"samples has shape {samples.shape}: give it {successes.shape}.")

    def factor(i: jax.Array, failing: jax.Array) -> jax.Array:
        left = jnp.maximum(samples - successes - i, 0)
        return failing * left / jnp.maximum(samples - i, 1)

    successes, samples = lax.stop_gradient((successes, samples))
    failing = lax.fori_loop(0, k, factor, jnp.ones_like(samples))
    return jnp.where(samples >= k, 1 - failing, jnp.nan)


def best_at_k(scores: jax.Array, mask: jax.Array | None = None, *, k: int) -> jax.Array:
    """Unbiased estimate of the expected best score of k answers, per prompt.

    sum_i s_(i) C(i - 1, k - 1) / C(n, k) over the sorted scores s_(1) <= ... <= s_(n): the mean of
    the maximum over all subsets of k of the n answers. Of scores 0 and 1 it is `pass_at_k`; the
    expected worst is -best_at_k(-scores).

    Args:
      scores: float[..., N], of the answers to each prompt.
      mask: bool[..., N], False for answers that are not there or could not be scored. None: all.
      k: answers of which the best counts, static.

    Returns:
      float[...] in at least float32; NaN for a prompt with fewer than k answers. Not
      differentiated.

    Raises:
      ValueError: k is below 1, or the mask's shape differs.
      TypeError: the mask is not boolean.

    verl's ``best@N`` draws answers with replacement, which is biased and random.
    """
    if k < 1:
        raise ValueError(f"k is {k}: give at least 1.")
    scores = lax.stop_gradient(zero_outside(mask, scores))
    mask = jnp.ones(scores.shape, jnp.bool_) if mask is None else mask
    count = jnp.sum(mask, axis=-1, keepdims=True, dtype=scores.dtype)
    # Absent answers first: the others' ranks are then counted from the end.
    ordered = jnp.sort(jnp.where(mask, scores, -jnp.inf), axis=-1)
    width = scores.shape[-1]
    position = lax.broadcasted_iota(scores.dtype, scores.shape, scores.ndim - 1)
    rank = position + 1 - (width - count)

    def factor(j: jax.Array, weight: jax.Array) -> jax.Array:
        return weight * jnp.maximum(rank - j, 0) / jnp.maximum(count - j, 1)

    first = jnp.broadcast_to(k / jnp.maximum(count, 1), scores.shape)
    weights = lax.fori_loop(1, k, factor, first)
    best = jnp.sum(jnp.where(rank >= k, weights * ordered, 0), axis=-1)
    return jnp.where(count[..., 0] >= k, best, jnp.nan)


class Interval(NamedTuple):
    """A mean and its confidence interval, float32 scalars."""

    mean: jax.Array
    low: jax.Array
    high: jax.Array


def mean_interval(
    values: jax.Array, mask: jax.Array | None = None, *, confidence: Scalar = 0.95
) -> Interval:
    """Mean over prompts with its confidence interval: mean -+ z sqrt(var / N).

    Args:
      values: float[...], one a prompt, for instance from `pass_at_k`: prompts are the independent
        units, not the answers to them.
      mask: bool[...], True for prompts that count, for instance ``~jnp.isnan(values)``. None: all.
      confidence: two-sided level in (0, 1), may be traced; z is the normal quantile, so N should be
        some dozens.

    Returns:
      Interval; of width 0 where all values are equal, 0 everywhere when nothing counts. It is not
      cut to the range of the values. Not differentiated.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    values = lax.stop_gradient(as_float(values))
    mask = jnp.ones(values.shape, jnp.bool_) if mask is None else mask
    mean = masked_mean(values, mask)
    count = jnp.maximum(jnp.sum(mask, dtype=values.dtype), 1)
    level = lax.stop_gradient(jnp.asarray(confidence, values.dtype))
    z = jax.scipy.special.ndtri((1 + level) / 2)
    half = z * jnp.sqrt(masked_var(values, mask) / count)
    return Interval(mean, mean - half, mean + half)


def majority_vote(
    answers: jax.Array, scores: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Score of the answer that most samples of a prompt gave.

    Args:
      answers: i32[..., N], equal numbers for equal answers of the same prompt (an index into the
        host's list of distinct answers).
      scores: float[..., N], of each sample; that of the first sample with the winning answer is
        returned.
      mask: bool[..., N], False for samples without an answer: they do not vote. None: all vote.

    Returns:
      float[...] in at least float32; 0 for a prompt without votes. A tie goes to the answer that
      was seen first.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: the mask is not boolean.

    References: arXiv:2203.11171 (self-consistency). verl's ``maj@N`` is the mean of this over
    random subsets.
    """
    if answers.shape != scores.shape:
        raise ValueError(f"scores has shape {scores.shape}: give it {answers.shape}.")
    scores = lax.stop_gradient(zero_outside(mask, scores))
    mask = jnp.ones(scores.shape, jnp.bool_) if mask is None else mask

    def count_votes_of(i: jax.Array, votes: jax.Array) -> jax.Array:
        one = lax.dynamic_slice_in_dim(answers, i, 1, axis=-1)
        votes_here = lax.dynamic_slice_in_dim(mask, i, 1, axis=-1)
        return votes + (votes_here & (answers == one))

    votes = lax.fori_loop(0, answers.shape[-1], count_votes_of, jnp.zeros_like(answers))
    winner = jnp.argmax(jnp.where(mask, votes, -1), axis=-1)
    return jnp.take_along_axis(scores, winner[..., None], axis=-1)[..., 0]
