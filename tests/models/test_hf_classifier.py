"""Reward models' directories: round trips, what is refused, and transformers' own scores."""

import functools
import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrlhf.models import hf
from jaxrlhf.models.heads import init_critic
from jaxrlhf.models.hf_classifier import (
    is_classifier,
    load_classifier,
    load_statistics,
    save_classifier,
)
from jaxrlhf.models.scores import score_rows, sequence_scores

CASES = ["llama3", "smollm2", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_layer_types"]
PAD, EOS = 0, 2


@pytest.fixture
def reward_model(write_checkpoint, rng):
    """case -> its source's directory, ``{"backbone", "head"}`` with a random head, its config."""
    made = []

    def make(case):
        directory = write_checkpoint(case, name=f"{case}_source_{len(made)}")
        made.append(directory)
        params, config = hf.load(directory)
        model = init_critic(params, config)
        model["head"]["kernel"] = jnp.asarray(rng.normal(size=config.hidden_size), jnp.float32)
        return directory, model, config

    return make


def _rows(rng, n, *, low=3, high=96, longest=16):
    lengths = rng.permutation(np.linspace(1, longest, n).astype(int))
    return [rng.integers(low, high, size=k).tolist() for k in lengths]


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_saved_reward_model_loads_bit_for_bit(case, reward_model, tmp_path):
    source, model, config = reward_model(case)
    statistics = {"mean": 0.25, "std": 2}
    saved = save_classifier(
        tmp_path / "saved", model, config, dtype="float32", pad_token_id=PAD, source_dir=source,
        statistics=statistics, max_shard_bytes=50_000,
    )  # fmt: skip
    loaded, same = load_classifier(saved)
    assert same == config
    assert is_classifier(saved)
    assert not is_classifier(source)
    assert "lm_head" not in loaded["backbone"]
    jax.tree.map(np.testing.assert_array_equal, loaded, model)
    assert load_statistics(saved) == {"mean": 0.25, "std": 2.0}
    fields = json.loads((saved / "config.json").read_text())
    assert (fields["num_labels"], fields["pad_token_id"], fields["eos_token_id"]) == (1, PAD, EOS)
    tensors = {k: v.shape for f in saved.glob("*.safetensors") for k, v in load_file(f).items()}
    assert tensors["score.weight"] == (1, config.hidden_size)
    assert "lm_head.weight" not in tensors
    # Saved once more from itself: nothing is lost, and its statistics are not taken over.
    again = save_classifier(
        tmp_path / "again", loaded, config, dtype="float32", pad_token_id=PAD, source_dir=saved
    )
    assert (again / "config.json").read_text() == (saved / "config.json").read_text()
    with pytest.raises(FileNotFoundError, match=r"reward_statistics\.json is missing"):
        load_statistics(again)


def test_the_pad_token_is_named_in_the_tokenizers_files(reward_model, tmp_path):
    source, model, config = reward_model("smollm2")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (source / name).write_text(json.dumps({"pad_token": "<eos>", "eos_token": "<eos>"}))
    keywords = {"dtype": "float32", "pad_token_id": 1, "source_dir": source}
    for pad_token, expected in ((None, "<eos>"), ("<bos>", "<bos>")):
        saved = save_classifier(tmp_path / "x", model, config, pad_token=pad_token, **keywords)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            fields = json.loads((saved / name).read_text())
            assert fields == {"pad_token": expected, "eos_token": "<eos>"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM']: give a"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "where model_type is 'llama'"),
        ({"id2label": {"0": "a", "1": "b"}}, "the score head has 2 labels"),
        ({"num_labels": 3}, "the score head has 1 labels (num_labels, id2label)"),
        ({"id2label": None, "num_labels": None}, "the score head has 2 labels"),
        ({"attention_bias": True}, "attention_bias is True, which is not implemented"),
    ],
)
def test_other_classifiers_are_refused(change, problem, reward_model, tmp_path):
    source, model, config = reward_model("smollm2")
    keywords = {"dtype": "float32", "pad_token_id": PAD}
    saved = save_classifier(tmp_path / "saved", model, config, source_dir=source, **keywords)
    file = saved / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError) as error:
        load_classifier(saved)
    assert str(error.value).startswith(f"{file}: ")
    assert problem in str(error.value)


def test_a_head_is_missing_or_statistics_are_no_numbers(reward_model, tmp_path):
    source, model, config = reward_model("smollm2")
    keywords = {"dtype": "float32", "pad_token_id": PAD}
    file = source / "config.json"
    fields = json.loads(file.read_text())
    named = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    file.write_text(json.dumps(fields | named))
    with pytest.raises(ValueError, match=r"the weights lack tensor score\.weight"):
        load_classifier(source)
    with pytest.raises(ValueError, match="std is nan: make it a finite number"):
        save_classifier(tmp_path / "x", model, config, statistics={"std": np.nan}, **keywords)
    assert not (tmp_path / "x").exists()
    saved = save_classifier(tmp_path / "x", model, config, statistics={"std": 1}, **keywords)
    (saved / "reward_statistics.json").write_text('{"std": "1"}')
    with pytest.raises(ValueError, match="std is '1': make it a finite number"):
        load_statistics(saved)


# --- scores --------------------------------------------------------------------------------------


def test_scores_do_not_depend_on_padding_neighbours_or_order(reward_model, rng):
    """Nor on the pad token: what lies behind a row's length may be anything."""
    _, model, config = reward_model("qwen2")
    rows = _rows(rng, 7)
    alone = score_rows(model, rows, config=config, batch_size=1, multiple=16)
    scores = score_rows(model, rows, config=config, batch_size=4, multiple=8)
    assert type(scores) is np.ndarray
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, alone, atol=2e-5)
    backwards = score_rows(model, rows[::-1], config=config, batch_size=4, multiple=8)
    np.testing.assert_allclose(backwards[::-1], alone, atol=2e-5)
    junk = np.full((1, 16), 95)
    junk[0, : len(rows[0])] = rows[0]
    score = jax.jit(functools.partial(sequence_scores, config=config))
    np.testing.assert_allclose(score(model, junk, np.array([len(rows[0])])), alone[:1], atol=2e-5)
    assert score_rows(model, [], config=config).shape == (0,)
    with pytest.raises(ValueError, match="row 1 has no tokens"):
        score_rows(model, [[3], []], config=config)


@pytest.fixture
def torch_scores(tmp_path, golden_dir):
    """Runs torch_scores.py on the directories below ``tmp_path / "torch"``."""
    python = os.environ.get("JAXRLHF_TORCH_PYTHON")
    if not python:
        pytest.skip("JAXRLHF_TORCH_PYTHON names no Python with torch and transformers")

    def run():
        command = [python, str(golden_dir / "torch_scores.py"), str(tmp_path / "torch")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]

    return run


def _write_batch(directory: pathlib.Path, rows, pad):
    tokens = np.full((len(rows), 16), pad, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.asarray([len(row) for row in rows], np.int32)
    np.savez(directory / "batch.npz", tokens=tokens, lengths=lengths, pad=pad)


def test_transformers_scores_are_ours(reward_model, torch_scores, tmp_path, rng):
    """Right and left padding, eight rows at once and one by one; ours, and what it saves anew."""
    models, rows = {}, {}
    for case in CASES:
        source, models[case], config = reward_model(case)
        saved = save_classifier(
            tmp_path / "torch" / case, models[case], config, dtype="float32", pad_token_id=PAD,
            source_dir=source,
        )  # fmt: skip
        rows[case] = _rows(rng, 8)
        _write_batch(saved, rows[case], PAD)
    # pad == eos, and rows that do not end with it: nothing can be mistaken.
    source, models["eos"], config = reward_model("llama3")
    saved = save_classifier(
        tmp_path / "torch" / "eos", models["eos"], config, dtype="float32", pad_token_id=EOS,
        source_dir=source,
    )  # fmt: skip
    rows["eos"] = [[EOS, *row[:14], 5] for row in _rows(rng, 8)]
    _write_batch(saved, rows["eos"], EOS)
    # Where they do end with it, transformers takes their own end for padding.
    ended = save_classifier(
        tmp_path / "torch" / "ended", models["eos"], config, dtype="float32", pad_token_id=EOS,
        source_dir=source,
    )  # fmt: skip
    _write_batch(ended, [[*row[:15], EOS] for row in _rows(rng, 8)], EOS)
    torch_scores()
    for case, model in models.items():
        directory = tmp_path / "torch" / case
        resaved, config = load_classifier(directory / "resaved")
        ours = score_rows(model, rows[case], config=config)
        assert np.std(ours) > 0.3
        theirs = np.load(directory / "scores.npz")
        gaps = {name: np.abs(theirs[name] - ours).max() for name in theirs}
        print(case, {name: f"{gap:.1e}" for name, gap in gaps.items()})
        assert len(gaps) == 4
        assert max(gaps.values()) < 1e-4
        jax.tree.map(np.testing.assert_array_equal, resaved, model)
    batch, theirs = np.load(ended / "batch.npz"), np.load(ended / "scores.npz")
    whole = [t[:n].tolist() for t, n in zip(batch["tokens"], batch["lengths"], strict=True)]
    shorter = score_rows(models["eos"], [row[:-1] for row in whole], config=config)
    np.testing.assert_allclose(theirs["right_together"], shorter, atol=1e-4)
    assert np.abs(shorter - score_rows(models["eos"], whole, config=config)).max() > 0.1
