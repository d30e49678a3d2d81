"""What a run leaves: metrics, rows of rollouts, exported models."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from experiments.inputs import Model
from experiments.settings import Settings
from jaxrlhf.figures import read_metrics
from jaxrlhf.losses import masked_mean
from jaxrlhf.metrics import ConsoleTable, JsonlWriter, TensorBoardWriter, WandbWriter, Writers
from jaxrlhf.models import hf
from jaxrlhf.rewards.scoring import Scores
from jaxrlhf.types import Experience, Rollout

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


def row_columns(scores: Scores, rollout: Rollout, experience: Experience) -> dict[str, Any]:
    """What is kept of each row beside its texts; the advantage is the mean over its tokens."""
    return {
        "scores": scores.scores,
        "scored": scores.scored,
        "parts": scores.parts,
        "finish_reasons": rollout.finish_reason,
        "advantages": masked_mean(experience.advantages, experience.response_mask, axis=-1),
    }


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


def finish(workdir: pathlib.Path, params: Any, model: Model) -> None:
    """Exports the last policy and says what the run reached and left."""
    export(workdir / "export" / "last", params, model)
    _, accuracy = read_metrics(workdir / "metrics.jsonl")["val/accuracy"]
    print(
        f"done: val accuracy {accuracy[0]:.3f} before training, {accuracy[-1]:.3f} after, "
        f"{accuracy.max():.3f} at best"
    )
    print(f"{workdir} holds metrics.jsonl, curves.png, rollouts/, export/best, export/last")
