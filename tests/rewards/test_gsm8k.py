"""GSM8K's scorer: every format of the specification, and bounded time on any text."""

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrlhf.rewards import gsm8k


def record(truth):
    return {"reward_model": {"style": "rule", "ground_truth": truth}}


def scored(response, truth, scorer=gsm8k.score, **options):
    return scorer(["?"], [response], [record(truth)], **options)[0]


RIGHT = [
    ("#### 18", "18"),
    ("####18", "18"),
    ("####  18", "18"),
    ("#### $18", "18"),
    ("#### **18**", "18"),
    ("#### 18.", "18"),
    ("#### 18.0", "18"),
    ("#### 18 dollars", "18"),
    ("#### 18%", "18"),
    ("#### +18", "18"),
    ("#### 18 " + "and so on " * 40, "18"),
    ("#### 18\n" + "Let me check. " * 50, "18"),
    ("#### 1,000", "1000"),
    ("#### 1 000", "1000"),
    ("#### 1\u2009000", "1000"),
    ("#### 1\u202f000\u202f000", "1000000"),
    ("#### 1'000", "1000"),
    ("#### 1,000.00", "1000"),
    ("#### 1000", "1,000"),
    ("#### $1,234,567.50", "1234567.5"),
    ("#### \u22125", "-5"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("#### \u2013 \u20ac5", "-5"),
    ("#### .5", "0.5"),
    ("#### 0.50", ".5"),
    ("#### -.5", "-0.5"),
    ("#### 5 and then #### 6", "6"),
    ("#### 6\n\n#### Explanation", "6"),
    ("#### 6\n####", "6"),
    ("##### 18", "18"),
    ("**#### 18**", "18"),
    ("#### \\boxed{18}", "18"),
    ("#### $\\boxed{1,800}$", "1800"),
    ("#### \\$18", "18"),
    ("#### \\(18\\)", "18"),
    ("#### =18", "18"),
    ("#### 1/2", "0.5"),
    ("#### 1 1/2 cups", "1.5"),
    ("#### -\\frac{3}{4}", "-0.75"),
    ("#### \\frac{3}{4}", "0.75"),
    ("#### 18 2024", "18"),
    ("#### 18cm", "18"),
    ("####\n18", "18"),
    ("#### \r\n18\r\nDone.", "18"),
    ("####\n\n  **$1,800.50**.\n", "1800.5"),
    ("####\n-18", "-18"),
    ("####\n18%\nas 9 + 9 is 18", "18"),
    ("#### 6\n####\n1. So it is 6.", "6"),
    ("#### 6\n\n####\n7", "7"),
    ("#### 007", "7"),
    ("#### 1e3", "1000"),
    ("#### 18, as 9 + 9 is 18", "18"),
    ("#### 100000000000000000000000001", "100000000000000000000000001"),
]


@pytest.mark.parametrize(("response", "truth"), RIGHT)
def test_right_answers_score_one(response, truth):
    assert scored(response, truth) == {"score": 1.0, "correct": 1.0, "answer_found": 1.0}
    assert gsm8k.extract_answer(response).rule == "hash"


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("#### 5 and then #### 6", "5"),
        ("#### 18.01", "18"),
        ("#### -18", "18"),
        ("#### 180", "18"),
        ("#### 100000000000000000000000001", "100000000000000000000000000"),
        ("#### 0.30000000000000001", "0.3"),
        ("#### 1/3", "0.3333333333333333"),
    ],
)
def test_wrong_answers_are_found_and_score_zero(response, truth):
    assert scored(response, truth) == {"score": 0.0, "correct": 0.0, "answer_found": 1.0}


@pytest.mark.parametrize(
    "response",
    [
        "",
        "18",
        "The answer is 18.",
        "\\boxed{18}",
        "####",
        "#### eighteen",
        "#### Step 18",
        "####\n18 dollars",
        "####\n1. First, 18 eggs",
        "####\n- 18 eggs",
        "####\n- 18",
        "####\n12 + 6 = 18",
        "####\nStep\n18",
        "####" + "\n" * 95 + "18",
        "### 18",
        "#### 1,00",
        "#### 1,8000",
        "#### 3.4.5",
        "#### 3:30",
        "#### 5-6",
        "#### 12 + 6 = 18",
        "#### 12*3",
        "#### 1e999",
        "#### 18/0",
        "#### " + "9" * 5000,
        "####" + " " * 95 + "18",
        "#### NaN",
        "#### \u0663",
    ],
)
def test_what_is_no_answer_is_told_from_a_wrong_one(response):
    for truth in ("18", "1", "3"):
        assert scored(response, truth) == {"score": 0.0, "correct": 0.0, "answer_found": 0.0}
    assert gsm8k.extract_answer(response) == gsm8k.Answer(None, None)


@pytest.mark.parametrize(
    ("response", "value", "rule"),
    [
        ("#### 18 and \\boxed{19}, or 20", 18, "hash"),
        ("so \\boxed{17} no \\boxed{18}, of 20", 18, "boxed"),
        ("\\boxed{\\frac{1}{2}}", Fraction(1, 2), "boxed"),
        ("\\boxed{18 \\text{ dollars}}", 18, "boxed"),
        ("16 - 3 = 13, so she makes **$1,800.50**.", Fraction("1800.5"), "last_number"),
        ("It fell to \u22125 degrees", -5, "last_number"),
        ("16-3", 3, "last_number"),
        ("sold 3 at 3:30", 3, "last_number"),
        ("#### eighteen, that is 18", 18, "last_number"),
        ("none", None, None),
    ],
)
def test_lenient_rules_say_which_was_used(response, value, rule):
    assert gsm8k.extract_answer(response, lenient=True) == gsm8k.Answer(value, rule)
    row = scored(response, "18", lenient=True)
    assert [name for name in gsm8k.RULES if row[f"used_{name}"]] == ([rule] if rule else [])
    assert row["score"] == float(value == 18)


def test_format_score_makes_fractional_rewards():
    rows = gsm8k.score(
        ["?"] * 3, ["#### 18", "#### 19", "18"], [record("18")] * 3, format_score=0.1
    )
    assert [row["score"] for row in rows] == [1.0, 0.1, 0.0]
    assert [row["correct"] for row in rows] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "truth", ["eighteen", "", "18 dollars", "#### 18", "1,00", True, "nan", []]
)
def test_a_ground_truth_that_is_no_number_is_one_row_without_a_score(truth):
    records = [record("18"), record(truth), record("19")]
    good, bad, wrong = gsm8k.score(["?"] * 3, ["#### 18"] * 3, records)
    assert (good["score"], wrong["score"]) == (1.0, 0.0)
    assert re.fullmatch(r"the ground truth .* is not a number; correct it", str(bad))
    assert gsm8k.check_records(records) == {1: str(bad)}


@pytest.mark.parametrize("broken", [{}, {"reward_model": None}, record(None)])
@pytest.mark.parametrize("scorer", [gsm8k.score, gsm8k.strict_verl])
def test_a_missing_ground_truth_is_one_row_without_a_score(scorer, broken):
    records = [broken, record("18")]
    bad, good = scorer(["?"] * 2, ["#### 18"] * 2, records)
    assert "there is no reward_model.ground_truth" in str(bad)
    assert good["score"] == 1.0
    assert gsm8k.check_records(records) == {0: str(bad)}


@pytest.mark.parametrize("truth", ["18", 18, 18.0, "$18", "18%", " 18 ", "18.00"])
def test_ground_truths_may_be_numbers_or_texts(truth):
    assert scored("#### 18", truth)["score"] == 1.0


def test_strict_verl_misses_about_half_of_the_right_answers():
    assert scored("#### 18", "18", gsm8k.strict_verl)["score"] == 1.0
    assert scored("#### 1,000 left", "1000", gsm8k.strict_verl)["score"] == 1.0
    assert scored("#### 5 #### 6", "6", gsm8k.strict_verl)["score"] == 1.0
    assert scored("#### 5 #### 6", "5", gsm8k.strict_verl, format_score=0.2)["score"] == 0.2
    for missed in ("####18", "#### $18", "#### **18**", "#### 18.", "#### 18.0", "#### +18"):
        assert scored(missed, "18", gsm8k.strict_verl)["score"] == 0.0, missed
    far = "#### 18 " + "x" * 400
    assert scored(far, "18", gsm8k.strict_verl)["answer_found"] == 0.0
    given = [scored(text, truth, gsm8k.strict_verl)["score"] for text, truth in RIGHT]
    assert 0.2 < sum(given) / len(given) < 0.6


PIECES = st.sampled_from(
    ["####", "#", "\\boxed{", "}", "$", "-", "\\frac{1}{", ",", ".", "/", "1", "23", "000", "e9"]
) | st.sampled_from(["**", "=", "x", "0", "'", ":", " ", "\n", "\u2009", "\u2212"])


@settings(deadline=1000, max_examples=150)
@given(st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=200), st.booleans())
def test_any_text_gives_a_number_or_none(text, lenient):
    answer = gsm8k.extract_answer(text, lenient=lenient)
    assert (answer.value is None) == (answer.rule is None)
    assert answer.rule in (None, *gsm8k.RULES)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.00", "${:,}", "**{}**"]))
def test_every_whole_number_comes_back(number, form):
    text = f"It is so.\n#### {form.format(number)}"
    assert gsm8k.extract_answer(text).value == number


@pytest.mark.parametrize(
    "text",
    [
        "#" * 1_000_000,
        "#### " * 200_000,
        "#### " + "1" * 1_000_000,
        "#### " + "1," * 500_000,
        "#### " + "$ " * 500_000 + "1",
        "#### " + " 1" * 500_000,
        "#### " + "1/" * 500_000,
        "\\boxed{" * 150_000,
        "#### \\frac{" + "1" * 1_000_000,
        "1,000" * 200_000,
        "-$ " * 300_000,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_texts_take_bounded_time(text):
    start = time.process_time()
    gsm8k.extract_answer(text, lenient=True)
    gsm8k.strict_verl(["?"], [text], [record("18")])
    assert time.process_time() - start < 0.5
