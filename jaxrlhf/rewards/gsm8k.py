"""GSM8K's scorer: compares numbers, and tells "no answer found" from "wrong answer".

``score`` reads the number right after the last ``####`` that has one (on the same line, or alone on
the next line that is not blank); with ``lenient=True`` it
falls back to the last ``\\boxed{...}`` and then to the last number of the text. ``strict_verl``
behaves as verl's strict scorer and is here for comparison: print the scorer beside every score
(``scoring.scorer_name``), since the same answers get different figures.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

RULES = ("hash", "boxed", "last_number")

# All that the rules look at is bounded, so that no text can make them slow.
_WINDOW = 100  # characters after a marker; decoration and number must end before the last 10
_MAX_MARKERS = 64  # markers tried, from the end
_LAST_CHARACTERS = 2000  # searched by the rule "last_number"

_SAME_MEANING = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\t", " "),
        **dict.fromkeys("€£¥₹", "$"),
        **dict.fromkeys("\u2018\u2019", "'"),
    }
)
# What may stand between a marker and its number: #### **$18**, #### \(18\)
_DECORATION = re.compile(r"""(?:[ *_`"'\#:=~(\[{$\\]|boxed|text)*""")
_NUMBER = re.compile(
    r"""
    (?P<sign>[-+]?) (?P<listed>(?<=[-+])[ ])? [ $]{0,3}
    (?: \\?[dt]?frac\{(?P<top>[0-9]+)\}\{(?P<bottom>[0-9]+)\}
      | (?: (?P<units>[0-9]+)[ ] )? (?P<numerator>[0-9]+)/(?P<denominator>[0-9]+)
      | (?P<decimal>
          (?: [0-9]{1,3}(?:,[0-9]{3})+            # 1,000
            | [0-9]{1,3}(?:[ '][0-9]{3}(?![0-9]))+  # 1 000 and 1'000
            | [0-9]+
            | (?=\.[0-9]) )                       # .5
          (?:\.[0-9]*)? (?:[eE][-+]?[0-9]{1,2}(?![0-9]))? )
    )
    """,
    re.VERBOSE,
)
# A number that goes on like this is none: 3.4.5, 1,00, 3:30, 5-6, 12 + 6 = 18, 1e999
_GOES_ON = re.compile(r"[0-9]|[.,:'/][0-9]|[eE][-+]?[0-9]| ?[-+*/=^×÷] ?[0-9]")
# After "####" at a line's end the number has the next line to itself, so that the first item of a
# list (1. So ...) or a text's first word (3 apples ...) is no answer.
_LINE_BREAK = re.compile(r" *(?:\r?\n *)+")
_LINE_ENDS = re.compile(r"[^\w\n]*(?:\n|\Z)")
_MAY_BEGIN = re.compile(r"(?<!\w)(?<![0-9][.,:/])[-+]?[ $]{0,3}\.?[0-9]")


@dataclass(frozen=True)
class Answer:
    """A number that was found and the rule that found it; both None when there is none."""

    value: Fraction | None
    rule: str | None


def extract_answer(text: str, *, lenient: bool = False) -> Answer:
    """Returns the answer that a response gives.

    Args:
      text: the response.
      lenient: also accept ``\\boxed{18}``, else the last number of the text.

    Returns:
      The exact value and one of ``RULES``. After ``####`` at the end of a line the next line is
      read, if nothing but a number stands on it. Thousands separators (comma, space, apostrophe),
      currency signs, bold, percent signs and units are passed over: 18% is 18. A malformed
      number (``1,00``), a range or an unfinished sum is no answer.
    """
    value = _after_last(text, "####")
    if value is not None:
        return Answer(value, "hash")
    if lenient:
        value = _after_last(text, "\\boxed{")
        if value is not None:
            return Answer(value, "boxed")
        value = _last_number(text)
        if value is not None:
            return Answer(value, "last_number")
    return Answer(None, None)


def score(
    prompts: Sequence[Any],
    responses: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    *,
    lenient: bool = False,
    format_score: float = 0.0,
) -> list[dict[str, float] | ValueError]:
    """Scores each row 1 if its number equals the ground truth's exactly.

    Args:
      prompts: not read.
      responses: texts, one per row.
      records: verl's schema; ``record["reward_model"]["ground_truth"]`` is read.
      lenient: see ``extract_answer``.
      format_score: score of an answer that was found but is wrong.

    Returns:
      Per row ``score``, ``correct`` and ``answer_found`` (0 or 1), and with ``lenient`` which
      rule was used as ``used_<rule>``. A row whose ground truth is missing or is not a number has
      no score: a ValueError that says so stands in its place (see ``scoring.score_rows``).
    """
    del prompts
    rows: list[dict[str, float] | ValueError] = []
    for response, record in zip(responses, records, strict=True):
        truth = _truth(record)
        if isinstance(truth, ValueError):
            rows.append(truth)
            continue
        answer = extract_answer(response, lenient=lenient)
        correct = answer.value == truth
        found = answer.value is not None
        parts = {
            "score": 1.0 if correct else (format_score if found else 0.0),
            "correct": float(correct),
            "answer_found": float(found),
        }
        if lenient:
            parts |= {f"used_{rule}": float(answer.rule == rule) for rule in RULES}
        rows.append(parts)
    return rows


def check_records(records: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Rows that cannot be scored whatever the response is: their numbers, and why."""
    truths = enumerate(map(_truth, records))
    return {row: str(truth) for row, truth in truths if isinstance(truth, ValueError)}


def strict_verl(
    prompts: Sequence[Any],
    responses: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    *,
    format_score: float = 0.0,
) -> list[dict[str, float] | ValueError]:
    """Scores as verl's strict GSM8K scorer does, for comparison only.

    The last ``#### `` plus characters out of ``-0123456789.,`` within the last 300 characters,
    without its commas, must equal the ground truth as a *string*: ``#### $18``, ``####18``,
    ``#### 18.`` and an answer followed by a long text all score 0.
    """
    del prompts
    rows: list[dict[str, float] | ValueError] = []
    for response, record in zip(responses, records, strict=True):
        truth = _ground_truth(record)
        if isinstance(truth, ValueError):
            rows.append(truth)
            continue
        found = re.findall(r"#### (-?[0-9.,]+)", response[-300:])
        answer = found[-1].replace(",", "").replace("$", "") if found else None
        correct = answer is not None and answer == truth
        wrong = format_score if found else 0.0
        rows.append(
            {
                "score": 1.0 if correct else wrong,
                "correct": float(correct),
                "answer_found": float(bool(found)),
            }
        )
    return rows


def _after_last(text: str, marker: str) -> Fraction | None:
    """The number after the last marker that is directly followed by one."""
    end = len(text)
    for _ in range(_MAX_MARKERS):
        end = text.rfind(marker, 0, end)
        if end < 0:
            return None
        value = _number_at(text[end + len(marker) : end + len(marker) + _WINDOW])
        if value is not None:
            return value
    return None


def _last_number(text: str) -> Fraction | None:
    text = text.translate(_SAME_MEANING)
    begins = _MAY_BEGIN.finditer(text, max(0, len(text) - _LAST_CHARACTERS))
    for match in reversed(list(begins)):
        value = _number_at(text[match.start() : match.start() + _WINDOW])
        if value is not None:
            return value
    return None


def _number_at(window: str) -> Fraction | None:
    window = window.translate(_SAME_MEANING)
    line_break = _LINE_BREAK.match(window)
    decoration = _DECORATION.match(window, line_break.end() if line_break else 0)
    match = _NUMBER.match(window, decoration.end() if decoration else 0)
    if match is None or match.end() > _WINDOW - 10 or _GOES_ON.match(window, match.end()):
        return None
    if line_break and (match["listed"] or not _LINE_ENDS.match(window, match.end())):
        return None
    return _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    if part["decimal"] is not None:
        value = Fraction(re.sub("[, ']", "", part["decimal"]).rstrip("."))
    else:
        bottom = int(part["bottom"] or part["denominator"])
        if bottom == 0:
            return None
        value = int(part["units"] or 0) + Fraction(int(part["top"] or part["numerator"]), bottom)
    return -value if part["sign"] == "-" else value


def _ground_truth(record: Mapping[str, Any]) -> Any:
    reward_model = record.get("reward_model")
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        return ValueError("there is no reward_model.ground_truth; add it to the record")
    return reward_model["ground_truth"]


def _truth(record: Mapping[str, Any]) -> Fraction | ValueError:
    """The whole ground truth must be one number; a currency or percent sign may surround it."""
    truth = _ground_truth(record)
    if isinstance(truth, ValueError):
        return truth
    text = str(truth).strip().translate(_SAME_MEANING)
    match = _NUMBER.match(text)
    value = None
    if match is not None and not isinstance(truth, bool) and text[match.end() :] in ("", "%", "$"):
        value = _value(match)
    if value is None:
        return ValueError(f"the ground truth {truth!r} is not a number; correct it")
    return value
