"""Evaluation against a dense oracle, row blocks, the checks before training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.heads import scalar_head
from jaxrlhf.models.transformer import forward, logits
from jaxrlhf.trainers.forward import (
    check_start,
    evaluate,
    map_row_blocks,
    positions_and_segments,
    start_problems,
    trim,
)
from jaxrlhf.trainers.ppo import PPOHyper, actor_loss, make_experience


@functools.partial(jax.jit, static_argnames="config")
def dense(params, critic, rollout, *, config):
    """Logits and head values, position-aligned, straight from the model."""
    n, width = rollout.tokens.shape
    positions = np.broadcast_to(np.arange(width), (n, width))
    segments = (positions < rollout.lengths[:, None]).astype(np.int32)
    inputs = (jnp.asarray(rollout.tokens), jnp.asarray(positions), jnp.asarray(segments))
    hidden = forward(params, *inputs, config=config)
    values = scalar_head(critic["head"], forward(critic["backbone"], *inputs, config=config))
    return logits(params, hidden, config), values


def softmax_statistics(logits, tokens, mask, temperature):
    """Numpy float64: token-aligned log-probs and entropy."""
    z = np.asarray(logits, np.float64)[:, :-1] / temperature
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -(np.exp(log_p) * log_p).sum(-1)
    pad = np.zeros((len(tokens), 1))
    return [np.where(mask, np.concatenate([pad, x], axis=1), 0) for x in (chosen, entropy)]


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_evaluate_equals_dense_oracle(config, models, uneven, temperature):
    raw, values = dense(models.actor, models.critic, uneven, config=config)
    got = evaluate(
        models.actor, models.ref, models.critic, uneven, jnp.float32(temperature), config=config
    )
    log_probs, entropy = softmax_statistics(raw, uneven.tokens, uneven.response_mask, temperature)
    np.testing.assert_allclose(got.log_probs, log_probs, atol=2e-5)
    np.testing.assert_allclose(got.entropy, entropy, atol=2e-5)
    # values[t] is read one position earlier, never from a hidden state that saw token t
    shifted = np.where(uneven.response_mask, np.roll(values, 1, axis=1), 0)
    np.testing.assert_allclose(got.values, shifted, atol=1e-5)
    assert np.abs(got.values).max() > 0.1


@pytest.mark.parametrize("row_block", [1, 3, 8, 100])
def test_row_blocks_change_nothing(config, models, uneven, row_block):
    run = functools.partial(
        evaluate, models.actor, None, models.critic, uneven, jnp.float32(1), config=config
    )
    whole, blocks = run(), run(row_block=row_block)
    assert whole.ref_log_probs is None
    for a, b in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_row_blocks_see_each_row_once():
    rows = {"x": jnp.arange(7), "y": jnp.ones((7, 2))}
    out = map_row_blocks(lambda r: {"z": r["x"] + r["y"].sum(axis=1)}, rows, 3)
    np.testing.assert_array_equal(out["z"], np.arange(7) + 2)


trained_loss = jax.jit(actor_loss, static_argnames=("config", "remat"))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_ratio_is_one_and_kl_zero_before_the_first_update(config, models, uneven, temperature):
    """Fault rows 8 and 9, at the loss itself."""
    hyper = PPOHyper.create(temperature=temperature)
    evaluation = evaluate(
        models.actor,
        models.actor,
        models.critic,
        uneven,
        hyper.temperature,
        config=config,
        row_block=3,
    )
    scores = np.linspace(0, 1, 8, dtype=np.float32)
    experience, metrics = make_experience(
        uneven,
        evaluation,
        scores,
        np.ones(8, bool),
        gamma=hyper.gamma,
        lam=hyper.lam,
        kl_coef=jnp.float32(0.1),
    )
    for name in ("kl/k1_token_mean", "kl/k3_token_mean", "kl/k1_sequence_mean"):
        assert abs(metrics[name]) < 1e-6, name
    _, step = trained_loss(models.actor, experience, hyper, config=config, remat="full")
    assert abs(step.maxima["policy/ratio_max"] - 1) < 1e-5
    assert abs(step.sums["policy/kl_k3"]) < 1e-6
    assert step.sums["policy/clip_fraction"] == 0


def sampled(config, models, rollout, temperature):
    raw, _ = dense(models.actor, models.critic, rollout, config=config)
    log_probs, _ = softmax_statistics(raw, rollout.tokens, rollout.response_mask, temperature)
    return rollout.replace(log_probs=log_probs.astype(np.float32))


@pytest.mark.parametrize(
    ("sampler", "trainer", "shift", "words"),
    [
        (0.5, 0.5, 0.0, []),
        (1.5, 1.5, 0.0, []),
        (0.5, 1.0, 0.0, ["sampler and trainer"]),
        (1.0, 1.0, 0.01, ["the ratio", "policy and reference"]),
        (1.0, 1.0, np.nan, ["the ratio", "policy and reference"]),
    ],
)
def test_start_check_names_what_is_wrong(config, models, uneven, sampler, trainer, shift, words):
    """A temperature on one side only; log-probs that the training path does not reproduce."""
    rollout = sampled(config, models, uneven, sampler)
    temperature = jnp.float32(trainer)
    evaluation = evaluate(models.actor, models.actor, None, rollout, temperature, config=config)
    moved = evaluation.log_probs + np.where(rollout.response_mask, shift, 0)
    if shift:
        rollout = rollout.replace(log_probs=moved)
    evaluation = evaluation.replace(log_probs=moved)
    report = check_start(
        models.actor, rollout, evaluation, temperature, config=config, row_block=2, remat="full"
    )
    if np.isnan(shift):
        words = ["sampler and trainer", *words]
    problems = start_problems(jax.device_get(report))
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert problem.startswith(word)
    assert not start_problems({"start/ref_gap_max": 1.0}, ref_tolerance=None)


def test_trim_cuts_common_padding_only(make_rollout):
    prompts, responses = [3, 5, 2], [2, 6, 1]
    wide = make_rollout(prompts, responses, num_tokens=40)
    for multiple, width in ((1, 11), (4, 12), (16, 16), (64, 40)):
        cut = trim(wide, multiple)
        assert cut.tokens.shape == cut.log_probs.shape == (3, width)
        np.testing.assert_array_equal(cut.tokens, wide.tokens[:, :width])
        np.testing.assert_array_equal(cut.lengths, wide.lengths)
        assert not wide.response_mask[:, width:].any()


def test_positions_and_segments():
    positions, segments = positions_and_segments(jnp.array([3, 0, 4]), 4)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 2, 3]])
    np.testing.assert_array_equal(segments, [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
