"""Writers of metrics: what a kill, a resume, a NaN or a failing tracker does to them."""

import io
import json
import struct
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from jaxrlhf.metrics import (
    ConsoleTable,
    JsonlWriter,
    RolloutWriter,
    TensorBoardWriter,
    WandbWriter,
    Writers,
    format_number,
    to_floats,
)


def read(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_to_floats_keeps_float32_exactly_and_names_what_is_no_scalar():
    third = jnp.float32(1) / 3
    floats = to_floats(
        {"a": third, "b": np.float64(0.1), "c": 3, "d": True, "e": jnp.ones((1,), jnp.bfloat16)}
    )
    assert floats == {"a": float(np.float32(1) / np.float32(3)), "b": 0.1, "c": 3, "d": 1, "e": 1}
    assert all(type(value) is float for value in floats.values())
    for bad in (jnp.ones(2), "text", None):
        with pytest.raises(ValueError, match="Metric 'bad' is"):
            to_floats({"good": 1, "bad": bad})


def test_jsonl_is_strict_and_complete_after_each_write(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(0, {"val/accuracy": 0.25})
    writer.write(1, {"a": float("nan"), "b": float("inf"), "c": 0.1})
    assert read(path) == [
        {"step": 0, "val/accuracy": 0.25},
        {"step": 1, "a": None, "b": None, "c": 0.1},
    ]
    with pytest.raises(ValueError, match="already holds step 1, so 1 cannot follow"):
        writer.write(1, {"a": 1.0})
    with pytest.raises(ValueError, match="A metric is called 'step'"):
        writer.write(2, {"step": 1.0})
    writer.close()


def test_jsonl_is_cut_after_the_restored_step_and_goes_on(tmp_path):
    path, reports = tmp_path / "metrics.jsonl", []
    writer = JsonlWriter(path)
    for step in range(6):
        writer.write(step, {"a": step / 3})
    writer.close()
    before = path.read_bytes()
    writer = JsonlWriter(path, report=reports.append)
    writer.truncate_after(3)
    assert reports == [f"{path}: 2 lines after step 3 removed."]
    with pytest.raises(ValueError, match="already holds step 3"):
        writer.write(3, {})
    for step in (4, 5):
        writer.write(step, {"a": step / 3})
    writer.truncate_after(9)
    assert path.read_bytes() == before
    writer.truncate_after(-1)
    writer.write(0, {"b": 1.0})
    assert read(path) == [{"step": 0, "b": 1.0}]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    writer.close()


@pytest.mark.parametrize("torn", ['{"step": 2, "a"', '{"step": 2}', "\x00\x00", "\udcff", "{}\n"])
def test_a_torn_last_line_is_dropped_and_said(tmp_path, torn):
    path, reports = tmp_path / "metrics.jsonl", []
    good = '{"step": 0}\n{"step": 1}\n'
    path.write_bytes((good + torn).encode("utf-8", "surrogateescape"))
    writer = JsonlWriter(path, report=reports.append)
    assert path.read_text() == good
    assert reports == [f"{path}: the last line (3) was cut short; removed."]
    writer.write(2, {"a": 1.0})
    assert read(path)[-1] == {"step": 2, "a": 1.0}
    writer.close()


def test_a_bad_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object with a step"):
        JsonlWriter(path)


def read_events(directory):
    """TensorBoard's records: length, its checksum, the event, its checksum."""
    for path in sorted(directory.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_tensorboard_gets_scalars_and_purges_on_resume(tmp_path, caplog):
    writer = TensorBoardWriter(tmp_path)
    for step in range(3):
        writer.write(step, {"policy/loss": step / 2, "kl/coef": 0.1})
    writer.close()
    scalars = {
        (event.step, value.tag): value.simple_value
        for event in read_events(tmp_path)
        for value in event.summary.value
    }
    assert scalars[2, "policy/loss"] == 1.0
    assert len(scalars) == 6
    writer = TensorBoardWriter(tmp_path)
    writer.truncate_after(1)
    writer.write(2, {"policy/loss": 7.0, "kl/coef": float("nan")})
    writer.close()
    assert not caplog.messages
    starts = [e.step for e in read_events(tmp_path) if e.session_log.status == 1]
    assert starts == [2]


class FakeRun:
    def __init__(self, id):
        self.id, self.logged, self.defined, self.finished = id, [], [], False

    def define_metric(self, *args, **options):
        self.defined.append((args, options))

    def log(self, metrics):
        self.logged.append(metrics)

    def finish(self):
        self.finished = True


def test_wandb_is_resumed_under_its_id(tmp_path, monkeypatch):
    calls = []

    def init(**options):
        calls.append(options)
        return FakeRun(options["id"] or "abc123")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for _ in range(2):
        writer = WandbWriter(tmp_path, project="p", config={"seed": 1})
        writer.truncate_after(3)
        writer.write(4, {"a": 1.0})
        writer.close()
        assert writer._run.logged == [{"step": 4, "a": 1.0}]
        assert writer._run.finished
    assert [call["id"] for call in calls] == [None, "abc123"]
    assert {call["resume"] for call in calls} == {"allow"}


def test_wandb_missing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RuntimeError, match=r"pip install 'jaxrlhf\[wandb\]'"):
        WandbWriter(tmp_path, project="p")


class Failing:
    def __init__(self, at):
        self.at, self.steps = at, []

    def write(self, step, metrics):
        if step == self.at:
            raise ConnectionError("no route")
        self.steps.append(step)

    def truncate_after(self, step):
        if self.at == "truncate":
            raise ConnectionError("no route")

    def close(self):
        if self.at == "close":
            raise ConnectionError("no route")


def test_a_failing_tracker_is_reported_once_and_dropped(tmp_path):
    reports = []
    others = [Failing(1), Failing("truncate"), Failing("close"), Failing(None)]
    writers = Writers(JsonlWriter(tmp_path / "m.jsonl"), others, report=reports.append)
    writers.resume_after(-1)
    for step in range(4):
        assert writers.write(step, {"a": jnp.float32(step)}) == {"a": float(step)}
    writers.close()
    assert [other.steps for other in others] == [[0], [], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert len(reports) == 3
    assert all("Failing failed (ConnectionError: no route)" in report for report in reports)
    assert [entry["step"] for entry in read(tmp_path / "m.jsonl")] == [0, 1, 2, 3]


def test_a_failing_jsonl_file_is_an_error(tmp_path):
    writers = Writers(JsonlWriter(tmp_path / "m.jsonl"))
    writers.close()
    with pytest.raises(ValueError, match="closed file"):
        writers.write(1, {"a": 1.0})


METRICS = {"reward/mean": 0.71234, "policy/kl_k1": 3.2e-5, "throughput/tokens_per_second": 12345.6}


def test_the_table_is_plain_text_without_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    columns = {"reward/mean": "reward", "missing": "missing", "policy/kl_k1": "KL (nats/token)"}
    table = ConsoleTable(columns, total_steps=50, console=console)
    table.write(3, METRICS)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("── step 3/50 ──")
    assert lines[1].split() == ["reward", "0.7123", "KL", "(nats/token)", "3.2e-05"]
    assert len(lines) == 2
    table = ConsoleTable(list(METRICS), console=console)
    table.write(4, METRICS)
    assert all(len(line) <= 80 for line in console.file.getvalue().splitlines())
    assert "\x1b" not in console.file.getvalue()


def test_of_a_group_the_table_shows_the_first_that_is_there():
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    columns = {"a": "first", "b": "second", "c": "other"}
    table = ConsoleTable(columns, either=[("a", "b")], console=console)
    table.write(1, {"a": 1.0, "b": 2.0, "c": 3.0})
    table.write(2, {"b": 2.0, "c": float("nan")})
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert shown[1] == ["first", "1", "other", "3"]
    assert shown[3] == ["second", "2", "other", "nan"]


def test_tables_may_be_rare_but_the_last_step_has_one():
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    table = ConsoleTable(["a"], total_steps=7, every=3, console=console)
    for step in range(8):
        table.write(step, {"a": 1.0})
    titles = [line.split()[2] for line in console.file.getvalue().splitlines() if "step" in line]
    assert titles == ["0/7", "3/7", "6/7", "7/7"]


def test_the_table_fits_narrow_terminals():
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    ConsoleTable([*METRICS, "none"], console=console).write(4, METRICS)
    text = console.file.getvalue()
    assert "\x1b[" in text
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123456, "0.01235"),
        (12000.4, "12,000"),
        (5.0, "5"),
        (1e-9, "1e-09"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (2.5e20, "2.5e+20"),
        (-1234567.0, "-1,234,567"),
    ],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


def test_rollout_samples_are_readable_and_spread_over_the_batch(tmp_path):
    writer = RolloutWriter(tmp_path / "rollouts", rows=4)
    for step in (1, 2):
        writer.write(
            step,
            prompts=[f"2 + {i}? \u2212" for i in range(10)],
            responses=[f"#### {i}\n\u2028\udcff" for i in range(10)],
            scores=np.float32([i / 10 for i in range(10)]),
            scored=np.arange(10) != 5,
            parts={"correct": jnp.zeros(10), "advantage": jnp.ones(10)},
            finish_reasons=jnp.int8([0, 1, 2, 0, 0, 0, 0, 1, 0, 0]),
            advantages=jnp.arange(10.0) / 4,
        )
    path = tmp_path / "rollouts" / "00000002.jsonl"
    entries = [json.loads(line) for line in path.read_bytes().decode().rstrip("\n").split("\n")]
    assert [entry["row"] for entry in entries] == [0, 2, 5, 7]
    assert entries[1] == {
        "step": 2,
        "row": 2,
        "prompt": "2 + 2? \u2212",
        "response": "#### 2\n\u2028\udcff",
        "score": pytest.approx(0.2),
        "parts": {"correct": 0.0, "advantage": 1.0},
        "finish_reason": "abort",
        "advantage": 0.5,
    }
    assert [entry["score"] is None for entry in entries] == [False, False, True, False]
    writer.truncate_after(1)
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["00000001.jsonl"]
