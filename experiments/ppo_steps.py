"""PPO's functions with the config's choices bound, its numbers, and the checks of its updates."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.inputs import Model
from experiments.settings import Settings
from jaxrlhf.losses import KLState, adaptive_controller, fixed_controller
from jaxrlhf.metrics import to_floats
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.trainers import ppo
from jaxrlhf.trainers.update import update
from jaxrlhf.types import Evaluation, Experience, Rollout, TrainState

MAX_SKIPPED_IN_A_ROW = 3
NAMES = ("policy", "value")  # of the updates' metrics


def hyper_parameters(config: Settings) -> tuple[ppo.PPOHyper, OptimizerHyper, OptimizerHyper]:
    """The numbers of PPO, of the actor's and of the critic's optimiser, on the device."""
    c = config.ppo
    hyper = ppo.PPOHyper.create(
        clip_low=c.clip_low,
        clip_high=c.clip_high,
        dual_clip=c.dual_clip,
        value_clip=c.value_clip,
        gamma=c.gamma,
        lam=c.lam,
        temperature=config.rollout.temperature,
        entropy_coef=c.entropy_coef,
        kl_loss_coef=config.kl.coef if config.kl.where == "loss" else None,
    )
    # The config's names are the arguments' names.
    actor, critic = (OptimizerHyper.create(**o.as_dict()) for o in (config.actor, config.critic))
    return hyper, actor, critic


class Steps(NamedTuple):
    """PPO's jitted functions, all that is static bound: one compilation per shape of batch."""

    evaluate: Callable[..., Evaluation]
    make_experience: Callable[..., Any]
    minibatches: Callable[..., Iterator[Experience]]
    update_actor: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    update_critic: Callable[..., tuple[TrainState, dict[str, jax.Array]]]


def bind(config: Settings, model: Model, hyper: ppo.PPOHyper) -> Steps:
    """Binds the config's static choices to ``trainers.ppo``."""
    c, kl = config.ppo, config.kl
    passes = {"config": model.config, "compute_dtype": model.compute_dtype}
    micro = c.ppo_micro_batch_size
    micro_batches = c.ppo_mini_batch_size * config.rollout.n // micro
    training = functools.partial(update, num_micro_batches=micro_batches)
    actor_loss = functools.partial(ppo.actor_loss, **passes, remat=config.model.remat)
    if kl.where == "loss":
        actor_loss = functools.partial(actor_loss, kl_kind=kl.estimator)
    critic_loss = functools.partial(ppo.critic_loss, **passes, remat=config.model.remat)
    return Steps(
        evaluate=functools.partial(
            ppo.evaluate, temperature=hyper.temperature, row_block=micro, **passes
        ),
        make_experience=functools.partial(
            ppo.make_experience,
            gamma=hyper.gamma,
            lam=hyper.lam,
            kl_in=None if kl.where == "none" else kl.where,
            kl_kind=kl.estimator,
            whiten_advantages=c.whiten_advantages,
            aggregation=c.aggregation,
            norm=c.aggregation_norm,
        ),
        minibatches=functools.partial(
            ppo.minibatches, aggregation=c.aggregation, norm=c.aggregation_norm
        ),
        update_actor=functools.partial(training, loss_fn=actor_loss, name=NAMES[0]),
        update_critic=functools.partial(training, loss_fn=critic_loss, name=NAMES[1]),
    )


def kl_controller(config: Settings) -> Callable[..., KLState]:
    """(state, observed KL, rows) -> state: adaptive where the config has a target."""
    target, horizon = config.kl.target, config.kl.horizon
    if not target:
        return fixed_controller
    return functools.partial(adaptive_controller, target=target, horizon=horizon)


def observed_kl(metrics: Mapping[str, jax.Array], experience: Experience) -> jax.Array:
    """The step's KL(policy, reference), nats per token; NaN where no row was kept to measure it."""
    return jnp.where(experience.response_mask.any(), metrics["kl/k1_token_mean"], jnp.nan)


def total_steps(config: Settings, batches_per_epoch: int) -> int:
    """``total_steps`` where it is set, else ``total_epochs`` passes over the prompts."""
    by_epochs = config.total_epochs * batches_per_epoch
    return by_epochs if config.total_steps is None else config.total_steps


def check_start(
    config: Settings,
    model: Model,
    actor: TrainState,
    rollout: Rollout,
    evaluation: Evaluation,
    hyper: ppo.PPOHyper,
) -> None:
    """Refuses to train when the ratio is not 1, or the KL not 0, before the first update."""
    report = ppo.check_start(
        actor.params,
        rollout,
        evaluation,
        hyper.temperature,
        config=model.config,
        compute_dtype=model.compute_dtype,
        remat=config.model.remat,
        row_block=config.ppo.ppo_micro_batch_size,
    )
    loose = {"sampler_tolerance": 0.5, "ratio_tolerance": 0.1}
    tolerances = {} if model.compute_dtype == jnp.float32 else loose
    report = to_floats(report)
    print("before the first update: " + ", ".join(f"{k} {v:.2g}" for k, v in report.items()))
    if problems := ppo.start_problems(report, **tolerances):
        raise RuntimeError(" ".join(problems))


def check_updates(metrics: Mapping[str, float]) -> None:
    """Stops the run when updates keep being left out because they are not finite."""
    worst = max(int(metrics.get(f"{name}/skipped_in_a_row_max", 0)) for name in NAMES)
    if worst >= MAX_SKIPPED_IN_A_ROW:
        raise FloatingPointError(
            f"{worst} updates in a row were not finite and were left out; lower the learning "
            "rate, or look at the last rows of rollouts/."
        )
