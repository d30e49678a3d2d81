"""Advantage estimators: rewards and values in, advantages and returns out."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.masked import (
    as_float,
    check_boolean,
    check_segments,
    check_shapes,
    last_action,
    zero_outside,
)

_BLOCK = 128  # time steps; measured on a CPU: 64 and 512 are a third slower at 1024 x 1024


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
    check_boolean("mask", mask)
    rewards, values = as_float(rewards), as_float(values)  # the mask acts in the recursion
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
    """Backwards over the last axis of (rewards, values, mask[, segment ends]).

    The carry is what the future is worth: future = gamma (V_next + lam A_next), so that
    A = r - V + future. Each block of time is transposed on its own, while it fits a cache, so that
    a step reads and writes contiguous arrays; the barriers keep XLA from undoing that.
    """

    def step(future: jax.Array, token: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, value, action, *end = token
        if end:
            future = jnp.where(end[0], 0, future)
        advantage = jnp.where(action, reward - value + future, 0)
        passed_on = future if skip else gamma * lam * future
        return jnp.where(action, gamma * (value + lam * advantage), passed_on), advantage

    def block(
        carry: tuple[jax.Array, jax.Array], start: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        future, advantages = carry
        part = [lax.dynamic_slice_in_dim(x, start, size, axis=1).T for x in rows]
        future, out = lax.scan(step, future, lax.optimization_barrier(part), reverse=True)
        out = lax.optimization_barrier(out).T
        return (future, lax.dynamic_update_slice_in_dim(advantages, out, start, axis=1)), None

    _, values, mask, *_ = inputs
    length = mask.shape[-1]
    size = min(_BLOCK, max(length, 1))
    padding = -length % size  # masked steps behind the end change nothing
    rows = [jnp.pad(x.reshape(-1, length), ((0, 0), (0, padding))) for x in inputs]
    # Like all inputs together: under shard_map the carry varies with whatever varies.
    zeros = jnp.zeros_like(jnp.where(rows[2], rows[0] + rows[1], 0))
    starts = jnp.arange(0, length + padding, size)
    (_, advantages), _ = lax.scan(block, (zeros[:, 0], zeros), starts, reverse=True)
    advantages = advantages[:, :length].reshape(mask.shape)
    return advantages, jnp.where(mask, advantages + values, 0)
