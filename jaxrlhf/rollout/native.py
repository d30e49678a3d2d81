"""The sampler that shares the trainer's model code and devices: the host's side of it.

Letters: P prompts, n samples of each, R rows of a call, B rows of one wave, T tokens of a row.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.rollout import checks, decoding
from jaxrlhf.types import FINISH_LENGTH, FINISH_STOP, Rollout

Progress = Callable[[int, int, int], None]


class _Wave(NamedTuple):
    """Responses of some rows, on the host: [B, max_response_length] and [B]."""

    tokens: np.ndarray
    log_probs: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray


class NativeSampler:
    """Samples responses with the model's own code; holds settings and counts, never parameters.

    A call's prompts are decoded in waves of at most `batch_size` rows; a short wave is filled up,
    so that all have one shape. What a row gets depends on its prompt, prompt id, sample number and
    key, not on waves, neighbours, chunks or padding (up to near-ties, see `sampling.cdf_gap`).

    Args:
      config: the model.
      max_prompt_length, max_response_length: in tokens; the sum must fit `config.max_positions`.
      stop_ids: all ids that end a row: the tokenizer's and generation_config's together. The stop
        token is the last token of its response.
      pad_id: fills rows after their end; may be one of the stop ids.
      compute_dtype: dtype of activations, products and cache; sampling itself is in float32.
      chunk_length: tokens decoded (at most) between two looks at whether all rows have ended.
      batch_size: rows decoded together; None takes all of a call, and compiles for every new
        number of rows.
      prompt_bucket: a call's prompts are padded to a multiple of this (and no further than
        max_prompt_length): two programs for every multiple that is met.
      top_k, top_p: cuts of the distribution, see `sampling.sample`; None for off.
      unroll: form of the decode step, see `transformer.decode_step`.

    Raises:
      ValueError: naming the setting to change.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_prompt_length: int,
        max_response_length: int,
        stop_ids: Sequence[int],
        pad_id: int,
        compute_dtype: jax.typing.DTypeLike = jnp.float32,
        chunk_length: int = 16,
        batch_size: int | None = None,
        prompt_bucket: int = 64,
        top_k: int | None = None,
        top_p: float | None = None,
        unroll: bool = True,
    ) -> None:
        checks.check_sizes(
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            chunk_length=chunk_length,
            batch_size=1 if batch_size is None else batch_size,
            prompt_bucket=prompt_bucket,
        )
        checks.check_context(config, max_prompt_length, max_response_length)
        checks.check_special_ids(config, stop_ids, pad_id)
        checks.check_cuts(config, top_k, top_p)
        # Token 0 comes from the prefill; the others in equal chunks.
        chunks = math.ceil((max_response_length - 1) / chunk_length)
        chunk_length = math.ceil((max_response_length - 1) / max(chunks, 1))
        self.compile_count = 0  # programs compiled on behalf of this sampler
        self.max_prompt_length = max_prompt_length
        self.batch_size = batch_size
        self.prompt_bucket = prompt_bucket
        self.top_p = top_p
        self.settings = decoding.Settings(
            config=config,
            compute_dtype=jnp.dtype(compute_dtype).name,
            unroll=unroll,
            stop_ids=tuple(sorted({int(i) for i in stop_ids})),
            pad_id=int(pad_id),
            top_k=top_k,
            max_response_length=max_response_length,
            chunk_length=max(chunk_length, 1),
            decode_slots=chunks * chunk_length,
        )

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p cut the distribution, so that its log-probs are not the model's.

        A trainer that does not correct for that should refuse such rows.
        """
        cut_p = self.top_p is not None and self.top_p < 1
        return cut_p or self.settings.top_k is not None

    def generate(
        self,
        params: decoding.Params,
        prompts: Sequence[Sequence[int]],
        *,
        prompt_ids: Sequence[int],
        key: jax.Array,
        samples_per_prompt: int = 1,
        temperature: float = 1.0,
        policy_version: int = 0,
        on_progress: Progress | None = None,
    ) -> Rollout:
        """Samples n responses to each of P prompts.

        The arrays always have T = max_prompt_length + max_response_length columns, whatever the
        prompts, so that what reads them compiles once; cut them by `lengths` where that pays.

        Args:
          params: the model's parameter tree, read and not kept.
          prompts: token ids, 1 to max_prompt_length each.
          prompt_ids: whom a prompt's noise is drawn for: its index in the data set, below 2³¹. One
            that occurs again in the call has its sample numbers continued, so that rows differ.
          key: `sampling.step_key(seed, step)`.
          samples_per_prompt: n; they share one prefill.
          temperature: 0 is greedy (log-probs are then those at temperature 1). Changing it
            compiles nothing.
          policy_version: written on every response token.
          on_progress: called after each chunk with (response tokens, rows finished, rows in all).

        Returns:
          A Rollout of numpy arrays, R = P·n rows, prompt-major. `group_ids` count the call's
          prompts. After a row's end `tokens` are pad_id.

        Raises:
          ValueError: for arguments that cannot be sampled from, naming the prompt.
          FloatingPointError: when the log-prob of a sampled token is not finite, naming the row.
        """
        arrays = checks.check_prompts(
            prompts, self.max_prompt_length, self.settings.config.vocab_size
        )
        checks.check_prompt_ids(prompt_ids, len(arrays))
        checks.check_call(samples_per_prompt, self.batch_size, temperature, policy_version)
        ids = _row_ids(prompt_ids, samples_per_prompt)
        knobs = decoding.Knobs(
            _scalar(temperature), None if self.top_p is None else _scalar(self.top_p)
        )
        decode_params = self._run(
            decoding.prepare_decode_params,
            params,
            compute_dtype=self.settings.compute_dtype,
            unroll=self.settings.unroll,
        )
        call = _Call(
            params,
            decode_params,
            key,
            knobs,
            samples_per_prompt,
            self._prompt_slots(arrays),
            len(arrays) if self.batch_size is None else self.batch_size // samples_per_prompt,
            _Meter(on_progress, ids.shape[1]),
        )
        waves = []
        for first in range(0, len(arrays), call.wave_prompts):
            last = first + call.wave_prompts
            wave_ids = ids[:, first * samples_per_prompt : last * samples_per_prompt]
            waves.append(self._wave(call, arrays[first:last], wave_ids))
        joined = _Wave(*(np.concatenate(parts) for parts in zip(*waves, strict=True)))
        _check_finite(joined, ids)
        return self._rollout(arrays, joined, samples_per_prompt, policy_version)

    def _wave(self, call: "_Call", prompts: list[np.ndarray], ids: np.ndarray) -> _Wave:
        """Decodes some prompts to their end, and fetches: two numbers a chunk, then all at once."""
        settings, rows = self.settings, ids.shape[1]
        fillers = (call.wave_prompts - len(prompts)) * call.samples_per_prompt
        fixed, state, *first = self._run(
            decoding.start_wave,
            call.params,
            *_pack(prompts, call.wave_prompts, call.prompt_slots, settings.pad_id),
            call.key,
            np.pad(ids, ((0, 0), (0, fillers))),
            np.arange(call.wave_prompts) >= len(prompts),
            call.knobs,
            samples_per_prompt=call.samples_per_prompt,
            settings=settings,
        )
        chunks = [tuple(first)]
        for start in range(1, settings.max_response_length, settings.chunk_length):
            state, tokens, log_probs, counts = self._run(
                decoding.decode_chunk,
                call.decode_params,
                state,
                fixed,
                np.int32(start),
                call.knobs,
                settings=settings,
            )
            chunks.append((tokens, log_probs))
            done, ended = jax.device_get(counts).tolist()
            if ended == rows + fillers:
                break
            call.meter.show(done, ended - fillers)
        fetched, lengths, stopped = jax.device_get((chunks, state.lengths, state.ended))
        call.meter.finish(int(lengths.sum()), rows)
        tokens, log_probs = (self._by_row(parts, rows) for parts in zip(*fetched, strict=True))
        return _Wave(tokens, log_probs, lengths[:rows], stopped[:rows])

    def _by_row(self, chunks: Sequence[np.ndarray], rows: int) -> np.ndarray:
        """Chunks [C, B] of some of the tokens as [rows, max_response_length]."""
        joined = np.concatenate(chunks)[: self.settings.max_response_length, :rows].T
        return np.pad(joined, ((0, 0), (0, self.settings.max_response_length - joined.shape[1])))

    def _rollout(
        self, prompts: list[np.ndarray], wave: _Wave, samples_per_prompt: int, policy_version: int
    ) -> Rollout:
        """Prompt and response side by side, whatever slots the cache gave them."""
        prompt_of_row = np.repeat(np.arange(len(prompts), dtype=np.int32), samples_per_prompt)
        prompt_lengths = np.array([len(p) for p in prompts], np.int32)[prompt_of_row]
        shape = (len(prompt_of_row), self.max_prompt_length + self.settings.max_response_length)
        tokens = np.full(shape, self.settings.pad_id, np.int32)
        log_probs = np.zeros(shape, np.float32)
        lengths = prompt_lengths + wave.lengths
        columns = np.arange(shape[1])
        mask = (columns >= prompt_lengths[:, None]) & (columns < lengths[:, None])
        # Both sides are read row by row, so each row's tokens keep their order.
        given = np.arange(wave.tokens.shape[1]) < wave.lengths[:, None]
        tokens[mask], log_probs[mask] = wave.tokens[given], wave.log_probs[given]
        prompt = np.concatenate([prompts[i] for i in prompt_of_row])
        tokens[columns < prompt_lengths[:, None]] = prompt
        fields: dict[str, Any] = {
            "tokens": tokens,
            "prompt_lengths": prompt_lengths,
            "lengths": lengths.astype(np.int32),
            "response_mask": mask,
            "log_probs": log_probs,
            "finish_reason": np.where(wave.stopped, FINISH_STOP, FINISH_LENGTH).astype(np.int8),
            "group_ids": prompt_of_row,
            "policy_version": np.where(mask, policy_version, -1).astype(np.int32),
        }
        return Rollout(**fields)

    def _prompt_slots(self, prompts: list[np.ndarray]) -> int:
        longest = max(len(p) for p in prompts)
        rounded = math.ceil(longest / self.prompt_bucket) * self.prompt_bucket
        return min(rounded, self.max_prompt_length)

    def _run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a jitted function and counts what it compiles."""
        before = function._cache_size()
        out = function(*args, **kwargs)
        self.compile_count += function._cache_size() - before
        return out


class _Meter:
    """Adds up the progress of a call's waves."""

    def __init__(self, callback: Progress | None, rows: int) -> None:
        self.callback, self.rows = callback, rows
        self.tokens_before = self.finished_before = 0

    def show(self, tokens: int, finished: int) -> None:
        """Reports the running wave's response tokens and finished rows."""
        if self.callback is not None:
            tokens, finished = tokens + self.tokens_before, finished + self.finished_before
            self.callback(tokens, finished, self.rows)

    def finish(self, tokens: int, finished: int) -> None:
        """Reports a wave that is over."""
        self.show(tokens, finished)
        self.tokens_before += tokens
        self.finished_before += finished


class _Call(NamedTuple):
    """What the waves of one call share."""

    params: decoding.Params
    decode_params: decoding.Params
    key: jax.Array
    knobs: decoding.Knobs
    samples_per_prompt: int
    prompt_slots: int
    wave_prompts: int
    meter: _Meter


def _scalar(value: float) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


def _row_ids(prompt_ids: Sequence[int], samples_per_prompt: int) -> np.ndarray:
    """Prompt and sample number of every row, i32[2, R]; a repeated prompt's samples count on."""
    seen: Counter[int] = Counter()
    rows = []
    for prompt_id in prompt_ids:
        begin = seen[prompt_id]
        seen[prompt_id] += samples_per_prompt
        rows += [(prompt_id, sample) for sample in range(begin, seen[prompt_id])]
    return np.array(rows, np.int32).T


def _pack(
    prompts: list[np.ndarray], count: int, slots: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts i32[count, slots], right-padded, and their lengths; a filler is one pad token."""
    tokens = np.full((count, slots), pad_id, np.int32)
    lengths = np.ones(count, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return tokens, lengths


def _check_finite(wave: _Wave, ids: np.ndarray) -> None:
    bad = np.argwhere(~np.isfinite(wave.log_probs))
    if len(bad):
        row, token = bad[0]
        raise FloatingPointError(
            f"row {row} (prompt id {ids[0, row]}) has a log-prob that is not finite at response "
            f"token {token}: the logits hold NaN or inf, so restore parameters from before that"
        )
