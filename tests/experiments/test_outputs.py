import json

import jax.numpy as jnp

from experiments import outputs
from experiments.settings import Settings
from jaxrlhf.models import hf


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


def test_the_best_policy_is_exported(model, tmp_path):
    def best_after(accuracy, best):
        return outputs.export_if_best(
            tmp_path, model.params, model, {"val/accuracy": accuracy}, best
        )

    target = tmp_path / "export" / "best" / "model.safetensors"
    assert best_after(0.5, 0.5) == 0.5
    assert not target.exists()
    assert best_after(0.0, -1.0) == 0.0
    first = target.stat().st_ino
    assert best_after(0.0, 0.0) == 0.0
    assert target.stat().st_ino == first
    assert best_after(0.25, 0.0) == 0.25
    assert target.stat().st_ino != first
    assert hf.load(tmp_path / "export" / "best")[1] == model.config


def test_a_run_ends_with_what_it_reached_and_left(config, model, tmp_path, capsys):
    writers = outputs.make_writers(Settings(config), tmp_path, 3)
    for step, metrics in enumerate({"val/accuracy": a} for a in (0.25, 0.75, 0.5)):
        writers.write(step, metrics)
    writers.close()
    outputs.finish(tmp_path, model.params, model)
    told = "done: val accuracy 0.250 before training, 0.500 after, 0.750 at best"
    assert told in capsys.readouterr().out
    assert hf.load(tmp_path / "export" / "last")[1] == model.config
