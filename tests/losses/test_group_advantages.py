"""Group advantages against float64 loops, and what they promise whatever the groups are."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses

ROWS = 9
VARIANTS = {
    "grpo": {},
    "grpo_biased": {"ddof": 0, "eps": 1e-4},
    "batch": {"scale": "batch"},
    "dr_grpo": {"scale": "none"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "opo": {"baseline": "length_weighted", "scale": "none"},
    "gpg": {"scale": "nonzero_scores"},
}
seeds = hypothesis.given(seed=st.integers(0, 2**32 - 1))
quick = hypothesis.settings(max_examples=10, deadline=None)


def oracle(scores, ids, counted, lengths, baseline="mean", scale="group", eps=1e-6, ddof=1):
    out = np.zeros(len(scores))
    for i in np.flatnonzero(counted):
        group = np.flatnonzero(counted & (ids == ids[i]))
        if len(group) < 2:
            continue
        others = group[group != i]
        base = {
            "mean": np.mean(scores[group]),
            "leave_one_out": np.mean(scores[others]),
            "length_weighted": np.average(scores[group], weights=lengths[group]),
        }[baseline]
        sigma = {
            "group": np.std(scores[group], ddof=ddof) + eps,
            "batch": np.std(scores[counted], ddof=ddof) + eps,
            "none": 1.0,
            "nonzero_scores": np.mean(scores[counted] != 0),
        }[scale]
        out[i] = (scores[i] - base) / sigma
    return out


@functools.cache
def jitted(name: str):
    def call(scores, ids, counted, lengths):
        extra = {"lengths": lengths} if name == "opo" else {}
        return losses.group_relative(scores, ids, counted=counted, **extra, **VARIANTS[name])

    return jax.jit(call)


def batch(seed: int):
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.0, 1.0, 0.7], ROWS) + rng.choice([0, 1]) * rng.normal(size=ROWS)
    scores[rng.integers(ROWS)] = 0.37  # so that not all scores are 0
    counted = rng.random(ROWS) < 0.8
    counted[0] = True
    return scores, rng.choice([-5, 3, 10**6], ROWS), counted, rng.integers(1, 9, ROWS)


@pytest.mark.parametrize("name", VARIANTS)
@quick
@seeds
def test_equals_a_loop_over_groups(name, seed):
    """In a random batch, permuted, and with garbage as the score of what does not count."""
    scores, ids, counted, lengths = batch(seed)
    hypothesis.assume(name != "gpg" or np.any(scores[counted]))
    expected = oracle(scores, ids, counted, lengths, **VARIANTS[name])
    order = np.random.default_rng(seed).permutation(ROWS)
    dirty = np.where(counted, scores, np.nan)
    with jax.enable_x64(True):
        ours = np.asarray(jitted(name)(scores, ids, counted, lengths))
        again = np.asarray(jitted(name)(dirty[order], ids[order], counted[order], lengths[order]))
    # A variance of residues is not one: those groups are tested below.
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(again, ours[order], rtol=1e-12, atol=1e-12)
    assert (ours[~counted] == 0).all()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("value", [0.3, -0.7, 1e-30, 3e7, 0.1])
def test_equal_scores_and_groups_of_one_give_exactly_0(name, value):
    scores = np.full(ROWS, value, np.float32)
    ones = np.ones(ROWS, bool)
    for ids in (np.zeros(ROWS, int), np.arange(ROWS), np.array([0, 0, 0, 0, 0, 0, 1, 1, 2])):
        assert not np.any(jitted(name)(scores, ids, ones, np.arange(1, ROWS + 1)))
    scores = np.arange(ROWS, dtype=np.float32)
    assert not np.any(jitted(name)(scores, np.arange(ROWS), ones, np.arange(1, ROWS + 1)))


@functools.cache
def every_kind():
    """All estimators on rows of one batch."""

    def call(scores, ids, counted, lengths):
        of_rows = {"counted": counted}
        found = [jitted(name)(scores, ids, counted, lengths) for name in VARIANTS]
        for scale in ("group", "batch", "none", "nonzero_scores"):
            found.append(losses.group_best(scores, ids, scale=scale, **of_rows))
            parts, weights = jnp.stack([scores, -scores], 1), jnp.array([1.0, 3.0])
            found.append(losses.group_relative_parts(parts, weights, ids, scale=scale, **of_rows))
        return found

    return jax.jit(call)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3),
    ids=st.lists(st.integers(0, 2), min_size=16, max_size=16),
    counted=st.lists(st.booleans(), min_size=16, max_size=16),
)
def test_constant_groups_of_any_value_and_size_give_exactly_0(values, ids, counted):
    """Groups of 0 to 16 rows; a row that does not count has garbage for a score."""
    ids, counted = np.array(ids), np.array(counted)
    scores = np.where(counted, np.array(values, np.float32)[ids], np.nan).astype(np.float32)
    for advantages in every_kind()(scores, ids, counted, np.arange(1, 17)):
        assert not np.any(advantages)


@quick
@seeds
def test_rloo_sums_to_0_in_each_group(seed):
    scores, ids, counted, lengths = batch(seed)
    ours = np.asarray(jitted("rloo")(scores.astype(np.float32), ids, counted, lengths))
    for group in np.unique(ids):
        assert abs(ours[ids == group].sum()) < 1e-5


def test_golden_group():
    scores, ids = jnp.array([1.0, 0, 0, 1, 1]), jnp.zeros(5, jnp.int32)
    relative = functools.partial(losses.group_relative, scores, ids, eps=0.0)
    for options, first, second in (
        ({}, 0.730297, -1.095445),
        ({"ddof": 0}, 0.816497, -1.224745),
        ({"scale": "none"}, 0.4, -0.6),
        ({"scale": "none", "baseline": "leave_one_out"}, 0.5, -0.75),
    ):
        np.testing.assert_allclose(relative(**options)[:2], [first, second], rtol=1e-5)


def test_best_of_group_and_parts():
    scores = jnp.array([1.0, 5.0, 2.0, 4.0, 4.0, 9.0, 8.0])
    ids = jnp.array([0, 0, 0, 1, 1, 2, 0])
    counted = jnp.array([True] * 6 + [False])
    best = losses.group_best(scores, ids, counted=counted, scale="none")
    np.testing.assert_array_equal(best, [0, 3, 0, 0, 0, 0, 0])
    parts = jnp.stack([scores, 100 * scores], axis=1)
    ours = losses.group_relative_parts(parts, jnp.array([1.0, 2.0]), ids, eps=0.0)
    np.testing.assert_allclose(ours, 3 * losses.group_relative(scores, ids, eps=0.0), rtol=1e-5)


def test_vmap_and_stopped_gradients():
    batches = [batch(seed) for seed in (1, 2)]
    stacked = [np.stack(x) for x in zip(*batches, strict=True)]
    with jax.enable_x64(True):
        mapped = jax.vmap(jitted("grpo"))(*stacked)
        for row, one in zip(mapped, batches, strict=True):
            np.testing.assert_allclose(row, jitted("grpo")(*one), rtol=1e-12, atol=1e-12)
    mask = jnp.ones((2, 3), jnp.bool_)

    def total(scores, rewards):
        rows = losses.group_relative(scores, jnp.zeros(2, jnp.int32))
        returns = losses.remax(rewards, scores, mask)
        return jnp.sum(losses.spread_over_tokens(rows, mask) + returns)

    gradients = jax.grad(total, argnums=(0, 1))(jnp.array([0.0, 1.0]), jnp.ones((2, 3)))
    assert not any(np.any(g) for g in gradients)


def test_returns_skip_masked_tokens_and_take_a_bootstrap():
    mask = jnp.array([[True, True, False, True]])
    rewards = jnp.array([[1.0, 2.0, jnp.nan, 4.0]])
    ours = losses.discounted_returns(rewards, mask, gamma=0.5, bootstrap=jnp.array([8.0]))
    np.testing.assert_allclose(ours, [[1 + 0.5 * (2 + 0.5 * 8), 2 + 0.5 * 8, 0, 8]])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"baseline": "median"}, "baseline"),
        ({"scale": "std"}, "scale"),
        ({"lengths": jnp.ones(3)}, "lengths"),
        ({"baseline": "length_weighted"}, "lengths"),
        ({"counted": jnp.ones(2, bool)}, "counted"),
    ],
)
def test_wrong_arguments_are_named(options, word):
    with pytest.raises(ValueError, match=word):
        losses.group_relative(jnp.ones(3), jnp.zeros(3, jnp.int32), **options)
