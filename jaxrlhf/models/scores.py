"""One number per row: what a reward model thinks of a text, read at the row's last real token.

A reward model's parameters are those of a critic, ``{"backbone": model, "head": scalar head}``.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import scalar_head
from jaxrlhf.models.transformer import forward


def sequence_scores(
    params: Mapping[str, Any],
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
) -> jax.Array:
    """Scores of right-padded rows: the head on the hidden state after token ``lengths - 1``.

    Args:
      params: ``{"backbone", "head"}``.
      tokens: i32[B, T]; what lies behind a row's length has no effect.
      lengths: i32[B], real tokens of each row. A row of length 0 (filler) gets some number.
      config: the model's (static).
      compute_dtype, remat: as in ``models.transformer.forward``.

    Returns:
      f32[B].

    transformers' ``…ForSequenceClassification`` reads at the last token that is not its config's
    ``pad_token_id``. The two differ where a row's own last token is that id: with pad == eos, a row
    that ends with eos is read one token earlier there. ``hf_classifier.save_classifier`` can
    therefore be given a pad token that no row ends with.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    real = index < lengths[:, None]
    hidden = forward(
        params["backbone"],
        tokens,
        jnp.where(real, index, 0),
        real.astype(jnp.int32),
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
    )
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return scalar_head(params["head"], jnp.take_along_axis(hidden, last, axis=1)[:, 0])


_jitted_scores = functools.partial(jax.jit, static_argnames=("config", "compute_dtype"))(
    sequence_scores
)


def score_rows(
    params: Mapping[str, Any],
    rows: Sequence[Sequence[int]],
    *,
    config: ModelConfig,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    batch_size: int = 32,
    multiple: int = 32,
    on_progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Scores of rows of any lengths, those of like length together; plain numbers, no gradient.

    Args:
      params: ``{"backbone", "head"}``.
      rows: token ids, at least one each.
      config, compute_dtype: as in ``sequence_scores``.
      batch_size: rows that are scored together (fewer are filled up to a power of two).
      multiple: the smallest width. Widths are this times a power of two, or halfway to the next,
        so that few programs are compiled.
      on_progress: called with how many more rows are done.

    Returns:
      numpy f32[B], in the rows' order.

    Raises:
      ValueError: a row without tokens.
    """
    lengths = np.asarray([len(row) for row in rows], np.int32)
    if len(rows) and not lengths.min():
        raise ValueError(f"row {int(lengths.argmin())} has no tokens; leave it out.")
    order = np.argsort(lengths, kind="stable")
    out = np.zeros(len(rows), np.float32)
    for start in range(0, len(rows), batch_size):
        block = order[start : start + batch_size]
        height = min(batch_size, 1 << (len(block) - 1).bit_length())
        tokens = np.zeros((height, _width(int(lengths[block[-1]]), multiple)), np.int32)
        ends = np.zeros(height, np.int32)
        ends[: len(block)] = lengths[block]
        for slot, row in enumerate(block):
            tokens[slot, : lengths[row]] = rows[row]
        scores = _jitted_scores(params, tokens, ends, config=config, compute_dtype=compute_dtype)
        out[block] = np.asarray(scores)[: len(block)]
        if on_progress is not None:
            on_progress(len(block))
    return out


def _width(length: int, multiple: int) -> int:
    blocks = -(-length // multiple)
    power = 1 << (blocks - 1).bit_length()
    between = power * 3 // 4
    return multiple * (between if 2 < blocks <= between else power)
