import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrlhf.data.tables import TableError, check_record, read_jsonl, read_table, write_table

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT}),
    min_size=1,
    max_size=3,
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "data_source": TEXT,
            "prompt": MESSAGES,
            "ability": TEXT,
            "reward_model": st.fixed_dictionaries({"style": TEXT, "ground_truth": TEXT}),
            "extra_info": st.fixed_dictionaries({"index": st.integers(0, 9), "question": TEXT}),
        }
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=ROWS)
def test_what_is_written_is_read(tmp_path, kind, rows):
    write_table(tmp_path / "deep" / f"t.{kind}", rows)
    assert read_table(tmp_path / "deep" / f"t.{kind}") == rows
    assert [p.name for p in (tmp_path / "deep").iterdir() if p.suffix == ".part"] == []


def test_a_file_like_verls_loads_unchanged(tmp_path):
    """Nested structs, tools, large and dictionary strings, nulls, pandas' index, extra columns."""
    message = pa.struct(
        [("content", pa.large_string()), ("role", pa.string()), ("tool_calls", pa.list_(pa.int8()))]
    )
    create = pa.struct([("create_kwargs", pa.struct([("ground_truth", pa.string())]))])
    info = [("index", pa.int64()), ("need_tools_kwargs", pa.bool_()), ("tools_kwargs", create)]
    turns = [
        {"role": "system", "content": "Be short.", "tool_calls": None},
        {"role": "user", "content": "1 + 1?", "tool_calls": None},
    ]
    extra = {
        "index": 7,
        "need_tools_kwargs": True,
        "tools_kwargs": {"create_kwargs": {"ground_truth": "2"}},
    }
    table = pa.table(
        {
            "data_source": pa.array(["openai/gsm8k"] * 2).dictionary_encode(),
            "agent_name": ["tool_agent"] * 2,
            "prompt": pa.array([turns, turns[1:]], pa.large_list(message)),
            "ability": pa.array(["math", None]),
            "reward_model": [{"style": "rule", "ground_truth": "2"}] * 2,
            "extra_info": pa.array([extra, None], pa.struct(info)),
            "__index_level_0__": [5, 6],
        }
    ).replace_schema_metadata({"huggingface": "{}", "pandas": "{}"})
    (tmp_path / "split=train").mkdir()  # a folder name that a dataset reader takes for a column
    pq.write_table(table, tmp_path / "split=train" / "train.parquet")
    first, second = read_table(tmp_path / "split=train" / "train.parquet")
    plain = [{"role": m["role"], "content": m["content"]} for m in turns]
    assert first["prompt"] == plain
    assert second["prompt"] == plain[1:]
    assert first["extra_info"] == extra
    assert second["extra_info"] == {}
    assert first["agent_name"] == "tool_agent"
    assert "split" not in first


def test_numpy_values_become_plain(record):
    """pandas gives object arrays of dicts and numpy scalars."""
    prompt = np.array([{"role": "user", "content": "hi"}], dtype=object)
    row = record(prompt=prompt, extra_info={"index": np.int64(3), "ids": np.arange(2)})
    checked = check_record(row, "here")
    assert checked["prompt"] == [{"role": "user", "content": "hi"}]
    assert json.loads(json.dumps(checked))["extra_info"] == {"index": 3, "ids": [0, 1]}
    assert isinstance(row["prompt"], np.ndarray)  # the caller's record is left as it was


def test_a_string_prompt_is_plain_text(record, tmp_path):
    write_table(tmp_path / "t.parquet", [record(prompt="Once upon a time")])
    assert read_table(tmp_path / "t.parquet")[0]["prompt"] == "Once upon a time"


@pytest.mark.parametrize("truth", ["72", 72, 0, 7.5, False, ["a", "b"], {"target": 24}])
def test_any_kind_of_ground_truth(record, truth):
    row = record(reward_model={"style": "rule", "ground_truth": truth})
    assert check_record(row, "here")["reward_model"]["ground_truth"] == truth


BAD_ROWS = [
    ({"data_source": None}, "data_source is null"),
    ({"data_source": 3}, "data_source: is int"),
    ({"data_source": " "}, "data_source: is an empty string"),
    ({"prompt": None}, "prompt is null"),
    ({"prompt": []}, "prompt: has no messages"),
    ({"prompt": ""}, "prompt: is an empty string"),
    ({"prompt": 5}, "prompt: is int"),
    ({"prompt": {"role": "user", "content": "x"}}, "prompt: is dict"),
    ({"prompt": ["hello"]}, r"prompt\[0\]: is str"),
    ({"prompt": '[{"role": "user", "content": "x"}]'}, "messages written as text"),
    ({"prompt": "[{'role': 'user', 'content': 'x'}]"}, "messages written as text"),
    ({"prompt": [{"content": "x"}]}, r"prompt\[0\].role: is null"),
    ({"prompt": [{"role": "user"}]}, r"prompt\[0\].content: is null"),
    ({"prompt": [{"role": "user", "content": ["x"]}]}, r"prompt\[0\].content: is list"),
    (
        {"prompt": [{"role": "user", "content": "x"}, {"role": "user", "content": None}]},
        r"prompt\[1\].content: is null",
    ),
    ({"reward_model": None}, "reward_model is null"),
    ({"reward_model": "72"}, "reward_model: is str"),
    ({"reward_model": {"style": "rule"}}, "reward_model.ground_truth: is missing"),
    (
        {"reward_model": {"style": "rule", "ground_truth": None}},
        "reward_model.ground_truth: has no value",
    ),
    ({"reward_model": {"style": "rule", "ground_truth": ""}}, "ground_truth: has no value"),
    (
        {"reward_model": {"style": "rule", "ground_truth": float("nan")}},
        "ground_truth: has no value",
    ),
    ({"reward_model": {"style": 1, "ground_truth": "2"}}, "reward_model.style: is int"),
    ({"ability": 4}, "ability: is int"),
    ({"extra_info": "x"}, "extra_info: is str"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ROWS)
def test_a_bad_row_is_named(record, tmp_path, change, message):
    lines = [json.dumps(record()), json.dumps(record(**change))]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    with pytest.raises(TableError, match=rf"t.jsonl: row 1 \(line 2\): .*{message}"):
        read_table(tmp_path / "t.jsonl")
    pq.write_table(pa.Table.from_pylist([record(**change)]), tmp_path / "t.parquet")
    with pytest.raises(TableError, match=rf"t.parquet: row 0: .*{message}"):
        read_table(tmp_path / "t.parquet")
    with pytest.raises(TableError, match=rf"new.parquet: record 1: .*{message}"):
        write_table(tmp_path / "new.parquet", [record(), record(**change)])
    assert not (tmp_path / "new.parquet").exists()


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ("hi \ud83d", "prompt"),
        ([{"role": "user", "content": "hi \ud83d"}], r"prompt\[0\].content"),
        ([{"role": "us \ud83d", "content": "hi"}], r"prompt\[0\].role"),
    ],
)
def test_half_a_surrogate_pair_is_named(record, tmp_path, prompt, place):
    """Python's json reads it; parquet cannot hold it."""
    (tmp_path / "t.jsonl").write_text(json.dumps(record(prompt=prompt)))
    with pytest.raises(TableError, match=rf"row 0 \(line 1\): {place}: holds '\\ud83d', .* 3;"):
        read_table(tmp_path / "t.jsonl")
    with pytest.raises(TableError, match="record 0: prompt"):
        write_table(tmp_path / "t.parquet", [record(prompt=prompt)])
    whole = record(prompt="hi \U0001f600")
    (tmp_path / "t.jsonl").write_text(json.dumps(whole))  # as two escapes
    assert read_table(tmp_path / "t.jsonl") == [whole]


@pytest.mark.parametrize("key", ["data_source", "prompt", "reward_model"])
def test_a_missing_column_is_named(record, tmp_path, key):
    row = record()
    del row[key]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    with pytest.raises(TableError, match=rf"t.parquet: column {key} is missing"):
        read_table(tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(TableError, match=rf"row 0 \(line 1\): {key} is missing"):
        read_table(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.parquet", b"", "is no readable parquet file"),
        ("t.parquet", b"PAR1" + 60 * b"x" + b"PAR1", "is no readable parquet file"),
        ("t.jsonl", b"", "has no rows"),
        ("t.jsonl", b"\n\n", "has no rows"),
        ("t.jsonl", b"\xff\xfe", "cannot be read"),
        ("t.jsonl", b'{"a": 1}\n{"a": \n', r"row 1 \(line 2\): is not JSON"),
        ("t.jsonl", b'{"a": 1}\n\n{"a": 1}\n', r"row 1 \(line 2\): is not JSON"),
        ("t.jsonl", b"[1]\n", r"row 0 \(line 1\): is a JSON list"),
        ("t.csv", b"a,b\n", "only .parquet and .jsonl"),
        ("absent.parquet", None, "is no readable parquet file"),
        ("absent.jsonl", None, "cannot be read"),
    ],
)
def test_an_unusable_file_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TableError, match=f"{name}: {message}"):
        read_table(tmp_path / name)


def test_a_parquet_file_without_rows(record, tmp_path):
    pq.write_table(pa.Table.from_pylist([record()]).slice(0, 0), tmp_path / "t.parquet")
    with pytest.raises(TableError, match=r"t.parquet: has no rows"):
        read_table(tmp_path / "t.parquet")


def test_lines_are_cut_at_newlines_alone(tmp_path):
    """JSON strings may hold U+2028 and U+0085, at which str.splitlines cuts."""
    (tmp_path / "t.jsonl").write_text('{"a": "x\u2028y\u0085z"}\r\n{"a": "2"}', encoding="utf-8")
    assert read_jsonl(tmp_path / "t.jsonl") == [{"a": "x\u2028y\u0085z"}, {"a": "2"}]


def test_keys_of_later_rows_are_kept(record, tmp_path):
    rows = [record(extra_info={}), record(extra_info={}, note="late")]
    write_table(tmp_path / "t.parquet", rows)
    assert [row.get("note") for row in read_table(tmp_path / "t.parquet")] == [None, "late"]


def test_a_failed_write_leaves_the_old_file(record, tmp_path):
    path = tmp_path / "t.parquet"
    write_table(path, [record()])
    mixed = [record(reward_model={"ground_truth": t}) for t in ("2", {"a": 3})]
    with pytest.raises(TableError, match=r"t.parquet: reward_model holds different types"):
        write_table(path, mixed)
    with pytest.raises(TableError, match="no records to write"):
        write_table(path, [])
    assert read_table(path) == [record()]
    assert list(tmp_path.iterdir()) == [path]
