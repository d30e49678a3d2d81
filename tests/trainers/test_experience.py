"""Experience against a float64 oracle, dropped rows, mini-batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.losses.masked import AGGREGATIONS, token_weights
from jaxrlhf.trainers.experience import (
    epoch_key,
    make_experience,
    minibatch_rows,
    minibatches,
    take_rows,
)
from jaxrlhf.types import Evaluation

GAMMA, LAM, COEF = 0.98, 0.9, 0.3
NUMBERS = {"gamma": jnp.float32(GAMMA), "lam": jnp.float32(LAM)}
KL = {
    "reward": {"kl_in": "reward", "kl_coef": jnp.float32(COEF)},
    "loss": {"kl_in": "loss"},
    None: {"kl_in": None},
}


@pytest.fixture
def evaluation(rng, uneven):
    mask = uneven.response_mask
    log_probs, entropy, ref, values = (
        np.where(mask, x, 0).astype(np.float32) for x in rng.normal(size=(4, *mask.shape))
    )
    return Evaluation(log_probs - 2, entropy, ref - 2, values)


SCORES = np.array([0.7, 0.1, 0.0, 1.0, 0.35, 0.9, 0.2, 0.55], np.float32)
ALL = np.ones(8, bool)


def oracle(rollout, evaluation, scores, keep, kl_in):
    """Row by row in float64 over the list of action tokens; then whitening over all of them."""
    mask = rollout.response_mask & keep[:, None]
    raw, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    log_ratio = np.asarray(evaluation.log_probs, float) - evaluation.ref_log_probs
    for b in range(len(mask)):
        at = np.flatnonzero(mask[b])
        values = np.append(np.asarray(evaluation.values[b, at], float), 0.0)
        running = 0.0
        for i in reversed(range(len(at))):
            reward = scores[b] if i == len(at) - 1 else 0.0
            if kl_in == "reward":
                reward -= COEF * np.clip(log_ratio[b, at[i]], -20, 20)
            running = reward + GAMMA * values[i + 1] - values[i] + GAMMA * LAM * running
            raw[b, at[i]], returns[b, at[i]] = running, running + values[i]
    x = raw[mask]
    white = np.where(mask, (raw - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8), 0)
    return raw, white, returns, log_ratio, mask


@pytest.mark.parametrize("kl_in", ["reward", "loss", None])
@pytest.mark.parametrize("unscored", [[], [0, 6]])
def test_experience_equals_float64_oracle(uneven, evaluation, kl_in, unscored):
    scored = ALL.copy()
    scored[unscored] = False
    keep = scored & (np.arange(8) != 5)  # row 5 has no action token
    raw, white, returns, log_ratio, mask = oracle(uneven, evaluation, SCORES, keep, kl_in)
    scores = np.where(scored, SCORES, np.nan).astype(np.float32)
    got, metrics = make_experience(uneven, evaluation, scores, scored, **NUMBERS, **KL[kl_in])
    np.testing.assert_array_equal(got.response_mask, mask)
    np.testing.assert_allclose(got.advantages, white, atol=1e-5)
    np.testing.assert_allclose(got.returns, returns, atol=1e-5)
    np.testing.assert_allclose(got.old_values, np.where(mask, evaluation.values, 0))
    assert (got.ref_log_probs is None) == (kl_in != "loss")

    rows = [log_ratio[b][mask[b]].sum() for b in np.flatnonzero(keep)]
    k3 = np.expm1(-log_ratio) + log_ratio
    lengths = uneven.response_mask.sum(1)
    expected = {
        "reward/mean": SCORES[keep].mean(),
        "reward/std": SCORES[keep].std(ddof=1),
        "reward/min": SCORES[keep].min(),
        "reward/max": SCORES[keep].max(),
        "reward/unscored_fraction": len(unscored) / 8,
        "rollout/empty_fraction": 1 / 8,
        "rollout/nonfinite_fraction": 0,
        "rollout/truncated_fraction": 2 / 8,
        "rollout/length_mean": lengths.mean(),
        "rollout/length_max": 16,
        "rollout/entropy": evaluation.entropy[mask].mean(),
        "rollout/sampler_gap_max": np.abs(uneven.log_probs - evaluation.log_probs)[mask].max(),
        "kl/k1_token_mean": log_ratio[mask].mean(),
        "kl/k3_token_mean": k3[mask].mean(),
        "kl/k1_sequence_mean": np.mean(rows),
        "kl/k3_sequence_mean": k3[mask].sum() / keep.sum(),
        "advantage/mean": raw[mask].mean(),
        "advantage/std": raw[mask].std(ddof=1),
        "advantage/abs_max": np.abs(raw[mask]).max(),
        "value/mean": evaluation.values[mask].mean(),
        "value/returns_mean": returns[mask].mean(),
        "value/explained_variance": 1
        - (returns - evaluation.values)[mask].var() / returns[mask].var(),
    }
    assert metrics.keys() == expected.keys() | {"rollout/sampler_kl"}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def poison(evaluation, row, rollout, field, value):
    array = np.array(getattr(evaluation, field))
    array[row, np.flatnonzero(rollout.response_mask[row])[0]] = value
    return dataclasses.replace(evaluation, **{field: array})


@pytest.mark.parametrize(
    ("field", "value", "counter"),
    [
        ("scores", np.inf, "reward/unscored_fraction"),
        ("scores", np.nan, "reward/unscored_fraction"),
        ("log_probs", -np.inf, "rollout/nonfinite_fraction"),
        ("ref_log_probs", -np.inf, "rollout/nonfinite_fraction"),
        ("values", np.nan, "rollout/nonfinite_fraction"),
    ],
)
def test_bad_rows_are_counted_and_change_nothing_else(uneven, evaluation, field, value, counter):
    """The others' experience is what it would be if the row had simply not been scored."""
    row = 3
    scores, bad = SCORES.copy(), evaluation
    if field == "scores":
        scores[row] = value
    else:
        bad = poison(evaluation, row, uneven, field, value)
    without = ALL.copy()
    without[row] = False
    want, clean = make_experience(uneven, evaluation, SCORES, without, **NUMBERS, **KL["reward"])
    got, metrics = make_experience(uneven, bad, scores, ALL, **NUMBERS, **KL["reward"])
    assert metrics[counter] == 1 / 8
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    for name in metrics.keys() - {"reward/unscored_fraction", "rollout/nonfinite_fraction"}:
        np.testing.assert_array_equal(metrics[name], clean[name], err_msg=name)


def test_nothing_scored_is_weightless_and_no_reward_is_made_up(uneven, evaluation):
    got, metrics = make_experience(uneven, evaluation, SCORES, ~ALL, **NUMBERS, **KL["reward"])
    assert not got.response_mask.any()
    assert not got.loss_weights.any()
    rewards = [metrics.pop(f"reward/{name}") for name in ("mean", "std", "min", "max")]
    assert np.isnan(rewards).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((got, metrics)))
    assert metrics["reward/unscored_fraction"] == 1


@pytest.mark.parametrize("score", [0.0, 0.3, 1.0, -7.7])
def test_equal_rewards_give_advantages_of_exactly_zero(uneven, evaluation, score):
    evaluation = dataclasses.replace(evaluation, values=0 * evaluation.values)
    got, _ = make_experience(
        uneven, evaluation, np.full(8, score, np.float32), ALL,
        gamma=jnp.float32(1), lam=jnp.float32(0.95), kl_in=None,
    )  # fmt: skip
    got_1, _ = make_experience(
        uneven, evaluation, np.full(8, score, np.float32), ALL,
        gamma=jnp.float32(1), lam=jnp.float32(1), kl_in=None,
    )  # fmt: skip
    assert not got_1.advantages.any()  # lam 1: every token has the advantage `score`
    assert got.advantages.any() == (score != 0)


def test_empty_response_leaves_the_others_alone(make_rollout, evaluation, uneven):
    """Fault row 2: rows of a batch with an empty response against the batch without that row."""
    rest = np.arange(8) != 5

    def cut(tree):
        return jax.tree.map(lambda x: x[rest], tree)

    full, _ = make_experience(uneven, evaluation, SCORES, ALL, **NUMBERS, **KL["reward"])
    less, _ = make_experience(
        cut(uneven), cut(evaluation), SCORES[rest], ALL[rest], **NUMBERS, **KL["reward"]
    )
    assert not full.response_mask[5].any()
    for a, b in zip(jax.tree.leaves(cut(full)), jax.tree.leaves(less), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_in": "rewards"}, "set kl_in to"),
        ({"kl_in": "reward"}, "kl_coef is missing"),
        ({"kl_in": "loss", "kl_coef": 0.1}, "kl_coef is given"),
        ({"kl_in": None, "kl_coef": 0.1}, "has no effect otherwise"),
    ],
)
def test_settings_without_effect_are_refused(uneven, evaluation, changes, message):
    with pytest.raises(ValueError, match=message):
        make_experience(uneven, evaluation, SCORES, ALL, **NUMBERS, **changes)


def test_missing_roles_are_refused(uneven, evaluation):
    no_ref = dataclasses.replace(evaluation, ref_log_probs=None)
    no_values = dataclasses.replace(evaluation, values=None)
    with pytest.raises(ValueError, match="pass ref_params"):
        make_experience(uneven, no_ref, SCORES, ALL, **NUMBERS, **KL["loss"])
    with pytest.raises(ValueError, match="pass critic_params"):
        make_experience(uneven, no_values, SCORES, ALL, **NUMBERS, **KL["loss"])
    _, metrics = make_experience(uneven, no_ref, SCORES, ALL, **NUMBERS, **KL[None])
    assert not any(name.startswith("kl/") for name in metrics)


def test_minibatches_hold_each_row_once_with_weights_of_their_own(uneven, evaluation):
    experience, _ = make_experience(uneven, evaluation, SCORES, ALL, **NUMBERS, **KL["loss"])
    seen = []
    for mode in AGGREGATIONS:
        norm = 16.0 if mode == "seq_mean_token_sum_norm" else None
        parts = list(minibatches(jax.random.key(0), experience, 4, aggregation=mode, norm=norm))
        assert len(parts) == 2
        for part in parts:
            weights = token_weights(part.response_mask, mode=mode, norm=norm)
            np.testing.assert_allclose(part.loss_weights, weights, rtol=1e-6)
            np.testing.assert_allclose(part.metric_weights.sum(), 1, rtol=1e-6)
        seen.append(np.concatenate([part.tokens for part in parts]))
    table = np.asarray(experience.tokens)
    for tokens in seen:
        np.testing.assert_array_equal(tokens, seen[0])  # the key decides, nothing else
        order = [np.flatnonzero((table == t).all(1)).item() for t in tokens]
        assert sorted(order) == list(range(8))
    assert order != list(range(8))


def test_take_rows_of_all_rows_in_order_is_the_identity(uneven, evaluation):
    experience, _ = make_experience(uneven, evaluation, SCORES, ALL, **NUMBERS, **KL["loss"])
    same = take_rows(experience, jnp.arange(8))
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(experience), strict=True):
        np.testing.assert_array_equal(a, b)


def test_shuffles_differ_between_steps_and_epochs_and_repeat():
    key = jax.random.key(0)
    orders = {
        tuple(minibatch_rows(epoch_key(key, step, epoch), 64, 64).ravel().tolist())
        for step in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    again = minibatch_rows(epoch_key(key, 1, 1), 64, 64)
    assert tuple(again.ravel().tolist()) in orders


@pytest.mark.parametrize("size", [0, 5, 16])
def test_mini_batch_must_divide_and_the_message_says_what_would(size):
    with pytest.raises(ValueError, match=r"8 rows \(1, 2, 4, 8\), not"):
        minibatch_rows(jax.random.key(0), 8, size)
