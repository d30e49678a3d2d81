"""``ModelConfig`` from the fields of a Hugging Face ``config.json`` and back.

Both spellings of the rotary settings are read (transformers 4: ``rope_theta`` and ``rope_scaling``;
transformers 5: ``rope_parameters``) and both are written. What the model does not implement is
refused by name, never ignored.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ROPE_SCALINGS, ModelConfig, RopeScaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Per family, what the layout implies: (bias on q, k and v; norm of q and k; default head size).
_LAYOUTS = {
    "llama": (False, False, None),
    "qwen2": (True, False, None),
    "qwen3": (False, True, 128),
}
# The values with which a key of config.json changes nothing; any other asks for code not here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
}


def from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """The ``ModelConfig`` that the fields of a ``config.json`` describe.

    Raises:
      ValueError: naming the key that is missing, contradictory or asks for what is not implemented.
    """
    family = _family(fields)
    _refuse_unsupported(fields, family)
    qkv_bias, qk_norm, head_dim = _LAYOUTS[family]
    # The first Llamas have as many key/value heads as query heads and do not say so.
    defaults = {"num_key_value_heads": fields.get("num_attention_heads")}
    fields = {**(defaults if family == "llama" else {}), "head_dim": head_dim, **_given(fields)}
    rope_theta, rope_scaling = _rope(fields)
    return ModelConfig(
        family=family,
        vocab_size=_require_int(fields, "vocab_size"),
        hidden_size=_require_int(fields, "hidden_size"),
        intermediate_size=_require_int(fields, "intermediate_size"),
        num_layers=_require_int(fields, "num_hidden_layers"),
        num_heads=_require_int(fields, "num_attention_heads"),
        num_kv_heads=_require_int(fields, "num_key_value_heads"),
        head_dim=_head_dim(fields),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=float(_require(fields, "rms_norm_eps")),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        max_positions=_require_int(fields, "max_position_embeddings"),
        init_std=float(fields.get("initializer_range", 0.02)),
    )


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _head_dim(fields: Mapping[str, Any]) -> int:
    if fields["head_dim"] is not None:
        return _require_int(fields, "head_dim")
    width, heads = (_require_int(fields, key) for key in ("hidden_size", "num_attention_heads"))
    if width % heads:
        raise ValueError(f"hidden_size {width} over num_attention_heads {heads}: give head_dim")
    return width // heads


def _require(fields: Mapping[str, Any], key: str) -> Any:
    if fields.get(key) is None:
        raise ValueError(f"{key} is missing: add it, as the model's publisher gives it")
    return fields[key]


def _require_int(fields: Mapping[str, Any], key: str) -> int:
    value = _require(fields, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}: it must be an integer")
    return value


def _family(fields: Mapping[str, Any]) -> str:
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    for family, architecture in _ARCHITECTURES.items():
        if model_type in (family, None) and architectures == [architecture]:
            return family
        if model_type == family and not architectures:
            return family
    raise ValueError(
        f"model_type {model_type!r} with architectures {architectures} is not supported: "
        f"use a causal language model of {sorted(_ARCHITECTURES.values())}"
    )


def _refuse_unsupported(fields: Mapping[str, Any], family: str) -> None:
    for key, neutral in _NEUTRAL.items():
        # Qwen2 has its biases whatever this key says; in the other families it adds one to o_proj.
        if key == "attention_bias" and family == "qwen2":
            continue
        value = fields.get(key, neutral[0])
        if value not in neutral:
            shown = value if not isinstance(value, dict) else sorted(value)
            raise ValueError(f"{key} is {shown!r}, which is not implemented: use {neutral[0]!r}")
    if _uses_sliding_window(fields, family):
        raise ValueError(
            "sliding_window is in use (use_sliding_window, layer_types), which is not implemented: "
            "use a checkpoint with full attention in every layer"
        )


def _uses_sliding_window(fields: Mapping[str, Any], family: str) -> bool:
    layer_types = fields.get("layer_types")
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    if family == "llama" or not fields.get("use_sliding_window"):
        return False
    first, layers = fields.get("max_window_layers", 28), _require_int(fields, "num_hidden_layers")
    return fields.get("sliding_window", 4096) is not None and first < layers


def _rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from either spelling; both may be present if they agree."""
    outer = {"rope_theta": fields["rope_theta"]} if fields.get("rope_theta") else {}
    keys = [key for key in ("rope_scaling", "rope_parameters") if fields.get(key)]
    readings = {key: _rope_entry(key, outer | fields[key]) for key in keys}
    readings = readings or {"rope_theta": _rope_entry("rope_theta", outer)}
    if len(set(readings.values())) > 1:
        raise ValueError("rope_scaling and rope_parameters disagree: keep the right one of them")
    theta, scaling = next(iter(readings.values()))
    if outer and float(outer["rope_theta"]) != theta:
        raise ValueError("rope_theta and rope_parameters disagree: keep the right one of them")
    return theta, scaling


def _rope_entry(key: str, entry: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    kind = entry.get("rope_type") or entry.get("type") or "default"
    theta = float(entry.get("rope_theta") or 10_000.0)
    if any(isinstance(value, dict) for value in entry.values()):
        raise ValueError(f"{key} differs by layer, which is not implemented: use one for all")
    if entry.get("partial_rotary_factor") not in (1, None):
        raise ValueError(f"{key}: partial_rotary_factor is not implemented: use 1.0")
    if kind == "default":
        return theta, None
    if kind not in ROPE_SCALINGS:
        raise ValueError(
            f"{key}: rope_type {kind!r} is not implemented: use 'default' or one of "
            f"{list(ROPE_SCALINGS)}"
        )
    factor = float(_require(entry, "factor"))
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    low, high = (float(_require(entry, f"{side}_freq_factor")) for side in ("low", "high"))
    original = _require_int(entry, "original_max_position_embeddings")
    return theta, RopeScaling(kind, factor, low, high, original)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json`` that describe the model; token ids are not among them.

    Raises:
      ValueError: when the family's layout in transformers cannot express the config.
    """
    layout = _LAYOUTS[config.family][:2]
    if (config.qkv_bias, config.qk_norm) != layout or config.final_softcap is not None:
        raise ValueError(
            f"transformers' {config.family} layout needs qkv_bias={layout[0]}, "
            f"qk_norm={layout[1]} and no final_softcap: change the config or its family"
        )
    scaling = _rope_scaling_fields(config.rope_scaling)
    theta = {"rope_theta": config.rope_theta}
    fields = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_scaling": scaling,
        "rope_parameters": theta | (scaling or {"rope_type": "default"}),
    } | theta
    if config.family == "llama":
        return fields | {"attention_bias": False, "mlp_bias": False}
    return fields | {"use_sliding_window": False}


def _rope_scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields["low_freq_factor"] = scaling.low_freq_factor
        fields["high_freq_factor"] = scaling.high_freq_factor
        fields["original_max_position_embeddings"] = scaling.original_max_positions
    return fields


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; errors name the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: give a Hugging Face model directory")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object: fetch it again")
    return fields


def write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes an object as transformers does: indented, keys sorted."""
    text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
