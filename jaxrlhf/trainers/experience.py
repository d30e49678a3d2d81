"""From a scored rollout to optimiser batches: KL, token rewards, GAE, whitening, mini-batches."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxrlhf.losses.advantages import gae
from jaxrlhf.losses.kl import kl_estimate, token_rewards
from jaxrlhf.losses.masked import (
    masked_mean,
    masked_sum,
    masked_var,
    token_weights,
    whiten,
    zero_outside,
)
from jaxrlhf.losses.ppo import explained_variance
from jaxrlhf.trainers.forward import positions_and_segments
from jaxrlhf.types import FINISH_STOP, Evaluation, Experience, Rollout

SHUFFLE_STREAM = 0x5F1E  # keeps shuffles apart from sampling keys that start at the same run key


@functools.partial(
    jax.jit, static_argnames=("kl_in", "kl_kind", "whiten_advantages", "aggregation", "norm")
)
def make_experience(
    rollout: Rollout,
    evaluation: Evaluation,
    scores: jax.Array,
    scored: jax.Array,
    *,
    gamma: jax.Array,
    lam: jax.Array,
    kl_coef: jax.Array | None = None,
    kl_in: str | None = "reward",
    kl_kind: str = "k1",
    whiten_advantages: bool = True,
    aggregation: str = "token_mean",
    norm: float | None = None,
) -> tuple[Experience, dict[str, jax.Array]]:
    """KL, token rewards, GAE, whitening: a scored rollout becomes experience.

    A row trains nothing and enters no statistic, but is counted, when it was not scored (or its
    score is NaN or infinite), has no action token, or has a log-prob or value that is not finite.
    The score is paid at the last action token. A truncated row is treated as ended: the value
    after its last token is not bootstrapped (TRL and verl neither).

    Args:
      rollout: B rows.
      evaluation: of the same rows, with values; with reference log-probs when ``kl_in`` is set.
      scores: f32[B].
      scored: bool[B], False where no score could be had.
      gamma, lam: discount and GAE's lambda, traced scalars.
      kl_coef: traced scalar, weight of the KL penalty; given if and only if ``kl_in`` is "reward".
      kl_in: "reward" (penalty inside the token rewards), "loss" (the reference log-probs travel
        on to ``actor_loss``), or None (no KL; it is still measured when there is a reference).
      kl_kind: the estimator of the penalty in the reward.
      whiten_advantages: over all action tokens of these rows.
      aggregation, norm: of ``losses.token_weights``.

    Returns:
      (experience, metrics). KL metrics name estimator and unit: ``kl/k1_token_mean`` in nats per
      action token, ``kl/k1_sequence_mean`` in nats per row. Those of ``reward/`` are NaN when no
      row has a score to train on.

    Raises:
      ValueError: no values, a KL without a reference, or a coefficient without effect.
    """
    values, ref = _checked_terms(evaluation, kl_in, kl_coef)
    drops = _dropped_rows(rollout, evaluation, scores, scored)
    keep = ~(drops["unscored"] | drops["empty"] | drops["nonfinite"])
    mask = rollout.response_mask & keep[:, None]
    scores = jnp.where(keep, scores, 0).astype(jnp.float32)
    evaluation, values, ref = jax.tree.map(
        lambda x: zero_outside(mask, x), (evaluation, values, ref)
    )
    penalty = None
    if kl_in == "reward":
        assert ref is not None
        penalty = kl_estimate(evaluation.log_probs, ref, kind=kl_kind)
    rewards = token_rewards(scores, penalty, mask, kl_coef=kl_coef)
    raw_advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    advantages = whiten(raw_advantages, mask) if whiten_advantages else raw_advantages
    positions, segment_ids = positions_and_segments(rollout.lengths, rollout.tokens.shape[1])
    experience = Experience(
        tokens=rollout.tokens,
        positions=positions,
        segment_ids=segment_ids,
        response_mask=mask,
        old_log_probs=evaluation.log_probs,
        ref_log_probs=ref if kl_in == "loss" else None,
        old_values=values,
        advantages=advantages,
        returns=returns,
        loss_weights=token_weights(mask, segment_ids, mode=aggregation, norm=norm),
        metric_weights=token_weights(mask, segment_ids, mode="token_mean"),
    )
    metrics = {
        **_rollout_metrics(rollout, evaluation, mask, drops),
        **_score_metrics(scores, keep),
        **_kl_metrics(evaluation, mask, keep),
        **_advantage_metrics(raw_advantages, returns, values, mask),
    }
    return experience, metrics


def _checked_terms(
    evaluation: Evaluation, kl_in: str | None, kl_coef: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Values and reference log-probs, once the settings are known to fit what there is."""
    values, ref = evaluation.values, evaluation.ref_log_probs
    if values is None:
        raise ValueError("make_experience needs values: pass critic_params to evaluate.")
    if kl_in not in ("reward", "loss", None):
        raise ValueError(f'set kl_in to "reward", "loss" or None, not {kl_in!r}.')
    if kl_in is not None and ref is None:
        raise ValueError(f"pass ref_params to evaluate, or set kl_in to None: it is {kl_in!r}.")
    if (kl_coef is not None) != (kl_in == "reward"):
        raise ValueError(
            f'give kl_coef if and only if kl_in is "reward", it has no effect otherwise: kl_in is '
            f"{kl_in!r} and kl_coef is {'missing' if kl_coef is None else 'given'}."
        )
    return values, ref


def _dropped_rows(
    rollout: Rollout, evaluation: Evaluation, scores: jax.Array, scored: jax.Array
) -> dict[str, jax.Array]:
    """bool[B] per reason to leave a row out; the reasons may overlap."""
    finite = jnp.isfinite(evaluation.log_probs)
    for extra in (evaluation.ref_log_probs, evaluation.values):
        if extra is not None:
            finite &= jnp.isfinite(extra)
    return {
        "unscored": ~(scored & jnp.isfinite(scores)),
        "empty": ~rollout.response_mask.any(axis=1),
        "nonfinite": (rollout.response_mask & ~finite).any(axis=1),
    }


def _rollout_metrics(
    rollout: Rollout, evaluation: Evaluation, mask: jax.Array, drops: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    lengths = rollout.response_mask.sum(axis=1).astype(jnp.float32)
    sampler = zero_outside(mask, rollout.log_probs)
    return {
        "reward/unscored_fraction": drops["unscored"].mean(dtype=jnp.float32),
        "rollout/empty_fraction": drops["empty"].mean(dtype=jnp.float32),
        "rollout/nonfinite_fraction": drops["nonfinite"].mean(dtype=jnp.float32),
        "rollout/truncated_fraction": (rollout.finish_reason != FINISH_STOP).mean(
            dtype=jnp.float32
        ),
        "rollout/length_mean": lengths.mean(),
        "rollout/length_max": lengths.max(),
        "rollout/entropy": masked_mean(evaluation.entropy, mask),
        # KL(sampler, trainer) in nats per token by k3, and the largest gap of one token.
        "rollout/sampler_kl": masked_mean(
            kl_estimate(sampler, evaluation.log_probs, kind="k3"), mask
        ),
        "rollout/sampler_gap_max": jnp.abs(sampler - evaluation.log_probs).max(),
    }


def _score_metrics(scores: jax.Array, keep: jax.Array) -> dict[str, jax.Array]:
    metrics = {
        "reward/mean": masked_mean(scores, keep),
        "reward/std": jnp.sqrt(masked_var(scores, keep)),
        "reward/min": jnp.where(keep, scores, jnp.inf).min(),
        "reward/max": jnp.where(keep, scores, -jnp.inf).max(),
    }
    return {name: jnp.where(keep.any(), value, jnp.nan) for name, value in metrics.items()}


def _kl_metrics(evaluation: Evaluation, mask: jax.Array, keep: jax.Array) -> dict[str, jax.Array]:
    if evaluation.ref_log_probs is None:
        return {}
    metrics = {}
    for kind in ("k1", "k3"):
        kl = kl_estimate(evaluation.log_probs, evaluation.ref_log_probs, kind=kind)
        metrics[f"kl/{kind}_token_mean"] = masked_mean(kl, mask)
        metrics[f"kl/{kind}_sequence_mean"] = masked_mean(masked_sum(kl, mask, axis=1), keep)
    return metrics


def _advantage_metrics(
    advantages: jax.Array, returns: jax.Array, values: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
    """Advantages before whitening, in units of reward."""
    return {
        "advantage/mean": masked_mean(advantages, mask),
        "advantage/std": jnp.sqrt(masked_var(advantages, mask)),
        "advantage/abs_max": zero_outside(mask, jnp.abs(advantages)).max(),
        "value/mean": masked_mean(values, mask),
        "value/returns_mean": masked_mean(returns, mask),
        "value/explained_variance": explained_variance(values, returns, mask),
    }


def epoch_key(run_key: jax.Array, step: int, epoch: int) -> jax.Array:
    """The key of one epoch's shuffle: a function of (run, step, epoch), so a resumed run agrees.

    Args:
      run_key: the run's key; it may serve other purposes too, this one has a stream of its own.
      step: the run's step.
      epoch: PPO epoch within the step.
    """
    for number in (SHUFFLE_STREAM, step, epoch):
        run_key = jax.random.fold_in(run_key, number)
    return run_key


def minibatch_rows(key: jax.Array, n_rows: int, size: int) -> jax.Array:
    """Shuffled row indices i32[n_rows / size, size], each row exactly once.

    Raises:
      ValueError: ``size`` does not divide ``n_rows``; the message lists what would.
    """
    if size < 1 or n_rows % size:
        divisors = [n for n in range(1, n_rows + 1) if n_rows % n == 0]
        raise ValueError(
            f"set the mini-batch size to a divisor of the batch's {n_rows} rows "
            f"({', '.join(map(str, divisors))}), not {size}."
        )
    return jax.random.permutation(key, n_rows).reshape(-1, size)


@functools.partial(jax.jit, static_argnames=("aggregation", "norm"))
def take_rows(
    experience: Experience,
    rows: jax.Array,
    *,
    aggregation: str = "token_mean",
    norm: float | None = None,
) -> Experience:
    """The rows of a mini-batch, with loss and metric weights made anew on exactly these rows.

    Args:
      experience: B rows.
      rows: i32[R] indices.
      aggregation, norm: as given to ``make_experience``.
    """
    batch: Experience = jax.tree.map(lambda x: x[rows], experience)
    mask, segment_ids = batch.response_mask, batch.segment_ids
    return dataclasses.replace(
        batch,
        loss_weights=token_weights(mask, segment_ids, mode=aggregation, norm=norm),
        metric_weights=token_weights(mask, segment_ids, mode="token_mean"),
    )


def minibatches(
    key: jax.Array,
    experience: Experience,
    size: int,
    *,
    aggregation: str = "token_mean",
    norm: float | None = None,
) -> Iterator[Experience]:
    """One epoch of shuffled mini-batches of ``size`` rows; see ``epoch_key`` for the key.

    Raises:
      ValueError: ``size`` does not divide the rows.
    """
    rows = minibatch_rows(key, experience.tokens.shape[0], size)
    return (take_rows(experience, r, aggregation=aggregation, norm=norm) for r in rows)
