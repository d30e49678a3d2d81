"""verl's correction between sampler and trainer: weights, rejection, metrics."""

import inputs
import torch
from record import Identity, Recorder, ids, tensors
from verl.trainer.ppo import rollout_corr_helper

CORRECTION = "verl.trainer.ppo.rollout_corr_helper."


def add_off_policy(out: Recorder) -> None:
    batches = {
        "gaps": ids("token_batch"),
        "empty_row": ids("token_batch", mask="empty_row"),
        "extreme": ids("token_batch", extreme=True),
    }
    for name, identity in batches.items():
        x = tensors(inputs.make(identity))
        log_ratio, mask = x["log_probs"] - x["rollout_log_probs"], x["mask"].float()
        for level in ("token", "sequence"):
            for threshold in (1.5, "0.7_1.5" if level == "token" else "0.3_3"):
                if (name, level, threshold) == ("extreme", "sequence", "0.3_3"):
                    continue  # every weight is 0: verl divides by 0 in its effective sample size
                for normalize in (False, True):
                    kind = "icepop" if isinstance(threshold, str) else "tis"
                    label = f"{level}_{kind}{'_normalized' if normalize else ''}"
                    kwargs = {
                        "rollout_is": level,
                        "rollout_is_threshold": threshold,
                        "rollout_is_batch_normalize": normalize,
                    }
                    weights, metrics = rollout_corr_helper.compute_rollout_correction_weights(
                        log_ratio, mask, **kwargs
                    )
                    out.add(
                        f"verl/off_policy/weights/{label}_{name}",
                        CORRECTION + "compute_rollout_correction_weights",
                        identity,
                        weights,
                        arguments={"log_ratio": "log_probs - rollout_log_probs", **kwargs},
                        metrics={k.removeprefix("rollout_is_"): v for k, v in metrics.items()},
                    )
        _add_rejections(out, name, identity, log_ratio, mask)
        metrics = rollout_corr_helper.compute_offpolicy_metrics(
            x["log_probs"], x["rollout_log_probs"], mask
        )
        out.add(
            f"verl/off_policy/metrics/{name}",
            CORRECTION + "compute_offpolicy_metrics",
            identity,
            metrics,
            arguments={"old_log_prob": "log_probs", "rollout_log_prob": "rollout_log_probs"},
        )


def _add_rejections(
    out: Recorder, batch: str, identity: Identity, log_ratio: torch.Tensor, mask: torch.Tensor
) -> None:
    thresholds = {
        "token_k1": "0.8_1.25",
        "token_k2": 0.05,
        "token_k3": 0.05,
        "seq_sum_k1": "0.4_2.5",
        "seq_sum_k2": 0.5,
        "seq_sum_k3": 0.5,
        "seq_mean_k1": "0.9_1.1",
        "seq_mean_k2": 0.1,
        "seq_mean_k3": 0.09,
        "seq_max_k2": 0.2,
        "seq_max_k3": 0.2,
        "token_k1,seq_mean_k3": "0.8_1.25,0.06",
    }
    for option, threshold in thresholds.items():
        kept, metrics = rollout_corr_helper.compute_rollout_rejection_mask(
            log_ratio, mask, rollout_rs=option, rollout_rs_threshold=threshold
        )
        wanted = ("rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction")
        out.add(
            f"verl/off_policy/rejection/{option}_{batch}",
            CORRECTION + "compute_rollout_rejection_mask",
            identity,
            kept,
            arguments={
                "log_ratio": "log_probs - rollout_log_probs",
                "rollout_rs": option,
                "rollout_rs_threshold": threshold,
            },
            metrics={k.removeprefix("rollout_rs_"): metrics[k] for k in wanted},
            note="the mask that is left; k1 here is -log_ratio, clamped to +-20, against the logs "
            "of lower and upper",
        )
