"""TRL's DPO family, KTO, reward, CPO, SimPO and ORPO, from the trainers' own methods.

Stand-ins: the model returns per-token log-probs (zero outside the mask, as TRL's fused head does),
rewards or logits of inputs.py.
"""

import types

import torch
from record import Identity, Recorder, gradients, ids
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl_stubs import fused_outputs, last_metrics, load, returning, trainer

PAIRS = {"typical": ids("pair_batch"), "extreme": ids("pair_batch", extreme=True)}


def _chosen_first(x: torch.Tensor) -> torch.Tensor:
    """[P, 2, ...] to [2P, ...], all chosen and then all rejected, as TRL's collator has them."""
    return torch.cat([x[:, 0], x[:, 1]])


def _with_prompt(mask: torch.Tensor) -> torch.Tensor:
    """Completion mask with one prompt token in front."""
    return torch.cat([torch.zeros(len(mask), 1, dtype=torch.bool), mask], dim=1)


def _dpo_case(
    out: Recorder, name: str, identity: Identity, loss_type: str, note: str | None = None, **kwargs
) -> None:
    x = load(identity)
    leaf = x["policy"].requires_grad_(True)
    mask = _chosen_first(x["mask"])
    sums_of_squares = torch.where(mask, x["kl_reference"].to(leaf.dtype), 0.0)
    policy = fused_outputs(_chosen_first(leaf), mask, log_sum_sq_probs=sums_of_squares)
    reference = fused_outputs(_chosen_first(x["reference"]), mask)
    defaults = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
        "discopop_tau": 0.05,
    }
    settings = {**defaults, **kwargs}
    args = types.SimpleNamespace(
        discopop_tau=settings.pop("discopop_tau"), gradient_checkpointing_kwargs=None
    )
    self = trainer(
        DPOTrainer,
        args=args,
        loss_types=[loss_type],
        loss_weights=[1.0],
        precompute_ref_logps=False,
        ref_model=returning(reference),
        **settings,
    )
    completion_mask = _with_prompt(mask).long()
    batch = {
        "input_ids": torch.ones_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
    }
    value = DPOTrainer._compute_loss(self, returning(policy), batch, return_outputs=False)
    metrics = last_metrics(
        self, "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"
    )
    out.add(
        f"trl/preference/{name}",
        "trl.trainer.dpo_trainer.DPOTrainer._compute_loss",
        identity,
        value,
        grads=gradients(value, {"policy": leaf}),
        arguments={"loss_type": loss_type, "beta": settings["beta"], **kwargs},
        metrics=metrics,
        note=note,
    )


def add_dpo(out: Recorder) -> None:
    kinds: dict[str, dict[str, object]] = {
        "sigmoid": {},
        "hinge": {},
        "ipo": {"beta": 0.2},
        "exo_pair": {"label_smoothing": 0.1},
        "nca_pair": {},
        "robust": {"label_smoothing": 0.1},
        "bco_pair": {},
        "sppo_hard": {},
        "aot": {"label_smoothing": 0.1},
        "aot_unpaired": {"label_smoothing": 0.1},
        "apo_zero": {},
        "apo_down": {},
        "discopop": {},
        "sft": {},
        "sigmoid_norm": {"beta": 2.0},
    }
    notes = {
        "ipo": "the log-ratio of each completion is divided by its length first",
        "sigmoid_norm": "the log-ratio of each completion is divided by its length first",
        "sft": "mean over the unmasked tokens of the chosen completions",
    }
    for loss_type, kwargs in kinds.items():
        for batch, identity in PAIRS.items():
            label = f"dpo_{loss_type}/{batch}"
            _dpo_case(out, label, identity, loss_type, notes.get(loss_type), **kwargs)
    typical, low = PAIRS["typical"], ids("pair_batch", bfloat16=True)
    _dpo_case(out, "dpo_sigmoid/bfloat16", low, "sigmoid")
    _dpo_case(out, "dpo_sigmoid_beta_1/typical", typical, "sigmoid", beta=1.0)
    for kind in ("forward_kl", "js_divergence", "alpha_divergence"):
        _dpo_case(out, f"dpo_{kind}/typical", typical, "sigmoid", f_divergence_type=kind)
    weighted = "times exp(mean over tokens of log_probs - log_sum_sq_probs) of both completions, "
    _dpo_case(
        out,
        "dpo_weighted/typical",
        typical,
        "sigmoid",
        weighted + "not differentiated; log_sum_sq_probs = kl_reference",
        use_weighting=True,
    )
    _dpo_case(
        out,
        "dpo_length_desensitised/typical",
        typical,
        "sigmoid",
        "tokens beyond the shorter completion's length count ld_alpha",
        ld_alpha=0.3,
    )


def add_kto(out: Recorder) -> None:
    kinds = {
        "kto": ("kto", True, {"desirable_weight": 1.0, "undesirable_weight": 1.0}, "labels"),
        "kto_weights": (
            "kto",
            True,
            {"desirable_weight": 1.5, "undesirable_weight": 0.5},
            "labels",
        ),
        "kto_all_desirable": (
            "kto",
            True,
            {"desirable_weight": 1.0, "undesirable_weight": 1.0},
            "all true",
        ),
        "apo_zero_unpaired": (
            "apo_zero_unpaired",
            False,
            {"desirable_weight": 1.0, "undesirable_weight": 1.0},
            "labels",
        ),
    }
    for name, (loss_type, with_kl, weights, labels) in kinds.items():
        for batch, identity in PAIRS.items():
            x = load(identity)
            label = x["labels"] if labels == "labels" else torch.ones_like(x["labels"])
            leaf = x["policy"].requires_grad_(True)
            mask, kl_mask = _chosen_first(x["mask"]), x["kl_mask"]

            def model(main: object, kl: object) -> object:
                return lambda **kwargs: kl if bool((kwargs["input_ids"] == 2).all()) else main

            policy = model(
                fused_outputs(_chosen_first(leaf), mask), fused_outputs(x["kl_policy"], kl_mask)
            )
            reference = model(
                fused_outputs(_chosen_first(x["reference"]), mask),
                fused_outputs(x["kl_reference"], kl_mask),
            )
            self = trainer(
                KTOTrainer,
                args=types.SimpleNamespace(gradient_checkpointing_kwargs=None),
                beta=0.1,
                loss_type=loss_type,
                calculate_KL=with_kl,
                precompute_ref_logps=False,
                ref_model=reference,
                **weights,
            )
            completion = _with_prompt(mask).long()
            value = KTOTrainer._compute_loss(
                self,
                policy,
                {
                    "input_ids": torch.ones_like(completion),
                    "attention_mask": torch.ones_like(completion),
                    "completion_mask": completion,
                    "KL_input_ids": 2 * torch.ones_like(completion),
                    "KL_attention_mask": torch.ones_like(completion),
                    "KL_completion_mask": _with_prompt(kl_mask).long(),
                    "label": label,
                },
                False,
            )
            out.add(
                f"trl/preference/{name}/{batch}",
                "trl.trainer.kto_trainer.KTOTrainer._compute_loss",
                identity,
                value,
                grads=gradients(value, {"policy": leaf}),
                arguments={"loss_type": loss_type, "beta": 0.1, "labels": labels, **weights},
                metrics=last_metrics(self, "kl"),
                note="ten completions: the five chosen rows, then the rejected; their label is in "
                "labels; kl is max(0, mean over rows of sum(kl_policy - kl_reference)), not "
                "differentiated; mean over the ten",
            )


def add_reward(out: Recorder) -> None:
    kinds = {
        "bradley_terry": (None, False),
        "bradley_terry_margin": (None, True),
        "bradley_terry_centred": (0.01, False),
        "bradley_terry_centred_margin": (0.01, True),
    }
    batches = {**PAIRS, "bfloat16": ids("pair_batch", bfloat16=True)}
    for name, (centre, margin) in kinds.items():
        for batch, identity in batches.items():
            x = load(identity)
            leaf = x["rewards"].requires_grad_(True)
            logits = _chosen_first(leaf).unsqueeze(-1)
            self = trainer(
                RewardTrainer, args=types.SimpleNamespace(center_rewards_coefficient=centre)
            )
            batch_inputs = {"attention_mask": torch.ones(len(logits), 1)}
            if margin:
                batch_inputs["margin"] = x["margins"]
            value = RewardTrainer.compute_loss(
                self, returning(types.SimpleNamespace(logits=logits)), batch_inputs
            )
            out.add(
                f"trl/preference/{name}/{batch}",
                "trl.trainer.reward_trainer.RewardTrainer.compute_loss",
                identity,
                value,
                grads=gradients(value, {"rewards": leaf}),
                arguments={
                    "center_rewards_coefficient": centre,
                    "margin": "margins" if margin else None,
                },
                metrics=last_metrics(self, "accuracy", "margin"),
            )


def add_reference_free(out: Recorder) -> None:
    kinds = {
        "cpo_sigmoid": {"loss_type": "sigmoid"},
        "cpo_smoothed": {"loss_type": "sigmoid", "label_smoothing": 0.1},
        "cpo_hinge": {"loss_type": "hinge"},
        "cpo_ipo": {"loss_type": "ipo"},
        "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
        "simpo_smoothed": {"loss_type": "simpo", "beta": 2.0, "label_smoothing": 0.1},
        "alpha_po": {"loss_type": "simpo", "beta": 2.0, "alpha": 0.25},
    }
    for name, kwargs in kinds.items():
        for batch, identity in PAIRS.items():
            x = load(identity)
            leaf = x["policy"].requires_grad_(True)
            sums = torch.where(x["mask"], leaf, 0.0).sum(-1)
            average = kwargs["loss_type"] in ("simpo", "ipo")
            scores = sums / x["mask"].sum(-1) if average else sums
            settings = {"beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": 0.5, "alpha": 0.0}
            self = trainer(CPOTrainer, **{**settings, **kwargs})
            losses, chosen, rejected = CPOTrainer.cpo_loss(self, scores[:, 0], scores[:, 1])
            out.add(
                f"trl/preference/{name}/{batch}",
                "trl.experimental.cpo.cpo_trainer.CPOTrainer.cpo_loss",
                identity,
                {"losses": losses, "rewards": torch.stack([chosen, rejected], dim=1)},
                grads=gradients(losses, {"policy": leaf}),
                arguments={**settings, **kwargs},
                note="of log-probs averaged over the mask" if average else "of sums over the mask",
            )
    for batch, identity in PAIRS.items():
        x = load(identity)
        leaf = x["policy"].requires_grad_(True)
        scores = torch.where(x["mask"], leaf, 0.0).sum(-1) / x["mask"].sum(-1)
        self = trainer(ORPOTrainer, beta=0.1)
        losses, chosen, rejected, _, _ = ORPOTrainer.odds_ratio_loss(
            self, scores[:, 0], scores[:, 1]
        )
        out.add(
            f"trl/preference/orpo_odds_ratio/{batch}",
            "trl.experimental.orpo.orpo_trainer.ORPOTrainer.odds_ratio_loss",
            identity,
            {"losses": losses, "rewards": torch.stack([chosen, rejected], dim=1)},
            grads=gradients(losses, {"policy": leaf}),
            arguments={"beta": 0.1},
            note="beta log sigmoid(log odds ratio), which the ORPO loss subtracts; of log-probs "
            "averaged over the mask",
        )


def add_with_likelihood(out: Recorder) -> None:
    """CPO, SimPO and ORPO with their negative log-likelihood, from logits."""
    identity = ids("vocab_batch")
    kinds = {
        "cpo_full": (CPOTrainer, {"loss_type": "sigmoid", "cpo_alpha": 1.0, "beta": 0.1}),
        "cpo_simpo_full": (CPOTrainer, {"loss_type": "simpo", "cpo_alpha": 0.5, "beta": 2.0}),
        "orpo_full": (ORPOTrainer, {"beta": 0.1}),
    }
    for name, (cls, kwargs) in kinds.items():
        x = load(identity)
        leaf = x["logits"].requires_grad_(True)
        tokens, mask = x["tokens"].long(), x["mask"]
        # Rejected completions: the rows moved down by one; the first token of each is its prompt.
        both = torch.cat([leaf, torch.roll(leaf, 1, dims=0)])
        answer = mask & (torch.arange(mask.shape[1]) > 0)

        def batch_of(prefix: str, shift: int, tokens=tokens, mask=mask, answer=answer) -> dict:
            def roll(z: torch.Tensor) -> torch.Tensor:
                return torch.roll(z, shift, dims=0)

            return {
                f"{prefix}_input_ids": roll(tokens),
                f"{prefix}_attention_mask": roll(mask.long()),
                f"{prefix}_labels": roll(torch.where(answer, tokens, -100)),
            }

        self = trainer(
            cls,
            is_encoder_decoder=False,
            pad_token_id=0,
            padding_value=0,
            label_smoothing=0.0,
            simpo_gamma=0.5,
            alpha=0.0,
            **kwargs,
        )
        value, metrics = cls.get_batch_loss_metrics(
            self,
            returning(types.SimpleNamespace(logits=both)),
            {**batch_of("chosen", 0), **batch_of("rejected", 1)},
        )
        kept = ("nll_loss", "logps/chosen", "logps/rejected", "log_odds_ratio")
        out.add(
            f"trl/preference/{name}/float32",
            f"{cls.__module__}.{cls.__name__}.get_batch_loss_metrics",
            identity,
            value,
            grads=gradients(value, {"logits": leaf}),
            arguments={**kwargs, "simpo_gamma": 0.5},
            metrics={k: metrics[k] for k in kept if k in metrics},
            note="chosen rows are the batch, rejected rows the batch rolled by one row; logits[t] "
            "is scored against tokens[t + 1]; labels are tokens under the mask but the first; the "
            "likelihood term is a mean over the chosen labels (ORPO: every chosen token of the "
            "mask, the prompt's too)",
        )
