"""Golden numbers of group advantages, policy losses, off-policy correction, length penalties."""

import importlib.util
import pathlib

import pytest

spec = importlib.util.spec_from_file_location(
    "goldens", pathlib.Path(__file__).with_name("goldens.py")
)
goldens = importlib.util.module_from_spec(spec)
spec.loader.exec_module(goldens)

Arrays, Case = goldens.Arrays, goldens.Case
assert_case, assert_close = goldens.assert_case, goldens.assert_close
value_and_grads, family, MODES = goldens.value_and_grads, goldens.family, goldens.MODES

# Families for which jaxrlhf.losses has no function yet. Take one out when its check is written.
NOT_YET = {
    # advantages
    *(
        f"verl/advantages/{name}"
        for name in (
            "grpo", "dr_grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo",
            "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
        )
    ),
    *(
        f"trl/advantages/{name}"
        for name in (
            "grpo_group", "grpo_batch", "grpo_none", "grpo_parts", "gdpo", "gdpo_equal", "rloo",
            "rloo_normalized", "rloo_kl", "rloo_clipped", "grpo_unscored_row", "rloo_unscored_row",
            "grpo_group_of_one",
        )
    ),
    *(
        f"openrlhf/advantages/{name}"
        for name in (
            "cumulative_returns", "reinforce", "rloo", "reinforce_baseline", "dr_grpo",
            "group_norm", "flash_reinforce",
        )
    ),
    # policy losses
    *(
        f"verl/policy/{name}"
        for name in (
            "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "geo_mean", "cispo", "reinforce",
            "bypass_mode",
        )
    ),
    *(
        f"trl/policy/{name}"
        for name in (
            "cispo", "sapo", "sapo_temperatures", "gspo", "gspo_token", "gmpo", "rloo",
            "grpo_off_policy_mask",
        )
    ),
    "openrlhf/policy/gspo",
    # correction between sampler and trainer
    *(f"verl/off_policy/{name}" for name in ("weights", "rejection", "metrics")),
    *(
        f"trl/off_policy/{level}_{mode}"
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    ),
    *(
        f"openrlhf/policy/correction_{name}"
        for name in (
            "token_mask_ratio", "token_clip_ratio", "seq_mask_ratio", "token_mask_binary_kl",
            "seq_mask_binary_kl", "token_mask_tv", "seq_mask_tv",
        )
    ),
    # penalties
    "verl/overlong/dapo",
    "openrlhf/overlong/dapo",
    "trl/overlong/soft",
}  # fmt: skip

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
    "openrlhf/policy/gspo/rollout_as_old": "the ratio is to the rollout's log-probs: pass those",
}

ACCOUNT = goldens.Account(NOT_YET, NOT_PLANNED, DIFFERENT)
checks = ACCOUNT.check


@pytest.mark.parametrize("golden_family", ACCOUNT.families())
def test_golden(golden_family):
    ACCOUNT.run_family(golden_family)


@pytest.mark.parametrize("name", ACCOUNT.differences())
def test_a_difference_is_still_one(name):
    ACCOUNT.run_difference(name)
