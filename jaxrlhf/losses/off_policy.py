"""Correction between the policy that sampled and the policy that is trained: weights and masks.

Sampler and trainer never agree exactly (other kernels, other precision, older weights). All results
are detached and log-ratios are bounded before exp. They multiply a per-token loss, or take tokens
out of its mask *before* `token_weights` are made.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.kl import kl_estimate, log_ratio_between
from jaxrlhf.losses.masked import (
    as_float,
    check_segments,
    check_shapes,
    token_weights,
    weighted_sum,
    zero_outside,
)
from jaxrlhf.losses.sequences import sequence_max, sequence_mean, sequence_sum

Scalar = float | jax.Array
Level = Literal["token", "sequence", "sequence_mean"]
Statistic = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]

_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "sequence_sum": sequence_sum,
    "sequence_mean": sequence_mean,
    "sequence_max": sequence_max,
}


def importance_weights(
    log_probs: jax.Array,
    sampler_log_probs: jax.Array,
    mask: jax.Array,
    *,
    level: Level = "token",
    log_ratio_clip: Scalar | None = 20.0,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Ratio of the trainer's probability to the sampler's, of tokens or of whole sequences.

    w = exp(clip(x, +-log_ratio_clip)) with x = log_probs - sampler_log_probs of the token, its sum
    over the sequence (``sequence``), or its mean (``sequence_mean``, a geometric mean of ratios).

    Args:
      log_probs: float[..., T], by the trainer before the update, in nats.
      sampler_log_probs: float[..., T], of the distribution that was sampled.
      mask: bool[..., T], True on action tokens.
      level: see above.
      log_ratio_clip: bound of x before exp; None for none.
      segment_ids: i32[..., T] of packed rows: each run of equal ids is a sequence of its own.

    Returns:
      float[..., T] in at least float32, 0 outside the mask; unbounded weights, to be given to
      `truncate_weights` or `mask_weights`. Not differentiated.

    Raises:
      ValueError: unknown level; shapes that do not fit.
      TypeError: the mask is not boolean.

    References: truncated importance sampling for samplers, https://fengyao.notion.site/off-policy-rl.
    verl bounds the log-ratio by 20; TRL and OpenRLHF do not. OpenRLHF's ``seq`` is
    ``sequence_mean``.
    """
    check_shapes({"log_probs": log_probs, "sampler_log_probs": sampler_log_probs})
    log_ratio = log_ratio_between(log_probs, sampler_log_probs, clip=None, mask=mask)
    if level not in ("token", "sequence", "sequence_mean"):
        raise ValueError(f"level {level!r} is unknown: choose token, sequence or sequence_mean.")
    check_segments(segment_ids, mask.shape)
    if level != "token":
        reduce = sequence_sum if level == "sequence" else sequence_mean
        log_ratio = reduce(log_ratio, mask, segment_ids)
    if log_ratio_clip is not None:
        log_ratio = jnp.clip(log_ratio, -log_ratio_clip, log_ratio_clip)
    return lax.stop_gradient(zero_outside(mask, jnp.exp(log_ratio)))


def truncate_weights(
    weights: jax.Array, mask: jax.Array, *, low: Scalar | None = None, high: Scalar | None = 2.0
) -> jax.Array:
    """Bound importance weights: clip(w, low, high).

    Args:
      weights: float[..., T], from `importance_weights`.
      mask: bool[..., T].
      low: lower bound; None for none. May be traced.
      high: upper bound; None for none. May be traced.

    Returns:
      float[..., T], 0 outside the mask. Not differentiated.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: TIS; verl and TRL bound above alone.
    """
    return lax.stop_gradient(zero_outside(mask, jnp.clip(as_float(weights), low, high)))


def mask_weights(
    weights: jax.Array, mask: jax.Array, *, low: Scalar | None = 0.5, high: Scalar | None = 5.0
) -> jax.Array:
    """Drop importance weights that are out of bounds instead of bounding them (IcePop).

    w where low <= w <= high, else 0.

    Args:
      weights: float[..., T], from `importance_weights`.
      mask: bool[..., T].
      low: lower bound; None for none. May be traced.
      high: upper bound; None for none. May be traced.

    Returns:
      float[..., T], 0 outside the mask and where a weight is dropped; the tokens keep their place
      in `token_weights` of the same mask. Not differentiated.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: IcePop, arXiv:2510.18855.
    """
    weights = zero_outside(mask, weights)
    return lax.stop_gradient(jnp.where(_within(weights, low, high), weights, 0))


def _within(x: jax.Array, low: Scalar | None, high: Scalar | None) -> jax.Array:
    inside = jnp.ones(x.shape, jnp.bool_)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return inside


def normalize_weights(
    weights: jax.Array,
    mask: jax.Array,
    *,
    level: Literal["token", "sequence"] = "token",
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Scale importance weights to mean 1 over the whole batch (self-normalised).

    It is a statistic of a batch: compute it on the whole optimiser batch, before micro-batches.

    Args:
      weights: float[..., T].
      mask: bool[..., T].
      level: ``token``: the mean over tokens; ``sequence``: the mean over sequences of their means.
      segment_ids: i32[..., T] of packed rows: each run of equal ids is a sequence of its own.

    Returns:
      float[..., T], 0 outside the mask; all 0 stay 0. Not differentiated.

    Raises:
      ValueError: unknown level; shapes that do not fit.
      TypeError: the mask is not boolean.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level is {level!r}: choose 'token' or 'sequence'.")
    weights = zero_outside(mask, weights)
    mode = "token_mean" if level == "token" else "seq_mean_token_mean"
    mean = weighted_sum(weights, token_weights(mask, segment_ids, mode=mode))
    return lax.stop_gradient(weights / jnp.where(mean > 0, mean, 1))


def keep_within(
    values: jax.Array,
    mask: jax.Array,
    *,
    low: Scalar | None = None,
    high: Scalar | None = None,
    statistic: Statistic = "token",
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Keep the tokens, or whole sequences, on which a statistic lies in a band.

    Args:
      values: float[..., T], a divergence per token: see `rejection_mask`, `binary_divergence`.
      mask: bool[..., T].
      low: lower bound of the statistic; None for none. May be traced.
      high: upper bound; None for none. May be traced.
      statistic: of the token itself, or the sum, mean or maximum over its sequence.
      segment_ids: i32[..., T] of packed rows: each run of equal ids is a sequence of its own.

    Returns:
      bool[..., T], a subset of ``mask``. Make `token_weights` of it to leave rejected tokens out
      of the count (verl), or of the old mask and set their losses to 0 (TRL, OpenRLHF).

    Raises:
      ValueError: unknown statistic; shapes that do not fit.
      TypeError: the mask is not boolean.
    """
    if statistic not in ("token", *_REDUCTIONS):
        options = ", ".join(("token", *_REDUCTIONS))
        raise ValueError(f"statistic {statistic!r} is unknown: choose one of {options}.")
    check_segments(segment_ids, mask.shape)
    values = lax.stop_gradient(zero_outside(mask, values))
    if statistic != "token":
        values = _REDUCTIONS[statistic](values, mask, segment_ids)
    return mask & _within(values, low, high)


def rejection_mask(
    log_probs: jax.Array,
    sampler_log_probs: jax.Array,
    mask: jax.Array,
    *,
    kind: Literal["k1", "k2", "k3"] = "k3",
    statistic: Statistic = "token",
    low: Scalar | None = None,
    high: Scalar | None = None,
    log_ratio_clip: Scalar | None = 20.0,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Reject tokens or sequences on which sampler and trainer are too far apart.

    The statistic is of an estimate of KL(sampler, trainer) per token, in nats, with
    x = sampler_log_probs - log_probs: k1 = x; k2 = x^2 / 2; k3 = e^-x - 1 + x.

    Args:
      log_probs: float[..., T], by the trainer before the update, in nats.
      sampler_log_probs: float[..., T], of the distribution that was sampled.
      mask: bool[..., T], True on action tokens.
      kind: the estimate; k1 has a sign and wants two bounds, k2 and k3 an upper one.
      statistic: see `keep_within`, as all that follow.
      low: lower bound in nats, or None.
      high: upper bound in nats, or None.
      log_ratio_clip: bound of x; None for none.
      segment_ids: of packed rows, or None.

    Returns:
      bool[..., T], a subset of ``mask``.

    Raises:
      ValueError: unknown kind or statistic; shapes that do not fit.
      TypeError: the mask is not boolean.

    References: verl's ``rollout_rs``, whose thresholds of k1 are ratios: give their logarithms.
    TRL's off-policy mask is k1 by ``sequence_mean`` on rows of negative advantage.
    """
    if kind not in ("k1", "k2", "k3"):
        raise ValueError(f"kind is {kind!r}: choose 'k1', 'k2' or 'k3'.")
    check_shapes({"log_probs": log_probs, "sampler_log_probs": sampler_log_probs})
    estimate = kl_estimate(sampler_log_probs, log_probs, kind=kind, clip=log_ratio_clip, mask=mask)
    return keep_within(
        estimate, mask, low=low, high=high, statistic=statistic, segment_ids=segment_ids
    )


def effective_sample_size(weights: jax.Array, mask: jax.Array) -> jax.Array:
    """Fraction of the tokens that the weights are worth: (sum w)^2 / (N sum w^2).

    Args:
      weights: float[..., T].
      mask: bool[..., T].

    Returns:
      A scalar in [0, 1]: 1 for equal weights, 1 / N when one token has all the weight, 0 when no
      token has any. Not differentiated.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: Kish 1965. verl logs it over weights divided by their mean, which is the same.
    """
    weights = lax.stop_gradient(zero_outside(mask, weights))
    # Scaled by the largest, so that squares of large weights stay finite.
    weights = weights / jnp.where(jnp.max(weights) > 0, jnp.max(weights), 1)
    squares = jnp.sum(jnp.square(weights)) * jnp.sum(mask)
    return jnp.square(jnp.sum(weights)) / jnp.where(squares > 0, squares, 1)
