import json
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import outputs
from experiments.settings import Settings
from jaxrlhf.figures import training_curves
from jaxrlhf.metrics import RolloutWriter
from jaxrlhf.models import hf
from jaxrlhf.rewards.scoring import score_rows


def test_writers(config, tmp_path, capsys, refused):
    config.logging.writers = ("console", "jsonl")
    writers = outputs.make_writers(Settings(config), tmp_path, 3)
    writers.write(1, {"reward/mean": jnp.float32(0.25), "other": 2.0})
    writers.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1, "reward/mean": 0.25, "other": 2.0,
    }  # fmt: skip
    assert "step 1/3" in capsys.readouterr().out
    config.logging.writers = ("print", "jsonl")
    sentence = refused(outputs.make_writers, Settings(config), tmp_path, 3)
    assert sentence.startswith("logging.writers names ['print']; choose from console, tensorboard")


def test_what_was_not_scored_is_null(tmp_path):
    """In the rows that are kept, and in the means of the parts."""
    entries = [{"score": 0.5, "correct": 1}, None, {"score": 0, "correct": 0}]
    scores = score_rows(lambda *_: entries, "abc", "def", [{}] * 3, on_error="skip")
    assert outputs.part_metrics(scores) == {"reward/correct/mean": 0.5}
    nothing = score_rows(lambda *_: [None] * 3, "abc", "def", [{}] * 3, on_error="skip")
    assert outputs.part_metrics(nothing) == {}
    mask = jnp.asarray(scores.scored[:, None] & np.array([False, True, True]))
    rollout = types.SimpleNamespace(finish_reason=jnp.zeros(3, jnp.int8))
    experience = types.SimpleNamespace(advantages=2.0 * mask, response_mask=mask)
    columns = outputs.row_columns(scores, rollout, experience)
    path = RolloutWriter(tmp_path).write(1, prompts="abc", responses="def", **columns)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["score"] for row in rows] == [0.5, None, 0.0]
    assert [row["parts"]["correct"] for row in rows] == [1.0, None, 0.0]
    assert [row["advantage"] for row in rows] == [2.0, None, 2.0]


@pytest.mark.parametrize("name", ["val/accuracy", "val/score"])
def test_the_best_policy_is_exported(model, tmp_path, name):
    """By accuracy where there is one, else by the score."""

    def best_after(value, best):
        metrics = {"val/score": -value, "val/accuracy": value}
        if name == "val/score":
            metrics = {"val/score": value}
        return outputs.export_if_best(tmp_path, model.params, model, metrics, best)

    target = tmp_path / "export" / "best" / "model.safetensors"
    assert best_after(0.5, 0.5) == 0.5
    assert not target.exists()
    assert best_after(0.0, -1.0) == 0.0
    first = target.stat().st_ino
    assert best_after(0.0, 0.0) == 0.0
    assert target.stat().st_ino == first
    assert best_after(0.25, 0.0) == 0.25
    assert target.stat().st_ino != first
    assert best_after(math.nan, 0.25) == 0.25
    assert hf.load(tmp_path / "export" / "best")[1] == model.config


@pytest.mark.parametrize("scores", [[0.2, 0.7, math.nan, 0.9, 0.8], [-9.0, -7.5, -8.0, math.nan]])
def test_the_best_of_a_run_by_scores_of_any_size(monkeypatch, scores, tmp_path):
    """Scores below 1, or below 0: the start model stays the best only if it is."""
    exported = []
    monkeypatch.setattr(outputs, "export", lambda directory, params, model: exported.append(params))
    best = None
    for step, score in enumerate(scores):
        best = outputs.export_if_best(tmp_path, step, None, {"val/score": score}, best)
    assert best == np.nanmax(scores)
    assert exported[-1] == np.nanargmax(scores)
    assert exported[0] == 0


def test_a_run_that_can_score_nothing_does_not_start(tmp_path, refused):
    arguments = (tmp_path, {}, None, {"val/score": math.nan}, None)
    sentence = refused(outputs.export_if_best, *arguments)
    assert sentence.startswith("the validation before training scored no row")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("validations", "told"),
    [
        (
            [{"val/score": s, "val/accuracy": s + 0.25} for s in (0.0, 0.5, 0.25)],
            "done: val accuracy 0.250 before training, 0.500 after, 0.750 at best",
        ),
        (
            [{"val/score": s} for s in (-1.5, 0.5, math.nan, 0.25)],
            "done: val score -1.500 before training, 0.250 after, 0.500 at best",
        ),
        (
            [{"val/score": 0.0, "val/accuracy": 0.25}, {"val/score": math.nan}],
            "done: val accuracy 0.250 before training, nan after, 0.250 at best",
        ),
    ],
)
def test_a_run_ends_with_what_it_reached_and_left(
    config, model, tmp_path, capsys, validations, told
):
    config.logging.writers = ("console", "tensorboard")
    writers = outputs.make_writers(Settings(config), tmp_path, 3)
    for step, metrics in enumerate(validations):
        writers.write(step, metrics)
    writers.close()
    table = capsys.readouterr().out
    assert ("val score" in table) == ("val/accuracy" not in validations[-1])
    outputs.finish(tmp_path, model.params, model)
    assert told in capsys.readouterr().out
    training_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert hf.load(tmp_path / "export" / "last")[1] == model.config
