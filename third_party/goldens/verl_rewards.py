"""verl's KL estimators, KL in the reward, controllers, length penalty, majority vote."""

import types

import inputs
import numpy as np
import torch
from omegaconf import OmegaConf
from record import Recorder, gradients, ids, tensors
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos, metric_utils, ray_trainer
from verl.workers.reward_manager.dapo import DAPORewardManager

CORE = "verl.trainer.ppo.core_algos."


def add_kl(out: Recorder) -> None:
    batches = {
        "typical": ids("token_batch"),
        "extreme": ids("token_batch", extreme=True),
        "bfloat16": ids("token_batch", bfloat16=True),
    }
    kinds = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "k3+")
    for name, identity in batches.items():
        for kind in kinds:
            x = tensors(inputs.make(identity), bfloat16=bool(identity.get("bfloat16")))
            leaf = x["log_probs"].requires_grad_(True)
            value = core_algos.kl_penalty(leaf, x["ref_log_probs"], kind)
            out.add(
                f"verl/kl/{kind}/{name}",
                CORE + "kl_penalty",
                identity,
                value,
                grads=gradients(value, {"log_probs": leaf}),
                arguments={"kl_penalty": kind},
                note="per token, unmasked; k3 clamps the log-ratio to +-20, then itself to +-10, "
                "the others clamp nothing; '+' is the straight-through form",
            )
    identity = ids("token_batch")
    x = tensors(inputs.make(identity))
    value = core_algos.compute_rewards(
        x["rewards"], x["log_probs"], x["ref_log_probs"], kl_ratio=0.05
    )
    out.add(
        "verl/reward/compute_rewards/gaps",
        CORE + "compute_rewards",
        identity,
        value,
        arguments={"kl_ratio": 0.05, "token_level_scores": "rewards"},
        note="per token, unmasked",
    )


def add_controllers(out: Recorder) -> None:
    identity = ids("token_batch")
    observed = [0.3, 0.11, 0.1, 0.02, 0.0, 5.0]
    for kind in ("adaptive", "fixed"):
        config = OmegaConf.create(
            {"type": kind, "kl_coef": 0.2, "target_kl": 0.1, "horizon": 1000.0}
        )
        controller, trace = core_algos.get_kl_controller(config), []
        for kl in observed:
            controller.update(current_kl=kl, n_steps=64)
            trace.append(controller.value)
        out.add(
            f"verl/controller/{kind}",
            CORE + "get_kl_controller",
            identity,
            trace,
            arguments={
                "kl_coef": 0.2,
                "target_kl": 0.1,
                "horizon": 1000.0,
                "n_steps": 64,
                "observed": observed,
            },
            note="the coefficient after each of the observed values; reads no arrays",
        )
    for batch in ("gaps", "empty_row"):
        for kind in ("kl", "low_var_kl"):
            _add_apply_kl_penalty(out, batch, kind)


def _add_apply_kl_penalty(out: Recorder, batch: str, kind: str) -> None:
    identity = ids("token_batch", mask=batch)
    arrays = inputs.make(identity)
    x = tensors(arrays)
    mask = x["mask"].long()
    last = 9 - torch.argmax(mask.flip(-1), dim=-1)
    token_scores = torch.zeros_like(x["rewards"])
    token_scores[torch.arange(len(mask)), last] = x["scores"]
    token_scores = token_scores * mask
    data = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_scores": token_scores,
            "old_log_probs": x["log_probs"],
            "ref_log_prob": x["ref_log_probs"],
        }
    )
    controller = core_algos.AdaptiveKLController(0.1, 0.02, 100.0)
    data, metrics = ray_trainer.apply_kl_penalty(data, controller, kl_penalty=kind)
    out.add(
        f"verl/reward/apply_kl_penalty/{kind}_{batch}",
        "verl.trainer.ppo.ray_trainer.apply_kl_penalty",
        identity,
        {"token_level_rewards": data.batch["token_level_rewards"], "kl_coef": controller.value},
        arguments={
            "kl_penalty": kind,
            "kl_coef": 0.1,
            "target_kl": 0.02,
            "horizon": 100.0,
            "token_level_scores": "scores at the last set bit of the mask",
            "old_log_probs": "log_probs",
        },
        metrics={"current_kl": metrics["actor/reward_kl_penalty"]},
        note="the observed KL is the mean over rows of each row's mean per token (an empty row "
        "counts as 0); n_steps is the number of rows",
    )


def add_overlong(out: Recorder) -> None:
    """DAPO's reward manager; stand-ins: a tokenizer that decodes to '' and a scorer of scores."""
    identity = ids("token_batch", mask="plain")
    arrays = inputs.make(identity)
    lengths = arrays["mask"].sum(axis=1)
    rows, tokens = arrays["mask"].shape
    scores = iter(arrays["scores"].tolist())
    attention = np.concatenate([np.ones((rows, 1), bool), arrays["mask"]], axis=1)
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.ones(rows, 1, dtype=torch.long),
            "responses": torch.ones(rows, tokens, dtype=torch.long),
            "attention_mask": torch.from_numpy(attention).long(),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * rows, dtype=object),
            "extra_info": np.array([{} for _ in range(rows)], dtype=object),
            "data_source": np.array(["none"] * rows, dtype=object),
        },
    )
    tokenizer = types.SimpleNamespace(decode=lambda *a, **k: "text", eos_token="</s>")
    buffer = OmegaConf.create({"enable": True, "len": 4, "penalty_factor": 0.5, "log": False})
    manager = DAPORewardManager(
        tokenizer,
        0,
        compute_score=lambda **kwargs: next(scores),
        max_resp_len=8,
        overlong_buffer_cfg=buffer,
    )
    reward = manager(data)
    out.add(
        "verl/overlong/dapo/plain",
        "verl.workers.reward_manager.dapo.DAPORewardManager.__call__",
        identity,
        {"penalties": reward.sum(-1) - torch.from_numpy(arrays["scores"]), "lengths": lengths},
        arguments={"max_resp_len": 8, "overlong_buffer.len": 4, "penalty_factor": 0.5},
        note="reward less score; beyond max_resp_len the penalty goes on growing",
    )


def add_data_metrics(out: Recorder) -> None:
    for batch in ("gaps", "empty_row"):
        identity = ids("token_batch", mask=batch)
        x = tensors(inputs.make(identity))
        rows = len(x["mask"])
        data = DataProto.from_dict(
            tensors={
                "token_level_scores": x["rewards"],
                "token_level_rewards": x["rewards"],
                "advantages": x["advantages"],
                "returns": x["returns"],
                "values": x["values"],
                "prompts": torch.ones(rows, 1, dtype=torch.long),
                "responses": torch.ones_like(x["mask"], dtype=torch.long),
                "response_mask": x["mask"].long(),
                "prompt_length": torch.ones(rows),
                "response_length": x["mask"].sum(-1).float(),
            }
        )
        found = metric_utils.compute_data_metrics(data, use_critic=True)
        kept = ("critic/vf_explained_var", "critic/advantages/mean", "critic/returns/max")
        out.add(
            f"verl/metrics/data/{batch}",
            "verl.trainer.ppo.metric_utils.compute_data_metrics",
            identity,
            {name.removeprefix("critic/"): found[name] for name in kept},
            note="vf_explained_var is 1 - var(R - V) / (var(R) + 1e-5), unbiased, under the mask",
        )


def add_votes(out: Recorder) -> None:
    answers = ["12", "7", "12", "9", "7", "12"]
    correct = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    votes = [{"pred": a, "val": c} for a, c in zip(answers, correct, strict=True)]
    tied = votes[1:5]
    for name, subset in (("clear", votes), ("tied", tied)):
        out.add(
            f"verl/metrics/majority/{name}",
            "verl.trainer.ppo.metric_utils.calc_maj_val",
            ids("token_batch"),
            metric_utils.calc_maj_val(subset, vote_key="pred", val_key="val"),
            arguments={"votes": subset},
            note="a tie goes to the answer seen first; reads no arrays",
        )
