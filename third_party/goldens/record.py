"""Collects cases and writes them as JSON, one case a line. Shared by the make_*.py scripts."""

import importlib.metadata
import json
import math
import pathlib
import platform
from typing import Any

import inputs
import numpy as np
import torch

HERE = pathlib.Path(__file__).parent

Identity = dict[str, object]


def ids(maker: str, **kwargs: object) -> Identity:
    """The ``inputs`` of a case: a maker of inputs.py and its keyword arguments, False left out."""
    return {"maker": maker, **{k: v for k, v in kwargs.items() if v is not False}}


def tensor(array: np.ndarray, *, grad: bool = False, bfloat16: bool = False) -> torch.Tensor:
    """A torch copy; ``bfloat16`` casts floating arrays (which are rounded already)."""
    out = torch.from_numpy(np.array(array))
    if bfloat16 and out.is_floating_point():
        out = out.to(torch.bfloat16)
    return out.requires_grad_(grad)


def tensors(
    arrays: dict[str, np.ndarray], *, grad: tuple[str, ...] = (), bfloat16: bool = False
) -> dict[str, torch.Tensor]:
    """Torch copies of all arrays; those named in ``grad`` are leaves to differentiate by."""
    return {n: tensor(x, grad=n in grad, bfloat16=bfloat16) for n, x in arrays.items()}


def plain(x: Any) -> Any:
    """Numbers that JSON holds: nine significant digits, non-finite ones as strings."""
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, torch.Tensor):
        x = x.detach().to(torch.float32) if x.is_floating_point() else x.detach()
        return plain(x.tolist())
    if isinstance(x, np.ndarray | np.generic):
        return plain(x.tolist())
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    if isinstance(x, float):
        if not math.isfinite(x):
            return str(x)
        rounded = float(f"{x:.9g}")
        return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e6 else rounded
    return x


def gradients(
    value: torch.Tensor, leaves: dict[str, torch.Tensor], cotangent: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """torch autograd of sum(value), or of sum(value * cotangent), by each leaf."""
    scalar = value.float().sum() if cotangent is None else (value.float() * cotangent).sum()
    found = torch.autograd.grad(scalar, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


class Recorder:
    """The cases of one golden file."""

    def __init__(self, script: str, packages: list[str]):
        versions = {name: importlib.metadata.version(name) for name in packages}
        versions["python"] = platform.python_version()
        self.head = {"script": script, "package": versions}
        self.cases: dict[str, dict[str, Any]] = {}

    def add(
        self,
        name: str,
        function: str,
        identity: dict[str, Any],
        value: Any,
        *,
        grads: dict[str, torch.Tensor] | None = None,
        arguments: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        note: str | None = None,
    ) -> None:
        """Add the case ``name``; ``value`` is an array, a number, or a dict of these."""
        assert name not in self.cases, name
        case: dict[str, Any] = {"function": function, "inputs": identity}
        case["arguments"] = arguments or {}
        if note:
            case["note"] = note
        case["value"] = plain(value)
        if grads is not None:
            case["grads"] = plain(grads)
        if metrics:
            case["metrics"] = plain(metrics)
        self.cases[name] = case

    def write(self, file: str) -> None:
        """Write the file beside this script."""
        used = {inputs.key_of(case["inputs"]): case["inputs"] for case in self.cases.values()}
        head = {**self.head, "inputs_sha256": {k: inputs.digest(i) for k, i in used.items()}}
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        body = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in self.cases.items())
        text = "{\n" + ",\n".join(lines) + ',\n"cases": {\n' + body + "\n}\n}\n"
        (HERE / file).write_text(text)
        print(f"{file}: {len(self.cases)} cases, {len(text) / 1e3:.0f} kB")
