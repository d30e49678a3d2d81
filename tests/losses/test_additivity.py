"""Packing, filler rows and the cut into micro-batches change no loss and no gradient.

Every per-token loss x every aggregation: `token_weights` of the whole batch, then plain sums.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses
from jaxrlhf.losses.masked import AGGREGATIONS

SEQUENCES, LONGEST, ROWS, WIDTH, MICRO = 7, 6, 8, 12, 2


def _value_loss(values, old_values, returns, *, mask, segment_ids):
    del segment_ids
    return losses.clipped_value_loss(values, old_values, returns, mask=mask)


def _by_token(function, **options):
    """For losses that know no sequences."""

    def call(log_probs, old_log_probs, advantages, *, mask, segment_ids):
        del segment_ids
        return function(log_probs, old_log_probs, advantages, mask=mask, **options)

    return call


def _reinforce(log_probs, old_log_probs, advantages, *, mask, segment_ids):
    """With weights of whole sequences, as behind another sampler."""
    weights = losses.importance_weights(
        old_log_probs, 0.5 * old_log_probs, mask, level="sequence_mean", segment_ids=segment_ids
    )
    return weights * losses.reinforce(log_probs, advantages, mask=mask)


def _grpo(log_probs, old_log_probs, advantages, *, mask, segment_ids):
    """A sum of two losses."""
    del segment_ids
    surrogate = losses.clipped_surrogate(log_probs, old_log_probs, advantages, mask=mask)
    return surrogate + 0.1 * losses.kl_estimate(log_probs, old_log_probs, kind="k3", mask=mask)


LOSSES = {
    "clipped_surrogate": _by_token(losses.clipped_surrogate),
    "clipped_surrogate/dual": _by_token(losses.clipped_surrogate, dual_clip=1.2),
    "grpo": _grpo,
    "reinforce": _reinforce,
    "gspo": functools.partial(losses.gspo, clip_low=0.1, clip_high=0.1),
    "gspo/token": functools.partial(losses.gspo, per_token_gradient=True, clip_low=0.1),
    "gspo/sum": functools.partial(losses.gspo, level="sum", clip_low=0.5, clip_high=0.5),
    "gmpo": losses.gmpo,
    "cispo": _by_token(losses.cispo),
    "sapo": _by_token(losses.sapo),
    "dppo/tv": _by_token(losses.dppo, limit_low=0.1, limit_high=0.1),
    "dppo/kl": _by_token(losses.dppo, divergence="kl", limit_low=0.01, limit_high=0.01),
    "clipped_value_loss": _value_loss,
}


def norm_of(mode: str) -> float | None:
    return 4.0 if mode == "seq_mean_token_sum_norm" else None


def all_weights(mask, segments=None):
    """Weights of every mode, in an axis behind the rows'."""
    weights = [
        losses.token_weights(mask, segments, mode=mode, norm=norm_of(mode)) for mode in AGGREGATIONS
    ]
    return jnp.stack(weights, axis=1)


@functools.cache
def compiled(name: str):
    """Values and gradients of all modes: one sequence a row; packed, in micro-batches."""

    def loss(log_probs, others, mask, segments, weights):
        per_token = LOSSES[name](log_probs, *others, mask=mask, segment_ids=segments)
        return losses.weighted_sum(per_token, weights)

    def by_mode(*arrays):
        """Of rows [n, T] and weights [n, modes, T]: values [modes], gradients [modes, n, T]."""
        return jax.vmap(jax.value_and_grad(loss), (None, None, None, None, 1))(*arrays)

    def run(alone, packed):
        log_probs, *others, mask = alone
        expected = by_mode(log_probs, others, mask, None, all_weights(mask))
        log_probs, *others, mask, segments = packed
        whole = (log_probs, others, mask, segments, all_weights(mask, segments))
        cut = jax.tree.map(lambda x: x.reshape(-1, MICRO, *x.shape[1:]), whole)
        values, gradients = jax.lax.map(lambda rows: by_mode(*rows), cut)
        gradients = jnp.moveaxis(gradients, 1, 0).reshape(-1, ROWS, WIDTH)
        return expected, (jnp.sum(values, axis=0), gradients)

    return jax.jit(run)


def batch(seed: int):
    """Sequences with gaps, some of them without any unmasked token: alone, packed, where they are.

    All that is masked, filler rows included, is NaN.
    """
    rng = np.random.default_rng(seed)
    alone_mask = np.zeros((SEQUENCES, LONGEST), bool)
    packed_mask, segments = np.zeros((ROWS, WIDTH), bool), np.zeros((ROWS, WIDTH), np.int32)
    rows, columns = np.zeros((2, SEQUENCES, LONGEST), int)
    used = np.zeros(ROWS, int)
    for i, length in enumerate(rng.integers(1, LONGEST + 1, SEQUENCES)):
        row = rng.choice(np.flatnonzero(used + length <= WIDTH)[:4])
        rows[i], columns[i] = row, np.minimum(used[row] + np.arange(LONGEST), WIDTH - 1)
        alone_mask[i, :length] = rng.random(length) < rng.choice([0, 0.7, 1], p=[0.1, 0.5, 0.4])
        span = slice(used[row], used[row] + length)
        packed_mask[row, span], segments[row, span] = alone_mask[i, :length], i + 1
        used[row] += length
    old = -rng.random(alone_mask.shape) - 0.1
    new = old + 0.3 * rng.normal(size=old.shape)
    alone = [np.where(alone_mask, x, np.nan) for x in (new, old, rng.normal(size=old.shape))]
    places = rows[alone_mask], columns[alone_mask]
    packed = np.full((3, ROWS, WIDTH), np.nan)
    for x, y in zip(alone, packed, strict=True):
        y[places] = x[alone_mask]
    order = rng.permutation(ROWS)  # filler rows anywhere
    where = np.argsort(order)[places[0]], places[1]
    return (*alone, alone_mask), [x[order] for x in (*packed, packed_mask, segments)], where


@pytest.mark.parametrize("name", LOSSES)
@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_micro_batches_of_packed_rows_equal_the_batch_of_single_sequences(name, seed):
    alone, packed, where = batch(seed)
    mask = alone[-1]
    with jax.enable_x64(True):
        results = compiled(name)(alone, tuple(packed))
        (values, gradients), (value, gradient) = jax.tree.map(np.asarray, results)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
    for i, mode in enumerate(AGGREGATIONS):
        same(value[i], values[i], err_msg=mode)
        same(gradient[i][where], gradients[i][mask], err_msg=mode)
    assert not gradient[:, ~packed[3]].any()
    assert np.isfinite(gradient).all()


def test_a_mean_of_means_is_another_number():
    """What peers compute of micro-batches, so that the test above has something to find."""
    _, packed, _ = batch(1)
    *arrays, mask, segments = packed
    with jax.enable_x64(True):
        per_token = LOSSES["grpo"](*arrays, mask=mask, segment_ids=segments)
        whole = losses.aggregate(per_token, mask, mode="token_mean")
        halves = [
            losses.aggregate(per_token[half], mask[half], mode="token_mean")
            for half in (slice(0, 4), slice(4, 8))
        ]
        assert abs(sum(halves) / 2 - whole) > 1e-3
