"""Computes goldens.npz (logits) and goldens.json (versions, checksums) with transformers.

    python make_goldens.py        (in an environment with torch, transformers, safetensors, numpy)

The weights come from `tiny_checkpoints.py`; only logits are stored, in float32.
"""

import hashlib
import json
import pathlib
import platform
import tempfile

import numpy as np
import safetensors
import safetensors.numpy
import tiny_checkpoints
import torch
import torch_logits
import transformers

HERE = pathlib.Path(__file__).parent


def checksum(tensors: dict[str, np.ndarray]) -> str:
    """sha256 over names and bytes; the tests compare it before they compare logits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    return digest.hexdigest()


def case_logits(case: str) -> np.ndarray:
    """Writes the tiny checkpoint `case` to a temporary directory and runs transformers on it."""
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        (directory / "config.json").write_text(json.dumps(tiny_checkpoints.CONFIGS[case]))
        safetensors.numpy.save_file(
            tiny_checkpoints.tensors(case), directory / "model.safetensors", {"format": "pt"}
        )
        return torch_logits.logits(name, *tiny_checkpoints.token_batch(case))


def main() -> None:
    torch.manual_seed(0)
    cases = list(tiny_checkpoints.CONFIGS)
    np.savez_compressed(HERE / "goldens.npz", **{case: case_logits(case) for case in cases})
    record = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
            "numpy": np.__version__,
        },
        "weights_sha256": {case: checksum(tiny_checkpoints.tensors(case)) for case in cases},
    }
    (HERE / "goldens.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
