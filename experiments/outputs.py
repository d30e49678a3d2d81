"""What a run leaves: metrics, rows of rollouts, exported models."""

import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.inputs import Model
from experiments.settings import Settings
from jaxrlhf.figures import read_metrics
from jaxrlhf.losses import masked_mean
from jaxrlhf.metrics import ConsoleTable, JsonlWriter, TensorBoardWriter, WandbWriter, Writers
from jaxrlhf.models import hf
from jaxrlhf.rewards.scoring import Scores
from jaxrlhf.types import Experience, Rollout

BEST_BY = ("val/accuracy", "val/score")  # the first of these that a validation gives
COLUMNS = {
    "reward/mean": "reward",
    "val/accuracy": "val accuracy",
    "val/score": "val score",
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


def make_writers(
    config: Settings,
    workdir: pathlib.Path,
    steps: int,
    *,
    columns: Mapping[str, str] = COLUMNS,
    console_freq: int = 1,
) -> Writers:
    """``metrics.jsonl``, and the others that ``logging.writers`` names.

    Args:
      config: of the run.
      workdir: its directory.
      steps: how many there will be.
      columns: metrics of the console's tables, and what they are called there.
      console_freq: steps between two such tables.
    """
    c, project = config.logging, config.logging.project
    others: dict[str, Callable[[], Any]] = {
        "console": lambda: ConsoleTable(
            columns, total_steps=steps, either=[BEST_BY], every=console_freq
        ),
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
    """What is kept of each row beside its texts; the advantage is the mean over its tokens.

    It is NaN for a row that trains nothing.
    """
    mask = experience.response_mask
    means = masked_mean(experience.advantages, mask, axis=-1)
    return {
        "scores": scores.scores,
        "scored": scores.scored,
        "parts": scores.parts,
        "finish_reasons": rollout.finish_reason,
        "advantages": jnp.where(mask.any(axis=-1), means, jnp.nan),
    }


def part_metrics(scores: Scores) -> dict[str, float]:
    """``reward/<part>/mean`` of every part, over the scored rows."""
    return {
        f"reward/{name}/mean": float(part[scores.scored].mean())
        for name, part in scores.parts.items()
    }


def export_if_best(
    workdir: pathlib.Path, params: Any, model: Model, metrics: dict[str, float], best: float | None
) -> float:
    """Exports the policy to ``export/best`` if its validation is the best yet.

    Args:
      workdir: the run's directory.
      params: the policy.
      model: what it started from.
      metrics: of a validation; its accuracy counts where the scorer tells one, else its score.
      best: the best before it; None for the first validation of a run.

    Returns:
      The best so far.

    Raises:
      ValueError: the first validation scored nothing, so no policy could be told from another.
    """
    value = metrics[next(name for name in BEST_BY if name in metrics)]
    if math.isnan(value):
        if best is None:
            raise ValueError(
                "the validation before training scored no row (the reasons are printed above), so "
                "no policy could be told from another: correct reward.function or data.val_files."
            )
        return best
    if best is None or value > best:
        export(workdir / "export" / "best", params, model)
        return value
    return best


def export(directory: pathlib.Path, params: Any, model: Model) -> None:
    """Writes a Hugging Face directory in float32, with the start model's tokenizer."""
    hf.save(directory, params, model.config, dtype=jnp.float32, source_dir=model.directory)


def finish(workdir: pathlib.Path, params: Any, model: Model) -> None:
    """Exports the last policy and says what the run reached and left."""
    export(workdir / "export" / "last", params, model)
    columns = read_metrics(workdir / "metrics.jsonl")
    name = next(name for name in BEST_BY if name in columns)
    known = dict(zip(*columns[name], strict=True))
    # A validation that scored nothing has no accuracy.
    values = np.array([known.get(step, math.nan) for step in columns["val/score"][0]])
    print(
        f"done: {COLUMNS[name]} {values[0]:.3f} before training, {values[-1]:.3f} after, "
        f"{np.nanmax(values):.3f} at best"
    )
    print(f"{workdir} holds metrics.jsonl, curves.png, rollouts/, export/best, export/last")
