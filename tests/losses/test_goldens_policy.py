"""Golden numbers of group advantages, policy losses, off-policy correction, length penalties."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses

spec = importlib.util.spec_from_file_location(
    "goldens", pathlib.Path(__file__).with_name("goldens.py")
)
goldens = importlib.util.module_from_spec(spec)
spec.loader.exec_module(goldens)

Arrays, Case = goldens.Arrays, goldens.Case
assert_case, assert_close = goldens.assert_case, goldens.assert_close
value_and_grads, family, MODES = goldens.value_and_grads, goldens.family, goldens.MODES

# Families for which jaxrlhf.losses has no function yet. Take one out when its check is written.
NOT_YET: set[str] = set()

# Families that peers have and jaxrlhf.losses will not.
NOT_PLANNED = {
    "verl/advantages/optimal_token_baseline": "token baselines",
    "verl/advantages/tir_optimal_token_baseline": "token baselines",
    "verl/log_probs/sum_pi_squared": "token baselines",
    "verl/policy/dro": "quadratic penalty of the log-ratio",
    "trl/policy/vespo": "gamma-weighted sequence ratio",
    "trl/policy/luspo": "gspo summed over tokens",
    "trl/policy/grpo_top_entropy": "picks tokens by a quantile of the micro-batch",
    "openrlhf/overlong/stop_properly_0.3": "an arithmetic of scores by finish reason",
    "openrlhf/overlong/stop_properly_-0.5": "an arithmetic of scores by finish reason",
}

# Cases (or families) whose function we have and whose number no keyword of ours gives.
DIFFERENT = {
    **dict.fromkeys(
        (
            "verl/advantages/grpo/constant",
            "verl/advantages/grpo_vectorized/constant",
            "trl/advantages/grpo_group/constant",
            "trl/advantages/grpo_batch/constant",
            "openrlhf/advantages/group_norm/constant",
            "openrlhf/advantages/group_norm/constant_kl",
        ),
        "equal scores leave a residue over a tiny deviation; ours is 0",
    ),
    "verl/policy/gspo/extreme": "verl bounds the mean log-ratio from above alone",
    "trl/policy/gmpo/empty_row": "a row without tokens adds its advantage, at a ratio of 1",
    "trl/policy/rloo/empty_row": "a row without tokens adds its advantage, at a ratio of 1",
    "trl/policy/rloo/bfloat16": "in bfloat16 a whole row falls on the other side of a bound",
    "openrlhf/policy/gspo/rollout_as_old": "the ratio is to the rollout's log-probs: pass those",
}

ACCOUNT = goldens.Account(NOT_YET, NOT_PLANNED, DIFFERENT)
checks = ACCOUNT.check


# --- advantages -----------------------------------------------------------------------------------


def _to_compare(name: str, case: Case, x: Arrays, ours: jax.Array) -> tuple[Case, jax.Array]:
    """With a row that has no tokens, ours must be what verl gives without that row."""
    if "empty_row" not in name or "dropped" in name:
        return case, ours
    dropped = goldens.CASES[name.replace("empty_row", "empty_row_dropped")]
    return dropped, ours[np.asarray(x["mask"].any(-1))]


def _raw_in_groups_of_one(x: Arrays, scores: jax.Array) -> jax.Array:
    """What verl adds: a group of one keeps its score, where ours gives 0."""
    ids, counted = np.asarray(x["group_ids"]), np.asarray(x["mask"].any(-1))
    sizes = np.array([np.sum(counted & (ids == i)) for i in ids])
    return jnp.where(sizes == 1, scores, 0.0)


VERL_GROUP = {
    "grpo": {},
    "grpo_vectorized": {},
    "dr_grpo": {"scale": "none"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "rloo_vectorized": {"baseline": "leave_one_out", "scale": "none"},
    "opo": {"baseline": "length_weighted", "scale": "none"},
    "gpg": {"scale": "nonzero_scores"},
    "reinforce_plus_plus_baseline": {"scale": "none"},
}


@checks(*(f"verl/advantages/{kind}" for kind in VERL_GROUP))
def check_verl_group(name: str, case: Case, x: Arrays) -> None:
    kind, mask = name.split("/")[2], x["mask"]
    counted, options = mask.any(-1), VERL_GROUP[kind]
    if kind == "opo":
        options = options | {"lengths": mask.sum(-1)}
    rows = losses.group_relative(x["scores"], x["group_ids"], counted=counted, **options)
    if kind != "rloo_vectorized":
        raw = _raw_in_groups_of_one(x, x["scores"])
        scale = len(rows) / jnp.sum(x["scores"] != 0) if kind == "gpg" else 1.0
        rows = rows + raw * scale
    ours = losses.spread_over_tokens(rows, mask)
    if kind == "reinforce_plus_plus_baseline":
        ours = losses.whiten(ours, mask)
    case, ours = _to_compare(name, case, x, ours)
    assert_case(case, {"advantages": ours})


@checks("verl/advantages/grpo_passk")
def check_best_of_group(name: str, case: Case, x: Arrays) -> None:
    scale = "group" if case["arguments"]["config"]["norm_adv_by_std_in_grpo"] else "none"
    rows = losses.group_best(x["scores"], x["group_ids"], scale=scale)
    assert_case(case, {"advantages": losses.spread_over_tokens(rows, x["mask"])})


@checks("verl/advantages/gdpo")
def check_verl_gdpo(name: str, case: Case, x: Arrays) -> None:
    weights = jnp.array(case["arguments"]["weights"])
    rows = losses.group_relative_parts(
        x["parts"], weights, x["group_ids"], counted=x["mask"].any(-1)
    )
    rows = rows + _raw_in_groups_of_one(x, x["parts"] @ weights)
    ours = losses.whiten(losses.spread_over_tokens(rows, x["mask"]), x["mask"])
    case, ours = _to_compare(name, case, x, ours)
    assert_case(case, {"advantages": ours})


@checks("verl/advantages/reinforce_plus_plus")
def check_reinforce_plus_plus(name: str, case: Case, x: Arrays) -> None:
    gamma = case["arguments"]["config"]["gamma"]
    returns = losses.discounted_returns(x["token_rewards"], x["mask"], gamma=gamma)
    advantages = losses.whiten(returns, x["mask"])
    dropped, returns = _to_compare(name, case, x, returns)
    _, advantages = _to_compare(name, case, x, advantages)
    assert_case(dropped, {"advantages": advantages, "returns": returns})


@checks("verl/advantages/remax")
def check_remax(name: str, case: Case, x: Arrays) -> None:
    """verl's returns also stand outside the mask: not compared."""
    ours = {
        "advantages": losses.remax(x["token_rewards"], x["baselines"], x["mask"]),
        "returns": losses.discounted_returns(x["token_rewards"], x["mask"]),
    }
    for label, value in ours.items():
        inside = np.where(x["mask"], np.asarray(case["value"][label]), 0.0)
        assert_close(value, inside, case, label)


def _normalized_over_rows(rows: jax.Array, counted: jax.Array) -> jax.Array:
    return losses.group_relative(
        rows, jnp.zeros(rows.shape, jnp.int32), counted=counted, scale="batch", eps=1e-4
    )


@checks(
    *(
        f"trl/advantages/{kind}"
        for kind in (
            "grpo_group", "grpo_batch", "grpo_none", "grpo_parts", "gdpo", "gdpo_equal", "rloo",
            "rloo_normalized", "rloo_kl", "rloo_clipped", "grpo_unscored_row",
            "rloo_unscored_row", "grpo_group_of_one",
        )
    )
)  # fmt: skip
def check_trl_advantages(name: str, case: Case, x: Arrays) -> None:
    """TRL's groups are consecutive; an unscored row does not count; eps is 1e-4."""
    a, scores = case["arguments"], x["scores"]
    ids = jnp.arange(len(scores)) // a["num_generations"]
    counted = jnp.arange(len(scores)) != a.get("unscored_row", -1)
    scores = jnp.where(counted, scores, jnp.nan)
    if a["rewards"] == "parts":
        scores = x["parts"].sum(-1)
    if "reward_clip_range" in a:
        scores = jnp.clip(scores, *a["reward_clip_range"])
    if "beta" in a:
        tokens = jnp.arange(10)[None] < x["mask"].sum(-1, keepdims=True)
        kl = losses.kl_estimate(x["log_probs"], x["ref_log_probs"], clip=None, mask=tokens)
        scores = scores - a["beta"] * kl.sum(-1)
    if "gdpo" in name:
        weights = jnp.array(a["reward_weights"])
        rows = losses.group_relative_parts(x["parts"], weights, ids, eps=1e-4)
    elif "rloo" in name:
        rows = losses.group_relative(
            scores, ids, counted=counted, baseline="leave_one_out", scale="none"
        )
    else:
        scale = a.get("scale_rewards", "group")
        rows = losses.group_relative(scores, ids, counted=counted, scale=scale, eps=1e-4)
    if "gdpo" in name or a.get("normalize_advantages"):
        rows = _normalized_over_rows(rows, counted)
    assert_case(case, rows)


@checks("openrlhf/advantages/cumulative_returns")
def check_cumulative_returns(name: str, case: Case, x: Arrays) -> None:
    ours = losses.discounted_returns(
        x["rewards"], x["mask"], gamma=case["arguments"]["gamma"], masked="zero_value_steps"
    )
    assert_case(case, {"returns": ours})


OPENRLHF_GROUP = {
    "reinforce": None,
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "reinforce_baseline": {"scale": "none"},
    "dr_grpo": {"scale": "none"},
    "group_norm": {"eps": 1e-9},
    "flash_reinforce": {"scale": "none"},
}


@checks(*(f"openrlhf/advantages/{kind}" for kind in OPENRLHF_GROUP))
def check_openrlhf_advantages(name: str, case: Case, x: Arrays) -> None:
    """flash_reinforce's baseline is the mean of the batch: one group."""
    a, mask, scores = case["arguments"], x["mask"], x["scores"]
    options = OPENRLHF_GROUP[a["estimator"]]
    if options is not None:
        ids = x["group_ids"] * (a["estimator"] != "flash_reinforce")
        scores = losses.group_relative(scores, ids, **options)
    rewards = losses.token_rewards(scores, x["kl"], mask, kl_coef=a["kl_coef"])
    returns = losses.discounted_returns(rewards, mask, gamma=a["gamma"], masked="zero_value_steps")
    advantages = returns
    if a["estimator"].startswith("reinforce"):
        advantages = losses.whiten(returns, mask, ddof=0, floor=1e-8)
        if a["no_std_norm"]:
            advantages = losses.zero_outside(mask, returns - losses.masked_mean(returns, mask))
    assert_case(case, {"advantages": advantages, "returns": returns})


# --- policy losses --------------------------------------------------------------------------------


def _check_policy(case: Case, x: Arrays, per_token, mode: str, scale: jax.Array | float = 1.0):
    """Aggregate a per-token loss of the log-probs by ``mode`` and compare with gradients."""

    def loss(leaves):
        return scale * losses.aggregate(per_token(leaves["log_probs"]), x["mask"], mode=mode)

    value, grads = value_and_grads(loss, {"log_probs": x["log_probs"]})
    assert_case(case, value, {**grads, "entropy": jnp.zeros_like(value)})


def _rollout_weights(x: Arrays) -> jax.Array:
    weights = losses.importance_weights(x["old_log_probs"], x["rollout_log_probs"], x["mask"])
    return losses.truncate_weights(weights, x["mask"], high=2.0)


def _clip_of_verl(a: Case) -> dict[str, float]:
    both = a.get("clip_ratio", 0.2)
    return {
        "clip_low": a.get("clip_ratio_low", both), "clip_high": a.get("clip_ratio_high", both)
    }  # fmt: skip


VERL_POLICY = {
    "dppo_tv": functools.partial(losses.dppo, divergence="tv"),
    "dppo_kl": functools.partial(losses.dppo, divergence="kl"),
    "gspo": functools.partial(losses.gspo, per_token_gradient=True, log_ratio_clip=10.0),
    "sapo": losses.sapo,
    "gpg": lambda log_probs, old, advantages, mask: losses.reinforce(
        log_probs, advantages, mask=mask
    ),
    "geo_mean": losses.gmpo,
    "cispo": losses.cispo,
}


@checks(*(f"verl/policy/{kind}" for kind in VERL_POLICY))
def check_verl_policy(name: str, case: Case, x: Arrays) -> None:
    """verl's geo_mean divides by all rows, and takes the geometric mean of rollout weights."""
    a, mask, kind = case["arguments"], x["mask"], name.split("/")[2]
    clip = _clip_of_verl(a)
    options = {
        "sapo": {"temperature_pos": a.get("tau_pos"), "temperature_neg": a.get("tau_neg")},
        "gpg": {},
    }.get(kind, clip)
    if kind.startswith("dppo"):
        options = {"limit_low": clip["clip_low"], "limit_high": clip["clip_high"]}
        options["max_ratio"] = a["clip_ratio_c"]
    weights = _rollout_weights(x) if "rollout_is_weights" in a else 1.0
    if kind == "geo_mean" and "rollout_is_weights" in a:
        logs = jnp.log(jnp.where(mask, weights, 1.0))
        weights = jnp.exp(losses.sequence_mean(logs, mask))
    function = functools.partial(VERL_POLICY[kind], mask=mask, **options)
    scale = jnp.mean(mask.any(-1)) if kind == "geo_mean" else 1.0
    _check_policy(
        case,
        x,
        lambda z: weights * function(z, x["old_log_probs"], x[a["advantages"]]),
        MODES[a["loss_agg_mode"]],
        scale,
    )


TRL_POLICY = {
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "sapo_temperatures": losses.sapo,
    "gspo": losses.gspo,
    "gspo_token": functools.partial(losses.gspo, per_token_gradient=True),
    "gmpo": losses.gmpo,
    "rloo": functools.partial(losses.gspo, level="sum"),
}


@checks(*(f"trl/policy/{kind}" for kind in TRL_POLICY))
def check_trl_policy(name: str, case: Case, x: Arrays) -> None:
    """TRL bounds no log-ratio; its means over rows count empty rows as 0."""
    a, mask, kind = case["arguments"], x["mask"], name.split("/")[2]
    options = {"clip_low": a.get("epsilon_low", 0.2), "clip_high": a.get("epsilon_high", 0.2)}
    if kind.startswith("sapo"):
        options = {"temperature_pos": a.get("sapo_temperature_pos", 1.0)}
    if kind == "cispo":
        options = {"clip_high": a["epsilon_high"] - 1}
    if kind != "gmpo":
        options["log_ratio_clip"] = None
    function = functools.partial(TRL_POLICY[kind], mask=mask, **options)
    advantages = x[a.get("advantages", "sequence_advantages")]
    by_tokens = kind == "cispo"
    _check_policy(
        case,
        x,
        lambda z: function(z, x["old_log_probs"], advantages),
        "token_mean" if by_tokens else "seq_mean_token_mean",
        1.0 if by_tokens else jnp.mean(mask.any(-1)),
    )


@checks("openrlhf/policy/gspo")
def check_openrlhf_gspo(name: str, case: Case, x: Arrays) -> None:
    function = functools.partial(
        losses.gspo, mask=x["mask"], clip_low=0.2, clip_high=0.2, log_ratio_clip=None
    )
    _check_policy(
        case,
        x,
        lambda z: function(z, x["old_log_probs"], x["sequence_advantages"]),
        "seq_mean_token_mean",
    )


@checks("verl/policy/reinforce")
def check_reinforce(name: str, case: Case, x: Arrays) -> None:
    function = functools.partial(losses.reinforce, advantages=x["advantages"], mask=x["mask"])
    _check_policy(case, x, function, MODES[case["arguments"]["loss_agg_mode"]])


@checks("verl/overlong/dapo", "openrlhf/overlong/dapo", "trl/overlong/soft")
def check_overlong(name: str, case: Case, x: Arrays) -> None:
    factor = 1.0 if name.startswith("trl") else 0.5
    ours = losses.overlong_penalty(
        jnp.array(case["value"]["lengths"]),
        max_length=8,
        buffer=4,
        factor=factor,
        capped=not name.startswith("verl"),
    )
    assert_case(case, {"penalties": ours})


# --- correction between sampler and trainer -------------------------------------------------------


def _band(threshold: object) -> tuple[float | None, float | None]:
    """verl writes two bounds as "low_high"; a number is the upper bound."""
    if isinstance(threshold, str) and "_" in threshold:
        low, high = threshold.split("_")
        return float(low), float(high)
    return None, float(threshold)


@checks("verl/off_policy/weights")
def check_verl_weights(name: str, case: Case, x: Arrays) -> None:
    """verl normalises, and takes the effective sample size, after truncation or masking."""
    a, mask = case["arguments"], x["mask"]
    weights = losses.importance_weights(
        x["log_probs"], x["rollout_log_probs"], mask, level=a["rollout_is"]
    )
    low, high = _band(a["rollout_is_threshold"])
    bound = losses.truncate_weights if low is None else losses.mask_weights
    weights = bound(weights, mask, low=low, high=high)
    if a["rollout_is_batch_normalize"]:
        weights = losses.normalize_weights(weights, mask, level=a["rollout_is"])
    assert_case(case, weights)


def _rejected_as_verl(x: Arrays, options: str, thresholds: object) -> jax.Array:
    """Bounds of k1 are ratios of sampler to trainer in verl, their logarithms here."""
    mask = kept = x["mask"]
    values = str(thresholds).split(",") if "," in options else [thresholds]
    for option, threshold in zip(options.split(","), values, strict=True):
        level, kind = option.rsplit("_", 1)
        low, high = _band(threshold)
        if kind == "k1":
            low, high = np.log(low), np.log(high)
        kept &= losses.rejection_mask(
            x["log_probs"],
            x["rollout_log_probs"],
            mask,
            kind=kind,
            statistic=level.replace("seq", "sequence"),
            low=low,
            high=high,
        )
    return kept


@checks("verl/off_policy/rejection")
def check_verl_rejection(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]
    kept = _rejected_as_verl(x, a["rollout_rs"], a["rollout_rs_threshold"])
    assert_case(case, kept.astype(jnp.float32))


@checks("verl/policy/bypass_mode")
def check_verl_bypass(name: str, case: Case, x: Arrays) -> None:
    """verl's weights are of the policy that is trained; rejected tokens leave the count."""
    a, mask = case["arguments"], x["mask"]
    if a.get("rollout_rs"):
        mask = _rejected_as_verl(x, a["rollout_rs"], a["rollout_rs_threshold"])
    weights = 1.0
    if a["rollout_is"]:
        weights = losses.importance_weights(
            x["log_probs"], x["rollout_log_probs"], x["mask"], level=a["rollout_is"]
        )
        weights = losses.truncate_weights(weights, x["mask"], high=a["rollout_is_threshold"])

    def per_token(z):
        if a["loss_type"] == "reinforce":
            return weights * losses.reinforce(z, x["advantages"], mask=mask)
        return losses.clipped_surrogate(
            z, x["rollout_log_probs"], x["advantages"], dual_clip=3.0, mask=mask
        )

    _check_policy(case, x | {"mask": mask}, per_token, MODES[a["loss_agg_mode"]])


@checks(
    *(
        f"trl/off_policy/{level}_{mode}"
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    )
)
def check_trl_weights(name: str, case: Case, x: Arrays) -> None:
    """TRL's weights outside the mask are not compared; those of a sequence are one a row."""
    a, mask = case["arguments"], x["mask"]
    level, mode = a["mode"].split("_")
    weights = losses.importance_weights(
        x["log_probs"], x["rollout_log_probs"], mask, level=level, log_ratio_clip=None
    )
    bound = losses.truncate_weights if mode == "truncate" else losses.mask_weights
    ours = bound(weights, mask, low=a["clip_min"], high=a["clip_max"])
    theirs = np.where(mask, np.broadcast_to(np.asarray(case["value"]), mask.shape), 0.0)
    assert_close(ours, theirs, case, "weights")


@checks("trl/policy/grpo_off_policy_mask")
def check_trl_off_policy_mask(name: str, case: Case, x: Arrays) -> None:
    """Rejected rows keep their place in the count: their losses are 0."""
    a, mask = case["arguments"], x["mask"]
    kept = losses.rejection_mask(
        x["log_probs"],
        x["rollout_log_probs"],
        mask,
        kind="k1",
        statistic="sequence_mean",
        high=a["off_policy_mask_threshold"],
    )
    kept |= mask & (x["sequence_advantages"] >= 0)
    function = functools.partial(
        losses.clipped_surrogate, mask=kept, clip_low=0.2, clip_high=0.2, log_ratio_clip=None
    )
    _check_policy(
        case,
        x,
        lambda z: function(z, x["old_log_probs"], x["sequence_advantages"]),
        "token_mean",
    )


@checks(
    *(
        f"openrlhf/policy/correction_{kind}"
        for kind in (
            "token_mask_ratio", "token_clip_ratio", "seq_mask_ratio", "token_mask_binary_kl",
            "seq_mask_binary_kl", "token_mask_tv", "seq_mask_tv",
        )
    )
)  # fmt: skip
def check_openrlhf_correction(name: str, case: Case, x: Arrays) -> None:
    """A gate on ratio or divergence, by token or mean of the row, times the token's weight."""
    a, mask = case["arguments"], x["mask"]
    pair = (x["old_log_probs"], x["rollout_log_probs"])
    low, high = a["is_correction_threshold"]
    weights = losses.importance_weights(*pair, mask, log_ratio_clip=None)
    level = "token" if a["is_correction_level"] == "token" else "sequence_mean"
    if a["is_correction_gating"] == "ratio":
        gated = losses.importance_weights(*pair, mask, level=level, log_ratio_clip=None)
        kept = losses.keep_within(gated, mask, low=low, high=high)
    else:
        kind = a["is_correction_gating"].removeprefix("binary_")
        distance = losses.binary_divergence(*pair, kind=kind, mask=mask)
        kept = losses.keep_within(distance, mask, low=low, high=high, statistic=level)
    if a["is_correction_mode"] == "clip":
        weights, kept = losses.truncate_weights(weights, mask, low=low, high=high), mask
    function = functools.partial(losses.clipped_surrogate, mask=kept)
    _check_policy(
        case,
        x,
        lambda z: weights * function(z, x["old_log_probs"], x["advantages"]),
        "token_mean",
    )


@checks("verl/off_policy/metrics")
def check_verl_off_policy_metrics(name: str, case: Case, x: Arrays) -> None:
    """kl and k3_kl are of sampler to trainer; chi2 is the second moment of weights, less 1."""
    mask, theirs = x["mask"], case["value"]
    pair = (x["rollout_log_probs"], x["log_probs"])
    ours = {
        label: losses.masked_mean(losses.kl_estimate(*pair, kind=kind, clip=None, mask=mask), mask)
        for label, kind in (("kl", "k1"), ("k3_kl", "k3"))
    }
    weights = losses.importance_weights(x["log_probs"], x["rollout_log_probs"], mask)
    ours["chi2_token"] = losses.masked_mean(jnp.square(weights), mask) - 1
    for label, value in ours.items():
        assert_close(value, theirs[label], case, label)


@pytest.mark.parametrize("golden_family", ACCOUNT.families())
def test_golden(golden_family):
    ACCOUNT.run_family(golden_family)


@pytest.mark.parametrize("name", ACCOUNT.differences())
def test_a_difference_is_still_one(name):
    ACCOUNT.run_difference(name)
