import re

import pytest

from jaxrlhf.data.gsm8k import INSTRUCTION, gold_answer, read_gsm8k, to_records
from jaxrlhf.data.tables import TableError, check_record


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("a\n#### 72", "72"),
        ("#### 70,000", "70000"),
        ("####-5", "-5"),
        ("#### 2.5\n", "2.5"),
        ("first #### 3 then\n#### 4", "4"),
        ("#### .5", ".5"),
    ],
)
def test_gold_answer(answer, number):
    assert gold_answer(answer) == number


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("it is 72", "does not end in '#### N'"),
        ("#### ", "does not end in '#### N'"),
        ("#### 7 apples", "does not end in '#### N'"),
        ("#### seven", "is no number"),
        ("#### nan", "is no number"),
        ("#### 1e3", "is no number"),
        ("#### 5.", "is no number"),
    ],
)
def test_a_gold_answer_that_is_none(answer, message):
    with pytest.raises(TableError, match=rf"f.jsonl: row 1 \(line 2\): answer .*{message}"):
        to_records(
            [{"question": "q", "answer": "#### 1"}, {"question": "q", "answer": answer}],
            "train",
            source="f.jsonl",
        )


@pytest.mark.parametrize("row", [{}, {"question": "q"}, {"question": "", "answer": "#### 1"}])
def test_a_row_without_its_keys(row):
    with pytest.raises(TableError, match=r"hub: row 0: (question|answer) is missing"):
        to_records([row], "train", source="hub")


def test_the_record():
    seen = []
    rows = [{"question": "How many?", "answer": "two\n#### 2"}] * 2
    records = to_records(rows, "test", source="x", on_progress=lambda *a: seen.append(a))
    assert records[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How many? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {
            "split": "test",
            "index": 1,
            "question": "How many?",
            "answer": "two\n#### 2",
        },
    }
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
def test_the_published_files(shared_gsm8k, split, rows):
    records = read_gsm8k(shared_gsm8k / f"{split}.jsonl", split)
    assert len(records) == rows
    for record in records:
        assert check_record(record, "here") == record
        # What verl's preprocessing takes from the answer.
        found = re.search(r"#### (\-?[0-9\.\,]+)", record["extra_info"]["answer"])
        assert record["reward_model"]["ground_truth"] == found.group(1).replace(",", "")
