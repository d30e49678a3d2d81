import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from configs import common

DEFAULTS = {"model": "none", "layers": 2, "rate": 0.5, "deep": False}


def parse(arg):
    return common.parse_arg(arg, names=("tiny", "big"), **DEFAULTS)


@pytest.mark.parametrize("arg", [None, "", " , ,"])
def test_no_argument_gives_the_defaults(arg):
    assert parse(arg).to_dict() == {"tiny": False, "big": False, **DEFAULTS}


@given(
    model=st.text(st.characters(exclude_characters=",", exclude_categories=["C", "Z"]), min_size=1),
    layers=st.integers(),
    rate=st.floats(allow_nan=False),
    deep=st.sampled_from(["true", "1", "True", "false", "0"]),
    big=st.booleans(),
    order=st.permutations(range(5)),
)
def test_values_take_the_type_of_the_default(model, layers, rate, deep, big, order):
    parts = [f"model={model}", f"layers={layers}", f" rate={rate!r} ", f"deep={deep}"]
    parts.append("big" if big else "")
    out = parse(",".join(parts[i] for i in order))
    want = {"model": model, "layers": layers, "rate": rate, "deep": deep in ("true", "1", "True")}
    assert out.to_dict() == {"tiny": False, "big": big, **want}
    assert [type(out[key]) for key in DEFAULTS] == [str, int, float, bool]


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("huge", ["'huge'", "tiny, big, model=…, layers=…"]),
        ("tiny,tiny", ["'tiny'", "twice"]),
        ("rate=1,rate=1", ["'rate'", "twice"]),
        ("tiny=1", ["'tiny=1'", "unknown"]),
        ("layers", ["'layers'", "unknown"]),
        ("layers=1.5", ["layers='1.5'", "int"]),
        ("rate=fast", ["rate='fast'", "float"]),
        ("deep=maybe", ["deep='maybe'", "bool"]),
        ("Tiny", ["'Tiny'"]),
        ("model=", ["model=", "is empty"]),
    ],
)
def test_what_is_unknown_doubled_or_unreadable_is_named(arg, words):
    with pytest.raises(ValueError, match="config argument") as error:
        parse(arg)
    message = str(error.value)
    assert all(word in message for word in words)
    assert "\n" not in message


def test_a_recipe_without_arguments_says_so():
    with pytest.raises(ValueError, match="this recipe takes: no argument"):
        common.parse_arg("x")


def test_numbers_have_the_types_that_a_flag_may_give_them():
    """A learning rate of 0 (an int) would refuse --config.actor.learning_rate=1e-6."""
    ints = {"warmup_steps", "decay_steps"}
    for role in ("actor", "critic"):
        for key, value in common.ppo()[role].items():
            kind = str if key == "schedule" else int if key in ints else float
            assert type(value) is kind, (role, key)


def test_two_configs_share_nothing():
    first, second = common.ppo(), common.ppo()
    first.actor.learning_rate = 1.0
    assert second.actor.learning_rate == 1e-6
    assert isinstance(first.reward.kwargs, ConfigDict)
    assert first.actor is not first.critic
