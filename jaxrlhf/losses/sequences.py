"""Sums, means and maxima over each sequence, given back to its tokens; packed rows included."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrlhf.losses.masked import sequence_slots, zero_outside


def sequence_sum(x: jax.Array, mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Sum of the unmasked elements of each token's sequence.

    Args:
      x: float[..., T].
      mask: bool[..., T].
      segment_ids: i32[..., T] of packed rows: each run of equal ids is a sequence of its own. None:
        a row is a sequence.

    Returns:
      float[..., T] in at least float32: at every token, masked ones too, the sum of its sequence;
      0 where nothing is unmasked.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    x = zero_outside(mask, x)
    if segment_ids is None:
        return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)
    return _by_slot(x, mask, segment_ids, jax.ops.segment_sum)


def sequence_mean(x: jax.Array, mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Mean of the unmasked elements of each token's sequence: as `sequence_sum`, over the count.

    Args:
      x: float[..., T].
      mask: bool[..., T].
      segment_ids: as in `sequence_sum`.

    Returns:
      float[..., T] in at least float32; 0 where nothing is unmasked.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    total = sequence_sum(x, mask, segment_ids)
    count = sequence_sum(jnp.ones(mask.shape, total.dtype), mask, segment_ids)
    return total / jnp.maximum(count, 1)


def sequence_max(x: jax.Array, mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Greatest unmasked element of each token's sequence.

    Args:
      x: float[..., T].
      mask: bool[..., T].
      segment_ids: as in `sequence_sum`.

    Returns:
      float[..., T] in at least float32; -inf where nothing is unmasked.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    x = jnp.where(mask, zero_outside(mask, x), -jnp.inf)
    if segment_ids is None:
        return jnp.broadcast_to(jnp.max(x, axis=-1, keepdims=True), x.shape)
    return _by_slot(x, mask, segment_ids, jax.ops.segment_max)


def _by_slot(
    x: jax.Array, mask: jax.Array, segment_ids: jax.Array, reduce: Callable[..., jax.Array]
) -> jax.Array:
    """Reduce each row's sequences by a function of jax.ops and give tokens their sequence's."""
    slots = sequence_slots(mask, segment_ids).reshape(-1, mask.shape[-1])

    def one(row: jax.Array, slot: jax.Array) -> jax.Array:
        return reduce(row, slot, num_segments=row.shape[0])[slot]

    return jax.vmap(one)(x.reshape(slots.shape), slots).reshape(x.shape)
