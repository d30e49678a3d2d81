"""KL estimators, rewards with a KL penalty, and the controllers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses
from jaxrlhf.losses.kl import KL_KINDS

LOG_PROBS, REF_LOG_PROBS = np.log([0.5, 0.1, 0.9]), np.log([0.25, 0.4, 0.9])
GOLDEN = {
    "k1": [0.693147, -1.386294, 0],
    "k2": [0.240227, 0.960906, 0],
    "k3": [0.193147, 1.613706, 0],
    "abs": [0.693147, 1.386294, 0],
    "k1_st": [0.693147, -1.386294, 0],
    "k2_st": [0.240227, 0.960906, 0],
    "k3_st": [0.193147, 1.613706, 0],
    "abs_st": [0.693147, 1.386294, 0],
}
X = LOG_PROBS - REF_LOG_PROBS
GRADIENTS = {
    "k1": np.ones(3),
    "k2": X,
    "k3": 1 - np.exp(-X),
    "abs": np.sign(X),
} | dict.fromkeys(("k1_st", "k2_st", "k3_st", "abs_st"), X)


@functools.cache
def estimate_and_gradients(kind: str, **options):
    def total(log_probs, ref_log_probs):
        values = losses.kl_estimate(log_probs, ref_log_probs, kind=kind, **options)
        return jnp.sum(values), values

    return jax.jit(jax.grad(total, (0, 1), has_aux=True))


@pytest.mark.parametrize("kind", KL_KINDS)
def test_golden_values_and_gradients(kind):
    with jax.enable_x64(True):
        (by_policy, by_ref), values = estimate_and_gradients(kind)(LOG_PROBS, REF_LOG_PROBS)
        by_policy, by_ref, values = map(np.asarray, (by_policy, by_ref, values))
    np.testing.assert_allclose(values, GOLDEN[kind], atol=1e-6)
    np.testing.assert_allclose(by_policy, GRADIENTS[kind], atol=1e-12)
    np.testing.assert_array_equal(by_ref, np.zeros(3))


@pytest.mark.parametrize("kind", KL_KINDS)
def test_extreme_log_ratios_are_bounded(kind):
    log_probs = np.array([-30.0, 0, -1e3, 0, -np.inf, 0.0], np.float32)
    ref_log_probs = np.array([0.0, -30, 0, -1e3, 0, -np.inf], np.float32)
    (gradient, _), values = estimate_and_gradients(kind)(log_probs, ref_log_probs)
    bound = {"k1": 20, "abs": 20, "k2": 200, "k3": np.exp(20) - 21}[kind.removesuffix("_st")]
    assert np.isfinite(values).all()
    assert (np.abs(values) <= bound * 1.0001).all()
    np.testing.assert_array_equal(gradient, np.zeros(6))
    (alive, _), _ = estimate_and_gradients(kind)(log_probs[:1] + 10.5, ref_log_probs[:1])
    assert alive[0] != 0


def test_bound_of_the_estimate():
    """Beyond it a plain form has no gradient; a straight-through form keeps k2's."""
    far, near = np.array([-30.0], np.float32), np.array([-1.0], np.float32)
    for kind in KL_KINDS:
        bounded = estimate_and_gradients(kind, clip=25.0, estimate_clip=10.0)
        (gradient, _), values = bounded(far + 10, np.zeros(1, np.float32))
        assert abs(values[0]) == 10
        assert gradient[0] == (far[0] + 10 if kind.endswith("_st") else 0)
        plain = estimate_and_gradients(kind)(near, np.zeros(1, np.float32))
        found = bounded(near, np.zeros(1, np.float32))
        np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(plain), rtol=1e-6)


def test_log_ratio_of_minus_30_without_bound():
    (_, _), values = estimate_and_gradients("k3", clip=None)(np.array([-30.0]), np.zeros(1))
    np.testing.assert_allclose(values, 1.0686e13, rtol=1e-3)
    (_, _), values = estimate_and_gradients("k3_st", clip=None)(np.array([-30.0]), np.zeros(1))
    np.testing.assert_allclose(values, 1.0686e13, rtol=1e-3)


def test_k3_keeps_small_differences():
    x = np.float32(2.0**-11)
    (_, _), values = estimate_and_gradients("k3")(np.array([x]), np.zeros(1, np.float32))
    np.testing.assert_allclose(values, [x**2 / 2 - x**3 / 6], rtol=1e-3)


@jax.jit
def enumerated(logits, reference):
    """Expected values and gradients of every kind, and the true KL's, over a small vocabulary."""

    def expected(logits, kind):
        log_probs = jax.nn.log_softmax(logits)
        weights = jax.lax.stop_gradient(jnp.exp(log_probs))
        return jnp.sum(weights * losses.kl_estimate(log_probs, reference, kind=kind))

    def reverse(logits):
        log_probs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - reference))

    def forward(logits):
        return jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(logits)))

    estimates = {kind: jax.value_and_grad(expected)(logits, kind) for kind in KL_KINDS}
    return estimates | {
        "reverse": jax.value_and_grad(reverse)(logits),
        "forward": jax.value_and_grad(forward)(logits),
    }


def test_expectations_over_a_small_vocabulary(rng):
    """k2 and the straight-through forms have the reverse KL's gradient, k3 the forward's, k1 0."""
    logits, reference = rng.normal(size=(2, 7))
    with jax.enable_x64(True):
        found = enumerated(logits, reference - np.log(np.exp(reference).sum()))
        values, gradients = ({k: np.asarray(v[i]) for k, v in found.items()} for i in (0, 1))
    for kind in ("k1", "k3", "k1_st", "k3_st"):
        np.testing.assert_allclose(values[kind], values["reverse"], rtol=1e-12)
    for kind in ("k2", "k1_st", "k3_st"):
        np.testing.assert_allclose(gradients[kind], gradients["reverse"], atol=1e-12)
    np.testing.assert_allclose(gradients["k3"], gradients["forward"], atol=1e-12)
    np.testing.assert_allclose(gradients["k1"], np.zeros(7), atol=1e-12)


def test_minus_infinity_on_both_sides_is_reported_by_row():
    inf = jnp.inf
    log_probs = jnp.array([[-1, -inf, -1], [-1, -inf, -1], [-1, -inf, -1], [-1, jnp.nan, -1]])
    reference = jnp.array([[-1, -inf, -1], [-1, -inf, -1], [-1.0, -1, -1], [-1, -1, -1]])
    mask = jnp.array([[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0]], bool)
    found = losses.finite_log_ratio_rows(log_probs, reference, mask)
    np.testing.assert_array_equal(found, [False, True, True, False])
    assert np.isnan(losses.kl_estimate(log_probs, reference)[0, 1])  # not hidden
    assert (losses.kl_estimate(log_probs, reference, mask=mask)[1] == 0).all()


LAST = np.array([[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]], np.float32)
PAST = np.array([[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]], np.float32)


@pytest.mark.parametrize(("placement", "lands"), [("last_action", LAST), ("one_past_end", PAST)])
def test_token_rewards_place_the_score(placement, lands):
    mask = np.array([[0, 1, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    scores = np.array([0.7, -0.3, 1.5, np.nan], np.float32)  # fractional; nobody sees the last
    place = jax.jit(functools.partial(losses.token_rewards, placement=placement))
    score_parts = lands * np.nan_to_num(scores)[:, None]
    found = place(scores, np.where(mask, 0.5, np.nan), mask, kl_coef=0.1)
    np.testing.assert_allclose(found, np.where(mask, -0.05, 0) + score_parts, rtol=1e-6)
    np.testing.assert_array_equal(place(scores, None, mask), score_parts)
    full = np.tri(4, dtype=bool)  # every length, the full row included
    rewards = np.asarray(place(scores[:3].repeat(2)[:4], None, full))
    assert (np.count_nonzero(rewards, axis=1) == 1).all()


def test_integer_scores_become_float_rewards():
    scores, mask = np.array([1]), np.ones((1, 2), bool)
    rewards = jax.jit(losses.token_rewards)(scores, np.ones((1, 2)), mask, kl_coef=0.25)
    np.testing.assert_array_equal(rewards, [[-0.25, 0.75]])
    bare = jax.eval_shape(losses.token_rewards, scores, None, mask)
    assert bare.dtype == jnp.float32


def test_zero_kl_coef_is_honoured_and_none_is_not_zero():
    mask = jnp.ones((1, 2), bool)
    scores, kl = jnp.array([1.0]), jnp.full((1, 2), 3.0)
    np.testing.assert_array_equal(losses.token_rewards(scores, kl, mask, kl_coef=0.0), [[0, 1]])
    with pytest.raises(ValueError, match="kl_coef"):
        losses.token_rewards(scores, None, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match="kl_coef"):
        losses.token_rewards(scores, kl, mask)


def test_errors_say_what_to_change():
    x, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="k3_st"):
        losses.kl_estimate(x, x, kind="k4")
    with pytest.raises(ValueError, match="one_past_end"):
        losses.token_rewards(jnp.ones(2), None, mask, placement="pad")
    with pytest.raises(ValueError, match=r"give one a row, \(2,\)"):
        losses.token_rewards(x, None, mask)


def test_adaptive_controller_follows_ziegler():
    step = jax.jit(functools.partial(losses.adaptive_controller, target=0.1, horizon=10_000))
    state = losses.init_kl_state(0.2)
    cases = [(0.11, 1 + 0.1 * 0.0256), (0.5, 1 + 0.2 * 0.0256), (0.0, 1 - 0.2 * 0.0256)]
    cases += [(0.1, 1.0), (-3.0, 1 - 0.2 * 0.0256), (np.inf, 1 + 0.2 * 0.0256), (np.nan, 1.0)]
    for observed, factor in cases:
        new = step(state, observed, 256)
        np.testing.assert_allclose(new.coef, 0.2 * factor, rtol=1e-6)
        assert (new.coef.dtype, new.coef.weak_type) == (state.coef.dtype, state.coef.weak_type)


def test_fixed_controller_keeps_the_coefficient_and_zero_stays_zero():
    state = losses.init_kl_state(0.001)
    assert losses.fixed_controller(state, jnp.array(5.0), 256) is state
    zero = losses.adaptive_controller(losses.init_kl_state(0.0), 5.0, 256, target=0.1, horizon=1e4)
    assert zero.coef == 0
