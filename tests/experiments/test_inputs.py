import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.gsm8k import get_config
from experiments import inputs
from experiments.settings import Settings
from jaxrlhf.data import tables
from jaxrlhf.data.prompts import PromptIterator
from jaxrlhf.rewards.scoring import score_rows


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


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "*"])
def test_a_model_with_a_file_missing_is_named(config, workdir, tmp_path, file, refused):
    directory = tmp_path / "model"
    shutil.copytree(workdir / "start_model", directory)
    for path in directory.glob(file):
        path.unlink()
    del config.embedded
    config.model.path = str(directory)
    name = "config.json" if file == "*" else file
    assert f"{directory}/{name} is missing" in refused(
        inputs.load_model, Settings(config), tmp_path
    )


def test_plain_prompts_need_no_chat_template(config, workdir, tmp_path, refused):
    directory = tmp_path / "model"
    shutil.copytree(workdir / "start_model", directory)
    (directory / "chat_template.jinja").unlink()
    records = tables.read_table(workdir / "data/train.parquet")
    config.data.val_files = str(workdir / "data/val.parquet")  # lists of messages
    config.data.train_files = str(tmp_path / "plain.parquet")
    plain = [row | {"prompt": row["prompt"][0]["content"]} for row in records]
    tables.write_table(config.data.train_files, plain)
    del config.embedded
    config.model.path = str(directory)
    tokenizer = inputs.load_model(Settings(config), tmp_path).tokenizer
    sentence = refused(inputs.load_prompts, Settings(config), tmp_path, tokenizer)
    assert sentence.startswith(f"{directory}: has no chat template, and the prompt of ")
    assert "val.parquet: row 0 is a list of messages" in sentence
    config.data.val_files = config.data.train_files
    train, _ = inputs.load_prompts(Settings(config), tmp_path, tokenizer)
    assert train.token_ids[0] == tokenizer.encode(plain[0]["prompt"])


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


@pytest.fixture
def spoil(config, workdir, tmp_path):
    """Writes copies of the tables in which some rows' ground truths are no numbers."""

    def write(**rows):
        for key, bad in rows.items():
            records = tables.read_table(workdir / f"data/{key}.parquet")
            for row in bad:
                records[row]["reward_model"]["ground_truth"] = "eighteen"
            tables.write_table(tmp_path / f"{key}.jsonl", records)
            config.data[f"{key}_files"] = str(tmp_path / f"{key}.jsonl")

    return write


@pytest.mark.parametrize("key", ["train", "val"])
@pytest.mark.parametrize("function", ["gsm8k.score", "controls.shuffled_gsm8k"])
def test_a_record_that_no_response_could_answer_is_told_first(
    config, workdir, model, spoil, key, function, capsys, refused
):
    config.reward.function = f"jaxrlhf.rewards.{function}"
    spoil(**{key: [2, 5]})
    told = f"{key}.jsonl: row 2 (line 3): the ground truth 'eighteen' is not a number; correct it "
    sentence = refused(inputs.load_prompts, Settings(config), workdir, model.tokenizer)
    assert told in sentence
    assert "2 of " in sentence
    config.reward.on_error = "skip"
    capsys.readouterr()
    train, val = inputs.load_prompts(Settings(config), workdir, model.tokenizer)
    assert (len(train), len(val)) == (12, 8)
    assert told in capsys.readouterr().out
    spoil(**{key: range(len(val if key == "val" else train))})
    assert told.replace("2 (line 3)", "0 (line 1)") in refused(
        inputs.load_prompts, Settings(config), workdir, model.tokenizer
    )


def test_one_bad_row_costs_one_row(config, workdir, model, spoil, capsys):
    """In validation and in training, and both name it by its file."""
    config.reward.on_error = "skip"
    spoil(train=[5], val=[3])
    view = Settings(config)
    train, val = inputs.load_prompts(view, workdir, model.tokenizer)
    score, sampler = inputs.make_scorer(view), inputs.make_sampler(view, model)
    metrics = inputs.make_validation(view, sampler, val, score, model)(model.params)
    assert metrics["val/unscored_fraction"] == 1 / 8
    out = capsys.readouterr().out
    assert out.count("unscored: ") == 1
    assert "val.jsonl: row 3 (line 4), prompt index 3): the ground truth 'eighteen'" in out
    batch = PromptIterator(train, 12, seed=0).next()
    rollout = sampler.generate(
        model.params, batch.token_ids, prompt_ids=batch.prompt_ids.tolist(),
        key=jax.random.key(0), samples_per_prompt=2,
    )  # fmt: skip
    scores, _ = inputs.score_rollout(rollout, batch, score, model)
    unscored = np.flatnonzero(~scores.scored)
    assert (batch.prompt_ids[unscored // 2] == 5).all()
    assert len(unscored) == 2
    assert capsys.readouterr().out.count("train.jsonl: row 5 (line 6), prompt index 5): ") == 2


def test_of_many_unscored_rows_a_few_are_printed(capsys):
    scores = score_rows(lambda *_: [None] * 9, "a" * 9, "b" * 9, [{}] * 9, on_error="skip")
    inputs.report_problems(scores)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "unscored: 4 more rows"


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
