"""A reward model's run: its pieces, and whole runs (slow)."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.reward_model import get_config
from experiments import inputs, reward_steps
from experiments.settings import Settings
from jaxrlhf.data.preferences import check_pair, tokenize_preferences
from jaxrlhf.models.heads import init_critic
from jaxrlhf.models.hf_classifier import load_classifier, load_statistics
from jaxrlhf.models.scores import score_rows
from jaxrlhf.rewards import reward_model
from jaxrlhf.rewards.scoring import SampledText
from jaxrlhf.types import FINISH_STOP

NANO = {
    "embedded.num_layers": 1,
    "embedded.hidden_size": 32,
    "embedded.num_heads": 1,
    "embedded.train_pairs": 20,
    "embedded.val_pairs": 12,
    "embedded.demonstrations": 32,
    "embedded.warmup_steps": 3,
    "embedded.warmup_batch_size": 8,
    "rm.train_batch_size": 4,
    "rm.micro_batch_size": 2,
    "rm.score_batch_size": 8,
    "total_steps": 6,
    "save_freq": 1,
    "test_freq": 2,
}
HOW = {"recipe": "configs/reward_model.py:tiny", "base": NANO, "script": "reward_model.py"}


@pytest.fixture(autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def rm_config():
    config = get_config("tiny")
    values = {key: NANO[key] for key in NANO if not key.startswith("embedded.")}
    config.update_from_flattened_dict(values)
    return config


@pytest.fixture(scope="module")
def dataset(model):
    """Six pairs of two sources, of unequal lengths."""
    answers = [
        ("7", "3 + 4"),
        ("3 + 4 = 7", "8"),
        ("7", "4"),
        ("1 2 3", "9"),
        ("5", "6"),
        ("4", ""),
    ]
    records = [
        check_pair(
            {
                "prompt": [{"role": "user", "content": "3 + 4"}],
                "chosen": chosen,
                "rejected": rejected or "4 4 4",
                "source": "a" if i % 3 else "b",
            },
            "here",
        )
        for i, (chosen, rejected) in enumerate(answers)
    ]
    return tokenize_preferences(records, model.tokenizer, max_length=64)


@pytest.fixture(scope="module")
def params(model):
    made = init_critic(model.params, model.config)
    made["head"]["kernel"] = jax.random.normal(jax.random.key(1), (model.config.hidden_size,))
    return made


def test_validation_metrics_by_hand(dataset):
    scores = np.float32([[2, 1], [0, 1], [3, 0], [1, 1], [5, 1], [-1, -2]])
    got = reward_steps.validation_metrics(dataset, scores)
    gaps = np.float64(scores[:, 0] - scores[:, 1])
    correct = np.array([1, 0, 1, 0, 1, 1])
    half = 1.959964 * np.std(correct, ddof=1) / np.sqrt(6)
    lengths = [
        (len(a) - n, len(b) - n)
        for a, b, n in zip(dataset.chosen, dataset.rejected, dataset.prompt_lengths, strict=True)
    ]
    assert (np.array(lengths) > 0).all()
    want = {
        "val/accuracy": 4 / 6,
        "val/accuracy_low": 4 / 6 - half,
        "val/accuracy_high": 4 / 6 + half,
        "val/margin": gaps.mean(),
        "val/loss": np.log1p(np.exp(-gaps)).mean(),
        "val/length_correlation": np.corrcoef(scores.ravel(), np.ravel(lengths))[0, 1],
        "val/length_gap_correlation": np.corrcoef(gaps, np.diff(lengths)[:, 0] * -1)[0, 1],
        "val/score_mean": scores.mean(),
        "val/score_std": scores.std(),
        "val/accuracy/a": 3 / 4,
        "val/accuracy/b": 1 / 2,
    }
    assert 0 < got.pop("val/ece") < 0.5
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_export_holds_scores_of_its_training_data(rm_config, model, dataset, params, tmp_path):
    """``export/best`` is a scorer of PPO with these numbers; only a better model replaces it."""
    rm_config.data.max_statistics_pairs = 3
    config, checks = Settings(rm_config), []
    score = reward_steps.make_scorer(config, model, lambda: checks.append(None))
    export = reward_steps.make_export(config, model, dataset, score)

    def best_after(accuracy, best):
        line = {"val/accuracy": accuracy}
        return reward_steps.export_if_best(tmp_path, params, model, line, best, export=export)

    target = tmp_path / "export" / "best"
    assert best_after(0.0, None) == 0.0
    assert best_after(0.5, 0.5) == 0.5
    assert not target.exists()
    assert best_after(0.6, 0.5) == 0.6
    assert len(checks) == 1
    loaded, _ = load_classifier(target)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    rows = [row for i in (0, 2, 5) for row in (dataset.chosen[i], dataset.rejected[i])]
    scores = score_rows(params, rows, config=model.config)
    stored = load_statistics(target)
    assert stored.pop("rows") == 6
    np.testing.assert_allclose(
        (stored["mean"], stored["std"]), (scores.mean(), scores.std()), rtol=1e-4
    )
    record, text = dataset.records[0], dataset.records[0]["chosen"][0]["content"]
    (entry,) = reward_model.score([""], [text], [record], directory=str(target), normalise=True)
    assert abs(entry["score"] - (scores[0] - scores.mean()) / scores.std()) < 1e-3
    fields = json.loads((target / "config.json").read_text())
    assert fields["pad_token_id"] not in model.stop_ids


def test_a_pad_token_that_ends_no_row(model, dataset):
    own, eos = model.tokenizer.pad_token_id, model.tokenizer.eos_token_id
    words = types.SimpleNamespace(
        pad_token_id=eos, all_special_ids=[eos, dataset.chosen[0][0], 2],
        convert_ids_to_tokens=lambda i: f"<{i}>",
    )  # fmt: skip
    padded = model._replace(tokenizer=words, stop_ids=(eos,))
    assert reward_steps.pad_token(padded, dataset) == (2, "<2>")
    assert reward_steps.pad_token(model._replace(stop_ids=(eos,)), dataset) == (own, None)
    words.all_special_ids = [eos]
    assert reward_steps.pad_token(padded, dataset) == (eos, None)


def test_pairs_come_from_the_configs_files(rm_config, model, tmp_path, capsys, refused):
    row = {"prompt": [{"role": "user", "content": "3 + 4"}], "chosen": "7", "rejected": "8 8"}
    flipped = row | {"extra_info": {"flipped": True}}
    for name, rows in (("train", [row, row]), ("val", [flipped, flipped])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        rm_config.data[f"{name}_files"] = f"{name}.jsonl"
    rm_config.data.max_val_pairs = 1

    def load():
        return reward_steps.load_pairs(Settings(rm_config), tmp_path, model)

    train, val = load()
    assert (len(train), len(val)) == (2, 1)
    told = capsys.readouterr().out
    assert "train.jsonl: 2 pairs; 0 over 64 tokens left out, 0 cut, 0 of two equal" in told
    assert "judging by length alone is right on 1.000" in told
    assert "no rule can be right on more than 0.000 of them" in told
    batch = reward_steps.make_batch(train, np.array([1, 0]), model)
    assert batch.tokens.shape == (2, 2, 32)
    model = model._replace(config=types.SimpleNamespace(max_positions=7))
    assert refused(load).startswith("a row has 9 tokens and the model 7 positions; lower")


def test_updates_that_keep_failing_stop_the_run(refused):
    reward_steps.check_updates({"rm/skipped_in_a_row_max": 2.0})
    sentence = refused(reward_steps.check_updates, {"rm/skipped_in_a_row_max": 3.0})
    assert sentence.startswith("3 updates in a row were not finite and were left out; lower")


def test_sampled_rows_reach_scorers_with_their_tokens(model):
    """What PPO gives to a scorer are the rows that were sampled, cut or ended as they were."""
    seen = []

    def score(prompts, responses, records, places):
        seen.extend(responses)
        return types.SimpleNamespace(problems=())

    row = dataset_row = [*model.tokenizer("3 + 4")["input_ids"], model.tokenizer.eos_token_id]
    rollout = types.SimpleNamespace(
        tokens=jnp.asarray([[*dataset_row, 0, 0]]), prompt_lengths=jnp.asarray([2]),
        lengths=jnp.asarray([len(row)]), finish_reason=jnp.asarray([FINISH_STOP]),
    )  # fmt: skip
    batch = types.SimpleNamespace(token_ids=[row[:2]], records=[{}], places=["here"])
    _, texts = inputs.score_rollout(rollout, batch, score, model)
    assert texts["responses"] == seen == [model.tokenizer.decode(row[2:-1])]
    assert isinstance(seen[0], SampledText)
    assert seen[0].row == tuple(row)


# Whole runs


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_unbroken(new_run):
    unbroken, run = new_run("rm"), new_run("rm-killed")
    output = unbroken.finish(**HOW)
    assert "done: validation accuracy" in output
    for name in ("curves.png", "tensorboard", "calibration.json", "data/val.parquet"):
        assert (unbroken.path / name).exists(), name
    lines = unbroken.lines()
    assert [line["step"] for line in lines] == list(range(7))
    assert ["val/accuracy" in line for line in lines] == [True, False] * 3 + [True]
    run.kill_when(lambda: run.last_step() >= 2, **HOW)
    process = run.start_until(lambda: run.last_step() >= 4, **HOW)
    process.terminate()
    assert process.wait() in (0, 128 + 15)
    assert "resumed after step" in run.finish(**HOW)
    assert run.lines() == lines
    for folder in ("export/best", "export/last"):
        assert run.files(folder) == unbroken.files(folder)
    (step, leaves, host), (other_step, other_leaves, other_host) = run.state(), unbroken.state()
    assert (step, leaves, host["data"], host["best"]) == (
        other_step, other_leaves, other_host["data"], other_host["best"],
    )  # fmt: skip
    refused = run.finish({"rm.centring": 0.5}, code=1, **HOW)
    assert "holds a run with other settings: rm.centring (0.01 -> 0.5); set them" in refused


@pytest.mark.slow
def test_the_tiny_recipe_learns(new_run):
    """To within a few points of the ceiling, and not by length."""
    run = new_run("rm-tiny")
    output = run.finish(**(HOW | {"base": {}}))
    last = run.lines()[-1]
    print(output[-400:])
    assert last["val/accuracy"] >= 0.9
    assert abs(last["val/length_correlation"]) < 0.2
    statistics = load_statistics(run.path / "export" / "best")
    assert statistics["std"] > 0.5
