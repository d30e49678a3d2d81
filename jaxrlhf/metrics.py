"""Where a run's metrics go: a jsonl file, TensorBoard, wandb, the console; and rollout samples.

All writers take ``write(step, metrics)`` with plain floats and ``truncate_after(step)``, which a
resumed run calls so that nothing stays from the steps that it is about to repeat.
"""

import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import rich
import tensorboardX
from rich.console import Console
from rich.text import Text

from jaxrlhf.types import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP

FINISH_NAMES = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ABORT: "abort"}


class Writer(Protocol):
    """What ``Writers`` can fan out to."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records one step."""

    def truncate_after(self, step: int) -> None:
        """Forgets what was recorded of later steps."""

    def close(self) -> None:
        """Finishes what is still being written."""


def to_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Fetches all scalars from the devices in one transfer; float32 values stay exact.

    Raises:
      ValueError: a value is not one number; names the metric.
    """
    fetched = jax.device_get(dict(metrics))
    floats = {}
    for name, value in fetched.items():
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind in "OUSMmc":
            raise ValueError(f"Metric {name!r} is {value!r}; reduce it to one number.")
        floats[name] = float(array.reshape(()))
    return floats


class JsonlWriter:
    """Appends one JSON object per step: ``{"step": 3, "policy/loss": 0.1, …}``.

    Strict JSON: NaN and infinities are written as null. Every line is on the disk before
    ``write`` returns. A last line that a kill has torn is removed on opening, and reported.

    Args:
      path: the file; appended to where it exists.
      report: called with a sentence when lines are dropped. Default: a logger's warning.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, report: Callable[[str], None] | None = None
    ) -> None:
        self.path = pathlib.Path(path)
        self._report = report or logging.getLogger(__name__).warning
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._read()
        self._last_step = lines[-1][0] if lines else None
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the step's line; steps must rise.

        Raises:
          ValueError: the step is not above the last one, or a metric is called "step".
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"{self.path} already holds step {self._last_step}, so {step} cannot follow: "
                "write all metrics of a step at once, or call truncate_after on resume."
            )
        if "step" in metrics:
            raise ValueError("A metric is called 'step'; give it another name.")
        entry = {"step": int(step), **{name: _finite(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last_step = int(step)

    def truncate_after(self, step: int) -> None:
        """Removes the lines of later steps; the file is replaced at once or not at all."""
        self._file.close()
        lines = self._read()
        kept = [text for number, text in lines if number <= step]
        if len(kept) < len(lines):
            _replace(self.path, "".join(kept))
            self._report(f"{self.path}: {len(lines) - len(kept)} lines after step {step} removed.")
        self._last_step = max((number for number, _ in lines if number <= step), default=None)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _read(self) -> list[tuple[int, str]]:
        """All lines with their steps; removes a torn last one from the file."""
        if not self.path.exists():
            return []
        texts = self.path.read_text("utf-8", "replace").splitlines(keepends=True)
        lines = []
        for number, text in enumerate(texts, start=1):
            step = _step_of(text)
            if step is not None:
                lines.append((step, text))
            elif number == len(texts):
                _replace(self.path, "".join(text for _, text in lines))
                self._report(f"{self.path}: the last line ({number}) was cut short; removed.")
            else:
                raise ValueError(
                    f"{self.path}, line {number} is not a JSON object with a step: repair it."
                )
        return lines


def _step_of(text: str) -> int | None:
    if not text.endswith("\n"):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    step = entry.get("step") if isinstance(entry, dict) else None
    return step if isinstance(step, int) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _replace(path: pathlib.Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class TensorBoardWriter:
    """Event files for TensorBoard.

    ``truncate_after`` must come before the first ``write``: TensorBoard then leaves out what
    earlier event files hold of later steps.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # Its warning about NaN names no metric; the jsonl file shows which one it is.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        self._directory = str(directory)
        self._purge_step: int | None = None
        self._writer: tensorboardX.SummaryWriter | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes each metric as a scalar and flushes."""
        if self._writer is None:
            self._writer = tensorboardX.SummaryWriter(self._directory, purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Makes TensorBoard forget later steps of earlier event files."""
        self._purge_step = step + 1

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbWriter:
    """A Weights & Biases run, taken up again under the id that lies in ``directory``.

    Steps are logged as the metric ``step``, which is every chart's x-axis: unlike wandb's own
    counter it may go back, so that a resumed run can repeat steps.

    Raises:
      RuntimeError: wandb is not installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        project: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise RuntimeError(
                "wandb is asked for but not installed: pip install 'jaxrlhf[wandb]', "
                "or take it out of the config."
            ) from error
        path = pathlib.Path(directory) / "wandb_id.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.read_text().strip() if path.exists() else None
        self._run = wandb.init(
            project=project,
            name=name,
            config=dict(config or {}),
            dir=str(directory),
            id=known,
            resume="allow",
        )
        _replace(path, f"{self._run.id}\n")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the step."""
        self._run.log({"step": step, **metrics})

    def truncate_after(self, step: int) -> None:
        """Does nothing: wandb keeps what was logged; repeated steps are drawn over it."""

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class ConsoleTable:
    """Prints a small table of chosen metrics per step; plain text where there is no terminal.

    Args:
      columns: the metrics' names in their order (those that a step lacks are left out), or a
        mapping of names to what is shown in their place.
      total_steps: shown in the title.
      either: groups of columns of which the first that a step has is shown and the others not.
      every: steps between two tables; the last step has one in any case.
      console: default ``rich.get_console()``, which progress bars share.
    """

    def __init__(
        self,
        columns: Sequence[str] | Mapping[str, str],
        *,
        total_steps: int | None = None,
        either: Sequence[Sequence[str]] = (),
        every: int = 1,
        console: Console | None = None,
    ) -> None:
        names = dict(columns) if isinstance(columns, Mapping) else {c: c for c in columns}
        self._columns = names
        self._total = total_steps
        self._either = either
        self._every = every
        self._console = console or rich.get_console()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the step's table, if it is its turn."""
        if step % self._every and step != self._total:
            return
        hidden = {
            name
            for group in self._either
            for name in [name for name in group if name in metrics][1:]
        }
        cells = [
            (shown, format_number(metrics[name]))
            for name, shown in self._columns.items()
            if name in metrics and name not in hidden
        ]
        title = f"step {step}" if self._total is None else f"step {step}/{self._total}"
        text = _grid(title, cells, self._console.width)
        if self._console.is_terminal:
            self._console.print(text)
        else:
            # Not through rich, which ends the whole process when the pipe is closed.
            print(text.plain, file=self._console.file, flush=True)

    def truncate_after(self, step: int) -> None:
        """Does nothing: what was printed stays."""

    def close(self) -> None:
        """Does nothing."""


def format_number(value: float) -> str:
    """Four significant digits, whole numbers in full: ``0.01234``, ``12,000``, ``3.2e-05``."""
    if math.isfinite(value) and value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _grid(title: str, cells: Sequence[tuple[str, str]], width: int) -> Text:
    """A title line and "name value" pairs, as many beside each other as fit."""
    name_width = max((len(name) for name, _ in cells), default=0)
    value_width = max((len(value) for _, value in cells), default=0)
    per_line = max(1, (width + 2) // (name_width + value_width + 3))
    text = Text(f"── {title} ".ljust(min(width, 79), "─"), style="bold")
    for index, (name, value) in enumerate(cells):
        text.append("\n" if index % per_line == 0 else "  ")
        text.append(name.ljust(name_width + 1), style="not bold dim")
        text.append(value.rjust(value_width), style="not bold")
    return text


class Writers:
    """Writes every step to the jsonl file and to all others.

    A failure of the jsonl file is an error. Any other writer that fails is reported once and
    left out from then on: a tracker's outage does not end a training run.

    Args:
      jsonl: the file that counts.
      others: trackers and tables.
      report: called with a sentence about a writer that failed. Default: a logger's warning.
    """

    def __init__(
        self,
        jsonl: JsonlWriter,
        others: Sequence[Writer] = (),
        *,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._jsonl = jsonl
        self._others = list(others)
        self._report = report or logging.getLogger(__name__).warning

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Fetches the metrics from the devices, writes them, and returns them as floats."""
        floats = to_floats(metrics)
        self._jsonl.write(step, floats)
        self._each(lambda writer: writer.write(step, floats))
        return floats

    def resume_after(self, step: int) -> None:
        """Drops what was recorded after ``step``; to be called before the first ``write``."""
        self._jsonl.truncate_after(step)
        self._each(lambda writer: writer.truncate_after(step))

    def close(self) -> None:
        """Closes all of them."""
        self._jsonl.close()
        self._each(lambda writer: writer.close())

    def _each(self, action: Callable[[Writer], None]) -> None:
        for writer in list(self._others):
            try:
                action(writer)
            except Exception as error:  # noqa: BLE001 - reported, and only the tracker is lost
                self._others.remove(writer)
                self._report(
                    f"{type(writer).__name__} failed ({type(error).__name__}: {error}) and is "
                    "left out from now on; the jsonl file goes on."
                )


class RolloutWriter:
    """Keeps a sample of every step's rows, readable, in ``DIRECTORY/00000012.jsonl``.

    Args:
      directory: where the files go.
      rows: rows kept per step, spread evenly over the batch; None keeps all.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rows: int | None = 8) -> None:
        self._directory = pathlib.Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._rows = rows

    def write(
        self,
        step: int,
        *,
        prompts: Sequence[str],
        responses: Sequence[str],
        scores: Any,
        scored: Any,
        parts: Mapping[str, Any],
        finish_reasons: Any,
        advantages: Any,
    ) -> pathlib.Path:
        """Writes one step's file.

        Args:
          step: the step.
          prompts, responses: texts, B of each.
          scores, scored, parts: of ``rewards.scoring.Scores``, each [B]; an unscored row's score
            is written as null, and so is every NaN.
          finish_reasons: i8[B], ``types.FINISH_*``.
          advantages: [B], each row's mean over its action tokens.
        """
        fetched = jax.device_get((scores, scored, dict(parts), finish_reasons, advantages))
        scores, scored, parts, finish_reasons, advantages = fetched
        lines = []
        for row in self._sample(len(responses)):
            score = _finite(float(scores[row])) if scored[row] else None
            entry = {
                "step": int(step),
                "row": row,
                "prompt": prompts[row],
                "response": responses[row],
                "score": score,
                "parts": {name: _finite(float(part[row])) for name, part in parts.items()},
                "finish_reason": FINISH_NAMES[int(finish_reasons[row])],
                "advantage": _finite(float(advantages[row])),
            }
            lines.append(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
        path = self._directory / f"{step:08d}.jsonl"
        _replace(path, "".join(lines))
        return path

    def truncate_after(self, step: int) -> None:
        """Removes the files of later steps."""
        for path in self._directory.glob("*.jsonl"):
            if path.stem.isdigit() and int(path.stem) > step:
                path.unlink()

    def _sample(self, num_rows: int) -> list[int]:
        count = num_rows if self._rows is None else min(self._rows, num_rows)
        return [index * num_rows // count for index in range(count)]
