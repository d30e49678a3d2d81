import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import heads
from jaxrlhf.models.config import PRESETS
from jaxrlhf.models.specs import abstract_params

TIED = dataclasses.replace(
    PRESETS["qwen2.5-0.5b"],
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
UNTIED = dataclasses.replace(TIED, tie_embeddings=False)


def _actor(config, rng):
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), abstract_params(config)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_new_head_says_exactly_zero_and_can_learn(dtype, rng):
    hidden = jnp.asarray(rng.normal(size=(3, 5, 16)), dtype)
    head = heads.init_scalar_head(TIED)
    values = heads.scalar_head(head, hidden)
    assert values.shape == (3, 5)
    assert values.dtype == jnp.float32
    assert (values == 0).all()
    grad = jax.grad(lambda head: jnp.sum(heads.scalar_head(head, hidden)))(head)
    np.testing.assert_allclose(grad["kernel"], jnp.float32(hidden).sum((0, 1)), rtol=1e-5)


def test_a_head_is_a_float32_dot_product_at_its_own_position(rng):
    hidden, kernel = rng.normal(size=(2, 4, 16)), rng.normal(size=16)
    given = jnp.asarray(hidden, jnp.bfloat16)
    values = heads.scalar_head({"kernel": jnp.asarray(kernel, jnp.float32)}, given)
    np.testing.assert_allclose(values, np.asarray(given, np.float64) @ kernel, atol=1e-5)


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_a_critic_is_a_copy_that_may_be_donated(config, rng):
    actor = _actor(config, rng)
    kept = jax.tree.map(np.array, actor)
    critic = heads.init_critic(actor, config)
    assert "lm_head" not in critic["backbone"]
    shared = {k: v for k, v in actor.items() if k != "lm_head"}
    assert jax.tree.structure(shared) == jax.tree.structure(critic["backbone"])
    jax.tree.map(np.testing.assert_array_equal, shared, critic["backbone"])
    theirs = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(actor)}
    ours = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(critic)}
    assert not theirs & ours
    double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)
    jax.block_until_ready(double(critic))
    assert all(x.is_deleted() for x in jax.tree.leaves(critic))
    jax.tree.map(np.testing.assert_array_equal, actor, kept)
