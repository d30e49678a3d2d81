"""The real SmolLM2-135M-Instruct: logits against transformers', and files byte by byte."""

import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxrlhf.models import hf
from jaxrlhf.models.transformer import forward, logits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> pathlib.Path:
    name = os.environ.get("JAXRLHF_SMOLLM2")
    if not name:
        pytest.skip("JAXRLHF_SMOLLM2 names no directory with SmolLM2-135M-Instruct")
    return pathlib.Path(name)


def _batch() -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([64, 40, 7], np.int32)
    tokens = np.random.RandomState(0).randint(17, 49152, size=(3, 64)).astype(np.int32)
    return np.where(np.arange(64) < lengths[:, None], tokens, 2).astype(np.int32), lengths


def test_logits_equal_transformers_before_and_after_a_save(smollm2, tmp_path, torch_logits):
    tokens, lengths = _batch()
    params, config = hf.load(smollm2)
    time = np.broadcast_to(np.arange(64), tokens.shape)
    real = time < lengths[:, None]
    hidden = forward(
        params, jnp.asarray(tokens), jnp.asarray(time), jnp.asarray(real, jnp.int32), config=config
    )
    ours = np.where(real[..., None], logits(params, hidden, config), 0)
    theirs = torch_logits(smollm2, tokens, lengths)
    gap = np.abs(ours - theirs).max()
    print(f"ours against transformers: {gap:.1e}, largest logit {np.abs(theirs).max():.1f}")
    assert gap <= 1e-4

    saved = hf.save(tmp_path / "saved", params, config, dtype="bfloat16", source_dir=smollm2)
    again = torch_logits(saved, tokens, lengths)
    print(f"transformers on our save against the original: {np.abs(again - theirs).max():.1e}")
    np.testing.assert_array_equal(again, theirs)


def test_save_of_load_is_byte_equal(smollm2, tmp_path):
    params, config = hf.load(smollm2)
    saved = hf.save(tmp_path / "saved", params, config, dtype="bfloat16", source_dir=smollm2)
    files = [d / "model.safetensors" for d in (smollm2, saved)]
    with safe_open(files[0], "numpy") as old, safe_open(files[1], "numpy") as new:
        assert sorted(old.keys()) == sorted(new.keys())
        assert old.metadata() == new.metadata()
        for name in sorted(old.keys()):
            assert old.get_slice(name).get_dtype() == new.get_slice(name).get_dtype()
            assert old.get_tensor(name).tobytes() == new.get_tensor(name).tobytes(), name
    print(f"{len(params['layers'])} stacked leaves, all tensors byte-equal")
    print("whole file byte-equal:", files[0].read_bytes() == files[1].read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (saved / name).read_bytes() == (smollm2 / name).read_bytes()
