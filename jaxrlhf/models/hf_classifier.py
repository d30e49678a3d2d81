"""Reward models as Hugging Face directories: ``…ForSequenceClassification`` with one label.

Such a directory holds the language model without its output matrix, and ``score.weight`` [1, D].
Beside it may lie ``reward_statistics.json``, which is ours: mean and standard deviation of the
model's scores on the data that it was trained on.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.hf import CONFIG, TOKENIZER_FILES, PathLike, copy_files, replacing
from jaxrlhf.models.hf_config import from_hf, read_json, to_hf, write_json
from jaxrlhf.models.hf_weights import read_params, write_params
from jaxrlhf.models.specs import ParamSpec, param_specs

CLASSIFIERS = {
    "llama": "LlamaForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "gemma2": "Gemma2ForSequenceClassification",
    "gemma3_text": "Gemma3TextForSequenceClassification",
}
STATISTICS = "reward_statistics.json"
_LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}


def is_classifier(directory: PathLike) -> bool:
    """Whether ``config.json`` names an architecture of this module's kind."""
    return _is_classifier(read_json(pathlib.Path(directory) / CONFIG))


def load_classifier_config(directory: PathLike) -> ModelConfig:
    """The ``ModelConfig`` of a classifier's ``config.json``.

    Raises:
      ValueError: it is no decoder with a score head, or the head has several labels.
    """
    path = pathlib.Path(directory) / CONFIG
    fields = read_json(path)
    try:
        return _from_classifier(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_classifier(
    directory: PathLike, *, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[dict[str, Any], ModelConfig]:
    """``{"backbone", "head"}`` in ``dtype``, and the config; checked as by ``hf.load``.

    Raises:
      FileNotFoundError: naming the file that is not there.
      ValueError: see ``load_classifier_config`` and ``hf.load``.
    """
    directory = pathlib.Path(directory)
    config = load_classifier_config(directory)
    params = read_params(directory, _specs(config), config, dtype)
    return params | {"head": {"kernel": params["head"]["kernel"][0]}}, config


def save_classifier(
    directory: PathLike,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    dtype: jax.typing.DTypeLike,
    pad_token_id: int,
    pad_token: str | None = None,
    source_dir: PathLike | None = None,
    statistics: Mapping[str, float] | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> pathlib.Path:
    """Writes a directory that ``transformers`` opens with the same scores, whole or not at all.

    Args:
      directory: where to; see ``hf.save`` about what may be there.
      params: ``{"backbone", "head"}``; an ``lm_head`` of the backbone is left out.
      config: the backbone's config.
      dtype: float32, bfloat16 or float16, of all tensors in the files.
      pad_token_id: by it transformers finds a row's last token, so no row may end with it: give
        another than eos where rows end with eos.
      pad_token: its text, to be named in the copied tokenizer's files; None leaves them.
      source_dir: a directory whose tokenizer files are copied, and whose ``config.json`` fields
        (token ids) where it holds the same backbone.
      statistics: finite numbers for ``reward_statistics.json``; None for no such file.
      max_shard_bytes: weights above this are split into several files with an index.

    Returns:
      ``directory`` as a path.

    Raises:
      ValueError: the tree is not the config's, the source is another model, or a statistic is no
        finite number.
      FileExistsError: ``directory`` holds something else than a model.
    """
    source = None if source_dir is None else pathlib.Path(source_dir)
    fields = _config_fields(config, np.dtype(dtype).name, source, pad_token_id)
    backbone = {name: leaf for name, leaf in params["backbone"].items() if name != "lm_head"}
    tree = {"backbone": backbone, "head": {"kernel": params["head"]["kernel"][None]}}
    with replacing(pathlib.Path(directory).resolve()) as partial:
        write_params(partial, tree, _specs(config), dtype, max_shard_bytes)
        write_json(partial / CONFIG, fields)
        if source is not None:
            copy_files(source, partial, TOKENIZER_FILES)
            _name_pad_token(partial, pad_token)
        if statistics is not None:
            write_json(partial / STATISTICS, _finite(statistics))
    return pathlib.Path(directory)


def load_statistics(directory: PathLike) -> dict[str, float]:
    """The numbers of ``reward_statistics.json``.

    Raises:
      FileNotFoundError, ValueError: there is none, or it holds something else than numbers.
    """
    path = pathlib.Path(directory) / STATISTICS
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: score the reward model's training data with "
            "experiments/reward_model.py, or leave its scores as they are"
        )
    try:
        return _finite(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _specs(config: ModelConfig) -> dict[str, Any]:
    """``param_specs`` without an output matrix, and the head as it lies in the file, [1, D]."""
    backbone = {name: spec for name, spec in param_specs(config).items() if name != "lm_head"}
    shape = (1, config.hidden_size)
    head = ParamSpec(shape, ("outputs", "embed"), initializers.zeros, "score.weight")
    return {"backbone": backbone, "head": {"kernel": head}}


def _is_classifier(fields: Mapping[str, Any]) -> bool:
    return fields.get("architectures") in [[name] for name in CLASSIFIERS.values()]


def _from_classifier(fields: Mapping[str, Any]) -> ModelConfig:
    if not _is_classifier(fields):
        raise ValueError(
            f"architectures is {fields.get('architectures')}: give a reward model of "
            f"{', '.join(CLASSIFIERS.values())}"
        )
    labels, counted = fields.get("id2label"), fields.get("num_labels")
    count = len(labels) if labels is not None else 2 if counted is None else counted
    if count != 1 or counted not in (None, 1):
        raise ValueError(
            f"the score head has {count} labels (num_labels, id2label): give a reward model, "
            "which has one"
        )
    config = from_hf({**fields, "architectures": None})
    if fields["architectures"] != [CLASSIFIERS[config.family]]:
        raise ValueError(
            f"architectures is {fields['architectures']} where model_type is {config.family!r}: "
            "correct the one that is wrong"
        )
    return config


def _config_fields(
    config: ModelConfig, dtype: str, source: pathlib.Path | None, pad_token_id: int
) -> dict[str, Any]:
    fields: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id"))
    if source is not None and (source / CONFIG).exists():
        given = read_json(source / CONFIG)
        theirs = _from_classifier(given) if _is_classifier(given) else from_hf(given)
        if theirs != config:
            raise ValueError(
                f"{source / CONFIG} describes another model than the one to save: give the "
                "directory that it was made from, or one with tokenizer files alone"
            )
        fields |= given
    fields.pop("torch_dtype", None)  # the old name of dtype
    ours = {"architectures": [CLASSIFIERS[config.family]], "pad_token_id": pad_token_id}
    return fields | to_hf(config) | ours | _LABELS | {"dtype": dtype}


def _name_pad_token(directory: pathlib.Path, pad_token: str | None) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if pad_token is not None and path.exists():
            write_json(path, read_json(path) | {"pad_token": pad_token})


def _finite(statistics: Mapping[str, Any]) -> dict[str, float]:
    for name, value in statistics.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"{name} is {value!r}: make it a finite number")
    return {name: float(value) for name, value in statistics.items()}
