"""Whole runs: what they leave; repeated, killed, stopped, resumed they are equal bit by bit."""

import os
import re
import shutil
import signal

import numpy as np
import pytest

UNSHARED = ("time/", "throughput/", "memory/", "compile/")
RESUMED = "resumed after step {} of 6"


def assert_same_state(first, second):
    """Parameters, optimiser states, KL coefficient, data position, step, metrics: every bit."""
    (step, leaves, host), (other_step, other_leaves, other_host) = first.state(), second.state()
    for each in (host, other_host):
        each["line"] = {k: v for k, v in each["line"].items() if not k.startswith(UNSHARED)}
    assert (step, host) == (other_step, other_host)
    assert host["line"].keys() > {"policy/loss", "kl/coef"}
    assert leaves.keys() == other_leaves.keys()
    assert not [name for name in leaves if leaves[name] != other_leaves[name]]
    parts = {name.split("/")[0] for name in leaves}
    assert parts == {"actor", "critic", "kl"}
    assert any("opt_state" in name for name in leaves)


def assert_same_run(first, second):
    for ours, theirs in zip(first.lines(), second.lines(), strict=True):
        assert ours == theirs
    for folder in ("rollouts", "export/best", "export/last"):
        assert first.files(folder) == second.files(folder)
    assert_same_state(first, second)


def resume(run, unbroken, changes=None):
    output = run.finish(changes)
    assert_same_run(run, unbroken)
    return output


def test_a_run_leaves_what_the_readme_says(unbroken):
    """Everything is there, rewards are fractional, nothing is compiled after the second step."""
    for name in (
        "config.json", "curves.png", "tensorboard", "export/best/config.json",
        "export/last/model.safetensors", "start_model/tokenizer.json", "data/train.parquet",
    ):  # fmt: skip
        assert (unbroken.path / name).exists(), name
    assert unbroken.checkpoints() == [5, 6]
    assert not unbroken.checkpoints(complete=False)
    metrics = unbroken.lines()
    assert [line["step"] for line in metrics] == list(range(7))
    assert ["val/accuracy" in line for line in metrics] == [True, False] * 3 + [True]
    assert metrics[1]["kl/k3_token_mean"] < 1e-9 < metrics[6]["kl/k3_token_mean"]
    assert all(line["policy/skipped"] == line["value/skipped"] == 0 for line in metrics[1:])
    rows = unbroken.rollouts()
    assert len(rows) == 6 * 8
    third = float(np.float32(0.3))
    assert {third} < {row["score"] for row in rows} <= {0.0, third, 1.0}
    for line in metrics[1:]:
        scores = [row["score"] for row in rows if row["step"] == line["step"]]
        np.testing.assert_allclose(line["reward/mean"], np.mean(scores), rtol=1e-6)
    assert len({row["response"] for row in rows}) > 24  # every step and row has its own noise
    counts = [line["compile/count"] for line in unbroken.lines(unshared=True)[2:]]
    assert counts[0] > 20
    assert len(set(counts)) == 1, counts
    start, last = unbroken.files("start_model"), unbroken.files("export/last")
    assert start["model.safetensors"] != last["model.safetensors"]
    assert start["tokenizer.json"] == last["tokenizer.json"]


@pytest.mark.slow
def test_one_seed_one_run(new_run, unbroken):
    again = new_run("again")
    again.finish()
    assert_same_run(again, unbroken)


@pytest.mark.slow
def test_another_seed_another_run(new_run, unbroken):
    other = new_run("other")
    other.finish({"seed": 1, "total_steps": 1})
    assert other.lines()[1] != unbroken.lines()[1]
    responses = [{row["response"] for row in run.rollouts()[:8]} for run in (other, unbroken)]
    assert responses[0] != responses[1]


@pytest.mark.slow
def test_killed_in_the_middle_of_a_step(new_run, unbroken):
    run = new_run("middle")
    run.kill_when(lambda: run.last_step() >= 3)
    assert not (run.path / "export" / "last").exists()
    assert re.search(RESUMED.format("[1-5]"), resume(run, unbroken))


@pytest.mark.slow
def test_killed_while_saving(new_run, unbroken):
    run = new_run("saving")

    def half_written():
        return [step for step in run.checkpoints(complete=False) if step > 1]

    for _ in range(5):  # a save may be over just before the signal arrives
        run.kill_when(half_written)
        if broken := half_written():
            break
    assert broken
    output = resume(run, unbroken)
    assert re.search(rf"Checkpoint {broken[-1]:08d}\S* is half-written", output)
    assert RESUMED.format(broken[-1] - 1) in output


@pytest.mark.slow
def test_killed_at_an_epoch_boundary(new_run, unbroken):
    run, changes = new_run("boundary"), {"save_freq": 3}
    run.kill_when(lambda: run.checkpoints() == [3], changes)
    assert run.state()[2]["data"]["batches_drawn"] == 3  # all of the first epoch
    assert RESUMED.format(3) in resume(run, unbroken, changes)


@pytest.mark.slow
def test_sigterm_saves_the_last_finished_step(new_run, unbroken):
    run, changes = new_run("sigterm"), {"save_freq": 0}  # no other checkpoint before the end
    process = run.start_until(lambda: run.last_step() >= 2, changes)
    process.send_signal(signal.SIGSTOP)  # so that it is still there when another one comes
    refused = run.finish(changes, code=1)
    assert f"error: {run.path} is in use by another run; choose another --workdir." in refused
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 128 + signal.SIGTERM
    last = run.lines()[-1]["step"]
    assert 2 <= last < 6
    assert run.checkpoints() == [last]
    output = run.log.read_text()
    assert "SIGTERM: stopping; finished steps are saved first" in output
    assert f"stopped after step {last}; --workdir={run.path} resumes" in output
    assert RESUMED.format(last) in resume(run, unbroken, changes)


@pytest.mark.slow
def test_ctrl_c_before_the_first_step(new_run, unbroken):
    run = new_run("sigint")
    process = run.start_until((run.path / "start_model").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    assert not run.checkpoints()  # nothing is lost
    assert run.last_step() <= 0
    assert "stopped after step 0; --workdir=" in run.log.read_text()
    assert "resumed" not in resume(run, unbroken)


PLANNED = """
import os, pathlib, signal

from experiments import ppo_steps
from jaxrlhf.rewards import gsm8k

plan = {}
for line in pathlib.Path(__file__).with_name("plan.txt").read_text().splitlines():
    call, deed = line.split()
    plan[int(call)] = deed
calls = 0


def in_this_steps_update(deed):
    observed_kl = ppo_steps.observed_kl

    def instead(*args):
        ppo_steps.observed_kl = observed_kl
        deed()
        return observed_kl(*args)

    ppo_steps.observed_kl = instead


def fail():
    raise KeyError("planned")


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def score(prompts, responses, records):
    global calls
    calls += 1
    if plan.get(calls) == "fail":
        fail()
    if plan.get(calls) in ("fail-in-update", "stop-in-update"):
        in_this_steps_update({"f": fail, "s": stop}[plan[calls][0]])
    return gsm8k.score(prompts, responses, records, format_score=0.3)
"""


@pytest.mark.slow
def test_what_an_error_or_a_stop_saves(new_run, unbroken, base):
    """The last whole state, in one process after the other, until the run is as if unbroken."""
    run, changes = new_run("planned"), {"save_freq": 0}
    (run.path.parent / "planned_scorer.py").write_text(PLANNED)

    def go(plan, code):
        (run.path.parent / "plan.txt").write_text(plan)
        recipe = "configs/gsm8k.py:tiny,reward=planned_scorer.score"
        return run.finish(changes, recipe=recipe, base=base, code=code)

    # Calls of the scorer: validation 0, steps 1 and 2, validation 2, steps 3 and 4.
    assert "KeyError: 'planned'" in go("6 fail", 1)
    assert run.checkpoints() == [3]
    output = go("1 fail-in-update", 1)  # its step 4: actor and critic have moved already
    assert RESUMED.format(3) in output
    assert run.checkpoints() == [3]
    go("1 stop-in-update", 128 + signal.SIGTERM)  # step 4 is finished, its validation is not
    assert run.checkpoints() == [3, 4]
    assert run.lines()[-1]["step"] == 3
    assert RESUMED.format(4) in go("", 0)
    assert "val/accuracy" in run.lines()[4]
    assert_same_run(run, unbroken)


@pytest.mark.slow
def test_a_flipped_byte_costs_one_checkpoint(new_run, unbroken):
    """A run that is complete resumes too: it repeats what the damaged checkpoint held."""
    run = new_run("flipped")
    shutil.copytree(unbroken.path, run.path)
    data = max((run.path / "checkpoints/00000006/state").rglob("d/*"), key=os.path.getsize)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    output = resume(run, unbroken)
    said = r"Checkpoint 00000006 is damaged \(state/\S+ has another sha256 than its manifest says\)"
    assert re.search(said + ": 00000005 is used instead", output)
    assert RESUMED.format(5) in output
    assert "metrics.jsonl: 1 lines after step 5 removed." in output


@pytest.mark.slow
def test_more_steps_continue_exactly_and_other_changes_are_refused(new_run, unbroken):
    run = new_run("extended")
    run.finish({"total_steps": 3, "test_freq": 0, "save_freq": 0})
    assert "val/accuracy" in run.lines()[3]  # a run's end is validated
    refused = run.finish({"ppo.gamma": 0.5, "actor.beta1": 0.8}, code=1)
    assert (
        f"error: {run.path} holds a run with other settings: actor.beta1 (0.9 -> 0.8), "
        "ppo.gamma (1.0 -> 0.5); set them back, or choose another --workdir." in refused
    )
    allowed = {"save_freq": 2, "logging.rollouts_per_step": 2, "logging.writers": "('jsonl',)"}
    assert RESUMED.format(3) in run.finish(allowed)

    def trained(line):
        return {key: value for key, value in line.items() if not key.startswith("val/")}

    for ours, theirs in zip(run.lines(), unbroken.lines(), strict=True):
        assert trained(ours) == trained(theirs)
    assert run.files("export/last") == unbroken.files("export/last")
    step, leaves, host = run.state()
    assert (step, leaves) == unbroken.state()[:2]
    assert host["data"] == unbroken.state()[2]["data"]
    refused = run.finish({"total_steps": 3}, code=1)
    assert "error: the run has done 6 steps, more than total_steps=3; raise" in refused
    weights = run.path / "start_model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = run.finish(allowed, code=1)
    assert "by a run in which the start model's weights differed: put back what it was" in refused
