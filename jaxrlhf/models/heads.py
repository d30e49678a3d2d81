"""Scalar heads: one number per position, for critics and reward models.

A head is *position-aligned*: entry t is read after token t. The value of the state before token t
is that of position t - 1 (``losses.align_to_tokens``); a reward model's score is entry T - 1.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layers import wide


def init_scalar_head(
    config: ModelConfig, dtype: jax.typing.DTypeLike = jnp.float32
) -> dict[str, jax.Array]:
    """A head that says exactly 0 everywhere until it is trained: ``{"kernel": zeros[D]}``."""
    return {"kernel": jnp.zeros((config.hidden_size,), dtype)}


def scalar_head(head: Mapping[str, jax.Array], hidden: jax.Array) -> jax.Array:
    """``hidden . kernel`` for hidden [..., D] -> at least float32[...], position-aligned."""
    dtype = wide(hidden.dtype)
    return jnp.einsum("...d,d->...", hidden.astype(dtype), head["kernel"].astype(dtype))


def init_critic(actor_params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """A critic that starts as the actor: ``{"backbone": copy of its parameters, "head": zero}``.

    Every buffer is new, so that either model's update may donate its own. An untied ``lm_head``
    is left out: a critic has no logits.
    """
    backbone = {name: value for name, value in actor_params.items() if name != "lm_head"}
    return {"backbone": jax.tree.map(jnp.copy, backbone), "head": init_scalar_head(config)}
