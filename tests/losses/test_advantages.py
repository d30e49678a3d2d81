"""GAE: the design's golden vectors, and a plain loop in float64 for everything else."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses

X = np.nan  # stands where a value must not matter

VALUES = np.array([[0.5, 0.25, 0.125, X], [0.2, 0.1, X, X]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
REWARDS = np.array([[-0.01, 0.02, 1, X], [0, -1, X, X]])
ADVANTAGES = np.array([[0.4299375, 0.72625, 0.875, 0], [-1.145, -1.1, 0, 0]])
RETURNS = np.array([[0.9299375, 0.97625, 1, 0], [-0.945, -1, 0, 0]])
WHITENED = np.array([[0.473304, 0.769996, 0.918936, 0], [-1.103647, -1.058589, 0, 0]])
BIASED = np.array([[0.529170, 0.860881, 1.027401, 0], [-1.233914, -1.183539, 0, 0]])

SPAN_VALUES = np.array([0.1, 0.2, 0.9, 0.8, 0.3, 0.4])  # the middle two are a tool's output
SPAN_MASK = np.array([1, 1, 0, 0, 1, 1], bool)


@functools.cache
def jitted_gae(**static):
    return jax.jit(functools.partial(losses.gae, **static))


def gae_loop(rewards, values, mask, gamma, lam, *, bootstrap=0.0, zero_value_steps=False):
    """One row of float64 GAE, written without any trick."""
    advantages = np.zeros(len(rewards))
    next_value, running, seen = bootstrap, 0.0, False
    for t in reversed(range(len(rewards))):
        if mask[t]:
            seen = True
            running = rewards[t] + gamma * next_value - values[t] + gamma * lam * running
            next_value = advantages[t] = running
            next_value = values[t]
        elif zero_value_steps and seen:
            running = gamma * next_value + gamma * lam * running
            next_value = 0.0
    return advantages, np.where(mask, advantages + np.where(mask, values, 0), 0)


def test_golden_advantages_returns_and_whitening():
    with jax.enable_x64(True):
        advantages, returns = jitted_gae()(REWARDS, VALUES, MASK, gamma=1.0, lam=0.95)
        whitened = losses.whiten(advantages, jnp.asarray(MASK))
        biased = losses.whiten(advantages, jnp.asarray(MASK), ddof=0)
        found = jax.tree.map(np.asarray, (advantages, returns, whitened, biased))
    for x, golden, tolerance in zip(
        found, (ADVANTAGES, RETURNS, WHITENED, BIASED), (1e-12, 1e-12, 1e-6, 1e-6), strict=True
    ):
        np.testing.assert_allclose(x, golden, rtol=0, atol=tolerance)


def test_lambda_one_makes_returns_the_reward_to_go():
    with jax.enable_x64(True):
        _, returns = jitted_gae()(REWARDS, VALUES, MASK, gamma=1.0, lam=1.0)
        returns = np.asarray(returns)
    np.testing.assert_allclose(returns[0], [1.01, 1.02, 1, 0], atol=1e-12)
    np.testing.assert_allclose(returns[1], [-1, -1, 0, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("masked", "golden"),
    [
        ("skip", [0.7997, 0.7365, 0, 0, 0.67, 0.6]),
        ("zero_value_steps", [0.7129, 0.6452, 0, 0, 0.67, 0.6]),
    ],
)
def test_tool_span(masked, golden):
    with jax.enable_x64(True):
        rewards = losses.token_rewards(jnp.array(1.0), None, jnp.asarray(SPAN_MASK))
        found, _ = jitted_gae(masked=masked)(rewards, SPAN_VALUES, SPAN_MASK, gamma=1.0, lam=0.95)
        found = np.asarray(found)
    np.testing.assert_allclose(found, golden, rtol=0, atol=6e-5)


def test_score_is_not_lost_when_the_row_ends_on_other_tokens():
    mask = jnp.array([1, 1, 1, 1, 0, 0], bool)
    rewards = losses.token_rewards(jnp.array(1.0), None, mask)
    advantages, _ = jitted_gae()(rewards, SPAN_VALUES, mask, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantages, [0.846, 0.786, 0.09, 0.2, 0, 0], atol=5e-4)


@pytest.mark.parametrize(
    ("placement", "golden"),
    [("last_action", [0.9025, 0.95, 1]), ("one_past_end", [0.857375, 0.9025, 0.95])],
)
def test_placement_of_the_score(placement, golden):
    mask = jnp.array([[1, 1, 1, 0, 0]], bool)
    rewards = losses.token_rewards(jnp.array([1.0]), None, mask, placement=placement)
    steps = mask if placement == "last_action" else mask | losses.one_past_end(mask)
    advantages, _ = jitted_gae()(rewards, jnp.zeros(mask.shape), steps, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantages[0, :3], golden, rtol=1e-6)


def random_rows(rng, rows=4, length=9):
    mask = rng.random((rows, length)) < rng.random((rows, 1))
    garbage = rng.choice([np.nan, np.inf, 1e30], size=mask.shape)
    rewards, values = (np.where(mask, rng.normal(size=mask.shape), garbage) for _ in range(2))
    return rewards, values, mask


@pytest.mark.parametrize("masked", ["skip", "zero_value_steps"])
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_rows_equal_the_loop(masked, seed, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values, mask = random_rows(rng)
    bootstrap = rng.normal(size=len(mask))
    expected = [
        gae_loop(*row, gamma, lam, bootstrap=b, zero_value_steps=masked != "skip")
        for *row, b in zip(rewards, values, mask, bootstrap, strict=True)
    ]
    with jax.enable_x64(True):
        found = jitted_gae(masked=masked)(
            rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap
        )
        found = jax.tree.map(np.asarray, found)
    for x, golden in zip(found, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(x, np.stack(golden), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [128, 129, 300])
@pytest.mark.parametrize("masked", ["skip", "zero_value_steps"])
def test_long_rows_in_blocks_equal_the_loop(rng, length, masked):
    """Credit crosses the blocks of time, of which the last is filled up."""
    rewards, values, mask = random_rows(rng, rows=2, length=length)
    with jax.enable_x64(True):
        found = jitted_gae(masked=masked)(rewards, values, mask, gamma=0.99, lam=0.97)
        found = [np.asarray(x) for x in found]
    for row in range(2):
        expected = gae_loop(
            rewards[row], values[row], mask[row], 0.99, 0.97,
            zero_value_steps=masked == "zero_value_steps",
        )  # fmt: skip
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x[row], y, rtol=1e-10, atol=1e-12)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), actions=st.integers(1, 8))
def test_a_row_cut_off_anywhere_is_worth_what_follows(seed, actions):
    """The rest of a row enters its beginning through V + lam A of the first action left out.

    With lam 0 that is the critic's value alone; without a bootstrap the row counts as ended.
    """
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 9))
    cut, gamma = np.arange(9) < actions, 0.9
    everything, no_end = np.ones(9, bool), np.zeros(())
    with jax.enable_x64(True):
        for lam in (0.0, 0.8, 1.0):
            whole, _ = jitted_gae()(rewards, values, everything, gamma=gamma, lam=lam)
            behind = values[actions] + lam * np.asarray(whole)[actions]
            begun, returns = jitted_gae()(
                rewards, values, cut, gamma=gamma, lam=lam, bootstrap=behind
            )
            same = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
            same(begun, np.where(cut, whole, 0))
            same(returns, np.where(cut, whole + values, 0))
            ended = jitted_gae()(rewards, values, cut, gamma=gamma, lam=lam)
            zero = jitted_gae()(rewards, values, cut, gamma=gamma, lam=lam, bootstrap=no_end)
            for x, y in zip(ended, zero, strict=True):
                np.testing.assert_array_equal(x, y)


def test_the_bootstrap_of_truncated_rows_as_the_docstring_reads_it():
    """A critic's position-aligned output at the last action; rows that ended have none."""
    mask = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    truncated, after = np.array([False, True, True]), np.arange(12.0).reshape(3, 4)
    after = np.where(mask, after, np.nan)
    behind = losses.masked_sum(after, losses.last_action(jnp.asarray(mask)), axis=-1)
    np.testing.assert_array_equal(behind, [2, 7, 0])
    rewards = np.where(mask, 0.0, np.nan)
    advantages, returns = jitted_gae()(
        rewards,
        np.zeros((3, 4)),
        mask,
        gamma=0.5,
        lam=1.0,
        bootstrap=jnp.where(truncated, behind, 0),
    )
    expected = [[0, 0, 0, 0], [7 / 16, 7 / 8, 7 / 4, 7 / 2], [0, 0, 0, 0]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    np.testing.assert_array_equal(returns, advantages)


@pytest.mark.parametrize("masked", ["skip", "zero_value_steps"])
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_packed_segments_equal_rows_of_their_own(masked, seed):
    rng = np.random.default_rng(seed)
    rewards, values, mask = random_rows(rng, rows=2, length=12)
    bootstrap = rng.normal(size=mask.shape)
    segments = np.cumsum(rng.random(mask.shape) < 0.3, axis=1)
    expected = np.zeros((2, *mask.shape))
    for row, ids in enumerate(segments):
        for segment in set(ids):
            here = np.flatnonzero(ids == segment)
            actions = here[mask[row, here]]
            behind = bootstrap[row, actions[-1]] if actions.size else 0.0
            expected[:, row, here] = gae_loop(
                rewards[row, here], values[row, here], mask[row, here], 0.9, 0.8,
                bootstrap=behind, zero_value_steps=masked != "skip",
            )  # fmt: skip
    with jax.enable_x64(True):
        found = jitted_gae(masked=masked)(
            rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap, segment_ids=segments
        )
        found = np.stack(jax.tree.map(np.asarray, found))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_inserted_masked_tokens_change_nothing_for_the_others(seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 5))
    columns = np.sort(rng.permutation(9)[:5])
    mask, long_rewards, long_values = np.zeros(9, bool), np.full(9, np.nan), np.full(9, np.inf)
    mask[columns], long_rewards[columns], long_values[columns] = True, rewards, values
    with jax.enable_x64(True):
        short = jitted_gae()(rewards, values, np.ones(5, bool), gamma=0.9, lam=0.8)
        long = jitted_gae()(long_rewards, long_values, mask, gamma=0.9, lam=0.8)
        short, long = jax.tree.map(np.asarray, (short, long))
    for x, y in zip(short, long, strict=True):
        np.testing.assert_allclose(y[columns], x, rtol=1e-12, atol=1e-12)


def test_a_row_without_actions_has_no_reward_and_no_advantage():
    mask = np.array([[0, 0, 0], [1, 1, 0]], bool)
    scores = np.array([np.nan, 1.0])  # the first could not be scored
    token_rewards = jax.jit(functools.partial(losses.token_rewards, kl_coef=0.1))
    rewards = token_rewards(scores, np.where(mask, 0, np.nan), mask)
    advantages, returns = jitted_gae()(
        rewards, np.full((2, 3), 0.5), mask, gamma=1.0, lam=1.0, bootstrap=np.array([np.nan, 0.0])
    )
    np.testing.assert_array_equal(rewards, [[0, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(advantages, [[0, 0, 0], [0.5, 0.5, 0]])
    np.testing.assert_array_equal(returns, [[0, 0, 0], [1, 1, 0]])


def test_time_is_last_and_the_other_axes_are_free(rng):
    rewards, values, mask = random_rows(rng, rows=6)
    whole = jitted_gae()(rewards, values, mask, gamma=0.9, lam=0.8)
    shape = (2, 3, 9)
    blocks = jitted_gae()(
        rewards.reshape(shape), values.reshape(shape), mask.reshape(shape), gamma=0.9, lam=0.8
    )
    row = jitted_gae()(rewards[4], values[4], mask[4], gamma=0.9, lam=0.8)
    for x, y, z in zip(whole, blocks, row, strict=True):
        np.testing.assert_array_equal(y.reshape(6, 9), x)
        np.testing.assert_array_equal(z, x[4])


def test_low_precision_inputs_are_computed_in_float32():
    shape = (2, 5)
    low = jnp.full(shape, 0.1, jnp.bfloat16)
    found = jitted_gae()(low, jnp.zeros(shape, jnp.bfloat16), jnp.ones(shape, bool), gamma=1, lam=1)
    assert found[0].dtype == found[1].dtype == jnp.float32
    step = float(low[0, 0])
    np.testing.assert_allclose(found[0][0], step * np.arange(5, 0, -1), rtol=1e-6)


def test_errors_say_what_to_change():
    x, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="zero_value_steps"):
        losses.gae(x, x, mask, gamma=1, lam=1, masked="decay")
    with pytest.raises(ValueError, match=r"bootstrap has shape \(3,\): give it \(2,\)"):
        losses.gae(x, x, mask, gamma=1, lam=1, bootstrap=jnp.zeros(3))
    with pytest.raises(ValueError, match="shape"):
        losses.gae(x, x[:, :2], mask, gamma=1, lam=1)
    with pytest.raises(ValueError, match="segment_ids"):
        losses.gae(x, x, mask, gamma=1, lam=1, segment_ids=jnp.ones((3,), jnp.int32))
