"""Keyword bundles: what algorithms and frameworks differ in, as data.

A preset maps names of functions of `jaxrlhf.losses` to keyword arguments for them, those that
differ from the defaults or that the name is about. No function knows a preset's name: the caller
writes ``clipped_surrogate(..., **preset["clipped_surrogate"])``, and may change any entry.
"""

from collections.abc import Mapping

Bundle = Mapping[str, Mapping[str, object]]

GRPO: Bundle = {
    "group_relative": {"baseline": "mean", "scale": "group"},
    "clipped_surrogate": {"clip_low": 0.2, "clip_high": 0.2},
    "kl_estimate": {"kind": "k3"},
    "token_weights": {"mode": "seq_mean_token_mean"},
}
"""arXiv:2402.03300; add a coefficient times the KL to the policy loss."""

DAPO: Bundle = {
    "group_relative": {"baseline": "mean", "scale": "group"},
    "clipped_surrogate": {"clip_low": 0.2, "clip_high": 0.28},
    "overlong_penalty": {"factor": 1.0, "capped": True},
    "token_weights": {"mode": "token_mean"},
}
"""arXiv:2503.14476: the wider upper bound, the mean over tokens, the soft buffer, no KL. Groups of
equal scores, which DAPO samples anew, have no gradient here."""

DR_GRPO: Bundle = {
    "group_relative": {"baseline": "mean", "scale": "none"},
    "clipped_surrogate": {"clip_low": 0.2, "clip_high": 0.2},
    "token_weights": {"mode": "seq_mean_token_sum_norm"},
}
"""arXiv:2503.20783: neither deviation nor length divides; give token_weights ``norm``, the longest
response possible."""

BNPO: Bundle = {
    "group_relative": {"baseline": "mean", "scale": "group"},
    "clipped_surrogate": {"clip_low": 0.2, "clip_high": 0.2},
    "token_weights": {"mode": "token_mean"},
}
"""TRL's name for GRPO with the mean over the tokens of the batch."""

RLOO: Bundle = {
    "group_relative": {"baseline": "leave_one_out", "scale": "none"},
    "reinforce": {},
    "token_weights": {"mode": "seq_mean_token_sum"},
}
"""arXiv:2402.14740."""

GPG: Bundle = {
    "group_relative": {"baseline": "mean", "scale": "nonzero_scores"},
    "reinforce": {},
    "token_weights": {"mode": "token_mean"},
}
"""arXiv:2504.02546."""

ALGORITHMS: Mapping[str, Bundle] = {
    "grpo": GRPO,
    "dapo": DAPO,
    "dr_grpo": DR_GRPO,
    "bnpo": BNPO,
    "rloo": RLOO,
    "gpg": GPG,
}

VERL: Bundle = {
    "gae": {"masked": "skip"},
    "whiten": {"ddof": 1, "eps": 1e-8, "floor": None},
    "group_relative": {"eps": 1e-6, "ddof": 1},
    "token_rewards": {"placement": "last_action"},
    "clipped_surrogate": {"dual_clip": 3.0, "log_ratio_clip": 20.0},
    "gspo": {"per_token_gradient": True, "log_ratio_clip": 10.0},
    "kl_estimate": {"kind": "k3", "clip": 20.0, "estimate_clip": 10.0},
    "clipped_value_loss": {"value_clip": 0.5},
    "token_weights": {"mode": "token_mean"},
    "overlong_penalty": {"capped": False},
}
"""verl 0.9. Its bounds of k1, k2 and abs are none: give ``clip=None, estimate_clip=None``."""

TRL: Bundle = {
    "gae": {"masked": "skip"},
    "whiten": {"ddof": 1, "eps": 1e-8, "floor": None},
    "group_relative": {"eps": 1e-4, "ddof": 1},
    "token_rewards": {"placement": "one_past_end"},
    "clipped_surrogate": {"dual_clip": None, "log_ratio_clip": None},
    "gspo": {"per_token_gradient": False, "log_ratio_clip": None},
    "kl_estimate": {"kind": "k3", "clip": None, "estimate_clip": None},
    "clipped_value_loss": {"value_clip": 0.2},
    "token_weights": {"mode": "token_mean"},
    "overlong_penalty": {"factor": 1.0, "capped": True},
}
"""TRL 1.12 (PPO) and 1.16. Its means over rows count rows without tokens as 0."""

OPENRLHF: Bundle = {
    "gae": {"masked": "zero_value_steps"},
    "whiten": {"ddof": 0, "floor": 1e-8},
    "group_relative": {"eps": 1e-9, "ddof": 1},
    "token_rewards": {"placement": "last_action"},
    "clipped_surrogate": {"dual_clip": None, "log_ratio_clip": 20.0},
    "gspo": {"per_token_gradient": False, "log_ratio_clip": None},
    "kl_estimate": {"kind": "k1", "clip": 20.0, "estimate_clip": 10.0},
    "clipped_value_loss": {"value_clip": 0.2},
    "token_weights": {"mode": "token_mean"},
    "overlong_penalty": {"capped": True},
}
"""OpenRLHF 0.11."""

PARITY: Mapping[str, Bundle] = {"verl": VERL, "trl": TRL, "openrlhf": OPENRLHF}
