"""Hugging Face model directories: config, weights, stop ids and tokenizer files, in and out."""

import contextlib
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.hf_config import from_hf, read_json, to_hf, write_json
from jaxrlhf.models.hf_weights import read_params, write_params
from jaxrlhf.models.specs import param_specs

__all__ = [
    "from_hf",
    "ignored_generation_fields",
    "load",
    "load_config",
    "resolve",
    "save",
    "stop_ids",
    "to_hf",
]

PathLike = str | os.PathLike[str]
Params = dict[str, Any]

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)

# Fields of generation_config.json that say nothing about which tokens are sampled.
_BOOKKEEPING = {
    "_from_model_config",
    "bos_token_id",
    "eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "use_cache",
}


def resolve(path_or_hub_id: PathLike, *, revision: str | None = None) -> pathlib.Path:
    """A local directory as it is; ``owner/name`` that is no directory is fetched from the hub.

    Only safetensors, JSON and tokenizer files are fetched, by huggingface_hub with its own time
    limits and cache; ``revision`` pins a branch, tag or commit.

    Raises:
      FileNotFoundError: neither a directory nor something that the hub gave us.
      ImportError: a hub id without huggingface_hub installed.
    """
    path = pathlib.Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_hub_id)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise FileNotFoundError(
            f"{name} is no directory: give a model directory or a hub id of the form owner/name"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{name} is no directory and fetching it from the hub needs huggingface_hub: "
            "install it or give a local directory"
        ) from error
    patterns = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model"]
    try:
        return pathlib.Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name} is no directory and the hub did not give it ({error}): give a local directory"
        ) from error


def load_config(directory: PathLike) -> ModelConfig:
    """The ``ModelConfig`` of a directory's ``config.json``."""
    path = pathlib.Path(directory) / CONFIG
    try:
        return from_hf(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def stop_ids(directory: PathLike, tokenizer_eos_id: int | None) -> tuple[int, ...]:
    """Every id that ends a response: generation_config's, config's and the tokenizer's together.

    Chat models end their turns with another token than their documents; each source may name only
    one of the two. Sorted; empty when none of the three names any.
    """
    ids = set() if tokenizer_eos_id is None else {tokenizer_eos_id}
    for file in (CONFIG, GENERATION):
        path = pathlib.Path(directory) / file
        if file == GENERATION and not path.exists():
            continue
        value = read_json(path).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and i >= 0 for i in listed):
            raise ValueError(f"{path}: eos_token_id is {value!r}: give an id or a list of ids")
        ids |= set(listed)
    return tuple(sorted(ids))


def ignored_generation_fields(directory: PathLike) -> dict[str, Any]:
    """Fields of ``generation_config.json`` that our sampler does not read, for the caller to log.

    Sampling settings (temperature, top_p, repetition_penalty …) come from the run's own config: a
    penalty or a truncation that a publisher chose for chatting would change the sampled
    distribution behind the trainer's back.
    """
    path = pathlib.Path(directory) / GENERATION
    fields = read_json(path) if path.exists() else {}
    return {k: v for k, v in fields.items() if k not in _BOOKKEEPING and v is not None}


def load(
    directory: PathLike, *, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[Params, ModelConfig]:
    """Parameters in ``dtype``, and the config, of a directory with safetensors weights.

    Every tensor must be one that the config asks for, in its shape, as float32, bfloat16 or
    float16. Two kinds of leftovers are harmless and are checked: rotary ``inv_freq`` buffers
    (equal to what the config gives) and the ``lm_head`` of a tied model (equal to the embedding).

    Raises:
      FileNotFoundError: naming the file that is not there.
      ValueError: naming the file and the tensor that is missing, left over, doubled, of another
        shape or dtype, or the key of ``config.json`` that is not implemented.
    """
    directory = pathlib.Path(directory)
    config = load_config(directory)
    return read_params(directory, param_specs(config), config, dtype), config


def save(
    directory: PathLike,
    params: Params,
    config: ModelConfig,
    *,
    dtype: jax.typing.DTypeLike,
    source_dir: PathLike | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> pathlib.Path:
    """Writes a directory that ``transformers`` opens, whole or not at all.

    Everything is written beside ``directory`` and renamed at the end. A model directory that was
    there is replaced (it is moved aside just before, so a process killed between the two renames
    leaves it under a hidden name); any other directory is refused. What earlier, killed saves left
    beside it is cleared away first, so two processes must not save to one directory at a time.

    Args:
      directory: where to.
      params: the tree of ``param_specs(config)``.
      config: the model's config.
      dtype: float32, bfloat16 or float16, of all tensors in the files.
      source_dir: a directory whose tokenizer files are copied and, when it holds the same model,
        whose other ``config.json`` fields (token ids) and ``generation_config.json`` too.
      generation_config: fields of ``generation_config.json``, in place of the source's; its token
        ids go into ``config.json`` as well.
      max_shard_bytes: weights above this are split into several files with an index.

    Returns:
      ``directory`` as a path.

    Raises:
      ValueError: the tree or its shapes are not the config's, or the source is another model.
      FileExistsError: ``directory`` holds something else than a model.
    """
    target = pathlib.Path(directory).resolve()
    source = None if source_dir is None else pathlib.Path(source_dir)
    fields = _config_fields(config, np.dtype(dtype), source, generation_config or {})
    with replacing(target) as partial:
        write_params(partial, params, param_specs(config), dtype, max_shard_bytes)
        write_json(partial / CONFIG, fields)
        if source is not None:
            copy_files(source, partial, (*TOKENIZER_FILES, GENERATION))
        if generation_config is not None:
            write_json(partial / GENERATION, generation_config)
    return pathlib.Path(directory)


def _config_fields(
    config: ModelConfig,
    dtype: np.dtype,
    source: pathlib.Path | None,
    generation_config: Mapping[str, Any],
) -> dict[str, Any]:
    """The new ``config.json``: the source's fields where we have nothing to say."""
    fields: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    ids = {key: generation_config[key] for key in fields if key in generation_config}
    if source is not None and (source / CONFIG).exists():
        if load_config(source) != config:
            raise ValueError(
                f"{source / CONFIG} describes another model than the one to save: give the "
                "directory that it was loaded from, or one with tokenizer files alone"
            )
        fields |= read_json(source / CONFIG)
    fields.pop("torch_dtype", None)  # the old name of dtype
    return fields | to_hf(config) | ids | {"dtype": dtype.name}


def copy_files(source: pathlib.Path, target: pathlib.Path, names: Sequence[str]) -> None:
    """Copies those of the named files and folders that are there."""
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        elif (source / name).exists():
            shutil.copyfile(source / name, target / name)


@contextlib.contextmanager
def replacing(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A fresh sibling directory that becomes ``target`` when the block ends without an error."""
    empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty and not (target / CONFIG).is_file():
        raise FileExistsError(f"{target} exists and is no model directory: choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(target)
    unique = f".{target.name}.{uuid.uuid4().hex}"
    partial, old = target.with_name(f"{unique}.partial"), target.with_name(f"{unique}.old")
    partial.mkdir()
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        _flush(target.parent)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _clear_leftovers(target: pathlib.Path) -> None:
    """Ends what killed saves began: puts the moved directory back where it is missing, removes."""
    # Not a glob of the name, in which a model's brackets would be a pattern.
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{32}}\.(partial|old)")
    for path in list(target.parent.iterdir()):
        if (match := pattern.fullmatch(path.name)) is None:
            continue
        if match[1] == "old" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path)


def _flush(path: pathlib.Path) -> None:
    """Waits until a file's or directory's content is on disk, so that a rename cannot overtake."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
