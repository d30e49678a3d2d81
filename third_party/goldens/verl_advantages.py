"""verl's advantage estimators."""

import inputs
import torch
from omegaconf import OmegaConf
from record import Identity, Recorder, ids, tensors
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

CORE = "verl.trainer.ppo.core_algos."


def add_gae(out: Recorder) -> None:
    cases = {
        "plain": (ids("token_batch", mask="plain"), 1.0, 0.95),
        "plain_discounted": (ids("token_batch", mask="plain"), 0.9, 0.8),
        "gaps": (ids("token_batch", mask="gaps"), 0.99, 0.95),
        "gaps_lambda_1": (ids("token_batch", mask="gaps"), 1.0, 1.0),
        "empty_row": (ids("token_batch", mask="empty_row"), 0.99, 0.95),
    }
    for name, (identity, gamma, lam) in cases.items():
        x = tensors(inputs.make(identity))
        mask = x["mask"].float()
        rewards = x["rewards"] * mask
        advantages, returns = core_algos.compute_gae_advantage_return(
            rewards, x["values"], mask, gamma, lam
        )
        out.add(
            f"verl/advantages/gae/{name}",
            CORE + "compute_gae_advantage_return",
            identity,
            {"advantages": advantages * mask, "returns": returns * mask},
            arguments={"gamma": gamma, "lam": lam, "token_level_rewards": "rewards * mask"},
            note="advantages are whitened (masked_whiten), returns are those before; both stored "
            "times the mask",
        )


def _add_outcome(out: Recorder, name: str, function: str, identity: Identity, **kwargs) -> None:
    """One outcome-reward estimator: advantages of token_rewards under the mask."""
    note = kwargs.pop("note", None)
    x = tensors(inputs.make(identity))
    call = getattr(core_algos, function)
    extra = {k: (x[v[1:]] if isinstance(v, str) and v[:1] == "$" else v) for k, v in kwargs.items()}
    if "index" in extra:
        extra["index"] = x["group_ids"].numpy()
    advantages, returns = call(
        token_level_rewards=x["token_rewards"].clone(),
        response_mask=x["mask"].long(),
        **extra,
    )
    arguments = {k: (dict(v) if isinstance(v, AlgoConfig) else v) for k, v in kwargs.items()}
    if isinstance(kwargs.get("config"), AlgoConfig):
        config = kwargs["config"]
        arguments["config"] = {
            "gamma": config.gamma,
            "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
        }
    value: object = {"advantages": advantages}
    if returns is not advantages:
        value = {"advantages": advantages, "returns": returns}
    out.add(
        f"verl/advantages/{name}",
        CORE + function,
        identity,
        value,
        arguments=arguments,
        note=note,
    )


def add_outcome_advantages(out: Recorder) -> None:
    batches = {
        "uneven": ids("group_batch", groups="uneven"),
        "even": ids("group_batch", groups="even"),
        "constant": ids("group_batch", groups="constant"),
        "empty_row": ids("group_batch", groups="uneven", empty_row=True),
        "empty_row_dropped": ids("group_batch", groups="uneven", empty_row=True, drop_empty=True),
    }
    group_of_one = "a group of one keeps its raw score (mean 0, std 1)"
    residue = "six equal float32 scores of 0.3 leave a residue over a tiny std"
    no_place = "the empty row's score is 0 and counts in its group's statistics"
    notes = {"uneven": group_of_one, "constant": residue, "empty_row": no_place}
    notes["empty_row_dropped"] = "the batch of empty_row without that row; " + group_of_one
    group = {"index": "$group_ids"}
    for name, identity in batches.items():
        note = {"note": notes.get(name)}
        grpo = "compute_grpo_outcome_advantage"
        _add_outcome(out, f"grpo/{name}", grpo, identity, **group, **note)
        _add_outcome(
            out, f"dr_grpo/{name}", grpo, identity, norm_adv_by_std_in_grpo=False, **group, **note
        )
        plain = {
            "grpo_vectorized": "compute_grpo_vectorized_outcome_advantage",
            "rloo": "compute_rloo_outcome_advantage",
            "rloo_vectorized": "compute_rloo_vectorized_outcome_advantage",
            "opo": "compute_opo_outcome_advantage",
            "gpg": "compute_gpg_outcome_advantage",
            "reinforce_plus_plus_baseline": (
                "compute_reinforce_plus_plus_baseline_outcome_advantage"
            ),
        }
        for short, function in plain.items():
            _add_outcome(out, f"{short}/{name}", function, identity, **group, **note)
        for gamma in (1.0, 0.9):
            _add_outcome(
                out,
                f"reinforce_plus_plus/{name}_gamma_{gamma}",
                "compute_reinforce_plus_plus_outcome_advantage",
                identity,
                config=AlgoConfig(gamma=gamma),
                note="returns discounted over action tokens, whitened over the batch",
            )
        _add_outcome(
            out,
            f"remax/{name}",
            "compute_remax_outcome_advantage",
            identity,
            reward_baselines="$baselines",
        )
        for token_baseline, function in (
            ("optimal_token_baseline", "compute_optimal_token_baseline_advantage"),
            ("tir_optimal_token_baseline", "compute_multi_turn_optimal_token_baseline_advantage"),
        ):
            arrays = {"old_log_probs": "$log_probs", "sum_pi_squared": "$sum_pi_squared"}
            label = f"{token_baseline}/{name}"
            _add_outcome(out, label, function, identity, **group, **arrays)
        _add_gdpo(out, name, identity)
    arrays["rollout_is_weights"] = "$weights"
    _add_outcome(
        out,
        "optimal_token_baseline/weights",
        "compute_optimal_token_baseline_advantage",
        batches["uneven"],
        **group,
        **arrays,
    )
    for name in ("even", "constant"):
        for scale in (True, False):
            config = AlgoConfig(norm_adv_by_std_in_grpo=scale)
            label = f"grpo_passk/{name}{'' if scale else '_no_scale'}"
            function = "compute_grpo_passk_outcome_advantage"
            _add_outcome(out, label, function, batches[name], config=config, **group)


def _add_gdpo(out: Recorder, name: str, identity: Identity) -> None:
    arrays = inputs.make(identity)
    x = tensors(arrays)
    keys, weights = ["a", "b", "c"], [1.0, 0.5, 2.0]
    mask = x["mask"].long()
    config = OmegaConf.create({"gdpo_reward_keys": keys, "gdpo_reward_weights": weights})
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        token_level_rewards=x["token_rewards"],
        response_mask=mask,
        index=arrays["group_ids"],
        config=config,
        non_tensor_batch={key: arrays["parts"][:, i] for i, key in enumerate(keys)},
        batch={
            "prompts": torch.ones(len(mask), 1, dtype=torch.long),
            "attention_mask": torch.ones(len(mask), 1 + mask.shape[1], dtype=torch.long),
        },
    )
    out.add(
        f"verl/advantages/gdpo/{name}",
        CORE + "compute_gdpo_outcome_advantage",
        identity,
        {"advantages": advantages},
        arguments={"reward_parts": "parts", "weights": weights},
        note="GRPO per column of parts, weighted sum, then masked_whiten over the tokens",
    )
