import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.config import PRESETS
from jaxrlhf.models.specs import (
    ParamSpec,
    abstract_params,
    count_params,
    init_params,
    param_specs,
)

# As published (model cards, or the sizes of the checkpoints' tensors), tied matrices once.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-14b": 14_770_033_664,
    "deepseek-r1-distill-qwen-32b": 32_763_876_352,
    "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "deepseek-r1-distill-llama-70b": 70_553_706_496,
}

SMALL = {
    name: dataclasses.replace(
        PRESETS[name],
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
    )
    for name in ("qwen2.5-0.5b", "qwen3-8b", "llama-3.1-8b", "gemma-2-2b", "gemma-3-1b")
}

LAYER_NAMES = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
QK_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
POST_NORMS = {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"}
EXTRA_NAMES = {
    "qwen2": {f"self_attn.{name}_proj.bias" for name in "qkv"},
    "qwen3": QK_NORMS,
    "llama": set(),
    "gemma2": POST_NORMS,
    "gemma3_text": QK_NORMS | POST_NORMS,
}


def test_every_preset_has_its_published_number_of_parameters():
    assert {name: count_params(config) for name, config in PRESETS.items()} == PUBLISHED


@pytest.mark.parametrize("name", SMALL)
def test_one_tree_gives_arrays_shapes_axes_and_hugging_face_names(name):
    config = SMALL[name]
    specs = param_specs(config)
    params = init_params(jax.random.key(0), config, jnp.bfloat16)
    abstract = abstract_params(config, jnp.bfloat16)
    assert jax.tree.structure(specs) == jax.tree.structure(params) == jax.tree.structure(abstract)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )
    assert ("lm_head" in params) == (not config.tie_embeddings)

    leaves = jax.tree.leaves(specs)
    assert count_params(config) == sum(x.size for x in jax.tree.leaves(params))
    expected = {f"model.layers.2.{n}" for n in LAYER_NAMES | EXTRA_NAMES[config.family]}
    assert {s.hf_name.format(layer=2) for s in leaves if s.stacked} == expected
    unstacked = {"model.embed_tokens.weight", "model.norm.weight"}
    unstacked |= set() if config.tie_embeddings else {"lm_head.weight"}
    assert {s.hf_name for s in leaves if not s.stacked} == unstacked
    sizes = {"layers": 3, "embed": 64, "heads": 128, "kv_heads": 32, "head_dim": 16}
    sizes |= {"mlp": 96, "vocab": 512}
    for spec in leaves:
        assert spec.shape == tuple(sizes[axis] for axis in spec.axes)
        assert spec.hf_transposed == spec.hf_name.endswith("_proj.weight")


def test_initial_statistics():
    config = dataclasses.replace(SMALL["qwen2.5-0.5b"], init_std=0.05)
    params = init_params(jax.random.key(1), config)
    draws = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name.endswith("norm"):
            assert (leaf == 1).all()
        elif name.endswith("bias"):
            assert (leaf == 0).all()
        else:
            # Standard errors of mean and deviation, five of them.
            assert abs(leaf.mean()) < 5 * 0.05 / np.sqrt(leaf.size)
            assert abs(leaf.std() / 0.05 - 1) < 5 / np.sqrt(2 * leaf.size)
            draws.append(float(leaf.ravel()[0]))
    assert len(set(draws)) == len(draws) == 8  # no two leaves share a stream
    kernel = params["layers"]["up_kernel"]
    assert not np.array_equal(kernel[0], kernel[1])


def test_norms_that_add_one_start_at_zero():
    params = init_params(jax.random.key(1), SMALL["gemma-3-1b"])
    norms = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if path[-1].key.endswith("norm")
    ]
    assert len(norms) == 7  # four around attention and MLP, two of q and k, the last
    assert all((leaf == 0).all() for leaf in norms)


def test_a_spec_names_every_axis():
    init = jax.nn.initializers.zeros
    with pytest.raises(ValueError, match=r"x\.weight: name one axis"):
        ParamSpec((2, 3), ("embed",), init, "x.weight")
