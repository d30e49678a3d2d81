"""Gemma through the sampler and the trainer: the same log-probs, past the windows and the caps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import hf, transformer
from jaxrlhf.models.heads import init_critic
from jaxrlhf.rollout import native, sampling
from jaxrlhf.trainers.forward import critic_values, policy_outputs, positions_and_segments

PROMPTS = [[5, 9, 11, 40, 41, 7, 8], [12], [3, 60, 61]]


@pytest.fixture(params=["gemma2", "gemma3"])
def model(request, write_checkpoint):
    return hf.load(write_checkpoint(request.param))


def _sample(params, config):
    sampler = native.NativeSampler(
        config,
        max_prompt_length=8,
        max_response_length=12,
        stop_ids=[2],
        pad_id=0,
        chunk_length=6,
        batch_size=6,
        unroll=config.final_softcap is None,  # each form of the decode step once
    )
    key = sampling.step_key(1, 0)
    return sampler.generate(params, PROMPTS, prompt_ids=range(3), key=key, samples_per_prompt=2)


def test_sampler_and_trainer_agree_past_the_window(model):
    params, config = model
    rollout = _sample(params, config)
    tokens, mask = jnp.asarray(rollout.tokens), np.asarray(rollout.response_mask)
    places = positions_and_segments(jnp.asarray(rollout.lengths), tokens.shape[1])
    assert rollout.lengths.max() > 2 * config.sliding_window

    def trainer(config):
        one = jnp.float32(1)
        return policy_outputs(params, tokens, *places, one, config=config, block_size=8).log_probs

    got = trainer(config)
    gap = np.abs(got - rollout.log_probs)[mask].max()
    print(f"{config.family}: {mask.sum()} tokens, largest |sampler - trainer| {gap:.1e}")
    assert gap < 1e-4
    dense = jax.nn.log_softmax(
        transformer.logits(
            params, transformer.forward(params, tokens, *places, config=config), config
        )
    )
    expected = jnp.take_along_axis(dense[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(got[:, 1:][mask[:, 1:]], expected[mask[:, 1:]], atol=1e-5)
    changes = [{"sliding_window": 6}, {"query_scalar": None}]
    changes += [{"final_softcap": None}] if config.final_softcap else []
    for change in changes:  # the test can fail
        other = trainer(dataclasses.replace(config, **change))
        assert np.abs(other - rollout.log_probs)[mask].max() > 1e-2


def test_a_critic_starts_at_zero_and_has_finite_gradients(model, rng):
    params, config = model
    tokens = jnp.asarray(rng.integers(0, 96, (2, 12)))
    places = positions_and_segments(jnp.array([12, 7]), 12)

    def loss(critic):
        values = critic_values(critic, tokens, *places, config=config, remat="full")
        return jnp.sum(jnp.square(values - 1)), values

    grads, values = jax.grad(loss, has_aux=True)(init_critic(params, config))
    assert (values == 0).all()
    assert np.abs(grads["head"]["kernel"]).max() > 0
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
