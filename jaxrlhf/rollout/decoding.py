"""The compiled programs of the native sampler, as pure functions: prefill, then chunks of tokens.

Letters: P prompts, n samples of each, B = P·n rows of one wave, D width, Tp prompt slots, C tokens
of one chunk.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.models import transformer
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.rollout import sampling

Params = Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the compiled programs depend on besides shapes; hashable, passed as a static argument.

    `decode_slots` tokens are decoded at most after the first one: a multiple of `chunk_length`,
    at least `max_response_length` − 1.
    """

    config: ModelConfig
    compute_dtype: str
    unroll: bool
    stop_ids: tuple[int, ...]
    pad_id: int
    top_k: int | None
    max_response_length: int
    chunk_length: int
    decode_slots: int


class Knobs(NamedTuple):
    """Traced scalars of a call: changing one compiles nothing (top_p None: not in the program)."""

    temperature: jax.Array
    top_p: jax.Array | None


class Rows(NamedTuple):
    """What stays the same while a wave is decoded: typed keys [B] and prompt lengths i32[B]."""

    keys: jax.Array
    prompt_lengths: jax.Array


class State(NamedTuple):
    """What a chunk hands to the next: the cache, and per row [B] its last token, whether it has
    ended (filler rows start ended) and how many response tokens it has."""

    cache: transformer.Cache
    tokens: jax.Array
    ended: jax.Array
    lengths: jax.Array


@partial(jax.jit, static_argnames=("compute_dtype", "unroll"))
def prepare_decode_params(
    params: Params, *, compute_dtype: jax.typing.DTypeLike, unroll: bool = True
) -> Params:
    """Parameters as the decode loop reads them: cast once a call, not once a token.

    Args:
      params: the model's parameter tree.
      compute_dtype: dtype of kernels and embeddings (norm scales stay as they are).
      unroll: a tree per layer in place of stacked leaves.

    Returns:
      A tree for `decode_chunk`; the prefill reads the model's own.
    """
    return transformer.decode_params(params, compute_dtype=compute_dtype, unroll=unroll)


def _choose(
    params: Params,
    hidden: jax.Array,
    rows: Rows,
    ended: jax.Array,
    lengths: jax.Array,
    step: jax.Array | int,
    knobs: Knobs,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Response token `step` of every row from hidden [B, D]: tokens, log_probs, ended, lengths."""
    tokens, log_probs = sampling.sample(
        transformer.logits(params, hidden, settings.config),
        sampling.token_uniforms(rows.keys, step),
        temperature=knobs.temperature,
        top_k=settings.top_k,
        top_p=knobs.top_p,
    )
    running = ~ended & (step < settings.max_response_length)
    tokens = jnp.where(running, tokens, settings.pad_id)
    log_probs = jnp.where(running, log_probs, 0)
    stops = jnp.asarray(settings.stop_ids, jnp.int32)
    stopped = running & jnp.any(tokens[:, None] == stops[None], axis=-1)
    return tokens, log_probs, ended | stopped, lengths + running


@partial(jax.jit, static_argnames=("samples_per_prompt", "settings"))
def start_wave(
    params: Params,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    key: jax.Array,
    ids: jax.Array,
    filler: jax.Array,
    knobs: Knobs,
    *,
    samples_per_prompt: int,
    settings: Settings,
) -> tuple[Rows, State, jax.Array, jax.Array]:
    """Prefill of P prompts, shared by their n samples, and the first token of every row.

    Args:
      params: the model's parameter tree.
      prompts: i32[P, Tp], right-padded; prompt_lengths: i32[P].
      key: the step's key; ids: i32[2, B], prompt and sample id of every row (prompt-major).
      filler: bool[P], prompts that only fill the shape.
      knobs, samples_per_prompt, settings: see above.

    Returns:
      Rows, State, and tokens i32[1, B], log_probs f32[1, B] of response token 0.
    """
    hidden, cache = transformer.prefill(
        params,
        prompts,
        prompt_lengths,
        config=settings.config,
        compute_dtype=settings.compute_dtype,
        response_slots=settings.decode_slots,
        unroll=settings.unroll,
    )
    cache = transformer.repeat_cache(cache, samples_per_prompt)
    repeat = partial(jnp.repeat, repeats=samples_per_prompt, axis=0)
    rows = Rows(sampling.row_keys(key, ids[0], ids[1]), repeat(prompt_lengths))
    ended = repeat(filler)
    tokens, log_probs, ended, lengths = _choose(
        params, repeat(hidden), rows, ended, jnp.zeros_like(ids[0]), 0, knobs, settings
    )
    return rows, State(cache, tokens, ended, lengths), tokens[None], log_probs[None]


@partial(jax.jit, static_argnames=("settings",), donate_argnames=("state",))
def decode_chunk(
    params: Params,
    state: State,
    rows: Rows,
    start: jax.Array,
    knobs: Knobs,
    *,
    settings: Settings,
) -> tuple[State, jax.Array, jax.Array, jax.Array]:
    """Response tokens start .. start + C − 1 of every row.

    The number of steps is fixed, so nothing in the loop depends on a row's end; the host decides
    whether another chunk is needed.

    Args:
      params: from `prepare_decode_params`.
      state: from `start_wave` or the previous chunk; donated.
      rows: from `start_wave`.
      start: i32 scalar, at least 1.
      knobs, settings: see above.

    Returns:
      The new state; tokens i32[C, B] and log_probs f32[C, B] (pad and 0 after a row's end); and
      i32[2], the response tokens so far and the rows that have ended, fillers included.
    """

    def body(state: State, step: jax.Array) -> tuple[State, tuple[jax.Array, jax.Array]]:
        hidden, cache = transformer.decode_step(
            params,
            state.cache,
            state.tokens,
            prompt_lengths=rows.prompt_lengths,
            step=step - 1,
            config=settings.config,
            compute_dtype=settings.compute_dtype,
            unroll=settings.unroll,
        )
        tokens, log_probs, ended, lengths = _choose(
            params, hidden, rows, state.ended, state.lengths, step, knobs, settings
        )
        return State(cache, tokens, ended, lengths), (tokens, log_probs)

    steps = start + jnp.arange(settings.chunk_length, dtype=jnp.int32)
    state, (tokens, log_probs) = lax.scan(body, state, steps)
    return state, tokens, log_probs, jnp.stack([jnp.sum(state.lengths), jnp.sum(state.ended)])
