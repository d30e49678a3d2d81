"""GSM8K as records: what a question and its worked answer become in verl's schema."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrlhf.data.tables import PathLike, Record, TableError, read_jsonl, where

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

_AFTER_MARKER = re.compile(r"####\s*(\S+)\s*$")
_NUMBER = re.compile(r"[+-]?[0-9]*\.?[0-9]+")


def read_gsm8k(
    path: PathLike, split: str, *, on_progress: Callable[[int, int], None] | None = None
) -> list[Record]:
    """Records of a jsonl file with ``question`` and ``answer``, as GSM8K is published.

    Args:
      path: the jsonl file.
      split: the split's name, kept in ``extra_info``.
      on_progress: called with (rows done, rows in all).

    Raises:
      TableError: names file, line and key.
    """
    return to_records(read_jsonl(path), split, source=path, on_progress=on_progress)


def to_records(
    rows: Iterable[Mapping[str, Any]],
    split: str,
    *,
    source: PathLike,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Record]:
    """Records of rows with ``question`` and ``answer``; ``source`` names them in errors."""
    rows = list(rows)
    records = []
    for index, row in enumerate(rows):
        place = where(source, index)
        for key in ("question", "answer"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise TableError(f"{place}: {key} is missing or no text; GSM8K rows have both.")
        records.append(to_record(row["question"], row["answer"], split, index, place=place))
        if on_progress is not None:
            on_progress(index + 1, len(rows))
    return records


def to_record(
    question: str, answer: str, split: str, index: int, *, place: str = "record"
) -> Record:
    """One record: the question with the instruction as a user turn, the number as ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold_answer(answer, place=place)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def gold_answer(answer: str, *, place: str = "record") -> str:
    """The number after the last ``####`` of a worked answer, without thousands separators.

    Raises:
      TableError: the answer does not end in ``#### N``, or N is no number.
    """
    found = _AFTER_MARKER.search(answer)
    if found is None:
        raise TableError(f"{place}: answer does not end in '#### N'; add it or remove the row.")
    number = found.group(1).replace(",", "")
    if not _NUMBER.fullmatch(number):
        raise TableError(f"{place}: answer ends in {found.group(0)!r}, which is no number; fix it.")
    return number
