"""PPO: its hyper-parameters, the actor's and the critic's loss, and the pieces of one iteration.

Generation and scoring happen elsewhere; the rest of an iteration is::

    rollout = trim(rollout, multiple=64)
    evaluation = evaluate(actor.params, ref_params, critic.params, rollout, hyper.temperature,
                          config=config, row_block=16)
    experience, metrics = make_experience(rollout, evaluation, scores, scored, gamma=hyper.gamma,
                                          lam=hyper.lam, kl_coef=kl_state.coef, kl_in="reward")
    for epoch in range(ppo_epochs):
        for batch in minibatches(epoch_key(run_key, step, epoch), experience, rows):
            critic, m = update(critic, batch, critic_opt, hyper, loss_fn=critic_loss_fn,
                               num_micro_batches=n, name="value")
            actor, m = update(actor, batch, actor_opt, hyper, loss_fn=actor_loss_fn,
                              num_micro_batches=n, name="policy")

with ``hyper = PPOHyper.create(...)`` and ``actor_loss_fn = functools.partial(actor_loss,
config=config)`` (likewise the critic's) made once, outside the loop: a new partial compiles anew.

References: Schulman et al. 2017 (arXiv:1707.06347), Stiennon et al. 2020 (arXiv:2009.01325).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrlhf.losses.kl import kl_estimate, log_ratio_between
from jaxrlhf.losses.log_probs import TokenLogProbs
from jaxrlhf.losses.masked import weighted_sum, zero_outside
from jaxrlhf.losses.ppo import (
    approx_kl,
    clip_fractions,
    clipped_surrogate,
    clipped_value_loss,
)
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.trainers.experience import (
    epoch_key,
    make_experience,
    minibatch_rows,
    minibatches,
    take_rows,
)
from jaxrlhf.trainers.forward import (
    check_start,
    critic_values,
    evaluate,
    policy_outputs,
    positions_and_segments,
    start_problems,
    trim,
)
from jaxrlhf.trainers.update import StepMetrics
from jaxrlhf.types import Experience

__all__ = [
    "PPOHyper",
    "actor_loss",
    "check_start",
    "critic_loss",
    "epoch_key",
    "evaluate",
    "make_experience",
    "minibatch_rows",
    "minibatches",
    "positions_and_segments",
    "start_problems",
    "take_rows",
    "trim",
]

LOSS_KL_KINDS = ("k3_st", "k1_st", "k2", "k3")  # k3 alone has the forward KL's gradient (GRPO)


@struct.dataclass
class PPOHyper:
    """PPO's numbers: float32 device scalars, made once with ``create``.

    ``None`` removes a term from the program, 0.0 keeps it. Changing a number (``hyper.replace``)
    compiles nothing as long as it stays a float32 array.

    Attributes:
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
      dual_clip: bound c of the loss for negative advantages, or None.
      value_clip: how far values may move from the old ones, or None.
      gamma, lam: discount and GAE's lambda.
      temperature: of the distribution that was sampled; all log-probs are at it. Not 0.
      entropy_coef: weight of the entropy bonus, or None.
      kl_loss_coef: weight of the KL term in the loss, or None.
    """

    clip_low: jax.Array
    clip_high: jax.Array
    dual_clip: jax.Array | None
    value_clip: jax.Array | None
    gamma: jax.Array
    lam: jax.Array
    temperature: jax.Array
    entropy_coef: jax.Array | None
    kl_loss_coef: jax.Array | None

    @classmethod
    def create(
        cls,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        value_clip: float | None = 0.2,
        gamma: float = 1.0,
        lam: float = 0.95,
        temperature: float = 1.0,
        entropy_coef: float | None = None,
        kl_loss_coef: float | None = None,
    ) -> "PPOHyper":
        """Checks Python numbers and moves each to the device as float32.

        Raises:
          ValueError: a number outside its range.
        """
        checks = {
            "set temperature above 0: a greedy policy cannot be trained.": temperature > 0,
            "set clip_low to a value in [0, 1].": 0 <= clip_low <= 1,
            "set clip_high to 0 or more.": clip_high >= 0,
            "set dual_clip above 1, or to None.": dual_clip is None or dual_clip > 1,
            "set value_clip above 0, or to None.": value_clip is None or value_clip > 0,
            "set gamma and lam to values in [0, 1].": 0 <= gamma <= 1 and 0 <= lam <= 1,
        }
        for message, fine in checks.items():
            if not fine:
                raise ValueError(message)

        def scalar(x: float) -> jax.Array:
            return jnp.asarray(x, jnp.float32)

        def optional(x: float | None) -> jax.Array | None:
            return None if x is None else scalar(x)

        return cls(
            clip_low=scalar(clip_low),
            clip_high=scalar(clip_high),
            dual_clip=optional(dual_clip),
            value_clip=optional(value_clip),
            gamma=scalar(gamma),
            lam=scalar(lam),
            temperature=scalar(temperature),
            entropy_coef=optional(entropy_coef),
            kl_loss_coef=optional(kl_loss_coef),
        )


def actor_loss(
    params: Any,
    batch: Experience,
    hyper: PPOHyper,
    *,
    config: ModelConfig,
    kl_kind: str = "k3_st",
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
    block_size: int = 128,
) -> tuple[jax.Array, StepMetrics]:
    """Clipped surrogate, minus the entropy bonus, plus the KL to the reference; a weighted sum.

    ``sum_t w_t (surrogate_t - entropy_coef H_t + kl_loss_coef KL_t)`` with ``w = loss_weights``.

    Args:
      params: the policy's.
      batch: a micro-batch; its weights were made on the whole mini-batch.
      hyper: ``entropy_coef`` or ``kl_loss_coef`` None removes that term.
      config: the model's (static).
      kl_kind: estimator of the KL term; straight-through k3 by default (k3's value, k2's
        gradient, which is the reverse KL's in expectation).
      compute_dtype, remat, block_size: as in ``policy_outputs``.

    Returns:
      (loss, metrics); ``policy/kl_k1`` and ``policy/kl_k3`` estimate KL(old policy, policy),
      ``policy/ref_kl_k3`` the KL(policy, reference) that the loss holds; nats per token.

    Raises:
      ValueError: a KL coefficient without reference log-probs, or the other way round; an
        estimator whose gradient is not a KL's (k1's is 0 in expectation).
    """
    _check_kl_term(batch, hyper, kl_kind)
    out = policy_outputs(
        params,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        hyper.temperature,
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
        block_size=block_size,
    )
    mask = batch.response_mask
    surrogate = clipped_surrogate(
        out.log_probs,
        batch.old_log_probs,
        batch.advantages,
        clip_low=hyper.clip_low,
        clip_high=hyper.clip_high,
        dual_clip=hyper.dual_clip,
        mask=mask,
    )
    loss = weighted_sum(surrogate, batch.loss_weights)
    sums = {"policy/loss": loss}
    if hyper.entropy_coef is not None:
        loss -= hyper.entropy_coef * weighted_sum(out.entropy, batch.loss_weights)
    if hyper.kl_loss_coef is not None and batch.ref_log_probs is not None:
        kl = kl_estimate(out.log_probs, batch.ref_log_probs, kind=kl_kind, mask=mask)
        loss += hyper.kl_loss_coef * weighted_sum(kl, batch.loss_weights)
        k3 = kl_estimate(out.log_probs, batch.ref_log_probs, kind="k3", mask=mask)
        sums["policy/ref_kl_k3"] = weighted_sum(k3, batch.metric_weights)
    metrics = _policy_metrics(out, batch, hyper)
    return loss, jax.lax.stop_gradient(StepMetrics(sums | metrics.sums, metrics.maxima))


def _check_kl_term(batch: Experience, hyper: PPOHyper, kl_kind: str) -> None:
    if (hyper.kl_loss_coef is None) != (batch.ref_log_probs is None):
        raise ValueError(
            'set kl_loss_coef together with kl_in="loss": one of the two is missing, so the KL '
            "term of the loss would have no effect."
        )
    if kl_kind not in LOSS_KL_KINDS:
        raise ValueError(
            f"set the loss's kl_kind to one of {', '.join(LOSS_KL_KINDS)}, not {kl_kind!r}, whose "
            "gradient is not that of a KL."
        )


def _policy_metrics(out: TokenLogProbs, batch: Experience, hyper: PPOHyper) -> StepMetrics:
    old, mask = batch.old_log_probs, batch.response_mask
    clipped = clip_fractions(
        out.log_probs,
        old,
        batch.advantages,
        clip_low=hyper.clip_low,
        clip_high=hyper.clip_high,
        mask=mask,
    )
    kl = approx_kl(out.log_probs, old, mask=mask)
    per_token = {
        "policy/clip_fraction": clipped.low + clipped.high,
        "policy/clip_fraction_low": clipped.low,
        "policy/clip_fraction_high": clipped.high,
        "policy/kl_k1": kl.k1,
        "policy/kl_k3": kl.k3,
        "policy/entropy": out.entropy,
    }
    ratios = zero_outside(mask, jnp.exp(log_ratio_between(out.log_probs, old, mask=mask)))
    return StepMetrics(
        sums={name: weighted_sum(x, batch.metric_weights) for name, x in per_token.items()},
        maxima={"policy/ratio_max": ratios.max()},
    )


def critic_loss(
    params: Any,
    batch: Experience,
    hyper: PPOHyper,
    *,
    config: ModelConfig,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
) -> tuple[jax.Array, StepMetrics]:
    """Clipped value loss ``sum_t w_t 0.5 max((V - R)^2, (clip(V, V_old +- c) - R)^2)``.

    Args:
      params: ``{"backbone", "head"}``.
      batch: a micro-batch with ``old_values`` and ``returns``.
      hyper: ``value_clip``.
      config: the backbone's (static).
      compute_dtype, remat: as in ``policy_outputs``.

    Returns:
      (loss, metrics); ``value/clip_fraction`` is the share of tokens whose value left the range.

    Raises:
      ValueError: the batch has no old values or returns.
    """
    if batch.old_values is None or batch.returns is None:
        raise ValueError("critic_loss needs old_values and returns: evaluate with a critic.")
    values = critic_values(
        params,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
    )
    mask = batch.response_mask
    per_token = clipped_value_loss(
        values, batch.old_values, batch.returns, value_clip=hyper.value_clip, mask=mask
    )
    loss = weighted_sum(per_token, batch.loss_weights)
    sums = {"value/loss": loss}
    if hyper.value_clip is not None:
        moved = jnp.abs(values - batch.old_values) > hyper.value_clip
        sums["value/clip_fraction"] = weighted_sum(moved, batch.metric_weights)
    return loss, jax.lax.stop_gradient(StepMetrics(sums, {}))
