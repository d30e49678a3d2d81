"""The decoder transformer: teacher-forced forward pass, prefill, and one cached decode step.

Letters: B rows, P prompts, T tokens, L layers, D width, K key/value heads, H head width, S cache
slots, V vocabulary. Parameters have the structure of ``specs.param_specs``; they stay in their own
dtype (float32 master weights) and each layer's are cast to ``compute_dtype`` once, inside the loop
over layers. Where some layers have a sliding window, the masks (and rotary tables) of both kinds
are made outside that loop, and a flag per layer chooses.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.models import layers as nn
from jaxrlhf.models.config import ModelConfig

Params = Mapping[str, Any]
Layer = Mapping[str, jax.Array]
DType = jax.typing.DTypeLike
KeyValue = tuple[jax.Array, jax.Array]
# From a layer's (q, k, v) to the mixed values and the keys and values to keep.
Attention = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, KeyValue]]
Flag = jax.Array | bool | None  # whether a layer is windowed; None where no layer is

# What the backward pass keeps of a layer, by name: all, only its input, or its matrix products.
REMAT: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda layer: layer,
    "full": partial(jax.checkpoint, prevent_cse=False),
    "dots": partial(
        jax.checkpoint,
        prevent_cse=False,
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
}


def _cast(layer: Layer, dtype: DType) -> dict[str, jax.Array]:
    """Kernels and biases in the compute dtype; norm scales stay, they act in float32."""
    return {name: w if name.endswith("norm") else w.astype(dtype) for name, w in layer.items()}


def _embed(params: Params, tokens: jax.Array, config: ModelConfig, dtype: DType) -> jax.Array:
    x = params["embed"][tokens].astype(dtype)
    return x * jnp.asarray(config.hidden_size**0.5, dtype) if config.scale_embeddings else x


def _layer(
    x: jax.Array, layer: Layer, rope: nn.Rope, attention: Attention, config: ModelConfig
) -> tuple[jax.Array, KeyValue]:
    """One layer on activations [..., D]; what ``attention`` keeps is passed on."""
    layer = _cast(layer, x.dtype)
    h = nn.norm(x, layer["attention_norm"], config)
    mixed, kept = attention(*nn.project_qkv(h, layer, rope, config))
    mixed = mixed @ layer["o_kernel"]
    if config.post_norms:
        mixed = nn.norm(mixed, layer["attention_post_norm"], config)
    x = x + mixed
    h = nn.norm(x, layer["mlp_norm"], config)
    h = nn.gated_mlp(h, layer, config.activation)
    if config.post_norms:
        h = nn.norm(h, layer["mlp_post_norm"], config)
    return x + h, kept


class View(NamedTuple):
    """What a layer sees: its rotary table, and the mask of its attention."""

    rope: nn.Rope
    mask: jax.Array


class Views(NamedTuple):
    """The view of layers without a window, and that of the windowed ones where there are any."""

    full: View
    windowed: View | None = None

    def of(self, flag: Flag) -> View:
        """One layer's."""
        if self.windowed is None or flag is None:
            return self.full
        if isinstance(flag, bool):
            return self.windowed if flag else self.full

        def choose(near: jax.Array, far: jax.Array) -> jax.Array:
            return near if near is far else jnp.where(flag, near, far)

        return jax.tree.map(choose, self.windowed, self.full)

    def showing(self, more: jax.Array) -> "Views":
        """The views with what the mask ``more`` shows as well."""
        full = View(self.full.rope, self.full.mask | more)
        near = self.windowed
        return Views(full, None if near is None else View(near.rope, near.mask | more))


def _add_window(
    full: View, near: jax.Array, positions: jax.Array, config: ModelConfig, dtype: DType
) -> Views:
    """Both views; ``near`` is the window, to be cut with the mask."""
    rope = full.rope
    if config.rope_local_theta is not None:
        rope = nn.rope_table(positions, config, dtype, local=True)
    return Views(full, View(rope, full.mask & near))


def _sequence_views(
    positions: jax.Array, mask: jax.Array, config: ModelConfig, dtype: DType
) -> Views:
    """Of whole sequences at ``positions`` [B, T] under ``mask`` [B or 1, T, T]."""
    full = View(nn.rope_table(positions, config, dtype), mask)
    if config.sliding_window is None:
        return Views(full)
    rows = positions[: mask.shape[0]]
    near = nn.window_mask(rows, rows, config.sliding_window)
    return _add_window(full, near, positions, config, dtype)


def _layer_flags(config: ModelConfig) -> jax.Array | None:
    """bool[L], to be scanned over with the layers; None (nothing to scan) without windows."""
    return None if config.sliding_window is None else jnp.array(config.windowed_layers)


def _sequence_attention(mask: jax.Array, config: ModelConfig) -> Attention:
    """Attention within whole sequences; keeps keys and values [B, T, K, H]."""
    attend = partial(nn.attend, scale=config.attention_scale, softcap=config.attention_softcap)
    return lambda q, k, v: (attend(q, k, v, mask), (k, v))


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    config: ModelConfig,
    compute_dtype: DType = jnp.float32,
    remat: str = "none",
) -> jax.Array:
    """Hidden states after the final norm, the model's whole answer but the output matrix.

    Args:
      params: the parameter tree.
      tokens, positions, segment_ids: i32[B, T]; a token attends to itself and to earlier tokens of
        its own segment (a sliding window counts positions). Segment 0 is padding: finite, and
        invisible to the others.
      config: static.
      compute_dtype: dtype of activations and matrix products.
      remat: what the backward pass keeps per layer, a key of ``REMAT``.

    Returns:
      ``compute_dtype[B, T, D]``.

    Raises:
      ValueError: for an unknown ``remat``.
    """
    if remat not in REMAT:
        raise ValueError(f"unknown remat {remat!r}: use one of {sorted(REMAT)}")
    views = _sequence_views(positions, nn.causal_segment_mask(segment_ids), config, compute_dtype)

    def body(x: jax.Array, inputs: tuple[Layer, Flag]) -> tuple[jax.Array, None]:
        layer, flag = inputs
        rope, mask = views.of(flag)
        return _layer(x, layer, rope, _sequence_attention(mask, config), config)[0], None

    x = _embed(params, tokens, config, compute_dtype)
    x, _ = lax.scan(REMAT[remat](body), x, (params["layers"], _layer_flags(config)))
    return nn.norm(x, params["final_norm"], config)


def output_matrix(params: Params, config: ModelConfig) -> jax.Array:
    """The matrix [V, D] that hidden states are multiplied with: the embedding when tied."""
    return params["embed"] if config.tie_embeddings else params["lm_head"]


def logits(params: Params, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits [..., V] of hidden states [..., D], in at least float32, soft-capped if configured."""
    matrix = output_matrix(params, config).astype(hidden.dtype)
    dtype = nn.wide(hidden.dtype)
    out = jnp.einsum("...d,vd->...v", hidden, matrix, preferred_element_type=dtype)
    return nn.soft_cap(out, config.final_softcap)


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["prompt_slots"])
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far: slots 0 .. Tp-1 for the prompt, then one per token.

    Attributes:
      k: a tuple over layers of [B, K, H, S], or one stacked [L, B, K, H, S].
      v: the same of [B, K, S, H].
      prompt_slots: Tp, static.
    """

    k: Any
    v: Any
    prompt_slots: int

    @property
    def unrolled(self) -> bool:
        """Whether there is an array per layer."""
        return isinstance(self.k, tuple)


def _make_cache(k: jax.Array, v: jax.Array, prompt_slots: int, unroll: bool) -> Cache:
    return Cache(tuple(k), tuple(v), prompt_slots) if unroll else Cache(k, v, prompt_slots)


def init_cache(
    config: ModelConfig,
    batch: int,
    prompt_slots: int,
    response_slots: int,
    dtype: DType = jnp.float32,
    *,
    unroll: bool = True,
) -> Cache:
    """A zero cache, of the structure that ``prefill`` returns."""
    shape = (config.num_layers, batch, config.num_kv_heads)
    slots = prompt_slots + response_slots
    k = jnp.zeros((*shape, config.head_dim, slots), dtype)
    v = jnp.zeros((*shape, slots, config.head_dim), dtype)
    return _make_cache(k, v, prompt_slots, unroll)


def prefill(
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
    compute_dtype: DType = jnp.float32,
    response_slots: int,
    unroll: bool = True,
) -> tuple[jax.Array, Cache]:
    """Runs the prompts, keeping their keys and values.

    Args:
      params: the parameter tree.
      tokens: i32[P, Tp], right-padded prompts.
      lengths: i32[P], at least 1.
      config: static.
      compute_dtype: dtype of activations, products and cache.
      response_slots: how many tokens will be decoded at most.
      unroll: the cache's form, see ``decode_step``.

    Returns:
      The hidden state [P, D] of each prompt's last token, and the cache.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    # Causality alone hides the padding: it lies to the right of every prompt token.
    mask = nn.causal_segment_mask(jnp.ones_like(tokens[:1]))
    views = _sequence_views(positions, mask, config, compute_dtype)

    def body(x: jax.Array, inputs: tuple[Layer, Flag]) -> tuple[jax.Array, KeyValue]:
        layer, flag = inputs
        rope, mask = views.of(flag)
        x, (k, v) = _layer(x, layer, rope, _sequence_attention(mask, config), config)
        return x, (k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))

    x = _embed(params, tokens, config, compute_dtype)
    x, (k, v) = lax.scan(body, x, (params["layers"], _layer_flags(config)))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    k = jnp.pad(k, ((0, 0),) * 4 + ((0, response_slots),))
    v = jnp.pad(v, ((0, 0),) * 3 + ((0, response_slots), (0, 0)))
    cache = _make_cache(k, v, tokens.shape[1], unroll)
    return nn.norm(last, params["final_norm"], config), cache


def repeat_cache(cache: Cache, n: int) -> Cache:
    """Each row n times, prompt-major: rows 0 .. n-1 continue prompt 0."""
    axis = 0 if cache.unrolled else 1
    return jax.tree.map(lambda x: jnp.repeat(x, n, axis=axis), cache)


def decode_params(params: Params, *, compute_dtype: DType, unroll: bool = True) -> Params:
    """The parameters as ``decode_step`` reads them fastest; make them once per weight version.

    Kernels are cast to the compute dtype, and with ``unroll`` each layer gets its own arrays.
    ``decode_step`` takes the plain tree as well, and then casts and slices at every token.
    """
    layers = _cast(params["layers"], compute_dtype)
    rest = _cast({name: w for name, w in params.items() if name != "layers"}, compute_dtype)
    return {**rest, "layers": _layer_list(layers) if unroll else layers}


def _layer_list(layers: Any) -> tuple[Layer, ...]:
    if isinstance(layers, tuple):
        return layers
    count = next(iter(layers.values())).shape[0]
    return tuple({name: w[i] for name, w in layers.items()} for i in range(count))


def decode_step(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    *,
    prompt_lengths: jax.Array,
    step: jax.Array,
    config: ModelConfig,
    compute_dtype: DType = jnp.float32,
    unroll: bool = True,
) -> tuple[jax.Array, Cache]:
    """Feeds every row its next token: number ``step`` of the response, at one common slot.

    The caller runs it in a jitted chunk of a fixed number of tokens with the cache donated. All
    rows write slot Tp + step, so a write is one ``dynamic_update_slice``; rows differ in positions
    and mask alone. The two forms compute the same: ``unroll`` has a cache (and best, parameters)
    per layer, updated in place; otherwise a scan over layers only reads the stacked cache, which is
    written once after it (a cache that is scanned in and out is copied at every token). Windowed
    layers keep a slot for every token as the others do; the mask hides those outside the window.

    Args:
      params: the parameter tree, best from ``decode_params``.
      cache: from ``prefill`` or the previous step, of the same ``unroll``.
      tokens: i32[B], the tokens to feed.
      prompt_lengths: i32[B]; token ``step`` of a row has position ``prompt_length + step``.
      step: i32 scalar, counted from 0; the caller keeps it below the cache's response slots (a
        traced index cannot be checked, and a write past the end would land in the last slot).
      config: static.
      compute_dtype: dtype of activations and products.
      unroll: which form.

    Returns:
      The hidden states [B, D] after the final norm, which predict token ``step + 1``; the cache.

    Raises:
      ValueError: when the cache or the parameters have the other form.
    """
    if unroll != cache.unrolled:
        raise ValueError(f"the cache was made with unroll={cache.unrolled}: pass the same here")
    if isinstance(params["layers"], tuple) and not unroll:
        raise ValueError("the parameters were prepared with unroll=True: pass the same here")
    views = _decode_views(cache, prompt_lengths, step, config, compute_dtype)
    x = _embed(params, tokens, config, compute_dtype)
    run = _decode_unrolled if unroll else _decode_scanned
    x, cache = run(params["layers"], cache, x, views, cache.prompt_slots + step, config)
    return nn.norm(x, params["final_norm"], config), cache


def _decode_views(
    cache: Cache, prompt_lengths: jax.Array, step: jax.Array, config: ModelConfig, dtype: DType
) -> Views:
    """Of the token that is fed at ``step``, with masks [B, S] of the tokens before it."""
    slots = jnp.arange(cache.v[0].shape[-2])
    generated = (slots >= cache.prompt_slots) & (slots < cache.prompt_slots + step)
    mask = (slots[None] < prompt_lengths[:, None]) | generated[None]
    positions = prompt_lengths + step
    full = View(nn.rope_table(positions, config, dtype), mask)
    if config.sliding_window is None:
        return Views(full)
    # Between a row's prompt and its response lie slots of padding that count no position.
    gaps = jnp.where(
        slots[None] < cache.prompt_slots, 0, cache.prompt_slots - prompt_lengths[:, None]
    )
    near = nn.window_mask(positions, slots[None] - gaps, config.sliding_window)
    return _add_window(full, near, positions, config, dtype)


def _decode_unrolled(
    layers: Any, cache: Cache, x: jax.Array, views: Views, slot: jax.Array, config: ModelConfig
) -> tuple[jax.Array, Cache]:
    """Each layer writes its own arrays and then reads them, so that XLA updates them in place."""
    own = (jnp.arange(cache.v[0].shape[-2]) == slot)[None]
    views = views.showing(own)

    def attention(
        cached: KeyValue, mask: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, KeyValue]:
        cached = _write(*cached, k, v, slot)
        return attend(q, *cached, mask), cached

    attend, kept = _cached_attention(config), []
    inputs = zip(_layer_list(layers), cache.k, cache.v, config.windowed_layers, strict=True)
    for layer, k_cache, v_cache, flag in inputs:
        rope, mask = views.of(flag)
        x, written = _layer(x, layer, rope, partial(attention, (k_cache, v_cache), mask), config)
        kept.append(written)
    k_caches, v_caches = zip(*kept, strict=True)
    return x, Cache(k_caches, v_caches, cache.prompt_slots)


def _cached_attention(config: ModelConfig) -> Callable[..., jax.Array]:
    scale, softcap = config.attention_scale, config.attention_softcap
    return partial(nn.attend_cached, scale=scale, softcap=softcap)


def _decode_scanned(
    layers: Any, cache: Cache, x: jax.Array, views: Views, slot: jax.Array, config: ModelConfig
) -> tuple[jax.Array, Cache]:
    """The scan reads the stacked cache and gives the new keys and values; one write follows."""
    attend = _cached_attention(config)

    def body(
        x: jax.Array, inputs: tuple[Layer, jax.Array, jax.Array, Flag]
    ) -> tuple[jax.Array, KeyValue]:
        layer, k_cache, v_cache, flag = inputs
        rope, mask = views.of(flag)

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KeyValue]:
            return attend(q, k_cache, v_cache, mask, own=(k, v)), (k, v)

        return _layer(x, layer, rope, attention, config)

    x, kept = lax.scan(body, x, (layers, cache.k, cache.v, _layer_flags(config)))
    k_cache, v_cache = _write(cache.k, cache.v, kept[0], kept[1], slot)
    return x, Cache(k_cache, v_cache, cache.prompt_slots)


def _write(
    k_cache: jax.Array, v_cache: jax.Array, k: jax.Array, v: jax.Array, slot: jax.Array
) -> KeyValue:
    """The caches [..., K, H, S] and [..., K, S, H] with k and v [..., K, H] in one ``slot``."""
    k = k[..., None].astype(k_cache.dtype)
    v = v[..., None, :].astype(v_cache.dtype)
    return (
        lax.dynamic_update_slice_in_dim(k_cache, k, slot, k_cache.ndim - 1),
        lax.dynamic_update_slice_in_dim(v_cache, v, slot, v_cache.ndim - 2),
    )
