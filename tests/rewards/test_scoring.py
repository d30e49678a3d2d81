"""Scorers of users: whatever they return, no row gets a reward that was not given."""

import functools
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.rewards import scoring
from jaxrlhf.rewards.scoring import (
    ScoringError,
    find_unscorable,
    load_scorer,
    score_rows,
    scorer_name,
)

RECORDS = [{"extra_info": {"index": 40 + i}} for i in range(3)]
NAN = float("nan")


def rows(returned, on_error="raise"):
    return score_rows(
        lambda prompts, responses, records: returned, "abc", "def", RECORDS, on_error=on_error
    )


@pytest.mark.parametrize(
    "returned",
    [
        [0.5, 1, True],
        (0.5, 1.0, 1.0),
        np.array([0.5, 1.0, 1.0]),
        jnp.array([0.5, 1.0, 1.0], jnp.bfloat16),
        [np.float64(0.5), np.int64(1), np.bool_(True)],
        [np.array(0.5), jnp.float32(1), 1],
        [{"score": 0.5}, {"score": 1}, 1.0],
        (x for x in (0.5, 1, 1)),
    ],
    ids=lambda r: type(r).__name__,
)
def test_numbers_of_every_kind_become_float32(returned):
    result = rows(returned)
    np.testing.assert_array_equal(result.scores, np.float32([0.5, 1, 1]))
    assert result.scores.dtype == np.float32
    assert result.scored.tolist() == [True] * 3
    assert (result.parts, result.problems) == ({}, ())


def test_parts_are_columns_and_fractions_stay():
    result = rows([{"score": 0.7 + i, "found": i > 0, "length": 3 * i} for i in range(3)])
    np.testing.assert_array_equal(result.scores, np.float32([0.7, 1.7, 2.7]))
    assert {name: column.tolist() for name, column in result.parts.items()} == {
        "found": [0, 1, 1],
        "length": [0, 3, 6],
    }
    assert all(column.dtype == np.float32 for column in result.parts.values())


BAD_ROWS = [
    ([0.5, None, 1.0], "score is None, not a number"),
    ([0.5, NAN, 1.0], "score is nan, not a finite"),
    ([0.5, float("-inf"), 1.0], "score is -inf, not a finite"),
    (np.array([0.5, 1e39, 1.0]), r"score is np.float64\(1e\+39\), not a finite"),
    ([0.5, "1.0", 1.0], "score is '1.0', not a number"),
    ([0.5, [1.0], 1.0], r"score is \[1.0\], not a number"),
    ([0.5, [[], [1.0, [2]]], 1.0], "not a number"),
    ([0.5, {"reward": 1.0}, 1.0], r"entry has no 'score' but only \['reward'\]"),
    ([{"score": 0.5, "a": 1}, {"score": 1}, {"score": 1, "a": 1}], r"has \['score'\] where most"),
    ([{"score": 0.5, "a": 1}, {"score": 1, "a": NAN}, {"score": 1, "a": 1}], "part 'a' is nan"),
    ([{"score": 0.5, "a": 1}, {"score": 1, "a": "x"}, {"score": 1, "a": 1}], "part 'a' is 'x'"),
    ([0.5, ValueError("no truth; add it"), 1.0], r": no truth; add it\.$"),
    ([{"score": 0.5, "a": 1}, KeyError("x"), {"score": 1, "a": 1}], r": KeyError: 'x'\.$"),
]


@pytest.mark.parametrize(("returned", "message"), BAD_ROWS)
def test_a_row_without_a_reward_is_named(returned, message):
    with pytest.raises(ScoringError, match=rf"row 1 \(prompt index 41\).*{message}"):
        rows(returned)


@pytest.mark.parametrize(("returned", "message"), BAD_ROWS)
def test_a_row_without_a_reward_is_skipped_by_setting(returned, message):
    result = rows(returned, "skip")
    assert result.scored.tolist() == [True, False, True]
    np.testing.assert_array_equal(result.scores, np.float32([0.5, 0, 1]))
    for column in result.parts.values():
        np.testing.assert_array_equal(np.isnan(column), ~result.scored)
    assert len(result.problems) == 1
    assert "row 1 (prompt index 41)" in result.problems[0]


@pytest.mark.parametrize("entry", [None, ValueError("unknown"), {"score": NAN}])
def test_a_row_is_named_by_where_its_record_stands(entry):
    places = [f"train.jsonl: row {i}" for i in (12, 3, 9)]
    for records, known in ((RECORDS, ", prompt index 42"), ([{}] * 3, "")):
        with pytest.raises(ScoringError) as error:
            score_rows(lambda *_: [1, 2, entry], "abc", "def", records, places)
        assert f", row 2 (train.jsonl: row 9{known}): " in str(error.value)


class Careful:
    """A scorer with an opinion of its own on records."""

    def __call__(self, prompts, responses, records, *, bonus=0.0):
        return [bonus] * len(records)

    def check_records(self, records):
        return {i: "is odd" for i, record in enumerate(records) if record.get("n", 0) % 2}


def test_a_scorer_may_check_records_before_the_run():
    """As an attribute, or a function beside it; a scorer without either finds nothing."""
    records = [{"n": n, "reward_model": {"ground_truth": "x" * n}} for n in (0, 1, 2)]
    assert find_unscorable(Careful(), records) == {1: "is odd"}
    assert find_unscorable(functools.partial(Careful(), bonus=1.0), records) == {1: "is odd"}
    beside = load_scorer("jaxrlhf.rewards.gsm8k.score", {"lenient": True})
    assert list(find_unscorable(beside, records)) == [0, 1, 2]
    assert find_unscorable(raise_key_error, records) == {}


@pytest.mark.parametrize(
    ("check", "message"),
    [(lambda records: records[7], "failed: IndexError: "), (len, "returned a int; return a dict")],
)
def test_a_check_of_records_that_fails_is_named(check, message):
    scorer = functools.partial(raise_key_error)
    scorer.func.check_records = check
    try:
        with pytest.raises(ScoringError, match=f"raise_key_error {message}"):
            find_unscorable(scorer, [{}])
    finally:
        del scorer.func.check_records


def raise_key_error(*_):
    raise KeyError("ground_truth")


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (raise_key_error, "KeyError: 'ground_truth'"),
        (lambda *_: [1.0, 2.0], "returned 2 entries for 3 rows"),
        (lambda *_: None, "returned a NoneType"),
        (lambda *_: 1.0, "returned a float"),
        (lambda *_: "abc", "returned a str"),
        (lambda *_: {"score": [1, 2, 3]}, "returned a dict"),
        (lambda *_: np.ones((1, 3)), "returned 1 entries for 3 rows"),
    ],
)
def test_a_failed_call_is_an_error_or_leaves_every_row_unscored(scorer, message):
    with pytest.raises(ScoringError, match=message):
        score_rows(scorer, "abc", "def", RECORDS)
    result = score_rows(scorer, "abc", "def", RECORDS, on_error="skip")
    assert result.scored.tolist() == [False] * 3
    assert result.scores.tolist() == [0.0] * 3
    assert len(result.problems) == 1
    assert message.split(":")[0] in result.problems[0]


def test_row_order_does_not_decide_which_rows_count():
    entries = [{"score": 1, "a": 1}, {"score": 2}, {"score": 3, "a": 1}]
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        result = rows([entries[i] for i in order], "skip")
        assert result.scored.tolist() == ["a" in entries[i] for i in order]


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        rows([1.0] * 3, "ignore")
    with pytest.raises(ValueError, match="2 responses"):
        score_rows(raise_key_error, "abc", "de", RECORDS)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_scorers.py").write_text(
        "def half(prompts, responses, records, *, factor=0.5):\n"
        "    return [factor * len(r) for r in responses]\n"
        "def short(prompts, responses):\n"
        "    return []\n"
        "number = 3\n"
    )
    (tmp_path / "broken_scorers.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_scorers", None)


def test_loads_by_path_and_binds_keywords(module):
    assert score_rows(load_scorer("my_scorers.half"), "a", ["four"], [{}]).scores[0] == 2
    scorer = load_scorer("my_scorers.half", {"factor": 0.25})
    assert score_rows(scorer, "a", ["four"], [{}]).scores[0] == 1
    assert scorer_name(scorer) == "my_scorers.half(factor=0.25)"
    assert scorer_name(functools.partial(raise_key_error)).endswith("raise_key_error")
    gsm8k = load_scorer("jaxrlhf.rewards.gsm8k.score", {"lenient": True, "format_score": 0.1})
    record = {"reward_model": {"ground_truth": "18"}}
    result = score_rows(gsm8k, ["?"] * 2, ["#### 18", "#### 17"], [record] * 2)
    np.testing.assert_array_equal(result.scores, np.float32([1, 0.1]))
    assert result.parts["used_hash"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("path", "keywords", "message"),
    [
        ("half", {}, "is no dotted path"),
        ("no_such_module.half", {}, "there is no module 'no_such_module' on Python's path, nor in"),
        ("jaxrlhf.rewards.nothing.score", {}, r"there is no module 'jaxrlhf\.rewards\.nothing'"),
        ("my_scorers.nothing", {}, "module my_scorers has no 'nothing'"),
        ("my_scorers.number", {}, "of type int; name a function"),
        ("my_scorers.short", {}, r"does not accept \(prompts, responses, records\)"),
        ("my_scorers.half", {"power": 2}, r"records, power=\).*'power'"),
    ],
)
def test_what_cannot_be_loaded_says_why(module, path, keywords, message):
    with pytest.raises(ScoringError, match=message):
        load_scorer(path, keywords)


def test_a_scorer_may_lie_in_the_current_directory(tmp_path, monkeypatch):
    """A script has its own folder on the path, and not the one that it is started in."""
    (tmp_path / "scorer_of_here.py").write_text("def score(p, r, records): return [2.0] * len(r)\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('hides another module')\n")
    script = "import sys; sys.path[:] = [p for p in sys.path if p]\n"
    script += "from jaxrlhf.rewards.scoring import load_scorer\n"
    script += "print(load_scorer('scorer_of_here.score')([0], [0], [0]))\n"
    script += "import http.cookiejar, json; assert 'here' not in json.__file__\n"
    script += "load_scorer('nowhere_at_all.score')\n"
    root = pathlib.Path(scoring.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(root)}, check=False,
    )  # fmt: skip
    assert done.stdout == "[2.0]\n", done.stderr
    assert f"nor in the current directory {tmp_path}; " in done.stderr


FAULTY = {
    "return [helper({}) for _ in responses]": ("helper", "KeyError: 'nope'"),
    "return json.loads('{')": ("score", "JSONDecodeError: Expecting property"),
    "return (helper({}) for _ in responses)": ("helper", "KeyError: 'nope'"),
    "raise ValueError('two\\nlines')": ("score", "ValueError: two lines"),
    "return np.ones(2) @ np.ones(3)": ("score", "ValueError: matmul"),
}


@pytest.mark.parametrize("body", FAULTY)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_scorer_that_fails_tells_its_own_last_line(tmp_path, monkeypatch, body, on_error):
    path = tmp_path / "faulty_scorer.py"
    path.write_text(
        "import json\nimport numpy as np\n\ndef helper(x):\n    return x['nope']\n\n"
        f"def score(prompts, responses, records):\n    {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_scorer", raising=False)
    scorer = load_scorer("faulty_scorer.score")
    monkeypatch.delitem(sys.modules, "faulty_scorer")
    function, said = FAULTY[body]
    if on_error == "skip":
        (told,) = score_rows(scorer, "abc", "def", RECORDS, on_error="skip").problems
    else:
        with pytest.raises(ScoringError) as error:
            score_rows(scorer, "abc", "def", RECORDS)
        told = str(error.value)
    assert told.startswith(f"Scorer faulty_scorer.score failed: {said}")
    line = {"helper": 5, "score": 8}[function]
    assert told.endswith(f" ({path}:{line} in {function})")
    assert "\n" not in told


def test_a_missing_dependency_of_a_scorer_is_not_hidden(module):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        load_scorer("broken_scorers.score")
