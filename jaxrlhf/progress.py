"""Progress with a rate and the time left: bars on a terminal, now and then a line elsewhere.

    with progress("rollout", total=256, unit="rows") as advance:
        for row in rows:
            ...
            advance(1)

Bars go away at the end of their phase. Several may be open at once, and what is printed through
``rich.get_console()`` meanwhile appears above them. Nothing here raises into the caller's loop: a
display that fails (a closed pipe, say) is logged once and switched off.
"""

import contextlib
import datetime
import logging
import time
from collections.abc import Callable, Iterator

import rich
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

# Without a terminal: a line after each tenth of the work, but not two within LINE_SECONDS (so that
# short phases print nothing), and one after LINE_PATIENCE in any case.
LINE_FRACTION = 0.1
LINE_SECONDS = 2.0
LINE_PATIENCE = 30.0


class Bar:
    """One phase's progress; call it with the number of units that were finished since."""

    def __init__(
        self, description: str, total: int | None, unit: str, console: Console | None = None
    ) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = 0
        self._console = console or rich.get_console()
        self._start = self._line_time = time.monotonic()
        self._line_done = 0
        self._task: TaskID | None = None
        self._failed = False
        if self._console.is_terminal:
            self._safely(self._open)

    def __call__(self, amount: int = 1) -> None:
        """Counts ``amount`` more units as finished."""
        self.update(self.done + amount)

    def update(self, done: int, total: int | None = None) -> None:
        """Sets the number of finished units, and the total where it has become known."""
        self.done = done
        self.total = self.total if total is None else total
        self._safely(self._show)

    def close(self) -> None:
        """Removes the bar; without a terminal, a phase that took a while gets a last line."""
        self._safely(self._close)

    def rate(self) -> str:
        """Units per second since the start, such as ``41.2 rows/s``."""
        value = self.done / max(time.monotonic() - self._start, 1e-9)
        return f"{value:,.0f} {self.unit}/s" if value >= 100 else f"{value:.3g} {self.unit}/s"

    def line(self, *, last: bool = False) -> str:
        """The plain form: ``rollout: 64/256 rows (25%), 41.2 rows/s, 0:00:05 left``."""
        seconds = time.monotonic() - self._start
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        text = f"{self.description}: {count} {self.unit}"
        if last:
            return f"{text} in {seconds:.1f} s, {self.rate()}"
        if self.total and self.done:
            left = seconds * (self.total - self.done) / self.done
            share = f" ({100 * self.done / self.total:.0f}%)"
            return f"{text}{share}, {self.rate()}, {datetime.timedelta(seconds=round(left))} left"
        return f"{text}, {self.rate()}"

    def _safely(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
        # A display must never end a training run; rich answers a closed pipe with SystemExit.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._failed = True
            logging.getLogger(__name__).warning("%s: no more progress (%r)", self.line(), error)

    def _open(self) -> None:
        self._task = _bars.open(self._console).add_task(
            self.description, total=self.total, unit=self.unit, rate=""
        )

    def _show(self) -> None:
        if self._task is not None and _bars.progress is not None:
            _bars.progress.update(
                self._task, completed=self.done, total=self.total, rate=self.rate()
            )
        elif not self._console.is_terminal and self._line_is_due():
            self._print(self.line())
            self._line_time, self._line_done = time.monotonic(), self.done

    def _close(self) -> None:
        if self._task is not None:
            _bars.close(self._task)
        elif not self._console.is_terminal and time.monotonic() - self._start >= LINE_SECONDS:
            self._print(self.line(last=True))

    def _line_is_due(self) -> bool:
        waited = time.monotonic() - self._line_time
        if self.total and self.done - self._line_done >= LINE_FRACTION * self.total:
            return waited >= LINE_SECONDS
        return waited >= LINE_PATIENCE

    def _print(self, text: str) -> None:
        print(text, file=self._console.file, flush=True)


class _Bars:
    """The one live display that all open bars of a process share."""

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def open(self, console: Console) -> Progress:
        if self.progress is None:
            progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}  {task.fields[rate]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
                refresh_per_second=4,
            )
            progress.start()
            self.progress = progress
        return self.progress

    def close(self, task: TaskID) -> None:
        if self.progress is None:
            return
        self.progress.remove_task(task)
        if not self.progress.tasks:
            progress, self.progress = self.progress, None
            progress.stop()


_bars = _Bars()


@contextlib.contextmanager
def progress(
    description: str, total: int | None = None, unit: str = "it", *, console: Console | None = None
) -> Iterator[Bar]:
    """Shows how far a phase has come while the block runs.

    Args:
      description: name of the phase.
      total: units in all; None while unknown.
      unit: plural name of a unit, for the rate.
      console: where to show it; default ``rich.get_console()``.

    Yields:
      A ``Bar``: call it to count finished units, or ``bar.update(done, total)``.
    """
    bar = Bar(description, total, unit, console)
    try:
        yield bar
    finally:
        bar.close()
