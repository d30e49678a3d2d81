"""Policy losses per token beside PPO's, entropy bonus, and the penalty of overlong answers.

All return unreduced per-token losses for `token_weights`. Losses of a sequence return the loss of
its sequence at each of its tokens, so that ``seq_mean_token_mean`` gives the mean over sequences.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.kl import log_ratio_between
from jaxrlhf.losses.masked import as_float, check_shapes, zero_outside
from jaxrlhf.losses.ppo import clipped_surrogate
from jaxrlhf.losses.sequences import sequence_mean, sequence_sum

Scalar = float | jax.Array


def _check(log_probs: jax.Array, old_log_probs: jax.Array, advantages: jax.Array) -> None:
    check_shapes({"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages})


def reinforce(
    log_probs: jax.Array, advantages: jax.Array, *, mask: jax.Array | None = None
) -> jax.Array:
    """Policy gradient without a ratio: -A log_probs.

    Args:
      log_probs: float[..., T], of the policy that is trained, in nats.
      advantages: float[..., T]; not differentiated.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32; infinite where an unmasked log-prob is, with a finite
      gradient, as in all losses that are multiples of log_probs. Multiply by `importance_weights`
      when the sampler was another policy.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: Williams 1992. GPG (arXiv:2504.02546; verl's ``gpg``) is this loss with advantages
    of ``scale="nonzero_scores"``.
    """
    check_shapes({"log_probs": log_probs, "advantages": advantages})
    return -lax.stop_gradient(zero_outside(mask, advantages)) * zero_outside(mask, log_probs)


def gspo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    level: Literal["mean", "sum"] = "mean",
    per_token_gradient: bool = False,
    clip_low: Scalar | None = 3e-4,
    clip_high: Scalar | None = 4e-4,
    log_ratio_clip: Scalar | None = 20.0,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Clipped surrogate of a ratio of whole sequences.

    s = exp(clip(mean over the sequence of log_probs - old_log_probs, +-log_ratio_clip));
    loss_t = max(-A_t s, -A_t clip(s, 1 - clip_low, 1 + clip_high)).

    Args:
      log_probs: float[..., T], of the policy that is trained, in nats.
      old_log_probs: float[..., T], before the update; not differentiated.
      advantages: float[..., T], as a rule equal over a sequence; not differentiated.
      mask: bool[..., T], True on action tokens.
      level: ``mean``, the length-normalised ratio of GSPO, or ``sum``, the plain ratio of the
        sequences' probabilities (the RLOO trainer's).
      per_token_gradient: GSPO-token: each token's loss is differentiated through its own log-prob.
        The same gradient of a sequence mean when advantages are equal over the sequence.
      clip_low: how far the ratio may fall below 1; None removes the bound. May be traced.
      clip_high: how far the ratio may rise above 1; None removes the bound. May be traced.
      log_ratio_clip: bound of the sequence's log-ratio before exp; None for none.
      segment_ids: i32[..., T] of packed rows: each run of equal ids is a sequence of its own.

    Returns:
      float[..., T] in at least float32, 0 outside the mask.

    Raises:
      ValueError: unknown level; shapes that do not fit.
      TypeError: the mask is not boolean.

    References: arXiv:2507.18071. verl bounds the mean log-ratio by 10 from above and
    differentiates per token; TRL and OpenRLHF have no bound and differentiate the mean.
    """
    if level not in ("mean", "sum"):
        raise ValueError(f"level is {level!r}: choose 'mean' or 'sum'.")
    _check(log_probs, old_log_probs, advantages)
    reduce = sequence_mean if level == "mean" else sequence_sum
    token_log_ratio = log_ratio_between(log_probs, old_log_probs, clip=None, mask=mask)
    log_ratio = reduce(token_log_ratio, mask, segment_ids)
    if per_token_gradient:
        own = zero_outside(mask, log_probs)
        own = jnp.where(jnp.isfinite(own), own, 0)  # -inf less itself is NaN
        log_ratio = lax.stop_gradient(log_ratio) + (own - lax.stop_gradient(own))
    return clipped_surrogate(
        log_ratio,
        jnp.zeros_like(log_ratio),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        log_ratio_clip=log_ratio_clip,
        mask=mask,
    )


def gmpo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: Scalar = 0.4,
    clip_high: Scalar = 0.4,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Geometric mean of the clipped ratios of a sequence.

    With x_t = log_probs - old_log_probs and c_t = clip(x_t, -clip_low, clip_high), each token takes
    the more pessimistic, l_t = min(x_t, c_t) where A > 0 and max(x_t, c_t) where A < 0;
    loss = -A exp(mean_t l_t), A the sequence's mean advantage.

    Args:
      log_probs: float[..., T], of the policy that is trained, in nats.
      old_log_probs: float[..., T], before the update; not differentiated.
      advantages: float[..., T]; not differentiated.
      mask: bool[..., T], True on action tokens.
      clip_low: bound of the log-ratio below, in nats, may be traced.
      clip_high: bound of the log-ratio above, in nats, may be traced.
      segment_ids: i32[..., T] of packed rows: each run of equal ids is a sequence of its own.

    Returns:
      float[..., T] in at least float32: the loss of its sequence at each action token.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: arXiv:2507.20673. verl's ``geo_mean`` and TRL's GMPO divide by all rows, empty ones
    too.
    """
    _check(log_probs, old_log_probs, advantages)
    advantages = lax.stop_gradient(zero_outside(mask, advantages))
    log_ratio = log_ratio_between(log_probs, old_log_probs, clip=None, mask=mask)
    clipped = jnp.clip(log_ratio, -clip_low, clip_high)
    # Selected, not multiplied by a sign: 0 x inf is NaN.
    up = jnp.where(advantages > 0, jnp.minimum(log_ratio, clipped), 0)
    pessimistic = jnp.where(advantages < 0, jnp.maximum(log_ratio, clipped), up)
    mean = sequence_mean(pessimistic, mask, segment_ids)
    # A negative advantage leaves the mean unbounded above.
    ratio = jnp.exp(jnp.clip(mean, -20.0, 20.0))
    return zero_outside(mask, -sequence_mean(advantages, mask, segment_ids) * ratio)


def cispo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: Scalar | None = None,
    clip_high: Scalar | None = 0.2,
    log_ratio_clip: Scalar | None = 20.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Policy gradient weighted by a clipped ratio, so that no token loses its gradient.

    loss = -A w log_probs with w = clip(exp(log_probs - old_log_probs), 1 - clip_low, 1 + clip_high)
    not differentiated.

    Args:
      log_probs: float[..., T], of the policy that is trained, in nats.
      old_log_probs: float[..., T], before the update; not differentiated.
      advantages: float[..., T]; not differentiated.
      clip_low: how far the weight may fall below 1; None removes the bound. May be traced.
      clip_high: how far the weight may rise above 1; None removes the bound. May be traced.
      log_ratio_clip: bound of the log-ratio before exp; None for none.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: MiniMax-M1, arXiv:2506.13585. verl bounds both sides by 0.2; TRL's ``epsilon_high``
    is the upper bound itself (ours + 1) and it has no lower one.
    """
    _check(log_probs, old_log_probs, advantages)
    low = None if clip_low is None else 1 - clip_low
    high = None if clip_high is None else 1 + clip_high
    log_ratio = log_ratio_between(log_probs, old_log_probs, clip=log_ratio_clip, mask=mask)
    weights = jnp.clip(jnp.exp(log_ratio), low, high)
    return lax.stop_gradient(weights) * reinforce(log_probs, advantages, mask=mask)


def sapo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    *,
    temperature_pos: Scalar = 1.0,
    temperature_neg: Scalar = 1.05,
    log_ratio_clip: Scalar | None = 20.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """A soft gate in place of the clip: -A (4 / tau) sigmoid(tau (rho - 1)).

    tau is ``temperature_pos`` where A > 0, else ``temperature_neg``.

    Args:
      log_probs: float[..., T], of the policy that is trained, in nats.
      old_log_probs: float[..., T], before the update; not differentiated.
      advantages: float[..., T]; not differentiated.
      temperature_pos: steepness for positive advantages, above 0, may be traced.
      temperature_neg: steepness for the others, above 0, may be traced.
      log_ratio_clip: bound of the log-ratio before exp; None for none.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    References: arXiv:2511.20347. verl and TRL agree, with bounds of the log-ratio of 20 and none.
    """
    _check(log_probs, old_log_probs, advantages)
    advantages = lax.stop_gradient(zero_outside(mask, advantages))
    log_ratio = log_ratio_between(log_probs, old_log_probs, clip=log_ratio_clip, mask=mask)
    tau = jnp.where(advantages > 0, temperature_pos, temperature_neg).astype(log_ratio.dtype)
    return -advantages * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1)) * 4 / tau


def binary_divergence(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    *,
    kind: Literal["tv", "kl"] = "tv",
    mask: jax.Array | None = None,
) -> jax.Array:
    """Divergence of two policies on "this token or any other", not differentiated.

    With p = exp(log_probs) and q = exp(old_log_probs): tv is |p - q|; kl is
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)).

    Args:
      log_probs: float[..., T].
      old_log_probs: float[..., T].
      kind: ``tv`` or ``kl``.
      mask: bool[..., T]; 0 outside it. None: no mask.

    Returns:
      float[..., T] in at least float32, at least 0 and finite.

    Raises:
      ValueError: unknown kind; shapes that do not fit.
      TypeError: the mask is not boolean.

    References: DPPO, arXiv:2602.04879.
    """
    if kind not in ("tv", "kl"):
        raise ValueError(f"kind is {kind!r}: choose 'tv' or 'kl'.")
    check_shapes({"log_probs": log_probs, "old_log_probs": old_log_probs})
    # Outside the mask both are log-probs of 0, whose divergence is 0.
    new = lax.stop_gradient(zero_outside(mask, log_probs))
    old = lax.stop_gradient(zero_outside(mask, old_log_probs))
    p, q = jnp.exp(new), jnp.exp(old)
    if kind == "tv":
        return jnp.abs(p - q)
    tiny = jnp.finfo(p.dtype).tiny
    rest = jnp.log(jnp.maximum(1 - q, tiny)) - jnp.log(jnp.maximum(1 - p, tiny))
    this = jnp.where(q > 0, q * (old - jnp.maximum(new, jnp.log(tiny))), 0)
    return jnp.maximum(this + (1 - q) * rest, 0)


def dppo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    limit_low: Scalar = 0.2,
    limit_high: Scalar = 0.2,
    max_ratio: Scalar = 20.0,
    log_ratio_clip: Scalar | None = 20.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Policy gradient that stops where a token's *divergence*, not its ratio, has gone too far.

    loss = -A min(rho, max_ratio) keep log_probs, the weights not differentiated; keep is 0 where
    the policy has moved the way A points (up for A > 0, else down) by more than the limit of
    `binary_divergence`: ``limit_high`` up, ``limit_low`` down.

    Args:
      log_probs: float[..., T], of the policy that is trained, in nats.
      old_log_probs: float[..., T], before the update; not differentiated.
      advantages: float[..., T]; not differentiated.
      divergence: ``tv`` or ``kl``.
      limit_low: how far a probability may fall, in units of the divergence, may be traced.
      limit_high: how far it may rise, may be traced.
      max_ratio: bound of the weight, may be traced.
      log_ratio_clip: bound of the log-ratio before exp; None for none.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32.

    Raises:
      ValueError, TypeError: see `binary_divergence`.

    References: arXiv:2602.04879; verl's ``dppo_tv`` and ``dppo_kl``.
    """
    _check(log_probs, old_log_probs, advantages)
    distance = binary_divergence(log_probs, old_log_probs, kind=divergence, mask=mask)
    log_ratio = log_ratio_between(log_probs, old_log_probs, clip=log_ratio_clip, mask=mask)
    log_ratio = lax.stop_gradient(log_ratio)
    too_high = (log_ratio > 0) & (distance > limit_high)
    too_low = (log_ratio < 0) & (distance > limit_low)
    dropped = jnp.where(zero_outside(mask, advantages) > 0, too_high, too_low)
    weights = jnp.where(dropped, 0, jnp.minimum(jnp.exp(log_ratio), max_ratio))
    return weights * reinforce(log_probs, advantages, mask=mask)


def entropy_bonus(entropy: jax.Array, *, coef: Scalar, mask: jax.Array | None = None) -> jax.Array:
    """Loss that keeps the policy's entropy up: -coef entropy.

    Args:
      entropy: float[..., T], of the full softmax, in nats.
      coef: scalar, may be traced.
      mask: bool[..., T]; outside it the input is ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32, to be added to a policy loss.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    return -coef * zero_outside(mask, entropy)


def overlong_penalty(
    lengths: jax.Array,
    *,
    max_length: Scalar,
    buffer: Scalar,
    factor: Scalar = 1.0,
    capped: bool = True,
) -> jax.Array:
    """Addend of a score that grows as an answer nears its length limit (DAPO's soft buffer).

    -factor clip((length - (max_length - buffer)) / buffer, 0, 1).

    Args:
      lengths: [...], action tokens of each row.
      max_length: tokens at which the penalty is full, may be traced.
      buffer: tokens over which it grows, above 0, may be traced.
      factor: the full penalty, in units of the score, may be traced.
      capped: False lets it grow on beyond ``max_length``.

    Returns:
      float[...] in at least float32, at most 0.

    References: arXiv:2503.14476, section 3.4. verl goes on growing; OpenRLHF is capped; TRL is
    capped with factor 1.
    """
    excess = (as_float(lengths) - (max_length - buffer)) / buffer
    return -factor * jnp.clip(excess, 0, 1 if capped else None)
