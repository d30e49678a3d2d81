"""Whole runs with settings off the beaten track, and whole runs that must be refused."""

import re

import numpy as np
import pytest

SCORERS = """
import math


def flaky(prompts, responses, records):
    odd = [None, math.nan, "1", math.inf]
    return [odd[i // 2 % 4] if i % 2 else 0.25 * len(r) for i, r in enumerate(responses)]


def failing(prompts, responses, records):
    raise KeyError("no such answer")


calls = 0


def failing_once(prompts, responses, records):
    global calls
    calls += 1
    if calls == 2:  # after the validation before training
        failing(prompts, responses, records)
    return [0.25 * len(r) for r in responses]


def huge(prompts, responses, records):
    return [3e38 * (i % 2) for i, _ in enumerate(responses)]
"""
EXTRA = """
from configs import gsm8k


def get_config(arg):
    config = gsm8k.get_config(arg)
    config.ppo.clip = 0.3
    return config
"""


@pytest.fixture(scope="session")
def recipe(new_run):
    """A scorer's name -> the tiny recipe with it."""
    (new_run("x").path.parent / "a_users_scorers.py").write_text(SCORERS)
    return lambda name: f"configs/gsm8k.py:tiny,reward=a_users_scorers.{name}"


def actor_leaves(run, step):
    return {key: leaf for key, leaf in run.state(step)[1].items() if key.startswith("actor/params")}


@pytest.mark.slow
def test_kl_in_the_loss_adaptive_and_rows_without_a_score(new_run, recipe, base):
    run = new_run("loss")
    changes = {
        "kl.where": "loss", "kl.estimator": "k3_st", "kl.target": 0.05, "kl.horizon": 50.0,
        "reward.on_error": "skip", "total_steps": 3, "ppo.entropy_coef": 0.0,
        "ppo.dual_clip": 3.0, "ppo.aggregation": "seq_mean_token_mean",
        "actor.schedule": "cosine", "actor.decay_steps": 12, "actor.warmup_steps": 2,
    }  # fmt: skip
    output = run.finish(changes, recipe=recipe("flaky"), base=base)
    for fault in ("its score is None", "is nan", "is '1', not a number", "is inf"):
        assert fault in output
    before, first, second, third = run.lines()
    assert before["val/unscored_fraction"] == first["reward/unscored_fraction"] == 0.5
    for row in run.rollouts():
        assert (row["score"] is None) == (row["row"] % 2 == 1)
        assert (row["score"] is None) == (row["advantage"] is None)
    assert first["policy/ref_kl_k3"] > 0  # after the step's first update
    np.testing.assert_allclose(first["kl/coef"], 0.01, rtol=1e-6)
    # KL 0 is under the target by more than 20 %: coef * (1 - 0.2 * 8 rows / horizon).
    np.testing.assert_allclose(second["kl/coef"], 0.01 * (1 - 0.2 * 8 / 50), rtol=1e-6)
    assert third["kl/coef"] != second["kl/coef"]
    assert third["policy/learning_rate"] < second["policy/learning_rate"]


@pytest.mark.slow
def test_no_kl_and_a_critic_that_is_trained_first(new_run):
    run = new_run("warmup")
    run.finish({
        "kl.where": "none", "kl.coef": 0.0, "ppo.critic_warmup": 1, "total_steps": 2,
        "ppo.whiten_advantages": False,
    })  # fmt: skip
    _, first, second = run.lines()
    assert not [key for key in first if key.startswith("policy/")]
    assert first["value/loss"] > 0
    assert second["policy/loss"] != 0
    assert first["kl/k3_token_mean"] < 1e-9  # measured all the same
    assert second["kl/k3_token_mean"] < 1e-9  # of the rollout, before the actor's first update
    start = run.files("start_model")["model.safetensors"]
    assert run.files("export/last")["model.safetensors"] != start
    moved = actor_leaves(run, 1).items() ^ actor_leaves(run, 2).items()
    assert moved
    assert run.state(1)[1]["actor/step"] == np.int32(0).tobytes()
    assert run.state(2)[1]["actor/step"] == np.int32(4).tobytes()


@pytest.mark.slow
def test_a_learning_rate_of_0_changes_nothing(new_run):
    run = new_run("control")
    run.finish({"actor.learning_rate": 0.0, "total_steps": 3, "test_freq": 1})
    lines = run.lines()
    for key in ("val/accuracy", "val/score", "val/length_mean"):
        assert len({line[key] for line in lines}) == 1
    assert all(line["kl/k3_token_mean"] < 1e-9 for line in lines[1:])
    assert all(line["policy/grad_norm"] > 0 for line in lines[1:])
    weights = run.files("start_model")["model.safetensors"]
    assert run.files("export/last")["model.safetensors"] == weights
    assert actor_leaves(run, 2) == actor_leaves(run, 3)


@pytest.mark.slow
def test_the_default_recipe_on_a_model_directory_in_bfloat16(new_run, unbroken):
    """Every leaf of that recipe is read, and its KL controller, remat and dtype run."""
    run = new_run("bfloat16")
    settings = {
        "data.train_files": unbroken.path / "data/train.parquet",
        "data.val_files": unbroken.path / "data/val.parquet",
        "data.max_prompt_length": 24, "rollout.max_response_length": 8, "rollout.batch_size": 8,
        "ppo.train_batch_size": 4, "ppo.ppo_mini_batch_size": 4, "ppo.ppo_micro_batch_size": 2,
        "total_steps": 2,
    }  # fmt: skip
    recipe = f"configs/gsm8k.py:model={unbroken.path}/start_model"
    output = run.finish(recipe=recipe, base=settings)
    assert "before the first update (all should be near 0): start/ratio_error_max" in output
    _, first, second = run.lines()
    assert 0 < first["rollout/sampler_gap_max"] < 0.5
    assert second["kl/coef"] < first["kl/coef"]
    assert run.files("export/last").keys() == unbroken.files("export/last").keys()


# Refused


@pytest.mark.slow
def test_a_scorer_that_fails_ends_the_run_in_a_sentence(new_run, recipe, base):
    output = new_run("failing").finish(recipe=recipe("failing"), base=base, code=1)
    sentence = "error: Scorer a_users_scorers.failing failed: KeyError: 'no such answer' ("
    assert sentence in output
    assert "Traceback" not in output
    output = new_run("flaky").finish(recipe=recipe("flaky"), base=base, code=1)
    sentence = r"error: Scorer \S+flaky, row 1 \(data/val.parquet: row 1\b.*: its score is None"
    assert re.search(sentence, output)
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_scorer_that_fails_can_be_counted_instead(new_run, recipe, base):
    run, changes = new_run("counted"), {"reward.on_error": "skip", "total_steps": 1}
    output = run.finish(changes, recipe=recipe("failing_once"), base=base)
    assert "unscored: Scorer a_users_scorers.failing_once failed: KeyError" in output
    _, first = run.lines()
    assert first["reward/unscored_fraction"] == 1
    assert first["reward/mean"] is None
    assert {k: v for k, v in first.items() if k.split("/")[0] == "policy"} == {
        "policy/skipped": 0, "policy/empty": 4, "policy/skipped_in_a_row_max": 0,
    }  # fmt: skip
    weights = run.files("start_model")["model.safetensors"]
    assert run.files("export/last")["model.safetensors"] == weights
    assert all(row["score"] is None for row in run.rollouts())
    output = new_run("none").finish(changes, recipe=recipe("failing"), base=base, code=1)
    assert "error: the validation before training scored no row (the reasons" in output


@pytest.mark.slow
def test_updates_that_are_not_finite_end_the_run_in_a_sentence(new_run, recipe, base):
    run = new_run("huge")
    output = run.finish(recipe=recipe("huge"), base=base, code=1)
    assert "error: 4 updates in a row were not finite and were left out; lower the" in output
    assert run.lines()[-1]["step"] == 1
    assert run.lines()[-1]["value/skipped"] == 4
    assert run.checkpoints() == [1]  # its parameters are finite, as they were before


def test_bad_inputs_are_one_sentence_before_training(new_run, workdir):
    smollm2 = "configs/gsm8k.py:smollm2,model="
    table = {
        "data.train_files": workdir / "none.parquet",
        "data.max_prompt_length": 24,
        "rollout.max_response_length": 8,
    }
    for model, settings, sentence in (
        ("none", {}, f"{workdir}/none is no directory: give a model directory or a hub id"),
        ("start_model", table, f"{workdir}/none.parquet: is no readable parquet file"),
    ):
        run = new_run(f"bad-{model}")
        output = run.finish(recipe=f"{smollm2}{workdir / model}", base=settings, code=1)
        error, hint = output.splitlines()[-2:]
        assert error.startswith(f"error: {sentence}")
        assert "--traceback" in hint
        assert "Traceback" not in output
        assert not (run.path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_keys_that_nobody_knows_or_reads(new_run, tmp_path):
    run = new_run("unknown")
    output = run.finish({"ppo.gama": 1.0}, code=1)
    assert output.splitlines()[-1].startswith("error: the recipe has no setting gama; configs/")
    assert not run.path.exists()
    (tmp_path / "extra.py").write_text(EXTRA)
    run = new_run("unread")
    changes = {"embedded.warmup_steps": 1}
    output = run.finish(changes, recipe=f"{tmp_path}/extra.py:tiny", code=1)
    assert "error: config keys that nothing reads: ppo.clip; remove them or use them." in output
    assert run.last_step() == -1
