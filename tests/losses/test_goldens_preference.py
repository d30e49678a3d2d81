"""Golden numbers of preference losses, supervised extras, distillation and metrics."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf import losses

spec = importlib.util.spec_from_file_location(
    "goldens", pathlib.Path(__file__).with_name("goldens.py")
)
goldens = importlib.util.module_from_spec(spec)
spec.loader.exec_module(goldens)

Arrays, Case = goldens.Arrays, goldens.Case
assert_case, assert_close = goldens.assert_case, goldens.assert_close
value_and_grads = goldens.value_and_grads

# Families that peers have and jaxrlhf.losses will not.
NOT_PLANNED = {
    "verl/distill/forward_kl_topk": "KL over the teacher's top tokens, not renormalised",
    "trl/preference/dpo_exo_pair": "",
    "trl/preference/dpo_nca_pair": "",
    "trl/preference/dpo_bco_pair": "",
    "trl/preference/bco": "",
    "trl/preference/dpo_sppo_hard": "",
    "trl/preference/dpo_aot": "sorts over the micro-batch",
    "trl/preference/dpo_aot_unpaired": "sorts over the micro-batch",
    "trl/preference/dpo_apo_zero": "",
    "trl/preference/apo_zero_unpaired": "",
    "trl/preference/dpo_apo_down": "",
    "trl/preference/dpo_discopop": "",
    "trl/preference/dpo_forward_kl": "",
    "trl/preference/dpo_js_divergence": "",
    "trl/preference/dpo_alpha_divergence": "",
    "trl/preference/dpo_weighted": "",
    "trl/preference/dpo_length_desensitised": "",
    "trl/preference/alpha_po": "",
    "trl/sft/dft": "",
    "trl/sft/dft_items": "",
}

# Cases (or families) whose function we have and whose number no keyword of ours gives.
DIFFERENT = {
    "openrlhf/preference/LogExpLoss/extreme": "OpenRLHF overflows to inf there",
}

ACCOUNT = goldens.Account(set(), NOT_PLANNED, DIFFERENT)
checks = ACCOUNT.check


# --- reward models ------------------------------------------------------------------------------


@checks(
    "trl/preference/bradley_terry",
    "trl/preference/bradley_terry_margin",
    "trl/preference/bradley_terry_centred",
    "trl/preference/bradley_terry_centred_margin",
    "openrlhf/preference/PairWiseLoss",
    "openrlhf/preference/PairWiseLoss_margin",
    "openrlhf/preference/LogExpLoss",
)
def check_bradley_terry(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]

    def loss(leaves):
        per_pair = losses.bradley_terry(
            leaves["rewards"][:, 0],
            leaves["rewards"][:, 1],
            margin=x["margins"] if a["margin"] else None,
            centring=a.get("center_rewards_coefficient"),
        )
        return jnp.mean(per_pair)

    assert_case(case, *value_and_grads(loss, {"rewards": x["rewards"]}))
    for key, ours in losses.pair_metrics(x["rewards"][:, 0], x["rewards"][:, 1])._asdict().items():
        if "metrics" in case:
            assert_close(jnp.mean(ours), case["metrics"][key], case, key)


# --- preferences --------------------------------------------------------------------------------


def _pair_sums(policy: jax.Array, x: Arrays, *, average: bool = False) -> tuple[jax.Array, ...]:
    """Chosen and rejected, of the policy and of the reference: the arguments of dpo."""
    ours = losses.sequence_log_probs(policy, x["mask"], average=average)
    reference = losses.sequence_log_probs(x["reference"], x["mask"], average=average)
    return ours[:, 0], ours[:, 1], reference[:, 0], reference[:, 1]


def _check_implicit_rewards(case: Case, x: Arrays) -> None:
    """TRL's metrics are of sums, whatever the loss is of."""
    beta, metrics = case["arguments"]["beta"], case["metrics"]
    chosen, rejected, ref_chosen, ref_rejected = _pair_sums(x["policy"], x)
    chosen = losses.implicit_rewards(chosen, ref_chosen, beta=beta)
    rejected = losses.implicit_rewards(rejected, ref_rejected, beta=beta)
    pairs = losses.pair_metrics(chosen, rejected)
    for key, ours in {
        "chosen": chosen, "rejected": rejected, "accuracies": pairs.accuracy,
        "margins": pairs.margin,
    }.items():  # fmt: skip
        assert_close(jnp.mean(ours), metrics[f"rewards/{key}"], case, key)


@checks(
    *(
        f"trl/preference/dpo_{kind}"
        for kind in ("sigmoid", "sigmoid_beta_1", "sigmoid_norm", "hinge", "ipo", "robust")
    )
)
def check_trl_dpo(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]
    average = a["loss_type"] in ("ipo", "sigmoid_norm")

    def loss(leaves):
        per_pair = losses.dpo(
            *_pair_sums(leaves["policy"], x, average=average),
            beta=a["beta"],
            kind=a["loss_type"].removesuffix("_norm"),
            label_smoothing=a.get("label_smoothing"),
        )
        return jnp.mean(per_pair)

    assert_case(case, *value_and_grads(loss, {"policy": x["policy"]}))
    _check_implicit_rewards(case, x)


@checks("trl/preference/dpo_sft")
def check_likelihood_of_chosen(name: str, case: Case, x: Arrays) -> None:
    def loss(leaves):
        per_token = losses.cross_entropy(leaves["policy"][:, 0])
        return losses.aggregate(per_token, x["mask"][:, 0], mode="token_mean")

    assert_case(case, *value_and_grads(loss, {"policy": x["policy"]}))
    _check_implicit_rewards(case, x)


@checks(*(f"openrlhf/preference/dpo_{kind}" for kind in ("sigmoid", "smoothed", "ipo")))
def check_openrlhf_dpo(name: str, case: Case, x: Arrays) -> None:
    """OpenRLHF's IPO is of sums."""
    a = case["arguments"]
    chosen, rejected, *reference = _pair_sums(x["policy"], x)

    def loss(leaves):
        per_pair = losses.dpo(
            leaves["policy_sums"][:, 0],
            leaves["policy_sums"][:, 1],
            *reference,
            beta=a["beta"],
            kind="ipo" if a.get("ipo") else "sigmoid",
            label_smoothing=a.get("label_smoothing"),
        )
        return jnp.mean(per_pair)

    sums = jnp.stack([chosen, rejected], axis=1)
    value, grads = value_and_grads(loss, {"policy_sums": sums})
    rewards = losses.implicit_rewards(sums, jnp.stack(reference, axis=1), beta=a["beta"])
    assert_case(case, {"loss": value, "rewards": rewards}, grads)


@checks("trl/preference/kto", "trl/preference/kto_weights", "trl/preference/kto_all_desirable")
def check_kto(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]
    desirable = x["labels"] if a["labels"] == "labels" else jnp.ones_like(x["labels"])
    point = losses.kto_reference_point(
        losses.sequence_log_probs(x["kl_policy"], x["kl_mask"]),
        losses.sequence_log_probs(x["kl_reference"], x["kl_mask"]),
    )
    assert_close(point, case["metrics"]["kl"], case, "reference point")

    def loss(leaves):
        chosen, rejected, ref_chosen, ref_rejected = _pair_sums(leaves["policy"], x)
        per_completion = losses.kto(
            jnp.concatenate([chosen, rejected]),
            jnp.concatenate([ref_chosen, ref_rejected]),
            desirable,
            point,
            beta=a["beta"],
            desirable_weight=a["desirable_weight"],
            undesirable_weight=a["undesirable_weight"],
        )
        return jnp.mean(per_completion)

    assert_case(case, *value_and_grads(loss, {"policy": x["policy"]}))


def _contrast(chosen: jax.Array, rejected: jax.Array, a: dict) -> jax.Array:
    """TRL's CPO without its likelihood, SimPO among its kinds."""
    smoothing = a.get("label_smoothing") or None
    if a["loss_type"] == "simpo":
        return losses.simpo(
            chosen, rejected, beta=a["beta"], margin=a["simpo_gamma"], label_smoothing=smoothing
        )
    return losses.cpo(
        chosen,
        rejected,
        beta=a["beta"],
        kind=a["loss_type"],
        label_smoothing=smoothing,
        likelihood_coef=None,
    )


@checks(
    *(f"trl/preference/cpo_{kind}" for kind in ("sigmoid", "smoothed", "hinge", "ipo")),
    "trl/preference/simpo",
    "trl/preference/simpo_smoothed",
    "trl/preference/orpo_odds_ratio",
)
def check_reference_free(name: str, case: Case, x: Arrays) -> None:
    """TRL's odds ratio loss is what its ORPO subtracts: the negative of ours."""
    a = case["arguments"]
    odds_ratio = "loss_type" not in a
    average = odds_ratio or a["loss_type"] in ("simpo", "ipo")

    def loss(leaves):
        sums = losses.sequence_log_probs(leaves["policy"], x["mask"], average=average)
        if odds_ratio:
            return -losses.orpo(sums[:, 0], sums[:, 1], beta=a["beta"], likelihood_coef=None)
        return _contrast(sums[:, 0], sums[:, 1], a)

    value, grads = value_and_grads(loss, {"policy": x["policy"]})
    sums = losses.sequence_log_probs(x["policy"], x["mask"], average=average)
    rewards = losses.implicit_rewards(sums, jnp.zeros_like(sums), beta=a["beta"])
    assert_case(case, {"losses": value, "rewards": rewards}, grads)


@checks(*(f"trl/preference/{name}" for name in ("cpo_full", "cpo_simpo_full", "orpo_full")))
def check_with_likelihood(name: str, case: Case, x: Arrays) -> None:
    """The rejected completions are the batch rolled by a row."""
    a = case["arguments"]
    answer = x["mask"].at[:, 0].set(False)
    average = a.get("loss_type") != "sigmoid"

    def terms(leaves):
        log_probs = losses.dense_token_log_probs(leaves["logits"], x["tokens"]).log_probs
        chosen = losses.sequence_log_probs(log_probs, answer, average=average)
        likelihood = losses.cross_entropy(log_probs)
        return chosen, losses.aggregate(likelihood, answer, mode="token_mean")

    def loss(leaves):
        chosen, likelihood = terms(leaves)
        rejected = jnp.roll(chosen, 1)
        if "loss_type" in a:
            return jnp.mean(_contrast(chosen, rejected, a)) + a["cpo_alpha"] * likelihood
        contrast = losses.orpo(chosen, rejected, beta=a["beta"], likelihood_coef=None)
        return jnp.mean(contrast) + likelihood

    assert_case(case, *value_and_grads(loss, {"logits": x["logits"]}))
    chosen, likelihood = terms(x)
    assert_close(jnp.mean(chosen), case["metrics"]["logps/chosen"], case, "chosen")
    assert_close(likelihood, case["metrics"]["nll_loss"], case, "likelihood")


# --- supervised, distillation -------------------------------------------------------------------


@checks("trl/sft/label_smoothing")
def check_label_smoothing(name: str, case: Case, x: Arrays) -> None:
    """The first token of a row has no logits before it: it is no label, whatever the mask says."""
    mask = x["mask"].at[:, 0].set(False)

    def loss(leaves):
        out = losses.dense_token_log_probs(leaves["logits"], x["tokens"])
        per_token = losses.cross_entropy(
            out.log_probs,
            logsumexp=out.logsumexp,
            label_smoothing=case["arguments"]["label_smoothing_factor"],
            mean_logits=losses.align_to_tokens(jnp.mean(leaves["logits"], axis=-1)),
        )
        return losses.aggregate(per_token, mask, mode="token_mean")

    assert_case(case, *value_and_grads(loss, {"logits": x["logits"]}))


def _divergence_of(beta: float) -> dict[str, object]:
    """TRL's beta: KL(teacher, student) at 0, KL(student, teacher) at 1."""
    if beta in (0.0, 1.0):
        return {"kind": "forward_kl" if beta == 0.0 else "reverse_kl"}
    return {"kind": "jensen_shannon", "mix": beta}


def _with_a_last_position(z: jax.Array) -> jax.Array:
    """Ours, token-aligned, has no value for the last position: give it one that has."""
    return jnp.concatenate([z, z[:, -1:]], axis=1)


@checks(
    *(
        f"trl/distill/jsd_{beta}_temperature_{temperature}"
        for beta in (0.0, 0.1, 0.5, 0.9, 1.0)
        for temperature in (1.0, 0.7)
    )
)
def check_distillation(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]

    def loss(leaves):
        per_token = losses.dense_divergence(
            _with_a_last_position(leaves["logits"]),
            _with_a_last_position(x["teacher_logits"]),
            temperature=a["temperature"],
            **_divergence_of(a["beta"]),
        )
        return losses.aggregate(per_token[:, 1:], x["mask"], mode="token_mean")

    assert_case(case, *value_and_grads(loss, {"logits": x["logits"]}))


@checks(
    *(
        f"trl/distill/hidden_{beta}_{name}"
        for beta in (0.0, 0.5, 1.0)
        for name in ("plain", "temperature", "softcap")
    )
)
def check_distillation_of_hidden_states(name: str, case: Case, x: Arrays) -> None:
    a = case["arguments"]

    def loss(leaves):
        per_token = losses.token_divergence(
            _with_a_last_position(leaves["hidden"]),
            leaves["matrix"],
            _with_a_last_position(x["teacher_hidden"]),
            x["teacher_matrix"],
            temperature=a.get("temperature", 1.0),
            softcap=a.get("student_final_logit_softcapping"),
            ref_softcap=a.get("teacher_final_logit_softcapping"),
            block_size=4,
            **_divergence_of(a["beta"]),
        )
        return losses.aggregate(per_token[:, 1:], x["mask"], mode="token_mean")

    leaves = {k: x[k] for k in ("hidden", "matrix")}
    assert_case(case, *value_and_grads(loss, leaves))


# --- metrics ------------------------------------------------------------------------------------


@checks("verl/metrics/majority")
def check_majority(name: str, case: Case, x: Arrays) -> None:
    votes = case["arguments"]["votes"]
    distinct = list(dict.fromkeys(vote["pred"] for vote in votes))
    answers = jnp.array([distinct.index(vote["pred"]) for vote in votes])
    scores = jnp.array([vote["val"] for vote in votes])
    assert_case(case, losses.majority_vote(answers, scores))


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("golden_family", ACCOUNT.families())
def test_golden(golden_family):
    ACCOUNT.run_family(golden_family)


@pytest.mark.parametrize("name", ACCOUNT.differences())
def test_a_difference_is_still_one(name):
    ACCOUNT.run_difference(name)
