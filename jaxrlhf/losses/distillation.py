"""Exact divergences of whole distributions: policy from reference, student from teacher.

Letters: B rows, T tokens, S = T - 1 positions that have a next token, D hidden size, V vocabulary.
"""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.log_probs import (
    over_blocks,
    scaled_logits,
    shift_to_tokens,
    time_part,
    write_block,
)
from jaxrlhf.losses.masked import as_float, check_segments

Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon"]
DIVERGENCES: tuple[str, ...] = get_args(Divergence)


def _expected_gap(log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return p (log p - log q), 0 where p is 0, and its sum over the vocabulary: KL(p, q)."""
    probs = jnp.exp(log_p)
    products = jnp.where(probs > 0, probs * (log_p - log_q), 0)
    return products, jnp.sum(products, axis=-1)


def _mixture(log_p: jax.Array, log_ref: jax.Array, mix: jax.Array) -> jax.Array:
    return jnp.logaddexp(jnp.log(mix) + log_ref, jnp.log1p(-mix) + log_p)


def _divergence(logits: jax.Array, ref_logits: jax.Array, mix: jax.Array, kind: str) -> jax.Array:
    """Divergence of the softmaxes of [..., V] logits that are already scaled."""
    log_p, log_ref = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    if kind == "reverse_kl":
        return _expected_gap(log_p, log_ref)[1]
    if kind == "forward_kl":
        return _expected_gap(log_ref, log_p)[1]
    log_mixture = _mixture(log_p, log_ref, mix)
    of_ref, of_policy = (_expected_gap(x, log_mixture)[1] for x in (log_ref, log_p))
    return mix * of_ref + (1 - mix) * of_policy


def _divergence_cotangent(
    logits: jax.Array, ref_logits: jax.Array, mix: jax.Array, cotangent: jax.Array, kind: str
) -> jax.Array:
    """Gradient with respect to the scaled logits.

    With p = softmax(z), q the reference and m the mixture: reverse p (log p - log q - KL(p, q));
    forward p - q; Jensen-Shannon (1 - mix) p (log p - log m - KL(p, m)). Positions whose cotangent
    is 0 get exactly 0, whatever their logits are.
    """
    log_p, log_ref = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    if kind == "forward_kl":
        gradient = jnp.exp(log_p) - jnp.exp(log_ref)
    else:
        other = log_ref if kind == "reverse_kl" else _mixture(log_p, log_ref, mix)
        products, total = _expected_gap(log_p, other)
        gradient = products - jnp.exp(log_p) * total[..., None]
        gradient = gradient if kind == "reverse_kl" else (1 - mix) * gradient
    return jnp.where((cotangent != 0)[..., None], cotangent[..., None] * gradient, 0)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense(logits: jax.Array, ref_logits: jax.Array, mix: jax.Array, kind: str) -> jax.Array:
    return _divergence(logits, ref_logits, mix, kind)


def _dense_forward(
    logits: jax.Array, ref_logits: jax.Array, mix: jax.Array, kind: str
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _divergence(logits, ref_logits, mix, kind), (logits, ref_logits, mix)


def _dense_backward(
    kind: str, residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    logits, ref_logits, mix = residuals
    return _divergence_cotangent(logits, ref_logits, mix, cotangent, kind), None, None


_dense.defvjp(_dense_forward, _dense_backward)


def dense_divergence(
    logits: jax.Array,
    ref_logits: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    kind: Divergence = "reverse_kl",
    mix: float | jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
) -> jax.Array:
    """Divergence of two next-token distributions from logits that are already there.

    With p = softmax(logits[t - 1] / temperature) and q the same of ``ref_logits``; out[t] is

    - ``reverse_kl``: KL(p, q) = sum_v p (log p - log q), the KL penalty's exact value
    - ``forward_kl``: KL(q, p), the loss of ordinary distillation from a teacher q
    - ``jensen_shannon``: mix KL(q, m) + (1 - mix) KL(p, m) with m = mix q + (1 - mix) p

    and 0 at t = 0 and at the first token of each segment. `token_divergence` gives the same from
    hidden states without the [B, T, V] arrays.

    Args:
      logits: float[..., T, V], of the policy (student), after any soft-cap; -inf is fine.
      ref_logits: float[..., T, V], of the reference (teacher); not differentiated.
      segment_ids: i32[..., T] of packed rows, None for one sequence a row.
      kind: one of the three above.
      mix: weight of the reference in (0, 1), may be traced; only for ``jensen_shannon``, 0.5 there
        by default.
      temperature: positive scalar of both, not differentiated; may be traced.

    Returns:
      float32[..., T] (float64 for float64 inputs) in nats, token-aligned; differentiable once in
      ``logits``. A position whose result has no effect on the loss gets gradient 0, also where its
      logits are NaN. inf where one distribution excludes what the other allows.

    Raises:
      ValueError: unknown ``kind``; ``mix`` for a kind without it; shapes that do not fit.

    References: arXiv:2306.13649 (GKD). TRL's ``beta`` is ``mix``, with forward_kl at 0 and
    reverse_kl at 1. verl distils over the teacher's top tokens only.
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(f"ref_logits has shape {ref_logits.shape}: give it {logits.shape}.")
    check_segments(segment_ids, logits.shape[:-1])
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    mixed = _checked_mix(kind, mix, dtype)
    slope = 1 / lax.stop_gradient(jnp.asarray(temperature, dtype))
    ours, theirs = (as_float(x[..., :-1, :]) * slope for x in (logits, ref_logits))
    return shift_to_tokens(_dense(ours, theirs, mixed, kind), segment_ids)


def _checked_mix(kind: str, mix: float | jax.Array | None, dtype: Any) -> jax.Array:
    if kind not in DIVERGENCES:
        raise ValueError(f"kind {kind!r} is unknown: choose one of {', '.join(DIVERGENCES)}.")
    if mix is not None and kind != "jensen_shannon":
        raise ValueError(f"mix has no effect on kind {kind!r}: pass None.")
    return lax.stop_gradient(jnp.asarray(0.5 if mix is None else mix, dtype))


Two = tuple[jax.Array, jax.Array]  # hidden and output matrix; temperature and mix
Static = tuple[str, float | None, float | None, int]  # kind, both soft-caps, block size


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocks(policy: Two, reference: Two, scale: Two, static: Static) -> jax.Array:
    """Position-aligned divergence of the first S positions, float[B, S]."""
    kind, softcap, ref_softcap, block_size = static
    temperature, mix = scale
    length = policy[0].shape[1] - 1
    size, starts, _ = over_blocks(length, block_size)

    def block(out: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        ours, theirs = time_part((policy[0], reference[0]), start, size)
        logits, _ = scaled_logits(ours, policy[1], temperature, softcap)
        ref_logits, _ = scaled_logits(theirs, reference[1], temperature, ref_softcap)
        return write_block(out, _divergence(logits, ref_logits, mix, kind), start), None

    zeros = jnp.zeros_like(policy[0][:, :length, 0], temperature.dtype)
    return lax.scan(block, zeros, starts)[0]


def _blocks_forward(
    policy: Two, reference: Two, scale: Two, static: Static
) -> tuple[jax.Array, tuple[Two, Two, Two]]:
    return _blocks(policy, reference, scale, static), (policy, reference, scale)


def _blocks_backward(
    static: Static, residuals: tuple[Two, Two, Two], cotangent: jax.Array
) -> tuple[Two, None, None]:
    kind, softcap, ref_softcap, block_size = static
    (hidden, matrix), (ref_hidden, ref_matrix), (temperature, mix) = residuals
    size, starts, overlaps = over_blocks(hidden.shape[1] - 1, block_size)
    einsum = partial(jnp.einsum, preferred_element_type=temperature.dtype)

    def block(gradients: Two, bounds: Two) -> tuple[Two, None]:
        d_hidden, d_matrix = gradients
        start, overlap = bounds
        ours, theirs, d_out = time_part((hidden, ref_hidden, cotangent), start, size)
        logits, slope = scaled_logits(ours, matrix, temperature, softcap)
        ref_logits, _ = scaled_logits(theirs, ref_matrix, temperature, ref_softcap)
        d_logits = _divergence_cotangent(logits, ref_logits, mix, d_out, kind)
        live = (d_out != 0)[..., None]
        # Not d_logits * slope alone: a dead position's slope may be NaN.
        d_logits = jnp.where(live, d_logits * slope, 0).astype(jnp.result_type(hidden, matrix))
        d_hidden = write_block(d_hidden, einsum("bsv,vd->bsd", d_logits, matrix), start)
        # Positions that the block before has counted, and dead ones, add nothing to the matrix.
        counted = lax.broadcasted_iota(jnp.int32, live.shape, 1) < overlap
        ours = jnp.where(live & ~counted, ours, 0)
        return (d_hidden, d_matrix + einsum("bsv,bsd->vd", d_logits, ours)), None

    zeros = (jnp.zeros_like(hidden), jnp.zeros_like(matrix, temperature.dtype))
    (d_hidden, d_matrix), _ = lax.scan(block, zeros, (starts, overlaps))
    return (d_hidden, d_matrix.astype(matrix.dtype)), None, None


_blocks.defvjp(_blocks_forward, _blocks_backward)


def token_divergence(
    hidden: jax.Array,
    output_matrix: jax.Array,
    ref_hidden: jax.Array,
    ref_output_matrix: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    kind: Divergence = "reverse_kl",
    mix: float | jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    softcap: float | None = None,
    ref_softcap: float | None = None,
    block_size: int = 128,
) -> jax.Array:
    """Exact divergence of two next-token distributions over the whole vocabulary, in blocks.

    `dense_divergence` of softcap(hidden output_matrix^T) and the reference's, never holding
    [B, T, V] logits: works through blocks of ``block_size`` positions of all rows, and the backward
    pass computes a block's logits again. The gradient of the matrix is summed in at least float32.

    Args:
      hidden: float[..., T, D], of the policy (student), after the final norm, position-aligned.
      output_matrix: float[V, D].
      ref_hidden: float[..., T, D'], of the reference (teacher); not differentiated.
      ref_output_matrix: float[V, D'], over the same vocabulary; not differentiated.
      segment_ids: i32[..., T] of packed rows, None for one sequence a row.
      kind: see `dense_divergence`.
      mix: see `dense_divergence`.
      temperature: positive scalar of both, not differentiated; may be traced.
      softcap: the bound of a soft-capped policy (static), None for none.
      ref_softcap: the bound of a soft-capped reference (static), None for none.
      block_size: positions a block (static): 2 x B x block_size x V logits exist at a time.

    Returns:
      float32[..., T] (float64 for float64 inputs) in nats, token-aligned; differentiable once in
      ``hidden`` and ``output_matrix``. A position whose result has no effect on the loss gets
      gradient 0, also where its hidden state is NaN.

    Raises:
      ValueError: unknown ``kind``; ``mix`` for a kind without it; shapes that do not fit; or
        ``block_size`` is not positive.

    verl and OpenRLHF have no exact KL; TRL's distillation works in chunks too.
    """
    _check_sides(hidden, output_matrix, ref_hidden, ref_output_matrix)
    check_segments(segment_ids, hidden.shape[:-1])
    hidden, output_matrix = jnp.asarray(hidden), jnp.asarray(output_matrix)
    ref_hidden, ref_output_matrix = jnp.asarray(ref_hidden), jnp.asarray(ref_output_matrix)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: give at least 1.")
    dtype = jnp.promote_types(jnp.result_type(hidden, output_matrix), jnp.float32)
    scale = jnp.asarray(temperature, dtype), _checked_mix(kind, mix, dtype)
    shape = hidden.shape[:-1]
    if shape[-1] == 1:
        return jnp.zeros(shape, dtype)
    hidden, ref_hidden = (x.reshape(-1, *x.shape[-2:]) for x in (hidden, ref_hidden))
    # As in token_log_probs: under shard_map the matrix must vary with the rows.
    output_matrix = output_matrix + jnp.zeros_like(hidden, output_matrix.dtype, shape=())
    reference = lax.stop_gradient((ref_hidden, ref_output_matrix))
    static = (kind, softcap, ref_softcap, block_size)
    out = _blocks((hidden, output_matrix), reference, scale, static)
    return shift_to_tokens(out.reshape(*shape[:-1], shape[-1] - 1), segment_ids)


def _check_sides(
    hidden: jax.Array, matrix: jax.Array, ref_hidden: jax.Array, ref_matrix: jax.Array
) -> None:
    for name, matrix_, states in (
        ("output_matrix", matrix, hidden),
        ("ref_output_matrix", ref_matrix, ref_hidden),
    ):
        if matrix_.ndim != 2 or matrix_.shape[1] != states.shape[-1]:
            wanted = f"[{matrix.shape[0]}, {states.shape[-1]}]"
            raise ValueError(f"{name} has shape {matrix_.shape}: it must be {wanted}.")
    if ref_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"ref_hidden has shape {ref_hidden.shape}: its axes before the last must be hidden's "
            f"{hidden.shape[:-1]}."
        )
    if ref_matrix.shape[0] != matrix.shape[0]:
        raise ValueError(
            f"ref_output_matrix has {ref_matrix.shape[0]} rows: give it the {matrix.shape[0]} of "
            "output_matrix's vocabulary."
        )
