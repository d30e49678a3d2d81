"""Preference losses: oracles in float64, symmetries, extremes, masks, what is differentiated."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses

PAIRS = 6
DESIRABLE = jnp.arange(PAIRS) % 2 == 0


def _kto(log_probs, ref_log_probs, mask=None):
    return losses.kto(log_probs, ref_log_probs, DESIRABLE, 0.3, beta=0.1, mask=mask)


# name -> (function of per-pair arrays, number of arrays, which of them are differentiated)
LOSSES = {
    "bradley_terry": (
        functools.partial(losses.bradley_terry, margin=0.5, centring=0.01, label_smoothing=0.1),
        2,
        (0, 1),
    ),
    "dpo/sigmoid": (functools.partial(losses.dpo, beta=0.1, label_smoothing=0.1), 4, (0, 1)),
    "dpo/hinge": (functools.partial(losses.dpo, beta=0.1, kind="hinge"), 4, (0, 1)),
    "dpo/ipo": (functools.partial(losses.dpo, beta=0.1, kind="ipo"), 4, (0, 1)),
    "dpo/robust": (
        functools.partial(losses.dpo, beta=0.1, kind="robust", label_smoothing=0.1),
        4,
        (0, 1),
    ),
    "cpo": (functools.partial(losses.cpo, beta=0.1), 2, (0, 1)),
    "simpo": (functools.partial(losses.simpo, beta=2.0, margin=1.0), 2, (0, 1)),
    "orpo": (functools.partial(losses.orpo, beta=0.1), 2, (0, 1)),
    "kto": (_kto, 2, (0,)),
    "implicit_rewards": (functools.partial(losses.implicit_rewards, beta=0.1), 2, ()),
    "pair_metrics": (lambda *x, mask=None: losses.pair_metrics(*x, mask=mask).margin, 2, ()),
}


def log_probs(rng, scale: float = 3.0) -> list[np.ndarray]:
    return [-scale * rng.random(PAIRS).astype(np.float32) - 0.05 for _ in range(4)]


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


@pytest.mark.parametrize("name", LOSSES)
def test_every_pair_loss_keeps_its_promises(name, rng):
    """Garbage under the mask, vmap, jit, bfloat16, stopped inputs: on the same arrays."""
    function, arity, differentiated = LOSSES[name]
    arrays = log_probs(rng)[:arity]
    mask = np.array([True, True, False, True, False, True])
    bad = [np.nan, np.inf, 7.0, -np.inf]
    garbage = [np.where(mask, x, bad[i]) for i, x in enumerate(arrays)]

    def total(arrays, mask):
        value = function(*arrays, mask=mask)
        return jnp.sum(value), value

    compiled = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, value), grads = compiled(arrays, mask)
    (_, dirty), dirty_grads = compiled(garbage, mask)
    np.testing.assert_array_equal(value, dirty)
    plain = np.asarray(function(*arrays))
    np.testing.assert_allclose(np.asarray(value)[mask], plain[mask], rtol=1e-6)
    assert (np.asarray(value)[~mask] == 0).all()
    for i, (grad, dirty_grad) in enumerate(zip(grads, dirty_grads, strict=True)):
        np.testing.assert_array_equal(grad, dirty_grad)
        assert (np.asarray(grad)[~mask] == 0).all()
        assert np.any(np.asarray(grad)) == (i in differentiated), f"argument {i}"
    low = function(*(jnp.asarray(x, jnp.bfloat16) for x in arrays))
    assert low.dtype == jnp.float32
    exact = function(*(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in arrays))
    np.testing.assert_array_equal(low, exact)
    if name != "kto":  # its labels are bound to the whole batch here
        np.testing.assert_allclose(jax.vmap(function)(*arrays), plain, rtol=1e-6)
        with pytest.raises(ValueError, match="give it"):
            function(arrays[0][:3], *arrays[1:])


@pytest.mark.parametrize("name", [n for n in LOSSES if LOSSES[n][2]])
@pytest.mark.parametrize("extreme", [1e3, 1e-30])
def test_extreme_margins_have_finite_values_and_gradients(name, extreme):
    function, arity, _ = LOSSES[name]
    for signs in itertools.product([0, -1], repeat=arity):
        arrays = [jnp.full(PAIRS, sign * extreme, jnp.float32) for sign in signs]
        value, grads = jax.value_and_grad(lambda z: jnp.sum(function(*z)))(arrays)
        assert np.isfinite(value)
        assert all(np.isfinite(g).all() for g in grads)


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(st.floats(-50, 50), st.floats(-50, 50), st.floats(0, 5), st.floats(0, 0.5))
def test_bradley_terry_equals_its_formula_and_is_antisymmetric(chosen, rejected, margin, smooth):
    with jax.enable_x64(True):
        c, r = jnp.float64(chosen), jnp.float64(rejected)
        ours = losses.bradley_terry(c, r, margin=margin, centring=0.02, label_smoothing=smooth)
        x = chosen - rejected - margin
        expected = -(1 - smooth) * log_sigmoid(x) - smooth * log_sigmoid(-x)
        np.testing.assert_allclose(ours, expected + 0.02 * (chosen + rejected) ** 2, rtol=1e-12)
        # P(chosen wins) + P(rejected wins) = 1: the losses differ by the margin of rewards.
        there, back = losses.bradley_terry(c, r), losses.bradley_terry(r, c)
        np.testing.assert_allclose(there - back, rejected - chosen, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(np.exp(-there) + np.exp(-back), 1, rtol=1e-12)
        # Swapping the answers is smoothing with the other rate.
        swapped = losses.bradley_terry(r, c, label_smoothing=1 - smooth)  # 1 - 1e-6 is rounded
        smoothed = losses.bradley_terry(c, r, label_smoothing=smooth)
        np.testing.assert_allclose(smoothed, swapped, rtol=1e-12, atol=1e-13)


def test_margin_is_data_and_may_be_per_pair(rng):
    chosen, rejected, margins, _ = log_probs(rng)
    per_pair = losses.bradley_terry(chosen, rejected, margin=margins)
    single = [
        losses.bradley_terry(c, r, margin=m)
        for c, r, m in zip(chosen, rejected, margins, strict=True)
    ]
    np.testing.assert_allclose(per_pair, np.stack(single), rtol=1e-6)
    grad = jax.grad(lambda m: jnp.sum(losses.bradley_terry(chosen, rejected, margin=m)))
    assert (np.asarray(grad(margins)) == 0).all()
    with pytest.raises(ValueError, match="margin"):
        losses.bradley_terry(chosen, rejected, margin=margins[:2])


def ranking_oracle(rewards: np.ndarray) -> float:
    """-log of the product of the choices' probabilities, in plain Python."""
    total = 0.0
    for k in range(len(rewards) - 1):
        weights = [np.exp(r - rewards[k]) for r in rewards[k:]]
        total += np.log(sum(weights))
    return total


def test_plackett_luce_equals_its_definition_with_and_without_a_mask(rng):
    rewards = 3 * rng.normal(size=(4, 5))
    mask = np.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    expected = [ranking_oracle(row[m]) for row, m in zip(rewards, mask, strict=True)]

    def total(rewards):
        value = losses.plackett_luce(rewards, mask=mask)
        return jnp.sum(value), value

    with jax.enable_x64(True):
        (_, ours), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(
            np.where(mask, rewards, np.nan)
        )
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)
        assert (np.asarray(grads)[~mask] == 0).all()
        for i, row in enumerate(mask):
            for j in np.flatnonzero(row):
                step = np.zeros_like(rewards[i])
                step[j] = 1e-6
                up = ranking_oracle((rewards[i] + step)[row])
                down = ranking_oracle((rewards[i] - step)[row])
                np.testing.assert_allclose(grads[i, j], (up - down) / 2e-6, atol=1e-8)
        np.testing.assert_allclose(
            losses.plackett_luce(rewards), [ranking_oracle(row) for row in rewards], rtol=1e-12
        )
        two = rewards[:, :2]
        np.testing.assert_allclose(
            losses.plackett_luce(two), losses.bradley_terry(two[:, 0], two[:, 1]), rtol=1e-12
        )


def test_plackett_luce_probabilities_of_all_rankings_sum_to_one(rng):
    rewards = rng.normal(size=4)
    orders = np.array(list(itertools.permutations(rewards)))
    with jax.enable_x64(True):
        total = np.exp(-np.asarray(losses.plackett_luce(orders))).sum()
    np.testing.assert_allclose(total, 1, rtol=1e-12)


def test_plackett_luce_is_finite_at_extremes():
    rewards = jnp.array([[1e3, -1e3, 1e3, 0.0], [-1e3, 1e3, -1e3, 1e3]])
    value, grad = jax.value_and_grad(lambda r: jnp.sum(losses.plackett_luce(r)))(rewards)
    np.testing.assert_allclose(value, 2000 + np.log(2) + 4000 + 2 * np.log(2), rtol=1e-6)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("smooth", [None, 0.2])
def test_dpo_of_the_reference_itself_is_log_2(rng, smooth):
    chosen, rejected, *_ = log_probs(rng)
    ours = losses.dpo(chosen, rejected, chosen, rejected, beta=0.3, label_smoothing=smooth)
    np.testing.assert_allclose(ours, np.log(2), rtol=1e-6)


def test_robust_dpo_is_unbiased_under_flipped_labels(rng):
    """With labels flipped at rate e, its expectation is the plain loss of the right labels."""
    chosen, rejected, ref_chosen, ref_rejected = log_probs(rng)
    robust = functools.partial(losses.dpo, beta=0.3, kind="robust", label_smoothing=0.2)
    right = robust(chosen, rejected, ref_chosen, ref_rejected)
    flipped = robust(rejected, chosen, ref_rejected, ref_chosen)
    plain = losses.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.3)
    np.testing.assert_allclose(0.8 * right + 0.2 * flipped, plain, rtol=1e-5)


def test_dpo_refuses_what_has_no_effect_and_what_is_unknown(rng):
    arrays = log_probs(rng)
    for kind in ("hinge", "ipo"):
        with pytest.raises(ValueError, match="no effect"):
            losses.dpo(*arrays, beta=0.1, kind=kind, label_smoothing=0.1)
    with pytest.raises(ValueError, match="needs label_smoothing"):
        losses.dpo(*arrays, beta=0.1, kind="robust")
    with pytest.raises(ValueError, match="sigmoid, hinge, ipo, robust"):
        losses.dpo(*arrays, beta=0.1, kind="exo")
    with pytest.raises(TypeError, match="boolean"):
        losses.kto(arrays[0], arrays[1], jnp.ones(PAIRS), 0.0, beta=0.1)


def test_beta_is_traced_and_sweeps_by_vmap(rng):
    arrays = log_probs(rng)
    betas = jnp.array([0.05, 0.1, 0.5])
    swept = jax.vmap(lambda beta: losses.dpo(*arrays, beta=beta))(betas)
    for beta, ours in zip(betas, swept, strict=True):
        np.testing.assert_allclose(ours, losses.dpo(*arrays, beta=float(beta)), rtol=1e-5)


def test_orpo_equals_the_odds_of_its_paper(rng):
    chosen, rejected, *_ = (x.astype(np.float64) for x in log_probs(rng))
    odds = np.exp(chosen) / (1 - np.exp(chosen)), np.exp(rejected) / (1 - np.exp(rejected))
    expected = -0.2 * log_sigmoid(np.log(odds[0] / odds[1])) - chosen
    with jax.enable_x64(True):
        np.testing.assert_allclose(losses.orpo(chosen, rejected, beta=0.2), expected, rtol=1e-10)


def test_sequence_log_probs_and_reference_point(rng):
    per_token = -rng.random((3, 2, 5))
    mask = rng.random((3, 2, 5)) < 0.6
    mask[0, 1] = False
    sums = np.where(mask, per_token, 0).sum(-1)
    counts = np.maximum(mask.sum(-1), 1)
    garbage = np.where(mask, per_token, np.nan)
    with jax.enable_x64(True):
        np.testing.assert_allclose(losses.sequence_log_probs(garbage, mask), sums, rtol=1e-12)
        means = losses.sequence_log_probs(garbage, mask, average=True)
        np.testing.assert_allclose(means, sums / counts, rtol=1e-12)
        up, kept = sums + 0.5, np.arange(6).reshape(3, 2) < 4
        broken = np.where(kept, up, np.nan)
        point = losses.kto_reference_point(broken, sums, mask=kept)
        np.testing.assert_allclose(point, 0.5, rtol=1e-12)
        np.testing.assert_allclose(losses.kto_reference_point(up, sums), 0.5, rtol=1e-12)
        assert losses.kto_reference_point(sums, up) == 0
        assert (jax.grad(losses.kto_reference_point)(up, sums) == 0).all()


def test_pair_metrics_count_ties_as_failures():
    metrics = losses.pair_metrics(jnp.array([1.0, 0.0, -1.0]), jnp.array([0.0, 0.0, 0.0]))
    np.testing.assert_array_equal(metrics.accuracy, [1, 0, 0])
    np.testing.assert_array_equal(metrics.margin, [1, 0, -1])
