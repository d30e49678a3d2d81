"""Supervised fine-tuning: next-token cross-entropy over a ``TokenBatch``.

loss_fn = functools.partial(sft_loss, config=config)              # once
state, metrics = update(state, batch, hyper_opt, None, loss_fn=loss_fn, name="sft")
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.losses.masked import weighted_sum
from jaxrlhf.losses.sft import cross_entropy
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.trainers.forward import policy_outputs
from jaxrlhf.trainers.update import StepMetrics
from jaxrlhf.types import TokenBatch


def sft_loss(
    params: Any,
    batch: TokenBatch,
    hyper: None = None,
    *,
    config: ModelConfig,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    remat: str = "none",
    block_size: int = 128,
) -> tuple[jax.Array, StepMetrics]:
    """``-sum_t w_t log p(token_t | tokens_<t)`` at temperature 1.

    Args:
      params: the model's parameters.
      batch: a micro-batch whose ``loss_weights`` were made on the whole optimiser batch; packed
        rows are told apart by ``segment_ids``, and a document's first token has no loss.
      hyper: nothing to set; it keeps the signature that ``update`` calls.
      config: the model's (static).
      compute_dtype, remat, block_size: as in ``trainers.forward.policy_outputs``.

    Returns:
      (loss, metrics): ``sft/loss`` and ``sft/entropy`` in nats per token, by the loss's weights.
    """
    out = policy_outputs(
        params,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        jnp.ones(()),
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
        block_size=block_size,
    )
    loss = weighted_sum(cross_entropy(out.log_probs), batch.loss_weights)
    sums = {"sft/loss": loss, "sft/entropy": weighted_sum(out.entropy, batch.loss_weights)}
    return loss, jax.lax.stop_gradient(StepMetrics(sums, {}))
