"""Rotary settings and sliding windows from the fields of a ``config.json`` and back.

Two spellings are read, and both are written: transformers 4 (``rope_theta``, ``rope_scaling``,
``rope_local_base_freq``, ``sliding_window_pattern``) and 5 (``rope_parameters``, ``layer_types``).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrlhf.models.config import ROPE_SCALINGS, ModelConfig, RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"


class Rope(NamedTuple):
    """Base and stretch of the rotary frequencies."""

    theta: float
    scaling: RopeScaling | None


def require(fields: Mapping[str, Any], key: str) -> Any:
    """The value of a key that must be there."""
    if fields.get(key) is None:
        raise ValueError(f"{key} is missing: add it, as the model's publisher gives it")
    return fields[key]


def require_int(fields: Mapping[str, Any], key: str) -> int:
    """The value of a key that must be there and an integer."""
    value = require(fields, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}: it must be an integer")
    return value


def read_rope(fields: Mapping[str, Any], theta: float = 10_000.0) -> Rope:
    """From either spelling; both may be present if they agree. ``theta`` where none is given."""
    outer = {"rope_theta": fields["rope_theta"]} if fields.get("rope_theta") else {}
    keys = [key for key in ("rope_scaling", "rope_parameters") if fields.get(key)]
    readings = {key: _read_entry(key, outer | fields[key], theta) for key in keys}
    readings = readings or {"rope_theta": _read_entry("rope_theta", outer, theta)}
    if len(set(readings.values())) > 1:
        raise ValueError("rope_scaling and rope_parameters disagree: keep the right one of them")
    rope = next(iter(readings.values()))
    if outer and float(outer["rope_theta"]) != rope.theta:
        raise ValueError("rope_theta and rope_parameters disagree: keep the right one of them")
    return rope


def read_layer_ropes(fields: Mapping[str, Any]) -> tuple[Rope, float]:
    """Gemma 3's two: of the layers without a window, and the base of those with one."""
    parameters = fields.get("rope_parameters") or {}
    if not set(parameters) <= {FULL, SLIDING}:
        raise ValueError(
            f"rope_parameters has {sorted(parameters)}: give {FULL} and {SLIDING}, each with "
            "settings of its own"
        )
    full = read_rope({**fields, "rope_parameters": parameters.get(FULL)}, theta=1_000_000.0)
    local = {"rope_theta": fields.get("rope_local_base_freq")}
    theta, scaling = read_rope({**local, "rope_parameters": parameters.get(SLIDING)})
    if scaling is not None:
        raise ValueError(f"rope_parameters scales {SLIDING}, which is not implemented: use default")
    return full, theta


def _read_entry(key: str, entry: Mapping[str, Any], default_theta: float) -> Rope:
    kind = entry.get("rope_type") or entry.get("type") or "default"
    theta = float(entry.get("rope_theta") or default_theta)
    if any(isinstance(value, dict) for value in entry.values()):
        raise ValueError(f"{key} differs by layer, which is not implemented: use one for all")
    if entry.get("partial_rotary_factor") not in (1, None):
        raise ValueError(f"{key}: partial_rotary_factor is not implemented: use 1.0")
    if kind == "default":
        return Rope(theta, None)
    if kind not in ROPE_SCALINGS:
        raise ValueError(
            f"{key}: rope_type {kind!r} is not implemented: use 'default' or one of "
            f"{list(ROPE_SCALINGS)}"
        )
    factor = float(require(entry, "factor"))
    if kind == "linear":
        return Rope(theta, RopeScaling(kind, factor))
    low, high = (float(require(entry, f"{side}_freq_factor")) for side in ("low", "high"))
    original = require_int(entry, "original_max_position_embeddings")
    return Rope(theta, RopeScaling(kind, factor, low, high, original))


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary settings in both spellings."""
    scaling = _scaling_fields(config.rope_scaling)
    theta = {"rope_theta": config.rope_theta}
    parameters = theta | (scaling or {"rope_type": "default"})
    fields = theta | {"rope_scaling": scaling, "rope_parameters": parameters}
    if config.rope_local_theta is None:
        return fields
    local = {"rope_theta": config.rope_local_theta, "rope_type": "default"}
    return fields | {
        "rope_local_base_freq": config.rope_local_theta,
        "rope_parameters": {FULL: parameters, SLIDING: local},
    }


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields["low_freq_factor"] = scaling.low_freq_factor
        fields["high_freq_factor"] = scaling.high_freq_factor
        fields["original_max_position_embeddings"] = scaling.original_max_positions
    return fields


def read_windows(fields: Mapping[str, Any], period: int) -> tuple[int | None, tuple[bool, ...]]:
    """``(sliding_window, window_pattern)``: every ``period``-th layer sees all, if none is named.

    A list of layers that says what the period says, or less (a model cut short), gives the
    period's pattern; another one gives its shortest repeating part.
    """
    count = require_int(fields, "num_hidden_layers")
    if period < 1:
        raise ValueError(f"sliding_window_pattern is {period}: give at least 1 (no windows)")
    pattern = (True,) * (period - 1) + (False,)
    kinds = fields.get("layer_types")
    if kinds is not None:
        if len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
            raise ValueError(
                f"layer_types must name {FULL} or {SLIDING} for each of {count} layers"
            )
        windowed = [kind == SLIDING for kind in kinds]
        if windowed != _repeated(pattern, count):
            pattern = _shortest_pattern(windowed)
    return (require_int(fields, "sliding_window"), pattern) if any(pattern) else (None, ())


def _repeated(pattern: Sequence[bool], count: int) -> list[bool]:
    return [pattern[i % len(pattern)] for i in range(count)]


def _shortest_pattern(windowed: Sequence[bool]) -> tuple[bool, ...]:
    count = len(windowed)
    parts = (windowed[:length] for length in range(1, count + 1))
    return tuple(next(part for part in parts if _repeated(part, count) == windowed))


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The windows layer by layer; transformers wants a ``sliding_window`` even where none is."""
    kinds = [SLIDING if windowed else FULL for windowed in config.windowed_layers]
    window = config.sliding_window or config.max_positions
    return {"layer_types": kinds, "sliding_window": window}
