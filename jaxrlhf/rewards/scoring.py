"""Calls a user's scorer and checks what comes back: no row's reward is ever made up.

A scorer is any function ``score(prompts, responses, records)`` of three sequences with one entry
per row; it returns one entry per row: a number, or a dict with ``score`` and named parts. For a row
that it cannot score the entry is None, or an exception (not raised) whose text says why.

A function ``check_records(records)`` beside the scorer, or an attribute of it, may say before the
run which records no response could be scored for: ``{row: why}``.
"""

import collections
import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RETURN = "; return a finite number for every row, or set reward.on_error=skip"

Scorer = Callable[[Sequence[Any], Sequence[str], Sequence[Mapping[str, Any]]], Any]


class ScoringError(ValueError):
    """A scorer cannot be loaded, failed, or returned something that is no reward."""


class SampledText(str):
    """A response's text that knows the tokens that it was decoded from; otherwise a plain ``str``.

    A scorer that is a model itself can read them in place of the text, so that nothing is lost by
    decoding: which tokens were sampled, and whether the response was ended or cut.

    Attributes:
      row: token ids of prompt and response.
      tokenizer: ``data.tokenizer.tokenizer_digest`` of the tokenizer whose ids they are.
    """

    __slots__ = ("row", "tokenizer")
    row: tuple[int, ...]
    tokenizer: str | None

    def __new__(cls, text: str, row: Sequence[int], tokenizer: str | None) -> "SampledText":
        """The text with its tokens."""
        made = super().__new__(cls, text)
        made.row, made.tokenizer = tuple(row), tokenizer
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return SampledText, (str(self), self.row, self.tokenizer)


@dataclass(frozen=True)
class Scores:
    """What one call gave.

    Attributes:
      scores: f32[B], 0 where ``scored`` is False.
      parts: named parts, each f32[B], NaN where ``scored`` is False.
      scored: bool[B]; a row that is False has no reward and must get no gradient.
      problems: one sentence for each unscored row (or one for the whole call), for the log.
    """

    scores: np.ndarray
    parts: dict[str, np.ndarray]
    scored: np.ndarray
    problems: tuple[str, ...] = ()


def load_scorer(path: str, keywords: Mapping[str, Any] | None = None) -> Scorer:
    """Imports a scorer by dotted path, such as ``jaxrlhf.rewards.gsm8k.score``.

    A module may also lie in the current directory, which is appended to ``sys.path``: a program
    that is started by its file name has that file's folder there instead.

    Args:
      path: ``package.module.function``.
      keywords: keyword arguments from a config, bound now by ``functools.partial``.

    Raises:
      ScoringError: no such module or function, not callable, or it does not take three
        positional arguments and these keywords.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ScoringError(f"Scorer {path!r} is no dotted path: write package.module.function.")
    here = os.getcwd()
    if not {here, ""} & set(sys.path):
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, but something that it imports is not
        raise ScoringError(
            f"Scorer {path!r}: there is no module {error.name!r} on Python's path, nor in the "
            f"current directory {here}; correct the name, start where the module lies, or set "
            "PYTHONPATH."
        ) from error
    scorer = getattr(module, attribute, None)
    if scorer is None:
        raise ScoringError(f"Scorer {path!r}: module {module_name} has no {attribute!r}.")
    if not callable(scorer):
        raise ScoringError(f"Scorer {path!r} is of type {type(scorer).__name__}; name a function.")
    _check_signature(path, scorer, keywords or {})
    return functools.partial(scorer, **keywords) if keywords else scorer


def scorer_name(scorer: Scorer) -> str:
    """Returns ``module.function`` and its bound keywords, to be printed beside every score."""
    bound = ""
    while isinstance(scorer, functools.partial):
        bound = ", ".join(f"{k}={v!r}" for k, v in scorer.keywords.items())
        scorer = scorer.func
    name = getattr(scorer, "__qualname__", type(scorer).__qualname__)
    module = getattr(scorer, "__module__", "")
    return f"{module}.{name}({bound})" if bound else f"{module}.{name}"


def find_unscorable(scorer: Scorer, records: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Asks the scorer which records it cannot score, whatever the response: ``{row: why}``.

    Raises:
      ScoringError: its ``check_records`` failed or returned something else.
    """
    name, function = scorer_name(scorer), scorer
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    check = getattr(function, "check_records", getattr(module, "check_records", None))
    if check is None:
        return {}
    try:
        found = check(records)
    except Exception as error:
        raise ScoringError(
            f"check_records of scorer {name} failed: {_told(error)}{_at(error)}"
        ) from error
    if not isinstance(found, Mapping):
        raise ScoringError(
            f"check_records of scorer {name} returned a {type(found).__name__}; return a dict of "
            "row numbers and reasons."
        )
    return {int(row): str(reason) for row, reason in sorted(found.items())}


def score_rows(
    scorer: Scorer,
    prompts: Sequence[Any],
    responses: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    places: Sequence[str] | None = None,
    *,
    on_error: str = "raise",
) -> Scores:
    """Scores B rows; a row without a usable reward is an error or a counted unscored row.

    Args:
      scorer: see the module's text; ints and bools are taken as numbers.
      prompts, responses, records: one entry per row, each of length B.
      places: where each record stands, such as ``train.parquet: row 3``, for messages.
      on_error: ``"raise"``, or ``"skip"``: the row (after an exception or a wrong length: every
        row) is left unscored. None, exceptions, NaN, inf, text and missing parts count as errors.

    Raises:
      ScoringError: under ``"raise"``, one sentence that names the row and its prompt's index.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}; use 'raise' or 'skip'.")
    if not len(prompts) == len(responses) == len(records):
        raise ValueError(
            f"{len(prompts)} prompts, {len(responses)} responses and {len(records)} records "
            "were given; pass one of each per row."
        )
    name = scorer_name(scorer)
    try:
        returned = _as_rows(scorer(prompts, responses, records), len(records))
    except Exception as error:
        problem = f"Scorer {name} failed: {_told(error)}{_at(error)}"
        if on_error == "raise":
            raise ScoringError(problem) from error
        nothing = np.zeros(len(records), np.float32)
        return Scores(nothing, {}, nothing.astype(bool), (problem,))
    rows, faults = _read_rows(returned)
    problems = [
        f"Scorer {name}, {_where(row, records, places)}: {fault}."
        for row, fault in sorted(faults.items())
    ]
    if problems and on_error == "raise":
        raise ScoringError(problems[0])
    return _stack(rows, len(records), tuple(problems))


def _check_signature(path: str, scorer: Scorer, keywords: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(scorer)
    except ValueError:  # some built-in callables have none
        return
    try:
        signature.bind([], [], [], **keywords)
    except TypeError as error:
        raise ScoringError(
            f"Scorer {path!r} does not accept (prompts, responses, records"
            f"{''.join(f', {key}=' for key in keywords)}): {error}."
        ) from error


def _as_rows(returned: Any, num_rows: int) -> list[Any]:
    if isinstance(returned, Mapping | str | bytes) or not hasattr(returned, "__iter__"):
        raise ScoringError(
            f"it returned a {type(returned).__name__}; return a sequence with one entry per row"
        )
    rows = list(returned)
    if len(rows) != num_rows:
        raise ScoringError(f"it returned {len(rows)} entries for {num_rows} rows")
    return rows


def _number(value: Any) -> float:
    """Returns a finite float32 value; raises ValueError that says what is wrong with it."""
    array = np.asarray(None if isinstance(value, list | tuple) else value)
    is_number = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    if array.ndim or not is_number:
        raise ValueError(f"is {value!r}, not a number")
    with np.errstate(over="ignore"):
        number = float(array.astype(np.float32))
    if not np.isfinite(number):
        raise ValueError(f"is {value!r}, not a finite float32 number")
    return number


def _read_row(returned: Any) -> dict[str, float]:
    entries = returned if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in entries:
        raise ValueError(f"entry has no 'score' but only {sorted(map(str, entries))}")
    row = {}
    for key, value in entries.items():
        try:
            row[str(key)] = _number(value)
        except ValueError as error:
            raise ValueError(f"{'score' if key == 'score' else f'part {key!r}'} {error}") from error
    return row


def _read_rows(returned: list[Any]) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
    rows: dict[int, dict[str, float]] = {}
    faults: dict[int, str] = {}
    for index, entry in enumerate(returned):
        if isinstance(entry, Exception):
            faults[index] = _told(entry, plain=ValueError).rstrip(".")
            continue
        try:
            rows[index] = _read_row(entry)
        except ValueError as error:
            faults[index] = f"its {error}{RETURN}"
    # Which parts belong to a row is decided by the majority, so that row order does not matter.
    counts = collections.Counter(tuple(sorted(row)) for row in rows.values())
    usual = max(sorted(counts), key=counts.__getitem__, default=())
    for index, row in list(rows.items()):
        if tuple(sorted(row)) != usual:
            faults[index] = (
                f"its entry has {sorted(row)} where most rows have {list(usual)}{RETURN}"
            )
            del rows[index]
    return rows, faults


def _where(row: int, records: Sequence[Mapping[str, Any]], places: Sequence[str] | None) -> str:
    extra = records[row].get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    known = [] if places is None else [places[row]]
    known += [] if index is None else [f"prompt index {index}"]
    return f"row {row} ({', '.join(known)})" if known else f"row {row}"


def _told(error: Exception, plain: type[Exception] = ScoringError) -> str:
    """The exception on one line; of the kind ``plain`` its text alone."""
    text = " ".join(str(error).split())
    return text if type(error) is plain and text else f"{type(error).__name__}: {text}"


def _at(error: Exception) -> str:
    """`` (file:line in function)``, where the user's own code, not a library's, was last."""
    libraries = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if not f.filename.startswith(("<", *libraries))]
    for frame in reversed(own or frames):
        return f" ({frame.filename}:{frame.lineno} in {frame.name})"
    return ""


def _stack(rows: dict[int, dict[str, float]], num_rows: int, problems: tuple[str, ...]) -> Scores:
    scored = np.zeros(num_rows, bool)
    names = next(iter(rows.values())) if rows else ()
    columns = {name: np.full(num_rows, np.nan, np.float32) for name in ("score", *names)}
    for index, row in rows.items():
        scored[index] = True
        for name, value in row.items():
            columns[name][index] = value
    return Scores(np.where(scored, columns.pop("score"), 0), columns, scored, problems)
