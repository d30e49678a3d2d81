"""Progress: bars on a terminal, few lines elsewhere, and never an exception."""

import io
import logging

import pytest
from rich.console import Console

from jaxrlhf import progress as module
from jaxrlhf.progress import progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=20)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_plain_lines_come_each_tenth_with_rate_and_time_left(clock):
    console = plain()
    with progress("rollout", total=200, unit="rows", console=console) as advance:
        for _ in range(200):
            clock.now += 0.5
            advance(1)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "rollout: 20/200 rows (10%), 2 rows/s, 0:01:30 left"
    assert lines[1] == "rollout: 40/200 rows (20%), 2 rows/s, 0:01:20 left"
    assert lines[-1] == "rollout: 200/200 rows in 100.0 s, 2 rows/s"
    assert len(lines) == 11


def test_a_short_phase_prints_nothing_and_a_slow_one_shows_life(clock):
    console = plain()
    with progress("short", total=10, unit="rows", console=console) as advance:
        for _ in range(10):
            clock.now += 0.1
            advance(1)
    assert console.file.getvalue() == ""
    with progress("slow", unit="files", console=console) as advance:
        for done in range(1, 5):
            clock.now += 20
            advance.update(done * 1000)
    assert console.file.getvalue().splitlines() == [
        "slow: 2000 files, 50 files/s",
        "slow: 4000 files, 50 files/s",
        "slow: 4000 files in 80.0 s, 50 files/s",
    ]


def test_bars_nest_and_leave_the_terminal_clean():
    console = terminal()
    with progress("outer", total=2, unit="steps", console=console) as outer:
        for _ in range(2):
            with progress("inner", total=3, unit="rows", console=console) as inner:
                inner(1)
                inner.update(3)
                module._bars.progress.refresh()
                console.print("a table")
            outer(1)
        assert [task.description for task in module._bars.progress.tasks] == ["outer"]
    assert module._bars.progress is None
    text = console.file.getvalue()
    assert "outer" in text
    assert "3/3" in text
    assert "rows/s" in text
    assert text.count("a table") == 2


def test_the_callers_exception_passes_and_closes_the_bar():
    with (
        pytest.raises(KeyError, match="mine"),
        progress("failing", total=2, console=terminal()),
    ):
        raise KeyError("mine")
    assert module._bars.progress is None


class Broken(io.StringIO):
    def write(self, text):
        raise OSError("closed")


@pytest.mark.parametrize("force_terminal", [True, False])
def test_a_broken_display_is_logged_once_and_raises_nothing(force_terminal, caplog, clock):
    console = Console(file=Broken(), force_terminal=force_terminal, width=80)
    with caplog.at_level(logging.WARNING), progress("x", total=4, console=console) as advance:
        for _ in range(4):
            clock.now += 50
            advance(1)
    assert advance.done == 4
    assert len(caplog.messages) == 1
    assert "no more progress (OSError('closed'))" in caplog.text
    assert module._bars.progress is None


def test_odd_numbers_are_shown(clock):
    console = plain()
    for total, amounts in ((0, [1]), (3, [5]), (None, [0]), (-1, [2])):
        with progress("odd", total=total, console=console) as advance:
            for amount in amounts:
                clock.now += 60
                advance(amount)
    assert len(console.file.getvalue().splitlines()) == 8
