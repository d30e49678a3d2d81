"""Tiny random checkpoints in Hugging Face's layout, made from a seed (numpy alone, no torch).

`make_goldens.py` writes them to disk and lets transformers compute logits; the tests rebuild the
same tensors from the same seed, so that logits are all that is stored. They are bit-equal anywhere:
`RandomState`'s streams never change, and sums of integers need no mathematical library.
"""

import zlib

import numpy as np

SEED = 20260817
BATCH, LENGTH = 3, 16
GEMMA = ("gemma2", "gemma3_text")

_LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}


def _config(model_type: str, architecture: str, **fields: object) -> dict:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_dropout": 0.0,
        "use_cache": True,
    } | fields


def _gemma_config(model_type: str, architecture: str, **fields: object) -> dict:
    """Windows shorter than the sequences, a query scale that is not the head size's."""
    common = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 7,
        "sliding_window": 5,
        "attention_bias": False,
    }
    config = _config(model_type, architecture, **(common | fields))
    if config["hidden_act"] == "silu":
        del config["hidden_act"]
    return config


# One entry a layout. Those with `rope_parameters` are written in the spelling of transformers 5,
# the others in that of transformers 4 (`rope_theta`, `rope_scaling`), as nearly every published
# checkpoint is.
CONFIGS: dict[str, dict] = {
    "llama3": _config(
        "llama",
        "LlamaForCausalLM",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        rope_scaling=_LLAMA3_SCALING,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    ),
    "smollm2": _config(
        "llama",
        "LlamaForCausalLM",
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_theta=100000,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "qwen2": _config(
        "qwen2",
        "Qwen2ForCausalLM",
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=32768,
        max_window_layers=2,
    ),
    "deepseek_qwen": _config(
        "qwen2",
        "Qwen2ForCausalLM",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=10000,
        tie_word_embeddings=False,
        use_mrope=False,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=21,
    ),
    "qwen3": _config(
        "qwen3",
        "Qwen3ForCausalLM",
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=2,
    ),
    # As published: neither tie_word_embeddings nor layer_types. Caps that the values reach.
    "gemma2": _gemma_config(
        "gemma2",
        "Gemma2ForCausalLM",
        hidden_act="gelu_pytorch_tanh",
        num_hidden_layers=3,
        rope_theta=10000.0,
        sliding_window_size=5,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": _gemma_config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        num_hidden_layers=4,
        rope_theta=1000000,
        rope_local_base_freq=100,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window_pattern=3,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3_layer_types": _gemma_config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        num_hidden_layers=4,
        rope_parameters={
            "full_attention": {"rope_theta": 50000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 200.0, "rope_type": "default"},
        },
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
        tie_word_embeddings=False,
        use_bidirectional_attention=False,
    ),
}


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint under its Hugging Face name, linear layers as [out, in]."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim", d // heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj.weight": (heads * h, d),
            "self_attn.k_proj.weight": (kv_heads * h, d),
            "self_attn.v_proj.weight": (kv_heads * h, d),
            "self_attn.o_proj.weight": (d, heads * h),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
        }
        if config["model_type"] == "qwen2":
            layer |= {
                "self_attn.q_proj.bias": (heads * h,),
                "self_attn.k_proj.bias": (kv_heads * h,),
                "self_attn.v_proj.bias": (kv_heads * h,),
            }
        if config["model_type"] in GEMMA:
            layer |= {
                "pre_feedforward_layernorm.weight": (d,),
                "post_feedforward_layernorm.weight": (d,),
            }
        if config["model_type"] in ("qwen3", "gemma3_text"):
            layer |= {"self_attn.q_norm.weight": (h,), "self_attn.k_norm.weight": (h,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not config.get("tie_word_embeddings", config["model_type"] in GEMMA):
        shapes["lm_head.weight"] = (v, d)
    return shapes


def _random_state(*parts: object) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(repr((SEED, *parts)).encode()))


def _bell(state: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Mean 0, standard deviation 1: four uniform integers added up."""
    return state.randint(-128, 129, size=(4, *shape)).sum(axis=0) / 148.4


def tensors(case: str) -> dict[str, np.ndarray]:
    """Float32 weights large enough that every part of the layer shows in the logits."""
    out = {}
    for name, shape in tensor_shapes(CONFIGS[case]).items():
        bell = _bell(_random_state(case, name), shape)
        if name.endswith("norm.weight"):
            # Gemma's norms multiply by 1 + their weight.
            value = 0.2 * bell + (CONFIGS[case]["model_type"] not in GEMMA)
        elif name.endswith("bias"):
            value = 0.5 * bell
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            value = 0.3 * bell
        else:
            value = bell / np.sqrt(shape[-1])
        out[name] = value.astype(np.float32)
    return out


def token_batch(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[BATCH, LENGTH], right-padded with id 0, and the rows' lengths i32[BATCH]."""
    state = _random_state(case, "tokens")
    tokens = state.randint(3, CONFIGS[case]["vocab_size"], size=(BATCH, LENGTH)).astype(np.int32)
    lengths = np.array([LENGTH, 11, 4], np.int32)
    return np.where(np.arange(LENGTH) < lengths[:, None], tokens, 0).astype(np.int32), lengths
