"""Losses, advantages and KL estimates as pure functions of arrays; needs jax alone."""

from jaxrlhf.losses.advantages import gae
from jaxrlhf.losses.kl import (
    KLState,
    adaptive_controller,
    finite_log_ratio_rows,
    fixed_controller,
    init_kl_state,
    kl_estimate,
    log_ratio_between,
    token_rewards,
)
from jaxrlhf.losses.log_probs import (
    TokenLogProbs,
    align_to_tokens,
    dense_token_log_probs,
    token_log_probs,
)
from jaxrlhf.losses.masked import (
    aggregate,
    last_action,
    masked_mean,
    masked_sum,
    masked_var,
    one_past_end,
    token_weights,
    weighted_sum,
    whiten,
    zero_outside,
)
from jaxrlhf.losses.ppo import (
    ApproxKL,
    ClipFractions,
    approx_kl,
    clip_fractions,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
)
from jaxrlhf.losses.sft import cross_entropy

__all__ = [
    "ApproxKL",
    "ClipFractions",
    "KLState",
    "TokenLogProbs",
    "adaptive_controller",
    "aggregate",
    "align_to_tokens",
    "approx_kl",
    "clip_fractions",
    "clipped_surrogate",
    "clipped_value_loss",
    "cross_entropy",
    "dense_token_log_probs",
    "explained_variance",
    "finite_log_ratio_rows",
    "fixed_controller",
    "gae",
    "init_kl_state",
    "kl_estimate",
    "last_action",
    "log_ratio_between",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "one_past_end",
    "token_log_probs",
    "token_rewards",
    "token_weights",
    "weighted_sum",
    "whiten",
    "zero_outside",
]
