"""PPO's clipped losses per token, and the metrics that belong to them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.kl import kl_estimate, log_ratio_between
from jaxrlhf.losses.masked import check_shapes, masked_var, zero_outside

Scalar = float | jax.Array


def clipped_surrogate(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: Scalar | None = 0.2,
    clip_high: Scalar | None = 0.2,
    dual_clip: Scalar | None = None,
    log_ratio_clip: Scalar | None = 20.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """PPO's clipped policy loss per token.

    rho = exp(clip(log_probs - old_log_probs, -log_ratio_clip, log_ratio_clip));
    loss = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), and with ``dual_clip`` c
    min(loss, -A c) where A < 0.

    Args:
      log_probs: float[..., T], of the policy that is trained, in nats.
      old_log_probs: float[..., T], before the update; not differentiated.
      advantages: float[..., T]; not differentiated.
      clip_low: how far the ratio may fall below 1; None removes the bound. May be traced, as all
        that follow.
      clip_high: how far the ratio may rise above 1; None removes the bound.
      dual_clip: bound c > 1 of the ratio for negative advantages; None for none.
      log_ratio_clip: bound of the log-ratio before exp; None for none.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32, to be summed with `token_weights`.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: PPO arXiv:1707.06347; two bounds arXiv:2503.14476 (DAPO); dual clip
    arXiv:1912.09729. verl has the dual clip on with c = 3; verl and OpenRLHF have the same
    log-ratio bound, TRL has none.
    """
    check_shapes({"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages})
    advantages = lax.stop_gradient(zero_outside(mask, advantages))
    ratios = jnp.exp(log_ratio_between(log_probs, old_log_probs, clip=log_ratio_clip, mask=mask))
    loss = -advantages * ratios
    if clip_low is not None or clip_high is not None:
        loss = jnp.maximum(loss, -advantages * _clip_around_one(ratios, clip_low, clip_high))
    if dual_clip is not None:
        bounded = jnp.minimum(loss, -advantages * dual_clip)
        loss = jnp.where(advantages < 0, bounded, loss)
    return loss


def _clip_around_one(ratios: jax.Array, low: Scalar | None, high: Scalar | None) -> jax.Array:
    return jnp.clip(ratios, None if low is None else 1 - low, None if high is None else 1 + high)


def clipped_value_loss(
    values: jax.Array,
    old_values: jax.Array | None,
    returns: jax.Array,
    *,
    value_clip: Scalar | None = 0.2,
    mask: jax.Array | None = None,
) -> jax.Array:
    """PPO's clipped value loss per token.

    1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2).

    Args:
      values: float[..., T], of the critic that is trained.
      old_values: float[..., T], before the update; not differentiated. May be None when
        ``value_clip`` is.
      returns: float[..., T]; not differentiated.
      value_clip: how far a value may move, in units of reward, may be traced; None: 1/2 (V - R)^2.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32, to be summed with `token_weights`.

    Raises:
      ValueError: ``value_clip`` without ``old_values``; shapes that differ.
      TypeError: the mask is not boolean.

    References: arXiv:1707.06347, arXiv:2005.12729. The same 1/2 stands in verl, TRL and OpenRLHF.
    """
    check_shapes({"values": values, "returns": returns})
    values = zero_outside(mask, values)
    returns = lax.stop_gradient(zero_outside(mask, returns))
    loss = jnp.square(values - returns)
    if value_clip is not None:
        if old_values is None:
            raise ValueError("value_clip needs old_values: pass them, or value_clip=None.")
        check_shapes({"values": values, "old_values": old_values})
        old_values = lax.stop_gradient(zero_outside(mask, old_values))
        clipped = jnp.clip(values, old_values - value_clip, old_values + value_clip)
        loss = jnp.maximum(loss, jnp.square(clipped - returns))
    return 0.5 * loss


class ClipFractions(NamedTuple):
    """Which tokens the surrogate clips, float32[..., T] of 0 and 1: average them by weights.

    Attributes:
      low: A < 0 and ratio < 1 - clip_low.
      high: A > 0 and ratio > 1 + clip_high.
    """

    low: jax.Array
    high: jax.Array


def clip_fractions(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: Scalar | None = 0.2,
    clip_high: Scalar | None = 0.2,
    log_ratio_clip: Scalar | None = 20.0,
    mask: jax.Array | None = None,
) -> ClipFractions:
    """Mark the tokens on which `clipped_surrogate` is flat because of either bound.

    Args:
      log_probs: float[..., T].
      old_log_probs: float[..., T].
      advantages: float[..., T].
      clip_low: as in `clipped_surrogate`; None: never clipped on that side.
      clip_high: as in `clipped_surrogate`; None: never clipped on that side.
      log_ratio_clip: as in `clipped_surrogate`.
      mask: bool[..., T]; 0 outside it.

    Returns:
      ClipFractions; nothing is differentiated.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    verl's ``pg_clipfrac`` and TRL's ``clipfrac`` are the sum of both sides; verl's
    ``pg_clipfrac_lower`` is about the dual clip instead.
    """
    check_shapes({"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages})
    log_ratio = log_ratio_between(log_probs, old_log_probs, clip=log_ratio_clip, mask=mask)
    ratios = lax.stop_gradient(jnp.exp(log_ratio))
    advantages = lax.stop_gradient(zero_outside(mask, advantages))
    never = jnp.zeros(ratios.shape, jnp.bool_)
    low = never if clip_low is None else (advantages < 0) & (ratios < 1 - clip_low)
    high = never if clip_high is None else (advantages > 0) & (ratios > 1 + clip_high)
    return ClipFractions(low.astype(ratios.dtype), high.astype(ratios.dtype))


class ApproxKL(NamedTuple):
    """Two estimates of KL(old policy, policy) per token, float32[..., T], in nats."""

    k1: jax.Array
    k3: jax.Array


def approx_kl(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    *,
    log_ratio_clip: Scalar | None = 20.0,
    mask: jax.Array | None = None,
) -> ApproxKL:
    """Estimate how far an update has moved the policy: k1 = old - new; k3 = e^(new - old) - 1 + k1.

    Args:
      log_probs: float[..., T], of the policy that is trained.
      old_log_probs: float[..., T], of the policy that sampled.
      log_ratio_clip: bound of the log-ratio; None for none.
      mask: bool[..., T]; 0 outside it.

    Returns:
      ApproxKL; nothing is differentiated. A mean of k1 may be negative, one of k3 may not.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: http://joschu.net/blog/kl-approx.html. verl's ``ppo_kl`` is k1; TRL's ``approxkl``
    is k2.
    """
    check_shapes({"log_probs": log_probs, "old_log_probs": old_log_probs})
    estimates = (
        kl_estimate(old_log_probs, log_probs, kind=kind, clip=log_ratio_clip, mask=mask)
        for kind in ("k1", "k3")
    )
    return ApproxKL(*(lax.stop_gradient(x) for x in estimates))


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """How much of the returns' variance the critic explains: 1 - var(R - V) / var(R).

    Args:
      values: float[..., T].
      returns: float[..., T].
      mask: bool[..., T], True on action tokens.

    Returns:
      A scalar, at most 1; 0 where the returns do not vary. Not differentiated.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    check_shapes({"values": values, "returns": returns})
    values, returns = zero_outside(mask, values), zero_outside(mask, returns)
    variance = masked_var(returns, mask)
    unexplained = masked_var(returns - values, mask)
    ratio = unexplained / jnp.where(variance > 0, variance, 1)
    return lax.stop_gradient(jnp.where(variance > 0, 1 - ratio, 0))
