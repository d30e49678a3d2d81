"""What a run observes about itself: phase times, compilations, memory, and requests to stop."""

import contextlib
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrlhf.types import Rollout


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """The run was asked to stop; its state is that of the last finished step."""


class StopRequest:
    """Turns SIGTERM and Ctrl-C into a flag that the loop looks at where its state is whole.

    A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        if self.signum is not None:
            sys.exit(128 + signum)
        self.signum = signum
        print(
            f"\n{signal.Signals(signum).name}: stopping; finished steps are saved first "
            "(once more to stop without saving).",
            file=sys.stderr,
            flush=True,
        )

    def check(self) -> None:
        """Raises Interrupted when a stop was requested."""
        if self.signum is not None:
            raise Interrupted

    def exit_if_requested(self, message: str = "stopped before a step; nothing is kept") -> None:
        """Where a stop was requested: prints the message, ends the process as its signal would."""
        if self.signum is not None:
            print(message)
            sys.exit(128 + self.signum)

    def checked(self, bar: Any) -> Callable[[int, int, int], None]:
        """The sampler's ``on_progress``: moves the bar's rows, and checks."""

        def on_progress(tokens: int, rows_finished: int, rows: int) -> None:
            bar.update(rows_finished)
            self.check()

        return on_progress


class Phases:
    """Wall-clock seconds per named phase of a step: ``with phases("rollout"): …``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to the phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """``{"time/rollout": …}``, and starts over."""
        out = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return out


class CompileCounter:
    """Counts the programs that XLA compiled in this process since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


class StepMetrics:
    """What the steps of this process took; call it at the end of each, before a validation."""

    def __init__(self, phases: Phases, compiles: CompileCounter) -> None:
        self._phases, self._compiles = phases, compiles
        self._seconds: list[float] = []

    def __call__(self, rollout: Rollout, steps_left: int) -> dict[str, float]:
        """``of_tokens`` with the response tokens of a step's rollout."""
        return self.of_tokens(float(np.asarray(rollout.response_mask).sum()), steps_left)

    def of_tokens(self, tokens: float, steps_left: int) -> dict[str, float]:
        """Seconds by phase and in all, tokens per second, compilations, peak memory.

        ``time/left`` is the median step's seconds times the steps left, without validations. The
        process's first step, which compiles, says nothing about it: it has none.
        """
        out = self._phases.pop()
        seconds = sum(out.values())
        self._seconds.append(seconds)
        if len(self._seconds) > 1:
            out["time/left"] = statistics.median(self._seconds[1:]) * steps_left
        return out | {
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "compile/count": float(self._compiles.count),
            "memory/peak_bytes": peak_memory_bytes(),
        }


def peak_memory_bytes() -> float:
    """Peak bytes in use: of the first device where it tells, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return float(stats["peak_bytes_in_use"])
    scale = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)
