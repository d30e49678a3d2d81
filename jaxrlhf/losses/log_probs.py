"""Token log-probs and entropy from hidden states, in blocks; the shift to tokens lives here.

Letters: B rows, T tokens, S = T - 1 positions that have a next token, D hidden size, V vocabulary.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxrlhf.losses.masked import as_float, check_segments


class TokenLogProbs(NamedTuple):
    """What the model says about each token, float32[..., T], token-aligned.

    Attributes:
      log_probs: log p(token_t | tokens_<t), in nats.
      logsumexp: log of the softmax's denominator in front of token t (for z-loss).
      entropy: of the whole distribution in front of token t, in nats.
    """

    log_probs: jax.Array
    logsumexp: jax.Array
    entropy: jax.Array


def align_to_tokens(scalars: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Shift position-aligned scalars (after token t) to token-aligned ones (before token t).

    out[t] = scalars[t - 1]; 0 at t = 0 and at the first token of each segment.

    Args:
      scalars: [..., T], for instance a critic head's output.
      segment_ids: i32[..., T] of packed rows, None for one sequence a row.

    Returns:
      [..., T] of the same dtype.

    Raises:
      ValueError: the shapes differ.
    """
    check_segments(segment_ids, scalars.shape)
    return shift_to_tokens(scalars[..., :-1], segment_ids)


def shift_to_tokens(scalars: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Put a 0 in front of [..., T - 1] scalars, and 0 where a segment starts."""
    if segment_ids is not None:
        scalars = jnp.where(segment_ids[..., 1:] == segment_ids[..., :-1], scalars, 0)
    return jnp.concatenate([jnp.zeros((*scalars.shape[:-1], 1), scalars.dtype), scalars], axis=-1)


def _statistics(logits: jax.Array, targets: jax.Array) -> TokenLogProbs:
    """Log-prob of the targets, logsumexp and entropy of logits [..., V] that are already scaled."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - top
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    # A logit of -inf (a forbidden token) has weight 0 and must not make 0 * inf.
    products = jnp.where(weights > 0, weights * shifted, 0)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1) - top
    log_total = jnp.log(total)
    return TokenLogProbs(
        log_probs=chosen[..., 0] - log_total,
        logsumexp=top[..., 0] + log_total,
        entropy=log_total - jnp.sum(products, axis=-1) / total,
    )


def _logit_cotangent(
    logits: jax.Array, targets: jax.Array, stats: TokenLogProbs, cotangents: TokenLogProbs
) -> tuple[jax.Array, jax.Array]:
    """Gradient with respect to the scaled logits, and which positions take part in it.

    With p = softmax(z), H its entropy and e the one-hot target:
    dz = d_log_prob (e - p) + d_logsumexp p - d_entropy p (log p + H).
    Positions whose cotangents are all 0 get exactly 0, whatever their logits are.
    """
    log_softmax = logits - stats.logsumexp[..., None]
    probs = jnp.exp(log_softmax)
    d_logits = jnp.zeros_like(logits)
    live = jnp.zeros(targets.shape, jnp.bool_)
    if not isinstance(cotangents.log_probs, SymbolicZero):
        live |= cotangents.log_probs != 0
        vocabulary = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
        one_hot = (vocabulary == targets[..., None]).astype(logits.dtype)
        d_logits += cotangents.log_probs[..., None] * (one_hot - probs)
    if not isinstance(cotangents.logsumexp, SymbolicZero):
        live |= cotangents.logsumexp != 0
        d_logits += cotangents.logsumexp[..., None] * probs
    if not isinstance(cotangents.entropy, SymbolicZero):
        live |= cotangents.entropy != 0
        surprise = jnp.where(probs > 0, probs * (log_softmax + stats.entropy[..., None]), 0)
        d_logits -= cotangents.entropy[..., None] * surprise
    return jnp.where(live[..., None], d_logits, 0), live


@jax.custom_vjp
def _dense_statistics(logits: jax.Array, targets: jax.Array) -> TokenLogProbs:
    return _statistics(logits, targets)


def _dense_forward(
    logits: CustomVJPPrimal, targets: CustomVJPPrimal
) -> tuple[TokenLogProbs, tuple[Any, ...]]:
    stats = _statistics(logits.value, targets.value)
    return stats, (logits.value, targets.value, stats)


def _dense_backward(
    residuals: tuple[Any, ...], cotangents: TokenLogProbs
) -> tuple[jax.Array, None]:
    logits, targets, stats = residuals
    return _logit_cotangent(logits, targets, stats, cotangents)[0], None


_dense_statistics.defvjp(_dense_forward, _dense_backward, symbolic_zeros=True)


def dense_token_log_probs(
    logits: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    temperature: float | jax.Array = 1.0,
) -> TokenLogProbs:
    """Token log-probs, logsumexp and entropy from logits that are already there.

    out[t] speaks about softmax(logits[t - 1] / temperature) and tokens[t]; 0 at t = 0 and at the
    first token of each segment. `token_log_probs` gives the same from hidden states without the
    [B, T, V] array.

    Args:
      logits: float[..., T, V], after any soft-cap; -inf for forbidden tokens is fine.
      tokens: i32[..., T].
      segment_ids: i32[..., T] of packed rows, None for one sequence a row.
      temperature: positive scalar, not differentiated.

    Returns:
      TokenLogProbs of float32[..., T]; differentiable in ``logits``. A position whose result has
      no effect on the loss gets gradient 0, also where its logits are NaN.

    Raises:
      ValueError: the shapes do not fit.
    """
    _check_shapes("logits", logits, tokens, segment_ids)
    scaled = as_float(logits[..., :-1, :])
    scaled = scaled / lax.stop_gradient(jnp.asarray(temperature, scaled.dtype))
    stats = _dense_statistics(scaled, tokens[..., 1:])
    return jax.tree.map(lambda x: shift_to_tokens(x, segment_ids), stats)


def _check_shapes(
    name: str, array: jax.Array, tokens: jax.Array, segment_ids: jax.Array | None
) -> None:
    if array.shape[:-1] != tokens.shape:
        raise ValueError(
            f"{name} has shape {array.shape}: its axes before the last must be tokens' "
            f"{tokens.shape}."
        )
    check_segments(segment_ids, tokens.shape)


def scaled_logits(
    hidden: jax.Array, matrix: jax.Array, temperature: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Return softcap(hidden matrix^T) / temperature, and its derivative by the raw logits."""
    dtype = temperature.dtype
    logits = jnp.einsum("bsd,vd->bsv", hidden, matrix, preferred_element_type=dtype)
    slope = 1 / temperature
    if softcap is None:
        return logits * slope, slope
    bent = jnp.tanh(logits / softcap)
    return bent * (softcap * slope), (1 - jnp.square(bent)) * slope


def over_blocks(length: int, block_size: int) -> tuple[int, jax.Array, jax.Array]:
    """Cut ``length`` positions into equal blocks: their size, and per block its start and overlap.

    The last block is moved back to end at the last position; ``overlap`` counts the positions that
    it shares with the one before.
    """
    count = -(-length // block_size)
    size = -(-length // count)
    starts = [min(i * size, length - size) for i in range(count)]
    overlaps = [i * size - start for i, start in enumerate(starts)]
    return size, jnp.array(starts, jnp.int32), jnp.array(overlaps, jnp.int32)


def time_part(tree: Any, start: jax.Array, size: int) -> Any:
    """Slice the time axis of every [B, T, ...] array; a symbolic zero stays one."""

    def part(x: jax.Array | SymbolicZero) -> jax.Array | SymbolicZero:
        return (
            x if isinstance(x, SymbolicZero) else lax.dynamic_slice_in_dim(x, start, size, axis=1)
        )

    return jax.tree.map(part, tree)


def write_block(array: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    """Put a block into the time axis of [B, T, ...], in that array's dtype."""
    return lax.dynamic_update_slice_in_dim(array, block.astype(array.dtype), start, axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _block_statistics(
    hidden: jax.Array,
    matrix: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    block_size: int,
) -> TokenLogProbs:
    """Position-aligned statistics of the first S positions: hidden [B, T, D], targets [B, S]."""
    size, starts, _ = over_blocks(targets.shape[1], block_size)

    def block(stats: TokenLogProbs, start: jax.Array) -> tuple[TokenLogProbs, None]:
        here, targets_here = time_part((hidden, targets), start, size)
        logits, _ = scaled_logits(here, matrix, temperature, softcap)
        new = _statistics(logits, targets_here)
        return jax.tree.map(lambda whole, block: write_block(whole, block, start), stats, new), None

    zeros = jnp.zeros_like(hidden[:, : targets.shape[1], 0], temperature.dtype)
    return lax.scan(block, TokenLogProbs(zeros, zeros, zeros), starts)[0]


def _block_forward(
    hidden: CustomVJPPrimal,
    matrix: CustomVJPPrimal,
    targets: CustomVJPPrimal,
    temperature: CustomVJPPrimal,
    softcap: float | None,
    block_size: int,
) -> tuple[TokenLogProbs, tuple[Any, ...]]:
    inputs = (hidden.value, matrix.value, targets.value, temperature.value)
    stats = _block_statistics(*inputs, softcap, block_size)
    return stats, (*inputs, stats)


def _block_backward(
    softcap: float | None,
    block_size: int,
    residuals: tuple[Any, ...],
    cotangents: TokenLogProbs,
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden, matrix, targets, temperature, stats = residuals
    size, starts, overlaps = over_blocks(targets.shape[1], block_size)
    einsum = partial(jnp.einsum, preferred_element_type=temperature.dtype)

    def block(
        gradients: tuple[jax.Array, jax.Array], bounds: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        d_hidden, d_matrix = gradients
        start, overlap = bounds
        here, *others = time_part((hidden, targets, stats, cotangents), start, size)
        logits, slope = scaled_logits(here, matrix, temperature, softcap)
        d_logits, live = _logit_cotangent(logits, *others)
        # Not d_logits * slope alone: a dead position's slope may be NaN.
        d_logits = jnp.where(live[..., None], d_logits * slope, 0)
        d_logits = d_logits.astype(jnp.result_type(hidden, matrix))
        d_hidden = write_block(d_hidden, einsum("bsv,vd->bsd", d_logits, matrix), start)
        # Positions that the block before has counted, and dead ones, add nothing to the matrix.
        counted = lax.broadcasted_iota(jnp.int32, live.shape, 1) < overlap
        here = jnp.where((live & ~counted)[..., None], here, 0)
        return (d_hidden, d_matrix + einsum("bsv,bsd->vd", d_logits, here)), None

    zeros = (jnp.zeros_like(hidden), jnp.zeros_like(matrix, temperature.dtype))
    (d_hidden, d_matrix), _ = lax.scan(block, zeros, (starts, overlaps))
    return d_hidden, d_matrix.astype(matrix.dtype), None, None


_block_statistics.defvjp(_block_forward, _block_backward, symbolic_zeros=True)


def token_log_probs(
    hidden: jax.Array,
    output_matrix: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    temperature: float | jax.Array = 1.0,
    softcap: float | None = None,
    block_size: int = 128,
) -> TokenLogProbs:
    """Token log-probs, logsumexp and entropy from hidden states, never holding [B, T, V] logits.

    z[t] = softcap(hidden[t - 1] output_matrix^T) / temperature with softcap(x) = c tanh(x / c);
    log_probs[t] = z[t][tokens[t]] - logsumexp(z[t]); all three are 0 at t = 0 and at the first
    token of each segment. Works through blocks of ``block_size`` positions of all rows; the
    backward pass computes a block's logits again. The gradient of the matrix is summed in at least
    float32.

    Args:
      hidden: float[..., T, D], after the final norm, position-aligned (not shifted).
      output_matrix: float[V, D].
      tokens: i32[..., T].
      segment_ids: i32[..., T] of packed rows, None for one sequence a row.
      temperature: positive scalar, not differentiated; may be traced.
      softcap: the bound c of a soft-capped model (static), None for none.
      block_size: positions a block (static): B x block_size x V logits exist at a time.

    Returns:
      TokenLogProbs of float32[..., T] (float64 for float64 inputs); differentiable once in
      ``hidden`` and ``output_matrix``. A position whose result has no effect on the loss gets
      gradient 0, also where its hidden state is NaN.

    Raises:
      ValueError: the shapes do not fit, or ``block_size`` is not positive.

    verl and OpenRLHF hold the [B, T, V] logits unless an extra kernel package is on; TRL 1.16 has a
    fused head of its own.
    """
    _check_shapes("hidden", hidden, tokens, segment_ids)
    if output_matrix.ndim != 2 or output_matrix.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"output_matrix has shape {output_matrix.shape}: it must be [V, {hidden.shape[-1]}]."
        )
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: give at least 1.")
    hidden, output_matrix = jnp.asarray(hidden), jnp.asarray(output_matrix)
    dtype = jnp.promote_types(jnp.result_type(hidden, output_matrix), jnp.float32)
    length = tokens.shape[-1]
    if length == 1:
        zeros = jnp.zeros(tokens.shape, dtype)
        return TokenLogProbs(zeros, zeros, zeros)
    hidden = hidden.reshape(-1, *hidden.shape[-2:])
    # Adding 0 costs nothing (XLA drops it), and under shard_map makes a replicated matrix vary with
    # the rows, so that its gradient is summed over devices once, behind the blocks.
    output_matrix = output_matrix + jnp.zeros_like(hidden, output_matrix.dtype, shape=())
    stats = _block_statistics(
        hidden,
        output_matrix,
        tokens.reshape(-1, length)[:, 1:],
        jnp.asarray(temperature, dtype),
        softcap,
        block_size,
    )
    shape = (*tokens.shape[:-1], length - 1)
    return jax.tree.map(lambda x: shift_to_tokens(x.reshape(shape), segment_ids), stats)
