"""Masked reductions, whitening, and the weights that turn per-token losses into one number.

Masks are boolean and have the shape of what they mask. Values under a mask are replaced by 0
*before* they meet arithmetic (never multiplied by 0), so NaN or inf there reaches neither the
result nor a gradient. Everything is computed in at least float32.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

Aggregation = Literal[
    "token_mean",
    "token_sum",
    "seq_mean_token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

Axis = int | tuple[int, ...] | None


def as_float(x: jax.typing.ArrayLike) -> jax.Array:
    """Return ``x`` in at least float32: bfloat16 and integers go up, float64 stays."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def zero_outside(mask: jax.Array | None, x: jax.typing.ArrayLike) -> jax.Array:
    """Return ``x`` in at least float32 with everything outside ``mask`` replaced by 0.

    Args:
      mask: bool[...], True where ``x`` counts, of the shape of ``x``; None keeps everything.
      x: float[...], any values, NaN and inf included, outside ``mask``.

    Returns:
      float[...]: ``where(mask, x, 0)``; its gradient is 0 outside the mask.

    Raises:
      TypeError: the mask is not boolean.
      ValueError: the shapes differ.
    """
    x = as_float(x)
    if mask is None:
        return x
    check_boolean("mask", mask)
    if mask.shape != x.shape:
        raise ValueError(f"mask has shape {mask.shape}: give it the shape {x.shape} of its array.")
    return jnp.where(mask, x, 0)


def check_boolean(name: str, mask: jax.Array) -> None:
    """Raise TypeError unless the named mask is boolean."""
    if mask.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean, not {mask.dtype}: pass `{name} != 0`.")


def check_shapes(arrays: dict[str, jax.Array]) -> None:
    """Raise ValueError unless all the named arrays have the shape of the first."""
    (first, reference), *others = arrays.items()
    wanted = jnp.shape(reference)
    for name, array in others:
        if jnp.shape(array) != wanted:
            raise ValueError(
                f"{name} has shape {jnp.shape(array)}: give it {wanted} as {first} has."
            )


def check_rows(name: str, rows: jax.Array, mask: jax.Array) -> None:
    """Raise ValueError unless the named array has one value for each row of the mask."""
    if rows.shape != mask.shape[:-1]:
        raise ValueError(f"{name} has shape {rows.shape}: give one a row, {mask.shape[:-1]}.")


def check_segments(segment_ids: jax.Array | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``segment_ids`` is None or has the given shape."""
    if segment_ids is not None and segment_ids.shape != shape:
        raise ValueError(f"segment_ids has shape {segment_ids.shape}: give it {shape}.")


def masked_sum(x: jax.Array, mask: jax.Array, axis: Axis = None) -> jax.Array:
    """Sum the unmasked elements: sum(where(mask, x, 0)).

    Args:
      x: float[...].
      mask: bool[...], True where an element counts.
      axis: axes to reduce, None for all.

    Returns:
      The sum in at least float32; 0 where nothing is unmasked.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    return jnp.sum(zero_outside(mask, x), axis=axis)


def masked_mean(x: jax.Array, mask: jax.Array, axis: Axis = None) -> jax.Array:
    """Average the unmasked elements: sum(where(mask, x, 0)) / N with N = sum(mask).

    Args:
      x: float[...].
      mask: bool[...], True where an element counts.
      axis: axes to reduce, None for all.

    Returns:
      The mean in at least float32; 0 where nothing is unmasked (TRL and verl divide by 0 or by a
      small constant there).

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    total = masked_sum(x, mask, axis)
    return total / jnp.maximum(jnp.sum(mask, axis=axis, dtype=total.dtype), 1)


def _mean_and_deviations(x: jax.Array, mask: jax.Array, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """Return the mean (axes kept) and where(mask, x - mean, 0).

    The mean is taken of the distances to one of the elements, so that equal elements of any value
    deviate by exactly 0; a plain float32 mean of six times 0.3 leaves a residue of 3e-8.
    """
    x = zero_outside(mask, x)
    pivot = jnp.max(x, axis=axis, keepdims=True, where=mask, initial=-jnp.inf)
    pivot = lax.stop_gradient(jnp.where(pivot == -jnp.inf, 0, pivot))
    shifted = zero_outside(mask, x - pivot)
    count = jnp.sum(mask, axis=axis, keepdims=True, dtype=x.dtype)
    offset = jnp.sum(shifted, axis=axis, keepdims=True) / jnp.maximum(count, 1)
    return pivot + offset, zero_outside(mask, shifted - offset)


def _variance(deviations: jax.Array, mask: jax.Array, axis: Axis, ddof: int) -> jax.Array:
    count = jnp.sum(mask, axis=axis, dtype=deviations.dtype)
    total = jnp.sum(jnp.square(deviations), axis=axis)
    return jnp.where(count > ddof, total / jnp.maximum(count - ddof, 1), 0)


def masked_var(x: jax.Array, mask: jax.Array, axis: Axis = None, *, ddof: int = 1) -> jax.Array:
    """Variance of the unmasked elements: sum(where(mask, (x - mean)^2, 0)) / (N - ddof).

    Args:
      x: float[...].
      mask: bool[...], True where an element counts.
      axis: axes to reduce, None for all.
      ddof: 1 for the unbiased variance, 0 for the biased one.

    Returns:
      The variance in at least float32; 0 where N <= ddof, and exactly 0 for equal elements.

    Raises:
      TypeError, ValueError: see `zero_outside`.
    """
    _, deviations = _mean_and_deviations(x, mask, axis)
    return _variance(deviations, mask, axis, ddof)


def whiten(
    x: jax.Array,
    mask: jax.Array,
    *,
    shift_mean: bool = True,
    ddof: int = 1,
    eps: float = 1e-8,
    floor: float | None = None,
) -> jax.Array:
    """Scale the unmasked elements of the whole array to mean 0 and variance 1.

    (x - mean) * rsqrt(var + eps), or (x - mean) * rsqrt(max(var, floor)) when ``floor`` is given.

    Args:
      x: float[...].
      mask: bool[...], True where an element counts.
      shift_mean: False adds the mean back, so that only the scale changes.
      ddof: 1 for the unbiased variance, 0 for the biased one.
      eps: added to the variance; unused when ``floor`` is given.
      floor: lower bound of the variance, in place of the addend.

    Returns:
      float[...] in at least float32; 0 outside the mask, and with ``shift_mean`` exactly 0 when
      there is one unmasked element or all of them are equal.

    Raises:
      TypeError, ValueError: see `zero_outside`.

    verl and TRL use the unbiased variance with eps 1e-8 (the defaults here); OpenRLHF uses
    ``ddof=0, floor=1e-8``.
    """
    mean, deviations = _mean_and_deviations(x, mask, None)
    variance = _variance(deviations, mask, None, ddof)
    scale = lax.rsqrt(variance + eps if floor is None else jnp.maximum(variance, floor))
    whitened = deviations * scale
    return whitened if shift_mean else zero_outside(mask, whitened + mean)


def last_action(mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Mark the last set bit of each sequence.

    Args:
      mask: bool[..., T].
      segment_ids: i32[..., T] of packed rows: each run of equal ids is a sequence of its own. None:
        a row is a sequence.

    Returns:
      bool[..., T] with one True a sequence, none in sequences without a set bit.

    Raises:
      TypeError: the mask is not boolean.
      ValueError: the shapes differ.
    """
    check_boolean("mask", mask)
    slots = sequence_slots(mask, segment_ids)
    axis, length = mask.ndim - 1, mask.shape[-1]
    indices = lax.broadcasted_iota(jnp.int32, mask.shape, axis)
    following = lax.cummin(jnp.where(mask, indices, length), axis=axis, reverse=True)
    following = jnp.concatenate([following[..., 1:], jnp.full_like(following[..., :1], length)], -1)
    beyond = jnp.take_along_axis(slots, jnp.minimum(following, length - 1), axis=-1)
    return mask & ((following == length) | (beyond != slots))


def one_past_end(mask: jax.Array) -> jax.Array:
    """Mark the index after the last set bit of each row, or the last set bit in a full row.

    Args:
      mask: bool[..., T].

    Returns:
      bool[..., T] with one True a row, none in rows without a set bit.

    Raises:
      TypeError: the mask is not boolean.
    """
    last = last_action(mask)
    shifted = jnp.concatenate([jnp.zeros_like(last[..., :1]), last[..., :-1]], axis=-1)
    return jnp.where(last[..., -1:], last, shifted)


def sequence_slots(mask: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Number the sequences of each row from 0, i32[..., T]: one starts where the id changes."""
    if segment_ids is None:
        return jnp.zeros_like(mask, jnp.int32)
    check_segments(segment_ids, mask.shape)
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    changes = jnp.concatenate([jnp.zeros_like(changes[..., :1]), changes], axis=-1)
    return jnp.cumsum(changes, axis=-1, dtype=jnp.int32)


def _sequence_counts(mask: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Count the unmasked tokens of each token's sequence, and the sequences that have any."""
    if segment_ids is None:
        counts = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)
        return jnp.broadcast_to(counts, mask.shape), jnp.sum(counts > 0)
    slots = sequence_slots(mask, segment_ids).reshape(-1, mask.shape[-1])
    ones = mask.reshape(slots.shape).astype(jnp.int32)
    counts = jax.vmap(lambda row, slot: jnp.zeros_like(row).at[slot].add(row))(ones, slots)
    spread = jnp.take_along_axis(counts, slots, axis=1)
    return spread.reshape(mask.shape), jnp.sum(counts > 0)


def token_weights(
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    mode: str = "token_mean",
    norm: float | jax.Array | None = None,
) -> jax.Array:
    """Weights with which a plain sum of per-token losses becomes the loss of the batch.

    With N unmasked tokens in the batch, n_s in sequence s, and S sequences that have any, an
    unmasked token of sequence s weighs

    - ``token_mean``: 1 / N
    - ``token_sum``: 1
    - ``seq_mean_token_sum``: 1 / S
    - ``seq_mean_token_mean``: 1 / (S n_s)
    - ``seq_mean_token_sum_norm``: 1 / (S norm)

    Compute them once on the whole optimiser batch; then micro-batches, packing, rows added to fill
    a batch, devices and processes can cut the sum anywhere without changing it.

    Args:
      mask: bool[..., T], True on the tokens that the loss speaks about.
      segment_ids: i32[..., T] of packed rows: each run of equal ids is a sequence of its own. None:
        a row is a sequence.
      mode: one of the five above.
      norm: the constant token count of ``seq_mean_token_sum_norm`` (usually the longest possible
        response); only for that mode.

    Returns:
      float32[..., T] (float64 under x64): 0 outside the mask.

    Raises:
      TypeError: the mask is not boolean.
      ValueError: unknown mode; shapes differ; ``norm`` missing, or given to a mode without it.

    References: token_mean is DAPO's (arXiv:2503.14476) and verl's default, seq_mean_token_mean is
    GRPO's (arXiv:2402.03300), seq_mean_token_sum_norm Dr. GRPO's (arXiv:2503.20783). verl, TRL and
    OpenRLHF average micro-batches, so their loss depends on how the batch is cut.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"mode {mode!r} is unknown: choose one of {', '.join(AGGREGATIONS)}.")
    if (norm is not None) != (mode == "seq_mean_token_sum_norm"):
        raise ValueError("norm belongs to mode 'seq_mean_token_sum_norm': give both or neither.")
    check_segments(segment_ids, mask.shape)
    ones = zero_outside(mask, jnp.ones(mask.shape, jnp.result_type(float)))
    if mode == "token_sum":
        return ones
    if mode == "token_mean":
        return ones / jnp.maximum(jnp.sum(ones), 1)
    lengths, sequences = _sequence_counts(mask, segment_ids)
    per_sequence = ones / jnp.maximum(sequences, 1)
    if mode == "seq_mean_token_mean":
        return per_sequence / jnp.maximum(lengths, 1)
    return per_sequence if norm is None else per_sequence / norm


def weighted_sum(per_token: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum per-token values times their weights; a token of weight 0 is not looked at.

    sum(where(weights != 0, per_token, 0) * weights), so that NaN or inf on a token without weight
    reaches neither the sum nor the gradient.

    Args:
      per_token: float[...].
      weights: float[...] from `token_weights`, or a slice of them; not differentiated.

    Returns:
      A scalar in at least float32.

    Raises:
      ValueError: the shapes differ.
    """
    weights = lax.stop_gradient(as_float(weights))
    if weights.shape != per_token.shape:
        raise ValueError(f"weights has shape {weights.shape}: give it {per_token.shape}.")
    return jnp.sum(zero_outside(weights != 0, per_token) * weights)


def aggregate(
    per_token: jax.Array,
    mask: jax.Array,
    *,
    mode: str,
    norm: float | jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Turn per-token losses of a whole batch into one number: sum of `token_weights` x losses.

    Args:
      per_token: float[..., T].
      mask: bool[..., T], True on the tokens that count.
      mode: see `token_weights`.
      norm: see `token_weights`.
      segment_ids: see `token_weights`.

    Returns:
      A scalar in at least float32; 0 when nothing is unmasked.

    Raises:
      TypeError, ValueError: see `token_weights` and `zero_outside`.
    """
    check_shapes({"per_token": per_token, "mask": mask})
    return weighted_sum(per_token, token_weights(mask, segment_ids, mode=mode, norm=norm))
