"""Advantage estimators: rewards and values in, advantages and returns out."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.masked import check_segments, check_shapes, last_action, zero_outside


def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    gamma: float | jax.Array,
    lam: float | jax.Array,
    bootstrap: jax.Array | None = None,
    masked: Literal["skip", "zero_value_steps"] = "skip",
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation over the action tokens of each row.

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next;  R_t = A_t + V_t,
    where ``next`` is the next *action* token: tokens outside the mask inside a response (a tool's
    output) neither decay nor delay credit.

    Args:
      rewards: float[..., T], per token; those outside the mask are ignored.
      values: float[..., T], token-aligned: of the state before token t.
      mask: bool[..., T], True on action tokens.
      gamma: discount in [0, 1], scalar, may be traced.
      lam: lambda in [0, 1], scalar, may be traced.
      bootstrap: value of the state after the last action token, for rows that were cut off (0 for
        rows that ended): float[...], or with ``segment_ids`` float[..., T], read at the last action
        of each segment. None is 0 everywhere. Token-aligned values do not hold it, a critic's
        position-aligned output ``after`` does: where(truncated, masked_sum(after,
        last_action(mask), axis=-1), 0).
      masked: ``skip``, or ``zero_value_steps``: a masked token between actions is a step of value 0
        and reward 0 that decays credit.
      segment_ids: i32[..., T] of packed rows: the recursion starts anew in each run of equal ids.

    Returns:
      (advantages, returns), float[..., T] in at least float32, 0 outside the mask, before any
      whitening. Neither is differentiated: gradients with respect to all inputs are 0.

    Raises:
      ValueError: unknown ``masked``, or shapes that do not fit.
      TypeError: the mask is not boolean.

    References: arXiv:1506.02438. verl skips masked tokens as here, but loses a score that lies
    behind the last action; OpenRLHF is ``zero_value_steps``; TRL runs over the padded row.
    """
    if masked not in ("skip", "zero_value_steps"):
        raise ValueError(f"masked is {masked!r}: choose 'skip' or 'zero_value_steps'.")
    check_shapes({"rewards": rewards, "values": values, "mask": mask})
    check_segments(segment_ids, mask.shape)
    rewards = zero_outside(mask, rewards)
    values = zero_outside(mask, values)
    dtype = jnp.promote_types(rewards.dtype, values.dtype)
    gamma, lam = jnp.asarray(gamma, dtype), jnp.asarray(lam, dtype)
    if bootstrap is not None:
        # The value behind the last action enters like a reward of gamma V on that action.
        rewards = rewards + gamma * _behind_last_action(bootstrap, mask, segment_ids)
    inputs = [rewards.astype(dtype), values.astype(dtype), mask]
    if segment_ids is not None:
        inputs.append(_segment_ends(segment_ids))
    inputs, gamma, lam = lax.stop_gradient((inputs, gamma, lam))
    return _recursion(inputs, gamma, lam, skip=masked == "skip")


def _behind_last_action(
    bootstrap: jax.Array, mask: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
    bootstrap = jnp.asarray(bootstrap)
    shape = mask.shape[:-1] if segment_ids is None else mask.shape
    if bootstrap.shape != shape:
        raise ValueError(f"bootstrap has shape {bootstrap.shape}: give it {shape}.")
    spread = bootstrap[..., None] if segment_ids is None else bootstrap
    return zero_outside(last_action(mask, segment_ids), jnp.broadcast_to(spread, mask.shape))


def _segment_ends(segment_ids: jax.Array) -> jax.Array:
    ends = segment_ids[..., 1:] != segment_ids[..., :-1]
    return jnp.concatenate([ends, jnp.ones_like(ends[..., :1])], axis=-1)


def _recursion(
    inputs: list[jax.Array], gamma: jax.Array, lam: jax.Array, *, skip: bool
) -> tuple[jax.Array, jax.Array]:
    """Scan backwards over the last axis of (rewards, values, mask[, segment ends]).

    The carry is what the future is worth: future = gamma (V_next + lam A_next), so that
    A = r - V + future. All arithmetic stays inside the step, where arrays are contiguous.
    """

    def step(future, token):
        reward, value, action, *end = token
        if end:
            future = jnp.where(end[0], 0, future)
        advantage = jnp.where(action, reward - value + future, 0)
        returns = jnp.where(action, advantage + value, 0)
        passed_on = future if skip else gamma * lam * future
        future = jnp.where(action, gamma * (value + lam * advantage), passed_on)
        return future, (advantage, returns)

    time_first = [jnp.moveaxis(x, -1, 0) for x in inputs]
    future = jnp.zeros_like(time_first[0][0])
    advantages, returns = lax.scan(step, future, time_first, reverse=True)[1]
    return jnp.moveaxis(advantages, 0, -1), jnp.moveaxis(returns, 0, -1)
