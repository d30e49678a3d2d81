import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from experiments import preprocess
from jaxrlhf.data.tables import TableError, read_table

ROWS = {
    "train": [{"question": f"{i} + 1?", "answer": f"sum\n#### {i + 1}"} for i in range(3)],
    "test": [{"question": "9 - 2?", "answer": "#### 7"}],
}


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "in"
    directory.mkdir()
    for split, rows in ROWS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{split}.jsonl").write_text(lines)
    return directory


def _run(*args, repo_root):
    script = repo_root / "experiments" / "preprocess.py"
    env = {**os.environ, "PYTHONPATH": str(repo_root)}
    return subprocess.run(
        [sys.executable, script, *args], capture_output=True, text=True, env=env, check=False
    )


def test_the_command(source, tmp_path, repo_root):
    out = tmp_path / "out" / "gsm8k"
    done = _run(f"--input={source}", f"--output={out}", repo_root=repo_root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{out}/train.parquet: 3 rows",
        f"{out}/val.parquet: 1 rows",
    ]
    train, val = read_table(out / "train.parquet"), read_table(out / "val.parquet")
    assert [r["reward_model"]["ground_truth"] for r in train] == ["1", "2", "3"]
    assert [r["extra_info"]["split"] for r in train + val] == ["train"] * 3 + ["test"]
    assert val[0]["prompt"][0]["content"].startswith("9 - 2? ")
    (source / "test.jsonl").write_text('{"question": "q", "answer": "seven"}\n')
    failed = _run(f"--input={source}", f"--output={tmp_path / 'new'}", repo_root=repo_root)
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"preprocess: {source}/test.jsonl: row 0 (line 1): answer does")
    assert not (tmp_path / "new").exists()  # nothing, not even the split that was fine


@pytest.mark.parametrize("args", [(), ("--hub", "--input=x"), ("--hub", "extra")])
def test_flags_that_make_no_sense(repo_root, args):
    done = _run(*args, repo_root=repo_root)
    assert done.returncode != 0
    assert "--input=DIR or --hub" in done.stderr + done.stdout


def test_the_hub_is_read_through_datasets(monkeypatch, tmp_path):
    def load_dataset(name, config, *, split):
        assert (name, config) == ("openai/gsm8k", "main")
        return ROWS[split]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    written = preprocess.convert(preprocess.read_hub, tmp_path)
    assert list(written.values()) == [3, 1]
    assert len(read_table(tmp_path / "train.parquet")) == 3
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TableError, match="--hub needs the package datasets"):
        preprocess.read_hub("train")


def test_the_published_files(repo_root, tmp_path):
    shared = pathlib.Path(os.environ.get("JAXRLHF_SHARED", repo_root.parent / "shared"))
    directory = shared / "data" / "gsm8k"
    if not (directory / "train.jsonl").exists():
        pytest.skip("GSM8K is not at hand; set JAXRLHF_SHARED to a folder with data/gsm8k")
    written = preprocess.convert(lambda split: preprocess.read_local(directory, split), tmp_path)
    assert list(written.values()) == [7473, 1319]
    assert len(read_table(tmp_path / "val.parquet")) == 1319
