"""Supervised fine-tuning: its pieces, and whole runs (slow)."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.sft import get_config
from experiments import inputs, sft_steps
from experiments.settings import Settings
from jaxrlhf.data.batching import pad_examples
from jaxrlhf.data.conversations import check_conversation, tokenize_conversations
from jaxrlhf.models import hf
from jaxrlhf.models.transformer import forward, logits

NANO = {
    "embedded.num_layers": 1,
    "embedded.hidden_size": 32,
    "embedded.num_heads": 1,
    "embedded.train_conversations": 40,
    "embedded.val_conversations": 12,
    "data.max_length": 64,
    "sft.train_batch_size": 4,
    "sft.micro_batch_size": 2,
    "total_steps": 6,
    "save_freq": 1,
    "test_freq": 2,
}
HOW = {"recipe": "configs/sft.py:tiny", "base": NANO, "script": "sft.py"}


@pytest.fixture
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def sft_config():
    config = get_config("tiny")
    values = {key: NANO[key] for key in NANO if not key.startswith("embedded.")}
    config.update_from_flattened_dict(values)
    return config


@pytest.fixture(scope="module")
def dataset(model):
    turns = ("There are 3 pens.", "3 + 4 = 7", "How many?", "7\n#### 7")
    chats = [
        [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i, text in enumerate(turns[:n])
        ]
        for n in (2, 4, 2, 2, 4)
    ]
    records = [check_conversation({"messages": chat}, "x") for chat in chats]
    return tokenize_conversations(records, model.tokenizer, max_length=64)


def test_validation_is_the_mean_over_all_trained_tokens(
    sft_config, model, dataset, quick_compilation
):
    """Whatever shares a row or a batch; against dense log-probs in float64."""
    padded = pad_examples(dataset.examples, pad_id=0)
    arrays = [jnp.asarray(x) for x in padded[:3]]
    dense = jax.jit(lambda p: logits(p, forward(p, *arrays, config=model.config), model.config))
    z = np.asarray(dense(model.params), np.float64)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    places = np.argwhere(padded.loss_weights > 0)
    want = -np.mean([log_p[row, t - 1, padded.tokens[row, t]] for row, t in places])
    for packing in (True, False):
        sft_config.data.packing = packing
        config = Settings(sft_config)
        length = sft_steps.row_length(config, dataset)
        checks = []
        validate = sft_steps.make_validation(
            config, dataset, model, length, lambda checks=checks: checks.append(None)
        )
        metrics = validate(model.params)
        np.testing.assert_allclose(metrics["val/loss"], want, rtol=1e-5)
        np.testing.assert_allclose(metrics["val/perplexity"], np.exp(want), rtol=1e-4)
        assert len(checks) == (1 if packing else 3)


def test_the_batch_says_what_is_in_it(sft_config, model, dataset, capsys):
    data = sft_steps.make_iterator(Settings(sft_config), dataset, model, 64)
    assert (
        "an epoch is 1 updates: 5 conversations in 2 rows of 64 tokens" in capsys.readouterr().out
    )
    metrics = sft_steps.batch_metrics(data.next())
    tokens = sum(len(e.tokens) for e in dataset.examples)
    trained = sum(e.answer_mask.sum() for e in dataset.examples)
    assert metrics == {
        "data/conversations": 5.0, "data/tokens": tokens, "data/trained_tokens": trained,
        "data/filled_fraction": tokens / (4 * 64),
    }  # fmt: skip


def test_the_lowest_validation_loss_is_exported(model, tmp_path, refused):
    def best_after(loss, best):
        return sft_steps.export_if_best(tmp_path, model.params, model, {"val/loss": loss}, best)

    target = tmp_path / "export" / "best" / "model.safetensors"
    assert best_after(2.0, 1.5) == 1.5
    assert best_after(math.nan, 1.5) == 1.5
    assert not target.exists()
    assert best_after(1.4, 1.5) == 1.4
    assert target.exists()
    assert refused(best_after, math.nan, None).startswith("val/loss is nan before training; check")


def test_an_end_token_is_trained_and_stops_whoever_samples(
    sft_config, model, workdir, tmp_path, refused
):
    """The template of a base model ends turns with another token than its eos."""
    sft_config.model.path = str(workdir / "start_model")
    with sft_config.unlocked():
        del sft_config.embedded
    sft_config.data.end_token = "<|system|>"

    def load():
        return sft_steps.load_model(Settings(sft_config), workdir, lambda: None)

    loaded = load()
    end = model.tokenizer.convert_tokens_to_ids("<|system|>")
    assert set(loaded.stop_ids) == {*model.stop_ids, end}
    sft_steps.export(tmp_path / "ours", loaded.params, loaded)
    assert set(hf.stop_ids(tmp_path / "ours", model.tokenizer.eos_token_id)) == {*loaded.stop_ids}
    generation = json.loads((tmp_path / "ours/generation_config.json").read_text())
    assert generation["temperature"] == 0.6  # the rest of it stays
    sft_steps.export(tmp_path / "plain", model.params, model)
    assert hf.stop_ids(tmp_path / "plain", model.tokenizer.eos_token_id) == model.stop_ids
    sft_config.data.end_token = "3 + 4"
    assert refused(load).startswith("data.end_token='3 + 4' is 3 tokens; give the one that ends")


def test_conversations_come_from_the_configs_files(sft_config, model, tmp_path, capsys, refused):
    chat = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7"}]
    for name in ("train", "val"):
        lines = [json.dumps({"messages": chat}), json.dumps({"prompt": chat[:1], "response": "7"})]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        sft_config.data[f"{name}_files"] = f"{name}.jsonl"
    sft_config.data.max_val_conversations = 1

    def load():
        return sft_steps.load_conversations(Settings(sft_config), tmp_path, model)

    train, val = load()
    assert (len(train), len(val)) == (2, 1)
    assert train.examples[0].tokens.tolist() == train.examples[1].tokens.tolist()
    said = "train.jsonl: 2 conversations of 16 tokens, 4 of them trained on; 0 over 64 tokens left"
    assert said in capsys.readouterr().out
    short = types.SimpleNamespace(max_positions=7)
    model = model._replace(config=short)
    assert refused(load).startswith("a conversation has 8 tokens and the model 7 positions; lower")


def test_updates_that_keep_failing_stop_the_run(refused):
    sft_steps.check_updates({"sft/skipped_in_a_row_max": 2.0})
    sentence = refused(sft_steps.check_updates, {"sft/skipped_in_a_row_max": 3.0})
    assert sentence.startswith("3 updates in a row were not finite and were left out; lower")


# Whole runs


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_unbroken(new_run):
    """Also by SIGTERM; and everything is there that the README says."""
    unbroken, run = new_run("sft"), new_run("sft-killed")
    output = unbroken.finish(**HOW)
    assert "done: validation loss" in output
    for name in ("curves.png", "tensorboard", "export/best/config.json", "data/val.parquet"):
        assert (unbroken.path / name).exists(), name
    lines = unbroken.lines()
    assert [line["step"] for line in lines] == list(range(7))
    assert ["val/loss" in line for line in lines] == [True, False] * 3 + [True]
    assert lines[-1]["data/epoch"] > 1  # past a shuffle
    counts = [line["compile/count"] for line in unbroken.lines(unshared=True)[2:]]
    assert len(set(counts)) == 1, counts

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
    refused = run.finish({"data.turns": "last"}, code=1, **HOW)
    assert "holds a run with other settings: data.turns (all -> last); set them back" in refused


@pytest.mark.slow
def test_the_tiny_recipe_learns(new_run):
    run = new_run("sft-tiny")
    run.finish({"total_steps": 100}, **(HOW | {"base": {}}))
    losses = [line["val/loss"] for line in run.lines() if "val/loss" in line]
    print("validation loss:", losses)
    assert len(losses) == 3
    assert losses[0] == pytest.approx(
        np.log(len(inputs.load_tokenizer(run.path / "tokenizer"))), 0.1
    )
    assert losses[2] < losses[1] < 0.4 * losses[0]
    assert losses[2] < 0.8
    exported, _ = hf.load(run.path / "export" / "best")
    last, _ = hf.load(run.path / "export" / "last")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), exported, last))
