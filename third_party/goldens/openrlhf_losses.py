"""OpenRLHF's losses: policy with its corrections, value, supervised, preference."""

import inputs
import torch
from openrlhf_modules import loss as losses
from record import Identity, Recorder, gradients, ids, tensor, tensors

LOSS = "openrlhf.models.loss."
BATCHES = {
    "gaps": ids("token_batch"),
    "empty_row": ids("token_batch", mask="empty_row"),
    "extreme": ids("token_batch", extreme=True),
    "bfloat16": ids("token_batch", bfloat16=True),
}


def _load(identity: Identity) -> dict[str, torch.Tensor]:
    return tensors(inputs.make(identity), bfloat16=bool(identity.get("bfloat16")))


def add_aggregation(out: Recorder) -> None:
    for batch in ("gaps", "empty_row"):
        variants = {
            "token": {"token_level_loss": True},
            "sequence": {"token_level_loss": False},
            "token_global": {"token_level_loss": True, "batch_num_tokens": 120, "dp_size": 2},
            "sequence_global": {"token_level_loss": False, "global_batch_size": 16, "dp_size": 2},
        }
        for name, kwargs in variants.items():
            x = _load(BATCHES[batch])
            leaf = x["per_token"].requires_grad_(True)
            value = losses.aggregate_loss(leaf, x["mask"].float(), **kwargs)
            out.add(
                f"openrlhf/aggregate/{name}/{batch}",
                LOSS + "aggregate_loss",
                BATCHES[batch],
                value,
                grads=gradients(value, {"per_token": leaf}),
                arguments=kwargs,
            )


def _policy_case(
    out: Recorder, name: str, batch: str, advantages: str, note: str | None = None, **kwargs: object
) -> None:
    x = _load(BATCHES[batch])
    leaf = x["log_probs"].requires_grad_(True)
    value, clip_ratio, ppo_kl, rollout_kl, filtered = losses.PolicyLoss(**kwargs)(
        leaf,
        x["old_log_probs"],
        x[advantages],
        action_mask=x["mask"].to(leaf.dtype),
        rollout_log_probs=x["rollout_log_probs"],
    )
    metrics = {"clip_ratio": clip_ratio, "ppo_kl": ppo_kl}
    if rollout_kl is not None:
        metrics |= {"vllm_kl": rollout_kl, "is_filter_ratio": filtered}
    out.add(
        f"openrlhf/policy/{name}",
        LOSS + "PolicyLoss",
        BATCHES[batch],
        value,
        grads=gradients(value, {"log_probs": leaf}),
        arguments={"advantages": advantages, **kwargs},
        metrics={k: v.float() for k, v in metrics.items()},
        note=note,
    )


def add_policy(out: Recorder) -> None:
    kinds = {
        "ppo": {},
        "ppo_asymmetric": {"clip_eps_low": 0.1, "clip_eps_high": 0.3},
        "ppo_dual_clip": {"dual_clip": 1.2},
        "ppo_sequence": {"token_level_loss": False},
    }
    for name, kwargs in kinds.items():
        for batch in BATCHES:
            _policy_case(out, f"{name}/{batch}", batch, "advantages", **kwargs)
    for batch in BATCHES:
        _policy_case(
            out,
            f"gspo/{batch}",
            batch,
            "sequence_advantages",
            policy_loss_type="gspo",
            note="the sequence ratio is differentiated through its mean log-ratio",
        )
    _policy_case(
        out,
        "gspo/rollout_as_old",
        "gaps",
        "sequence_advantages",
        policy_loss_type="gspo",
        is_correction_level="token",
        note="with a correction level the ratio is to the rollout's log-probs instead of the old",
    )


def add_corrections(out: Recorder) -> None:
    band, divergence = (0.8, 1.25), (0.0, 0.02)
    kinds = {
        "token_mask_ratio": ("token", "mask", "ratio", band),
        "token_clip_ratio": ("token", "clip", "ratio", band),
        "seq_mask_ratio": ("seq", "mask", "ratio", (0.85, 1.1)),
        "token_mask_binary_kl": ("token", "mask", "binary_kl", divergence),
        "seq_mask_binary_kl": ("seq", "mask", "binary_kl", (0.0, 0.03)),
        "token_mask_tv": ("token", "mask", "tv", (0.0, 0.08)),
        "seq_mask_tv": ("seq", "mask", "tv", (0.0, 0.09)),
    }
    for name, (level, mode, gating, threshold) in kinds.items():
        for batch in ("gaps", "extreme", "bfloat16"):
            if batch != "gaps" and name not in ("token_mask_ratio", "seq_mask_tv"):
                continue
            _policy_case(
                out,
                f"correction_{name}/{batch}",
                batch,
                "advantages",
                is_correction_level=level,
                is_correction_mode=mode,
                is_correction_gating=gating,
                is_correction_threshold=list(threshold),
                note="weights and filters from old_log_probs - rollout_log_probs; a unit that is "
                "filtered keeps its place in the token count",
            )


def add_value(out: Recorder) -> None:
    kinds = {
        "clipped": {"clip_eps": 0.2},
        "unclipped": {"clip_eps": None},
        "clipped_sequence": {"clip_eps": 0.2, "token_level_loss": False},
    }
    for name, kwargs in kinds.items():
        for batch in ("gaps", "empty_row", "bfloat16"):
            x = _load(BATCHES[batch])
            leaf = x["values"].requires_grad_(True)
            value = losses.ValueLoss(**kwargs)(
                leaf, x["old_values"], x["returns"], action_mask=x["mask"].to(leaf.dtype)
            )
            out.add(
                f"openrlhf/value/{name}/{batch}",
                LOSS + "ValueLoss",
                BATCHES[batch],
                value,
                grads=gradients(value, {"values": leaf}),
                arguments=kwargs,
            )


def add_supervised(out: Recorder) -> None:
    for name, token_level in (("token", True), ("sequence", False)):
        for batch in ("gaps", "empty_row"):
            x = _load(BATCHES[batch])
            leaf = x["log_probs"].requires_grad_(True)
            value = losses.SFTLoss(token_level)(leaf, x["mask"].float())
            out.add(
                f"openrlhf/sft/{name}/{batch}",
                LOSS + "SFTLoss",
                BATCHES[batch],
                value,
                grads=gradients(value, {"log_probs": leaf}),
                arguments={"token_level_loss": token_level},
            )
    identity = ids("vocab_batch")
    x = tensors(inputs.make(identity))
    logits = x["logits"].requires_grad_(True)
    labels = torch.where(x["mask"], x["tokens"].long(), -100)
    value = losses.GPTLMLoss()(logits, labels)
    out.add(
        "openrlhf/sft/gptlm/float32",
        LOSS + "GPTLMLoss",
        identity,
        value,
        grads=gradients(value, {"logits": logits}),
        arguments={"labels": "tokens, -100 outside the mask"},
        note="logits[:, t] is scored against labels[:, t + 1]; the mean over unmasked labels",
    )


def add_preference(out: Recorder) -> None:
    for name, extreme in (("typical", False), ("extreme", True)):
        identity = ids("pair_batch", extreme=extreme)
        arrays = inputs.make(identity)
        x = tensors(arrays)
        rewards = {
            "PairWiseLoss": (losses.PairWiseLoss(), False),
            "PairWiseLoss_margin": (losses.PairWiseLoss(), True),
            "LogExpLoss": (losses.LogExpLoss(), False),
        }
        for short, (call, margin) in rewards.items():
            leaf = tensor(arrays["rewards"], grad=True)
            value = call(leaf[:, 0], leaf[:, 1], x["margins"] if margin else None)
            out.add(
                f"openrlhf/preference/{short}/{name}",
                LOSS + short.removesuffix("_margin"),
                identity,
                value,
                grads=gradients(value, {"rewards": leaf}),
                arguments={"chosen": "rewards[:, 0]", "margin": "margins" if margin else None},
                note="the mean over pairs; LogExpLoss exponentiates unbounded (inf and NaN)",
            )
        settings = {
            "sigmoid": {"beta": 0.1},
            "smoothed": {"beta": 0.1, "label_smoothing": 0.2},
            "ipo": {"beta": 0.1, "ipo": True},
        }
        sums = {k: (x[k] * x["mask"]).sum(-1) for k in ("policy", "reference")}
        for short, kwargs in settings.items():
            leaf = sums["policy"].detach().clone().requires_grad_(True)
            value, chosen, rejected = losses.DPOLoss(**kwargs)(
                leaf[:, 0], leaf[:, 1], sums["reference"][:, 0], sums["reference"][:, 1]
            )
            out.add(
                f"openrlhf/preference/dpo_{short}/{name}",
                LOSS + "DPOLoss",
                identity,
                {"loss": value, "rewards": torch.stack([chosen, rejected], dim=1)},
                grads={"policy_sums": gradients(value, {"policy": leaf})["policy"]},
                arguments=kwargs,
                note="of log-probs summed over the mask, [5, 2]; loss is the mean over pairs; the "
                "IPO here is not divided by length",
            )
