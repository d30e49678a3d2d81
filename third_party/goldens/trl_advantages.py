"""TRL's group-relative advantages, rollout weights and length penalty, from the real methods.

Stand-ins: generation gives completions of the mask's lengths, the reward functions give the scores
of inputs.py, the forward pass its log-probs; the accelerator is one process.
"""

import collections
import types

import inputs
import torch
from record import Identity, Recorder, ids
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl_stubs import load, trainer

GRPO = "trl.trainer.grpo_trainer.GRPOTrainer."


class Tokenizer:
    pad_token_id = 0


def _scored_trainer(cls: type, x: dict[str, torch.Tensor], rewards: torch.Tensor, **settings):
    lengths = x["mask"].sum(-1).tolist()
    completions = [[1] * n for n in lengths]
    args = types.SimpleNamespace(
        per_device_train_batch_size=len(lengths),
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
    )
    defaults = {
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "_tokenizer": Tokenizer(),
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "beta": 0.0,
        "ref_model": None,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "reward_weights": torch.ones(rewards.shape[1]),
        "reward_funcs": [None] * rewards.shape[1],
        "reward_func_names": [f"part_{i}" for i in range(rewards.shape[1])],
        "reward_clip_range": None,
        "normalize_advantages": False,
        "log_multimodal": False,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_logs": {
            "prompt": [],
            "completion": [],
            "advantages": [],
            "rewards": collections.defaultdict(list),
            "extra": collections.defaultdict(list),
        },
    }
    self = trainer(cls, args=args, **{**defaults, **settings})
    self._calculate_rewards = lambda *a: rewards
    return self, completions


def _score(self: object, rows: int) -> dict[str, torch.Tensor]:
    return type(self)._generate_and_score_completions(self, [{"prompt": "p"}] * rows)


def add_advantages(out: Recorder) -> None:
    for groups, size in (("even", 3), ("constant", 6)):
        identity = ids("group_batch", groups=groups)
        for scale in ("group", "batch", "none"):
            _grpo_advantage(out, f"grpo_{scale}/{groups}", identity, size, scale_rewards=scale)
        for name, weights in (("gdpo", [1.0, 0.5, 2.0]), ("gdpo_equal", [1.0, 1.0, 1.0])):
            _grpo_advantage(
                out,
                f"{name}/{groups}",
                identity,
                size,
                parts=True,
                reward_weights=torch.tensor(weights),
                multi_objective_aggregation="normalize_then_sum",
            )
        _grpo_advantage(out, f"grpo_parts/{groups}", identity, size, parts=True)
        for normalize in (False, True):
            label = f"rloo{'_normalized' if normalize else ''}/{groups}"
            _rloo_advantage(out, label, identity, size, normalize_advantages=normalize)
        _rloo_advantage(out, f"rloo_kl/{groups}", identity, size, beta=0.05)
    even = ids("group_batch", groups="even")
    _grpo_advantage(out, "grpo_unscored_row/even", even, 3, unscored=4)
    _rloo_advantage(out, "rloo_unscored_row/even", even, 3, unscored=4)
    _rloo_advantage(out, "rloo_clipped/even", even, 3, reward_clip_range=(-0.5, 0.5))
    _grpo_advantage(out, "grpo_group_of_one/even", even, 1)


def _rewards(x: dict[str, torch.Tensor], parts: bool, unscored: int | None) -> torch.Tensor:
    rewards = x["parts"].clone() if parts else x["scores"][:, None].clone()
    if unscored is not None:
        rewards[unscored] = torch.nan
    return rewards


def _grpo_advantage(
    out: Recorder,
    name: str,
    identity: Identity,
    size: int,
    parts: bool = False,
    unscored: int | None = None,
    **settings: object,
) -> None:
    x = load(identity)
    rewards = _rewards(x, parts, unscored)
    self, completions = _scored_trainer(
        GRPOTrainer, x, rewards, num_generations=size, num_generations_eval=size, **settings
    )
    rows = len(completions)
    prompts = [[1]] * rows
    self._generate = lambda _: (prompts, completions, None, completions, None, {}, None, None)
    value = _score(self, rows)["advantages"]
    arguments = {"num_generations": size, "rewards": "parts" if parts else "scores"}
    if unscored is not None:
        arguments["unscored_row"] = unscored
    settings = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in settings.items()}
    out.add(
        f"trl/advantages/{name}",
        GRPO + "_generate_and_score_completions",
        identity,
        value,
        arguments={**arguments, **settings},
        note="one advantage a row; unbiased std + 1e-4; an unscored row (NaN) is left out of its "
        "group and gets 0",
    )


def _rloo_advantage(
    out: Recorder,
    name: str,
    identity: Identity,
    size: int,
    unscored: int | None = None,
    **settings: object,
) -> None:
    x = load(identity)
    rewards = _rewards(x, False, unscored)
    self, completions = _scored_trainer(
        RLOOTrainer, x, rewards, num_generations=size, num_generations_eval=size, **settings
    )
    rows = len(completions)
    self._generate = lambda _: ([[1]] * rows, completions, completions)
    width = max(len(c) for c in completions)
    padded = torch.arange(width)[None] < x["mask"].sum(-1, keepdim=True)
    log_probs = torch.where(padded, x["log_probs"][:, :width], 0.0)
    self.ref_model = object()
    self._get_per_token_logps_and_entropies = lambda model, *a, **k: (
        (x["ref_log_probs"][:, :width] if model is self.ref_model else log_probs),
        None,
        None,
    )
    value = _score(self, rows)["advantages"]
    arguments = {"num_generations": size, "rewards": "scores", **settings}
    if unscored is not None:
        arguments["unscored_row"] = unscored
    out.add(
        f"trl/advantages/{name}",
        "trl.trainer.rloo_trainer.RLOOTrainer._generate_and_score_completions",
        identity,
        value,
        arguments=arguments,
        note="one advantage a row; beta takes the sum of log_probs - ref_log_probs over the first "
        "n tokens off the score, n the number of set bits of the row's mask",
    )


def add_rollout_weights(out: Recorder) -> None:
    """The four modes of correction between sampler and trainer, in the real method."""
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for batch, extreme in (("gaps", False), ("extreme", True)):
        identity = ids("token_batch", extreme=extreme)
        for mode in modes:
            x = load(identity)
            rows, width = x["mask"].shape
            rewards = x["scores"][:, None]
            self, _ = _scored_trainer(
                GRPOTrainer,
                x,
                rewards,
                num_generations=rows,
                num_generations_eval=rows,
                use_vllm=True,
                vllm_importance_sampling_correction=True,
                vllm_importance_sampling_mode=mode,
                vllm_importance_sampling_clip_min=0.5,
                vllm_importance_sampling_clip_max=1.5,
            )
            completions = [[1] * width] * rows
            tools = x["mask"].long().tolist()
            sampled = x["rollout_log_probs"].tolist()
            self._generate = lambda _, c=completions, t=tools, s=sampled: (
                *([[1]] * len(c), c, t, c, s, {}, None, None),
            )
            self._get_per_token_logps_and_entropies = lambda *a, x=x, **k: (
                x["log_probs"],
                None,
                None,
            )
            value = _score(self, rows)["importance_sampling_ratio"]
            out.add(
                f"trl/off_policy/{mode}/{batch}",
                GRPO + "_generate_and_score_completions",
                identity,
                value,
                arguments={"mode": mode, "clip_min": 0.5, "clip_max": 1.5}
                | {"old_per_token_logps": "log_probs", "sampling": "rollout_log_probs"},
                note="exp(log_probs - rollout_log_probs) per token, or [rows, 1] of its product; "
                "the log-ratio is unbounded; 1 outside the mask at token level before truncation",
            )


def add_overlong(out: Recorder) -> None:
    identity = ids("token_batch", mask="plain")
    lengths = inputs.mask_of("plain").sum(1).tolist()
    value = get_soft_overlong_punishment(8, 4)([[1] * n for n in lengths])
    out.add(
        "trl/overlong/soft/plain",
        "trl.rewards.get_soft_overlong_punishment",
        identity,
        {"penalties": torch.tensor(value), "lengths": torch.tensor(lengths)},
        arguments={"max_completion_len": 8, "soft_punish_cache": 4},
    )
