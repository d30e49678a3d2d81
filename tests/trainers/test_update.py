"""One optimiser step: micro-batches, skipped updates, donation, summaries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxrlhf.losses.masked import AGGREGATIONS, token_weights
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.trainers.ppo import PPOHyper, actor_loss, critic_loss, evaluate, make_experience
from jaxrlhf.trainers.update import (
    StepMetrics,
    accumulate_gradients,
    init_train_state,
    pure_update,
    split_micro_batches,
    summarize,
    update,
)

TERMS = {"dual_clip": 1.5, "entropy_coef": 0.01, "kl_loss_coef": 0.1}
SCORES = np.array([0.7, 0.1, 0.0, 1.0, 0.35, 0.9, 0.2, 0.55], np.float32)
SCORED = np.array([1, 1, 1, 1, 1, 1, 0, 1], bool)


def relative_gap(a, b):
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def moved(params):
    """Parameters after some updates: ratios away from 1, some of them clipped."""
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(x.dtype), params)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_do_not_depend_on_micro_batches(
    config, models, uneven, quick_jit, role, dtype, limit
):
    with jax.enable_x64(dtype == "float64"):
        models = models.astype(dtype)
        settings = {"config": config, "compute_dtype": dtype}
        hyper = PPOHyper.create(**TERMS)
        evaluation = evaluate(
            models.actor, models.ref, models.critic, uneven, hyper.temperature, **settings
        )
        experience, _ = make_experience(
            uneven, evaluation, SCORES, SCORED, gamma=hyper.gamma, lam=hyper.lam, kl_in="loss"
        )
        loss = functools.partial({"actor": actor_loss, "critic": critic_loss}[role], **settings)
        params = moved(getattr(models, role))
        worst = 0.0
        gradients = {
            n: quick_jit(functools.partial(accumulate_gradients, loss_fn=loss, num_micro_batches=n))
            for n in (1, 2, 4, 8)
        }
        for mode in AGGREGATIONS:
            norm = 16.0 if mode == "seq_mean_token_sum_norm" else None
            weights = token_weights(experience.response_mask, mode=mode, norm=norm)
            batch = experience.replace(loss_weights=weights)
            whole, loss_1, metrics_1 = gradients[1](params, batch, hyper)
            assert all(x.dtype == dtype for x in jax.tree.leaves(whole))
            for n in (2, 4, 8):
                parts, loss_n, metrics_n = gradients[n](params, batch, hyper)
                worst = max(worst, relative_gap(parts, whole))
                np.testing.assert_allclose(loss_n, loss_1, rtol=limit, atol=limit)
                for a, b in zip(
                    jax.tree.leaves(metrics_n), jax.tree.leaves(metrics_1), strict=True
                ):
                    np.testing.assert_allclose(a, b, rtol=10 * limit, atol=limit)
        print(f"\nmust-show 5: {role} {dtype}: worst |d|/|g| = {worst:.2e}")
        assert worst <= limit
        if role == "actor":  # the comparison is about a loss with all its terms alive
            assert 0 < metrics_1.sums["policy/clip_fraction"] < 1


def linear_loss(params, batch, hyper):
    loss = jnp.sum(batch["w"] * (batch["x"] @ params["kernel"])) * hyper
    return loss, StepMetrics({"loss": loss}, {"x_max": batch["x"].max()})


@pytest.fixture
def linear(rng):
    params = {"kernel": jnp.asarray(rng.normal(size=(3,)), jnp.float32)}
    batch = {
        "x": jnp.asarray(rng.normal(size=(6, 3)), jnp.float32),
        "w": jnp.asarray(rng.uniform(size=6), jnp.float32),
    }
    return params, batch, OptimizerHyper.create(learning_rate=0.1, weight_decay=0.1)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_sums_add_up_and_maxima_are_maxima(linear, n):
    params, batch, opt = linear
    state = init_train_state(params, opt)
    state, metrics = update(
        state, batch, opt, jnp.float32(2), loss_fn=linear_loss, num_micro_batches=n, name="policy"
    )
    gradient = 2 * np.asarray(batch["w"]) @ np.asarray(batch["x"])
    np.testing.assert_allclose(metrics["loss"], gradient @ np.asarray(params["kernel"]), rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/grad_norm"], np.linalg.norm(gradient), rtol=1e-5)
    assert metrics["x_max"] == batch["x"].max()
    assert metrics["policy/learning_rate"] == opt.learning_rate
    assert metrics["policy/skipped"] == 0
    assert (int(state.step), int(state.skipped)) == (1, 0)


@pytest.mark.parametrize("n", [0, 4, 7])
def test_micro_batches_must_divide_and_the_message_says_what_would(linear, n):
    with pytest.raises(ValueError, match=r"6 rows \(1, 2, 3, 6\), not"):
        split_micro_batches(linear[1], n)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_non_finite_update_leaves_every_bit(linear, bad):
    params, batch, opt = linear
    step = functools.partial(update, loss_fn=linear_loss, num_micro_batches=2, name="policy")
    one = jnp.float32(1)
    state, _ = step(init_train_state(params, opt), batch, opt, one)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state, state.step))
    poisoned = batch | {"w": batch["w"].at[4].set(bad)}  # 1e30: finite, but its square is not
    for expected in (1, 2):
        state, metrics = step(state, poisoned, opt, one)
        assert int(state.skipped_in_a_row) == int(state.skipped) == expected
        assert metrics.pop("policy/skipped") == 1
        assert metrics.pop("policy/skipped_in_a_row_max") == expected
        assert all(x == 0 for x in metrics.values())
    after = jax.tree.map(np.asarray, (state.params, state.opt_state, state.step))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert a.tobytes() == b.tobytes()

    state, _ = step(state, batch, opt, one)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 2, 0)
    clean = init_train_state(params, opt)
    for _ in range(2):
        clean, _ = step(clean, batch, opt, one)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(clean.params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_state_is_donated_but_the_callers_parameters_live(linear):
    params, batch, opt = linear
    state = init_train_state(params, opt)
    old = jax.tree.leaves(state)
    update(state, batch, opt, jnp.float32(1), loss_fn=linear_loss)
    assert all(x.is_deleted() for x in old)
    assert np.isfinite(params["kernel"]).all()


def test_update_maps_over_hyper_parameters(linear, quick_jit):
    params, batch, opt = linear
    many = opt.replace(learning_rate=jnp.array([0.1, 0.01]))
    axes = jax.tree.map(lambda _: None, opt).replace(learning_rate=0)
    scale = jnp.float32(1)

    @quick_jit
    def one(hyper):
        state = init_train_state(params, hyper)
        return pure_update(state, batch, hyper, scale, loss_fn=linear_loss)[0].params["kernel"]

    mapped = jax.vmap(one, in_axes=(axes,))(many)
    for i, rate in enumerate([0.1, 0.01]):
        single = one(opt.replace(learning_rate=jnp.float32(rate)))
        np.testing.assert_allclose(mapped[i], single, rtol=1e-6)


def test_gradients_of_bfloat16_parameters_are_summed_in_float32(linear):
    params, batch, _ = linear
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    grads, *_ = accumulate_gradients(
        params, batch, jnp.float32(1), loss_fn=linear_loss, num_micro_batches=3
    )
    assert grads["kernel"].dtype == jnp.float32


@struct.dataclass
class Weighted:
    x: jax.Array
    loss_weights: jax.Array


def weighted_linear_loss(params, batch, hyper):
    return linear_loss(params, {"x": batch.x, "w": batch.loss_weights}, hyper)


@pytest.mark.parametrize("n", [1, 3])
def test_an_update_without_weight_leaves_every_bit_and_is_no_fault(linear, n):
    """Adam's momentum and the decay would move the weights, and the schedule would go on."""
    params, x, opt = linear
    step = functools.partial(
        update, loss_fn=weighted_linear_loss, num_micro_batches=n, name="policy"
    )
    batch, one = Weighted(x["x"], x["w"]), jnp.float32(1)
    empty, poisoned = batch.replace(loss_weights=0 * x["w"]), batch.replace(x=jnp.nan * x["x"])
    rows, state = [], init_train_state(params, opt)
    compiled = update._cache_size()
    for part in (batch, poisoned, empty, empty):
        state, metrics = step(state, part, opt, one)
        rows.append(metrics)
    assert update._cache_size() == compiled + 1
    counters = state.step, state.skipped, state.skipped_in_a_row
    assert [int(x) for x in counters] == [1, 1, 1]  # the empty ones neither count nor excuse
    clean, _ = step(init_train_state(params, opt), batch, opt, one)
    ours, theirs = (jax.tree.leaves((s.params, s.opt_state, s.step)) for s in (state, clean))
    for a, b in zip(ours, theirs, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    first = {key: float(value) for key, value in rows[0].items()}
    left_out = {"policy/skipped": 1.0, "policy/empty": 2.0, "policy/skipped_in_a_row_max": 1.0}
    assert summarize(rows) == first | left_out
    assert summarize(rows[1:]) == left_out


def test_summary_leaves_skipped_updates_out():
    rows = [
        {"loss": 1.0, "x_max": 5.0, "policy/skipped": 0.0, "policy/skipped_in_a_row_max": 0.0},
        {"loss": 0.0, "x_max": 0.0, "policy/skipped": 1.0, "policy/skipped_in_a_row_max": 4.0},
        {"loss": 2.0, "x_max": 3.0, "policy/skipped": 0.0, "policy/skipped_in_a_row_max": 0.0},
    ]
    streak = {"policy/skipped_in_a_row_max": 4.0}
    assert summarize(rows) == {"loss": 1.5, "x_max": 5.0, "policy/skipped": 1.0} | streak
    assert summarize(rows[1:2]) == {"policy/skipped": 1.0} | streak
    assert summarize([]) == {}
