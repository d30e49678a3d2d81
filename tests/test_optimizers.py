"""AdamW from traced scalars against a float64 oracle, schedules, decay mask, compile counts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import init_critic
from jaxrlhf.models.specs import init_params
from jaxrlhf.optimizers import OptimizerHyper, decay_mask, learning_rate_at, make_optimizer

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
    max_positions=64,
)


def rate(step, *, lr, warmup, decay, ratio, schedule):
    """The schedule in float64, written the other way round: piece by piece."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    p = min((step - warmup) / (decay - warmup), 1.0)
    shape = 1 - p if schedule == "linear" else (1 + np.cos(np.pi * p)) / 2
    return lr * (ratio + (1 - ratio) * shape)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "ratio"), [(0, 0.0), (1, 0.1), (5, 0.1)])
def test_schedule_equals_pieces(schedule, warmup, ratio):
    decay = 0 if schedule == "constant" else 20
    hyper = OptimizerHyper.create(
        learning_rate=3e-4,
        warmup_steps=warmup,
        decay_steps=decay,
        min_ratio=ratio,
        schedule=schedule,
    )
    steps = np.arange(30)
    got = jax.vmap(lambda s: learning_rate_at(hyper, s))(steps)
    want = [
        rate(s, lr=3e-4, warmup=warmup, decay=decay, ratio=ratio, schedule=schedule) for s in steps
    ]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-12)
    assert got[0] > 0  # the first update is not spent on nothing


def adamw_oracle(params, grads, *, steps, hyper, decayed):
    """Numpy float64, textbook order: clip, moments, bias correction, decay, learning rate."""
    p = {k: v.astype(np.float64) for k, v in params.items()}
    m, v = ({k: np.zeros_like(x) for k, x in p.items()} for _ in range(2))
    for t in range(steps):
        g = {k: x[t].astype(np.float64) for k, x in grads.items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        scale = min(1.0, hyper["max_grad_norm"] / norm) if hyper["max_grad_norm"] else 1.0
        lr = rate(t, lr=hyper["learning_rate"], warmup=2, decay=6, ratio=0.1, schedule="cosine")
        for k in p:
            m[k] = hyper["beta1"] * m[k] + (1 - hyper["beta1"]) * g[k] * scale
            v[k] = hyper["beta2"] * v[k] + (1 - hyper["beta2"]) * (g[k] * scale) ** 2
            m_hat = m[k] / (1 - hyper["beta1"] ** (t + 1))
            v_hat = v[k] / (1 - hyper["beta2"] ** (t + 1))
            step = m_hat / (np.sqrt(v_hat) + hyper["eps"])
            p[k] = p[k] - lr * (step + (hyper["weight_decay"] or 0) * p[k] * decayed[k])
    return p


@pytest.mark.parametrize("max_grad_norm", [None, 1.5])
@pytest.mark.parametrize("weight_decay", [None, 0.1])
def test_adamw_equals_float64_oracle(rng, max_grad_norm, weight_decay):
    shapes = {"kernel": (2, 3, 4), "norm": (2, 4), "q_bias": (2, 3), "head": (4,)}
    decayed = {"kernel": 1, "norm": 0, "q_bias": 0, "head": 0}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    steps = 8  # norms between 0.5 and 50: some are clipped and some are not
    size = 10.0 ** rng.uniform(-1, 1, size=steps)
    grads = {
        k: (rng.normal(size=(steps, *s)).T * size).T.astype(np.float32) for k, s in shapes.items()
    }
    numbers = {
        "learning_rate": 1e-2,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
    }
    hyper = OptimizerHyper.create(
        **numbers, schedule="cosine", warmup_steps=2, decay_steps=6, min_ratio=0.1
    )

    @jax.jit
    def step(params, opt_state, grads, hyper):
        updates, opt_state = make_optimizer(hyper).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    got, opt_state = params, make_optimizer(hyper).init(params)
    for t in range(steps):
        got, opt_state = step(got, opt_state, {k: g[t] for k, g in grads.items()}, hyper)
    want = adamw_oracle(params, grads, steps=steps, hyper=numbers, decayed=decayed)
    for k in params:
        np.testing.assert_allclose(got[k], want[k], rtol=1e-5, atol=1e-6, err_msg=k)
        assert np.abs(want[k] - params[k]).max() > 1e-2


def test_decay_mask_of_every_model_leaf():
    critic = jax.eval_shape(
        lambda key: init_critic(init_params(key, CONFIG), CONFIG), jax.random.key(0)
    )
    flat = jax.tree_util.tree_leaves_with_path(decay_mask(critic))
    decayed = {path[-1].key for path, yes in flat if yes}
    kernels = {f"{n}_kernel" for n in ("q", "k", "v", "o", "gate", "up", "down")}
    assert decayed == kernels | {"embed"}
    assert len(flat) == len(decayed) + 3 + 2 + 3 + 1  # biases, q/k norms, other norms, the head


def test_zero_learning_rate_changes_no_bit_and_zero_decay_is_honoured(rng):
    params = {"kernel": rng.normal(size=(3, 3)).astype(np.float32)}
    grads = {"kernel": rng.normal(size=(3, 3)).astype(np.float32)}

    def after(**numbers):
        optimizer = make_optimizer(OptimizerHyper.create(**numbers))
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return np.asarray(optax.apply_updates(params, updates)["kernel"])

    still = after(learning_rate=0.0, weight_decay=0.5)
    assert still.tobytes() == params["kernel"].tobytes()
    zero, none = after(learning_rate=0.1, weight_decay=0.0), after(learning_rate=0.1)
    np.testing.assert_array_equal(zero, none)
    assert np.abs(after(learning_rate=0.1, weight_decay=0.5) - none).max() > 1e-3


def test_hyper_is_float32_on_device_and_mappable():
    hyper = OptimizerHyper.create(learning_rate=1, weight_decay=None, warmup_steps=3)
    leaves = jax.tree.leaves(hyper)
    assert len(leaves) == 7
    assert all(isinstance(x, jax.Array) and x.dtype == jnp.float32 for x in leaves)
    assert not any(x.weak_type for x in leaves)
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), hyper)
    rates = jax.vmap(lambda h: learning_rate_at(h, 10))(many)
    np.testing.assert_allclose(rates, [1, 2])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"learning_rate": -1.0}, "set learning_rate to 0 or more"),
        ({"beta2": 1.0}, "set beta1 and beta2"),
        ({"eps": 0.0}, "set eps above 0"),
        ({"max_grad_norm": 0.0}, "set max_grad_norm above 0"),
        ({"schedule": "cosin"}, "set schedule to one of"),
        ({"schedule": "linear"}, "set decay_steps for a linear"),
        ({"decay_steps": 10}, "leave it 0 for a constant"),
        ({"schedule": "cosine", "decay_steps": 5, "warmup_steps": 5}, "above warmup_steps"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        OptimizerHyper.create(**({"learning_rate": 1e-3} | numbers))
