"""Reward models: Bradley-Terry over a ``PreferenceBatch``.

params = init_critic(start_model, config)                        # {"backbone", "head"}
loss_fn = functools.partial(reward_loss, config=config)          # once
state, metrics = update(state, batch, hyper_opt, hyper, loss_fn=loss_fn, name="rm")

What uses the trained model calls ``models.scores.score_rows``, which returns plain numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrlhf.losses.masked import weighted_sum
from jaxrlhf.losses.reward_modelling import bradley_terry, pair_metrics
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.scores import sequence_scores
from jaxrlhf.trainers.update import StepMetrics
from jaxrlhf.types import PreferenceBatch


@struct.dataclass
class RewardHyper:
    """The loss's numbers: float32 device scalars; None removes a term from the program.

    Attributes:
      margin_scale: what the batch's margins are multiplied with, in units of reward.
      centring: coefficient of (chosen + rejected)^2.
      label_smoothing: probability that a label is wrong.
    """

    margin_scale: jax.Array | None
    centring: jax.Array | None
    label_smoothing: jax.Array | None

    @classmethod
    def create(
        cls,
        *,
        margin_scale: float | None = None,
        centring: float | None = None,
        label_smoothing: float | None = None,
    ) -> "RewardHyper":
        """Checks Python numbers and moves each to the device as float32.

        Raises:
          ValueError: a negative number, or a label smoothing of 0.5 or more.
        """
        numbers = {
            "margin_scale": margin_scale,
            "centring": centring,
            "label_smoothing": label_smoothing,
        }
        for name, value in numbers.items():
            if value is not None and not value >= 0:
                raise ValueError(f"set {name} to 0 or more, or to None, not {value}.")
        if label_smoothing is not None and label_smoothing >= 0.5:
            raise ValueError(f"set label_smoothing below 0.5, not {label_smoothing}.")
        return cls(**{k: None if v is None else jnp.float32(v) for k, v in numbers.items()})


def pair_scores(
    params: Any,
    batch: PreferenceBatch,
    *,
    config: ModelConfig,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
) -> jax.Array:
    """Scores f32[B, 2] of both rows of each pair, the chosen one first.

    Args:
      params: ``{"backbone", "head"}``.
      batch: pairs.
      config, compute_dtype, remat: as in ``models.scores.sequence_scores``.
    """
    n_pairs, _, width = batch.tokens.shape
    return sequence_scores(
        params,
        batch.tokens.reshape(2 * n_pairs, width),
        batch.lengths.reshape(2 * n_pairs),
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
    ).reshape(n_pairs, 2)


def reward_loss(
    params: Any,
    batch: PreferenceBatch,
    hyper: RewardHyper,
    *,
    config: ModelConfig,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
) -> tuple[jax.Array, StepMetrics]:
    """``sum_b w_b bradley_terry(chosen_b, rejected_b)``, with what ``hyper`` adds.

    Args:
      params: ``{"backbone", "head"}``.
      batch: a micro-batch whose ``loss_weights`` were made on the whole optimiser batch.
      hyper: traced numbers.
      config: the model's (static).
      compute_dtype, remat: as in ``models.scores.sequence_scores``.

    Returns:
      (loss, metrics): ``rm/loss`` in nats per pair; ``rm/accuracy`` (ties are failures);
      ``rm/margin`` (chosen - rejected) and ``rm/score_mean`` in units of reward; all by the loss's
      weights. ``rm/score_abs_max`` is the largest score's size.
    """
    scores = pair_scores(params, batch, config=config, compute_dtype=compute_dtype, remat=remat)
    chosen, rejected = scores[:, 0], scores[:, 1]
    margin = None if hyper.margin_scale is None else hyper.margin_scale * batch.margins
    per_pair = bradley_terry(
        chosen,
        rejected,
        margin=margin,
        centring=hyper.centring,
        label_smoothing=hyper.label_smoothing,
    )
    loss, pairs = weighted_sum(per_pair, batch.loss_weights), pair_metrics(chosen, rejected)
    sums = {
        "rm/loss": loss,
        "rm/accuracy": weighted_sum(pairs.accuracy, batch.loss_weights),
        "rm/margin": weighted_sum(pairs.margin, batch.loss_weights),
        "rm/score_mean": weighted_sum(scores.mean(axis=1), batch.loss_weights),
    }
    maxima = {"rm/score_abs_max": jnp.abs(scores).max()}
    return loss, jax.lax.stop_gradient(StepMetrics(sums, maxima))
