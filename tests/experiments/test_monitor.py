import os
import signal
import time
import types

import jax
import numpy as np
import pytest

from experiments import monitor
from experiments.monitor import CompileCounter, Interrupted, Phases, StopRequest
from jaxrlhf.progress import progress


@pytest.fixture
def stop():
    """A StopRequest whose signal handlers are gone after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def compiles():
    counter = CompileCounter()
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter._listen)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_flag_that_the_loop_reads(stop, signum, capfd):
    stop.check()
    os.kill(os.getpid(), signum)  # would end pytest (or raise KeyboardInterrupt) by itself
    assert stop.signum == signum
    assert f"{signum.name}: stopping; finished steps are saved first" in capfd.readouterr().err
    with pytest.raises(Interrupted):
        stop.check()


def test_a_second_signal_ends_the_process_at_once(stop):
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as error:
        signal.raise_signal(signal.SIGINT)
    assert error.value.code == 130


def test_the_samplers_callback_moves_the_bar_and_checks(stop):
    with progress("rollout", total=8, unit="rows") as bar:
        on_progress = stop.checked(bar)
        on_progress(100, 3, 8)
        assert bar.done == 3
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            on_progress(120, 5, 8)
        assert bar.done == 5


def test_phases_add_up_and_start_over():
    phases = Phases()
    for _ in range(2):
        with phases("a"):
            time.sleep(0.02)
    with pytest.raises(KeyError), phases("b"):
        raise KeyError
    first = phases.pop()
    assert first.keys() == {"time/a", "time/b"}
    assert 0.04 <= first["time/a"] < 1
    assert phases.pop() == {}


def test_compilations_are_counted_and_calls_are_not(compiles):
    double = jax.jit(lambda x: 2 * x)
    x, y = jax.device_put(np.zeros(3, np.float32)), jax.device_put(np.zeros(4, np.float32))
    start = compiles.count
    double(x)
    assert compiles.count == start + 1
    double(x + 0 * x)  # + and * are programs too
    count = compiles.count
    double(x)
    assert compiles.count == count
    double(y)
    assert compiles.count == count + 1


def test_metrics_of_a_step(compiles):
    """Seconds left are the median step's, without the first, which compiles; tokens are sampled."""
    phases = Phases()
    took = monitor.StepMetrics(phases, compiles)
    mask = np.array([[False, True, True, False], [False, False, True, True]])
    rollout = types.SimpleNamespace(lengths=np.array([3, 4]), response_mask=jax.device_put(mask))
    compiles.count = 7
    lines = []
    for number, seconds in enumerate((40.0, 2.0, 9.0, 1.0)):
        phases.seconds = {"rollout": 0.75 * seconds, "update": 0.25 * seconds}
        lines.append(took(rollout, 10 - number))
        phases.seconds = {"validate": 100.0}
        assert phases.pop() == {"time/validate": 100.0}
    assert [line.get("time/left") for line in lines] == [None, 2.0 * 9, 5.5 * 8, 2.0 * 7]
    assert 1e8 < lines[3].pop("memory/peak_bytes") < 1e12  # bytes, not KiB
    assert lines[3] == {
        "time/rollout": 0.75,
        "time/update": 0.25,
        "time/step": 1.0,
        "time/left": 14.0,
        "throughput/tokens_per_second": 4.0,
        "compile/count": 7.0,
    }
