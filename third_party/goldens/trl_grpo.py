"""TRL's GRPO, GMPO and RLOO losses, from the trainers' own methods.

Stand-ins: the forward pass (`_get_per_token_logps_and_entropies`) gives the log-probs of inputs.py;
the accelerator is one process.
"""

import types

import torch
from record import Recorder, gradients, ids
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl_stubs import last_metrics, load, trainer

BATCHES = {
    "gaps": ids("token_batch"),
    "empty_row": ids("token_batch", mask="empty_row"),
    "extreme": ids("token_batch", extreme=True),
    "bfloat16": ids("token_batch", bfloat16=True),
}
NORMAL = types.SimpleNamespace(
    delta=None,
    use_bias_correction_kl=False,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
    steps_per_generation=1,
)


def _loss_trainer(cls: type, leaves: dict[str, torch.Tensor], **settings: object) -> object:
    args = types.SimpleNamespace(**vars(NORMAL))
    for name in list(settings):
        if hasattr(args, name):
            setattr(args, name, settings.pop(name))
    defaults = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": 12,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
    }
    attributes = {**defaults, **settings}
    return trainer(
        cls,
        args=args,
        _entropy_bonus_enabled=attributes["entropy_coef"] != 0.0,
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            leaves["log_probs"],
            leaves["entropy"],
            None,
        ),
        **attributes,
    )


def _loss_case(
    out: Recorder,
    name: str,
    batch: str,
    cls: type = GRPOTrainer,
    advantages: str = "sequence_advantages",
    note: str | None = None,
    **settings: object,
) -> None:
    identity = BATCHES[batch]
    x = load(identity)
    leaves = {k: x[k].requires_grad_(True) for k in ("log_probs", "entropy")}
    self = _loss_trainer(cls, leaves, **settings)
    ones = torch.ones(len(x["mask"]), 1, dtype=torch.long)
    plain = torch.ones_like(x["mask"], dtype=torch.long)
    batch_inputs = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": plain,
        "completion_mask": plain,
        "tool_mask": x["mask"].long(),
        "advantages": x[advantages] if advantages == "advantages" else x[advantages][:, 0],
        "old_per_token_logps": x["old_log_probs"],
        "ref_per_token_logps": x["ref_log_probs"],
        "sampling_per_token_logps": x["rollout_log_probs"],
        "importance_sampling_ratio": torch.exp(x["old_log_probs"] - x["rollout_log_probs"]).clamp(
            max=2.0
        ),
        "num_items_in_batch": x["mask"].sum(),
    }
    value = cls._compute_loss(self, None, batch_inputs)
    wanted = ("clip_ratio/low_mean", "clip_ratio/high_mean", "kl", "cispo_clip_ratio")
    wanted = [k for k in wanted if self._metrics["train"][k]]
    found = gradients(value, leaves)
    if not settings.get("entropy_coef"):
        del found["entropy"]
    out.add(
        f"trl/policy/{name}/{batch}",
        f"{cls.__module__}.{cls.__name__}._compute_loss",
        identity,
        value,
        grads=found,
        arguments={"advantages": advantages, **settings},
        metrics=last_metrics(self, *wanted),
        note=note,
    )


def add_policy(out: Recorder) -> None:
    all_rows = "the mean over rows counts an empty row as 0"
    settings = {
        "grpo": {"loss_type": "grpo"},
        "bnpo": {"loss_type": "bnpo"},
        "dr_grpo": {"loss_type": "dr_grpo"},
        "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
        "sapo": {"loss_type": "sapo"},
        "vespo": {"loss_type": "vespo"},
        "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    }
    for name, kwargs in settings.items():
        for batch in BATCHES:
            note = all_rows if batch == "empty_row" and name != "bnpo" else None
            _loss_case(out, name, batch, note=note, **kwargs)
    for batch in BATCHES:
        # GMPO clips the log-ratio, so its epsilon is in nats.
        note = all_rows if batch == "empty_row" else None
        gmpo = {"epsilon_low": 0.2, "epsilon_high": 0.3}
        _loss_case(out, "gmpo", batch, cls=GMPOTrainer, note=note, **gmpo)
    token = {"advantages": "advantages"}
    _loss_case(out, "grpo_token_advantages", "gaps", loss_type="bnpo", **token)
    _loss_case(out, "grpo_delta", "gaps", delta=1.5, loss_type="bnpo", **token)
    _loss_case(out, "grpo_delta", "extreme", delta=1.5, loss_type="bnpo", **token)
    _loss_case(
        out, "sapo_temperatures", "gaps", **token, loss_type="sapo", sapo_temperature_pos=2.0
    )
    _loss_case(out, "grpo_kl", "gaps", beta=0.04, loss_type="bnpo", **token)
    _loss_case(out, "grpo_kl", "bfloat16", beta=0.04, loss_type="bnpo", **token)
    _loss_case(
        out,
        "grpo_kl_bias_corrected",
        "gaps",
        beta=0.04,
        use_bias_correction_kl=True,
        loss_type="bnpo",
        note="k3 times the ratio, which is differentiated too",
        **token,
    )
    _loss_case(
        out,
        "grpo_off_policy_mask",
        "gaps",
        off_policy_mask_threshold=0.05,
        loss_type="bnpo",
        note="rows of negative advantage whose mean of rollout_log_probs - log_probs is above the "
        "threshold are dropped; they keep their place in the token count",
    )
    _loss_case(
        out,
        "grpo_rollout_weights",
        "gaps",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        loss_type="bnpo",
        note="times importance_sampling_ratio = min(exp(old_log_probs - rollout_log_probs), 2)",
        **token,
    )
    _loss_case(out, "grpo_top_entropy", "gaps", top_entropy_quantile=0.4, loss_type="bnpo", **token)
    _loss_case(out, "grpo_entropy_bonus", "gaps", entropy_coef=0.01, loss_type="bnpo", **token)


def add_rloo_loss(out: Recorder) -> None:
    for batch in ("gaps", "empty_row", "bfloat16"):
        identity = BATCHES[batch]
        x = load(identity)
        leaf = x["log_probs"].requires_grad_(True)
        self = trainer(
            RLOOTrainer,
            epsilon_low=0.5,
            epsilon_high=0.5,
            _get_per_token_logps_and_entropies=lambda *a, leaf=leaf, **k: (
                leaf,
                torch.zeros_like(leaf),
                None,
            ),
        )
        mask, ones = x["mask"].long(), torch.ones(len(x["mask"]), 1, dtype=torch.long)
        value = RLOOTrainer._compute_loss(
            self,
            None,
            {
                "prompt_ids": ones,
                "prompt_mask": ones,
                "completion_ids": torch.ones_like(mask),
                "completion_mask": mask,
                "old_logps": (x["old_log_probs"] * mask).sum(1),
                "advantages": x["sequence_advantages"][:, 0],
            },
        )
        out.add(
            f"trl/policy/rloo/{batch}",
            "trl.trainer.rloo_trainer.RLOOTrainer._compute_loss",
            identity,
            value,
            grads=gradients(value, {"log_probs": leaf}),
            arguments={"epsilon_low": 0.5, "epsilon_high": 0.5},
            metrics=last_metrics(self, "clip_ratio/low_mean", "clip_ratio/high_mean"),
            note="clipped surrogate of the product of ratios over a row, mean over all rows",
        )
