import re
from collections import Counter, defaultdict
from fractions import Fraction

import pytest

from jaxrlhf.data import word_problems
from jaxrlhf.data.chat import encode_example
from jaxrlhf.data.tables import check_record
from jaxrlhf.data.word_problems import TEMPLATES, demonstrations, generate, problems

OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: Fraction(a, b),
}


def _solve(line):
    """(value of the expression, value that the line says) of `a operator b = c`."""
    a, operator, b, said = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", line).groups()
    return OPERATIONS[operator](int(a), int(b)), int(said)


def _key(record):
    """The problem with names and things taken out: (template, numbers)."""
    text = record["extra_info"]["question"]
    for word in word_problems.NAMES + word_problems.ITEMS:
        text = re.sub(rf"\b{word}\b", "_", text)
    return text


def test_the_templates_are_many_and_distinct():
    assert all(len(templates) >= 6 for templates in TEMPLATES.values())
    texts = [text for templates in TEMPLATES.values() for text in templates]
    assert len(set(texts)) == len(texts) >= 24


def test_train_and_validation_never_meet():
    """Not even when they are made from different seeds."""
    train, val = set(problems("train")), set(problems("val"))
    assert not train & val
    assert len(val) == 256
    keys = {_key(r) for seed in (0, 1, 2) for r in generate(seed, 2_000)}
    held_out = [_key(r) for r in generate(5, 256, split="val")]
    assert len(set(held_out)) == 256
    assert not keys & set(held_out)
    per_template = Counter((p.operator, p.template) for p in val)
    assert set(per_template.values()) == {8}


@pytest.mark.parametrize("split", ["train", "val"])
def test_records_are_right(split):
    for index, record in enumerate(generate(7, 256, split=split)):
        assert check_record(record, "here") == record
        info = record["extra_info"]
        line, marker = info["answer"].split("\n")
        value, said = _solve(line)
        assert value == said >= 2
        assert marker == f"#### {said}"
        assert record["reward_model"]["ground_truth"] == str(said)
        assert re.findall(r"\d+", info["question"]) == re.findall(r"\d+", line)[:2]
        assert (info["split"], info["index"]) == (split, index)
        assert record["prompt"] == [{"role": "user", "content": info["question"]}]


def test_the_seed_decides_everything():
    assert generate(3, 50) == generate(3, 50)
    assert generate(3, 50) != generate(4, 50)
    assert demonstrations(3, 50) == demonstrations(3, 50)
    assert demonstrations(3, 50) != demonstrations(4, 50)


def test_a_pass_uses_every_problem_once():
    records = generate(0, 2 * len(problems("train")))
    counts = Counter(_key(r) for r in records)
    assert set(counts.values()) == {2}
    assert [r["extra_info"]["index"] for r in records] == list(range(len(records)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demonstrations_are_spoilt_as_planned(seed):
    records = demonstrations(seed, 6_000)
    flaws = defaultdict(Counter)
    for record in records:
        info = record["extra_info"]
        value, said = _solve(info["demonstration"].split("\n")[0])
        assert value == said  # spoilt ones compute rightly as well
        right = str(said) == record["reward_model"]["ground_truth"]
        has_marker = info["demonstration"].endswith(f"\n#### {said}")
        assert right == (info["flaw"] != "wrong_operator")
        assert has_marker == (info["flaw"] != "no_marker")
        assert (info["demonstration"] == info["answer"]) == (info["flaw"] == "")
        operator = info["answer"].split()[1]
        template = next(
            i
            for i, text in enumerate(TEMPLATES[operator])
            if re.fullmatch(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(text)), info["question"])
        )
        flaws[operator, template][info["flaw"]] += 1
    kinds = defaultdict(Counter)
    for (operator, _), counts in flaws.items():
        spoilt = {flaw: n for flaw, n in counts.items() if flaw}
        assert len(spoilt) <= 1  # a template has one flaw
        kinds[operator][next(iter(spoilt), "")] += 1
        if spoilt:
            assert 0.65 < sum(spoilt.values()) / sum(counts.values()) < 0.95
    plan = {"no_marker": 3, "wrong_operator": 2, "": 3}
    assert kinds == dict.fromkeys(TEMPLATES, plan)


def test_the_plan_can_be_changed():
    assert {r["extra_info"]["flaw"] for r in demonstrations(0, 300, spoil_probability=0)} == {""}
    all_marked = demonstrations(0, 300, spoil_probability=1, no_marker=0, wrong_operator=8)
    assert {r["extra_info"]["flaw"] for r in all_marked} == {"wrong_operator"}
    with pytest.raises(ValueError, match="5 \\+ 4 flawed templates do not fit in the 8"):
        demonstrations(0, 1, no_marker=5, wrong_operator=4)


def test_lengths_suit_a_tiny_model(words):
    for record in demonstrations(1, 1_792):
        example = encode_example(words, record["prompt"], record["extra_info"]["demonstration"])
        answer = int(example.answer_mask.sum())
        assert len(example.tokens) - answer <= 22
        assert answer <= 12
        assert words.unk_token_id not in example.tokens
    assert len(words) < 300


def test_what_is_refused():
    with pytest.raises(ValueError, match="there are 256 validation problems"):
        generate(0, 257, split="val")
    with pytest.raises(ValueError, match="split='test' is unknown"):
        problems("test")
