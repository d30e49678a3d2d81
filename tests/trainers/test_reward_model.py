"""The reward model's loss against float64 by hand; micro-batches and padding; it learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.transformer import forward
from jaxrlhf.optimizers import OptimizerHyper
from jaxrlhf.trainers.reward_model import RewardHyper, pair_scores, reward_loss
from jaxrlhf.trainers.update import accumulate_gradients, init_train_state, pure_update
from jaxrlhf.types import PreferenceBatch

LENGTHS = [[5, 9], [12, 12], [3, 1], [8, 2]]


def batch_of(config, *, width=12, pad_id=0, margins=(0.0, 1.5, 0.25, 0.0)):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, config.vocab_size, size=(4, 2, 12))
    lengths = np.array(LENGTHS, np.int32)
    wide = np.full((4, 2, width), pad_id, np.int32)
    real = np.arange(12) < lengths[..., None]
    wide[..., :12] = np.where(real, tokens, pad_id)
    weights = np.full(4, 0.25, np.float32)
    ones = np.ones(4, np.int32)
    return PreferenceBatch(wide, lengths, ones, np.float32(margins), weights)


@pytest.fixture(scope="module")
def scores(config, models, quick_jit):
    """Float64 scores of every row, from the model's states of the row alone."""
    run = quick_jit(functools.partial(forward, config=config))
    batch, out = batch_of(config), np.zeros((4, 2))
    index, ones = np.arange(12)[None].astype(np.int32), np.ones((1, 12), np.int32)
    for b in range(4):
        for side in range(2):
            n = batch.lengths[b, side]
            # Causal: what follows a row's last token has no part in it, whatever it is.
            hidden = run(models.critic["backbone"], batch.tokens[b, side][None], index, ones)
            last = np.asarray(hidden, np.float64)[0, n - 1]
            out[b, side] = last @ models.critic["head"]["kernel"].astype(np.float64)
    return out


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


@pytest.mark.parametrize("width", [12, 19])
def test_scores_are_read_at_the_last_token(config, models, scores, quick_jit, width):
    batch = batch_of(config, width=width, pad_id=3)
    run = quick_jit(functools.partial(pair_scores, config=config))
    np.testing.assert_allclose(run(models.critic, batch), scores, atol=1e-5)


@pytest.mark.parametrize(
    ("margin_scale", "centring", "label_smoothing"), [(None, None, None), (2.0, 0.01, 0.1)]
)
def test_loss_and_metrics(
    config, models, scores, quick_jit, margin_scale, centring, label_smoothing
):
    hyper = RewardHyper.create(
        margin_scale=margin_scale, centring=centring, label_smoothing=label_smoothing
    )
    batch = batch_of(config)
    run = quick_jit(functools.partial(reward_loss, config=config))
    loss, metrics = run(models.critic, batch, hyper)
    gap, e = scores[:, 0] - scores[:, 1], label_smoothing or 0
    x = gap - (margin_scale or 0) * np.float64(batch.margins)
    want = -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x) + (centring or 0) * scores.sum(1) ** 2
    expected = {
        "rm/loss": want.mean(),
        "rm/accuracy": (gap > 0).mean(),
        "rm/margin": gap.mean(),
        "rm/score_mean": scores.mean(),
    }
    assert 0 < expected["rm/accuracy"] < 1
    np.testing.assert_allclose(loss, want.mean(), rtol=1e-5)
    assert metrics.sums.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics.sums[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(metrics.maxima["rm/score_abs_max"], np.abs(scores).max(), rtol=1e-5)


def test_no_split_changes_the_gradient(config, models, quick_jit):
    hyper = RewardHyper.create(margin_scale=1.0, centring=0.01, label_smoothing=0.05)
    loss_fn = functools.partial(reward_loss, config=config)
    results = []
    for splits, width in ((1, 12), (2, 16)):
        run = functools.partial(accumulate_gradients, loss_fn=loss_fn, num_micro_batches=splits)
        batch = jax.tree.map(jnp.asarray, batch_of(config, width=width))
        results.append(quick_jit(run)(models.critic, batch, hyper))
    whole, *others = results
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(whole[0])))
    for grads, loss, metrics in others:
        np.testing.assert_allclose(loss, whole[1], rtol=1e-5)
        for name, value in whole[2].sums.items():
            np.testing.assert_allclose(metrics.sums[name], value, rtol=1e-4, atol=1e-6)
        gaps = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), grads, whole[0])
        assert np.sqrt(sum(jax.tree.leaves(gaps))) / norm < 1e-5


def test_it_learns_the_pairs_by_heart(config, models, quick_jit):
    opt = OptimizerHyper.create(learning_rate=1e-2)
    loss_fn = functools.partial(reward_loss, config=config)
    state = init_train_state(models.critic, opt)
    step = quick_jit(functools.partial(pure_update, loss_fn=loss_fn))
    batch, hyper = batch_of(config), RewardHyper.create()
    for _ in range(30):
        state, metrics = step(state, batch, opt, hyper)
    assert metrics["rm/accuracy"] == 1
    assert metrics["rm/loss"] < 0.1


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"centring": -0.1}, "set centring to 0 or more"),
        ({"label_smoothing": 0.5}, "set label_smoothing below 0.5"),
        ({"margin_scale": float("nan")}, "set margin_scale to 0 or more"),
    ],
)
def test_numbers_without_sense_are_refused(keywords, problem):
    with pytest.raises(ValueError, match=problem):
        RewardHyper.create(**keywords)
