import shutil

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.gsm8k import get_config
from experiments import inputs
from experiments.settings import Settings


def test_a_model_comes_with_what_belongs_to_it(workdir, capsys):
    model = inputs.load_model(Settings(get_config("tiny")), workdir)
    out = capsys.readouterr().out
    assert "these settings are not used: {'temperature': 0.6}" in out
    assert "rows end at ['<|pad|>', '<|end|>'] (ids [0, 1])" in out
    assert (model.stop_ids, model.compute_dtype) == ((0, 1), jnp.float32)
    assert model.config.num_layers == 1
    assert model.params["embed"].dtype == jnp.float32
    assert model.directory == workdir / "start_model"


def test_a_model_from_elsewhere(config, workdir, tmp_path, monkeypatch, refused):
    del config.embedded
    config.model.path = str(tmp_path / "none")
    sentence = refused(inputs.load_model, Settings(config), tmp_path)
    assert f"{tmp_path}/none is no directory" in sentence
    # A relative path is the caller's, not the run directory's.
    config.model.path = "start_model"
    monkeypatch.chdir(workdir)
    assert inputs.load_model(Settings(config), tmp_path).config.num_layers == 1


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_a_model_with_a_file_missing_is_named(config, workdir, tmp_path, file, refused):
    directory = tmp_path / "model"
    shutil.copytree(workdir / "start_model", directory)
    (directory / file).unlink()
    del config.embedded
    config.model.path = str(directory)
    assert str(directory) in refused(inputs.load_model, Settings(config), tmp_path)


def test_prompts(config, workdir, model, capsys, refused):
    config.data.max_val_prompts = 5
    train, val = inputs.load_prompts(Settings(config), workdir, model.tokenizer)
    assert (len(train), len(val)) == (12, 5)
    assert "data/train.parquet: 12 prompts; 0 over 24 tokens left out" in capsys.readouterr().out
    longest = max(map(len, train.token_ids))
    config.data.max_prompt_length = longest - 1
    cut = inputs.load_prompts(Settings(config), workdir, model.tokenizer)[0]
    assert 0 < cut.filtered == sum(len(ids) == longest for ids in train.token_ids)
    config.data.overlong_prompts = "truncate"
    cut = inputs.load_prompts(Settings(config), workdir, model.tokenizer)[0]
    assert (len(cut), max(map(len, cut.token_ids))) == (12, longest - 1)
    config.data.overlong_prompts = "error"
    sentence = refused(inputs.load_prompts, Settings(config), workdir, model.tokenizer)
    assert "data/train.parquet: row " in sentence


def test_prompts_that_cannot_be_used(config, workdir, model, tmp_path, refused):
    def sentence():
        return refused(inputs.load_prompts, Settings(config), workdir, model.tokenizer)

    config.data.max_prompt_length = 1
    assert "no prompt of 12 fits max_prompt_length 1; raise it." in sentence()
    config.data.train_files = str(tmp_path / "none.parquet")
    assert "none.parquet" in sentence()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "none.parquet")
    assert "column data_source is missing (it has text)" in sentence()
    config.data.train_files = str(tmp_path / "train.csv")
    assert "only .parquet and .jsonl" in sentence()


def scorer(entries):
    def score(prompts, responses, records):
        return entries

    return score


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ([1.0, None], "row 1 (prompt index 7): its score is None, not a number"),
        ([1.0, float("nan")], "row 1 (prompt index 7): its score is nan, not a finite"),
        ([1.0], "it returned 1 entries for 2 rows"),
        (None, "it returned a NoneType"),
    ],
)
def test_a_scorer_that_gives_no_reward(view, config, entries, part, monkeypatch, refused):
    monkeypatch.setattr(inputs, "load_scorer", lambda path, keywords: scorer(entries))
    record = {"extra_info": {"index": 7}}
    arguments = (["p", "p"], ["a", "b"], [record, record])
    assert part in refused(inputs.make_scorer(view), *arguments)
    config.reward.on_error = "skip"
    scores = inputs.make_scorer(Settings(config))(*arguments)
    assert len(scores.problems) == 1
    assert part in scores.problems[0]
    good = [True, False] if isinstance(entries, list) and len(entries) == 2 else [False, False]
    assert scores.scored.tolist() == good


def test_a_scorer_that_raises(view, monkeypatch, refused):
    def score(prompts, responses, records):
        return [1 / 0]

    monkeypatch.setattr(inputs, "load_scorer", lambda path, keywords: score)
    sentence = refused(inputs.make_scorer(view), ["p"], ["a"], [{}])
    assert "score failed: ZeroDivisionError: division by zero" in sentence


def test_the_configs_scorer_gets_its_keywords(view, capsys):
    score = inputs.make_scorer(view)
    assert "scorer: jaxrlhf.rewards.gsm8k.score(format_score=0.3" in capsys.readouterr().out
    record = {"reward_model": {"ground_truth": "4"}}
    scores = score(["?"] * 3, ["#### 4", "#### 5", "four"], [record] * 3).scores
    np.testing.assert_array_equal(scores, np.array([1, 0.3, 0], np.float32))


def test_a_scorer_that_is_not_there(config, refused):
    config.reward.function = "jaxrlhf.rewards.gsm8k.nothing"
    assert "has no 'nothing'" in refused(inputs.make_scorer, Settings(config))
    config.reward.function = "jaxrlhf.rewards.gsm8k.score"
    with config.unlocked():
        config.reward.kwargs.strictness = 1
    assert "strictness" in refused(inputs.make_scorer, Settings(config))
