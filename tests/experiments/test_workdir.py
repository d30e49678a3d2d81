"""What a run's directory promises beside its settings, which test_settings.py covers."""

import copy
import errno
import os
import pathlib
import shutil

import pytest

from configs.gsm8k import get_config
from experiments import inputs
from experiments import workdir as module
from experiments.settings import Settings
from experiments.workdir import fingerprint, naming, open_workdir
from jaxrlhf.data.prompts import PromptDataset
from jaxrlhf.data.tokenizer import load_tokenizer

RECORDS = [
    {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}},
    {"prompt": [{"role": "user", "content": "1 + 2?"}], "reward_model": {"ground_truth": "3"}},
]
PROMPTS = PromptDataset(RECORDS, [[1, 2, 3], [1, 2, 4]], [0, 1])


def test_two_runs_within_one_second_have_two_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.time, "strftime", lambda _: "20260101-000000")
    runs = [open_workdir(get_config("tiny"), None, "recipe") for _ in range(3)]
    for _, lock in runs:
        lock.close()
    names = [path.relative_to(tmp_path).as_posix() for path, _ in runs]
    start = "runs/recipe-20260101-000000"
    assert names == [start, f"{start}-2", f"{start}-3"]


def change_a_weight(model, train, val):
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


CHANGES = {
    "weights": change_a_weight,
    "config": lambda model, train, val: (model / "config.json").write_text("{}"),
    "training": lambda model, train, val: train.records[1]["reward_model"].update(ground_truth="4"),
    "validation": lambda model, train, val: val.records.reverse(),
    "tokens": lambda model, train, val: val.token_ids[1].append(5),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_fingerprint_tells_what_changed(workdir, tmp_path, kind):
    """A model's place does not matter, nor the records' identity; every bit of them does."""
    before = fingerprint(workdir / "start_model", PROMPTS, PROMPTS)
    model = tmp_path / "elsewhere"
    shutil.copytree(workdir / "start_model", model)
    train, val = copy.deepcopy(PROMPTS), copy.deepcopy(PROMPTS)
    assert fingerprint(model, train, val) == before
    CHANGES[kind](model, train, val)
    after = fingerprint(model, train, val)
    [changed] = [key for key in before if before[key] != after[key]]
    assert changed.startswith("the ")
    assert kind in changed


def test_a_shard_renamed_or_missing_is_another_model(tmp_path):
    names = {"a": b"1", "b": b"2"}

    def digest(files):
        directory = tmp_path / ("model-" + "-".join(files))
        directory.mkdir()
        for name, content in files.items():
            (directory / f"{name}.safetensors").write_bytes(content)
        return fingerprint(directory, PROMPTS, PROMPTS)["the start model's weights"]

    variants = [names, {"a": b"1", "c": b"2"}, {"a": b"1"}, {}]
    assert len({digest(files) for files in variants}) == 4


def test_an_error_that_names_no_file_is_given_one(tmp_path):
    with pytest.raises(OSError) as error, naming(pathlib.Path("there")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(error.value) == "[Errno 28] No space left on device: 'there'"
    with pytest.raises(FileNotFoundError, match="nothing"), naming(pathlib.Path("there")):
        (tmp_path / "nothing").read_bytes()


def test_the_date_that_a_template_prints_can_be_set(workdir, tmp_path):
    """And be changed when the run is resumed: whether the prompts are the same is looked at."""
    model = tmp_path / "model"
    shutil.copytree(workdir / "start_model", model)
    template = model / "chat_template.jinja"
    date = "{{ date_string if date_string is defined else strftime_now('%Y %m %d') }}"
    template.write_text(date + template.read_text())
    config = get_config("tiny")
    tokenizer = load_tokenizer(model)

    def prompt():
        train, _ = inputs.load_prompts(Settings(config), workdir, tokenizer)
        return tokenizer.decode(train.token_ids[0])

    open_workdir(config, str(tmp_path / "run"), "recipe")[1].close()
    config.data.max_prompt_length = 64
    assert prompt()[0] in "2 "
    config.data.max_prompt_length = 24
    config.data.template_options.date_string = "5"
    assert prompt().split("<")[0].strip() == "5"
    open_workdir(config, str(tmp_path / "run"), "recipe")[1].close()
