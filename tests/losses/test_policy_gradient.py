"""Sequence-level losses packed and unpacked, on-policy gradients, off-policy weights by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses

LENGTHS = (5, 3, 4, 4)  # two rows of 8 hold all four sequences


def unpacked(rng):
    mask = np.arange(5)[None] < np.array(LENGTHS)[:, None]
    mask[0, 2] = False  # a gap
    old = -rng.random(mask.shape) - 0.1
    return old + 0.3 * rng.normal(size=mask.shape), old, rng.normal(size=mask.shape), mask


def pack(x):
    rows = [x[i, :n] for i, n in enumerate(LENGTHS)]
    return np.stack([np.concatenate(rows[:2]), np.concatenate(rows[2:])])


SEGMENTS = np.array([[1] * 5 + [2] * 3, [1] * 4 + [2] * 4], np.int32)
LOSSES = {
    "gspo": functools.partial(losses.gspo, clip_low=0.1, clip_high=0.1),
    "gspo_sum": functools.partial(losses.gspo, level="sum", clip_low=0.5, clip_high=0.5),
    "gspo_token": functools.partial(losses.gspo, per_token_gradient=True, clip_low=0.1),
    "gmpo": losses.gmpo,
}


@pytest.mark.parametrize("name", LOSSES)
def test_packed_equals_unpacked(name, rng):
    arrays = unpacked(rng)

    def loss(log_probs, old, advantages, mask, segment_ids=None):
        per_token = LOSSES[name](log_probs, old, advantages, mask, segment_ids=segment_ids)
        return losses.aggregate(
            per_token, mask, mode="seq_mean_token_mean", segment_ids=segment_ids
        )

    with jax.enable_x64(True):
        value, gradient = jax.jit(jax.value_and_grad(loss))(*arrays)
        packed, packed_gradient = jax.jit(jax.value_and_grad(loss))(*map(pack, arrays), SEGMENTS)
        np.testing.assert_allclose(packed, value, rtol=1e-12)
        np.testing.assert_allclose(packed_gradient, pack(np.asarray(gradient)), atol=1e-12)


@pytest.mark.parametrize("statistic", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
def test_rejection_packed_equals_unpacked(statistic, rng):
    log_probs, old, _, mask = unpacked(rng)
    x = old - log_probs
    k3 = np.where(mask, np.exp(-x) - 1 + x, 0)
    per_token = {
        "token": k3,
        "sequence_sum": k3.sum(1)[:, None],
        "sequence_mean": (k3.sum(1) / mask.sum(1))[:, None],
        "sequence_max": k3.max(1)[:, None],
    }[statistic] * np.ones(mask.shape)
    high = (np.unique(per_token[mask])[1:3]).mean()  # keeps two tokens, or two sequences
    reject = functools.partial(losses.rejection_mask, statistic=statistic, high=high)
    with jax.enable_x64(True):
        kept = np.asarray(reject(log_probs, old, mask))
        packed = np.asarray(reject(pack(log_probs), pack(old), pack(mask), segment_ids=SEGMENTS))
    np.testing.assert_array_equal(kept, mask & (per_token <= high))
    np.testing.assert_array_equal(packed, pack(kept))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "cispo", "dppo", "sapo"])
def test_on_policy_gradient_is_the_policy_gradient(name, rng):
    """At ratio 1, with advantages equal over each sequence."""
    log_probs, _, advantages, mask = unpacked(rng)
    advantages = np.broadcast_to(advantages[:, :1], mask.shape)
    function = (LOSSES | {"cispo": losses.cispo, "dppo": losses.dppo, "sapo": losses.sapo})[name]
    if name == "sapo":  # its slope at ratio 1 is that of a sigmoid at 0, times 4: 1
        function = functools.partial(function, temperature_pos=1.0, temperature_neg=1.0)

    def gradient(per_token):
        return jax.grad(lambda z: losses.aggregate(per_token(z), mask, mode="seq_mean_token_mean"))(
            log_probs
        )

    with jax.enable_x64(True):
        ours = gradient(lambda z: function(z, log_probs, advantages, mask=mask))
        plain = gradient(lambda z: losses.reinforce(z, advantages, mask=mask))
        np.testing.assert_allclose(ours, plain, rtol=1e-9, atol=1e-12)


# At ratio 1 each has the policy gradient; sapo's slope there is 4/tau times a sigmoid's, 1/4 tau.
ON_POLICY = LOSSES | {
    "clipped_surrogate": losses.clipped_surrogate,
    "clipped_surrogate_dual": functools.partial(losses.clipped_surrogate, dual_clip=1.5),
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "dppo_tv": losses.dppo,
    "dppo_kl": functools.partial(losses.dppo, divergence="kl"),
    "reinforce": lambda log_probs, old, advantages, mask: losses.reinforce(
        log_probs, advantages, mask=mask
    ),
}


def enumerated_gradient(logits, weights, advantages, loss):
    """Over all tokens v of a small vocabulary: the gradient of sum_v weights_v loss_v."""
    mask = jnp.ones((logits.size, 1), bool)

    def expected(z):
        log_probs = jax.nn.log_softmax(z)[:, None]
        old = jax.lax.stop_gradient(log_probs)
        return jnp.sum(weights[:, None] * loss(log_probs, old, advantages[:, None], mask=mask))

    return jax.jit(jax.grad(expected))(logits)


@pytest.mark.parametrize("name", ON_POLICY)
def test_expected_gradient_is_that_of_the_expected_advantage(name, rng):
    """Also from another sampler's tokens, times importance weights."""
    logits, sampler, advantages = rng.normal(size=(3, 5))
    with jax.enable_x64(True):
        log_probs, log_sampler = jax.nn.log_softmax(logits), jax.nn.log_softmax(sampler)
        exact = jax.grad(lambda z: -jnp.sum(jax.nn.softmax(z) * advantages))(logits)
        ours = enumerated_gradient(logits, jnp.exp(log_probs), advantages, ON_POLICY[name])
        np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-12)
        weights = losses.importance_weights(log_probs, log_sampler, jnp.ones(5, bool))
        weighted = jnp.exp(log_sampler) * weights
        corrected = enumerated_gradient(logits, weighted, advantages, ON_POLICY[name])
        np.testing.assert_allclose(corrected, exact, rtol=1e-10, atol=1e-12)


def test_leave_one_out_is_unbiased_over_all_groups_of_three(rng):
    """The plain mean shrinks the gradient to (n - 1) / n of it."""
    logits, scores = rng.normal(size=(2, 3))
    groups = np.array(list(itertools.product(range(3), repeat=3)))
    with jax.enable_x64(True):
        chances = jnp.prod(jax.nn.softmax(logits)[groups], axis=1)
        exact = jax.grad(lambda z: -jnp.sum(jax.nn.softmax(z) * scores))(logits)
        ids = jnp.arange(groups.size) // 3
        for baseline, share in (("leave_one_out", 1), ("mean", 2 / 3)):
            rows = losses.group_relative(
                jnp.asarray(scores[groups].ravel()), ids, baseline=baseline, scale="none"
            ).reshape(groups.shape)

            def expected(z, rows=rows):
                per_token = losses.reinforce(jax.nn.log_softmax(z)[groups], rows)
                return jnp.sum(chances * jnp.mean(per_token, axis=1))

            np.testing.assert_allclose(jax.grad(expected)(logits), share * exact, rtol=1e-10)


@pytest.mark.parametrize("name", ON_POLICY)
@pytest.mark.parametrize("side", ["new", "old"])
def test_extreme_log_ratios_are_finite_in_value_and_gradient(name, side):
    """+-1e3 for any advantage, 0 among them; an infinite log-prob has a finite gradient too.

    The value of losses that are a multiple of log_probs is then infinite, as the number is.
    """
    extremes = np.array([[1e3, -1e3, 0.0], [-1e3, -1e3, 0.0], [-np.inf, -0.5, -0.5]], np.float32)
    plain = np.full((3, 3), -0.5, np.float32)
    new, old = (extremes, plain) if side == "new" else (plain, extremes)
    mask = jnp.ones((3, 3), bool)

    @jax.jit
    def run(log_probs, advantages):
        def total(z):
            per_token = ON_POLICY[name](z, old, advantages, mask=mask)
            return jnp.sum(per_token), per_token

        return jax.grad(total, has_aux=True)(log_probs)

    for advantage in (-1.0, 0.0, 1.0):
        gradient, loss = run(new, jnp.full((3, 3), advantage))
        assert np.isfinite(gradient).all()
        bounded = loss[:2] if name in ("reinforce", "cispo", "dppo_tv", "dppo_kl") else loss
        assert np.isfinite(bounded).all()


def test_weights_and_their_effective_sample_size():
    mask = jnp.array([[True, True, True, False]])
    log_probs = jnp.log(jnp.array([[2.0, 1.0, 0.25, 7.0]]))
    weights = losses.importance_weights(log_probs, jnp.zeros((1, 4)), mask)
    np.testing.assert_allclose(weights, [[2, 1, 0.25, 0]], rtol=1e-6)
    np.testing.assert_allclose(
        losses.effective_sample_size(weights, mask), 3.25**2 / (3 * 5.0625), rtol=1e-6
    )
    masked = losses.mask_weights(weights, mask, low=0.5, high=1.5)
    np.testing.assert_allclose(masked, [[0, 1, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(losses.effective_sample_size(masked, mask), 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(losses.normalize_weights(masked, mask), 3 * masked, rtol=1e-6)
    far = losses.importance_weights(log_probs + 1e3, jnp.zeros((1, 4)), mask, level="sequence")
    assert np.isfinite(far).all()
    assert losses.effective_sample_size(jnp.zeros((1, 4)), mask) == 0


def test_overlong_penalty():
    penalty = losses.overlong_penalty(
        jnp.array([3, 4, 6, 8, 12]), max_length=8, buffer=4, factor=0.5
    )
    np.testing.assert_allclose(penalty, [0, 0, -0.25, -0.5, -0.5])


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (losses.gspo, {"level": "max"}),
        (losses.importance_weights, {"level": "row"}),
        (losses.normalize_weights, {"level": "row"}),
        (losses.keep_within, {"statistic": "min"}),
        (losses.rejection_mask, {"kind": "abs"}),
    ],
)
def test_unknown_choices_are_named(function, options):
    mask = jnp.ones((1, 2), bool)
    arrays = [jnp.ones((1, 2))] * {losses.gspo: 3, losses.importance_weights: 2}.get(function, 1)
    if function is losses.rejection_mask:
        arrays = arrays * 2
    with pytest.raises(ValueError, match=repr(next(iter(options.values())))):
        function(*arrays, mask, **options)
