"""``ModelConfig`` from the fields of a Hugging Face ``config.json`` and back.

What the model does not implement is refused by name, never ignored.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.hf_rope import (
    read_layer_ropes,
    read_rope,
    read_windows,
    require,
    require_int,
    write_rope,
    write_windows,
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_PLAIN: dict[str, Any] = {
    "qkv_bias": False,
    "qk_norm": False,
    "norm_plus_one": False,
    "post_norms": False,
    "activation": "silu",
    "scale_embeddings": False,
    "query_scalar": None,
    "sliding_window": None,
    "attention_softcap": None,
    "final_softcap": None,
    "rope_local_theta": None,
}
_GEMMA: dict[str, Any] = {
    "qkv_bias": False,
    "norm_plus_one": True,
    "post_norms": True,
    "activation": "gelu_tanh",
    "scale_embeddings": True,
}
# Per family, the fields of ModelConfig that its layout fixes: no key of config.json says them.
_LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": _PLAIN,
    "qwen2": _PLAIN | {"qkv_bias": True},
    "qwen3": _PLAIN | {"qk_norm": True},
    "gemma2": _GEMMA | {"qk_norm": False, "rope_local_theta": None},
    # transformers reads attn_logit_softcapping in this family, and then leaves it out.
    "gemma3_text": _GEMMA | {"qk_norm": True, "attention_softcap": None},
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# What transformers takes for a key that is not there, where its layout has a value of its own.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": None},
    "qwen2": {"head_dim": None},
    "qwen3": {"head_dim": 128},
    "gemma2": _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA_DEFAULTS | {"sliding_window_pattern": 6},
}
# In these keys null is a value of its own; elsewhere it is the same as leaving the key out.
_NULLABLE = {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"}
_WITH_WINDOWS = ("gemma2", "gemma3_text")

# The values with which a key of config.json changes nothing; any other asks for code not here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
}
_GEMMA_NEUTRAL = _NEUTRAL | {
    "hidden_act": ("gelu_pytorch_tanh", None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
}
_NEUTRAL_BY_FAMILY = {
    "gemma2": _GEMMA_NEUTRAL,
    "gemma3_text": _GEMMA_NEUTRAL | {"attn_logit_softcapping": (None,)},
}


def from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """The ``ModelConfig`` that the fields of a ``config.json`` describe.

    Raises:
      ValueError: naming the key that is missing, contradictory or asks for what is not implemented.
    """
    family = _family(fields)
    _refuse_unsupported(fields, family)
    # The first Llamas have as many key/value heads as query heads and do not say so.
    defaults = {"num_key_value_heads": fields.get("num_attention_heads")}
    defaults = _DEFAULTS[family] | (defaults if family == "llama" else {})
    fields = defaults | _given(fields)
    return ModelConfig(
        family=family,
        vocab_size=require_int(fields, "vocab_size"),
        hidden_size=require_int(fields, "hidden_size"),
        intermediate_size=require_int(fields, "intermediate_size"),
        num_layers=require_int(fields, "num_hidden_layers"),
        num_heads=require_int(fields, "num_attention_heads"),
        num_kv_heads=require_int(fields, "num_key_value_heads"),
        head_dim=_head_dim(fields),
        norm_eps=float(require(fields, "rms_norm_eps")),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_positions=require_int(fields, "max_position_embeddings"),
        init_std=float(fields.get("initializer_range", 0.02)),
        **_attention_fields(fields, family),
    )


def _attention_fields(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Rotary settings, windows, caps and scales, and what the layout fixes."""
    layout = _LAYOUTS[family]
    if "rope_local_theta" in layout:
        rope, local = read_rope(fields), None
    else:
        rope, local = read_layer_ropes(fields)
    read: dict[str, Any] = {
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rope_local_theta": local,
    }
    if family in _WITH_WINDOWS:
        read["query_scalar"] = require_int(fields, "query_pre_attn_scalar")
        period = 2 if family == "gemma2" else require_int(fields, "sliding_window_pattern")
        read["sliding_window"], read["window_pattern"] = read_windows(fields, period)
        read["attention_softcap"] = _softcap(fields, "attn_logit_softcapping")
        read["final_softcap"] = _softcap(fields, "final_logit_softcapping")
    return read | layout


def _softcap(fields: Mapping[str, Any], key: str) -> float | None:
    return None if fields.get(key) is None else float(fields[key])


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None or key in _NULLABLE}


def _head_dim(fields: Mapping[str, Any]) -> int:
    if fields["head_dim"] is not None:
        return require_int(fields, "head_dim")
    width, heads = (require_int(fields, key) for key in ("hidden_size", "num_attention_heads"))
    if width % heads:
        raise ValueError(f"hidden_size {width} over num_attention_heads {heads}: give head_dim")
    return width // heads


def _family(fields: Mapping[str, Any]) -> str:
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    for family, architecture in _ARCHITECTURES.items():
        if model_type in (family, None) and architectures == [architecture]:
            return family
        if model_type == family and not architectures:
            return family
    if "text_config" in fields:
        raise ValueError(
            f"model_type {model_type!r} is of images and text: open it with transformers, save its "
            "language model alone and load that"
        )
    raise ValueError(
        f"model_type {model_type!r} with architectures {architectures} is not supported: "
        f"use a causal language model of {sorted(_ARCHITECTURES.values())}"
    )


def _refuse_unsupported(fields: Mapping[str, Any], family: str) -> None:
    for key, neutral in _NEUTRAL_BY_FAMILY.get(family, _NEUTRAL).items():
        # Qwen2 has its biases whatever this key says; in the other families it adds one to o_proj.
        if key == "attention_bias" and family == "qwen2":
            continue
        value = fields.get(key, neutral[0])
        if value not in neutral:
            shown = value if not isinstance(value, dict) else sorted(value)
            raise ValueError(f"{key} is {shown!r}, which is not implemented: use {neutral[0]!r}")
    if family not in _WITH_WINDOWS and _uses_sliding_window(fields, family):
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
    first, layers = fields.get("max_window_layers", 28), require_int(fields, "num_hidden_layers")
    return fields.get("sliding_window", 4096) is not None and first < layers


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json`` that describe the model; token ids are not among them.

    Raises:
      ValueError: when the family's layout in transformers cannot express the config.
    """
    family = config.family
    for name, value in _LAYOUTS[family].items():
        if getattr(config, name) != value:
            raise ValueError(
                f"transformers' {family} layout needs {name}={value!r}: change the config or its "
                "family"
            )
    fields = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
    } | write_rope(config)
    if family in _WITH_WINDOWS:
        return fields | _gemma_fields(config)
    if family == "llama":
        return fields | {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    return fields | {"hidden_act": "silu", "use_sliding_window": False}


def _gemma_fields(config: ModelConfig) -> dict[str, Any]:
    fields = write_windows(config) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": config.query_scalar or config.head_dim,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    if config.family == "gemma2":
        return fields
    if config.rope_local_theta is None:
        raise ValueError(
            f"transformers' {config.family} layout needs a rope_local_theta: give one (that of "
            "the other layers is rope_theta)"
        )
    period = len(config.window_pattern)
    usual = config.window_pattern == (True,) * (period - 1) + (False,)
    return fields | ({"sliding_window_pattern": period} if usual else {})


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
