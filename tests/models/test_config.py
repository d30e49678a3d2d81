import dataclasses

import pytest

from jaxrlhf.models.config import FAMILIES, PRESETS, ModelConfig, RopeScaling

BASE = PRESETS["qwen2.5-0.5b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "mamba"}, "qwen3"),
        ({"num_heads": 14, "num_kv_heads": 4}, "multiple of num_kv_heads 4"),
        ({"head_dim": 63}, "must be even"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"final_softcap": 0.0}, "final_softcap"),
    ],
)
def test_impossible_shapes_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("yarn", 4.0), "'yarn' is not supported.*llama3"),
        (("linear", 0.5), "at least 1"),
        (("llama3", 8.0, 4.0, 4.0), "must be above"),
    ],
)
def test_unsupported_rope_scaling_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(*arguments)


def test_configs_are_values():
    """Static arguments of jit: equal fields are one cache entry, a changed field is another."""
    assert hash(dataclasses.replace(BASE)) == hash(BASE)
    scaled = dataclasses.replace(BASE, rope_scaling=RopeScaling("linear", 2.0))
    assert len({BASE, dataclasses.replace(BASE), scaled}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.num_layers = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_their_family_s_habits(name):
    config: ModelConfig = PRESETS[name]
    assert config.family in FAMILIES
    assert config.qkv_bias == (config.family == "qwen2")
    assert config.qk_norm == (config.family == "qwen3")
    assert (config.rope_scaling is not None) == ("llama-" in name)
    if config.family != "qwen3":  # Qwen3 alone widens the heads beyond the residual stream
        assert config.num_heads * config.head_dim == config.hidden_size
