"""Fixtures for the model tests: tiny Hugging Face checkpoints made from a seed."""

import importlib.util
import json
import os
import pathlib
import subprocess
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture(scope="session")
def golden_dir(repo_root) -> pathlib.Path:
    return repo_root / "third_party" / "goldens" / "transformers"


@pytest.fixture(scope="session")
def tiny_checkpoints(golden_dir) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tiny_checkpoints", golden_dir / "tiny_checkpoints.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write_checkpoint(tmp_path, tiny_checkpoints) -> Callable[..., pathlib.Path]:
    """Writes a tiny checkpoint as transformers would, with changed tensors or config fields."""

    def write(
        case: str, *, dtype=np.float32, tensors=None, config=None, name="source"
    ) -> pathlib.Path:
        directory = tmp_path / name
        directory.mkdir()
        values = {k: v.astype(dtype) for k, v in tiny_checkpoints.tensors(case).items()}
        values |= tensors or {}
        kept = {k: np.ascontiguousarray(v) for k, v in values.items() if v is not None}
        save_file(kept, directory / "model.safetensors", {"format": "pt"})
        fields = tiny_checkpoints.CONFIGS[case] | (config or {})
        (directory / "config.json").write_text(json.dumps(fields))
        return directory

    return write


@pytest.fixture
def torch_logits(tmp_path, golden_dir) -> Callable[..., np.ndarray]:
    """What transformers makes of a directory, in the environment of JAXRLHF_TORCH_PYTHON."""
    python = os.environ.get("JAXRLHF_TORCH_PYTHON")
    if not python:
        pytest.skip("JAXRLHF_TORCH_PYTHON names no Python with torch and transformers")

    def run(
        directory: pathlib.Path, tokens: np.ndarray, lengths: np.ndarray, dtype: str = "float32"
    ) -> np.ndarray:
        batch, out = tmp_path / "batch.npz", tmp_path / "logits.npy"
        np.savez(batch, tokens=tokens, lengths=lengths)
        command = [python, str(golden_dir / "torch_logits.py"), str(directory), str(batch)]
        done = subprocess.run(
            [*command, str(out), dtype], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return np.load(out)

    return run
