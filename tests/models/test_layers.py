import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import layers
from jaxrlhf.models.config import ACTIVATIONS, PRESETS, RopeScaling

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


def test_rms_norm_plus_one_adds_before_it_rounds(rng):
    """As in transformers: a weight that bfloat16 cannot add 1 to still counts."""
    x, scale = jnp.asarray(rng.normal(size=(3, 64)), jnp.float32), jnp.full(64, 2**-12)
    got = layers.rms_norm(x, scale.astype(jnp.bfloat16), 1e-6, plus_one=True)
    np.testing.assert_array_equal(got, layers.rms_norm(x, 1 + scale, 1e-6))
    assert (got != layers.rms_norm(x, jnp.ones(64), 1e-6)).any()


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


def test_local_frequencies_have_their_own_base_and_no_scaling():
    config = dataclasses.replace(
        LLAMA, rope_theta=1e6, rope_local_theta=1e4, rope_scaling=RopeScaling("linear", 8.0)
    )
    plain = dataclasses.replace(LLAMA, rope_theta=1e4, rope_scaling=None)
    local, positions = layers.rope_frequencies(config, local=True), jnp.arange(5)
    np.testing.assert_array_equal(local, layers.rope_frequencies(plain))
    assert layers.rope_frequencies(config)[0] == pytest.approx(1 / 8)
    for a, b in zip(
        layers.rope_table(positions, config, local=True),
        layers.rope_table(positions, plain),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    # Without a base of their own, windowed layers rotate as the others do.
    np.testing.assert_array_equal(
        layers.rope_frequencies(LLAMA, local=True), layers.rope_frequencies(LLAMA)
    )


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


def test_a_window_counts_positions():
    positions = np.array([[0, 1, 2, 3, 7], [5, 6, 0, 1, 2]])
    mask = layers.window_mask(jnp.asarray(positions), jnp.asarray(positions), 3)
    for b, t, s in np.ndindex(2, 5, 5):
        assert mask[b, t, s] == (positions[b, t] - positions[b, s] < 3)
    one = layers.window_mask(jnp.asarray(positions[:, -1]), jnp.asarray(positions), 3)
    np.testing.assert_array_equal(one, mask[:, -1])


def test_gelu_is_the_tanh_form(rng):
    x = rng.normal(size=(4, 8)) * 2
    weights = {"gate_kernel": np.eye(8), "up_kernel": np.eye(8), "down_kernel": np.eye(8)}
    layer = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
    got = layers.gated_mlp(jnp.asarray(x, jnp.float32), layer, "gelu_tanh")
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    np.testing.assert_allclose(got, 0.5 * x * (1 + np.tanh(inner)) * x, atol=1e-5)
    assert set(layers.ACTIVATIONS) == set(ACTIVATIONS)


def _dense_attention(q, k, v, mask, scale=None, softcap=None):
    """Float64, one repeated key and value per query head, one row and head at a time."""
    batch, time, kv_heads, group, width = q.shape
    out = np.zeros((batch, time, kv_heads, group, width))
    for b, h, g in np.ndindex(batch, kv_heads, group):
        scores = q[b, :, h, g] @ k[b, :, h].T * (scale or 1 / np.sqrt(width))
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        scores = np.where(mask[b], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[b, :, h, g] = weights / weights.sum(-1, keepdims=True) @ v[b, :, h]
    return out.reshape(batch, time, -1)


SCALES = [{}, {"scale": 0.7}, {"scale": 0.7, "softcap": 1.5}, {"softcap": 1.0}]


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_attention_equals_the_dense_definition(rng, group, scales):
    segments = np.array([[1, 1, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
    q = rng.normal(size=(2, 7, 2, group, 4))
    k, v = rng.normal(size=(2, 2, 7, 2, 4))
    mask = layers.causal_segment_mask(jnp.asarray(segments))
    wanted = np.tril(segments[:, :, None] == segments[:, None, :])
    np.testing.assert_array_equal(mask, wanted)
    got = layers.attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), mask, **scales)
    np.testing.assert_allclose(got, _dense_attention(q, k, v, wanted, **scales), atol=1e-5)


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("own_in_cache", [True, False])
def test_cached_attention_equals_the_dense_definition(rng, own_in_cache, scales):
    """NaN in slots that the mask hides is harmless for keys; values there are zeros or finite."""
    q = rng.normal(size=(2, 1, 2, 3, 4))
    k, v = rng.normal(size=(2, 2, 6, 2, 4))
    mask = np.array([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 1, 1]], bool)
    expected = _dense_attention(q, k, v, mask[:, None], **scales)[:, 0]
    q32, k32, v32 = (jnp.asarray(x, jnp.float32) for x in (q[:, 0], k, v))
    k_cache, v_cache = k32.transpose(0, 2, 3, 1), v32.transpose(0, 2, 1, 3)
    k_cache = k_cache.at[:, :, :, 3].set(jnp.nan)
    own = None
    if not own_in_cache:
        own = (k32[:, 5], v32[:, 5])
        mask[:, 5] = False
        k_cache, v_cache = k_cache.at[..., 5].set(jnp.nan), v_cache.at[:, :, 5].set(7.0)
    got = layers.attend_cached(q32, k_cache, v_cache, jnp.asarray(mask), own, **scales)
    np.testing.assert_allclose(got, expected, atol=1e-5)
