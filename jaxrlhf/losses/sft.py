"""Supervised losses per token."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.log_probs import align_to_tokens
from jaxrlhf.losses.masked import as_float, check_shapes, zero_outside


def cross_entropy(
    log_probs: jax.Array,
    *,
    logsumexp: jax.Array | None = None,
    z_loss: float | jax.Array | None = None,
    label_smoothing: float | jax.Array | None = None,
    mean_logits: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Negative log-likelihood per token, with an optional z-loss and label smoothing.

    -(1 - label_smoothing) log_probs + label_smoothing (logsumexp - mean_logits)
    + z_loss logsumexp^2. The second term is the mean of -log p over the whole vocabulary.

    Args:
      log_probs: float[..., T], in nats.
      logsumexp: float[..., T], from `token_log_probs`; needed by both extras.
      z_loss: its coefficient (1e-4 is usual), may be traced; None for none.
      label_smoothing: share in [0, 1) of the target that is uniform, may be traced; None for none.
      mean_logits: float[..., T], from `mean_token_logits`; needed by label smoothing.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32, to be summed with `token_weights`.

    Raises:
      ValueError: ``z_loss`` or ``label_smoothing`` without what it needs; shapes that differ.
      TypeError: the mask is not boolean.

    References: z-loss arXiv:2204.02311, section 5; label smoothing arXiv:1512.00567, section 7. The
    uniform part includes the label, as in TRL's trainers.
    """
    loss = -zero_outside(mask, log_probs)
    if z_loss is None and label_smoothing is None:
        return loss
    if logsumexp is None:
        raise ValueError("z_loss and label_smoothing need logsumexp: pass token_log_probs' own.")
    check_shapes({"log_probs": log_probs, "logsumexp": logsumexp})
    logsumexp = zero_outside(mask, logsumexp)
    if label_smoothing is not None:
        if mean_logits is None:
            raise ValueError("label_smoothing needs mean_logits: pass mean_token_logits' result.")
        check_shapes({"log_probs": log_probs, "mean_logits": mean_logits})
        uniform = logsumexp - zero_outside(mask, mean_logits)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    return loss if z_loss is None else loss + z_loss * jnp.square(logsumexp)


@jax.custom_vjp
def _product(hidden: jax.Array, row: jax.Array) -> jax.Array:
    """hidden [..., D] . row [D]; a position without cotangent adds nothing to the row's gradient.

    Not even where it holds NaN, as 0 x NaN would.
    """
    return jnp.einsum("...d,d->...", hidden, row)


def _product_forward(
    hidden: jax.Array, row: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(hidden, row), (hidden, row)


def _product_backward(
    residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    hidden, row = residuals
    live = jnp.where((cotangent != 0)[..., None], hidden, 0)
    return jnp.einsum("...,d->...d", cotangent, row), jnp.einsum("...,...d->d", cotangent, live)


_product.defvjp(_product_forward, _product_backward)


def mean_token_logits(
    hidden: jax.Array,
    output_matrix: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    temperature: float | jax.Array = 1.0,
) -> jax.Array:
    """Mean over the vocabulary of the logits in front of each token, without those logits.

    out[t] = hidden[t - 1] . mean_v output_matrix[v] / temperature; 0 at t = 0 and at the first
    token of each segment. Soft-capped logits have no such short cut: align their own mean with
    `align_to_tokens`, as for logits that are already there.

    Args:
      hidden: float[..., T, D], after the final norm, position-aligned.
      output_matrix: float[V, D].
      segment_ids: i32[..., T] of packed rows, None for one sequence a row.
      temperature: positive scalar, not differentiated; may be traced.

    Returns:
      float[..., T] in at least float32; differentiable once in ``hidden`` and ``output_matrix``. A
      position whose result has no effect on the loss gets gradient 0, also where its hidden state
      is NaN.

    Raises:
      ValueError: the shapes do not fit.
    """
    if output_matrix.ndim != 2 or output_matrix.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"output_matrix has shape {output_matrix.shape}: it must be [V, {hidden.shape[-1]}]."
        )
    mean_row = jnp.mean(as_float(output_matrix), axis=0)
    hidden = as_float(hidden)
    # As in token_log_probs: under shard_map the row must vary with the rows of hidden.
    logits = _product(hidden, mean_row + jnp.zeros_like(hidden, mean_row.dtype, shape=()))
    slope = 1 / lax.stop_gradient(jnp.asarray(temperature, logits.dtype))
    return align_to_tokens(logits * slope, segment_ids)
