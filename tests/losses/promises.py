"""The table behind the promise tests: each public function as one of arrays and a mask.

A case takes per-token arrays and a mask and returns per-token arrays or scalars; functions of rows
or of hidden states are given what they need from those arrays, functions without a mask have their
results masked, as a caller would. One case may speak for several functions (``covers``).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf import losses
from jaxrlhf.losses.distillation import DIVERGENCES
from jaxrlhf.losses.kl import KL_KINDS
from jaxrlhf.losses.masked import AGGREGATIONS
from jaxrlhf.losses.preference import PAIR_LOSSES

ROWS, LENGTH, ARRAYS = 4, 8, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """``differentiated`` of the ``arrays`` first arguments have a gradient, in order."""

    function: Callable[..., Any]
    arrays: int
    differentiated: int
    covers: str = ""  # names of functions, where the case's own name is not one
    skips_masked: bool = True  # False: masked tokens inside a row count as steps
    leading_axes: bool = True  # False: rows are one axis
    empty: float = 0.0  # every result when nothing is unmasked


def _with_mask(function, **options):
    return lambda *arrays: function(*arrays[:-1], mask=arrays[-1], **options)


def _masked(function, **options):
    """For functions without a mask: their result is masked."""

    def call(*arrays):
        outputs = function(*arrays[:-1], **options)
        return jax.tree.map(lambda x: losses.zero_outside(arrays[-1], x), outputs)

    return call


def _on_tokens(function, **options):
    """For results of rows: each token gets its row's."""

    def call(*arrays):
        outputs = function(*arrays, **options)
        return jax.tree.map(lambda x: losses.spread_over_tokens(1.0 * x, arrays[-1]), outputs)

    return call


# --- masks, sums, advantages ----------------------------------------------------------------------


def _weighted_sum(x, weights, mask):
    return losses.weighted_sum(x, jnp.where(mask, weights, 0))


def _sequences(x, mask):
    functions = (losses.sequence_sum, losses.sequence_mean, losses.sequence_max)
    return tuple(losses.zero_outside(mask, function(x, mask)) for function in functions)


def _gae(rewards, values, mask, **options):
    return losses.gae(rewards, values, mask, gamma=0.9, lam=0.8, **options)


def _gae_of_cut_rows(rewards, values, behind, mask):
    bootstrap = losses.masked_sum(behind, mask, axis=-1)
    returns = losses.discounted_returns(rewards, mask, gamma=0.9, bootstrap=bootstrap)
    return *_gae(rewards, values, mask, bootstrap=bootstrap), returns


def _rewards(kl, scores, mask, placement="last_action"):
    """Scores are per row."""
    scores = losses.masked_sum(scores, mask, axis=-1)
    return losses.token_rewards(scores, kl, mask, kl_coef=0.1, placement=placement)


def _groups(first, second, mask):
    """Two groups of rows by the number of their tokens; rows without tokens have no score."""
    counted, lengths = mask.any(-1), mask.sum(-1)
    of_rows = {"group_ids": lengths % 2, "counted": counted}
    scores, parts = (
        jnp.where(counted, losses.masked_mean(x, mask, axis=-1), jnp.nan) for x in (first, second)
    )
    relative = functools.partial(losses.group_relative, scores, **of_rows)
    rows = (
        relative(),
        relative(baseline="leave_one_out", scale="none"),
        relative(baseline="length_weighted", scale="batch", lengths=lengths),
        relative(scale="nonzero_scores"),
        losses.group_best(scores, scale="none", **of_rows),
        losses.group_relative_parts(
            jnp.stack([scores, parts], 1), jnp.array([1.0, 2.0]), **of_rows
        ),
    )
    return tuple(losses.spread_over_tokens(x, mask) for x in rows)


def _remax(rewards, greedy, mask):
    return losses.remax(rewards, losses.masked_sum(greedy, mask, axis=-1), mask, gamma=0.9)


CASES: dict[str, Case] = {
    "masked_sum": Case(losses.masked_sum, 1, 1),
    "masked_mean": Case(losses.masked_mean, 1, 1),
    "masked_var": Case(losses.masked_var, 1, 1),
    "whiten": Case(losses.whiten, 1, 1),
    "whiten/floor": Case(functools.partial(losses.whiten, shift_mean=False, floor=1e-8), 1, 1),
    "zero_outside": Case(lambda x, mask: losses.zero_outside(mask, x), 1, 1),
    "last_action": Case(lambda x, mask: 1.0 * losses.last_action(mask), 1, 0),
    "weighted_sum": Case(_weighted_sum, 2, 1),
    "sequences": Case(_sequences, 1, 1, "sequence_sum sequence_mean sequence_max"),
    "gae/skip": Case(_gae, 2, 0),
    "gae/zero": Case(functools.partial(_gae, masked="zero_value_steps"), 2, 0, skips_masked=False),
    "gae/bootstrap": Case(_gae_of_cut_rows, 3, 0, "gae discounted_returns"),
    "token_rewards": Case(_rewards, 2, 0),
    "spread_over_tokens": Case(_on_tokens(losses.masked_sum, axis=-1), 1, 1),
    "remax": Case(_remax, 2, 0),
    "groups": Case(
        _groups, 2, 0, "group_relative group_best group_relative_parts", leading_axes=False
    ),
    "overlong_penalty": Case(
        _on_tokens(
            lambda x, mask: losses.overlong_penalty(
                losses.masked_sum(x, mask, axis=-1), max_length=20, buffer=40
            )
        ),
        1,
        1,
    ),
}
CASES |= {
    f"aggregate/{mode}": Case(
        functools.partial(losses.aggregate, mode=mode, norm=norm), 1, 1, "aggregate token_weights"
    )
    for mode in AGGREGATIONS
    for norm in [4.0 if mode == "seq_mean_token_sum_norm" else None]
}


# --- policies and critics -------------------------------------------------------------------------


def _value_loss(values, returns, old, mask):
    return losses.clipped_value_loss(values, old, returns, mask=mask)


def _off_policy(log_probs, sampler_log_probs, mask, level="token"):
    pair = (log_probs, sampler_log_probs, mask)
    weights = losses.importance_weights(*pair, level=level)
    bounded = losses.truncate_weights(weights, mask, high=1.5)
    icepop = losses.mask_weights(weights, mask, low=0.7)
    by_sequence = level.startswith("sequence")
    normal = losses.normalize_weights(icepop, mask, level="sequence" if by_sequence else "token")
    kept = losses.rejection_mask(*pair, statistic="sequence_mean", high=0.05)
    kept &= losses.keep_within(log_probs, mask, low=-1.0)
    return bounded, icepop, normal, 1.0 * kept, losses.effective_sample_size(weights, mask)


def _binary_divergences(log_probs, old_log_probs, mask):
    new, old = -jnp.exp(log_probs), -jnp.exp(old_log_probs)
    return tuple(losses.binary_divergence(new, old, kind=k, mask=mask) for k in ("tv", "kl"))


OFF_POLICY = (
    "importance_weights truncate_weights mask_weights normalize_weights rejection_mask "
    "keep_within effective_sample_size"
)
CASES |= {
    "clipped_surrogate": Case(_with_mask(losses.clipped_surrogate), 3, 1),
    "clipped_surrogate/dual": Case(_with_mask(losses.clipped_surrogate, dual_clip=1.5), 3, 1),
    "clipped_value_loss": Case(_value_loss, 3, 1),
    "clip_fractions": Case(_with_mask(losses.clip_fractions), 3, 0),
    "approx_kl": Case(_with_mask(losses.approx_kl), 2, 0),
    "explained_variance": Case(losses.explained_variance, 2, 0),
    "ratio_extremes": Case(losses.ratio_extremes, 2, 0, empty=1.0),
    "log_ratio_between": Case(_with_mask(losses.log_ratio_between, clip=None), 2, 1),
    "finite_log_ratio_rows": Case(_on_tokens(losses.finite_log_ratio_rows), 2, 0),
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
    "binary_divergence": Case(_binary_divergences, 2, 0),
    "entropy_bonus": Case(_with_mask(losses.entropy_bonus, coef=0.1), 1, 1),
    "off_policy": Case(_off_policy, 2, 0, OFF_POLICY),
    "off_policy/sequence": Case(functools.partial(_off_policy, level="sequence"), 2, 0, OFF_POLICY),
}
CASES |= {
    f"kl_estimate/{kind}": Case(_with_mask(losses.kl_estimate, kind=kind), 2, 1)
    for kind in KL_KINDS
}


# --- models ---------------------------------------------------------------------------------------


def _states(*arrays: jax.Array) -> jax.Array:
    """Hidden states that speak, position-aligned, about token t + 1: [..., T + 1, D]."""
    states = jnp.stack(arrays, axis=-1)
    return jnp.concatenate([states, jnp.zeros_like(states[..., :1, :])], axis=-2)


def _matrix(x: jax.Array, mask: jax.Array) -> jax.Array:
    """An output matrix through whose gradient a masked token's hidden state could leak."""
    fixed = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]], x.dtype)
    return fixed * (1 + 0.1 * losses.masked_mean(x, mask)).astype(x.dtype)


def _tokens_of(x: jax.Array) -> jax.Array:
    """Token ids; those of masked tokens change with the garbage there, as the id of padding may."""
    tokens = (x > 0).astype(jnp.int32)
    return jnp.concatenate([jnp.zeros_like(tokens[..., :1]), tokens], axis=-1)


def _of_tokens(mask, tree):
    return jax.tree.map(lambda x: losses.zero_outside(mask, x[..., 1:]), tree)


def _token_log_probs(x, y, mask):
    hidden, matrix = _states(x, y), _matrix(x, mask)
    stats = losses.token_log_probs(hidden, matrix, _tokens_of(x), block_size=4, softcap=3.0)
    mean = losses.mean_token_logits(hidden, matrix)
    return _of_tokens(mask, (stats, mean))


def _dense_token_log_probs(x, y, mask):
    logits = _states(x, y)
    stats = losses.dense_token_log_probs(logits, _tokens_of(x), temperature=0.7)
    return _of_tokens(mask, (stats, losses.align_to_tokens(logits[..., 0])))


def _token_divergence(x, y, ref_x, ref_y, mask, **options):
    ours, theirs = (_states(x, y), _matrix(x, mask)), (_states(ref_x, ref_y), _matrix(ref_x, mask))
    found = losses.token_divergence(*ours, *theirs, block_size=4, **options)
    return _of_tokens(mask, (found, losses.dense_divergence(ours[0], theirs[0], **options)))


CASES |= {
    "token_log_probs": Case(_token_log_probs, 2, 2, "token_log_probs mean_token_logits"),
    "dense_token_log_probs": Case(
        _dense_token_log_probs, 2, 2, "dense_token_log_probs align_to_tokens"
    ),
    "cross_entropy": Case(
        lambda log_probs, logsumexp, mean, mask: losses.cross_entropy(
            log_probs,
            logsumexp=logsumexp,
            z_loss=0.1,
            label_smoothing=0.2,
            mean_logits=mean,
            mask=mask,
        ),
        3,
        3,
    ),
}
CASES |= {
    f"divergence/{kind}": Case(
        functools.partial(_token_divergence, kind=kind), 4, 2, "token_divergence dense_divergence"
    )
    for kind in DIVERGENCES
}


# --- preferences and answers ----------------------------------------------------------------------


def _dpo(*arrays):
    *log_probs, mask = arrays
    smoothing = {"sigmoid": 0.1, "robust": 0.1}
    return tuple(
        losses.dpo(*log_probs, beta=0.1, kind=k, label_smoothing=smoothing.get(k), mask=mask)
        for k in PAIR_LOSSES
    )


def _without_reference(chosen, rejected, mask):
    pair = (chosen - 5, rejected - 5)
    return (
        losses.bradley_terry(*pair, margin=0.5, centring=0.01, label_smoothing=0.1, mask=mask),
        losses.cpo(*pair, beta=0.1, mask=mask),
        losses.simpo(*pair, beta=2.0, margin=1.0, mask=mask),
        losses.orpo(*pair, beta=0.1, mask=mask),
    )


def _kto(log_probs, ref_log_probs, labels, mask):
    point = losses.masked_mean(labels, mask)
    return losses.kto(log_probs, ref_log_probs, labels > 0, point, beta=0.1, mask=mask)


def _implicit(log_probs, ref_log_probs, mask):
    rewards = losses.implicit_rewards(log_probs, ref_log_probs, beta=0.1, mask=mask)
    metrics = losses.pair_metrics(log_probs, ref_log_probs, mask=mask)
    return rewards, metrics, losses.kto_reference_point(log_probs, ref_log_probs, mask=mask)


def _answers(scores, votes, mask):
    best = losses.best_at_k(scores, mask, k=2)
    right = losses.masked_sum(1.0 * (scores > 0), mask, axis=-1)
    passed = losses.pass_at_k(right, 1.0 * mask.sum(-1), k=1)
    vote = losses.majority_vote((votes > 0).astype(jnp.int32), scores, mask)
    rows = (jnp.where(jnp.isnan(best), 0, best), passed, vote)
    spread = tuple(losses.spread_over_tokens(x, mask) for x in rows)
    return *spread, losses.mean_interval(scores, mask)


CASES |= {
    "dpo": Case(_dpo, 4, 2),
    "without_reference": Case(_without_reference, 2, 2, "bradley_terry cpo simpo orpo"),
    "kto": Case(_kto, 3, 1),
    "implicit": Case(_implicit, 2, 0, "implicit_rewards pair_metrics kto_reference_point"),
    "plackett_luce": Case(_on_tokens(_with_mask(losses.plackett_luce)), 1, 1),
    "sequence_log_probs": Case(_on_tokens(losses.sequence_log_probs), 1, 1),
    "sequence_log_probs/average": Case(_on_tokens(losses.sequence_log_probs, average=True), 1, 1),
    "answers": Case(_answers, 2, 0, "best_at_k pass_at_k majority_vote mean_interval"),
}

# Public names without a case, and why.
EXEMPT = {
    "one_past_end": "marks a token outside the mask; test_masked compares it with a loop",
    "init_kl_state": "a scalar; no tokens (test_kl)",
    "fixed_controller": "a state of one scalar; no tokens (test_kl)",
    "adaptive_controller": "a state of one scalar; no tokens (test_kl)",
}


def functions_of(name: str) -> set[str]:
    """The public functions that a case speaks for."""
    return set(CASES[name].covers.split()) or {name.split("/")[0]}


def inputs(seed: int):
    """Log-prob-like arrays near each other (so that both sides of a clip occur), a mask, a probe.

    A row may have no unmasked token, gaps, or no masked token.
    """
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, LENGTH)) < rng.choice([0.0, 0.3, 0.7, 1.0], size=(ROWS, 1))
    base = rng.normal(size=mask.shape)
    arrays = [base + 0.3 * rng.normal(size=mask.shape) for _ in range(ARRAYS)]
    return arrays, mask, rng.normal(size=mask.shape), rng


def total(case: Case, arrays, mask, probe):
    """A scalar that every output takes part in, as a loss would use it, and the outputs."""
    outputs = jax.tree.leaves(case.function(*arrays, mask))
    parts = [jnp.sum(jnp.where(mask, x, 0) * probe) if x.ndim else x for x in outputs]
    return sum(parts), outputs
