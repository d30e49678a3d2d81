"""Reading and writing Hugging Face directories: what is equal, what is refused, what is atomic."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxrlhf.models import hf
from jaxrlhf.models.config import PRESETS
from jaxrlhf.models.layers import rope_frequencies
from jaxrlhf.models.specs import abstract_params, init_params

CASES = ["llama3", "smollm2", "qwen2", "deepseek_qwen", "qwen3"]
CASES += ["gemma2", "gemma3", "gemma3_layer_types"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def _tensors(directory: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of every file in a directory: dtype, shape, bytes."""
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 (a handle, not a dict)
                view, value = file.get_slice(name), file.get_tensor(name)
                out[name] = (view.get_dtype(), value.shape, value.tobytes())
    return out


def _write_json(path: pathlib.Path, **fields) -> None:
    path.write_text(json.dumps(fields))


# --- config.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_config_survives_the_round_trip(name):
    fields = json.loads(json.dumps(hf.to_hf(PRESETS[name])))
    assert hf.from_hf(fields) == PRESETS[name]
    # Either spelling of the rotary settings alone says the same.
    old_keys = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}
    new_keys = {"rope_parameters", "layer_types"}
    old = {k: v for k, v in fields.items() if k not in new_keys}
    new = {k: v for k, v in fields.items() if k not in old_keys}
    assert hf.from_hf(old) == hf.from_hf(new) == PRESETS[name]


def test_published_configs_give_the_presets():
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert hf.from_hf(qwen) == PRESETS["qwen2.5-0.5b"]
    qwen3 = qwen | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "sliding_window": None,
    }
    assert hf.from_hf(qwen3) == PRESETS["qwen3-0.6b"]
    del qwen3["head_dim"]  # not hidden_size / heads, which is 64
    assert hf.from_hf(qwen3) == PRESETS["qwen3-0.6b"]


def test_published_gemma_configs_give_the_presets():
    """Neither of the two says that its embeddings are tied; Gemma 2 nowhere says which windows."""
    gemma2 = {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 256000,
    }
    assert hf.from_hf(gemma2) == PRESETS["gemma-2-9b"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        assert hf.from_hf({k: v for k, v in gemma2.items() if k != key}) == PRESETS["gemma-2-9b"]
    uncapped = hf.from_hf(gemma2 | {"attn_logit_softcapping": None})
    assert uncapped.attention_softcap is None
    gemma3 = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 262144,
    }
    assert hf.from_hf(gemma3) == PRESETS["gemma-3-1b"]
    bare = ("rope_theta", "rope_local_base_freq", "sliding_window_pattern", "rope_scaling")
    assert hf.from_hf({k: v for k, v in gemma3.items() if k not in bare}) == PRESETS["gemma-3-1b"]


def test_layer_types_give_the_shortest_pattern_that_says_them(tiny_checkpoints):
    fields = tiny_checkpoints.CONFIGS["gemma3_layer_types"]
    f, s = "full_attention", "sliding_attention"
    for kinds, pattern in (
        ([f, s, s, f], (False, True, True)),
        ([s, f, s, f], (True, False)),
        ([s, s, f, f], (True, True, False, False)),
        ([s, s, s, s], (True,) * 5 + (False,)),  # four layers of Gemma 3's usual six
    ):
        config = hf.from_hf(fields | {"layer_types": kinds})
        assert config.window_pattern == pattern
        assert config.windowed_layers == tuple(kind == s for kind in kinds)
        assert hf.from_hf(hf.to_hf(config)) == config
    without = hf.from_hf(fields | {"layer_types": [f] * 4})
    assert (without.sliding_window, without.window_pattern) == (None, ())
    assert hf.from_hf(hf.to_hf(without)) == without


def test_first_llamas_leave_out_what_they_do_not_use(tiny_checkpoints):
    fields = dict(tiny_checkpoints.CONFIGS["smollm2"])
    for key in ("num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings"):
        del fields[key]
    config = hf.from_hf(fields)
    assert (config.num_kv_heads, config.rope_theta, config.head_dim) == (9, 10000.0, 8)
    assert not config.tie_embeddings


REFUSED = [
    ("qwen2", "use_sliding_window", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", "layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("llama3", "attention_bias", {"attention_bias": True}),
    ("qwen3", "attention_bias", {"attention_bias": True}),
    ("llama3", "mlp_bias", {"mlp_bias": True}),
    ("llama3", "hidden_act", {"hidden_act": "gelu"}),
    ("qwen2", "attention_dropout", {"attention_dropout": 0.1}),
    ("qwen2", "use_mrope", {"use_mrope": True}),
    ("smollm2", "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("smollm2", "rope_scaling: rope_type 'yarn'", {"rope_scaling": {"type": "yarn", "factor": 4}}),
    ("qwen3", "rope_parameters: rope_type", {"rope_parameters": {"rope_type": "dynamic"}}),
    ("qwen3", "rope_parameters differs", {"rope_parameters": {"full_attention": {"factor": 2}}}),
    ("smollm2", "rope_theta and rope_parameters", {"rope_parameters": {"rope_theta": 5e5}}),
    ("llama3", "disagree", {"rope_parameters": {"rope_type": "default"}}),
    ("llama3", "factor is missing", {"rope_scaling": LLAMA3 | {"factor": None}}),
    ("llama3", "quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
    ("llama3", "architectures", {"architectures": ["LlamaForSequenceClassification"]}),
    ("llama3", "model_type 'mistral'", {"model_type": "mistral"}),
    ("qwen2", "num_key_value_heads is missing", {"num_key_value_heads": None}),
    ("qwen2", "vocab_size is 9.5", {"vocab_size": 9.5}),
    ("smollm2", "hidden_size", {"hidden_size": 70}),
    ("gemma2", "hidden_activation", {"hidden_activation": "gelu"}),
    ("gemma2", "hidden_act is 'silu'", {"hidden_act": "silu"}),
    ("gemma2", "layer_types must name", {"layer_types": ["full_attention"] * 2}),
    ("gemma2", "layer_types must name", {"layer_types": ["chunked_attention"] * 3}),
    ("gemma2", "sliding_window is missing", {"sliding_window": None}),
    ("gemma2", "differs by layer", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
    ("gemma3", "sliding_window_pattern is 0", {"sliding_window_pattern": 0}),
    ("gemma3", "attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
    ("gemma3", "use_bidirectional_attention", {"use_bidirectional_attention": True}),
    ("gemma3", "rope_parameters has .*give full_attention", {"rope_parameters": {"factor": 2}}),
    (
        "gemma3_layer_types",
        "scales sliding_attention",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
    ),
    ("gemma3", "disagree", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}),
    (
        "gemma3",
        "of images and text",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {},
        },
    ),
]


@pytest.mark.parametrize(("case", "words", "change"), REFUSED, ids=[r[1] for r in REFUSED])
def test_refuses_configs_that_are_not_implemented(case, words, change, write_checkpoint):
    directory = write_checkpoint(case, config=change)
    with pytest.raises(ValueError, match=words) as error:
        hf.load(directory)
    assert str(directory / "config.json") in str(error.value)


def test_window_settings_that_no_layer_uses_are_fine(tiny_checkpoints):
    fields = tiny_checkpoints.CONFIGS["qwen2"]
    unused = {"use_sliding_window": True, "max_window_layers": fields["num_hidden_layers"]}
    assert hf.from_hf(fields | unused) == hf.from_hf(fields)
    assert hf.from_hf(fields | {"layer_types": ["full_attention"] * 2}) == hf.from_hf(fields)


def test_to_hf_refuses_what_transformers_cannot_express():
    config = PRESETS["smollm2-135m"]
    for change in ({"qkv_bias": True}, {"qk_norm": True}, {"final_softcap": 30.0}):
        with pytest.raises(ValueError, match=f"llama layout needs {next(iter(change))}="):
            hf.to_hf(dataclasses.replace(config, **change))
    for name, change in (
        ("gemma-2-2b", {"rope_local_theta": 1e4}),
        ("gemma-2-2b", {"qk_norm": True}),
        ("gemma-3-1b", {"attention_softcap": 50.0}),
        ("gemma-3-1b", {"rope_local_theta": None}),
    ):
        with pytest.raises(ValueError, match=next(iter(change))):
            hf.to_hf(dataclasses.replace(PRESETS[name], **change))


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000])
def test_save_of_load_is_byte_equal(case, dtype, max_shard_bytes, tmp_path, write_checkpoint):
    source = write_checkpoint(case, dtype=jnp.dtype(dtype))
    expected = _tensors(source)
    # Through float32 master weights as well as through the stored dtype.
    for i, held in enumerate((dtype, "float32")):
        params, config = hf.load(source, dtype=held)
        saved = hf.save(
            tmp_path / f"saved{i}", params, config, dtype=dtype, max_shard_bytes=max_shard_bytes
        )
        assert _tensors(saved) == expected
        files = sorted(path.name for path in saved.glob("*.safetensors*"))
        if max_shard_bytes == 2**30:
            assert files == ["model.safetensors"]
            assert (saved / files[0]).read_bytes() == (source / files[0]).read_bytes()
        else:
            assert files[-1] == "model.safetensors.index.json"
            assert len(files) > 2
            for file in files[:-1]:
                sizes = [value.nbytes for value in load_file(saved / file).values()]
                assert sum(sizes) <= max_shard_bytes or len(sizes) == 1
        source = saved  # and what we saved, sharded or not, loads


def test_load_has_the_structure_and_dtype_of_the_specs(write_checkpoint, tiny_checkpoints):
    params, config = hf.load(write_checkpoint("qwen2"), dtype="bfloat16")
    expected = abstract_params(config, jnp.bfloat16)
    got = {str(k): (v.shape, v.dtype) for k, v in _paths(params)}
    assert got == {str(k): (v.shape, v.dtype) for k, v in _paths(expected)}
    kernel = tiny_checkpoints.tensors("qwen2")["model.layers.1.mlp.up_proj.weight"]
    assert np.array_equal(params["layers"]["up_kernel"][1], kernel.T.astype(jnp.bfloat16))


def _paths(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
BROKEN = [
    ("qwen2", {NORM: None}, f"lack tensor {NORM}"),
    ("qwen2", {NORM: None, GATE: None}, r"tensor model.* \(and 1 more\)"),
    ("llama3", {"lm_head.weight": None}, "lack tensor lm_head.weight"),
    ("qwen2", {"score.weight": np.zeros((1, 48), np.float32)}, "tensor score.weight has no place"),
    ("llama3", {"model.layers.2.mlp.up_proj.weight": np.zeros((80, 64), np.float32)}, "no place"),
    ("qwen2", {GATE: np.zeros((48, 80), np.float32)}, rf"{GATE} has shape \(48, 80\).*\(80, 48\)"),
    ("qwen2", {GATE: np.zeros((80, 48), np.int8)}, f"{GATE} is I8"),
    ("qwen2", {GATE: np.zeros((80, 48), jnp.float8_e4m3fn)}, f"{GATE} is F8_E4M3"),
    ("qwen2", {"lm_head.weight": np.zeros((96, 48), np.float32)}, "lm_head.weight does not have"),
    (
        "llama3",
        {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)},
        "inv_freq does not have the values",
    ),
    ("qwen2", {"model.rotary_emb.inv_freq": np.ones(3, np.float32)}, "inv_freq does not have"),
]


@pytest.mark.parametrize(("case", "change", "words"), BROKEN, ids=[b[2] for b in BROKEN])
def test_every_wrong_leaf_is_named(case, change, words, write_checkpoint):
    directory = write_checkpoint(case, tensors=change)
    with pytest.raises(ValueError, match=words) as error:
        hf.load(directory)
    assert str(directory) in str(error.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_harmless_leftovers_are_checked_and_left_out(dtype, write_checkpoint, tiny_checkpoints):
    config = hf.from_hf(tiny_checkpoints.CONFIGS["smollm2"])
    buffer = rope_frequencies(config).astype(np.float32).astype(dtype)
    embedding = tiny_checkpoints.tensors("smollm2")["model.embed_tokens.weight"]
    leftovers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": buffer for i in range(2)}
    leftovers |= {"model.rotary_emb.inv_freq": buffer, "lm_head.weight": embedding}
    plain, _ = hf.load(write_checkpoint("smollm2", name="plain"))
    params, _ = hf.load(write_checkpoint("smollm2", tensors=leftovers))
    for (path, a), (other, b) in zip(_paths(plain), _paths(params), strict=True):
        assert path == other
        assert np.array_equal(a, b)


def test_damaged_or_missing_files_are_named(write_checkpoint, tmp_path):
    directory = write_checkpoint("qwen2")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        hf.load(directory)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        hf.load(directory)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        hf.load(tmp_path / "nowhere")
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        hf.load(directory)


# --- sharded checkpoints -------------------------------------------------------------------------


@pytest.fixture
def sharded(write_checkpoint, tmp_path) -> pathlib.Path:
    params, config = hf.load(write_checkpoint("qwen2"))
    return hf.save(tmp_path / "sharded", params, config, dtype="float32", max_shard_bytes=60_000)


def _edit_index(directory: pathlib.Path, **changes) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../model-00001-of-00003.safetensors", "/etc/passwd", "sub/x", "..", "", 3, "a\\b"]
)
def test_shard_names_stay_inside_the_directory(name, sharded):
    _edit_index(sharded, **{NORM: name})
    with pytest.raises(ValueError, match="plain file name"):
        hf.load(sharded)


def test_index_and_shards_must_agree(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(set(index.values()))
    first, last = index["model.embed_tokens.weight"], index[NORM]
    assert first != last

    _edit_index(sharded, **{NORM: None})
    with pytest.raises(ValueError, match=rf"{last}: tensor {NORM} is not in"):
        hf.load(sharded)
    _edit_index(sharded, **{NORM: first})
    with pytest.raises(ValueError, match=rf"{first} lacks tensor {NORM}"):
        hf.load(sharded)
    _edit_index(sharded, **{NORM: last, "model.ghost": last})
    with pytest.raises(ValueError, match=rf"{last} lacks tensor model\.ghost"):
        hf.load(sharded)
    _edit_index(sharded, **{"model.ghost": None})
    hf.load(sharded)

    values = load_file(sharded / first)
    doubled = values | {NORM: np.ones(48, np.float32)}
    save_file(doubled, sharded / first, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"tensor {NORM} is in {last} as well"):
        hf.load(sharded)
    save_file(values, sharded / first, {"format": "pt"})

    save_file(values, sharded / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="delete the stale one"):
        hf.load(sharded)
    (sharded / "model.safetensors").unlink()

    (sharded / shards[-1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"{shards[-1]} is missing"):
        hf.load(sharded)


# --- what else a directory holds -----------------------------------------------------------------


def test_save_carries_the_source_along(write_checkpoint, tmp_path):
    source = write_checkpoint(
        "qwen2", config={"eos_token_id": [7, 8], "torch_dtype": "float32", "custom": {"a": 1}}
    )
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "training_args.bin").write_text("not ours to copy")
    _write_json(source / "generation_config.json", eos_token_id=9, temperature=0.7)
    params, config = hf.load(source)

    saved = hf.save(tmp_path / "a" / "saved", params, config, dtype="bfloat16", source_dir=source)
    assert sorted(path.name for path in saved.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    fields = json.loads((saved / "config.json").read_text())
    assert fields["eos_token_id"] == [7, 8]
    assert fields["custom"] == {"a": 1}
    assert fields["dtype"] == "bfloat16"
    assert "torch_dtype" not in fields
    assert hf.stop_ids(saved, 3) == (3, 7, 8, 9)
    assert hf.load_config(saved) == config

    other = hf.load_config(write_checkpoint("qwen3", name="other"))
    with pytest.raises(ValueError, match="describes another model"):
        hf.save(tmp_path / "b", params, config, dtype="float32", source_dir=tmp_path / "other")
    assert other != config


def test_save_with_a_tokenizer_directory_and_generation_settings(write_checkpoint, tmp_path):
    params, config = hf.load(write_checkpoint("llama3"))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    settings = {"eos_token_id": 5, "pad_token_id": 0}
    saved = hf.save(
        tmp_path / "saved",
        params,
        config,
        dtype="float32",
        source_dir=tokenizer,
        generation_config=settings,
    )
    fields = json.loads((saved / "config.json").read_text())
    # Ids that nobody gave are null: transformers would otherwise put its own defaults there.
    ids = [fields[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert ids == [None, 5, 0]
    assert json.loads((saved / "generation_config.json").read_text()) == settings
    assert (saved / "tokenizer.json").exists()


def test_a_failed_save_leaves_nothing_and_the_old_directory_whole(write_checkpoint, tmp_path):
    params, config = hf.load(write_checkpoint("llama3"))
    saved = hf.save(tmp_path / "run" / "best", params, config, dtype="float32")
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    # model.norm.weight is the last tensor to be written.
    broken = params | {"final_norm": params["final_norm"].at[0].set(jnp.inf)}
    for target in (saved, saved.with_name("new")):
        with pytest.raises(ValueError, match=r"model\.norm\.weight is not finite"):
            hf.save(target, broken, config, dtype="float32")
    assert [path.name for path in saved.parent.iterdir()] == ["best"]
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before

    doubled = params | {"final_norm": 2 * params["final_norm"]}
    hf.save(saved, doubled, config, dtype="float32")
    assert [path.name for path in saved.parent.iterdir()] == ["best"]
    assert np.array_equal(hf.load(saved)[0]["final_norm"], doubled["final_norm"])


KILLED_SAVE = """
import os, sys
from jaxrlhf.models import hf
params, config = hf.load(sys.argv[1])
hf.write_json = lambda *args: os._exit(9)  # the weights are written, config.json is not
hf.save(sys.argv[2], params, config, dtype="float32")
"""


def test_a_killed_save_leaves_no_half_directory(write_checkpoint, tmp_path):
    source = write_checkpoint("qwen2")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    for target in (tmp_path / "new", source):
        command = [sys.executable, "-c", KILLED_SAVE, str(source), str(target)]
        assert subprocess.run(command, timeout=120).returncode == 9
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert visible == ["source"]
    assert len(list(tmp_path.glob(".*.partial"))) == 2


def test_a_save_clears_away_what_killed_ones_left(write_checkpoint, tmp_path):
    """Of its own name alone; one moved aside comes back where none took its place."""
    params, config = hf.load(write_checkpoint("qwen2"))
    (tmp_path / "run").mkdir()
    theirs = {".best.partial", f".other.{'0' * 32}.partial", f".best.2.{'0' * 32}.partial"}
    ours = {f".best.{'0' * 32}.partial", f".best.{'1' * 32}.old", f".best.{'2' * 32}.old"}
    for name in [*theirs, *ours]:
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "config.json").write_text("{}")
    best = hf.save(tmp_path / "run" / "best", params, config, dtype="float32")
    assert {path.name for path in best.parent.iterdir()} == {"best", *theirs}

    best.rename(tmp_path / "run" / f".best.{'a' * 32}.old")
    broken = params | {"final_norm": params["final_norm"].at[0].set(jnp.inf)}
    with pytest.raises(ValueError, match="is not finite"):
        hf.save(best, broken, config, dtype="float32")
    assert {path.name for path in best.parent.iterdir()} == {"best", *theirs}
    hf.load(best)


def test_save_refuses_wrong_trees_dtypes_and_places(write_checkpoint, tmp_path):
    params, config = hf.load(write_checkpoint("qwen2"))
    target = tmp_path / "saved"
    with pytest.raises(ValueError, match=r"\['backbone'\].*none"):
        hf.save(target, params | {"backbone": params["embed"]}, config, dtype="float32")
    kept = {k: v for k, v in params.items() if k != "final_norm"}
    with pytest.raises(ValueError, match=r"\['final_norm'\] is missing"):
        hf.save(target, kept, config, dtype="float32")
    with pytest.raises(ValueError, match=r"\['embed'\] is \(48, 96\).*\(96, 48\)"):
        hf.save(target, params | {"embed": params["embed"].T}, config, dtype="float32")
    with pytest.raises(ValueError, match="cannot be saved as int8"):
        hf.save(target, params, config, dtype="int8")
    big = params | {"final_norm": params["final_norm"] * 1e6}
    with pytest.raises(ValueError, match="not finite in float16"):
        hf.save(target, big, config, dtype="float16")
    assert not target.exists()

    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="no model directory"):
        hf.save(target, params, config, dtype="float32")
    assert (target / "thesis.tex").read_text() == "years of work"


def test_fresh_parameters_of_a_config_can_be_saved_and_loaded(tmp_path, tiny_checkpoints):
    config = hf.from_hf(tiny_checkpoints.CONFIGS["qwen3"])
    params = init_params(jax.random.key(0), config)
    loaded, again = hf.load(hf.save(tmp_path / "new", params, config, dtype="float32"))
    assert again == config
    for (_, a), (_, b) in zip(_paths(params), _paths(loaded), strict=True):
        assert np.array_equal(a, b)


# --- stop ids, generation settings, hub ----------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (2, None, None, (2,)),
        (None, None, 5, (5,)),
        (2, {"eos_token_id": [4, 2]}, 7, (2, 4, 7)),
        ([3, 1], {"eos_token_id": 9}, 1, (1, 3, 9)),
        (None, {"temperature": 0.5}, None, ()),
    ],
)
def test_stop_ids_are_the_union(config, generation, tokenizer, expected, tmp_path):
    _write_json(tmp_path / "config.json", eos_token_id=config)
    if generation is not None:
        _write_json(tmp_path / "generation_config.json", **generation)
    assert hf.stop_ids(tmp_path, tokenizer) == expected


def test_stop_ids_refuses_what_is_no_id(tmp_path):
    for value in ("</s>", True, [1, -1], [1.5]):
        _write_json(tmp_path / "config.json", eos_token_id=value)
        with pytest.raises(ValueError, match=r"config\.json: eos_token_id"):
            hf.stop_ids(tmp_path, None)


def test_ignored_generation_fields_are_reported(tmp_path):
    assert hf.ignored_generation_fields(tmp_path) == {}
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    _write_json(
        tmp_path / "generation_config.json",
        **sampling,
        do_sample=True,
        min_p=None,
        eos_token_id=[1, 2],
        transformers_version="4.57.0",
    )
    assert hf.ignored_generation_fields(tmp_path) == sampling | {"do_sample": True}


def test_resolve_asks_the_hub_only_for_ids(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        if name == "nobody/nothing":
            raise OSError("offline")
        return str(tmp_path)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert hf.resolve(tmp_path) == tmp_path
    for name in (tmp_path / "missing", "missing", "./a/b", "a/b/c", "../x"):
        with pytest.raises(FileNotFoundError, match="is no directory"):
            hf.resolve(name)
    assert asked == []
    assert hf.resolve("owner/model-1.5", revision="abc") == tmp_path
    assert asked == [("owner/model-1.5", "abc")]
    with pytest.raises(FileNotFoundError, match=r"nobody/nothing.*offline.*local directory"):
        hf.resolve("nobody/nothing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="needs huggingface_hub"):
        hf.resolve("owner/model")
