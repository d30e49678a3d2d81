"""What every masked function promises, checked on all of them by the same few properties.

A case takes per-token arrays and a mask and returns per-token arrays or scalars. `run` compiles it
once: outputs, and gradients of the outputs' sum with random weights on the unmasked tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses
from jaxrlhf.losses.kl import KL_KINDS
from jaxrlhf.losses.masked import AGGREGATIONS

ROWS, LENGTH = 4, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """``differentiated`` of the ``arrays`` first arguments have a gradient, in order."""

    function: Callable[..., Any]
    arrays: int
    differentiated: int
    skips_masked: bool = True  # False: masked tokens inside a row count as steps


def _gae(rewards, values, mask, **options):
    return losses.gae(rewards, values, mask, gamma=0.9, lam=0.8, **options)


def _rewards(kl, scores, mask, placement="last_action"):
    """Scores are per row: the first unmasked column stands for them."""
    scores = losses.masked_sum(scores, mask, axis=-1)
    return losses.token_rewards(scores, kl, mask, kl_coef=0.1, placement=placement)


def _cross_entropy(log_probs, logsumexp, mask):
    return losses.cross_entropy(log_probs, logsumexp=logsumexp, z_loss=0.1, mask=mask)


def _with_mask(function, **options):
    return lambda *arrays: function(*arrays[:-1], mask=arrays[-1], **options)


CASES: dict[str, Case] = {
    "masked_sum": Case(losses.masked_sum, 1, 1),
    "masked_mean": Case(losses.masked_mean, 1, 1),
    "masked_var": Case(losses.masked_var, 1, 1),
    "whiten": Case(losses.whiten, 1, 1),
    "whiten/floor": Case(functools.partial(losses.whiten, shift_mean=False, floor=1e-8), 1, 1),
    "gae/skip": Case(_gae, 2, 0),
    "gae/zero": Case(functools.partial(_gae, masked="zero_value_steps"), 2, 0, skips_masked=False),
    "clipped_surrogate": Case(_with_mask(losses.clipped_surrogate), 3, 1),
    "clipped_surrogate/dual": Case(_with_mask(losses.clipped_surrogate, dual_clip=1.5), 3, 1),
    "clipped_value_loss": Case(
        lambda values, returns, old, mask: losses.clipped_value_loss(
            values, old, returns, mask=mask
        ),
        3,
        1,
    ),
    "clip_fractions": Case(_with_mask(losses.clip_fractions), 3, 0),
    "approx_kl": Case(_with_mask(losses.approx_kl), 2, 0),
    "explained_variance": Case(losses.explained_variance, 2, 0),
    "token_rewards": Case(_rewards, 2, 0),
    "cross_entropy": Case(_cross_entropy, 2, 2),
}


def _off_policy(log_probs, sampler_log_probs, mask, level="token"):
    pair = (log_probs, sampler_log_probs, mask)
    weights = losses.importance_weights(*pair, level=level)
    bounded = losses.truncate_weights(weights, mask, high=1.5)
    icepop = losses.normalize_weights(losses.mask_weights(weights, mask, low=0.7), mask)
    kept = losses.rejection_mask(*pair, statistic="sequence_mean", high=0.05)
    return bounded, icepop, 1.0 * kept, losses.effective_sample_size(weights, mask)


CASES |= {
    "reinforce": Case(_with_mask(losses.reinforce), 2, 1),
    "gspo": Case(_with_mask(losses.gspo, clip_low=0.1, clip_high=0.1), 3, 1),
    "gspo/sum": Case(_with_mask(losses.gspo, level="sum", clip_high=0.5), 3, 1),
    "gspo/token": Case(
        _with_mask(losses.gspo, per_token_gradient=True, clip_low=0.1, clip_high=0.1), 3, 1
    ),
    "gmpo": Case(_with_mask(losses.gmpo), 3, 1),
    "cispo": Case(_with_mask(losses.cispo), 3, 1),
    "sapo": Case(_with_mask(losses.sapo), 3, 1),
    "dppo/tv": Case(_with_mask(losses.dppo), 3, 1),
    "dppo/kl": Case(_with_mask(losses.dppo, divergence="kl"), 3, 1),
    "entropy_bonus": Case(_with_mask(losses.entropy_bonus, coef=0.1), 1, 1),
    "discounted_returns": Case(functools.partial(losses.discounted_returns, gamma=0.9), 1, 0),
    "off_policy": Case(_off_policy, 2, 0),
    "off_policy/sequence": Case(functools.partial(_off_policy, level="sequence"), 2, 0),
}
CASES |= {
    f"kl_estimate/{kind}": Case(_with_mask(losses.kl_estimate, kind=kind), 2, 1)
    for kind in KL_KINDS
}
CASES |= {
    f"aggregate/{mode}": Case(functools.partial(losses.aggregate, mode=mode, norm=norm), 1, 1)
    for mode in AGGREGATIONS
    for norm in [4.0 if mode == "seq_mean_token_sum_norm" else None]
}


def total(case: Case, arrays, mask, probe):
    """A scalar that every output takes part in, as a loss would use it, and the outputs."""
    outputs = jax.tree.leaves(case.function(*arrays, mask))
    parts = [jnp.sum(jnp.where(mask, x, 0) * probe) if x.ndim else x for x in outputs]
    return sum(parts), outputs


@functools.cache
def run(name: str):
    value_and_gradients = jax.value_and_grad(
        functools.partial(total, CASES[name]), argnums=0, has_aux=True
    )

    def flat(arrays, mask, probe):
        (_, outputs), gradients = value_and_gradients(arrays, mask, probe)
        return outputs, gradients

    return jax.jit(flat)


def compute(name: str, arrays, mask, probe):
    with jax.enable_x64(True):
        results = run(name)(tuple(arrays[: CASES[name].arrays]), mask, probe)
        return jax.tree.map(np.asarray, results)


def inputs(seed: int):
    """Log-prob-like arrays near each other (so that both sides of a clip occur), a mask, a probe.

    A row may have no unmasked token, gaps, or no masked token.
    """
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, LENGTH)) < rng.choice([0.0, 0.3, 0.7, 1.0], size=(ROWS, 1))
    base = rng.normal(size=mask.shape)
    arrays = [base + 0.3 * rng.normal(size=mask.shape) for _ in range(3)]
    return arrays, mask, rng.normal(size=mask.shape), rng


def assert_close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def move(tree, columns):
    """Reorder the columns of every per-token array."""
    return jax.tree.map(lambda x: np.take_along_axis(x, columns, 1) if x.ndim else x, tree)


every_case = pytest.mark.parametrize("name", CASES)
seeds = hypothesis.given(seed=st.integers(0, 2**32 - 1))
quick = hypothesis.settings(max_examples=8, deadline=None)


@every_case
@quick
@seeds
def test_garbage_under_the_mask_leaks_nowhere(name, seed):
    arrays, mask, probe, rng = inputs(seed)
    garbage = rng.choice([np.nan, np.inf, -np.inf, 1e300], size=(3, *mask.shape))
    dirty = [np.where(mask, x, g) for x, g in zip(arrays, garbage, strict=True)]
    outputs, gradients = compute(name, dirty, mask, probe)
    assert_close((outputs, gradients), compute(name, arrays, mask, probe))
    for x in (*outputs, *gradients):
        assert np.isfinite(x).all()
        assert x.ndim == 0 or (x[~mask] == 0).all()


@every_case
def test_what_must_not_be_differentiated_is_not(name):
    arrays, _, probe, _ = inputs(0)
    _, gradients = compute(name, arrays, np.ones((ROWS, LENGTH), bool), probe)
    for i, gradient in enumerate(gradients):
        assert gradient.any() == (i < CASES[name].differentiated)


@every_case
@quick
@seeds
def test_row_order_does_not_matter(name, seed):
    arrays, mask, probe, rng = inputs(seed)
    order = rng.permutation(ROWS)
    expected = jax.tree.map(lambda x: x[order] if x.ndim else x, compute(name, arrays, mask, probe))
    permuted = compute(name, [x[order] for x in arrays], mask[order], probe[order])
    assert_close(permuted, expected)


@every_case
@quick
@seeds
def test_mask_is_a_subset_wherever_the_padding_stands(name, seed):
    """Unmasked tokens pushed to the left end, or to the right end, of rows full of NaN."""
    arrays, mask, probe, _ = inputs(seed)
    if not CASES[name].skips_masked:
        mask = np.sort(mask, axis=1)  # no gaps: padding alone may move
    arrays = [np.where(mask, x, np.nan) for x in arrays]
    expected = compute(name, arrays, mask, probe)
    for side in (~mask, mask):
        columns = np.argsort(side, axis=1, kind="stable")
        moved = compute(name, *move((arrays, mask, probe), columns))
        assert_close(moved, move(expected, columns))


@every_case
def test_amount_of_padding_and_eager_mode_change_nothing(name):
    arrays, mask, probe, _ = inputs(3)
    arrays, mask, probe = (
        [np.where(mask, x, np.nan)[:, :6] for x in arrays], mask[:, :6], probe[:, :6]
    )  # fmt: skip
    wide = [np.pad(x, ((0, 0), (0, 2)), constant_values=np.inf) for x in arrays]
    pad = functools.partial(np.pad, pad_width=((0, 0), (0, 2)))
    expected, _ = compute(name, wide, pad(mask), pad(probe))
    with jax.enable_x64(True):
        taken = [jnp.asarray(x) for x in arrays[: CASES[name].arrays]]
        outputs = jax.tree.leaves(CASES[name].function(*taken, jnp.asarray(mask)))
        outputs = jax.tree.map(np.asarray, outputs)
    assert_close(outputs, [x[:, :6] if x.ndim else x for x in expected])


@every_case
def test_vmap_equals_one_batch_after_the_other(name):
    batches = [inputs(seed)[:3] for seed in (1, 2)]
    expected = [compute(name, *batch)[0] for batch in batches]
    arrays, mask, _ = jax.tree.map(lambda *x: np.stack(x), *batches)
    taken = arrays[: CASES[name].arrays]
    with jax.enable_x64(True):
        mapped = jax.jit(jax.vmap(CASES[name].function))(*taken, mask)
        mapped = jax.tree.map(np.asarray, jax.tree.leaves(mapped))
    assert_close(mapped, [np.stack(x) for x in zip(*expected, strict=True)])


@every_case
def test_float32_and_bfloat16_inputs_give_float32(name):
    arrays, mask, _, _ = inputs(4)
    for dtype in (jnp.float32, jnp.bfloat16):
        taken = [jnp.asarray(x, dtype) for x in arrays[: CASES[name].arrays]]
        outputs = jax.tree.leaves(jax.eval_shape(CASES[name].function, *taken, mask))
        assert {x.dtype for x in outputs} == {np.dtype(np.float32)}


def test_hyper_parameters_are_traced():
    """One program for all values; each value has an effect; 0 is a value."""
    arrays, mask, _, _ = inputs(5)
    x, y, z = (jnp.asarray(a, jnp.float32) for a in arrays)
    hidden, matrix = jnp.ones((1, 3, 2)), jnp.array([[1.0, 0], [0, 2]])
    traces = []

    @jax.jit
    def step(hyper):
        traces.append(1)
        kl = losses.kl_estimate(x, y, kind="k3", clip=hyper["log_ratio_clip"], mask=mask)
        scores = losses.masked_mean(z, mask, axis=-1)
        clips = {"clip_low": hyper["clip_low"], "clip_high": hyper["clip_high"]}
        surrogate = functools.partial(losses.clipped_surrogate, x, y, z, mask=mask, **clips)
        state = losses.adaptive_controller(
            losses.init_kl_state(hyper["kl_coef"]), 0.11, 64,
            target=hyper["target"], horizon=hyper["horizon"],
        )  # fmt: skip
        outputs = {
            "gae": losses.gae(x, y, mask, gamma=hyper["gamma"], lam=hyper["lam"]),
            "rewards": losses.token_rewards(scores, kl, mask, kl_coef=hyper["kl_coef"]),
            "surrogate": surrogate(log_ratio_clip=hyper["log_ratio_clip"]),
            "dual": surrogate(dual_clip=hyper["dual_clip"]),
            "value": losses.clipped_value_loss(x, y, z, value_clip=hyper["value_clip"], mask=mask),
            "fractions": losses.clip_fractions(x, y, z, mask=mask, **clips),
            "log_probs": losses.token_log_probs(
                hidden, matrix, jnp.zeros((1, 3), jnp.int32), temperature=hyper["temperature"]
            ),
            "z_loss": losses.cross_entropy(x, logsumexp=y, z_loss=hyper["z_loss"], mask=mask),
            "weights": losses.token_weights(
                mask, mode="seq_mean_token_sum_norm", norm=hyper["norm"]
            ),
            "controller": state,
        }
        return jnp.stack([jnp.sum(v) for v in jax.tree.leaves(outputs)])

    usual = {
        "gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "clip_low": 0.1, "clip_high": 0.2,
        "dual_clip": 1.1, "value_clip": 0.05, "log_ratio_clip": 0.4, "temperature": 1.0,
        "z_loss": 0.1, "norm": 4.0, "target": 0.1, "horizon": 1000.0,
    }  # fmt: skip
    usual = {name: jnp.float32(value) for name, value in usual.items()}
    base = step(usual)
    assert np.isfinite(base).all()
    for name in usual:
        changed = step(usual | {name: usual[name] * 0.5})
        assert (changed != base).any(), name
    zero_is_fine = set(usual) - {"temperature", "norm", "target", "horizon"}
    assert np.isfinite(step(usual | dict.fromkeys(zero_is_fine, jnp.float32(0)))).all()
    assert len(traces) == 1
