"""verl's value loss, aggregation, whitening, log-probs, entropy and distillation."""

import types

import inputs
import torch
from record import Recorder, gradients, ids, tensor, tensors
from verl.trainer.distillation.fsdp import losses as distillation
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional
from verl.workers.config.distillation import DistillationLossConfig

CORE = "verl.trainer.ppo.core_algos."
FUNCTIONAL = "verl.utils.torch_functional."
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


def add_value_losses(out: Recorder) -> None:
    cases = {
        "gaps": (ids("token_batch"), "token-mean", 0.2),
        "wide": (ids("token_batch"), "token-mean", 1e6),
        "seq_mean_token_mean": (ids("token_batch"), "seq-mean-token-mean", 0.2),
        "empty_row": (ids("token_batch", mask="empty_row"), "token-mean", 0.2),
        "bfloat16": (ids("token_batch", bfloat16=True), "token-mean", 0.2),
    }
    for name, (identity, mode, clip) in cases.items():
        x = tensors(inputs.make(identity), bfloat16=bool(identity.get("bfloat16")))
        values = x["values"].requires_grad_(True)
        value, fraction = core_algos.compute_value_loss(
            values, x["returns"], x["old_values"], x["mask"], clip, loss_agg_mode=mode
        )
        out.add(
            f"verl/value/clipped/{name}",
            CORE + "compute_value_loss",
            identity,
            value,
            grads=gradients(value, {"values": values}),
            arguments={"cliprange_value": clip, "loss_agg_mode": mode},
            metrics={"vf_clipfrac": fraction},
        )


def add_aggregation(out: Recorder) -> None:
    for batch in ("gaps", "empty_row"):
        identity = ids("token_batch", mask=batch)
        x = tensors(inputs.make(identity))
        norm = "seq-mean-token-sum-norm"
        variants = {mode: (mode, {}) for mode in MODES}
        variants[norm] = (norm, {"loss_scale_factor": 25})
        variants["seq-mean-token-sum-norm-default"] = (norm, {})
        variants["token-mean-global"] = ("token-mean", {"batch_num_tokens": 120, "dp_size": 2})
        variants["seq-mean-token-mean-global"] = (
            "seq-mean-token-mean",
            {"global_batch_size": 16, "dp_size": 2},
        )
        for name, (mode, kwargs) in variants.items():
            losses = x["per_token"].clone().requires_grad_(True)
            value = core_algos.agg_loss(losses, x["mask"], mode, **kwargs)
            out.add(
                f"verl/aggregate/{name}/{batch}",
                CORE + "agg_loss",
                identity,
                value,
                grads=gradients(value, {"per_token": losses}),
                arguments={"loss_agg_mode": mode, **kwargs},
            )


def add_masked(out: Recorder) -> None:
    for batch in ("gaps", "empty_row"):
        identity = ids("token_batch", mask=batch)
        x = tensors(inputs.make(identity))
        mask = x["mask"].float()
        for name, shift in (("whiten", True), ("whiten_keep_mean", False)):
            leaf = x["per_token"].clone().requires_grad_(True)
            value = torch_functional.masked_whiten(leaf, mask, shift_mean=shift) * mask
            out.add(
                f"verl/masked/{name}/{batch}",
                FUNCTIONAL + "masked_whiten",
                identity,
                value,
                grads=gradients(value, {"per_token": leaf}, x["entropy"]),
                arguments={"shift_mean": shift},
                note="stored times the mask; the gradient is of sum(value * entropy)",
            )
        for name, unbiased in (("var", True), ("var_biased", False)):
            leaf = x["per_token"].clone().requires_grad_(True)
            value = torch_functional.masked_var(leaf, mask, unbiased=unbiased)
            grads = gradients(value, {"per_token": leaf})
            out.add(
                f"verl/masked/{name}/{batch}",
                FUNCTIONAL + "masked_var",
                identity,
                value,
                grads=grads,
                arguments={"unbiased": unbiased},
            )
        leaf = x["per_token"].clone().requires_grad_(True)
        value = torch_functional.masked_mean(leaf, mask, axis=-1)
        out.add(
            f"verl/masked/mean_rows/{batch}",
            FUNCTIONAL + "masked_mean",
            identity,
            value,
            grads=gradients(value, {"per_token": leaf}),
            arguments={"axis": -1},
            note="divides by N + 1e-8",
        )


def add_vocabulary(out: Recorder) -> None:
    batches = {
        "float32": ids("vocab_batch"),
        "extreme": ids("vocab_batch", scale=40.0),
        "bfloat16": ids("vocab_batch", bfloat16=True),
    }
    for name, identity in batches.items():
        low = bool(identity.get("bfloat16"))
        x = tensors(inputs.make(identity), bfloat16=low)
        labels, cotangent = x["tokens"].long(), tensor(inputs.make(identity)["cotangent"])
        functions = {
            "token_v2": lambda z: torch_functional.logprobs_from_logits_v2(z, labels),  # noqa: B023
            "token_naive": lambda z: torch_functional.logprobs_from_logits_naive(z, labels),  # noqa: B023
            "entropy": torch_functional.entropy_from_logits,
            "sum_pi_squared": torch_functional.calculate_sum_pi_squared_from_logits,
        }
        paths = {
            "token_v2": "logprobs_from_logits_v2",
            "token_naive": "logprobs_from_logits_naive",
            "entropy": "entropy_from_logits",
            "sum_pi_squared": "calculate_sum_pi_squared_from_logits",
        }
        for short, function in functions.items():
            logits = x["logits"].detach().clone().requires_grad_(True)
            value = function(logits)
            out.add(
                f"verl/log_probs/{short}/{name}",
                FUNCTIONAL + paths[short],
                identity,
                value,
                grads=gradients(value, {"logits": logits}, cotangent),
                note="position t of the logits is scored against tokens[t] (no shift); the "
                "gradient is of sum(value * cotangent)",
            )
        if low:
            continue
        for mode in ("token-mean", "seq-mean-token-mean"):
            logits = x["logits"].detach().clone().requires_grad_(True)
            value = core_algos.compute_entropy_loss(logits, x["mask"], mode)
            out.add(
                f"verl/entropy/{mode}/{name}",
                CORE + "compute_entropy_loss",
                identity,
                value,
                grads=gradients(value, {"logits": logits}),
                arguments={"loss_agg_mode": mode},
                note="the mean entropy itself, not its negative",
            )


def add_distillation(out: Recorder) -> None:
    for clamp in (None, -10.0):
        identity = ids("vocab_batch")
        x = tensors(inputs.make(identity))
        student = x["logits"].reshape(1, 18, -1).requires_grad_(True)
        teacher = torch.log_softmax(x["teacher_logits"], dim=-1)
        chosen = torch.topk(teacher, 4, dim=-1)
        offsets = torch.tensor([0, 6, 12, 18])

        def nested(z: torch.Tensor, offsets: torch.Tensor = offsets) -> torch.Tensor:
            return torch.nested.nested_tensor_from_jagged(z.reshape(18, -1), offsets)

        loss = DistillationLossConfig(log_prob_min_clamp=clamp, topk=4)
        config = types.SimpleNamespace(distillation_loss=loss)
        found = distillation.compute_forward_kl_topk(
            student, nested(chosen.values), nested(chosen.indices), config, "thd"
        )
        value = found["distillation_losses"]
        weights = x["cotangent"].reshape(1, 18)
        grads = gradients(value, {"logits": student}, weights)
        out.add(
            f"verl/distill/forward_kl_topk/{'unclamped' if clamp is None else 'clamped'}",
            "verl.trainer.distillation.fsdp.losses.compute_forward_kl_topk",
            identity,
            {
                "losses": value.reshape(3, 6),
                "student_mass": found["student_mass"].reshape(3, 6),
                "teacher_mass": found["teacher_mass"].reshape(3, 6),
            },
            grads={"logits": grads["logits"].reshape(3, 6, -1)},
            arguments={"topk": 4, "log_prob_min_clamp": clamp},
            note="the teacher's 4 most likely tokens, not renormalised; the gradient is of "
            "sum(losses * cotangent)",
        )
