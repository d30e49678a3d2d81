"""What an installation promises: few dependencies, no accelerator forced on anybody, a report."""

import pathlib
import re
import subprocess
import sys
import tomllib

import jaxrlhf

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=!~;]", r, maxsplit=1)[0].lower() for r in requirements}


def test_core_needs_jax_and_numpy_alone():
    assert _names(PROJECT["dependencies"]) == {"jax", "numpy"}


def test_accelerators_and_torch_are_extras_of_their_own():
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra not in ("cuda", "tpu"):
            text = " ".join(requirements).lower()
            for word in ("cuda", "tpu", "torch", "nvidia"):
                assert word not in text, f"extra {extra} forces {word}"


def test_tested_sets_of_versions_meet_the_ranges():
    for file in sorted((ROOT / ".ci").glob("constraints-*.txt")):
        pinned = {
            line.split("==")[0].lower().replace("_", "-") for line in file.read_text().split()
        }
        wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["train"]
        assert {n.replace("_", "-") for n in _names(wanted)} <= pinned, file


def test_the_report_names_versions_devices_and_extras():
    command = [sys.executable, "-m", "jaxrlhf"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"jaxrlhf {jaxrlhf.__version__}" in out
    assert re.search(r"^devices: \d+ x ", out, re.MULTILINE)
    for extra in ("train", "wandb", "test", "cuda", "tpu"):
        assert f"extra {extra}: " in out
