"""verl's policy losses, and its workers' compositions of them with other terms."""

import types

import inputs
import torch
from record import Identity, Recorder, gradients, ids, tensors
from tensordict import TensorDict
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils import losses as worker_losses

CORE = "verl.trainer.ppo.core_algos."
WORKER = "verl.workers.utils.losses."
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


def actor(**kwargs: object) -> ActorConfig:
    """An actor's config with what its constructor insists on."""
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **kwargs)


def _policy_case(
    out: Recorder,
    name: str,
    loss: str,
    identity: Identity,
    mode: str,
    advantages: str = "advantages",
    weights: bool = False,
    note: str | None = None,
    **config: object,
) -> None:
    x = tensors(inputs.make(identity), bfloat16=bool(identity.get("bfloat16")))
    log_probs = x["log_probs"].requires_grad_(True)
    policy_loss = {k: config.pop(k) for k in ("dro_beta",) if k in config}
    settings = actor(policy_loss=PolicyLossConfig(**policy_loss), **config)
    extra = {}
    if weights:
        correction = torch.exp((x["old_log_probs"] - x["rollout_log_probs"]).detach())
        extra["rollout_is_weights"] = correction.clamp(max=2.0)
    value, metrics = core_algos.get_policy_loss_fn(loss)(
        old_log_prob=x["old_log_probs"],
        log_prob=log_probs,
        advantages=x[advantages],
        response_mask=x["mask"],
        loss_agg_mode=mode,
        config=settings,
        **extra,
    )
    arguments = {"loss_agg_mode": mode, "advantages": advantages, **config, **policy_loss}
    if weights:
        arguments["rollout_is_weights"] = "min(exp(old_log_probs - rollout_log_probs), 2)"
    out.add(
        f"verl/policy/{name}",
        f"{CORE}get_policy_loss_fn({loss!r})",
        identity,
        value,
        grads=gradients(value, {"log_probs": log_probs}),
        arguments=arguments,
        metrics={k.removeprefix("actor/"): v for k, v in metrics.items()},
        note=note,
    )


POLICY = {
    # case: (registered loss, its aggregation, advantages, its settings)
    "vanilla": ("vanilla", "token-mean", "advantages", {"clip_ratio_c": 3.0}),
    "dppo_tv": ("dppo_tv", "token-mean", "advantages", {"clip_ratio_c": 20.0}),
    "dppo_kl": ("dppo_kl", "token-mean", "advantages", {"clip_ratio_c": 20.0}),
    "gspo": ("gspo", "seq-mean-token-mean", "sequence_advantages", {}),
    "sapo": ("sapo", "seq-mean-token-mean", "advantages", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gpg": ("gpg", "token-mean", "advantages", {}),
    "geo_mean": ("geo_mean", "seq-mean-token-mean", "sequence_advantages", {}),
    "cispo": ("cispo", "token-mean", "advantages", {}),
    "dro": ("dro", "token-mean", "advantages", {"dro_beta": 0.2}),
}


def add_policy_losses(out: Recorder) -> None:
    batches = {
        "gaps": ids("token_batch"),
        "empty_row": ids("token_batch", mask="empty_row"),
        "extreme": ids("token_batch", extreme=True),
        "bfloat16": ids("token_batch", bfloat16=True),
    }
    for case, (loss, mode, advantages, settings) in POLICY.items():
        # For dppo the clip settings are thresholds of a divergence in probability.
        divergence = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
        clip = divergence if case.startswith("dppo") else {}
        for name, identity in batches.items():
            mean_of_all = (
                "verl averages over all rows, the empty one included"
                if case == "geo_mean" and name == "empty_row"
                else None
            )
            _policy_case(
                out,
                f"{case}/{name}",
                loss,
                identity,
                mode,
                advantages,
                note=mean_of_all,
                **clip,
                **settings,
            )
        _policy_case(
            out,
            f"{case}/weights",
            loss,
            batches["gaps"],
            mode,
            advantages,
            True,
            **clip,
            **settings,
        )
        if case not in ("gpg", "dro", "sapo"):
            asymmetric = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
            if case.startswith("dppo"):
                asymmetric = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.15}
            label = f"{case}/asymmetric"
            _policy_case(
                out, label, loss, batches["gaps"], mode, advantages, **asymmetric, **settings
            )
    gaps, dual = batches["gaps"], {"clip_ratio_c": 1.2}
    _policy_case(out, "vanilla/dual_clip", "vanilla", gaps, "token-mean", **dual)
    _policy_case(out, "dppo_tv/truncated", "dppo_tv", gaps, "token-mean", clip_ratio=0.1, **dual)
    _policy_case(out, "gspo/token_advantages", "gspo", gaps, "token-mean", "advantages")
    taus = {"tau_pos": 2.0, "tau_neg": 3.0}
    _policy_case(out, "sapo/taus", "sapo", gaps, "seq-mean-token-mean", **taus)
    for mode in MODES[1:]:
        for batch in ("gaps", "empty_row"):
            _policy_case(out, f"vanilla/{mode}_{batch}", "vanilla", batches[batch], mode)
    add_reinforce(out)


def add_reinforce(out: Recorder) -> None:
    """compute_policy_loss_reinforce and the bypass mode that corrects by importance weights."""
    identity = ids("token_batch")
    x = tensors(inputs.make(identity))
    log_probs = x["log_probs"].requires_grad_(True)
    value, metrics = core_algos.compute_policy_loss_reinforce(
        x["rollout_log_probs"],
        log_probs,
        x["advantages"],
        x["mask"],
        loss_agg_mode="seq-mean-token-sum",
        config=actor(),
    )
    out.add(
        "verl/policy/reinforce/gaps",
        CORE + "compute_policy_loss_reinforce",
        identity,
        value,
        grads=gradients(value, {"log_probs": log_probs}),
        arguments={"loss_agg_mode": "seq-mean-token-sum"},
        metrics={"ppo_kl": metrics["actor/ppo_kl"]},
    )
    corrections = {
        "reinforce_token": {"loss_type": "reinforce", "rollout_is": "token"},
        "reinforce_sequence": {"loss_type": "reinforce", "rollout_is": "sequence"},
        "reinforce_rejection": {
            "loss_type": "reinforce",
            "rollout_is": "token",
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "0.9_1.1",
        },
        "ppo_clip_rejection": {
            "loss_type": "ppo_clip",
            "rollout_is": None,
            "rollout_rs": "token_k3",
            "rollout_rs_threshold": 0.03,
        },
    }
    for name, settings in corrections.items():
        log_probs = x["log_probs"].detach().clone().requires_grad_(True)
        correction = RolloutCorrectionConfig(**settings)
        config = actor(policy_loss=PolicyLossConfig(rollout_correction=correction))
        value, metrics = core_algos.compute_policy_loss_bypass_mode(
            x["rollout_log_probs"],
            log_probs,
            x["advantages"],
            x["mask"],
            loss_agg_mode="token-mean",
            config=config,
        )
        out.add(
            f"verl/policy/bypass_mode/{name}",
            CORE + "compute_policy_loss_bypass_mode",
            identity,
            value,
            grads=gradients(value, {"log_probs": log_probs}),
            arguments={"loss_agg_mode": "token-mean", "old_log_prob": "rollout_log_probs"}
            | settings
            | {"rollout_is_threshold": 2.0},
            note="weights and mask from log_probs - rollout_log_probs, not differentiated; the "
            "loss's token count is that of the mask after rejection",
        )


def _packed(x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Rows of a one-token prompt and their response, position-aligned, without padding."""
    rows = [
        torch.cat([row[:n], row.new_zeros(1)])
        for row, n in zip(x, attended.sum(-1).tolist(), strict=True)
    ]
    return torch.cat(rows)


def add_compositions(out: Recorder) -> None:
    """ppo_loss and value_loss of verl's workers: several terms and the global normalisers."""
    identity = ids("token_batch")
    x = tensors(inputs.make(identity))
    attended = torch.from_numpy(inputs.mask_of("plain"))
    rows, tokens = attended.shape
    prompt = torch.ones(rows, 1, dtype=torch.long)
    common = {
        "prompts": prompt,
        "responses": torch.ones(rows, tokens, dtype=torch.long),
        "attention_mask": torch.cat([prompt, attended.long()], dim=1),
        "response_mask": x["mask"],
    }

    def data(**extra: torch.Tensor) -> TensorDict:
        out = TensorDict({**common, **extra}, batch_size=rows)
        for name, number in (("dp_size", 1), ("batch_num_tokens", 50), ("global_batch_size", 8)):
            out.set_non_tensor(name, number)
        return out

    for mode in ("token-mean", "seq-mean-token-mean"):
        config = actor(
            loss_agg_mode=mode,
            clip_ratio_high=0.28,
            entropy_coeff=0.01,
            use_kl_loss=True,
            kl_loss_coef=0.05,
            kl_loss_type="low_var_kl",
        )
        leaves = {n: x[n].detach().clone().requires_grad_(True) for n in ("log_probs", "entropy")}
        value, metrics = worker_losses.ppo_loss(
            config,
            {
                "log_probs": _packed(leaves["log_probs"], attended),
                "entropy": _packed(leaves["entropy"], attended),
            },
            data(
                old_log_probs=x["old_log_probs"],
                advantages=x["advantages"],
                ref_log_prob=x["ref_log_probs"],
            ),
        )
        out.add(
            f"verl/composed/ppo_loss/{mode}",
            WORKER + "ppo_loss",
            identity,
            value,
            grads=gradients(value, leaves),
            arguments={
                "loss_agg_mode": mode,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "clip_ratio_c": 3.0,
                "entropy_coeff": 0.01,
                "kl_loss_coef": 0.05,
                "kl_loss_type": "low_var_kl",
                "batch_num_tokens": 50,
                "global_batch_size": 8,
            },
            metrics={k.removeprefix("actor/"): _metric(v) for k, v in metrics.items()},
            note="policy - entropy_coeff * entropy + kl_loss_coef * kl, each aggregated with the "
            "global counts given, not those of the mask",
        )
    critic = types.SimpleNamespace(
        cliprange_value=0.3, loss_agg_mode="token-mean", loss_scale_factor=None
    )
    values = x["values"].detach().clone().requires_grad_(True)
    value, _ = worker_losses.value_loss(
        critic,
        {"values": _packed(values, attended)},
        data(values=x["old_values"], returns=x["returns"]),
    )
    out.add(
        "verl/composed/value_loss/token-mean",
        WORKER + "value_loss",
        identity,
        value,
        grads=gradients(value, {"values": values}),
        arguments={"cliprange_value": 0.3, "loss_agg_mode": "token-mean", "batch_num_tokens": 50},
    )
    log_probs = x["log_probs"].detach().clone().requires_grad_(True)
    batch = data()
    batch.set_non_tensor("pad_mode", "left_right")
    value, _ = worker_losses.sft_loss(actor(), {"log_probs": log_probs}, batch)
    out.add(
        "verl/composed/sft_loss/gaps",
        WORKER + "sft_loss",
        identity,
        value,
        grads=gradients(value, {"log_probs": log_probs}),
        arguments={"batch_num_tokens": 50, "pad_mode": "left_right"},
    )


def _metric(x: object) -> object:
    return x.aggregate() if hasattr(x, "aggregate") else x
