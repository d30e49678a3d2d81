"""OpenRLHF's KL estimators, rewards, controllers, advantages, length penalties and log-probs."""

import types

import inputs
import torch
from openrlhf_modules import experience_maker, kl_controller, length_penalty, utils
from record import Identity, Recorder, gradients, ids, tensor, tensors

UTILS = "openrlhf.models.utils."
MAKER = "openrlhf.trainer.ppo_utils.experience_maker.RemoteExperienceMaker."
RemoteExperienceMaker = experience_maker.RemoteExperienceMaker


def _load(identity: Identity) -> dict[str, torch.Tensor]:
    return tensors(inputs.make(identity), bfloat16=bool(identity.get("bfloat16")))


def add_kl(out: Recorder) -> None:
    batches = {
        "typical": ids("token_batch"),
        "extreme": ids("token_batch", extreme=True),
        "bfloat16": ids("token_batch", bfloat16=True),
    }
    variants = {
        "plain": {},
        "unbiased": {"unbiased_gradient": True},
        "unbiased_weighted": {"unbiased_gradient": True, "log_probs_old": "old_log_probs"},
    }
    for batch, identity in batches.items():
        for kind in ("k1", "k2", "k3"):
            for variant, kwargs in variants.items():
                x = _load(identity)
                leaf = x["log_probs"].requires_grad_(True)
                call = {k: x[v] if isinstance(v, str) else v for k, v in kwargs.items()}
                value = utils.compute_approx_kl(leaf, x["ref_log_probs"], kl_estimator=kind, **call)
                out.add(
                    f"openrlhf/kl/{kind}_{variant}/{batch}",
                    UTILS + "compute_approx_kl",
                    identity,
                    value,
                    grads=gradients(value, {"log_probs": leaf}),
                    arguments={"kl_estimator": kind, **kwargs},
                    note="per token, unmasked, float32 inside; every value is clamped to +-10; "
                    "unbiased is the straight-through form, weighted by min(ratio to old, 10)",
                )


def add_rewards(out: Recorder) -> None:
    for batch in ("gaps", "empty_row"):
        identity = ids("token_batch", mask=batch)
        x = _load(identity)
        kl = utils.compute_approx_kl(x["log_probs"], x["ref_log_probs"], kl_estimator="k1")
        for name, clip in (("plain", None), ("clipped_score", (-0.5, 0.5))):
            value = utils.compute_reward(
                x["scores"].clone(), 0.1, kl, action_mask=x["mask"].float(), reward_clip_range=clip
            )
            out.add(
                f"openrlhf/reward/{name}/{batch}",
                UTILS + "compute_reward",
                identity,
                value,
                arguments={"kl_coef": 0.1, "kl": "k1", "reward_clip_range": clip},
                note="the KL is subtracted outside the mask too; an empty row's score lands on its "
                "last token",
            )
        for dim in (1, 0):
            value = utils.masked_normalize(x["per_token"], x["mask"].float(), dim=dim)
            out.add(
                f"openrlhf/masked/normalize_dim_{dim}/{batch}",
                UTILS + "masked_normalize",
                identity,
                value,
                arguments={"dim": dim},
                note="biased variance, floored at 1e-8",
            )


def add_controllers(out: Recorder) -> None:
    observed = [0.3, 0.11, 0.1, 0.02, 0.0, 5.0]
    for name in ("Adaptive", "Fixed"):
        arguments = {"target": 0.1, "horizon": 1000.0} if name == "Adaptive" else {}
        controller = getattr(kl_controller, f"{name}KLController")(0.2, *arguments.values())
        trace = []
        for kl in observed:
            controller.update(kl, 64)
            trace.append(controller.value)
        out.add(
            f"openrlhf/controller/{name.lower()}",
            f"openrlhf.trainer.ppo_utils.kl_controller.{name}KLController",
            ids("token_batch"),
            trace,
            arguments={"kl_coef": 0.2, **arguments, "n_steps": 64, "observed": observed},
            note="the coefficient after each of the observed values; reads no arrays",
        )


def add_gae(out: Recorder) -> None:
    cases = {
        "plain": ("plain", 1.0, 0.95),
        "plain_discounted": ("plain", 0.9, 0.8),
        "gaps": ("gaps", 0.99, 0.95),
        "empty_row": ("empty_row", 0.99, 0.95),
    }
    for name, (mask, gamma, lam) in cases.items():
        identity = ids("token_batch", mask=mask)
        x = _load(identity)
        advantages, returns = RemoteExperienceMaker.get_advantages_and_returns(
            None, x["values"], x["rewards"], x["mask"].float(), gamma, lam
        )
        mask_float = x["mask"].float()
        out.add(
            f"openrlhf/advantages/gae/{name}",
            MAKER + "get_advantages_and_returns",
            identity,
            {"advantages": advantages * mask_float, "returns": returns * mask_float},
            arguments={"gamma": gamma, "lambd": lam},
            note="before whitening; stored times the mask; a masked token is a step of value 0",
        )
        value = RemoteExperienceMaker.get_cumulative_returns(None, x["rewards"], mask_float, gamma)
        out.add(
            f"openrlhf/advantages/cumulative_returns/{name}",
            MAKER + "get_cumulative_returns",
            identity,
            {"returns": value * mask_float},
            arguments={"gamma": gamma},
            note="stored times the mask; a masked token is a step that discounts",
        )


ESTIMATORS = (
    "gae",
    "reinforce",
    "rloo",
    "reinforce_baseline",
    "dr_grpo",
    "group_norm",
    "flash_reinforce",
)


def add_estimators(out: Recorder) -> None:
    """compute_advantages_and_returns; stand-ins: the strategy's arguments and an Experience."""
    for groups in ("even", "constant"):
        identity = ids("group_batch", groups=groups)
        size = inputs.GROUPS[groups].count(0)
        for estimator in ESTIMATORS:
            for kl_coef in (0.0, 0.1):
                _estimator_case(out, identity, groups, size, estimator, kl_coef)
    identity = ids("group_batch", groups="even")
    _estimator_case(out, identity, "even_no_std", 3, "reinforce_baseline", 0.0, no_std_norm=True)
    _estimator_case(out, identity, "even_gamma_0.9", 3, "reinforce", 0.0, gamma=0.9)


def _estimator_case(
    out: Recorder,
    identity: Identity,
    name: str,
    size: int,
    estimator: str,
    kl_coef: float,
    no_std_norm: bool = False,
    gamma: float = 1.0,
) -> None:
    x = _load(identity)
    rows = len(x["scores"])
    advantage = types.SimpleNamespace(
        estimator=estimator, gamma=gamma, lambd=0.95, no_std_norm=no_std_norm
    )
    args = types.SimpleNamespace(
        algo=types.SimpleNamespace(advantage=advantage),
        rollout=types.SimpleNamespace(n_samples_per_prompt=size, max_new_tokens=10),
        reward=types.SimpleNamespace(clip_range=None),
        data=types.SimpleNamespace(max_len=10),
    )
    maker = object.__new__(RemoteExperienceMaker)
    maker.strategy = types.SimpleNamespace(args=args)
    maker.advantage_estimator = estimator
    maker.kl_ctl = types.SimpleNamespace(value=kl_coef)
    experience = types.SimpleNamespace(
        rewards=x["scores"].clone(),
        index=list(range(rows)),
        info={},
        kl=x["kl"],
        action_mask=x["mask"].float(),
        values=x["values"],
        response_length=x["mask"].sum(-1),
        truncated=None,
    )
    (done,) = maker.compute_advantages_and_returns([experience])
    mask = x["mask"].float()
    out.add(
        f"openrlhf/advantages/{estimator}/{name}{'_kl' if kl_coef else ''}",
        MAKER + "compute_advantages_and_returns",
        identity,
        {"advantages": done.advantages * mask, "returns": done.returns * mask},
        arguments={
            "estimator": estimator,
            "gamma": gamma,
            "lambd": 0.95,
            "kl_coef": kl_coef,
            "no_std_norm": no_std_norm,
            "n_samples_per_prompt": size,
        },
        note="scores are shaped per group first, then kl_coef * kl is taken off each token, then "
        "summed from the end (gae: values); gae, reinforce and reinforce_baseline whiten over the "
        "batch with the biased variance floored at 1e-8; stored times the mask",
    )


def add_penalties(out: Recorder) -> None:
    identity = ids("token_batch", mask="plain")
    x = _load(identity)
    experience = types.SimpleNamespace(
        rewards=torch.zeros(len(x["scores"])), response_length=x["mask"].sum(-1)
    )
    length_penalty.apply_overlong_penalty([experience], 8, 4, 0.5)
    out.add(
        "openrlhf/overlong/dapo/plain",
        "openrlhf.trainer.ppo_utils.length_penalty.apply_overlong_penalty",
        identity,
        {"penalties": experience.rewards, "lengths": experience.response_length},
        arguments={
            "max_new_tokens": 8,
            "overlong_buffer_len": 4,
            "overlong_penalty_factor": 0.5,
        },
        note="the excess is capped at the buffer",
    )
    for coef in (0.3, -0.5):
        experience = types.SimpleNamespace(rewards=x["scores"].clone(), truncated=x["mask"].all(-1))
        length_penalty.apply_stop_properly_penalty([experience], coef)
        out.add(
            f"openrlhf/overlong/stop_properly_{coef}/plain",
            "openrlhf.trainer.ppo_utils.length_penalty.apply_stop_properly_penalty",
            identity,
            experience.rewards,
            arguments={"coef": coef, "truncated": "rows whose mask is full", "rewards": "scores"},
        )


def add_vocabulary(out: Recorder) -> None:
    batches = {
        "float32": ids("vocab_batch"),
        "extreme": ids("vocab_batch", scale=40.0),
        "bfloat16": ids("vocab_batch", bfloat16=True),
    }
    for name, identity in batches.items():
        x = _load(identity)
        cotangent = tensor(inputs.make(identity)["cotangent"])
        labels = x["tokens"].long()
        for temperature in (1.0, 0.7):
            leaf = x["logits"].detach().clone().requires_grad_(True)
            value = utils.log_probs_from_logits(leaf * 1.0, labels, temperature)
            out.add(
                f"openrlhf/log_probs/token_{temperature}/{name}",
                UTILS + "log_probs_from_logits",
                identity,
                value,
                grads=gradients(value, {"logits": leaf}, cotangent),
                arguments={"temperature": temperature},
                note="position t of the logits is scored against tokens[t] (no shift); the "
                "gradient is of sum(value * cotangent); divides the logits in place",
            )
        leaf = x["logits"].detach().clone().requires_grad_(True)
        value = utils.compute_entropy(leaf)
        out.add(
            f"openrlhf/log_probs/entropy/{name}",
            UTILS + "compute_entropy",
            identity,
            value,
            grads=gradients(value, {"logits": leaf}, cotangent),
            note="the gradient is of sum(value * cotangent)",
        )
