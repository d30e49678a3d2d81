"""Preference losses of a policy: sequence log-probs in, one value per pair or completion out."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.masked import check_boolean, check_shapes, masked_mean, masked_sum, zero_outside
from jaxrlhf.losses.reward_modelling import (
    Scalar,
    bradley_terry,
    smoothed_log_sigmoid_loss,
)

PairLoss = Literal["sigmoid", "hinge", "ipo", "robust"]
PAIR_LOSSES: tuple[str, ...] = get_args(PairLoss)


def sequence_log_probs(
    log_probs: jax.Array, mask: jax.Array, *, average: bool = False
) -> jax.Array:
    """Log-prob of each completion: the sum of its tokens' log-probs, or their mean.

    sum_t mask_t log_probs_t, with ``average`` divided by sum_t mask_t.

    Args:
      log_probs: float[..., T], token-aligned, at temperature 1; a preference batch is [B, 2, T].
      mask: bool[..., T], True on the completion's tokens.
      average: True for length-normalised losses (ipo, simpo, orpo and dpo over means).

    Returns:
      float[...] in at least float32; 0 for a row without tokens.

    Raises:
      TypeError, ValueError: see `masked_sum`.
    """
    return masked_mean(log_probs, mask, -1) if average else masked_sum(log_probs, mask, -1)


def implicit_rewards(
    log_probs: jax.Array,
    ref_log_probs: jax.Array,
    *,
    beta: Scalar,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Rewards that a policy implies: beta (log_probs - ref_log_probs), for `pair_metrics`.

    Args:
      log_probs: float[...], of completions, from `sequence_log_probs`.
      ref_log_probs: float[...], of the reference; zeros for losses without one.
      beta: scalar, the loss's; may be traced.
      mask: bool[...] of completions; 0 outside it. None: all.

    Returns:
      float[...] in at least float32, in units of reward; not differentiated.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: the mask is not boolean.

    References: arXiv:2305.18290. TRL logs them as ``rewards/chosen`` and ``rewards/rejected``.
    """
    check_shapes({"log_probs": log_probs, "ref_log_probs": ref_log_probs})
    return lax.stop_gradient(beta * _log_ratio(log_probs, ref_log_probs, mask))


def _log_ratio(log_probs: jax.Array, ref_log_probs: jax.Array, mask: jax.Array | None) -> jax.Array:
    reference = lax.stop_gradient(zero_outside(mask, ref_log_probs))
    return zero_outside(mask, log_probs) - reference


def _pair_loss(
    gap: jax.Array, beta: Scalar, kind: str, label_smoothing: Scalar | None
) -> jax.Array:
    """Loss of the gap by which a pair's (relative) log-probs are in the preferred order."""
    if kind not in PAIR_LOSSES:
        raise ValueError(f"kind {kind!r} is unknown: choose one of {', '.join(PAIR_LOSSES)}.")
    if kind in ("hinge", "ipo") and label_smoothing is not None:
        raise ValueError(f"label_smoothing has no effect on kind {kind!r}: pass None.")
    if kind == "hinge":
        return jax.nn.relu(1 - beta * gap)
    if kind == "ipo":
        return jnp.square(gap - 1 / (2 * beta))
    if kind == "sigmoid":
        return smoothed_log_sigmoid_loss(beta * gap, label_smoothing)
    if label_smoothing is None:
        raise ValueError("kind 'robust' needs label_smoothing: pass the rate of wrong labels.")
    right, wrong = jax.nn.log_sigmoid(beta * gap), jax.nn.log_sigmoid(-beta * gap)
    unbiased = (1 - label_smoothing) * right - label_smoothing * wrong
    return -unbiased / (1 - 2 * label_smoothing)


def dpo(
    chosen_log_probs: jax.Array,
    rejected_log_probs: jax.Array,
    ref_chosen_log_probs: jax.Array,
    ref_rejected_log_probs: jax.Array,
    *,
    beta: Scalar,
    kind: PairLoss = "sigmoid",
    label_smoothing: Scalar | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Direct preference optimisation and its relatives, per pair.

    h = (chosen - ref_chosen) - (rejected - ref_rejected), of log-probs; e = label_smoothing;

    - ``sigmoid``: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (conservative where e > 0)
    - ``hinge``: max(0, 1 - beta h)
    - ``ipo``: (h - 1 / (2 beta))^2
    - ``robust``: (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)

    Args:
      chosen_log_probs: float[...], of the preferred completion of each pair under the policy, from
        `sequence_log_probs`; with ``average=True`` for all four the loss is length-normalised.
      rejected_log_probs: float[...], of the other completion.
      ref_chosen_log_probs: float[...], under the reference; not differentiated.
      ref_rejected_log_probs: float[...], under the reference; not differentiated.
      beta: positive scalar, may be traced: the strength of the pull to the reference.
      kind: one of the four above.
      label_smoothing: rate in [0, 0.5) at which labels are wrong, may be traced; None for 0. Only
        ``sigmoid`` (optional) and ``robust`` (needed) read it.
      mask: bool[...] of pairs; outside it the inputs are ignored and the result is 0. None: all.

    Returns:
      float[...] in at least float32, unreduced: average it over the pairs of the batch. log 2 for
      ``sigmoid`` where policy and reference agree.

    Raises:
      ValueError: unknown ``kind``; ``label_smoothing`` given to a kind that has none, or missing;
        shapes that do not fit.
      TypeError: the mask is not boolean.

    References: arXiv:2305.18290; hinge arXiv:2305.10425; ipo arXiv:2310.12036; robust
    arXiv:2403.00409. TRL's ``ipo`` and ``sigmoid_norm`` take means of log-probs, OpenRLHF's ipo
    sums.
    """
    check_shapes(
        {
            "chosen_log_probs": chosen_log_probs,
            "rejected_log_probs": rejected_log_probs,
            "ref_chosen_log_probs": ref_chosen_log_probs,
            "ref_rejected_log_probs": ref_rejected_log_probs,
        }
    )
    chosen = _log_ratio(chosen_log_probs, ref_chosen_log_probs, mask)
    rejected = _log_ratio(rejected_log_probs, ref_rejected_log_probs, mask)
    return zero_outside(mask, _pair_loss(chosen - rejected, beta, kind, label_smoothing))


def cpo(
    chosen_log_probs: jax.Array,
    rejected_log_probs: jax.Array,
    *,
    beta: Scalar,
    kind: PairLoss = "sigmoid",
    label_smoothing: Scalar | None = None,
    likelihood_coef: Scalar | None = 1.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Contrastive preference optimisation, per pair: `dpo` without reference, plus a likelihood.

    dpo's formula with h = chosen - rejected, - likelihood_coef chosen.

    Args:
      chosen_log_probs: float[...], of the preferred completion, from `sequence_log_probs`.
      rejected_log_probs: float[...], of the other completion.
      beta: positive scalar, may be traced.
      kind: see `dpo`.
      label_smoothing: see `dpo`.
      likelihood_coef: weight of the preferred completion's negative log-likelihood, may be traced;
        None for none.
      mask: bool[...] of pairs; outside it the inputs are ignored and the result is 0. None: all.

    Returns:
      float[...] in at least float32, unreduced: average it over the pairs of the batch.

    Raises:
      TypeError, ValueError: see `dpo`.

    References: arXiv:2401.08417. TRL's likelihood term is a mean over the tokens of all preferred
    completions: pass None and add `cross_entropy` of those tokens, weighted by `token_weights`.
    """
    check_shapes({"chosen_log_probs": chosen_log_probs, "rejected_log_probs": rejected_log_probs})
    chosen = zero_outside(mask, chosen_log_probs)
    gap = chosen - zero_outside(mask, rejected_log_probs)
    loss = _pair_loss(gap, beta, kind, label_smoothing)
    if likelihood_coef is not None:
        loss = loss - likelihood_coef * chosen
    return zero_outside(mask, loss)


def simpo(
    chosen_log_probs: jax.Array,
    rejected_log_probs: jax.Array,
    *,
    beta: Scalar,
    margin: Scalar,
    label_smoothing: Scalar | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Simple preference optimisation, per pair: no reference, mean log-probs, a target margin.

    `bradley_terry` of beta chosen and beta rejected: -log sigmoid(beta (chosen - rejected)
    - margin).

    Args:
      chosen_log_probs: float[...], *mean* log-prob of the preferred completion, from
        `sequence_log_probs` with ``average=True``.
      rejected_log_probs: float[...], of the other completion.
      beta: positive scalar (2 to 10 are usual), may be traced.
      margin: scalar in units of beta x log-prob, may be traced (the paper's gamma).
      label_smoothing: see `dpo`.
      mask: bool[...] of pairs; outside it the inputs are ignored and the result is 0. None: all.

    Returns:
      float[...] in at least float32, unreduced: average it over the pairs of the batch.

    Raises:
      TypeError, ValueError: see `bradley_terry`.

    References: arXiv:2405.14734. TRL's is CPO with ``loss_type="simpo"``; the paper's
    gamma / beta ratio is ``margin / beta``.
    """
    check_shapes({"chosen_log_probs": chosen_log_probs, "rejected_log_probs": rejected_log_probs})
    return bradley_terry(
        beta * zero_outside(mask, chosen_log_probs),
        beta * zero_outside(mask, rejected_log_probs),
        margin=margin,
        label_smoothing=label_smoothing,
        mask=mask,
    )


def orpo(
    chosen_log_probs: jax.Array,
    rejected_log_probs: jax.Array,
    *,
    beta: Scalar,
    likelihood_coef: Scalar | None = 1.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Odds ratio preference optimisation, per pair: a likelihood and the odds of both completions.

    -beta log sigmoid(log odds(chosen) - log odds(rejected)) - likelihood_coef chosen, with
    log odds(x) = x - log(1 - e^x).

    Args:
      chosen_log_probs: float[...], *mean* log-prob of the preferred completion, from
        `sequence_log_probs` with ``average=True``.
      rejected_log_probs: float[...], of the other completion.
      beta: positive scalar (0.1 is usual, the paper's lambda), may be traced.
      likelihood_coef: weight of the preferred completion's mean negative log-likelihood, may be
        traced; None for none.
      mask: bool[...] of pairs; outside it the inputs are ignored and the result is 0. None: all.

    Returns:
      float[...] in at least float32, unreduced: average it over the pairs of the batch. Odds of a
      mean log-prob above -1e-6 are taken at -1e-6, where their gradient is 0.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: the mask is not boolean.

    References: arXiv:2403.07691. TRL's likelihood term is a mean over all tokens of prompt and
    preferred completion: pass None and add `cross_entropy`, weighted by `token_weights`.
    """
    check_shapes({"chosen_log_probs": chosen_log_probs, "rejected_log_probs": rejected_log_probs})
    chosen, rejected = zero_outside(mask, chosen_log_probs), zero_outside(mask, rejected_log_probs)
    loss = -beta * jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))
    if likelihood_coef is not None:
        loss = loss - likelihood_coef * chosen
    return zero_outside(mask, loss)


def _log_odds(log_probs: jax.Array) -> jax.Array:
    bounded = jnp.minimum(log_probs, -1e-6)
    return bounded - jax.nn.log1mexp(-bounded)


def kto_reference_point(
    log_probs: jax.Array, ref_log_probs: jax.Array, *, mask: jax.Array | None = None
) -> jax.Array:
    """KTO's reference point: the KL of policy and reference, estimated on mismatched completions.

    max(0, mean(log_probs - ref_log_probs)). It is a statistic of the batch: compute it once on the
    whole optimiser batch, before micro-batching.

    Args:
      log_probs: float[...], of completions that belong to *other* prompts, from
        `sequence_log_probs`.
      ref_log_probs: float[...], of the same under the reference.
      mask: bool[...] of completions, None for all.

    Returns:
      A scalar in nats per completion; not differentiated.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: the mask is not boolean.

    References: arXiv:2402.01306, section 4.
    """
    check_shapes({"log_probs": log_probs, "ref_log_probs": ref_log_probs})
    everything = jnp.ones(log_probs.shape, jnp.bool_) if mask is None else mask
    mean = masked_mean(_log_ratio(log_probs, ref_log_probs, mask), everything)
    return lax.stop_gradient(jnp.maximum(mean, 0))


def kto(
    log_probs: jax.Array,
    ref_log_probs: jax.Array,
    desirable: jax.Array,
    reference_point: Scalar,
    *,
    beta: Scalar,
    desirable_weight: Scalar = 1.0,
    undesirable_weight: Scalar = 1.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Kahneman-Tversky optimisation, per completion: labels of single completions, no pairs.

    With x = beta (log_probs - ref_log_probs - reference_point):
    desirable_weight (1 - sigmoid(x)) where desirable, undesirable_weight (1 - sigmoid(-x)) where
    not.

    Args:
      log_probs: float[...], of completions under the policy, from `sequence_log_probs`.
      ref_log_probs: float[...], under the reference; not differentiated.
      desirable: bool[...], the label.
      reference_point: scalar in nats from `kto_reference_point`; not differentiated.
      beta: positive scalar, may be traced, as both that follow.
      desirable_weight: weight of desirable completions.
      undesirable_weight: weight of the others: choose both so that the weighted counts are alike.
      mask: bool[...] of completions; outside it inputs are ignored and the result is 0. None: all.

    Returns:
      float[...] in at least float32, unreduced: average it over the completions of the batch.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: mask or labels are not boolean.

    References: arXiv:2402.01306. TRL estimates the reference point on each micro-batch (and on all
    processes).
    """
    check_shapes({"log_probs": log_probs, "ref_log_probs": ref_log_probs, "desirable": desirable})
    check_boolean("desirable", desirable)
    gain = beta * (_log_ratio(log_probs, ref_log_probs, mask) - lax.stop_gradient(reference_point))
    loss = jnp.where(
        desirable,
        desirable_weight * jax.nn.sigmoid(-gain),
        undesirable_weight * jax.nn.sigmoid(gain),
    )
    return zero_outside(mask, loss)
