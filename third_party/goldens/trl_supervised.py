"""TRL's cross-entropies, distillation divergences, log-probs and entropies."""

import types

import torch
from record import Recorder, gradients, ids
from transformers.trainer_pt_utils import LabelSmoother
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import distillation_trainer, utils
from trl.trainer.sft_trainer import SFTTrainer
from trl_stubs import fused_outputs, load, returning, trainer

BATCHES = {
    "float32": ids("vocab_batch"),
    "extreme": ids("vocab_batch", scale=40.0),
    "bfloat16": ids("vocab_batch", bfloat16=True),
}


def _sft(loss_type: str, smoother: LabelSmoother | None = None) -> object:
    args = types.SimpleNamespace(loss_type=loss_type, average_tokens_across_devices=False)
    self = trainer(SFTTrainer, args=args, compute_loss_func=None, label_smoother=smoother)
    self.accelerator.parallelism_config = None
    return self


def add_sft(out: Recorder) -> None:
    for loss_type in ("nll", "dft"):
        for batch in ("gaps", "empty_row"):
            for items in (None, 50):
                identity = ids("token_batch", mask=batch)
                x = load(identity)
                leaf = x["log_probs"].requires_grad_(True)
                value = SFTTrainer.compute_loss(
                    _sft(loss_type),
                    returning(fused_outputs(leaf, x["mask"])),
                    {"attention_mask": torch.ones(1)},
                    num_items_in_batch=items,
                )
                out.add(
                    f"trl/sft/{loss_type}{'' if items is None else '_items'}/{batch}",
                    "trl.trainer.sft_trainer.SFTTrainer.compute_loss",
                    identity,
                    value,
                    grads=gradients(value, {"log_probs": leaf}),
                    arguments={"loss_type": loss_type, "num_items_in_batch": items},
                    note="dft weighs each token's loss by its probability, not differentiated",
                )
    identity = BATCHES["float32"]
    x = load(identity)
    leaf = x["logits"].requires_grad_(True)
    labels = torch.where(x["mask"], x["tokens"].long(), -100)
    outputs = fused_outputs(torch.zeros(3, 6), x["mask"])

    def model(fused_lm_head: bool = False, **kwargs: object) -> object:
        return outputs if fused_lm_head else {"logits": leaf}

    value = SFTTrainer.compute_loss(
        _sft("nll", LabelSmoother(epsilon=0.1)),
        model,
        {"labels": labels, "attention_mask": torch.ones(1)},
    )
    out.add(
        "trl/sft/label_smoothing/float32",
        "trl.trainer.sft_trainer.SFTTrainer.compute_loss",
        identity,
        value,
        grads=gradients(value, {"logits": leaf}),
        arguments={"label_smoothing_factor": 0.1},
        note="logits[t] against tokens[t + 1] where that is under the mask; the smoothed part is "
        "the mean over the whole vocabulary, the label included",
    )


def add_divergences(out: Recorder) -> None:
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        for batch, identity in BATCHES.items():
            if batch != "float32" and beta not in (0.0, 0.5, 1.0):
                continue
            for temperature in (1.0, 0.7) if batch == "float32" else (1.0,):
                x = load(identity)
                leaf = x["logits"].requires_grad_(True)
                labels = torch.where(x["mask"], x["tokens"].long(), -100)
                value = GKDTrainer.generalized_jsd_loss(
                    leaf, x["teacher_logits"], labels, beta=beta, temperature=temperature
                )
                out.add(
                    f"trl/distill/jsd_{beta}_temperature_{temperature}/{batch}",
                    "trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss",
                    identity,
                    value,
                    grads=gradients(value, {"logits": leaf}),
                    arguments={"beta": beta, "temperature": temperature},
                    note="beta 0 is KL(teacher, student), 1 KL(student, teacher), else beta "
                    "KL(teacher, m) + (1 - beta) KL(student, m) with m = beta teacher + (1 - beta) "
                    "student; mean over unmasked positions",
                )
    for beta in (0.0, 0.5, 1.0):
        for name, extra in (
            ("plain", {}),
            ("temperature", {"temperature": 0.7}),
            (
                "softcap",
                {"student_final_logit_softcapping": 3.0, "teacher_final_logit_softcapping": 3.0},
            ),
        ):
            x = load(BATCHES["float32"])
            leaves = {k: x[k].requires_grad_(True) for k in ("hidden", "matrix")}
            value, entropy, _ = distillation_trainer._chunked_divergence_loss(
                leaves["hidden"],
                x["teacher_hidden"],
                leaves["matrix"],
                x["teacher_matrix"],
                x["mask"],
                beta,
                **extra,
            )
            out.add(
                f"trl/distill/hidden_{beta}_{name}/float32",
                "trl.trainer.distillation_trainer._chunked_divergence_loss",
                BATCHES["float32"],
                value,
                grads=gradients(value, leaves),
                arguments={"beta": beta, **extra},
                metrics={"student_entropy_sum": entropy},
                note="logits are hidden @ matrix.T of student and teacher; betas as in jsd; mean "
                "over unmasked positions (no shift)",
            )


def add_log_probs(out: Recorder) -> None:
    for batch, identity in BATCHES.items():
        x = load(identity)
        labels, cotangent = x["tokens"].long(), x["cotangent"].float()
        calls = {
            "token": lambda z: utils.selective_log_softmax(z, labels),  # noqa: B023
            "token_temperature": lambda z: utils.selective_log_softmax(z, labels, 0.7),  # noqa: B023
            "entropy": utils.entropy_from_logits,
        }
        for name, call in calls.items():
            leaf = x["logits"].detach().clone().requires_grad_(True)
            value = call(leaf)
            function = "entropy_from_logits" if name == "entropy" else "selective_log_softmax"
            out.add(
                f"trl/log_probs/{name}/{batch}",
                f"trl.trainer.utils.{function}",
                identity,
                value,
                grads=gradients(value, {"logits": leaf}, cotangent),
                arguments={"temperature": 0.7} if name == "token_temperature" else {},
                note="position t of the logits is scored against tokens[t] (no shift); the "
                "gradient is of sum(value * cotangent)",
            )
        for name, temperature, softcap in (
            ("plain", 1.0, None),
            ("temperature", 0.7, None),
            ("softcap", 0.7, 3.0),
        ):
            _fused_case(out, f"{name}/{batch}", identity, temperature, softcap)


def _fused_case(
    out: Recorder, name: str, identity: dict, temperature: float, softcap: float | None
) -> None:
    x = load(identity)
    leaves = {k: x[k].requires_grad_(True) for k in ("hidden", "matrix")}
    fields = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    log_probs, entropy, squares, _, _ = ChunkedLogProbFunction.apply(
        leaves["hidden"].reshape(18, -1),
        leaves["matrix"],
        None,
        x["tokens"].long().reshape(18),
        temperature,
        4,
        softcap,
        1.0,
        fields,
    )
    cotangent = x["cotangent"].float()
    weighted = torch.cat([log_probs * cotangent.reshape(18), 0.5 * entropy])
    out.add(
        f"trl/log_probs/fused_{name}",
        "trl.kernels.ChunkedLogProbFunction.apply",
        identity,
        {
            "log_probs": log_probs.reshape(3, 6),
            "entropy": entropy.reshape(3, 6),
            "log_sum_sq_probs": squares.reshape(3, 6),
        },
        grads=gradients(weighted, leaves),
        arguments={"temperature": temperature, "final_logit_softcapping": softcap, "chunk_size": 4},
        note="hidden[t] scored against tokens[t] (no shift); the gradient is of sum(log_probs * "
        "cotangent) + 0.5 sum(entropy)",
    )
