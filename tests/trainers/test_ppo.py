"""The two losses: what must not change them, and the directions in which they push."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.losses.masked import AGGREGATIONS, token_weights
from jaxrlhf.models.transformer import forward, logits
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.trainers.forward import policy_outputs
from jaxrlhf.trainers.ppo import (
    PPOHyper,
    actor_loss,
    critic_loss,
    evaluate,
    make_experience,
    positions_and_segments,
)
from jaxrlhf.trainers.update import init_train_state, pure_update
from jaxrlhf.types import Experience

SCORES = np.array([0.7, 0.1, 0.0, 1.0, 0.35, 0.9, 0.2, 0.55], np.float32)
SCORED = np.array([1, 1, 1, 1, 1, 1, 0, 1], bool)
PROMPTS, RESPONSES = [3, 5, 2, 4, 6, 3, 2, 5], [2, 16, 1, 7, 12, 0, 5, 16]


def moved(params):
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(x.dtype), params)


def pipeline(models, rollout, scores, scored, hyper, *, config, dtype):
    """Evaluate, make experience, and differentiate both losses at parameters that have moved."""
    settings = {"config": config, "compute_dtype": dtype}
    evaluation = evaluate(
        models.actor, models.ref, models.critic, rollout, hyper.temperature, **settings
    )
    experience, metrics = make_experience(
        rollout, evaluation, scores, scored, gamma=hyper.gamma, lam=hyper.lam, kl_in="loss"
    )
    losses = {"actor": (actor_loss, models.actor), "critic": (critic_loss, models.critic)}
    grads = {
        role: jax.value_and_grad(functools.partial(loss, **settings), has_aux=True)(
            moved(params), experience, hyper
        )
        for role, (loss, params) in losses.items()
    }
    return grads, metrics


def permuted(rollout):
    order = np.array([6, 2, 0, 7, 5, 1, 4, 3])
    return jax.tree.map(lambda x: x[order], rollout), SCORES[order], SCORED[order]


def with_filler(rollout):
    rollout = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:4])]), rollout)
    return rollout, np.pad(SCORES, (0, 4)), np.pad(SCORED, (0, 4))


@pytest.fixture(scope="module")
def variants(make_rollout):
    make = functools.partial(make_rollout, PROMPTS, RESPONSES)
    return {
        "plain": (make(), SCORES, SCORED),
        "row order": permuted(make()),
        "padding amount": (make(num_tokens=33), SCORES, SCORED),
        "pad is an ordinary token": (make(pad_id=int(make().tokens[0, 4])), SCORES, SCORED),
        "filler rows": with_filler(make()),
    }


def test_batch_layout_changes_nothing(config, models, variants, quick_jit):
    """Rows, padding, the pad's id and filler rows: losses, gradients and metrics to 1e-12."""
    with jax.enable_x64(True):
        models = models.astype("float64")
        hyper = PPOHyper.create(entropy_coef=0.01, kl_loss_coef=0.1)
        run = quick_jit(functools.partial(pipeline, config=config, dtype=jnp.float64))
        results = {name: run(models, *inputs, hyper) for name, inputs in variants.items()}
    plain_grads, plain_metrics = results.pop("plain")
    fractions = {"rollout/length_mean", "reward/unscored_fraction"}
    for name, (grads, metrics) in results.items():
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
            scale = np.abs(b).max() + 1e-6
            np.testing.assert_allclose(a, b, atol=1e-12 * max(1, scale), err_msg=name)
        for key in metrics.keys() - fractions:
            if name == "filler rows" and key.endswith("_fraction"):
                continue  # filler rows are rows: counted as empty, as unscored
            np.testing.assert_allclose(metrics[key], plain_metrics[key], rtol=1e-6, err_msg=key)


def pack(experience, first, second):
    """Two right-padded rows become one packed row: segments 1 and 2, positions from 0 again."""
    n, m = (int((experience.segment_ids[row] == 1).sum()) for row in (first, second))
    width = experience.tokens.shape[1]

    def join(x):
        x = np.asarray(x)
        row = np.concatenate([x[first, :n], x[second, :m]])
        return np.pad(row, (0, 2 * width - n - m))[None]

    packed = jax.tree.map(join, experience)
    segments = np.array(packed.segment_ids)
    segments[:, n : n + m] = 2
    return dataclasses.replace(packed, segment_ids=segments)


@pytest.fixture(scope="module")
def experience(config, models, make_rollout):
    hyper = PPOHyper.create()
    rollout = make_rollout(PROMPTS, RESPONSES)
    evaluation = evaluate(
        models.actor, models.ref, models.critic, rollout, hyper.temperature, config=config
    )
    return make_experience(
        rollout, evaluation, SCORES, SCORED, gamma=hyper.gamma, lam=hyper.lam, kl_in="loss"
    )[0]


def test_packed_rows_give_the_same_gradients(config, models, experience, quick_jit):
    """Faults 28 and 29: every aggregation, both losses, rows of 7 and 16 actions packed in one."""
    rows = np.array([3, 7])
    flat = jax.tree.map(lambda x: np.asarray(x)[rows], experience)
    hyper = PPOHyper.create(entropy_coef=0.01, kl_loss_coef=0.1)

    def both(actor, critic, batch, hyper):
        grad = functools.partial(jax.value_and_grad, has_aux=True)
        return (
            grad(functools.partial(actor_loss, config=config))(actor, batch, hyper),
            grad(functools.partial(critic_loss, config=config))(critic, batch, hyper),
        )

    run = quick_jit(both)
    actor, critic = moved(models.actor), moved(models.critic)
    for mode in AGGREGATIONS:
        norm = 16.0 if mode == "seq_mean_token_sum_norm" else None

        def weighted(batch, mode=mode, norm=norm):
            weights = token_weights(batch.response_mask, batch.segment_ids, mode=mode, norm=norm)
            return dataclasses.replace(batch, loss_weights=weights)

        want = run(actor, critic, weighted(flat), hyper)
        got = run(actor, critic, weighted(pack(experience, *rows)), hyper)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * (1 + np.abs(b).max()), err_msg=mode)


def test_on_policy_gradient_of_the_surrogate_is_the_policy_gradient(
    config, models, experience, quick_jit
):
    """At ratio 1: grad = -sum_t w_t A_t grad log p_t, taken here from the unclipped formula."""
    hyper = PPOHyper.create(clip_low=0.1, clip_high=0.3, dual_clip=1.5)
    batch = dataclasses.replace(experience, ref_log_probs=None)

    def surrogate(params):
        return actor_loss(params, batch, hyper, config=config)[0]

    def reinforce(params):
        inputs = (batch.tokens, batch.positions, batch.segment_ids)
        out = policy_outputs(params, *inputs, hyper.temperature, config=config)
        return -jnp.sum(batch.loss_weights * batch.advantages * out.log_probs)

    got = quick_jit(lambda p: (jax.grad(surrogate)(p), jax.grad(reinforce)(p)))(models.actor)
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in got)
    assert np.linalg.norm(b) > 1e-2
    assert np.linalg.norm(a - b) / np.linalg.norm(b) < 1e-5


def all_distributions(params, batch, config):
    """Exact log-softmax at every action token, f32[B, T - 1, V]."""
    hidden = forward(params, batch.tokens, batch.positions, batch.segment_ids, config=config)
    return jax.nn.log_softmax(logits(params, hidden, config)[:, :-1], axis=-1)


def exact(params, ref, batch, config):
    """Mean entropy of the policy and mean KL(policy, ref) over action tokens, full softmax."""
    mask = batch.response_mask[:, 1:]
    log_p, log_q = (all_distributions(x, batch, config) for x in (params, ref))
    p = jnp.exp(log_p)
    n = mask.sum()
    entropy = -(p * log_p).sum(-1)
    kl = (p * (log_p - log_q)).sum(-1)
    return jnp.where(mask, entropy, 0).sum() / n, jnp.where(mask, kl, 0).sum() / n


def sampled_batch(config, params, ref, key, n=64, width=8):
    """Tokens drawn from the policy itself, so that sampled KL terms mean what they should."""

    def draw(tokens, t):
        positions, segments = positions_and_segments(jnp.full(n, width), width)
        batch = dataclasses.replace(EMPTY, tokens=tokens, positions=positions, segment_ids=segments)
        log_p = all_distributions(params, batch, config)[:, t - 1]
        chosen = jax.random.categorical(jax.random.fold_in(key, t), log_p)
        return tokens.at[:, t].set(chosen), None

    first = jnp.tile(jnp.arange(2, dtype=jnp.int32)[:, None], (n // 2, width))
    tokens, _ = jax.lax.scan(draw, first, jnp.arange(1, width))
    positions, segments = positions_and_segments(jnp.full(n, width), width)
    mask = positions > 0
    inputs = (tokens, positions, segments)
    old, other = (policy_outputs(p, *inputs, 1.0, config=config).log_probs for p in (params, ref))
    weights = token_weights(mask)
    return Experience(
        *inputs, mask, old, other, None, jnp.zeros(mask.shape), None, weights, weights
    )


EMPTY = Experience(*[None] * 11)


@pytest.mark.parametrize(
    ("terms", "entropy_sign", "kl_sign"),
    [
        ({"entropy_coef": 1.0}, 1, None),
        ({"entropy_coef": -1.0}, -1, None),
        ({"kl_loss_coef": 1.0}, None, -1),
        ({"kl_loss_coef": -1.0}, None, 1),
    ],
)
def test_entropy_bonus_raises_entropy_and_kl_loss_lowers_the_kl(
    config, models, terms, entropy_sign, kl_sign, directions
):
    """With advantages of 0, a step along the term alone moves the exact quantity the right way."""
    hyper = PPOHyper.create(**({"entropy_coef": 0.0, "kl_loss_coef": 0.0} | terms))
    before, after, metrics = directions(hyper)
    for sign, a, b in zip((entropy_sign, kl_sign), before, after, strict=True):
        if sign is not None:
            assert sign * (b - a) > 0.01 * abs(a)
    assert metrics["policy/loss"] == 0
    np.testing.assert_allclose(metrics["policy/entropy"], before[0], rtol=1e-4)


@pytest.fixture(scope="module")
def directions(config, models, quick_jit):
    """Exact (entropy, KL) before and after three plain gradient steps, each on fresh samples."""
    loss = functools.partial(actor_loss, config=config)

    @quick_jit
    def run(params, ref, hyper):
        keys = jax.random.split(jax.random.key(5), 4)
        states = sampled_batch(config, params, ref, keys[0])  # on which all steps are measured

        def step(params, key):
            batch = sampled_batch(config, params, ref, key)
            grads, metrics = jax.grad(loss, has_aux=True)(params, batch, hyper)
            measured = exact(params, ref, states, config)
            return jax.tree.map(lambda p, g: p - 0.2 * g, params, grads), (measured, metrics)

        return jax.lax.scan(step, params, keys)[1]

    def measure(hyper):
        measured, metrics = run(models.actor, models.ref, hyper)
        first, last = (tuple(float(x[i]) for x in measured) for i in (0, -1))
        return first, last, {name: float(x[0]) for name, x in metrics.sums.items()}

    return measure


def test_nan_in_one_row_of_advantages_skips_the_update(config, models, experience, quick_jit):
    state = init_train_state(models.actor, OptimizerHyper.create(learning_rate=1e-3))
    opt = OptimizerHyper.create(learning_rate=1e-3)
    before = jax.tree.map(np.array, state)
    row = jnp.array(experience.response_mask[3])
    bad = jnp.where(row, jnp.nan, experience.advantages[3])
    batch = dataclasses.replace(
        experience, advantages=experience.advantages.at[3].set(bad), ref_log_probs=None
    )
    loss = functools.partial(actor_loss, config=config)
    step = quick_jit(functools.partial(pure_update, loss_fn=loss, num_micro_batches=4))
    state, metrics = step(state, batch, opt, PPOHyper.create())
    assert int(state.skipped) == int(state.skipped_in_a_row) == 1
    assert metrics["update/skipped"] == 1
    assert all(np.isfinite(x) for x in metrics.values())
    kept = [(before.params, state.params), (before.opt_state, state.opt_state)]
    for a, b in zip(*map(jax.tree.leaves, zip(*kept, strict=True)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_nothing_under_the_mask_reaches_the_gradient(config, models, experience, quick_jit):
    """NaN and inf in every field outside the mask: same loss, same gradient (fault 6)."""
    mask = experience.response_mask

    def dirty(x, value):
        return x if x is None else jnp.where(mask, x, value)

    fields = ("old_log_probs", "ref_log_probs", "old_values", "advantages", "returns")
    hyper = PPOHyper.create(entropy_coef=0.01, kl_loss_coef=0.1)
    bad = dataclasses.replace(
        experience,
        **{
            name: dirty(getattr(experience, name), value)
            for name, value in zip(fields, [np.nan, -np.inf, np.inf, np.nan, -np.inf], strict=True)
        },
    )
    for loss, params in ((actor_loss, models.actor), (critic_loss, models.critic)):
        grad = quick_jit(jax.value_and_grad(functools.partial(loss, config=config), has_aux=True))
        got, want = grad(params, bad, hyper), grad(params, experience, hyper)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_loss_refuses_terms_without_effect(config, models, experience):
    no_ref = dataclasses.replace(experience, ref_log_probs=None)
    loss = functools.partial(actor_loss, models.actor, config=config)
    for batch, hyper in (
        (no_ref, PPOHyper.create(kl_loss_coef=0.1)),
        (experience, PPOHyper.create()),
    ):
        with pytest.raises(ValueError, match='set kl_loss_coef together with kl_in="loss"'):
            loss(batch, hyper)
    for kind in ("k1", "abs", "k4"):
        with pytest.raises(ValueError, match="set the loss's kl_kind"):
            loss(experience, PPOHyper.create(kl_loss_coef=0.1), kl_kind=kind)
    no_values = dataclasses.replace(experience, returns=None)
    with pytest.raises(ValueError, match="old_values and returns"):
        critic_loss(models.critic, no_values, PPOHyper.create(), config=config)


@pytest.mark.parametrize(
    "numbers",
    [
        {"temperature": 0.0},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"dual_clip": 1.0},
        {"value_clip": 0.0},
        {"gamma": 1.1},
        {"lam": -0.1},
    ],
)
def test_hyper_refuses_numbers_out_of_range(numbers):
    with pytest.raises(ValueError, match=f"set .*{next(iter(numbers))}"):
        PPOHyper.create(**numbers)


def test_hyper_is_float32_on_device():
    leaves = jax.tree.leaves(PPOHyper.create(clip_low=0, value_clip=None))
    assert len(leaves) == 5
    assert all(isinstance(x, jax.Array) and x.dtype == jnp.float32 for x in leaves)
