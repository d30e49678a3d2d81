"""What a run observes about itself: phase times, compilations, memory, and requests to stop."""

import contextlib
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax


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
            f"\n{signal.Signals(signum).name}: saving a checkpoint, then stopping "
            "(once more to stop without saving).",
            file=sys.stderr,
            flush=True,
        )

    def check(self) -> None:
        """Raises Interrupted when a stop was requested."""
        if self.signum is not None:
            raise Interrupted


class Phases:
    """Wall-clock seconds per named phase of a step: ``with phases("rollout"): …``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """``{"time/rollout": …, "time/step": their sum}``, and starts over."""
        out = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        out["time/step"] = sum(self.seconds.values())
        self.seconds = {}
        return out


class CompileCounter:
    """Counts the programs that XLA compiled in this process since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def peak_memory_bytes() -> float:
    """Peak bytes in use: of the first device where it tells, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return float(stats["peak_bytes_in_use"])
    scale = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)
