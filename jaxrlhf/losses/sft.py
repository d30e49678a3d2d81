"""Supervised losses per token."""

import jax
import jax.numpy as jnp

from jaxrlhf.losses.masked import zero_outside


def cross_entropy(
    log_probs: jax.Array,
    *,
    logsumexp: jax.Array | None = None,
    z_loss: float | jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Negative log-likelihood per token, with an optional z-loss.

    -log_probs + z_loss logsumexp^2.

    Args:
      log_probs: float[..., T], in nats.
      logsumexp: float[..., T], from `token_log_probs`; needed by the z-loss.
      z_loss: its coefficient (1e-4 is usual), may be traced; None for none.
      mask: bool[..., T]; outside it the inputs are ignored and the result is 0. None: no mask.

    Returns:
      float[..., T] in at least float32, to be summed with `token_weights`.

    Raises:
      ValueError: ``z_loss`` without ``logsumexp``; the mask's shape differs.
      TypeError: the mask is not boolean.

    References: z-loss arXiv:2204.02311, section 5.
    """
    loss = -zero_outside(mask, log_probs)
    if z_loss is None:
        return loss
    if logsumexp is None:
        raise ValueError("z_loss needs logsumexp: pass the one of token_log_probs.")
    return loss + z_loss * jnp.square(zero_outside(mask, logsumexp))
