"""The READMEs are true: their Python runs and learns, CI runs their commands, their names exist."""

import functools
import itertools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LOSSES_README = (ROOT / "jaxrlhf" / "losses" / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- ([\w-]+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall(README + LOSSES_README)
PYTHON = [code for _, language, code in BLOCKS if language == "python"]
STEPS = {marker: code for marker, _, code in BLOCKS if marker.endswith("-step")}


def test_every_block_is_executed_by_something():
    assert PYTHON
    assert {language for _, language, _ in BLOCKS} == {"python", "bash"}
    ci = (ROOT / ".ci" / "run").read_text()
    for marker, language, _ in BLOCKS:
        if language == "bash":
            assert f"readme_block {marker}" in ci, f"block {marker!r} is not run by .ci/run"


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(code):
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)


@functools.cache
def run_block(marker):
    """The names that a block leaves behind."""
    names: dict = {}
    exec(compile(STEPS[marker], marker, "exec"), names)
    return names


def test_ppo_step_lowers_its_loss_on_the_batch_it_is_given():
    x = run_block("ppo-step")
    params, opt_state = x["ref_params"], x["optimizer"].init(x["ref_params"])
    batch = x["make_batch"](params, params, x["tokens"], x["mask"], x["scores"])
    curve = []
    for _ in range(20):
        params, opt_state, loss = x["ppo_step"](params, opt_state, batch)
        curve.append(float(loss))
    assert curve[3] == pytest.approx(float(x["loss"]), abs=1e-6)  # the block's own fourth step
    assert curve[-1] < curve[0] - 0.1
    assert all(later < earlier + 0.02 for earlier, later in itertools.pairwise(curve))


def test_ppo_step_teaches_what_is_rewarded():
    """The whole loop on samples of the policy itself: token 3 is rewarded, and is soon the rule."""
    x = run_block("ppo-step")
    params = ref_params = x["ref_params"]
    opt_state = x["optimizer"].init(params)

    @jax.jit
    def sample(params, key):
        def step(t, tokens):
            hidden = x["model"](params, tokens)[0][:, t - 1]
            logits = hidden @ params["embed"].T
            return tokens.at[:, t].set(jax.random.categorical(jax.random.fold_in(key, t), logits))

        return jax.lax.fori_loop(4, 12, step, jax.random.randint(key, (32, 12), 0, 11))

    means = []
    for i in range(14):
        tokens = sample(params, jax.random.key(i))
        scores = jnp.sum((tokens == 3) & x["mask"], axis=1) / 8
        means.append(float(jnp.mean(scores)))
        batch = x["make_batch"](params, ref_params, tokens, x["mask"], scores)
        for _ in range(4):
            params, opt_state, _ = x["ppo_step"](params, opt_state, batch)
    print("mean reward:", np.round(means, 2))
    assert np.mean(means[:2]) < 0.25
    assert np.mean(means[-3:]) > 0.5


def test_dpo_step_raises_the_margin_of_the_chosen_answers():
    x = run_block("dpo-step")
    params, opt_state = x["ref_params"], x["optimizer"].init(x["ref_params"])
    curve, margins = [], []
    for _ in range(40):
        params, opt_state, loss, metrics = x["dpo_step"](
            params, x["ref_params"], opt_state, x["tokens"], x["mask"]
        )
        curve.append(float(loss))
        margins.append(float(jnp.mean(metrics.margin)))
    assert curve[0] == pytest.approx(np.log(2), abs=1e-6)  # policy = reference
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert curve[3] == pytest.approx(float(x["loss"]), abs=1e-6)
    assert curve[-1] < 0.1
    assert margins[-1] > 2
    assert float(jnp.mean(metrics.accuracy)) == 1


LEFT_OUT = ("skipped", "empty")  # named by f-strings, as those two
PATH = r"`((?:jaxrlhf|configs|experiments|tests|third_party)/[\w./-]*)`"


def test_names_in_backticks_exist():
    paths = re.findall(PATH, README + LOSSES_README)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_metric_names_are_those_of_a_run():
    """Every name in the table's first column is written somewhere in the sources."""
    table = README.split("## Metrics")[1]
    first_column = "\n".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE))
    names = set(re.findall(r"`([a-z]+/[a-z_0-9]+)`", first_column))
    assert len(names) > 15
    sources = "\n".join(
        path.read_text()
        for folder in ("jaxrlhf", "experiments")
        for path in (ROOT / folder).rglob("*.py")
    )
    written = {
        *names & set(re.findall(r'"([a-z]+/[a-z_0-9]+)"', sources)),
        *(n for n in names if n.split("/")[1] in ("grad_norm", "learning_rate", *LEFT_OUT)),
        *(n for n in names if re.fullmatch(r"kl/k[13]_(token|sequence)_mean", n)),
    }
    assert names - written == set()
