import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import layers
from jaxrlhf.models.config import PRESETS, RopeScaling

LLAMA = PRESETS["llama-3.2-1b"]


def test_rms_norm_computes_in_float32_whatever_it_is_given(rng):
    x = rng.normal(size=(3, 5, 64)) * 1e3
    scale = rng.normal(size=64)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)):
        given = jnp.asarray(x, dtype)
        got = layers.rms_norm(given, jnp.asarray(scale, jnp.float32), 1e-6)
        assert got.dtype == dtype
        if dtype == jnp.bfloat16:  # only the input and the result are rounded
            y = np.asarray(given, np.float64)
            expected = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * scale
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance)


def test_rms_norm_of_zeros_has_finite_gradients():
    value, grad = jax.value_and_grad(
        lambda x: layers.rms_norm(x, jnp.ones(4), 1e-6).sum(), argnums=0
    )(jnp.zeros(4))
    assert value == 0
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
def test_llama3_scaling_by_its_definition_on_wavelengths(factor):
    scaling = RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    config = dataclasses.replace(LLAMA, rope_scaling=scaling)
    got = layers.rope_frequencies(config)
    kinds = set()
    for i, frequency in enumerate(got):
        plain = 5e5 ** (-2 * i / 64)
        wavelength = 2 * np.pi / plain
        if wavelength < 8192 / 4:
            expected, kind = plain, "kept"
        elif wavelength > 8192 / 1:
            expected, kind = plain / factor, "stretched"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected, kind = (1 - smooth) * plain / factor + smooth * plain, "blended"
        kinds.add(kind)
        assert frequency == pytest.approx(expected, rel=1e-12)
    assert kinds == {"kept", "blended", "stretched"}


def test_linear_scaling_is_the_unscaled_table_at_a_fraction_of_the_position():
    plain = dataclasses.replace(LLAMA, rope_scaling=None)
    scaled = dataclasses.replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0))
    positions = jnp.arange(8)
    for a, b in zip(
        layers.rope_table(4 * positions, scaled), layers.rope_table(positions, plain), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_rotations_see_only_relative_positions(rng):
    config = dataclasses.replace(LLAMA, rope_scaling=None, head_dim=16)
    q, k = (jnp.asarray(rng.normal(size=(6, 1, 16)), jnp.float32) for _ in range(2))

    def products(offset):
        rope = layers.rope_table(jnp.arange(6) + offset, config)
        rotated = layers.apply_rope(q, rope)[:, 0], layers.apply_rope(k, rope)[:, 0]
        np.testing.assert_allclose(
            jnp.linalg.norm(rotated[0], axis=-1), jnp.linalg.norm(q[:, 0], axis=-1), rtol=1e-5
        )
        return rotated[0] @ rotated[1].T

    np.testing.assert_allclose(products(0), products(100), atol=1e-4)
    unrotated = layers.apply_rope(q, layers.rope_table(jnp.zeros(6, int), config))
    np.testing.assert_array_equal(unrotated, q)
    assert not np.allclose(products(0), q[:, 0] @ k[:, 0].T, atol=1e-2)


def test_the_rope_table_is_float32_at_positions_that_bfloat16_cannot_count():
    rope = layers.rope_table(jnp.array([4095, 4096]), LLAMA, jnp.bfloat16)
    assert all(table.dtype == jnp.float32 for table in rope)
    angles = np.array([[4095], [4096]]) * layers.rope_frequencies(LLAMA)
    # Half an ulp of the angle in float32 is 2.4e-4 at 4096.
    np.testing.assert_allclose(rope[0], np.cos(angles), atol=3e-4)
    np.testing.assert_allclose(rope[1], np.sin(angles), atol=3e-4)


def _dense_attention(q, k, v, mask):
    """Float64, one repeated key and value per query head, one row and head at a time."""
    batch, time, kv_heads, group, width = q.shape
    out = np.zeros((batch, time, kv_heads, group, width))
    for b, h, g in np.ndindex(batch, kv_heads, group):
        scores = q[b, :, h, g] @ k[b, :, h].T / np.sqrt(width)
        scores = np.where(mask[b], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[b, :, h, g] = weights / weights.sum(-1, keepdims=True) @ v[b, :, h]
    return out.reshape(batch, time, -1)


@pytest.mark.parametrize("group", [1, 3])
def test_attention_equals_the_dense_definition(rng, group):
    segments = np.array([[1, 1, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
    q = rng.normal(size=(2, 7, 2, group, 4))
    k, v = rng.normal(size=(2, 2, 7, 2, 4))
    mask = layers.causal_segment_mask(jnp.asarray(segments))
    wanted = np.tril(segments[:, :, None] == segments[:, None, :])
    np.testing.assert_array_equal(mask, wanted)
    got = layers.attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), mask)
    np.testing.assert_allclose(got, _dense_attention(q, k, v, wanted), atol=1e-5)


@pytest.mark.parametrize("own_in_cache", [True, False])
def test_cached_attention_equals_the_dense_definition(rng, own_in_cache):
    """NaN in slots that the mask hides is harmless for keys; values there are zeros or finite."""
    q = rng.normal(size=(2, 1, 2, 3, 4))
    k, v = rng.normal(size=(2, 2, 6, 2, 4))
    mask = np.array([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 1, 1]], bool)
    expected = _dense_attention(q, k, v, mask[:, None])[:, 0]
    q32, k32, v32 = (jnp.asarray(x, jnp.float32) for x in (q[:, 0], k, v))
    k_cache, v_cache = k32.transpose(0, 2, 3, 1), v32.transpose(0, 2, 1, 3)
    k_cache = k_cache.at[:, :, :, 3].set(jnp.nan)
    own = None
    if not own_in_cache:
        own = (k32[:, 5], v32[:, 5])
        mask[:, 5] = False
        k_cache, v_cache = k_cache.at[..., 5].set(jnp.nan), v_cache.at[:, :, 5].set(7.0)
    got = layers.attend_cached(q32, k_cache, v_cache, jnp.asarray(mask), own)
    np.testing.assert_allclose(got, expected, atol=1e-5)
