"""Advantage estimators: rewards and values in, advantages and returns out."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.masked import zero_outside


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
        rows that ended): float[...], or with ``segment_ids`` float[..., T], read at the last token
        of each segment. None is 0 everywhere.
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
    rewards = zero_outside(mask, rewards)
    values = zero_outside(mask, values)
    dtype = jnp.promote_types(rewards.dtype, values.dtype)
    shape = mask.shape if segment_ids is not None else mask.shape[:-1]
    after = jnp.zeros(shape, dtype) if bootstrap is None else jnp.asarray(bootstrap, dtype)
    if after.shape != shape:
        raise ValueError(f"bootstrap has shape {after.shape}: give it {shape}.")
    inputs = [rewards.astype(dtype), values.astype(dtype), mask]
    if segment_ids is not None:
        inputs += [_segment_ends(segment_ids), after]
        after = jnp.zeros_like(after[..., 0])
    advantages = _recursion(
        lax.stop_gradient(inputs),
        lax.stop_gradient(after),
        lax.stop_gradient(jnp.asarray(gamma, dtype)),
        lax.stop_gradient(jnp.asarray(lam, dtype)),
        skip=masked == "skip",
    )
    advantages = zero_outside(mask, advantages)
    return advantages, advantages + lax.stop_gradient(values)


def _segment_ends(segment_ids: jax.Array) -> jax.Array:
    ends = segment_ids[..., 1:] != segment_ids[..., :-1]
    return jnp.concatenate([ends, jnp.ones_like(segment_ids[..., :1], jnp.bool_)], axis=-1)


def _recursion(
    inputs: list[jax.Array], after: jax.Array, gamma: jax.Array, lam: jax.Array, *, skip: bool
) -> jax.Array:
    """Scan backwards over the last axis of (rewards, values, mask[, segment ends, bootstrap])."""

    def step(carry, token):
        running, next_value, inside = carry
        reward, value, action, *boundary = token
        if boundary:
            end, beyond = boundary
            running, inside = jnp.where(end, 0, running), inside & ~end
            next_value = jnp.where(end, beyond, next_value)
        inside |= action
        advantage = reward + gamma * next_value - value + gamma * lam * running
        # Behind the last action a masked token is padding, not a step, in either reading.
        advance = action if skip else inside
        running = jnp.where(advance, advantage, running)
        return (running, jnp.where(advance, value, next_value), inside), advantage

    carry = (jnp.zeros_like(after), after, jnp.zeros(after.shape, jnp.bool_))
    time_first = [jnp.moveaxis(x, -1, 0) for x in inputs]
    return jnp.moveaxis(lax.scan(step, carry, time_first, reverse=True)[1], 0, -1)
