"""Measures what the library promises about its own cost; a table and one JSON line a case.

    python experiments/benchmark.py --case=gae --verl_python=VENV/bin/python
    python experiments/benchmark.py --case=import
    python experiments/benchmark.py --case=memory

gae: our `gae` at [1024, 1024] against verl's, in turns on one core, in seconds of processor time.
verl runs in its own interpreter (third_party/goldens/README.md says how to make one).
import: what `import jaxrlhf.losses` adds to `import jax`, in fresh interpreters.
memory: temporary bytes of each compiled loss with its gradient, at T and at 4 T tokens.

Times depend on what else the machine does: compare the two sides of one run, not two runs.
"""

import contextlib
import functools
import inspect
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jaxrlhf import losses

ROOT = pathlib.Path(__file__).parents[1]
PEER = ROOT / "third_party" / "peers" / "verl_gae.py"
TIME_LIMIT = 600.0  # seconds in which another process must have answered everything

CASE = flags.DEFINE_multi_enum("case", None, ["gae", "import", "memory"], "What to measure.")
VERL_PYTHON = flags.DEFINE_string("verl_python", None, "An interpreter that can import verl.")
REPETITIONS = flags.DEFINE_integer("repetitions", 21, "Of each timed call.", lower_bound=1)

Result = dict[str, Any]
Arrays = dict[str, jax.Array]
Shapes = dict[str, jax.ShapeDtypeStruct]
SLACK = 4096  # bytes that a program may need whatever its size


class BenchmarkError(Exception):
    """What has to change before this can be measured."""


def cpu_seconds(call: Callable[[], object], *, calls: int = 10) -> float:
    """Processor seconds of one call, its arrays awaited.

    Over several, so that what ran before on the core and emptied its caches is not counted; a call
    of the peer takes longer than all of them.
    """
    start = time.process_time()
    for _ in range(calls):
        jax.block_until_ready(call())
    return (time.process_time() - start) / calls


def largest_difference(ours: Sequence[jax.Array], theirs: Sequence[np.ndarray], mask: Any) -> float:
    """Of all pairs, on the tokens of the mask."""
    gaps = [np.abs(np.where(mask, a - b, 0)) for a, b in zip(ours, theirs, strict=True)]
    return float(np.max(gaps))


# --- gae ------------------------------------------------------------------------------------------


def pin_to_one_core() -> None:
    """Keeps this process, its children and XLA on one core; call it before any array is made."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {single}".strip()


def gae_inputs(seed: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """Rewards, values, and a mask of answers that fill between a quarter and all of a row."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 4, length, rows, endpoint=True)
    mask = np.arange(length) < lengths[:, None]
    rewards, values = rng.normal(0, 0.1, (2, rows, length)).astype(np.float32)
    scalars = {"gamma": np.array(0.99, np.float32), "lam": np.array(0.95, np.float32)}
    return {"rewards": rewards * mask, "values": values, "mask": mask} | scalars


@jax.jit
def our_gae(x: Arrays) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns."""
    return losses.gae(x["rewards"], x["values"], x["mask"], gamma=x["gamma"], lam=x["lam"])


@jax.jit
def our_whitened_gae(x: Arrays) -> tuple[jax.Array, jax.Array]:
    """Whitened advantages and returns, which is what verl's function gives."""
    advantages, returns = our_gae(x)
    return losses.whiten(advantages, x["mask"]), returns


@contextlib.contextmanager
def peer_process(command: Sequence[str]) -> Iterator[Callable[[], Result]]:
    """Starts another program; the function asks it for one more JSON line and gives that."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None
    limit = threading.Timer(TIME_LIMIT, process.kill)
    limit.start()

    def ask() -> Result:
        try:
            print(file=requests, flush=True)
            return json.loads(answers.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise BenchmarkError(f"{command[0]} gave no number: see what it says above.") from error

    try:
        yield ask
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        answers.close()
        with contextlib.suppress(BrokenPipeError):
            requests.close()


def take_turns(
    calls: dict[str, Callable[[], object]], ask: Callable[[], Result], repetitions: int
) -> tuple[dict[str, float], Result]:
    """Median processor seconds of a call: ours, and what the peer answers under the same names."""
    ours: dict[str, list[float]] = {name: [] for name in calls}
    theirs = [ask()]
    for _ in range(repetitions):
        for name, call in calls.items():
            ours[name].append(cpu_seconds(call))
        theirs.append(ask())
    medians = {name: statistics.median(times) for name, times in ours.items()}
    peer = {name: statistics.median(answer[name] for answer in theirs[1:]) for name in calls}
    return medians, theirs[0] | peer


def gae_case(verl_python: str, *, size: int = 1024, repetitions: int = 21, seed: int = 0) -> Result:
    """Times both sides in turns. Ratios are theirs over ours, of the same work."""
    inputs = gae_inputs(seed, size, size)
    x = {name: jnp.asarray(value) for name, value in inputs.items()}
    calls = {"gae": lambda: our_gae(x), "gae and whiten": lambda: our_whitened_gae(x)}
    results = [jax.block_until_ready(call()) for call in calls.values()]
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/inputs.npz", f"{folder}/outputs.npz"]
        np.savez(files[0], allow_pickle=False, **inputs)
        with peer_process([verl_python, "-W", "ignore", str(PEER), *files]) as ask:
            ours, peer = take_turns(calls, ask, repetitions)
        with np.load(files[1]) as outputs:
            theirs = [outputs["advantages"], outputs["returns"]]
    ratio = {name: peer[name] / ours[name] for name in calls}
    show(
        f"GAE [{size}, {size}] float32, one core, median of {repetitions}, processor ms",
        ["", "jaxrlhf", f"verl {peer['verl']}", "times faster"],
        [[name, ms(ours[name]), ms(peer[name]), f"{ratio[name]:.1f}"] for name in calls],
    )
    difference = largest_difference(results[1], theirs, inputs["mask"])
    return {"ours_seconds": ours, "theirs": peer, "ratio": ratio, "largest_difference": difference}


# --- import ---------------------------------------------------------------------------------------

IMPORTS = """
import json, time
start = time.perf_counter(), time.process_time()
import jax
middle = time.perf_counter(), time.process_time()
import jaxrlhf.losses
end = time.perf_counter(), time.process_time()
print(json.dumps([middle[0] - start[0], end[0] - middle[0], end[1] - middle[1]]))
"""


def import_case(*, repetitions: int = 7) -> Result:
    """Imports in fresh interpreters; the first, which may have to compile bytecode, is left out."""
    command = [sys.executable, "-c", IMPORTS]
    outputs = [
        subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=TIME_LIMIT
        ).stdout
        for _ in range(repetitions + 1)
    ]
    columns = list(zip(*(json.loads(output) for output in outputs[1:]), strict=True))
    of_jax, wall, cpu = (statistics.median(column) for column in columns)
    show(
        f"import, median of {repetitions} fresh interpreters, ms",
        ["", "wall", "processor"],
        [["import jax", ms(of_jax), ""], ["import jaxrlhf.losses, after it", ms(wall), ms(cpu)]],
    )
    return {"jax_seconds": of_jax, "added_seconds": wall, "added_cpu_seconds": cpu}


# --- memory ---------------------------------------------------------------------------------------

# What functions are called with, by the name of the parameter. Axes: B rows, T tokens, N = B T
# elements, D hidden size, V vocabulary, K parts of a reward; float32[B, T] where nothing is said.
SIZES = {"B": 4, "D": 16, "V": 32, "K": 3}
AXES = {
    **dict.fromkeys(("hidden", "ref_hidden"), "BTD"),
    **dict.fromkeys(("output_matrix", "ref_output_matrix"), "VD"),
    **dict.fromkeys(("logits", "ref_logits"), "BTV"),
    **dict.fromkeys(("greedy_scores", "rows"), "B"),
    **{"group_ids": "N", "lengths": "N", "parts": "NK", "reference_point": ""},
}
OWN_AXES = {
    "group_best": {"scores": "N"},
    "group_relative": {"scores": "N"},
    "group_relative_parts": {"weights": "K"},
    "token_rewards": {"scores": "B"},
}
DTYPES = {
    **dict.fromkeys(("mask", "desirable"), jnp.bool_),
    **dict.fromkeys(("tokens", "segment_ids", "group_ids", "answers", "lengths"), jnp.int32),
}
OPTIONAL_ARRAYS = {"mask", "segment_ids", "logsumexp", "mean_logits"}
SCALARS = {
    **{"beta": 0.1, "margin": 0.5, "label_smoothing": 0.1, "z_loss": 1e-4, "coef": 0.01},
    **{"gamma": 0.99, "lam": 0.95, "kl_coef": 0.1, "max_length": 100, "buffer": 20, "k": 4},
    **{"mode": "seq_mean_token_mean", "statistic": "sequence_max", "low": 0.0, "high": 1.0},
}
NOT_MEASURED = {"init_kl_state", "fixed_controller", "adaptive_controller"}  # of scalars
MEASURED = [
    name
    for name in losses.__all__
    if inspect.isfunction(getattr(losses, name)) and name not in NOT_MEASURED
]


def arguments_of(name: str, length: int) -> tuple[Shapes, dict[str, Any]]:
    """Shapes of the arrays that a function of the library takes, and its scalars."""
    sizes = SIZES | {"T": length, "N": SIZES["B"] * length}
    axes = AXES | OWN_AXES.get(name, {})
    parameters = inspect.signature(getattr(losses, name)).parameters
    scalars = {key: value for key, value in SCALARS.items() if key in parameters}
    arrays = {
        key: jax.ShapeDtypeStruct(
            tuple(sizes[axis] for axis in axes.get(key, "BT")), DTYPES.get(key, jnp.float32)
        )
        for key, parameter in parameters.items()
        if key in OPTIONAL_ARRAYS or (parameter.default is parameter.empty and key not in scalars)
    }
    return arrays, scalars


def temporary_bytes(names: Sequence[str], length: int) -> tuple[int, int]:
    """Bytes of temporaries and of inputs of one program of functions and their gradients."""
    shapes = {name: arguments_of(name, length)[0] for name in names}
    floats, others = (
        {
            name: {k: x for k, x in arrays.items() if (x.dtype == jnp.float32) == wanted}
            for name, arrays in shapes.items()
        }
        for wanted in (True, False)
    )

    def total(floats: dict[str, Arrays], others: dict[str, Arrays]) -> jax.Array:
        results = [
            getattr(losses, name)(**floats[name], **others[name], **arguments_of(name, length)[1])
            for name in names
        ]
        sums = [jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(results)]
        return functools.reduce(jnp.add, sums)

    # Buffers are planned before LLVM optimises, which takes most of a compilation.
    quick: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
    program = jax.jit(jax.value_and_grad(total)).lower(floats, others).compile(quick)
    inputs = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes, inputs


def memory_case(*, names: Sequence[str] = MEASURED, length: int = 1024) -> Result:
    """Compiles every loss at T and at 4 T: linear temporaries grow 4 times, quadratic ones 16."""
    rows, growth = [], {}
    for name in names:
        (short, small), (long, large) = (temporary_bytes([name], n) for n in (length, 4 * length))
        growth[name] = (long + SLACK) / (short + SLACK)
        added = (long - short) / (large - small)
        rows.append([name, f"{short:,}", f"{long:,}", f"{growth[name]:.1f}", f"{added:.2f}"])
    header = ["", f"T={length}", f"T={4 * length}", "times", "added per byte of input"]
    show("temporary bytes of value and gradient", header, rows)
    worst = max(growth, key=lambda name: growth[name])
    return {
        "losses": len(rows),
        "not_linear": [name for name in names if growth[name] > 8],
        "worst": worst,
        "worst_growth": growth[worst],
    }


# --- entry ----------------------------------------------------------------------------------------


def ms(seconds: float) -> str:
    """Seconds as milliseconds with two digits behind the point."""
    return f"{1e3 * seconds:.2f}"


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table in aligned columns."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print(title)
    for first, *rest in lines:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join(["", first.ljust(widths[0]), *cells]))


def check_flags(argv: Sequence[str], names: Sequence[str], verl_python: str | None) -> None:
    """Says in one sentence what the command line lacks."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag; give --case=NAME.")
    if not names:
        raise app.UsageError("give --case=gae, --case=import or --case=memory.")
    if "gae" in names and verl_python is None:
        raise app.UsageError("--case=gae needs --verl_python=PYTHON, an interpreter with verl.")


def main(argv: Sequence[str]) -> None:
    """Runs the cases that were named."""
    names: list[str] = CASE.value or []
    check_flags(argv, names, VERL_PYTHON.value)
    cases: dict[str, Callable[[], Result]] = {
        "gae": lambda: gae_case(VERL_PYTHON.value or "", repetitions=REPETITIONS.value),
        "import": lambda: import_case(repetitions=REPETITIONS.value),
        "memory": memory_case,
    }
    pin_to_one_core()
    for name in names:
        try:
            result = cases[name]()
        except BenchmarkError as error:
            raise SystemExit(f"benchmark: {error}") from error
        print(json.dumps({"case": name, "jax": jax.__version__} | result))


if __name__ == "__main__":
    app.run(main)
