"""Logits against transformers' on one tiny checkpoint a layout: stored numbers, and live."""

import dataclasses
import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import hf
from jaxrlhf.models.transformer import forward, logits

CASES = ["llama3", "smollm2", "qwen2", "deepseek_qwen", "qwen3"]
CASES += ["gemma2", "gemma3", "gemma3_layer_types"]


def _logits(params, config, tokens, lengths) -> np.ndarray:
    """Our logits of a right-padded batch, 0 on padding as in the goldens."""
    time = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    real = time < lengths[:, None]
    hidden = forward(
        params, jnp.asarray(tokens), jnp.asarray(time), jnp.asarray(real, jnp.int32), config=config
    )
    return np.where(real[..., None], logits(params, hidden, config), 0)


@pytest.fixture(scope="module")
def goldens(golden_dir):
    with np.load(golden_dir / "goldens.npz") as file:
        return dict(file)


def test_goldens_speak_about_these_weights(golden_dir, tiny_checkpoints, goldens):
    recorded = json.loads((golden_dir / "goldens.json").read_text())["weights_sha256"]
    assert set(CASES) == set(recorded) == set(goldens) == set(tiny_checkpoints.CONFIGS)
    for case in CASES:
        tensors, digest = tiny_checkpoints.tensors(case), hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].tobytes())
        assert digest.hexdigest() == recorded[case]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, write_checkpoint, tiny_checkpoints, goldens):
    params, config = hf.load(write_checkpoint(case))
    ours = _logits(params, config, *tiny_checkpoints.token_batch(case))
    gap = np.abs(ours - goldens[case]).max()
    print(f"{case}: largest gap {gap:.1e}, largest logit {np.abs(goldens[case]).max():.1f}")
    assert gap < 1e-4


# Each piece that sets the layouts apart, changed: the goldens must notice.
CHANGES = [
    ("llama3", {"rope_scaling": None}),
    ("smollm2", {"rope_theta": 1e4}),
    ("qwen2", {"qkv_bias": False}),
    ("qwen3", {"qk_norm": False}),
    ("deepseek_qwen", {"norm_eps": 1e-2}),
    ("deepseek_qwen", {"tie_embeddings": True}),
    ("gemma2", {"norm_plus_one": False}),
    ("gemma2", {"post_norms": False}),
    ("gemma2", {"activation": "silu"}),
    ("gemma2", {"scale_embeddings": False}),
    ("gemma2", {"query_scalar": None}),
    ("gemma2", {"sliding_window": 6}),
    ("gemma2", {"window_pattern": (False, True)}),
    ("gemma2", {"attention_softcap": None}),
    ("gemma2", {"final_softcap": None}),
    ("gemma3", {"qk_norm": False}),
    ("gemma3", {"rope_local_theta": None}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3", {"window_pattern": (True,)}),
    ("gemma3_layer_types", {"sliding_window": None, "window_pattern": ()}),
]


@pytest.mark.parametrize(("case", "change"), CHANGES, ids=lambda x: str(x))
def test_goldens_notice_a_change(case, change, write_checkpoint, tiny_checkpoints, goldens):
    params, config = hf.load(write_checkpoint(case))
    changed = dataclasses.replace(config, **change)
    ours = _logits(params, changed, *tiny_checkpoints.token_batch(case))
    assert np.abs(ours - goldens[case]).max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_transformers_opens_what_we_save(
    case, tmp_path, write_checkpoint, tiny_checkpoints, goldens, torch_logits
):
    params, config = hf.load(write_checkpoint(case))
    batch = tiny_checkpoints.token_batch(case)
    # Without a source: config.json holds nothing but what we know, in several files.
    saved = hf.save(tmp_path / "saved", params, config, dtype="float32", max_shard_bytes=50_000)
    theirs = torch_logits(saved, *batch)
    gap = np.abs(theirs - goldens[case]).max()
    ours = np.abs(_logits(params, config, *batch) - theirs).max()
    print(f"{case}: transformers on our save against its golden {gap:.1e}, against us {ours:.1e}")
    assert gap < 1e-5
    assert ours < 1e-4
