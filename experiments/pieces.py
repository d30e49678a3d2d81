"""The pieces of a run, built from its config; each reads its part of the config once."""

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import embedded
from experiments.settings import Settings
from jaxrlhf.data import prompts, tables
from jaxrlhf.data.tokenizer import load_tokenizer
from jaxrlhf.evaluate import responses_text, validate
from jaxrlhf.losses import (
    KLState,
    adaptive_controller,
    fixed_controller,
    masked_mean,
)
from jaxrlhf.metrics import (
    ConsoleTable,
    JsonlWriter,
    TensorBoardWriter,
    WandbWriter,
    Writers,
    to_floats,
)
from jaxrlhf.models import hf
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.progress import progress
from jaxrlhf.rewards.scoring import Scores, load_scorer, score_rows, scorer_name
from jaxrlhf.rollout.native import NativeSampler
from jaxrlhf.rollout.sampling import step_key
from jaxrlhf.trainers import ppo
from jaxrlhf.trainers.update import update
from jaxrlhf.types import Evaluation, Experience, Rollout, TrainState

COLUMNS = {
    "reward/mean": "reward",
    "val/accuracy": "val accuracy",
    "kl/k1_token_mean": "KL (nats/token)",
    "policy/entropy": "entropy",
    "rollout/length_mean": "length",
    "rollout/truncated_fraction": "truncated",
    "policy/clip_fraction": "clipped",
    "value/explained_variance": "explained var.",
    "policy/loss": "policy loss",
    "value/loss": "value loss",
    "throughput/tokens_per_second": "tokens/s",
    "time/step": "seconds",
    "time/left": "seconds left",
}
MAX_SKIPPED_IN_A_ROW = 3


class Model(NamedTuple):
    """A start model: float32 parameters, and what belongs to them."""

    params: Any
    config: ModelConfig
    compute_dtype: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    directory: pathlib.Path


def load_model(config: Settings, workdir: pathlib.Path) -> Model:
    """Opens ``model.path`` (made first, in the embedded recipe) with its tokenizer."""
    if "embedded" in config:
        embedded.prepare(config, workdir)
        directory = workdir / config.model.path
    else:
        directory = hf.resolve(config.model.path)
    tokenizer = load_tokenizer(directory)
    stop_ids = hf.stop_ids(directory, tokenizer.eos_token_id)
    if ignored := hf.ignored_generation_fields(directory):
        print(f"generation_config.json: these settings are not used: {ignored}")
    print(f"rows end at {[tokenizer.decode([i]) for i in stop_ids]} (ids {list(stop_ids)})")
    params, model = hf.load(directory)
    dtype = jnp.dtype(config.model.compute_dtype)
    return Model(params, model, dtype, tokenizer, stop_ids, pathlib.Path(directory))


def load_prompts(
    config: Settings, workdir: pathlib.Path, tokenizer: Any
) -> tuple[prompts.PromptDataset, prompts.PromptDataset]:
    """Training and validation prompts, tokenised."""
    base = workdir if "embedded" in config else pathlib.Path()
    c = config.data
    out = []
    for file, limit in ((c.train_files, None), (c.val_files, c.max_val_prompts)):
        records = tables.read_table(base / file)[:limit]
        with progress(f"tokenising {file}", total=len(records), unit="prompts") as advance:
            dataset = prompts.tokenize_prompts(
                records,
                tokenizer,
                max_prompt_length=c.max_prompt_length,
                overlong=c.overlong_prompts,
                source=file,
                on_progress=advance.update,
            )
        print(
            f"{file}: {len(dataset)} prompts; {dataset.filtered} over {c.max_prompt_length} tokens "
            f"left out, {dataset.truncated} cut"
        )
        out.append(dataset)
    return out[0], out[1]


def make_sampler(config: Settings, model: Model) -> NativeSampler:
    """The native sampler, for training and validation alike."""
    c = config.rollout
    return NativeSampler(
        model.config,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=c.max_response_length,
        stop_ids=model.stop_ids,
        pad_id=model.tokenizer.pad_token_id,
        compute_dtype=model.compute_dtype,
        chunk_length=c.chunk_length,
        batch_size=c.batch_size,
        prompt_bucket=min(64, config.data.max_prompt_length),
    )


def make_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """Token ids to the text that scorers read: without special tokens."""
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def make_scorer(config: Settings) -> Callable[..., Scores]:
    """(prompt texts, response texts, records) -> Scores, by the config's function."""
    c = config.reward
    scorer = load_scorer(c.function, c.kwargs.as_dict())
    on_error = c.on_error
    print(f"scorer: {scorer_name(scorer)}")
    return lambda prompts, responses, records: score_rows(
        scorer, prompts, responses, records, on_error=on_error
    )


def score_rollout(
    rollout: Rollout, batch: prompts.PromptBatch, score: Callable[..., Scores], model: Model
) -> tuple[Scores, dict[str, Any]]:
    """Scores every row; returns the scores, and the texts ``prompts`` and ``responses``."""
    decode = make_decode(model.tokenizer)
    n = rollout.tokens.shape[0] // len(batch.records)
    responses = responses_text(rollout, decode)
    questions = [decode(ids) for ids in batch.token_ids for _ in range(n)]
    scores = score(questions, responses, [r for r in batch.records for _ in range(n)])
    for problem in scores.problems:
        print(f"unscored: {problem}")
    return scores, {"prompts": questions, "responses": responses}


def make_validation(
    config: Settings,
    sampler: NativeSampler,
    dataset: prompts.PromptDataset,
    score: Callable[..., Scores],
    model: Model,
) -> Callable[[Any], dict[str, float]]:
    """params -> ``val/…`` metrics of greedy answers to all validation prompts."""
    decode = make_decode(model.tokenizer)
    key = step_key(config.seed, 0)  # greedy: no effect

    def run(params: Any) -> dict[str, float]:
        with progress("validation", total=len(dataset), unit="rows") as advance:
            result = validate(
                sampler,
                params,
                prompts=dataset.token_ids,
                records=dataset.records,
                decode=decode,
                score=score,
                key=key,
                on_progress=lambda tokens, rows, total: advance.update(rows),
            )
        return result.metrics

    return run


def row_columns(scores: Scores, rollout: Rollout, experience: Experience) -> dict[str, Any]:
    """What is kept of each row beside its texts; the advantage is the mean over its tokens."""
    return {
        "scores": scores.scores,
        "scored": scores.scored,
        "parts": scores.parts,
        "finish_reasons": rollout.finish_reason,
        "advantages": masked_mean(experience.advantages, experience.response_mask, axis=-1),
    }


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


def steps(config: Settings, model: Model, hyper: ppo.PPOHyper) -> Steps:
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
        evaluate=functools.partial(ppo.evaluate, row_block=micro, **passes),
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
        update_actor=functools.partial(training, loss_fn=actor_loss, name="policy"),
        update_critic=functools.partial(training, loss_fn=critic_loss, name="value"),
    )


def kl_controller(config: Settings) -> Callable[..., KLState]:
    """(state, observed KL, rows) -> state: adaptive where the config has a target."""
    target, horizon = config.kl.target, config.kl.horizon
    if not target:
        return fixed_controller
    return functools.partial(adaptive_controller, target=target, horizon=horizon)


def total_steps(config: Settings, batches_per_epoch: int) -> int:
    """``total_steps`` where it is set, else ``total_epochs`` passes over the prompts."""
    by_epochs = config.total_epochs * batches_per_epoch
    return by_epochs if config.total_steps is None else config.total_steps


def refuse_unread(config: Settings) -> None:
    """Raises where a key of the config has reached nobody by now."""
    if unread := config.unread():
        raise ValueError(
            f"config keys that nothing reads: {', '.join(unread)}; remove them or use them."
        )


def make_writers(config: Settings, workdir: pathlib.Path, steps: int) -> Writers:
    """``metrics.jsonl``, and the others that ``logging.writers`` names."""
    c, project = config.logging, config.logging.project
    others: dict[str, Callable[[], Any]] = {
        "console": lambda: ConsoleTable(COLUMNS, total_steps=steps),
        "tensorboard": lambda: TensorBoardWriter(workdir / "tensorboard"),
        "wandb": lambda: WandbWriter(workdir / "wandb", project=project, name=workdir.name),
        "jsonl": lambda: None,  # always on
    }
    if unknown := set(c.writers) - set(others):
        raise ValueError(
            f"logging.writers names {sorted(unknown)}; choose from {', '.join(others)}."
        )
    made = [others[name]() for name in c.writers if name != "jsonl"]
    jsonl = JsonlWriter(workdir / "metrics.jsonl", report=print)
    return Writers(jsonl, made, report=print)


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


def check_updates(*states: TrainState) -> None:
    """Stops the run when updates keep being left out because they are not finite."""
    for state in states:
        if int(state.skipped_in_a_row) >= MAX_SKIPPED_IN_A_ROW:
            raise FloatingPointError(
                f"{int(state.skipped_in_a_row)} updates in a row were not finite and were left "
                "out; lower the learning rate, or look at the last rows of rollouts/."
            )


def export_if_best(
    workdir: pathlib.Path, params: Any, model: Model, metrics: dict[str, float], best: float
) -> float:
    """Exports the policy to ``export/best`` if its accuracy is the best yet; returns the best."""
    accuracy = metrics["val/accuracy"]
    if accuracy > best:
        export(workdir / "export" / "best", params, model)
    return max(accuracy, best)


def export(directory: pathlib.Path, params: Any, model: Model) -> None:
    """Writes a Hugging Face directory in float32, with the start model's tokenizer."""
    hf.save(directory, params, model.config, dtype=jnp.float32, source_dir=model.directory)
