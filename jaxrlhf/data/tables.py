"""Reads and writes prompt tables: parquet or jsonl in verl's schema, every row checked.

A record is a plain dict with the keys

  data_source   str, the name of the task
  prompt        list of messages ``{"role": str, "content": str}``, or a string: plain text that is
                tokenised as it is, without a chat template
  ability       str, optional
  reward_model  ``{"style": str, "ground_truth": ...}``
  extra_info    dict, optional (``{}`` when absent)

and whatever else the file holds. Rows are counted from 0 in messages.
"""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Record = dict[str, Any]
PathLike = str | os.PathLike[str]

REQUIRED = ("data_source", "prompt", "reward_model")


class TableError(ValueError):
    """A file or a row that cannot be used; the message names the file, the row and the key."""


def where(source: PathLike, row: int) -> str:
    """`file: row 3`, with the line number as well where the file has lines."""
    line = f" (line {row + 1})" if str(source).endswith(".jsonl") else ""
    return f"{source}: row {row}{line}"


@contextlib.contextmanager
def encoding(place: str, what: str) -> Iterator[None]:
    """What a template or a tokenizer raises of a row becomes a TableError with the row's place."""
    try:
        yield
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise TableError(
            f"{place}: {what} cannot be encoded ({said[:400]}); correct it or the chat template."
        ) from error


def check_chat_template(tokenizer: Any, place: str, rows: str) -> None:
    """Raises ValueError where a row of messages meets a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{tokenizer.name_or_path}: has no chat template, and {place} holds messages; add a "
            f"chat_template.jinja to the tokenizer's directory or write all {rows} as plain text."
        )


def read_table(path: PathLike) -> list[Record]:
    """Reads a .parquet or .jsonl file of records and checks every row.

    Args:
      path: the file. Columns beyond the schema's are kept as they are.

    Returns:
      One dict per row, nested values as plain Python objects.

    Raises:
      TableError: the file is missing, unreadable, empty, or a row breaks the schema.
    """
    rows = _read_parquet(path) if _kind(path) == "parquet" else read_jsonl(path)
    return [check_record(row, where(path, i)) for i, row in enumerate(rows)]


def read_rows(path: PathLike) -> list[Record]:
    """Reads a .parquet or .jsonl file of any columns, without looking into its rows.

    Raises:
      TableError: the file is missing, unreadable or empty, or a line is no JSON object.
    """
    if _kind(path) == "jsonl":
        return read_jsonl(path)
    return [plain_values(row) for row in _parquet(path).to_pylist()]


def write_table(path: PathLike, records: Sequence[Mapping[str, Any]]) -> None:
    """Checks the records and writes them as .parquet or .jsonl, in one rename.

    Args:
      path: the file, replaced if it exists; its folder is made.
      records: what ``read_table`` returns.

    Raises:
      TableError: nothing to write, a record breaks the schema, or (parquet) a key holds values
        of different types in different rows.
    """
    _kind(path)  # before the records are checked
    write_rows(path, [check_record(r, f"{path}: record {i}") for i, r in enumerate(records)])


def write_rows(path: PathLike, rows: Sequence[Record]) -> None:
    """Writes rows of any columns as .parquet or .jsonl, in one rename; see ``write_table``.

    Raises:
      TableError: nothing to write, or (parquet) a key holds values of different types in different
        rows.
    """
    kind = _kind(path)
    if not rows:
        raise TableError(f"{path}: there are no records to write; give at least one.")
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if kind == "parquet":
            pq.write_table(_to_arrow(path, rows), draft)
        else:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            draft.write_text("".join(lines), encoding="utf-8")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def read_jsonl(path: PathLike) -> list[Record]:
    """Reads one JSON object a line, without looking into it.

    Raises:
      TableError: a missing or empty file, a blank line, or a line that is no JSON object.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read ({error}); give a UTF-8 jsonl file.") from error
    rows = [_parse_line(line, where(path, i)) for i, line in enumerate(_lines(text))]
    if not rows:
        raise TableError(f"{path}: has no rows; give a file with at least one.")
    return rows


def check_record(record: Mapping[str, Any], place: str) -> Record:
    """Returns the record with plain nested values, or says what is wrong with it.

    Numpy arrays become lists, absent optional columns their empty value, and keys of a message
    that hold null are dropped (a struct column has every key in every row, and templates ask
    whether a key is there).

    Args:
      record: one row.
      place: how messages name the row, such as ``train.parquet: row 3``.

    Raises:
      TableError: names the place and the key.
    """
    row = {key: plain_values(value) for key, value in record.items()}
    for key in REQUIRED:
        if row.get(key) is None:
            kind = "is null" if key in row else "is missing"
            raise TableError(f"{place}: {key} {kind}; every record needs {', '.join(REQUIRED)}.")
    row["data_source"] = check_text(row["data_source"], f"{place}: data_source")
    row["prompt"] = check_prompt(row["prompt"], f"{place}: prompt")
    _check_reward_model(row["reward_model"], f"{place}: reward_model")
    if row.get("ability") is not None:
        check_text(row["ability"], f"{place}: ability")
    row["extra_info"] = {} if row.get("extra_info") is None else row["extra_info"]
    if not isinstance(row["extra_info"], dict):
        raise wrong_type(f"{place}: extra_info", row["extra_info"], "an object (a struct column)")
    return row


def _kind(path: PathLike) -> str:
    kind = pathlib.Path(path).suffix.removeprefix(".")
    if kind not in ("parquet", "jsonl"):
        raise TableError(f"{path}: only .parquet and .jsonl files are known; rename or convert it.")
    return kind


def _read_parquet(path: PathLike) -> list[Record]:
    table = _parquet(path)
    missing = [key for key in REQUIRED if key not in table.column_names]
    if missing:
        raise TableError(
            f"{path}: column {missing[0]} is missing (it has {', '.join(table.column_names)}); "
            "experiments/preprocess.py writes the schema."
        )
    return table.to_pylist()


def _parquet(path: PathLike) -> pa.Table:
    try:
        # Not pq.read_table: it would make columns out of folders named like `a=b`.
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (OSError, pa.ArrowException) as error:
        raise TableError(f"{path}: is no readable parquet file ({error}).") from error
    if table.num_rows == 0:
        raise TableError(f"{path}: has no rows; give a file with at least one.")
    return table


def _to_arrow(path: PathLike, rows: Sequence[Record]) -> pa.Table:
    columns = dict.fromkeys(key for row in rows for key in row)  # from_pylist reads row 0's alone
    arrays = {}
    for key in columns:
        values = [row.get(key) for row in rows]
        if all(value is None or value == {} for value in values):
            continue  # parquet has no struct without fields
        try:
            arrays[key] = pa.array(values)
        except pa.ArrowException as error:
            raise TableError(
                f"{path}: {key} holds different types in different rows ({error}); "
                "make them alike or write .jsonl."
            ) from error
    return pa.table(arrays)


def _lines(text: str) -> list[str]:
    # Not splitlines: it would cut at U+2028 and the like, which JSON allows inside strings.
    return text.removesuffix("\n").split("\n") if text.strip() else []


def _parse_line(line: str, place: str) -> Record:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TableError(f"{place}: is not JSON ({error}); write one object a line.") from error
    if not isinstance(row, dict):
        raise TableError(f"{place}: is a JSON {type(row).__name__}; write one object a line.")
    return row


def plain_values(value: Any) -> Any:
    """The value with numpy's arrays and numbers, at any depth, as Python's lists and numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return plain_values(value.tolist())
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value


def wrong_type(place: str, value: Any, wanted: str) -> TableError:
    """The error of a key that holds something else than ``wanted``."""
    kind = "null" if value is None else type(value).__name__
    return TableError(f"{place}: is {kind}; make it {wanted}.")


def check_text(value: Any, place: str) -> str:
    """Returns a string that is not blank, or says what is wrong with it."""
    if not isinstance(value, str):
        raise wrong_type(place, value, "a string")
    if not value.strip():
        raise TableError(f"{place}: is an empty string; fill it in or remove the row.")
    return _whole(value, place)


def _whole(value: str, place: str) -> str:
    """JSON can name half of a surrogate pair, which no tokenizer and no file takes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TableError(
            f"{place}: holds {value[error.start]!r}, half a surrogate pair, at character "
            f"{error.start}; correct the text."
        ) from error
    return value


def check_prompt(value: Any, place: str) -> str | list[dict[str, Any]]:
    """Returns a plain text, or messages without keys that hold null; or says what is wrong."""
    if isinstance(value, str):
        if _looks_like_messages(value):
            raise TableError(f"{place}: is a list of messages written as text; store the list.")
        return check_text(value, place)
    if not isinstance(value, list):
        raise wrong_type(place, value, "a list of messages or a string")
    if not value:
        raise TableError(f"{place}: has no messages; give at least one.")
    return [_message(message, f"{place}[{i}]") for i, message in enumerate(value)]


def _looks_like_messages(text: str) -> bool:
    head = text.lstrip()[:40].replace(" ", "").replace("'", '"')
    return head.startswith(('[{"role":', '[{"content":'))


def _message(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(place, value, "a message with role and content")
    check_text(value.get("role"), f"{place}.role")
    if not isinstance(value.get("content"), str):
        raise wrong_type(f"{place}.content", value.get("content"), "a string")
    _whole(value["content"], f"{place}.content")
    return {key: item for key, item in value.items() if item is not None}


def _check_reward_model(value: Any, place: str) -> None:
    if not isinstance(value, dict):
        raise wrong_type(place, value, "an object with style and ground_truth")
    truth = value.get("ground_truth")
    if truth is None or truth in ("", [], {}) or (isinstance(truth, float) and math.isnan(truth)):
        kind = "has no value" if "ground_truth" in value else "is missing"
        raise TableError(f"{place}.ground_truth: {kind}; give the answer or remove the row.")
    if value.get("style") is not None:
        check_text(value["style"], f"{place}.style")
