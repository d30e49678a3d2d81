"""KL estimators per token, rewards with a KL penalty, and the controllers of its coefficient."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.masked import check_rows, check_shapes, last_action, one_past_end, zero_outside

_ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * jnp.square(x),
    "k3": lambda x: jnp.expm1(-x) + x,
    # Its gradient is 0, not 1, where both policies agree.
    "abs": lambda x: x * lax.stop_gradient(jnp.sign(x)),
}
KL_KINDS: tuple[str, ...] = (*_ESTIMATORS, *(f"{kind}_st" for kind in _ESTIMATORS))


def kl_estimate(
    log_probs: jax.Array,
    ref_log_probs: jax.Array,
    *,
    kind: str = "k1",
    clip: float | jax.Array | None = 20.0,
    estimate_clip: float | jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Estimate KL(policy, reference) on each token that the policy sampled, in nats.

    With x = clip(log_probs - ref_log_probs, -clip, clip):
    k1 = x;  k2 = x^2 / 2;  k3 = e^-x - 1 + x;  abs = |x|;
    k1_st, k2_st, k3_st and abs_st have the value of k1, k2, k3 and abs and the gradient of k2
    (straight-through). ``estimate_clip`` then bounds the value: the gradient of a plain form is 0
    beyond it, that of a straight-through form stays.

    Args:
      log_probs: float[..., T], of the policy, at the temperature of sampling.
      ref_log_probs: float[..., T], of the reference at the same temperature; not differentiated.
      kind: one of the eight above.
      clip: bound of the log-ratio (may be traced); outside it the gradient is 0. None: no bound.
      estimate_clip: bound of the estimate itself, in nats (may be traced). None: no bound.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32. NaN where both log-probs are -inf: an error of the batch,
      see `finite_log_ratio_rows`.

    Raises:
      ValueError: unknown ``kind``, or shapes that differ.
      TypeError: the mask is not boolean.

    References: http://joschu.net/blog/kl-approx.html. In a *reward* use k1. In a *loss* use k3_st:
    its expected gradient is the reverse KL's, plain k3 (GRPO, arXiv:2402.03300) has the forward
    KL's, and k1's is 0. verl bounds k3's log-ratio by 20 and then k3 by 10, OpenRLHF every estimate
    by 10 (neither bounds a straight-through gradient: ``clip=None``), TRL nothing.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kind {kind!r} is unknown: choose one of {', '.join(KL_KINDS)}.")
    check_shapes({"log_probs": log_probs, "ref_log_probs": ref_log_probs})
    log_ratio = log_ratio_between(log_probs, ref_log_probs, clip=clip, mask=mask)
    estimate = _ESTIMATORS[kind.removesuffix("_st")](log_ratio)
    if estimate_clip is not None:
        estimate = jnp.clip(estimate, -estimate_clip, estimate_clip)
    if kind.endswith("_st"):
        carrier = _ESTIMATORS["k2"](log_ratio)
        estimate = lax.stop_gradient(estimate) + (carrier - lax.stop_gradient(carrier))
    return estimate


def log_ratio_between(
    log_probs: jax.Array,
    other_log_probs: jax.Array,
    *,
    clip: float | jax.Array | None = 20.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """clip(log_probs - other_log_probs, -clip, clip), 0 outside the mask; the other is stopped.

    Args:
      log_probs: float[..., T].
      other_log_probs: float[..., T]; not differentiated.
      clip: bound, may be traced; outside it the gradient is 0. None: no bound.
      mask: bool[..., T], None for no mask.

    Returns:
      float[..., T] in at least float32.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    check_shapes({"log_probs": log_probs, "other_log_probs": other_log_probs})
    other = lax.stop_gradient(zero_outside(mask, other_log_probs))
    log_ratio = zero_outside(mask, log_probs) - other
    return log_ratio if clip is None else jnp.clip(log_ratio, -clip, clip)


def finite_log_ratio_rows(
    log_probs: jax.Array, other_log_probs: jax.Array, mask: jax.Array
) -> jax.Array:
    """Tell the rows whose log-ratio is defined on every action token.

    -inf on both sides (or NaN on one) has no ratio: the token was impossible for both models, so
    the batch is wrong. Count such rows and take them out of the mask; no loss here repairs them.
    -inf on one side alone is a ratio that the losses bound, and passes.

    Args:
      log_probs: float[..., T].
      other_log_probs: float[..., T], of the reference, the old policy or the sampler.
      mask: bool[..., T], True on action tokens.

    Returns:
      bool[...]: False for a row with an unmasked NaN in log_probs - other_log_probs.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    check_shapes({"log_probs": log_probs, "other_log_probs": other_log_probs})
    log_ratio = zero_outside(mask, log_probs) - zero_outside(mask, other_log_probs)
    return ~jnp.any(jnp.isnan(log_ratio), axis=-1)


def token_rewards(
    scores: jax.Array,
    log_ratio_kl: jax.Array | None,
    mask: jax.Array,
    *,
    kl_coef: float | jax.Array | None = None,
    placement: Literal["last_action", "one_past_end"] = "last_action",
) -> jax.Array:
    """Spread a row's score and its KL penalty over tokens.

    r_t = -kl_coef kl_t + (score at the token where it lands).

    Args:
      scores: float[...], one a row.
      log_ratio_kl: float[..., T], a KL estimate per token (k1 as a rule), or None for no penalty.
      mask: bool[..., T], True on action tokens.
      kl_coef: scalar in 1/nats, may be traced; None exactly when ``log_ratio_kl`` is None.
      placement: ``last_action``, or ``one_past_end``: the token behind it (the last one in a full
        row). `gae` sees that one only when its mask includes `one_past_end` of this mask.

    Returns:
      float[..., T] in at least float32; 0 in a row without any action token, whatever its score.
      Not differentiated: gradients with respect to all inputs are 0.

    Raises:
      ValueError: unknown placement; shapes that do not fit; a KL without coefficient or a
        coefficient without KL.
      TypeError: the mask is not boolean.

    References: arXiv:1909.08593. TRL's PPO is ``one_past_end``; OpenRLHF uses the last set bit of
    the mask as here (and the last column in a row without one); verl puts the score on the last
    attended token, which is not an action when a row ends with a tool's output.
    """
    if placement not in ("last_action", "one_past_end"):
        raise ValueError(f"placement is {placement!r}: choose 'last_action' or 'one_past_end'.")
    if (log_ratio_kl is None) != (kl_coef is None):
        raise ValueError("log_ratio_kl and kl_coef belong together: give both or neither.")
    scores = jnp.asarray(scores)
    check_rows("scores", scores, mask)
    if log_ratio_kl is not None:
        check_shapes({"mask": mask, "log_ratio_kl": log_ratio_kl})
    lands = last_action(mask) if placement == "last_action" else one_past_end(mask)
    rewards = zero_outside(lands, jnp.broadcast_to(scores[..., None], mask.shape))
    if log_ratio_kl is not None and kl_coef is not None:
        rewards = rewards - kl_coef * zero_outside(mask, log_ratio_kl)
    return lax.stop_gradient(rewards)


class KLState(NamedTuple):
    """The coefficient of the KL penalty, a float scalar array that a controller replaces."""

    coef: jax.Array


def init_kl_state(coef: float | jax.Array) -> KLState:
    """Start a controller at ``coef`` (in 1/nats)."""
    return KLState(jnp.asarray(coef, jnp.result_type(float)))


def fixed_controller(state: KLState, observed_kl: jax.Array, n_rows: int | jax.Array) -> KLState:
    """Keep the coefficient.

    Args:
      state: the present coefficient.
      observed_kl: unused; here so that controllers can stand in for each other.
      n_rows: unused.

    Returns:
      ``state``.
    """
    del observed_kl, n_rows
    return state


def adaptive_controller(
    state: KLState,
    observed_kl: jax.Array,
    n_rows: int | jax.Array,
    *,
    target: float | jax.Array,
    horizon: float | jax.Array,
) -> KLState:
    """Move the coefficient in proportion to how far the KL is from its target.

    coef <- coef (1 + clip(observed_kl / target - 1, -0.2, 0.2) n_rows / horizon).

    Args:
      state: the present coefficient.
      observed_kl: scalar, in the unit of ``target``: nats per token here as in verl, where
        Ziegler et al. use nats per sequence.
      n_rows: rows of the step, scalar.
      target: positive scalar.
      horizon: rows over which a full correction takes place, well above n_rows.

    Returns:
      The new state. A NaN observation (nothing was observed) leaves the coefficient as it is.

    References: arXiv:1909.08593, section 2.2.
    """
    dtype = state.coef.dtype
    error = jnp.clip(jnp.asarray(observed_kl, dtype) / target - 1, -0.2, 0.2)
    factor = 1 + jnp.where(jnp.isnan(error), 0, error) * n_rows / horizon
    return KLState((state.coef * factor).astype(dtype))
