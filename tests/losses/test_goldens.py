"""Our losses against the numbers of verl, TRL and OpenRLHF in third_party/goldens.

A golden case is checked by a function registered in the account of one test file: here, in
test_goldens_policy.py or in test_goldens_preference.py; or a table there says why not (see
`goldens.Account`). `test_no_golden_is_forgotten` fails otherwise. What the peers do differently
and a keyword argument expresses is in the call that each check makes.
"""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import losses


def _load(file: str):
    path = pathlib.Path(__file__).with_name(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


goldens = _load("goldens.py")
CASES, FILES = goldens.CASES, goldens.FILES
Arrays, Case = goldens.Arrays, goldens.Case
assert_case, assert_close = goldens.assert_case, goldens.assert_close
value_and_grads, family, MODES = goldens.value_and_grads, goldens.family, goldens.MODES

# Cases (or families) whose function we have and whose number no keyword of ours gives.
DIFFERENT = {
    "openrlhf/kl/k1_unbiased_weighted": "the gradient is weighted by the ratio to old log-probs",
    "openrlhf/kl/k2_unbiased_weighted": "the gradient is weighted by the ratio to old log-probs",
    "openrlhf/kl/k3_unbiased_weighted": "the gradient is weighted by the ratio to old log-probs",
}

ACCOUNT = goldens.Account(different=DIFFERENT)
checks = ACCOUNT.check


# --- masked statistics, aggregation -------------------------------------------------------------


@checks("verl/masked/whiten", "verl/masked/whiten_keep_mean")
@checks("trl/masked/whiten", "trl/masked/whiten_keep_mean")
def check_whiten(name: str, case: Case, x: Arrays) -> None:
    shift = case["arguments"]["shift_mean"]
    ours = value_and_grads(
        lambda z: losses.whiten(z["per_token"], x["mask"], shift_mean=shift),
        {"per_token": x["per_token"]},
        x["entropy"],
    )
    assert_case(case, *ours)


@checks("verl/masked/var", "verl/masked/var_biased")
def check_variance(name: str, case: Case, x: Arrays) -> None:
    ddof = 1 if case["arguments"]["unbiased"] else 0
    assert_case(
        case,
        *value_and_grads(
            lambda z: losses.masked_var(z["per_token"], x["mask"], ddof=ddof),
            {"per_token": x["per_token"]},
        ),
    )


@checks("verl/masked/mean_rows")
def check_mean_of_rows(name: str, case: Case, x: Arrays) -> None:
    assert_case(
        case,
        *value_and_grads(
            lambda z: losses.masked_mean(z["per_token"], x["mask"], axis=-1),
            {"per_token": x["per_token"]},
        ),
    )


@checks("openrlhf/masked/normalize_dim_1", "openrlhf/masked/normalize_dim_0")
def check_whiten_rows(name: str, case: Case, x: Arrays) -> None:
    """OpenRLHF normalises each row (or column): whiten with ddof=0 and a floor, mapped."""
    axis = 1 - case["arguments"]["dim"]
    whiten = functools.partial(losses.whiten, ddof=0, floor=1e-8)
    ours = jax.vmap(whiten, in_axes=axis, out_axes=axis)(x["per_token"], x["mask"])
    assert_case(case, ours)


def _global_scale(arguments: Case, x: Arrays, mode: str) -> float:
    """Peers that are given the whole batch's counts: weights made on that batch, times its ranks.

    Here the micro-batch is at hand alone, so its own normaliser is exchanged for theirs.
    """
    ranks = arguments.get("dp_size", 1)
    if arguments.get("batch_num_tokens") and mode == "token_mean":
        return ranks * float(x["mask"].sum()) / arguments["batch_num_tokens"]
    if arguments.get("global_batch_size") and mode.startswith("seq"):
        return ranks * float(x["mask"].any(-1).sum()) / arguments["global_batch_size"]
    return 1.0


@checks(
    *(f"verl/aggregate/{mode}" for mode in MODES),
    "verl/aggregate/seq-mean-token-sum-norm-default",
    "verl/aggregate/token-mean-global",
    "verl/aggregate/seq-mean-token-mean-global",
    *(f"openrlhf/aggregate/{kind}" for kind in ("token", "sequence")),
    *(f"openrlhf/aggregate/{kind}_global" for kind in ("token", "sequence")),
)
def check_aggregate(name: str, case: Case, x: Arrays) -> None:
    arguments = case["arguments"]
    if name.startswith("openrlhf"):
        mode = "token_mean" if arguments["token_level_loss"] else "seq_mean_token_mean"
    else:
        mode = MODES[arguments["loss_agg_mode"]]
    # verl's default constant is the padded width.
    width = x["mask"].shape[-1]
    norm = arguments.get("loss_scale_factor", width) if mode.endswith("norm") else None
    scale = _global_scale(arguments, x, mode)
    assert_case(
        case,
        *value_and_grads(
            lambda z: scale * losses.aggregate(z["per_token"], x["mask"], mode=mode, norm=norm),
            {"per_token": x["per_token"]},
        ),
    )


# --- PPO ----------------------------------------------------------------------------------------


def _metrics_of_clipping(case: Case, x: Arrays, advantages: jax.Array, clip: dict) -> None:
    """ppo_kl is the mean k1; verl's and OpenRLHF's clip fraction is both sides of ours."""
    if case["inputs"].get("bfloat16"):
        return
    metrics, mask = case["metrics"], x["mask"]
    fractions = losses.clip_fractions(
        x["log_probs"], x["old_log_probs"], advantages, mask=mask, **clip
    )
    both = losses.masked_mean(fractions.low + fractions.high, mask)
    # OpenRLHF's metric is of the unbounded log-ratio.
    bound = None if "clip_ratio" in metrics else 20.0
    kl = losses.approx_kl(x["log_probs"], x["old_log_probs"], mask=mask, log_ratio_clip=bound)
    clipped = metrics["pg_clipfrac"] if "pg_clipfrac" in metrics else metrics["clip_ratio"]
    assert_close(both, clipped, case, "clip fraction")
    assert_close(losses.masked_mean(kl.k1, mask), metrics["ppo_kl"], case, "ppo_kl")


def _rollout_weights(x: Arrays) -> jax.Array:
    """The weights that the scripts hand to verl and TRL."""
    return jnp.minimum(jnp.exp(x["old_log_probs"] - x["rollout_log_probs"]), 2.0)


@checks("verl/policy/vanilla")
def check_verl_surrogate(name: str, case: Case, x: Arrays) -> None:
    """verl's dual clip is always on."""
    a = case["arguments"]
    clip = {
        "clip_low": a.get("clip_ratio_low", 0.2),
        "clip_high": a.get("clip_ratio_high", 0.2),
    }
    weights = _rollout_weights(x) if "rollout_is_weights" in a else 1.0

    def loss(leaves):
        per_token = weights * losses.clipped_surrogate(
            leaves["log_probs"],
            x["old_log_probs"],
            x["advantages"],
            dual_clip=a.get("clip_ratio_c", 3.0),
            mask=x["mask"],
            **clip,
        )
        return losses.aggregate(per_token, x["mask"], mode=MODES[a["loss_agg_mode"]])

    assert_case(case, *value_and_grads(loss, {"log_probs": x["log_probs"]}))
    _metrics_of_clipping(case, x, x["advantages"], clip)


@checks(
    "openrlhf/policy/ppo",
    "openrlhf/policy/ppo_asymmetric",
    "openrlhf/policy/ppo_dual_clip",
    "openrlhf/policy/ppo_sequence",
)
def check_openrlhf_surrogate(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]
    clip = {"clip_low": a.get("clip_eps_low", 0.2), "clip_high": a.get("clip_eps_high", 0.2)}
    mode = "token_mean" if a.get("token_level_loss", True) else "seq_mean_token_mean"

    def loss(leaves):
        per_token = losses.clipped_surrogate(
            leaves["log_probs"],
            x["old_log_probs"],
            x["advantages"],
            dual_clip=a.get("dual_clip"),
            mask=x["mask"],
            **clip,
        )
        return losses.aggregate(per_token, x["mask"], mode=mode)

    assert_case(case, *value_and_grads(loss, {"log_probs": x["log_probs"]}))
    _metrics_of_clipping(case, x, x["advantages"], clip)


@checks(
    "trl/policy/grpo",
    "trl/policy/bnpo",
    "trl/policy/dr_grpo",
    "trl/policy/dapo",
    "trl/policy/grpo_token_advantages",
    "trl/policy/grpo_delta",
    "trl/policy/grpo_kl",
    "trl/policy/grpo_kl_bias_corrected",
    "trl/policy/grpo_rollout_weights",
    "trl/policy/grpo_entropy_bonus",
)
def check_trl_surrogate(name: str, case: Case, x: Arrays) -> None:
    """TRL bounds no log-ratio; its delta is our dual clip; its row means count empty rows."""
    a, mask = case["arguments"], x["mask"]
    mode, norm = {
        "grpo": ("seq_mean_token_mean", None),
        "bnpo": ("token_mean", None),
        "dapo": ("token_mean", None),
        "dr_grpo": ("seq_mean_token_sum_norm", 12.0),
    }[a["loss_type"]]
    rows = mask.any(-1)
    scale = float(rows.mean()) if mode.startswith("seq") else 1.0
    kl = {"kind": "k3", "clip": None, "mask": mask}

    def loss(leaves):
        per_token = losses.clipped_surrogate(
            leaves["log_probs"],
            x["old_log_probs"],
            x[a["advantages"]],
            clip_high=a.get("epsilon_high", 0.2),
            dual_clip=a.get("delta"),
            log_ratio_clip=None,
            mask=mask,
        )
        if "use_vllm" in a:
            per_token = per_token * _rollout_weights(x)
        if "beta" in a:
            penalty = losses.kl_estimate(leaves["log_probs"], x["ref_log_probs"], **kl)
            if a.get("use_bias_correction_kl"):
                log_ratio = losses.log_ratio_between(
                    leaves["log_probs"], x["old_log_probs"], clip=None, mask=mask
                )
                penalty = penalty * jnp.exp(log_ratio)
            per_token = per_token + a["beta"] * penalty
        total = scale * losses.aggregate(per_token, mask, mode=mode, norm=norm)
        if "entropy_coef" in a:
            total -= a["entropy_coef"] * losses.masked_mean(leaves["entropy"], mask)
        return total

    leaves = {k: x[k] for k in ("log_probs", "entropy")}
    value, grads = value_and_grads(loss, leaves)
    assert_case(case, value, grads)


@checks("verl/value/clipped")
@checks("openrlhf/value/clipped", "openrlhf/value/unclipped", "openrlhf/value/clipped_sequence")
def check_value_loss(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]
    if name.startswith("verl"):
        clip, mode = a["cliprange_value"], MODES[a["loss_agg_mode"]]
    else:
        clip = a["clip_eps"]
        mode = "token_mean" if a.get("token_level_loss", True) else "seq_mean_token_mean"

    def loss(leaves):
        per_token = losses.clipped_value_loss(
            leaves["values"], x["old_values"], x["returns"], value_clip=clip, mask=x["mask"]
        )
        return losses.aggregate(per_token, x["mask"], mode=mode)

    assert_case(case, *value_and_grads(loss, {"values": x["values"]}))


gae = jax.jit(losses.gae, static_argnames="masked")  # one compilation for all gamma and lambda


# --- advantages by GAE --------------------------------------------------------------------------


@checks("verl/advantages/gae")
def check_verl_gae(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]
    advantages, returns = gae(x["rewards"], x["values"], x["mask"], gamma=a["gamma"], lam=a["lam"])
    white = losses.whiten(advantages, x["mask"])
    assert_case(case, {"advantages": white, "returns": returns})


@checks("openrlhf/advantages/gae")
def check_openrlhf_gae(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]
    options = {"gamma": a["gamma"], "lam": a["lambd"], "masked": "zero_value_steps"}
    if case["inputs"]["maker"] == "token_batch":
        advantages, returns = gae(x["rewards"], x["values"], x["mask"], **options)
    else:  # the whole pipeline: score and KL to rewards, GAE, biased whitening with a floor
        rewards = losses.token_rewards(x["scores"], x["kl"], x["mask"], kl_coef=a["kl_coef"])
        advantages, returns = gae(rewards, x["values"], x["mask"], **options)
        advantages = losses.whiten(advantages, x["mask"], ddof=0, floor=1e-8)
    assert_case(case, {"advantages": advantages, "returns": returns})


# --- KL, rewards, controllers -------------------------------------------------------------------

VERL_KINDS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "k2+": "k2",
    "low_var_kl": "k3", "k3": "k3", "k1+": "k1_st", "k3+": "k3_st", "abs+": "abs_st",
}  # fmt: skip


@checks(*(f"verl/kl/{kind}" for kind in VERL_KINDS))
def check_verl_kl(name: str, case: Case, x: Arrays) -> None:
    """verl bounds log-ratio and value for k3 alone, and no straight-through gradient."""
    kind = VERL_KINDS[case["arguments"]["kl_penalty"]]
    clip = 20.0 if kind == "k3" else None
    bound = 10.0 if kind.startswith("k3") else None
    assert_case(
        case,
        *value_and_grads(
            lambda z: losses.kl_estimate(
                z["log_probs"], x["ref_log_probs"], kind=kind, clip=clip, estimate_clip=bound
            ),
            {"log_probs": x["log_probs"]},
        ),
    )


@checks(
    *(f"openrlhf/kl/{kind}_plain" for kind in ("k1", "k2", "k3")),
    *(f"openrlhf/kl/{kind}_unbiased" for kind in ("k1", "k2", "k3")),
)
def check_openrlhf_kl(name: str, case: Case, x: Arrays) -> None:
    """OpenRLHF bounds every estimate by 10, and no straight-through gradient."""
    kind, variant = family(name).rsplit("/", 1)[1].split("_")
    kind = kind if variant == "plain" else f"{kind}_st"
    clip = 20.0 if kind == "k3" else None
    assert_case(
        case,
        *value_and_grads(
            lambda z: losses.kl_estimate(
                z["log_probs"], x["ref_log_probs"], kind=kind, clip=clip, estimate_clip=10.0
            ),
            {"log_probs": x["log_probs"]},
        ),
        upcast=True,
    )


@checks("verl/reward/compute_rewards")
def check_reward_per_token(name: str, case: Case, x: Arrays) -> None:
    """verl's scores are per token: ours are added to the penalty alone, here without a mask."""
    everywhere = jnp.ones_like(x["mask"])
    kl = losses.kl_estimate(x["log_probs"], x["ref_log_probs"], kind="k1", clip=None)
    penalty = losses.token_rewards(
        jnp.zeros_like(x["scores"]), kl, everywhere, kl_coef=case["arguments"]["kl_ratio"]
    )
    assert_case(case, x["rewards"] + penalty)


@checks("verl/reward/apply_kl_penalty")
def check_kl_in_reward(name: str, case: Case, x: Arrays) -> None:
    """verl observes the mean over rows, the empty one counting 0, of each row's mean per token."""
    a, mask = case["arguments"], x["mask"]
    kind = VERL_KINDS[a["kl_penalty"]]
    kl = losses.kl_estimate(x["log_probs"], x["ref_log_probs"], kind=kind, mask=mask)
    rewards = losses.token_rewards(x["scores"], kl, mask, kl_coef=a["kl_coef"])
    observed = jnp.mean(losses.masked_mean(kl, mask, axis=-1))
    state = losses.adaptive_controller(
        losses.init_kl_state(a["kl_coef"]),
        observed,
        mask.shape[0],
        target=a["target_kl"],
        horizon=a["horizon"],
    )
    assert_case(case, {"token_level_rewards": rewards, "kl_coef": state.coef})
    assert_close(observed, case["metrics"]["current_kl"], case, "observed KL")


@checks("openrlhf/reward/plain", "openrlhf/reward/clipped_score")
def check_openrlhf_reward(name: str, case: Case, x: Arrays) -> None:
    """OpenRLHF's penalty, and an empty row's score, also stand outside the mask: not compared."""
    a, mask = case["arguments"], x["mask"]
    scores = x["scores"]
    if a["reward_clip_range"]:
        scores = jnp.clip(scores, *a["reward_clip_range"])
    kl = losses.kl_estimate(x["log_probs"], x["ref_log_probs"], kind="k1", mask=mask)
    rewards = losses.token_rewards(scores, kl, mask, kl_coef=a["kl_coef"])
    inside = np.where(mask, np.asarray(case["value"]), 0.0)
    assert_close(rewards, inside, case, "rewards under the mask")
    assert np.count_nonzero(case["value"]) > np.count_nonzero(inside)


@checks("verl/controller", "openrlhf/controller")
def check_controller(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]
    update = losses.fixed_controller
    if name.endswith("adaptive"):
        target = a.get("target_kl", a.get("target"))
        update = functools.partial(losses.adaptive_controller, target=target, horizon=a["horizon"])
    state, trace = losses.init_kl_state(a["kl_coef"]), []
    for observed in a["observed"]:
        state = update(state, jnp.float32(observed), a["n_steps"])
        trace.append(float(state.coef))
    assert_case(case, trace)


@checks("verl/metrics/data")
def check_batch_metrics(name: str, case: Case, x: Arrays) -> None:
    mask, theirs = x["mask"], case["value"]
    explained = losses.explained_variance(x["values"], x["returns"], mask)
    # verl adds 1e-5 to the variance of the returns; ours is 0 where they do not vary.
    variance = losses.masked_var(x["returns"], mask)
    explained = 1 - (1 - explained) * variance / (variance + 1e-5)
    mean = losses.masked_mean(x["advantages"], mask)
    assert_close(explained, theirs["vf_explained_var"], case, "explained variance")
    assert_close(mean, theirs["advantages/mean"], case, "mean advantage")


# --- log-probs, entropy, cross-entropy ----------------------------------------------------------


def _unshifted(x: Arrays, statistics) -> losses.TokenLogProbs:
    """Peers score logits[t] against tokens[t]; ours logits[t - 1]: put a token in front."""
    tokens = jnp.pad(x["tokens"], ((0, 0), (1, 0)))
    return jax.tree.map(lambda z: z[:, 1:], statistics(tokens))


def _last_repeated(z: jax.Array) -> jax.Array:
    return jnp.concatenate([z, z[:, -1:]], axis=1)


@checks(
    "verl/log_probs/token_v2",
    "verl/log_probs/token_naive",
    "verl/log_probs/entropy",
    "openrlhf/log_probs/token_1.0",
    "openrlhf/log_probs/token_0.7",
    "openrlhf/log_probs/entropy",
    "trl/log_probs/token",
    "trl/log_probs/token_temperature",
    "trl/log_probs/entropy",
)
def check_log_probs(name: str, case: Case, x: Arrays) -> None:
    temperature = case["arguments"].get("temperature", 1.0)

    def ours(leaves):
        out = _unshifted(
            x,
            lambda tokens: losses.dense_token_log_probs(
                _last_repeated(leaves["logits"]), tokens, temperature=temperature
            ),
        )
        return out.entropy if "/entropy/" in name else out.log_probs

    assert_case(case, *value_and_grads(ours, {"logits": x["logits"]}, x["cotangent"]))


@checks("trl/log_probs/fused_plain", "trl/log_probs/fused_temperature")
@checks("trl/log_probs/fused_softcap")
def check_fused_log_probs(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]

    def ours(leaves):
        out = _unshifted(
            x,
            lambda tokens: losses.token_log_probs(
                _last_repeated(leaves["hidden"]),
                leaves["matrix"],
                tokens,
                temperature=a["temperature"],
                softcap=a["final_logit_softcapping"],
                block_size=4,
            ),
        )
        weighted = jnp.sum(out.log_probs * x["cotangent"].astype(jnp.float32))
        return weighted + 0.5 * jnp.sum(out.entropy), out

    leaves = {k: x[k] for k in ("hidden", "matrix")}
    (_, out), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(leaves)
    assert_case(case, {"log_probs": out.log_probs, "entropy": out.entropy}, grads)


@checks("verl/entropy/token-mean", "verl/entropy/seq-mean-token-mean")
def check_entropy(name: str, case: Case, x: Arrays) -> None:
    def loss(leaves):
        out = _unshifted(
            x,
            lambda tokens: losses.dense_token_log_probs(_last_repeated(leaves["logits"]), tokens),
        )
        mode = MODES[case["arguments"]["loss_agg_mode"]]
        return losses.aggregate(out.entropy, x["mask"], mode=mode)

    assert_case(case, *value_and_grads(loss, {"logits": x["logits"]}))


@checks("openrlhf/sft/token", "openrlhf/sft/sequence", "trl/sft/nll", "trl/sft/nll_items")
@checks("verl/composed/sft_loss")
def check_cross_entropy(name: str, case: Case, x: Arrays) -> None:
    a, mask = case["arguments"], x["mask"]
    mode = "token_mean" if a.get("token_level_loss", True) else "seq_mean_token_mean"
    items = a.get("num_items_in_batch") or a.get("batch_num_tokens")
    scale = float(mask.sum()) / items if items else 1.0
    assert_case(
        case,
        *value_and_grads(
            lambda z: (
                scale
                * losses.aggregate(losses.cross_entropy(z["log_probs"], mask=mask), mask, mode=mode)
            ),
            {"log_probs": x["log_probs"]},
        ),
    )


@checks("openrlhf/sft/gptlm")
def check_cross_entropy_of_logits(name: str, case: Case, x: Arrays) -> None:
    def loss(leaves):
        out = losses.dense_token_log_probs(leaves["logits"], x["tokens"])
        # The first token has no logits before it: it is no label, whatever the mask says.
        mask = x["mask"].at[:, 0].set(False)
        return losses.aggregate(losses.cross_entropy(out.log_probs), mask, mode="token_mean")

    assert_case(case, *value_and_grads(loss, {"logits": x["logits"]}))


# --- compositions -------------------------------------------------------------------------------


@checks("verl/composed/ppo_loss")
def check_verl_actor_loss(name: str, case: Case, x: Arrays) -> None:
    a, mask = case["arguments"], x["mask"]
    mode = MODES[a["loss_agg_mode"]]
    scale = _global_scale(a, x, mode)

    def loss(leaves):
        policy = losses.clipped_surrogate(
            leaves["log_probs"],
            x["old_log_probs"],
            x["advantages"],
            clip_high=a["clip_ratio_high"],
            dual_clip=a["clip_ratio_c"],
            mask=mask,
        )
        kl = losses.kl_estimate(leaves["log_probs"], x["ref_log_probs"], kind="k3", mask=mask)
        per_token = policy - a["entropy_coeff"] * leaves["entropy"] + a["kl_loss_coef"] * kl
        return scale * losses.aggregate(per_token, mask, mode=mode)

    leaves = {k: x[k] for k in ("log_probs", "entropy")}
    assert_case(case, *value_and_grads(loss, leaves))


@checks("verl/composed/value_loss")
def check_verl_critic_loss(name: str, case: Case, x: Arrays) -> None:
    a, mask = case["arguments"], x["mask"]
    scale = _global_scale(a, x, "token_mean")

    def loss(leaves):
        per_token = losses.clipped_value_loss(
            leaves["values"], x["old_values"], x["returns"], value_clip=a["cliprange_value"]
        )
        return scale * losses.aggregate(per_token, mask, mode="token_mean")

    assert_case(case, *value_and_grads(loss, {"values": x["values"]}))


@checks("trl/ppo")
def check_trl_ppo_step(name: str, case: Case, x: Arrays) -> None:
    """TRL's whole step: the score lands one past the end, and the critic learns that value too."""
    a, mask = case["arguments"], x["mask"]
    beyond = mask | losses.one_past_end(mask)
    kl = losses.kl_estimate(
        x["old_log_probs"], x["ref_log_probs"], kind=a["kl_estimator"], clip=None, mask=mask
    )
    rewards = losses.token_rewards(
        x["scores"], kl, mask, kl_coef=a["kl_coef"], placement="one_past_end"
    )
    ours = {}
    if a["whiten_rewards"]:
        rewards = losses.whiten(rewards, beyond, shift_mean=False)
        whitened = np.where(beyond, case["value"]["whitened_rewards"], 0.0)
        assert_close(rewards, whitened, case, "whitened rewards")
    raw, returns = gae(rewards, x["old_values"], beyond, gamma=a["gamma"], lam=a["lam"])
    ours["advantages_before_whitening"] = jnp.where(mask, raw, 0.0)
    ours["advantages"] = losses.whiten(raw, mask)

    def terms(leaves):
        policy = losses.clipped_surrogate(
            leaves["log_probs"],
            x["old_log_probs"],
            ours["advantages"],
            clip_low=a["cliprange"],
            clip_high=a["cliprange"],
            log_ratio_clip=None,
            mask=mask,
        )
        value = losses.clipped_value_loss(
            leaves["values"], x["old_values"], returns, value_clip=a["cliprange_value"], mask=beyond
        )
        return (
            losses.aggregate(policy, mask, mode="token_mean"),
            losses.aggregate(value, beyond, mode="token_mean"),
        )

    leaves = {k: x[k] for k in ("log_probs", "values")}
    policy, value = terms(leaves)

    def total(leaves):
        policy, value = terms(leaves)
        return policy + a["vf_coef"] * value

    grads = jax.grad(total)(leaves)
    assert_case(case, {**ours, "loss": policy + a["vf_coef"] * value}, grads)
    assert_close(policy, case["metrics"]["policy_loss"], case, "policy loss")
    assert_close(value, case["metrics"]["value_loss"], case, "value loss")
    k2 = losses.kl_estimate(x["log_probs"], x["old_log_probs"], kind="k2", clip=None, mask=mask)
    # TRL averages over padding too, where the log-probs are equal.
    assert_close(jnp.mean(k2), case["metrics"]["approxkl"], case, "approxkl")


# --- every case is accounted for ------------------------------------------------------------------


@pytest.mark.parametrize("golden_family", ACCOUNT.families())
def test_golden(golden_family):
    ACCOUNT.run_family(golden_family)


@pytest.mark.parametrize("name", ACCOUNT.differences())
def test_a_difference_is_still_one(name):
    ACCOUNT.run_difference(name)


def test_no_golden_is_forgotten():
    others = [_load(f"test_goldens_{side}.py").ACCOUNT for side in ("policy", "preference")]
    accounts = [ACCOUNT, *others]
    places = {name: [p for a in accounts for p in a.places_of(name)] for name in CASES}
    wrong = {name: found for name, found in places.items() if len(found) != 1}
    assert not wrong, f"check each of these, or list it in one table of one file: {wrong}"
    stale = [name for a in accounts for name in sorted(a.stale())]
    assert not stale, f"no golden file holds: {stale}"


@pytest.mark.parametrize("file", sorted(FILES))
def test_inputs_are_those_of_the_goldens(file):
    for key, expected in FILES[file]["inputs_sha256"].items():
        assert goldens.golden_inputs.digest(json.loads(key)) == expected, key


def test_a_wrong_number_is_noticed():
    name = "verl/policy/vanilla/gaps"
    case = json.loads(json.dumps(CASES[name]))
    case["grads"]["log_probs"][0][0] += 1e-4
    with pytest.raises(AssertionError, match="gradient by log_probs"):
        ACCOUNT.checks[family(name)](name, case, goldens.arrays_of(case))
