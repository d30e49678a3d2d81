"""Presets name real functions and arguments, and the parity ones give a framework's number."""

import importlib.util
import inspect
import pathlib

import jax
import numpy as np
import pytest

from jaxrlhf import losses
from jaxrlhf.losses import presets

spec = importlib.util.spec_from_file_location(
    "goldens", pathlib.Path(__file__).with_name("goldens.py")
)
goldens = importlib.util.module_from_spec(spec)
spec.loader.exec_module(goldens)


@pytest.mark.parametrize("name", [*presets.ALGORITHMS, *presets.PARITY])
def test_every_entry_is_an_argument_of_a_public_function(name):
    for function, arguments in (presets.ALGORITHMS | presets.PARITY)[name].items():
        parameters = inspect.signature(getattr(losses, function)).parameters
        assert function in losses.__all__
        for argument in arguments:
            assert parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY, argument


@pytest.mark.parametrize(
    ("peer", "case"),
    [
        ("verl", "verl/policy/vanilla/extreme"),
        ("trl", "trl/policy/bnpo/extreme"),
        ("openrlhf", "openrlhf/policy/ppo/extreme"),
    ],
)
def test_parity_of_the_policy_loss(peer, case):
    """Extreme log-ratios, on which the three differ."""
    case, preset = goldens.CASES[case], presets.PARITY[peer]
    x = goldens.arrays_of(case)
    advantages = x[case["arguments"]["advantages"]]

    @jax.jit
    def loss(leaves):
        per_token = losses.clipped_surrogate(
            leaves["log_probs"],
            x["old_log_probs"],
            advantages,
            mask=x["mask"],
            **preset["clipped_surrogate"],
        )
        weights = losses.token_weights(x["mask"], **preset["token_weights"])
        return losses.weighted_sum(per_token, weights)

    goldens.assert_case(case, *goldens.value_and_grads(loss, {"log_probs": x["log_probs"]}))


@pytest.mark.parametrize("peer", ["verl", "openrlhf"])
def test_parity_of_gae_and_whitening(peer):
    name = {"verl": "verl/advantages/gae/gaps", "openrlhf": "openrlhf/advantages/gae/even_kl"}[peer]
    case, preset = goldens.CASES[name], presets.PARITY[peer]
    a, x = case["arguments"], goldens.arrays_of(case)
    rewards = x.get("rewards")
    if rewards is None:
        rewards = losses.token_rewards(
            x["scores"], x["kl"], x["mask"], kl_coef=a["kl_coef"], **preset["token_rewards"]
        )
    lam = a.get("lam", a.get("lambd"))
    advantages, _ = losses.gae(
        rewards, x["values"], x["mask"], gamma=a["gamma"], lam=lam, **preset["gae"]
    )
    white = losses.whiten(advantages, x["mask"], **preset["whiten"])
    np.testing.assert_allclose(white, case["value"]["advantages"], atol=2e-5)
