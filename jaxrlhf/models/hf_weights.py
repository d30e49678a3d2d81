"""Parameters from and to safetensors files under their Hugging Face names, tensor by tensor.

Beside the parameters, never more than one of their leaves is in memory a second time.
"""

import contextlib
import json
import math
import pathlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.hf_config import read_json, write_json
from jaxrlhf.models.layers import rope_frequencies
from jaxrlhf.models.specs import ParamSpec

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
# Buffers of old checkpoints that the config determines; checked against it, then left out.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def read_params(
    directory: pathlib.Path,
    spec_tree: dict[str, Any],
    config: ModelConfig,
    dtype: jax.typing.DTypeLike,
) -> dict[str, Any]:
    """The parameter tree of the directory's weights; see ``hf.load``."""
    specs, structure = jax.tree.flatten(spec_tree)
    with contextlib.ExitStack() as stack:
        reader = _open_weights(directory, stack)
        _check_tensors(reader, specs, config)
        leaves = [_read_leaf(reader, spec, np.dtype(dtype)) for spec in specs]
    return jax.tree.unflatten(structure, leaves)


class _Reader(NamedTuple):
    """The open files of a directory, and for each tensor the name of the file that holds it."""

    directory: pathlib.Path
    handles: dict[str, Any]
    files: dict[str, str]

    def read(self, tensor: str) -> np.ndarray:
        return self.handles[self.files[tensor]].get_tensor(tensor)

    def where(self, tensor: str) -> str:
        return f"{self.directory / self.files[tensor]}: tensor {tensor}"


def _open_weights(directory: pathlib.Path, stack: contextlib.ExitStack) -> _Reader:
    """Opens every weight file and finds out what is where, checked against an index."""
    index = _read_index(directory)
    files = [WEIGHTS] if index is None else sorted(set(index.values()))
    reader = _Reader(directory, {}, {})
    for file in files:
        handle = reader.handles[file] = stack.enter_context(_open(directory / file))
        for tensor in handle.keys():  # noqa: SIM118 (a handle, not a dict)
            if tensor in reader.files:
                raise ValueError(
                    f"{reader.where(tensor)} is in {file} as well: keep one of them, and the index "
                    "that fits"
                )
            reader.files[tensor] = file
    if index is not None:
        _check_index(reader, index)
    return reader


def _check_index(reader: _Reader, index: Mapping[str, str]) -> None:
    for tensor, file in sorted(index.items()):
        if reader.files.get(tensor) != file:
            raise ValueError(
                f"{reader.directory / file} lacks tensor {tensor} that {INDEX} says is there: "
                "fetch the model again"
            )
    for tensor in sorted(reader.files.keys() - index.keys()):
        raise ValueError(f"{reader.where(tensor)} is not in {INDEX}: fetch the model again")


def _read_index(directory: pathlib.Path) -> dict[str, str] | None:
    """Tensor name to shard name, or None for a directory with one weight file."""
    path = directory / INDEX
    if not path.exists():
        return None
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path} has no weight_map: fetch the model again")
    for shard in index.values():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*", shard):
            raise ValueError(f"{path} names the shard {shard!r}: it must be a plain file name")
    if (directory / WEIGHTS).exists() and WEIGHTS not in index.values():
        raise ValueError(f"{directory} has both {WEIGHTS} and {INDEX}: delete the stale one")
    return index


def _open(path: pathlib.Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: fetch the model again, as safetensors")
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}): fetch it again"
        ) from error


def _tensor_names(spec: ParamSpec) -> list[str]:
    layers = range(spec.shape[0]) if spec.stacked else [None]
    return [spec.hf_name.format(layer=i) for i in layers]


def _tensor_shape(spec: ParamSpec) -> tuple[int, ...]:
    shape = spec.shape[1:] if spec.stacked else spec.shape
    return shape[::-1] if spec.hf_transposed else shape


def _check_tensors(reader: _Reader, specs: Sequence[ParamSpec], config: ModelConfig) -> None:
    """Names, shapes and dtypes of all tensors, before the first one is read."""
    shapes = {name: _tensor_shape(spec) for spec in specs for name in _tensor_names(spec)}
    missing = [name for name in shapes if name not in reader.files]
    if missing:
        raise ValueError(
            f"{reader.directory}: the weights lack {_first(missing)} that config.json asks for: "
            "fetch the model again or correct the config"
        )
    for name, file in reader.files.items():
        view = reader.handles[file].get_slice(name)
        dtype, shape = view.get_dtype(), tuple(view.get_shape())
        if dtype not in _DTYPES:
            raise ValueError(
                f"{reader.where(name)} is {dtype}: use a checkpoint in one of {sorted(_DTYPES)}"
            )
        if shape != shapes.get(name, shape):
            raise ValueError(
                f"{reader.where(name)} has shape {shape} where config.json asks for "
                f"{shapes[name]}: correct the one that is wrong"
            )
    _check_leftovers(reader, sorted(reader.files.keys() - shapes.keys()), config)


def _check_leftovers(reader: _Reader, names: Sequence[str], config: ModelConfig) -> None:
    """Tensors that no parameter takes: the harmless kinds with the right values, or an error."""
    for name in names:
        if _ROTARY_BUFFER.fullmatch(name):
            same = _same_frequencies(reader.read(name), config)
        elif name == "lm_head.weight" and config.tie_embeddings:
            same = np.array_equal(reader.read(name), reader.read("model.embed_tokens.weight"))
        else:
            raise ValueError(
                f"{reader.where(name)} has no place in the model of config.json: use a plain "
                "causal language model or correct the config"
            )
        if not same:
            raise ValueError(
                f"{reader.where(name)} does not have the values that config.json implies (rotary "
                "settings, tie_word_embeddings): correct the config"
            )


def _same_frequencies(buffer: np.ndarray, config: ModelConfig) -> bool:
    expected = rope_frequencies(config)
    kind = jnp.finfo(buffer.dtype)
    rtol, atol = max(1e-5, 2 * float(kind.eps)), float(kind.smallest_subnormal)
    return buffer.shape == expected.shape and np.allclose(
        buffer.astype(np.float64), expected, rtol=rtol, atol=atol
    )


def _first(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"tensor {names[0]}{more}"


def _read_leaf(reader: _Reader, spec: ParamSpec, dtype: np.dtype) -> jax.Array:
    """One leaf, filled layer by layer."""
    out = np.empty(spec.shape, dtype)
    slots = out if spec.stacked else out[None]
    for slot, name in zip(slots, _tensor_names(spec), strict=True):
        tensor = reader.read(name)
        slot[...] = tensor.T if spec.hf_transposed else tensor
    return jax.device_put(out)


class _Tensor(NamedTuple):
    """One tensor to write: its name and shape in the file, and where its values come from."""

    name: str
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]


def _tensors(params: dict[str, Any], spec_tree: dict[str, Any]) -> list[_Tensor]:
    """All tensors by name; values are fetched from their device one at a time, when written."""
    specs = dict(jax.tree_util.tree_leaves_with_path(spec_tree))
    leaves = dict(jax.tree_util.tree_leaves_with_path(params))
    for path in [*specs, *leaves]:
        spec, leaf = specs.get(path), leaves.get(path)
        if spec is None or leaf is None or np.shape(leaf) != spec.shape:
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} is {getattr(leaf, 'shape', 'missing')} "
                f"where the config has {getattr(spec, 'shape', 'none')}: pass the model's own "
                "tree and its config"
            )
    tensors = [
        _Tensor(name, _tensor_shape(spec), _fetcher(leaves[path], spec, i))
        for path, spec in specs.items()
        for i, name in enumerate(_tensor_names(spec))
    ]
    return sorted(tensors, key=lambda tensor: tensor.name)


def _fetcher(leaf: jax.Array, spec: ParamSpec, layer: int) -> Callable[[], np.ndarray]:
    def fetch() -> np.ndarray:
        value = np.asarray(leaf[layer] if spec.stacked else leaf)
        return value.T if spec.hf_transposed else value

    return fetch


def write_params(
    directory: pathlib.Path,
    params: dict[str, Any],
    spec_tree: dict[str, Any],
    dtype: jax.typing.DTypeLike,
    max_shard_bytes: int,
) -> None:
    """The tree's weights in one file, or in several with an index; see ``hf.save``."""
    shards, total = _shards(_tensors(params, spec_tree), np.dtype(dtype), max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = WEIGHTS if len(shards) == 1 else file
        _write_safetensors(directory / file, shard, np.dtype(dtype))
        weight_map |= {tensor.name: file for tensor in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / INDEX, index)


def _shards(
    tensors: Sequence[_Tensor], dtype: np.dtype, max_bytes: int
) -> tuple[list[list[_Tensor]], int]:
    """Tensors in order, cut where a shard would exceed ``max_bytes``; and all their bytes."""
    shards: list[list[_Tensor]] = [[]]
    size = total = 0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * dtype.itemsize
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size, total = size + nbytes, total + nbytes
    return shards, total


def _write_safetensors(path: pathlib.Path, tensors: Sequence[_Tensor], dtype: np.dtype) -> None:
    """The format by hand (length, JSON header, bytes): safetensors' writer wants all at once.

    Bytes go in the machine's order: little-endian, as the format wants, wherever jax runs.
    """
    code = {np.dtype(kind): code for code, kind in _DTYPES.items()}.get(dtype)
    if code is None:
        raise ValueError(f"weights cannot be saved as {dtype.name}: use one of {sorted(_DTYPES)}")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        shape = list(tensor.shape)
        header[tensor.name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            with np.errstate(over="ignore"):
                values = np.ascontiguousarray(tensor.fetch(), dtype)
            if not np.isfinite(values).all():
                raise ValueError(
                    f"{tensor.name} is not finite in {dtype.name}: save an earlier policy, or in "
                    "a dtype of wider range"
                )
            file.write(values.reshape(-1).view(np.uint8).data)
