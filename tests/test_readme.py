"""The README is true: its Python runs, its commands are those that CI runs, its names exist."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(?:<!-- ([\w-]+) -->\n)?```(\w*)\n(.*?)```", README, re.DOTALL)
PYTHON = [code for _, language, code in BLOCKS if language == "python"]


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


def test_names_in_backticks_exist():
    paths = re.findall(r"`((?:jaxrlhf|configs|experiments|tests|third_party)/[\w./-]*)`", README)
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
        *(n for n in names if n.split("/")[1] in ("grad_norm", "learning_rate")),
        *(n for n in names if re.fullmatch(r"kl/k[13]_(token|sequence)_mean", n)),
    }
    assert names - written == set()
