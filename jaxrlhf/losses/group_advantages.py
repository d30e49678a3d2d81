"""Advantages of rows relative to their group, by group ids: groups may be uneven or incomplete."""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.losses.advantages import gae
from jaxrlhf.losses.masked import (
    as_float,
    check_boolean,
    check_rows,
    check_shapes,
    masked_var,
    zero_outside,
)

Baseline = Literal["mean", "leave_one_out", "length_weighted"]
Scale = Literal["group", "batch", "none", "nonzero_scores"]


class _Groups(NamedTuple):
    """Rows by group: a slot in 0..B-1 for each row, which rows count, how many in a row's group."""

    slots: jax.Array
    counted: jax.Array
    sizes: jax.Array

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum of x over the counted rows of each row's group, [B]."""
        x = zero_outside(self.counted, x)
        return jax.ops.segment_sum(x, self.slots, num_segments=x.shape[0])[self.slots]

    def max(self, x: jax.Array) -> jax.Array:
        """Greatest x of the counted rows of each row's group, [B]; -inf where none counts."""
        x = jnp.where(self.counted, x, -jnp.inf)
        return jax.ops.segment_max(x, self.slots, num_segments=x.shape[0])[self.slots]


def _groups(scores: jax.Array, group_ids: jax.Array, counted: jax.Array | None) -> _Groups:
    if scores.ndim != 1:
        raise ValueError(f"scores has shape {scores.shape}: give one score a row, [B].")
    for name, x in (("group_ids", group_ids), ("counted", counted)):
        if x is not None and x.shape != scores.shape:
            raise ValueError(f"{name} has shape {x.shape}: give it the scores' {scores.shape}.")
    if counted is None:
        counted = jnp.ones(scores.shape, jnp.bool_)
    check_boolean("counted", counted)
    # Ids may be any integers: slots number the distinct ones in their order.
    order = jnp.argsort(group_ids)
    ids = group_ids[order]
    changes = jnp.concatenate([jnp.zeros_like(ids[:1], jnp.bool_), ids[1:] != ids[:-1]])
    slots = jnp.zeros_like(order).at[order].set(jnp.cumsum(changes, dtype=order.dtype))
    groups = _Groups(slots, counted, jnp.zeros_like(scores))
    return groups._replace(sizes=groups.sum(jnp.ones_like(scores)))


def _deviations(scores: jax.Array, groups: _Groups, weights: jax.Array | None = None) -> jax.Array:
    """Scores less their group's (weighted) mean, 0 for rows that do not count.

    The mean is taken of the distances to the group's greatest score, so that equal scores of any
    value deviate by exactly 0.
    """
    weights = jnp.ones_like(scores) if weights is None else weights
    greatest = groups.max(scores)
    shifted = zero_outside(groups.counted, scores - jnp.where(greatest == -jnp.inf, 0, greatest))
    total = groups.sum(weights)
    offset = groups.sum(weights * shifted) / jnp.where(total > 0, total, 1)
    return zero_outside(groups.counted, shifted - offset)


def _group_std(scores: jax.Array, groups: _Groups, ddof: int) -> jax.Array:
    squares = groups.sum(jnp.square(_deviations(scores, groups)))
    return jnp.sqrt(squares / jnp.maximum(groups.sizes - ddof, 1))


def _scaled(
    advantages: jax.Array, scores: jax.Array, groups: _Groups, scale: str, eps: float, ddof: int
) -> jax.Array:
    if scale not in get_args(Scale):
        raise ValueError(f"scale {scale!r} is unknown: choose one of {', '.join(get_args(Scale))}.")
    if scale == "none":
        return advantages
    counted = groups.counted
    if scale == "nonzero_scores":
        nonzero = jnp.sum(counted & (scores != 0))
        return advantages * jnp.sum(counted) / jnp.maximum(nonzero, 1)
    if scale == "group":
        std = _group_std(scores, groups, ddof)
    else:
        std = jnp.sqrt(masked_var(scores, counted, ddof=ddof))
    # Equal scores have a numerator of exactly 0; only 0 / 0 has to be kept away.
    return advantages / jnp.where(std + eps > 0, std + eps, 1)


def group_relative(
    scores: jax.Array,
    group_ids: jax.Array,
    *,
    counted: jax.Array | None = None,
    baseline: Baseline = "mean",
    lengths: jax.Array | None = None,
    scale: Scale = "group",
    eps: float = 1e-6,
    ddof: int = 1,
) -> jax.Array:
    """Advantage of each row over the rows that answered the same prompt.

    A_i = (s_i - b_i) / (sigma + eps), with the baseline b_i of row i's group of n rows:

    - ``mean``: sum_j s_j / n (GRPO; Dr. GRPO with ``scale="none"``)
    - ``leave_one_out``: sum_{j != i} s_j / (n - 1) (RLOO, with ``scale="none"``)
    - ``length_weighted``: sum_j n_j s_j / sum_j n_j with n_j tokens in row j (OPO, same scale)

    and sigma the standard deviation of the group's scores (``scale="group"``) or of all rows'
    (``"batch"``). ``"none"`` divides by nothing; ``"nonzero_scores"`` by the fraction of rows whose
    score is not 0 (GPG).

    Args:
      scores: float[B], one a row.
      group_ids: i32[B], equal for rows of one group; any integers, in any order.
      counted: bool[B], False for rows that take no part in any statistic and get 0: those without
        action tokens (``mask.any(-1)`` is False) or without a score. None counts all.
      baseline: see above.
      lengths: [B], action tokens of each row; only for ``length_weighted``.
      scale: see above.
      eps: added to sigma.
      ddof: 1 for the unbiased deviation, 0 for the biased one.

    Returns:
      float[B] in at least float32; exactly 0 in a group of one, and in a group of equal scores of
      any value. Put it on tokens by `spread_over_tokens`. Not differentiated: gradients with
      respect to all inputs are 0.

    Raises:
      ValueError: unknown baseline or scale; shapes that do not fit; lengths missing, or given to a
        baseline without them.
      TypeError: ``counted`` is not boolean.

    References: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, RLOO arXiv:2402.14740, OPO
    arXiv:2505.23585, GPG arXiv:2504.02546. eps is 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF
    (``group_norm``). verl keeps the raw score in a group of one and counts rows without tokens as
    a score of 0. A normalisation over the whole batch (TRL's ``normalize_advantages``) is this
    function with equal group_ids.
    """
    if baseline not in get_args(Baseline):
        options = ", ".join(get_args(Baseline))
        raise ValueError(f"baseline {baseline!r} is unknown: choose one of {options}.")
    if (lengths is not None) != (baseline == "length_weighted"):
        raise ValueError("lengths belong to baseline 'length_weighted': give both or neither.")
    scores = as_float(scores)
    groups = _groups(scores, group_ids, counted)
    scores = zero_outside(groups.counted, scores)
    if lengths is not None and lengths.shape != scores.shape:
        raise ValueError(f"lengths has shape {lengths.shape}: give one a row, {scores.shape}.")
    weights = None if lengths is None else lengths.astype(scores.dtype)
    advantages = _deviations(scores, groups, weights)
    if baseline == "leave_one_out":
        advantages = advantages * groups.sizes / jnp.maximum(groups.sizes - 1, 1)
    return lax.stop_gradient(_scaled(advantages, scores, groups, scale, eps, ddof))


def group_best(
    scores: jax.Array,
    group_ids: jax.Array,
    *,
    counted: jax.Array | None = None,
    scale: Scale = "group",
    eps: float = 1e-6,
    ddof: int = 1,
) -> jax.Array:
    """Advantage for the best of each group (pass@k): its lead over the second, others get 0.

    A_i = (s_i - max_{j != i} s_j) / (sigma + eps) where s_i is the group's only maximum, else 0.

    Args:
      scores: float[B], one a row.
      group_ids: i32[B], see `group_relative`, as all that follow.
      counted: bool[B] or None.
      scale: what sigma is.
      eps: added to sigma.
      ddof: 1 for the unbiased deviation, 0 for the biased one.

    Returns:
      float[B] in at least float32; 0 in a group of one and where two rows share the best score.
      Not differentiated.

    Raises:
      ValueError, TypeError: see `group_relative`.

    References: arXiv:2503.19595; verl's ``grpo_passk``.
    """
    scores = as_float(scores)
    groups = _groups(scores, group_ids, counted)
    scores = zero_outside(groups.counted, scores)
    is_best = groups.counted & (scores == groups.max(scores))
    second = groups.max(jnp.where(is_best, -jnp.inf, scores))
    alone = is_best & (groups.sum(is_best) == 1) & (groups.sizes > 1)
    lead = zero_outside(alone, scores - second)
    return lax.stop_gradient(_scaled(lead, scores, groups, scale, eps, ddof))


def group_relative_parts(
    parts: jax.Array,
    weights: jax.Array,
    group_ids: jax.Array,
    *,
    counted: jax.Array | None = None,
    scale: Scale = "group",
    eps: float = 1e-6,
    ddof: int = 1,
) -> jax.Array:
    """Normalise each part of a reward in its group, then add (GDPO): sum_k w_k A_i^(k).

    Unlike the advantage of a summed score, a part of large spread does not drown the others. GDPO
    normalises the sum once more: over rows by `group_relative` with equal ids (TRL, eps 1e-4), or
    over tokens by `whiten` of `spread_over_tokens` (verl; long answers count more).

    Args:
      parts: float[B, K], the parts of each row's reward.
      weights: float[K].
      group_ids: i32[B], see `group_relative`, as all that follow.
      counted: bool[B] or None.
      scale: what each part's deviation is divided by.
      eps: added to sigma.
      ddof: 1 for the unbiased deviation, 0 for the biased one.

    Returns:
      float[B] in at least float32. Not differentiated.

    Raises:
      ValueError, TypeError: see `group_relative`; also parts or weights of other shapes.

    References: arXiv:2601.05242.
    """
    if parts.ndim != 2 or weights.shape != parts.shape[1:]:
        raise ValueError(
            f"parts {parts.shape} and weights {weights.shape} do not fit: give [B, K] and [K]."
        )

    def one(part: jax.Array) -> jax.Array:
        return group_relative(part, group_ids, counted=counted, scale=scale, eps=eps, ddof=ddof)

    per_part = jax.vmap(one, in_axes=1, out_axes=1)(parts)
    return lax.stop_gradient(jnp.sum(per_part * as_float(weights)[None, :], axis=1))


def spread_over_tokens(rows: jax.Array, mask: jax.Array) -> jax.Array:
    """Give every action token the value of its row: where(mask, rows, 0).

    Args:
      rows: float[...], one a row.
      mask: bool[..., T].

    Returns:
      float[..., T] in at least float32, 0 outside the mask.

    Raises:
      ValueError: the shapes do not fit.
      TypeError: the mask is not boolean.
    """
    rows = jnp.asarray(rows)
    check_rows("rows", rows, mask)
    return zero_outside(mask, jnp.broadcast_to(rows[..., None], mask.shape))


def discounted_returns(
    rewards: jax.Array,
    mask: jax.Array,
    *,
    gamma: float | jax.Array = 1.0,
    bootstrap: jax.Array | None = None,
    masked: Literal["skip", "zero_value_steps"] = "skip",
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Reward to go of each action token: R_t = r_t + gamma R_next, next the next action token.

    With `whiten` over the batch these are REINFORCE++'s advantages. Its baseline form whitens
    `spread_over_tokens` of `group_relative` without scale instead.

    Args:
      rewards: float[..., T], per token.
      mask: bool[..., T], True on action tokens.
      gamma: discount in [0, 1], may be traced.
      bootstrap: what the future is worth at the end of a row that was cut off, see `gae`.
      masked: whether tokens outside the mask decay credit, see `gae`.
      segment_ids: of packed rows, see `gae`.

    Returns:
      float[..., T] in at least float32, 0 outside the mask. Not differentiated.

    Raises:
      ValueError, TypeError: see `gae`.

    References: REINFORCE++ arXiv:2501.03262. verl skips masked tokens as here; OpenRLHF is
    ``zero_value_steps``. verl whitens with the unbiased variance, OpenRLHF with ``ddof=0``.
    """
    check_shapes({"rewards": rewards, "mask": mask})
    values = jnp.zeros(mask.shape, as_float(rewards).dtype)
    return gae(
        rewards,
        values,
        mask,
        gamma=gamma,
        lam=1.0,
        bootstrap=bootstrap,
        masked=masked,
        segment_ids=segment_ids,
    )[0]


def remax(
    rewards: jax.Array, greedy_scores: jax.Array, mask: jax.Array, *, gamma: float | jax.Array = 1.0
) -> jax.Array:
    """Reward to go less the score of the greedy answer to the same prompt.

    A_t = R_t - s_greedy.

    Args:
      rewards: float[..., T], per token.
      greedy_scores: float[...], one a row.
      mask: bool[..., T], True on action tokens.
      gamma: discount in [0, 1], may be traced.

    Returns:
      float[..., T] in at least float32, 0 outside the mask. Not differentiated.

    Raises:
      ValueError, TypeError: see `gae` and `spread_over_tokens`.

    References: arXiv:2310.10505.
    """
    check_rows("greedy_scores", jnp.asarray(greedy_scores), mask)
    baselines = lax.stop_gradient(spread_over_tokens(greedy_scores, mask))
    return discounted_returns(rewards, mask, gamma=gamma) - baselines
