"""What the tests against golden numbers share: the cases, their inputs, how to compare.

Several test files check parts of the goldens. Each makes one `Account` and parametrizes its tests
over it; `test_goldens.py` asserts that the accounts together name every case exactly once.

Norm-relative 1e-5 for values and gradients; extreme inputs, whose largest element would hide the
rest, element by element. Peers compute in bfloat16 what we compute in float32: 3 % there, and 5 %
of the tokens may fall on the other side of a clip bound (1e-5 where peers go up to float32 first).
Logits to 150: 3e-5, as the peers' entropy is a difference of numbers of that size.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2] / "third_party" / "goldens"
spec = importlib.util.spec_from_file_location("golden_inputs", ROOT / "inputs.py")
golden_inputs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden_inputs)

FILES = {name: json.loads((ROOT / name).read_text()) for name in (
    "verl.json", "trl.json", "trl_ppo.json", "openrlhf.json"
)}  # fmt: skip
CASES = {name: case for file in FILES.values() for name, case in file["cases"].items()}

Arrays = dict[str, jax.Array]
Case = dict[str, object]


def family(name: str) -> str:
    return name.rsplit("/", 1)[0]


@functools.cache
def _arrays(key: str) -> dict[str, np.ndarray]:
    return golden_inputs.make(json.loads(key))


def arrays_of(case: Case) -> Arrays:
    arrays = _arrays(golden_inputs.key_of(case["inputs"]))
    low = case["inputs"].get("bfloat16", False)
    return {
        name: jnp.asarray(x, jnp.bfloat16 if low and x.dtype == np.float32 else x.dtype)
        for name, x in arrays.items()
    }


def value_and_grads(
    loss: Callable[[Arrays], jax.Array], leaves: Arrays, cotangent: jax.Array | None = None
) -> tuple:
    """Our value and the gradients of its sum, or of sum(value * cotangent)."""

    def scalar(z):
        value = loss(z)
        weighted = value if cotangent is None else value * cotangent.astype(jnp.float32)
        return jnp.sum(weighted), value

    (_, value), grads = jax.value_and_grad(scalar, has_aux=True)(leaves)
    return value, grads


def assert_close(ours, theirs, case: Case, what: str, *, upcast: bool = False) -> None:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, f"{what}: {ours.shape}, golden {theirs.shape}"
    if case["inputs"].get("extreme"):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=what)
        return
    if case["inputs"].get("bfloat16") and not upcast:
        wrong = np.abs(ours - theirs) > 0.03 * np.max(np.abs(theirs))
        assert np.mean(wrong) <= 0.05, f"{what}: {np.mean(wrong):.0%} of the elements differ"
        return
    steep = case["inputs"].get("scale") == 40.0
    tolerance, floor = (3e-5, 2e-5) if steep else (1e-5, 1e-6)
    error, norm = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
    assert error <= max(tolerance * norm, floor), f"{what}: {error:.3g} off a norm of {norm:.3g}"


def assert_case(case: Case, value, grads: Arrays | None = None, *, upcast: bool = False) -> None:
    """Compare with all that the case holds."""
    theirs = case["value"]
    if isinstance(theirs, dict):
        for name, ours in value.items():
            assert_close(ours, theirs[name], case, name, upcast=upcast)
    else:
        assert_close(value, theirs, case, "value", upcast=upcast)
    for name, theirs in case.get("grads", {}).items():
        assert_close(grads[name], theirs, case, f"gradient by {name}", upcast=upcast)


MODES = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}

Check = Callable[[str, Case, Arrays], None]


@dataclasses.dataclass(frozen=True)
class Account:
    """Where a test file accounts for families of golden cases.

    A family has a function in ``checks``, or stands in ``not_yet`` (we have no such function yet)
    or in ``not_planned`` (we will have none); ``different`` takes single cases or families out of
    a check, because no keyword of ours gives their number.
    """

    not_yet: set[str] = dataclasses.field(default_factory=set)
    not_planned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    different: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checks: dict[str, Check] = dataclasses.field(default_factory=dict)

    def check(self, *families: str) -> Callable[[Check], Check]:
        """Say which families of golden cases a function checks."""

        def register(function):
            for name in families:
                assert name not in self.checks, name
                self.checks[name] = function
            return function

        return register

    def places_of(self, name: str) -> list[str]:
        """The tables that name a case."""
        if name in self.different or family(name) in self.different:
            return ["different"]
        tables = ("checks", "not_yet", "not_planned")
        return [label for label in tables if family(name) in getattr(self, label)]

    def families(self) -> list[str]:
        """The families of which some case is checked."""
        return sorted({family(name) for name in CASES if self.places_of(name) == ["checks"]})

    def differences(self) -> list[str]:
        return sorted(n for n in self.different if family(n) in self.checks)

    def run_family(self, golden_family: str) -> None:
        for name in CASES:
            if family(name) == golden_family and self.places_of(name) == ["checks"]:
                self.run(name)

    def run(self, name: str) -> None:
        self.checks[family(name)](name, CASES[name], arrays_of(CASES[name]))

    def run_difference(self, name: str) -> None:
        """Take a case out of ``different`` when a keyword argument comes to express it."""
        with pytest.raises(AssertionError):
            self.run(name)

    def stale(self) -> set[str]:
        """What the tables name and no golden file holds."""
        known = set(CASES) | {family(name) for name in CASES}
        return (set(self.checks) | self.not_yet | {*self.not_planned, *self.different}) - known
