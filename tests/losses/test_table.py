"""The table of losses lists what there is, and nothing else."""

import inspect
import pathlib
import re

import pytest

from jaxrlhf import losses
from jaxrlhf.losses import presets

FOLDER = pathlib.Path(losses.__file__).parent
README = (FOLDER / "README.md").read_text()
TABLES = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("| `")]
FUNCTIONS = {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))}
CALL = re.compile(r'^(\w+)="?([\w.]+)"?$')


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_public_function_stands_in_a_table_and_every_name_exists():
    listed = {name for row in TABLES for name in codes(row[0]) if name.isidentifier()}
    assert FUNCTIONS - listed == set(), "give each a row in jaxrlhf/losses/README.md"
    assert listed - FUNCTIONS == set(), "jaxrlhf.losses has no such function"


def test_every_row_is_complete():
    for row in TABLES:
        assert len(row) == 8, row
        assert all(cell.strip() for cell in row), row


def test_keyword_arguments_of_a_row_exist():
    rows = [row for row in TABLES if any(CALL.match(code) for code in codes(row[0]))]
    assert len(rows) > 5
    for row in rows:
        function, *settings = codes(row[0])
        parameters = inspect.signature(getattr(losses, function)).parameters
        for setting in settings:
            keyword, value = CALL.match(setting).groups()
            assert keyword in parameters, setting
            assert value in str(parameters[keyword].annotation), setting


@pytest.mark.parametrize("source", ["papers", "presets"])
def test_papers_and_presets_are_those_of_the_sources(source):
    sources = "\n".join(path.read_text() for path in FOLDER.glob("*.py"))
    if source == "papers":
        cited = {paper for row in TABLES for paper in re.findall(r"\d{4}\.\d{5}", row[4])}
        assert len(cited) > 25
        assert cited == set(re.findall(r"arXiv:(\d{4}\.\d{5})", sources))
    else:
        section = README.split("## Algorithms and parity")[1]
        assert set(presets.PARITY) <= set(codes(section))
        named = {code for code in codes(section) if code.isupper() and code != "ALGORITHMS"}
        assert {name.lower() for name in named - {"PARITY"}} == set(presets.ALGORITHMS)
        assert all(hasattr(presets, name) for name in named)
