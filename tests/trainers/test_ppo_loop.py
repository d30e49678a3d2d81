"""The pieces composed as in an experiment: it learns, and new numbers compile nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.losses.kl import adaptive_controller, init_kl_state
from jaxrlhf.models.heads import init_critic
from jaxrlhf.models.transformer import forward, logits
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.trainers.ppo import (
    PPOHyper,
    actor_loss,
    critic_loss,
    epoch_key,
    evaluate,
    make_experience,
    minibatches,
    positions_and_segments,
)
from jaxrlhf.trainers.update import init_train_state, summarize, update
from jaxrlhf.types import Rollout

PROMPT, WIDTH, ROWS, GOOD = 2, 8, 32, 5  # the reward: the share of response tokens equal to GOOD


@functools.partial(jax.jit, static_argnames="config")
def sample(params, key, temperature, *, config):
    """A row-by-row reference sampler: no cache, one full forward pass per token."""
    prompts = jnp.tile(jnp.arange(4, dtype=jnp.int32)[:, None], (ROWS // 4, WIDTH))
    positions, segments = positions_and_segments(jnp.full(ROWS, WIDTH), WIDTH)

    def draw(carry, t):
        tokens, log_probs = carry
        hidden = forward(params, tokens, positions, segments, config=config)
        log_p = jax.nn.log_softmax(logits(params, hidden, config)[:, t - 1] / temperature)
        chosen = jax.random.categorical(jax.random.fold_in(key, t), log_p)
        at = jnp.take_along_axis(log_p, chosen[:, None], axis=1)[:, 0]
        return (tokens.at[:, t].set(chosen), log_probs.at[:, t].set(at)), None

    start = (prompts, jnp.zeros((ROWS, WIDTH)))
    tokens, log_probs = jax.lax.scan(draw, start, jnp.arange(PROMPT, WIDTH))[0]
    mask = positions >= PROMPT
    return Rollout(
        tokens=tokens,
        prompt_lengths=jnp.full(ROWS, PROMPT),
        lengths=jnp.full(ROWS, WIDTH),
        response_mask=mask,
        log_probs=log_probs,
        finish_reason=jnp.zeros(ROWS, jnp.int8),
        group_ids=jnp.arange(ROWS),
        policy_version=jnp.where(mask, 0, -1),
    )


class Loop:
    """What an experiment holds; `step` is its loop body."""

    def __init__(self, config, params):
        self.config, self.ref = config, params
        self.actor_opt = OptimizerHyper.create(learning_rate=1e-2)
        self.critic_opt = OptimizerHyper.create(learning_rate=1e-2)
        self.hyper = PPOHyper.create(entropy_coef=0.001)
        self.kl = init_kl_state(0.01)
        self.actor = init_train_state(params, self.actor_opt)
        self.critic = init_train_state(init_critic(params, config), self.critic_opt)
        self.actor_loss = functools.partial(actor_loss, config=config)
        self.critic_loss = functools.partial(critic_loss, config=config)
        self.key = jax.random.key(0)

    def step(self, number):
        hyper = self.hyper
        key = jax.random.fold_in(self.key, number)
        rollout = sample(self.actor.params, key, hyper.temperature, config=self.config)
        response = np.asarray(rollout.tokens)[:, PROMPT:]
        scores = (response == GOOD).mean(axis=1, dtype=np.float32)
        evaluation = evaluate(
            self.actor.params, self.ref, self.critic.params, rollout, hyper.temperature,
            config=self.config, row_block=ROWS,
        )  # fmt: skip
        experience, metrics = make_experience(
            rollout, evaluation, scores, np.ones(ROWS, bool),
            gamma=hyper.gamma, lam=hyper.lam, kl_coef=self.kl.coef,
        )  # fmt: skip
        history = []
        for batch in minibatches(epoch_key(self.key, number, 0), experience, ROWS // 2):
            self.critic, critic_metrics = update(
                self.critic, batch, self.critic_opt, hyper,
                loss_fn=self.critic_loss, num_micro_batches=2, name="value",
            )  # fmt: skip
            self.actor, actor_metrics = update(
                self.actor, batch, self.actor_opt, hyper,
                loss_fn=self.actor_loss, num_micro_batches=2, name="policy",
            )  # fmt: skip
            history.append(critic_metrics | actor_metrics)
        observed = metrics["kl/k1_token_mean"]
        self.kl = adaptive_controller(self.kl, observed, ROWS, target=0.1, horizon=10_000)
        return jax.device_get(metrics) | summarize(history)


@pytest.fixture
def compiled():
    """How many programs XLA has compiled since the test began."""
    events = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(events)
    jax.monitoring.clear_event_listeners()


def test_ppo_learns_and_new_numbers_compile_nothing(config, models, compiled):
    loop = Loop(config, jax.tree.map(jnp.asarray, models.actor))
    first = [loop.step(i) for i in range(2)]
    warm = compiled()
    assert warm > 4  # the counter counts
    assert first[0]["rollout/sampler_gap_max"] < 1e-4
    assert abs(first[0]["kl/k3_token_mean"]) < 1e-6
    for i in range(2, 30):
        last = loop.step(i)
    assert first[0]["reward/mean"] < 0.2
    assert last["reward/mean"] > 0.7
    assert last["kl/k3_token_mean"] > 0.01
    assert last["policy/entropy"] < first[0]["policy/entropy"]
    assert last["policy/skipped"] == last["value/skipped"] == 0

    loop.actor_opt = OptimizerHyper.create(learning_rate=3e-4, eps=1e-6, max_grad_norm=0.5)
    loop.critic_opt = OptimizerHyper.create(learning_rate=0.0, beta1=0.5)
    loop.hyper = PPOHyper.create(
        clip_low=0.1, clip_high=0.4, value_clip=0.5, gamma=0.9, lam=0.5, temperature=0.7,
        entropy_coef=0.0,
    )  # fmt: skip
    loop.kl = init_kl_state(0.5)
    sizes = [f._cache_size() for f in (evaluate, make_experience, update)]
    changed = loop.step(30)
    assert changed["policy/learning_rate"] == np.float32(3e-4)
    loop.step(31)
    assert [f._cache_size() for f in (evaluate, make_experience, update)] == sizes
    print(f"\nmust-show 10: {warm} programs in 2 steps, {compiled() - warm} in the other 30")
    assert compiled() == warm
