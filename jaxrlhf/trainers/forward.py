"""Forward passes over rollouts: log-probs, entropy and values; what must hold before training.

Evaluation and training come through the same functions (``policy_outputs``, ``critic_values``), so
the ratio before the first update is 1 at any temperature.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxrlhf.losses.kl import kl_estimate
from jaxrlhf.losses.log_probs import TokenLogProbs, align_to_tokens, token_log_probs
from jaxrlhf.losses.masked import masked_mean, zero_outside
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import scalar_head
from jaxrlhf.models.transformer import forward, output_matrix
from jaxrlhf.types import Evaluation, Rollout

T = TypeVar("T")


def trim(rollout: Rollout, multiple: int) -> Rollout:
    """Cuts padding that all rows share, to a multiple of ``multiple`` tokens (so few shapes occur).

    Every dropped column is padding in every row. It reads ``lengths`` on the host.
    """
    longest = int(jnp.max(rollout.lengths))
    width = min(max(1, math.ceil(longest / multiple)) * multiple, rollout.tokens.shape[1])
    return jax.tree.map(lambda x: x[:, :width] if x.ndim == 2 else x, rollout)


def positions_and_segments(lengths: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Positions and segment ids i32[B, T] of right-padded rows: segment 1, then padding's 0.

    Args:
      lengths: i32[B], real tokens per row.
      num_tokens: T.
    """
    index = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    valid = index < lengths[:, None]
    return jnp.where(valid, index, 0), valid.astype(jnp.int32)


def policy_outputs(
    params: Any,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    temperature: jax.Array,
    *,
    config: ModelConfig,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
    block_size: int = 128,
) -> TokenLogProbs:
    """Token-aligned log-probs, logsumexp and entropy f32[B, T] of a policy at ``temperature``.

    Args:
      params: the model's parameters.
      tokens, positions, segment_ids: i32[B, T].
      temperature: traced scalar above 0.
      config: the model's configuration (static).
      compute_dtype: dtype of the matrix products.
      remat: rematerialisation of the layers (``models.transformer.forward``).
      block_size: tokens per block of the output projection.
    """
    hidden = forward(
        params,
        tokens,
        positions,
        segment_ids,
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
    )
    return token_log_probs(
        hidden,
        output_matrix(params, config).astype(hidden.dtype),
        tokens,
        segment_ids,
        temperature=temperature,
        softcap=config.final_softcap,
        block_size=block_size,
    )


def critic_values(
    params: Any,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    config: ModelConfig,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
) -> jax.Array:
    """Token-aligned values f32[B, T]: entry t is the value of the state before token t.

    Args:
      params: ``{"backbone": model parameters, "head": scalar head}``.
      tokens, positions, segment_ids: i32[B, T].
      config, compute_dtype, remat: as in ``policy_outputs``.
    """
    hidden = forward(
        params["backbone"],
        tokens,
        positions,
        segment_ids,
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
    )
    return align_to_tokens(scalar_head(params["head"], hidden), segment_ids)


def map_row_blocks(function: Callable[[T], Any], rows: T, row_block: int | None) -> Any:
    """``function`` over blocks of rows, one block in memory at a time.

    The last block is filled up with zero rows, which are cut from the result.

    Args:
      function: pytree of ``[R, ...]`` leaves -> pytree of ``[R, ...]`` leaves, row by row.
      rows: pytree of ``[B, ...]`` leaves.
      row_block: R; None is one block of all rows.
    """
    n_rows = jax.tree.leaves(rows)[0].shape[0]
    if row_block is None or row_block >= n_rows:
        return function(rows)
    n_blocks = math.ceil(n_rows / row_block)

    def split(x: jax.Array) -> jax.Array:
        pad = jnp.zeros((n_blocks * row_block - n_rows, *x.shape[1:]), x.dtype)
        return jnp.concatenate([x, pad]).reshape(n_blocks, row_block, *x.shape[1:])

    out = jax.lax.map(function, jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(n_blocks * row_block, *x.shape[2:])[:n_rows], out)


@functools.partial(
    jax.jit,
    static_argnames=("config", "critic_config", "row_block", "compute_dtype", "block_size"),
)
def evaluate(
    actor_params: Any,
    ref_params: Any | None,
    critic_params: Any | None,
    rollout: Rollout,
    temperature: jax.Array,
    *,
    config: ModelConfig,
    critic_config: ModelConfig | None = None,
    row_block: int | None = None,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    block_size: int = 128,
) -> Evaluation:
    """Old log-probs, entropy, reference log-probs and values of a rollout in one program.

    Args:
      actor_params, ref_params: model parameters; no reference: None.
      critic_params: ``{"backbone", "head"}``, or None.
      rollout: rows to evaluate (``trim`` it first); its log-probs are not used.
      temperature: the sampler's, traced scalar above 0 (``PPOHyper.temperature``).
      config: of actor and reference (static).
      critic_config: of the critic's backbone; None: ``config``.
      row_block: rows in memory at a time; None: all. Any number goes: the last block is filled up.
      compute_dtype, block_size: as in ``policy_outputs``.

    Returns:
      f32[B, T] each, 0 outside the response mask.
    """

    def block(rows: tuple[jax.Array, jax.Array, jax.Array]) -> Evaluation:
        tokens, lengths, mask = rows
        positions, segment_ids = positions_and_segments(lengths, tokens.shape[1])

        def policy(params: Any) -> TokenLogProbs:
            return policy_outputs(
                params,
                tokens,
                positions,
                segment_ids,
                temperature,
                config=config,
                compute_dtype=compute_dtype,
                block_size=block_size,
            )

        actor = policy(actor_params)
        ref = None if ref_params is None else policy(ref_params).log_probs
        values = None
        if critic_params is not None:
            values = critic_values(
                critic_params,
                tokens,
                positions,
                segment_ids,
                config=critic_config or config,
                compute_dtype=compute_dtype,
            )
        evaluation = Evaluation(actor.log_probs, actor.entropy, ref, values)
        return jax.tree.map(lambda x: zero_outside(mask, x), evaluation)

    return map_row_blocks(
        block, (rollout.tokens, rollout.lengths, rollout.response_mask), row_block
    )


@functools.partial(
    jax.jit, static_argnames=("config", "row_block", "compute_dtype", "remat", "block_size")
)
def check_start(
    actor_params: Any,
    rollout: Rollout,
    evaluation: Evaluation,
    temperature: jax.Array,
    *,
    config: ModelConfig,
    row_block: int | None = None,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
    block_size: int = 128,
) -> dict[str, jax.Array]:
    """What must hold before the first update: sampler and trainer agree, ratio 1, KL 0.

    Args:
      actor_params: the policy that sampled ``rollout``.
      rollout, evaluation: of that policy, before any update.
      temperature: the run's.
      config, compute_dtype, remat, block_size: exactly as given to ``actor_loss``.
      row_block: the micro-batch's rows.

    Returns:
      f32 scalars over action tokens: ``start/sampler_gap_max`` (largest |sampler log-prob -
      trainer log-prob|), ``start/ratio_error_max`` (largest |ratio - 1| as the loss will see
      it), and with a reference ``start/ref_gap_max`` (largest |log-prob - reference's|) and
      ``start/ref_kl_k3`` (nats per token). ``start_problems`` judges them.
    """

    def block(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, lengths = rows
        positions, segment_ids = positions_and_segments(lengths, tokens.shape[1])
        return policy_outputs(
            actor_params,
            tokens,
            positions,
            segment_ids,
            temperature,
            config=config,
            compute_dtype=compute_dtype,
            remat=remat,
            block_size=block_size,
        ).log_probs

    mask = rollout.response_mask
    trained = map_row_blocks(block, (rollout.tokens, rollout.lengths), row_block)

    def gap(a: jax.Array, b: jax.Array) -> jax.Array:
        return zero_outside(mask, jnp.abs(a - b)).max()

    old, ref = evaluation.log_probs, evaluation.ref_log_probs
    report = {
        "start/sampler_gap_max": gap(rollout.log_probs, old),
        "start/ratio_error_max": gap(jnp.exp(trained - old), jnp.ones_like(old)),
    }
    if ref is not None:
        report["start/ref_gap_max"] = gap(old, ref)
        report["start/ref_kl_k3"] = masked_mean(kl_estimate(old, ref, kind="k3", mask=mask), mask)
    return report


def start_problems(
    report: dict[str, Any],
    *,
    sampler_tolerance: float = 1e-3,
    ratio_tolerance: float = 1e-4,
    ref_tolerance: float | None = 1e-4,
) -> list[str]:
    """One sentence per number of ``check_start`` that is over its tolerance (or NaN).

    Args:
      report: what ``check_start`` returned.
      sampler_tolerance, ratio_tolerance: float32's; bfloat16 needs about 0.1 for both.
      ref_tolerance: None when actor and reference do not start from the same files.
    """
    checks = [
        (
            "start/sampler_gap_max",
            sampler_tolerance,
            "sampler and trainer disagree on the log-prob of a sampled token by {:.3g}; give both "
            "the same temperature, weights and compute dtype, and sample without top-k and top-p.",
        ),
        (
            "start/ratio_error_max",
            ratio_tolerance,
            "the ratio before the first update is off from 1 by {:.3g}; evaluate and train with "
            "the same temperature, compute dtype and masks, and no dropout.",
        ),
        (
            "start/ref_gap_max",
            ref_tolerance,
            "policy and reference differ in a log-prob by {:.3g} before the first update; load "
            "both from the same files, or say that they are meant to differ.",
        ),
    ]
    problems = []
    for name, tolerance, message in checks:
        value = float(report.get(name, 0.0))
        if tolerance is not None and not value <= tolerance:
            problems.append(message.format(value))
    return problems
