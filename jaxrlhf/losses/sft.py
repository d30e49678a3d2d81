"""Supervised losses per token."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.log_probs import align_to_tokens
from jaxrlhf.losses.masked import as_float, zero_outside


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
      ValueError: ``z_loss`` or ``label_smoothing`` without what it needs; the mask's shape differs.
      TypeError: the mask is not boolean.

    References: z-loss arXiv:2204.02311, section 5; label smoothing arXiv:1512.00567, section 7. The
    uniform part includes the label, as in TRL's trainers.
    """
    loss = -zero_outside(mask, log_probs)
    if z_loss is None and label_smoothing is None:
        return loss
    if logsumexp is None:
        raise ValueError("z_loss and label_smoothing need logsumexp: pass token_log_probs' own.")
    logsumexp = zero_outside(mask, logsumexp)
    if label_smoothing is not None:
        if mean_logits is None:
            raise ValueError("label_smoothing needs mean_logits: pass mean_token_logits' result.")
        uniform = logsumexp - zero_outside(mask, mean_logits)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    return loss if z_loss is None else loss + z_loss * jnp.square(logsumexp)


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
      float[..., T] in at least float32; differentiable in ``hidden`` and ``output_matrix``.

    Raises:
      ValueError: the shapes do not fit.
    """
    if output_matrix.ndim != 2 or output_matrix.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"output_matrix has shape {output_matrix.shape}: it must be [V, {hidden.shape[-1]}]."
        )
    mean_row = jnp.mean(as_float(output_matrix), axis=0)
    logits = jnp.einsum("...d,d->...", as_float(hidden), mean_row)
    slope = 1 / lax.stop_gradient(jnp.asarray(temperature, logits.dtype))
    return align_to_tokens(logits * slope, segment_ids)
