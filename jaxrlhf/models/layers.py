"""The pieces of a decoder layer, each a function of arrays.

Letters: B rows, T tokens (queries), S slots (keys), D width, K key/value heads, G query heads per
key/value head, H head width. ``...`` stands for any leading axes. Norms, rotations, scores and
softmax are computed in at least float32 whatever the dtype of the activations.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.models.config import ModelConfig, RopeScaling

Rope = tuple[jax.Array, jax.Array]  # cos and sin, [..., H / 2]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype that sums and exponentials are computed in: float32, or float64 under x64."""
    return jnp.promote_types(dtype, jnp.float32)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """``cap * tanh(x / cap)``, within (-cap, cap); None: ``x``."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, *, plus_one: bool = False) -> jax.Array:
    """``scale * x / sqrt(mean(x^2) + eps)`` over the last axis, in the dtype of ``x``.

    With ``plus_one`` the factor is ``1 + scale``.
    """
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    scale = jnp.expand_dims(scale.astype(y.dtype), range(x.ndim - 1))
    return (y * (1 + scale if plus_one else scale)).astype(x.dtype)


def norm(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
    """``rms_norm`` as the model has it."""
    return rms_norm(x, scale, config.norm_eps, plus_one=config.norm_plus_one)


def rope_frequencies(config: ModelConfig, *, local: bool = False) -> np.ndarray:
    """Angle per position of each rotated pair, float64[H / 2]; ``local``: in windowed layers."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    if local and config.rope_local_theta is not None:
        return config.rope_local_theta**-exponents
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
    positions: jax.Array,
    config: ModelConfig,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    local: bool = False,
) -> Rope:
    """Cosines and sines at ``positions`` [...], each ``wide(dtype)[..., H / 2]``.

    Made once per call of the model, outside the loop over layers; once more, with ``local``, where
    the windowed layers have frequencies of their own.
    """
    frequencies = jnp.asarray(rope_frequencies(config, local=local), wide(dtype))
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
        y = norm(y, layer[f"{name}_norm"], config)
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


def window_mask(positions: jax.Array, key_positions: jax.Array, window: int) -> jax.Array:
    """bool[B, T, S] (or [B, S]): which keys lie less than ``window`` positions before the query.

    Args:
      positions: i32[B, T], or i32[B] for one query a row.
      key_positions: i32[B, S].
      window: 1 is the query's own position alone.
    """
    keys = jnp.expand_dims(key_positions, range(1, positions.ndim))
    return positions[..., None] - keys < window


def _cap_scores(scores: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """The cap of scores that are yet to be scaled: ``scale`` times it is the cap of the scaled."""
    return soft_cap(scores, None if softcap is None else softcap / scale)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of q [B, T, K, G, H] on k, v [B, S, K, H] under mask [B, T, S] -> [B, T, K*G*H].

    Grouped queries share their key and value by the products' batch axis; nothing is repeated.
    Scores are multiplied by ``scale`` (None: 1 / sqrt(H)), then capped.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=wide(q.dtype))
    scores = _cap_scores(scores, scale, softcap)
    scores = jnp.where(mask[:, None, None], scores * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return mixed.reshape(*mixed.shape[:2], -1)


def attend_cached(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    mask: jax.Array,
    own: tuple[jax.Array, jax.Array] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of one query per row on the cached tokens that ``mask`` shows.

    The cache lies as both products read it without a transpose.

    Args:
      q: [B, K, G, H].
      k_cache, v_cache: [B, K, H, S] and [B, K, S, H].
      mask: bool[B, S]; True somewhere in every row, unless ``own`` is given.
      own: the key and value [B, K, H] of the query's own token, when the cache lacks it.
      scale, softcap: as in ``attend``.

    Returns:
      [B, K*G*H].
    """
    dtype, slots = wide(q.dtype), mask.shape[-1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("bkgh,bkhs->bkgs", q, k_cache, preferred_element_type=dtype)
    scores = _cap_scores(scores, scale, softcap)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    if own is not None:
        own_score = jnp.einsum("bkgh,bkh->bkg", q, own[0], preferred_element_type=dtype)
        own_score = _cap_scores(own_score, scale, softcap)
        scores = jnp.concatenate([scores, own_score[..., None]], axis=-1)
    weights = jax.nn.softmax(scores * scale, axis=-1).astype(v_cache.dtype)
    mixed = jnp.einsum("bkgs,bksh->bkgh", weights[..., :slots], v_cache)
    if own is not None:
        mixed = mixed + weights[..., slots:] * own[1][:, :, None]
    return mixed.reshape(q.shape[0], -1)


def gated_mlp(x: jax.Array, layer: Mapping[str, jax.Array], activation: str = "silu") -> jax.Array:
    """``(act(x gate) * (x up)) down`` for x [..., D], ``act`` one of ``ACTIVATIONS``."""
    gate = ACTIVATIONS[activation](x @ layer["gate_kernel"])
    return (gate * (x @ layer["up_kernel"])) @ layer["down_kernel"]
