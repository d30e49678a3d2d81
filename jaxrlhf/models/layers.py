"""The pieces of a decoder layer, each a function of arrays.

Letters: B rows, T tokens (queries), S slots (keys), D width, K key/value heads, G query heads per
key/value head, H head width. ``...`` stands for any leading axes. Norms, rotations, scores and
softmax are computed in at least float32 whatever the dtype of the activations.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.models.config import ModelConfig, RopeScaling

Rope = tuple[jax.Array, jax.Array]  # cos and sin, [..., H / 2]


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype that sums and exponentials are computed in: float32, or float64 under x64."""
    return jnp.promote_types(dtype, jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``scale * x / sqrt(mean(x^2) + eps)`` over the last axis, in the dtype of ``x``."""
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    scale = jnp.expand_dims(scale.astype(y.dtype), range(x.ndim - 1))
    return (y * scale).astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each rotated pair, float64[H / 2]."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is None:
        return frequencies
    return _scaled_frequencies(frequencies, config.rope_scaling)


def _scaled_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: turns over the original context decide; many turns keep their frequency.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def rope_table(
    positions: jax.Array, config: ModelConfig, dtype: jax.typing.DTypeLike = jnp.float32
) -> Rope:
    """Cosines and sines at ``positions`` [...], each ``wide(dtype)[..., H / 2]``.

    Made once per call of the model, outside the loop over layers.
    """
    frequencies = jnp.asarray(rope_frequencies(config), wide(dtype))
    angles = jnp.einsum("...,h->...h", positions.astype(frequencies.dtype), frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of ``x`` [..., heads, H]; the table has no heads axis."""
    cos, sin = (jnp.expand_dims(table, -2) for table in rope)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _heads(
    x: jax.Array, layer: Mapping[str, jax.Array], name: str, config: ModelConfig
) -> jax.Array:
    """One of the projections q, k, v of ``x`` [..., D], cut into heads [..., heads, H]."""
    y = x @ layer[f"{name}_kernel"]
    if config.qkv_bias:
        y = y + jnp.expand_dims(layer[f"{name}_bias"], range(y.ndim - 1))
    y = y.reshape(*y.shape[:-1], -1, config.head_dim)
    if config.qk_norm and name != "v":
        y = rms_norm(y, layer[f"{name}_norm"], config.norm_eps)
    return y


def project_qkv(
    x: jax.Array, layer: Mapping[str, jax.Array], rope: Rope, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [..., K, G, H], rotated keys [..., K, H] and values [..., K, H]."""
    q, k, v = (_heads(x, layer, name, config) for name in ("q", "k", "v"))
    q = apply_rope(q, rope)
    q = q.reshape(*q.shape[:-2], config.num_kv_heads, -1, config.head_dim)
    return q, apply_rope(k, rope), v


def causal_segment_mask(segment_ids: jax.Array) -> jax.Array:
    """bool[B, T, T]: query t sees key s when s <= t and both are of one segment.

    Every query sees itself, padding too, so no softmax is over nothing.
    """
    time = jnp.arange(segment_ids.shape[-1])
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same & (time[:, None] >= time[None, :])[None]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of q [B, T, K, G, H] on k, v [B, S, K, H] under mask [B, T, S] -> [B, T, K*G*H].

    Grouped queries share their key and value by the products' batch axis; nothing is repeated.
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=wide(q.dtype))
    scores = jnp.where(mask[:, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return mixed.reshape(*mixed.shape[:2], -1)


def attend_cached(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    mask: jax.Array,
    own: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Attention of one query per row on the cached tokens that ``mask`` shows.

    The cache lies as both products read it without a transpose.

    Args:
      q: [B, K, G, H].
      k_cache, v_cache: [B, K, H, S] and [B, K, S, H].
      mask: bool[B, S]; True somewhere in every row, unless ``own`` is given.
      own: the key and value [B, K, H] of the query's own token, when the cache lacks it.

    Returns:
      [B, K*G*H].
    """
    dtype, slots = wide(q.dtype), mask.shape[-1]
    scores = jnp.einsum("bkgh,bkhs->bkgs", q, k_cache, preferred_element_type=dtype)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    if own is not None:
        own_score = jnp.einsum("bkgh,bkh->bkg", q, own[0], preferred_element_type=dtype)
        scores = jnp.concatenate([scores, own_score[..., None]], axis=-1)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(v_cache.dtype)
    mixed = jnp.einsum("bkgs,bksh->bkgh", weights[..., :slots], v_cache)
    if own is not None:
        mixed = mixed + weights[..., slots:] * own[1][:, :, None]
    return mixed.reshape(q.shape[0], -1)


def gated_mlp(x: jax.Array, layer: Mapping[str, jax.Array]) -> jax.Array:
    """``(silu(x gate) * (x up)) down`` for x [..., D]."""
    return (jax.nn.silu(x @ layer["gate_kernel"]) * (x @ layer["up_kernel"])) @ layer["down_kernel"]
