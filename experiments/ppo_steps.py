"""PPO's functions with the config's choices bound, its numbers, its checks, and its way out."""

import contextlib
import functools
import json
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import inputs, outputs
from experiments.inputs import Model
from experiments.monitor import Interrupted, Phases
from experiments.settings import Settings, check_ppo
from experiments.workdir import naming
from jaxrlhf.checkpoint import Checkpointer, CheckpointError
from jaxrlhf.losses import KLState, adaptive_controller, fixed_controller
from jaxrlhf.metrics import Writers, to_floats
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.trainers import ppo
from jaxrlhf.trainers.update import update
from jaxrlhf.types import Evaluation, Experience, Rollout, TrainState

MAX_SKIPPED_IN_A_ROW = 3
NAMES = ("policy", "value")  # of the updates' metrics


def check(config: Settings) -> None:
    """Refuses what can be refused before the run has a directory."""
    check_ppo(config)
    hyper_parameters(config)
    inputs.load_scorer(config.reward.function, config.reward.kwargs.as_dict())


def hyper_parameters(config: Settings) -> tuple[ppo.PPOHyper, OptimizerHyper, OptimizerHyper]:
    """The numbers of PPO, of the actor's and of the critic's optimiser, on the device."""
    c = config.ppo
    hyper = ppo.PPOHyper.create(
        clip_low=c.clip_low,
        clip_high=c.clip_high,
        dual_clip=c.dual_clip or None,  # 0 switches these off; None removes them from the program
        value_clip=c.value_clip or None,
        gamma=c.gamma,
        lam=c.lam,
        temperature=config.rollout.temperature,
        entropy_coef=c.entropy_coef or None,
        kl_loss_coef=config.kl.coef if config.kl.where == "loss" else None,
    )
    return hyper, optimizer_hyper(config.actor), optimizer_hyper(config.critic)


def optimizer_hyper(config: Settings) -> OptimizerHyper:
    """The numbers of a config's optimiser, on the device."""
    fields = config.as_dict()  # the config's names are the arguments' names
    return OptimizerHyper.create(**fields | {"max_grad_norm": fields["max_grad_norm"] or None})


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
            norm=c.aggregation_norm or None,
        ),
        minibatches=functools.partial(
            ppo.minibatches, aggregation=c.aggregation, norm=c.aggregation_norm or None
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
    """``total_epochs`` passes over the prompts, or ``total_steps`` where that is set and less."""
    by_epochs = config.total_epochs * batches_per_epoch
    return min(by_epochs, config.total_steps or by_epochs)


def tell_resumed(done: int, total: int) -> None:
    """Says where a resumed run goes on.

    Raises:
      ValueError: the run is beyond its end.
    """
    if done > total:
        raise ValueError(
            f"the run has done {done} steps, more than total_steps={total}; raise total_steps (or "
            "total_epochs), or choose another --workdir."
        )
    print(f"resumed after step {done} of {total}")


def validations(config: Settings, total_steps: int) -> Collection[int]:
    """The steps whose policy is validated: 0, the last one, and every ``test_freq``."""
    freq = config.test_freq
    return {0, total_steps, *(range(0, total_steps, freq) if freq else ())}


class Report(NamedTuple):
    """What follows a step: its validation where one is due, the best policy, its line of metrics.

    A run that was cut short between a step's checkpoint and its line makes up for it here.
    """

    workdir: pathlib.Path
    model: Model
    writers: Writers
    phases: Phases
    validate: Callable[[Any], dict[str, float]]
    validations: Collection[int]
    best_by: str = "val/score"  # a metric that every validation has
    export_if_best: Callable[..., float] = outputs.export_if_best

    def __call__(self, done: Mapping[str, Any], params: Any) -> float | None:
        """Returns the best validation so far; ``done`` is the step's part of a checkpoint."""
        file, step, best = self.workdir / "metrics.jsonl", done["step"], done["best"]
        found = _last_line(file, step)
        line = dict(done["line"]) if found is None else found
        if found is None and step in self.validations:
            with self.phases("validate"):
                line |= self.validate(params)
            line |= self.phases.pop()
        if self.best_by in line:
            best = self.export_if_best(self.workdir, params, self.model, line, best)
        if found is None:
            with naming(file):
                self.writers.write(step, line)
        return best


def _last_line(file: pathlib.Path, step: int) -> dict[str, float] | None:
    """The last line's metrics, if it is the step's."""
    lines = file.read_text().splitlines()
    last = json.loads(lines[-1]) if lines else {"step": None}
    if last.pop("step") != step:
        return None
    return {name: math.nan if value is None else value for name, value in last.items()}


@contextlib.contextmanager
def rescued(save: Callable[[], None], checkpoints: Checkpointer) -> Iterator[None]:
    """Saves once more when the block ends early, and finishes the last save in any case.

    An ``Interrupted`` ends here; any other error goes on, after what became of the save is told.
    """
    try:
        yield
    except Exception as error:
        try:
            save()
            checkpoints.close()
        except CheckpointError as failure:
            if isinstance(error, Interrupted):
                raise
            print(f"error: {failure}")
        if not isinstance(error, Interrupted):
            raise
    else:
        checkpoints.close()


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
    print(
        "before the first update (all should be near 0): "
        + ", ".join(f"{k} {v:.2g}" for k, v in report.items())
    )
    if warmup := config.ppo.critic_warmup:
        print(f"steps 1 to {warmup} train the critic alone (ppo.critic_warmup)")
    if problems := ppo.start_problems(report, **tolerances):
        raise RuntimeError(" ".join(problems))


def check_updates(
    metrics: Mapping[str, float], *, look_at: str = "the last rows of rollouts/"
) -> None:
    """Stops the run when updates of any name keep being left out because they are not finite."""
    streaks = [int(n) for name, n in metrics.items() if name.endswith("/skipped_in_a_row_max")]
    worst = max(streaks, default=0)
    if worst >= MAX_SKIPPED_IN_A_ROW:
        raise FloatingPointError(
            f"{worst} updates in a row were not finite and were left out; lower the learning "
            f"rate, or look at {look_at}."
        )
