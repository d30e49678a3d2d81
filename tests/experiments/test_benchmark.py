"""What of the benchmark does not depend on the machine: its inputs, its peer, its verdicts."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from absl import app

from experiments import benchmark

# Stands in for verl_gae.py: one line an answer, results by the textbook's recursion.
FAKE_PEER = """
import json, sys
import numpy as np
x = np.load(sys.argv[1])
mask, values = x["mask"], np.where(x["mask"], x["values"], 0)
advantages, future = np.zeros_like(values), np.zeros(len(values))
for t in reversed(range(values.shape[1])):
    a = x["rewards"][:, t] - values[:, t] + future
    advantages[:, t] = np.where(mask[:, t], a, 0)
    future = np.where(mask[:, t], x["gamma"] * (values[:, t] + x["lam"] * a), future)
chosen = advantages[mask]
white = (advantages - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
np.savez(sys.argv[2], advantages=white + OFFSET, returns=advantages + values)
for _ in sys.stdin:
    print(json.dumps({"verl": "0", "gae": 2.0, "gae and whiten": 3.0}), flush=True)
"""


def test_inputs_follow_the_seed():
    one, same, other = (benchmark.gae_inputs(seed, 8, 32) for seed in (0, 0, 1))
    assert one["rewards"].dtype == one["values"].dtype == np.float32
    for name, array in one.items():
        np.testing.assert_array_equal(array, same[name])
    assert not np.array_equal(one["values"], other["values"])
    lengths = one["mask"].sum(-1)
    assert np.all(lengths >= 8)
    assert len(set(lengths)) > 1
    assert not one["rewards"][~one["mask"]].any()


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_gae_case_compares_results_and_divides_times(offset, monkeypatch, tmp_path, capsys):
    peer = tmp_path / "peer.py"
    peer.write_text(FAKE_PEER.replace("OFFSET", str(offset)))
    monkeypatch.setattr(benchmark, "PEER", peer)
    result = benchmark.gae_case(sys.executable, size=16, repetitions=2)
    assert result["largest_difference"] == pytest.approx(offset, abs=1e-5)
    for name, seconds in {"gae": 2.0, "gae and whiten": 3.0}.items():
        assert result["ratio"][name] == pytest.approx(seconds / result["ours_seconds"][name])
    assert "verl 0" in capsys.readouterr().out


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "input(); print('no number')"])
def test_a_peer_that_fails_is_named(program):
    command = [sys.executable, "-c", program]
    with (
        pytest.raises(benchmark.BenchmarkError, match="gave no number"),
        benchmark.peer_process(command) as ask,
    ):
        ask()


def test_import_case(capsys):
    result = benchmark.import_case(repetitions=1)
    assert 0 < result["added_seconds"] < result["jax_seconds"] + 60
    assert "import jaxrlhf.losses" in capsys.readouterr().out


def test_memory_case_names_what_is_not_linear(monkeypatch, capsys):
    """A loss with all pairs of tokens among its temporaries."""

    def pairs(log_probs, old_log_probs):
        gaps = log_probs[:, :, None] - old_log_probs[:, None, :]
        return jnp.sort(jnp.sort(gaps, axis=-1), axis=-2)

    monkeypatch.setattr(benchmark.losses, "dppo", pairs)
    result = benchmark.memory_case(names=["cispo", "dppo"], length=128)
    assert result["not_linear"] == ["dppo"]
    assert result["worst"] == "dppo"
    assert "cispo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "names", "message"),
    [
        (["benchmark"], [], "--case"),
        (["benchmark"], ["gae"], "--verl_python"),
        (["benchmark", "gae"], ["gae"], "no flag"),
    ],
)
def test_wrong_flags_are_named(argv, names, message):
    with pytest.raises(app.UsageError, match=message):
        benchmark.check_flags(argv, names, None)
    benchmark.check_flags(["benchmark"], ["gae"], "python")


def test_table_is_aligned(capsys):
    benchmark.show("title", ["", "one"], [["a", "1"], ["long name", "22.00"]])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "title"
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith("1")
