"""Losses and metrics of reward models: rewards of answers in, one value per comparison out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.masked import as_float, check_shapes, zero_outside

Scalar = float | jax.Array


def smoothed_log_sigmoid_loss(logits: jax.Array, label_smoothing: Scalar | None) -> jax.Array:
    """-(1 - e) log sigmoid(x) - e log sigmoid(-x), without the second term where e is None."""
    loss = -jax.nn.log_sigmoid(logits)
    if label_smoothing is None:
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * jax.nn.log_sigmoid(-logits)


def bradley_terry(
    chosen: jax.Array,
    rejected: jax.Array,
    *,
    margin: Scalar | None = None,
    centring: Scalar | None = None,
    label_smoothing: Scalar | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Negative log-likelihood of a preference under the Bradley-Terry model, per pair.

    x = chosen - rejected - margin;
    -(1 - label_smoothing) log sigmoid(x) - label_smoothing log sigmoid(-x)
    + centring (chosen + rejected)^2.

    Args:
      chosen: float[...], reward of the preferred answer of each pair.
      rejected: float[...], reward of the other one.
      margin: by how much the preferred one should win, scalar or float[...] in units of reward, not
        differentiated; None for none. May be traced, as both that follow.
      centring: coefficient of the term that keeps rewards around 0 (0.01 is usual); None for none.
      label_smoothing: probability in [0, 0.5) that a label is wrong; None for 0.
      mask: bool[...] of pairs; outside it the inputs are ignored and the result is 0. None: all.

    Returns:
      float[...] in at least float32, unreduced: average it over the pairs of the batch.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: the mask is not boolean.

    References: Bradley and Terry 1952; arXiv:2203.02155; margin arXiv:2307.09288, centring
    arXiv:2312.09244. TRL's reward trainer has margin and centring, OpenRLHF's PairWiseLoss the
    margin; its LogExpLoss is the same loss and overflows.
    """
    check_shapes({"chosen": chosen, "rejected": rejected})
    chosen, rejected = zero_outside(mask, chosen), zero_outside(mask, rejected)
    logits = chosen - rejected
    if margin is not None:
        if jnp.ndim(margin):
            check_shapes({"chosen": chosen, "margin": jnp.asarray(margin)})
            margin = zero_outside(mask, margin)
        logits = logits - lax.stop_gradient(as_float(margin))
    loss = smoothed_log_sigmoid_loss(logits, label_smoothing)
    if centring is not None:
        loss = loss + centring * jnp.square(chosen + rejected)
    return zero_outside(mask, loss)


def plackett_luce(rewards: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Negative log-likelihood of a ranking of K answers under the Plackett-Luce model.

    sum_k (logsumexp(r_k, ..., r_K) - r_k): the best is chosen among all, the second best among the
    rest, and so on. For K = 2 this is `bradley_terry`.

    Args:
      rewards: float[..., K], the best answer first.
      mask: bool[..., K], False for answers that are not there; a ranking of fewer than two gives 0.
        None: all are there.

    Returns:
      float[...] in at least float32, one value a ranking. It grows with log K!: divide by the
      number of answers that have a rival, `K - 1`, to weigh short and long rankings alike.

    Raises:
      ValueError: the mask's shape differs.
      TypeError: the mask is not boolean.

    References: Luce 1959, Plackett 1975; for preferences arXiv:2305.18290, appendix A.3. None of
    TRL, verl and OpenRLHF has it. InstructGPT (arXiv:2203.02155) instead averages `bradley_terry`
    over all pairs of a ranking.
    """
    rewards = zero_outside(mask, rewards)
    rivals = rewards
    if mask is not None:
        # In place of -inf: adds nothing to a sum of exponentials, and no NaN to gradients.
        rivals = jnp.where(mask, rewards, jnp.finfo(rewards.dtype).min / 4)
    normalisers = lax.cumlogsumexp(rivals, axis=rivals.ndim - 1, reverse=True)
    return jnp.sum(zero_outside(mask, normalisers - rewards), axis=-1)


class PairMetrics(NamedTuple):
    """How rewards order pairs, float32[...] per pair: average them.

    Attributes:
      accuracy: 1 where chosen > rejected, else 0 (a tie is no success).
      margin: chosen - rejected.
    """

    accuracy: jax.Array
    margin: jax.Array


def pair_metrics(
    chosen: jax.Array, rejected: jax.Array, *, mask: jax.Array | None = None
) -> PairMetrics:
    """Tell which pairs a reward model, or a policy's implicit rewards, put in the right order.

    Args:
      chosen: float[...], reward of the preferred answer of each pair.
      rejected: float[...], reward of the other one.
      mask: bool[...] of pairs; 0 outside it. None: all.

    Returns:
      PairMetrics; nothing is differentiated.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: the mask is not boolean.

    TRL's ``accuracy`` and ``rewards/accuracies`` count ties as failures too.
    """
    check_shapes({"chosen": chosen, "rejected": rejected})
    margin = lax.stop_gradient(zero_outside(mask, chosen) - zero_outside(mask, rejected))
    return PairMetrics((margin > 0).astype(margin.dtype), margin)
