"""What a run's directory promises beside its settings, which test_settings.py covers."""

import copy
import errno
import os
import pathlib
import shutil

import pytest

from configs.gsm8k import get_config
from experiments import workdir as module
from experiments.workdir import fingerprint, naming, open_workdir

RECORDS = [
    {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}},
    {"prompt": [{"role": "user", "content": "1 + 2?"}], "reward_model": {"ground_truth": "3"}},
]


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
    "training": lambda model, train, val: train[1]["reward_model"].update(ground_truth="4"),
    "validation": lambda model, train, val: val.reverse(),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_fingerprint_tells_what_changed(workdir, tmp_path, kind):
    """A model's place does not matter, nor the records' identity; every bit of them does."""
    before = fingerprint(workdir / "start_model", RECORDS, RECORDS)
    model = tmp_path / "elsewhere"
    shutil.copytree(workdir / "start_model", model)
    train, val = copy.deepcopy(RECORDS), copy.deepcopy(RECORDS)
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
        return fingerprint(directory, [], [])["the start model's weights"]

    variants = [names, {"a": b"1", "c": b"2"}, {"a": b"1"}, {}]
    assert len({digest(files) for files in variants}) == 4


def test_an_error_that_names_no_file_is_given_one(tmp_path):
    with pytest.raises(OSError) as error, naming(pathlib.Path("there")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(error.value) == "[Errno 28] No space left on device: 'there'"
    with pytest.raises(FileNotFoundError, match="nothing"), naming(pathlib.Path("there")):
        (tmp_path / "nothing").read_bytes()
