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
        ({"attention_softcap": -1.0}, "attention_softcap"),
        ({"rope_local_theta": 0.0}, "rope_local_theta"),
        ({"query_scalar": 0}, "query_scalar is 0"),
        ({"activation": "relu"}, "unknown activation 'relu'.*gelu_tanh"),
        ({"sliding_window": 0, "window_pattern": (True,)}, "sliding_window is 0"),
        ({"sliding_window": 4}, "give both"),
        ({"sliding_window": 4, "window_pattern": (False,)}, "give both"),
        ({"window_pattern": (True, False)}, "or neither"),
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


def test_the_window_pattern_repeats_over_any_depth():
    config = PRESETS["gemma-3-270m"]
    full = [i for i, windowed in enumerate(config.windowed_layers) if not windowed]
    assert full == [5, 11, 17]
    short = dataclasses.replace(config, num_layers=3)
    assert short.windowed_layers == (True, True, True)
    assert BASE.windowed_layers == (False,) * BASE.num_layers


def test_attention_scale():
    assert BASE.attention_scale == 64**-0.5
    assert PRESETS["gemma-2-27b"].attention_scale == 144**-0.5


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_their_family_s_habits(name):
    config: ModelConfig = PRESETS[name]
    gemma = name.startswith("gemma")
    assert config.family in FAMILIES
    assert config.qkv_bias == (config.family == "qwen2")
    assert config.qk_norm == (config.family in ("qwen3", "gemma3_text"))
    assert (config.rope_scaling is not None) == ("llama-" in name)
    assert (config.sliding_window is not None) == config.norm_plus_one == gemma
    assert (config.final_softcap is not None) == (config.family == "gemma2")
    assert (config.rope_local_theta is not None) == (config.family == "gemma3_text")
    if not gemma and config.family != "qwen3":  # these widen the heads beyond the residual stream
        assert config.num_heads * config.head_dim == config.hidden_size
