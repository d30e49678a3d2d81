"""Checkpoints: bit-equal restores, damage found in every file, kills survived."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.checkpoint import Checkpointer, CheckpointError


class Moments(NamedTuple):
    mu: dict
    count: jax.Array


def make_state(step: int) -> dict:
    key = jax.random.key(step)
    values = jax.random.normal(key, (5, 7))
    return {
        "params": {"w": values, "half": values[0].astype(jnp.bfloat16), "layers.0/odd": values[1]},
        "opt": (Moments({"w": values * 3}, jnp.int32(step)), None, [jnp.zeros((0, 3))]),
        "key": key,
        "keys": jax.random.split(key, 3),
        "mask": values > 0,
        "small": jnp.arange(4, dtype=jnp.int8),
        "host_side": np.arange(step, step + 3, dtype=np.int64),
    }


def abstract(state: dict) -> dict:
    return jax.tree.map(
        lambda x: x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype), state
    )


def as_bytes(leaf) -> tuple:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), *as_bytes(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return str(leaf.dtype), array.shape, array.tobytes()


def assert_bit_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert [as_bytes(x) for x in jax.tree.leaves(ours)] == [
        as_bytes(x) for x in jax.tree.leaves(theirs)
    ]


HOST = {"data": {"epoch": 1, "position": 7}, "kl_coef": 0.1 + 0.2, "names": ["a", None, True]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """Checkpoints of steps 1, 2 and 3; tests copy the directory before they change it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpointer(directory, keep=3) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, make_state(step), {"step": step, **HOST})
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def restore(directory, **options):
    reports: list[str] = []
    with Checkpointer(directory, report=reports.append, **options) as checkpointer:
        return checkpointer.restore(abstract(make_state(0))), reports


def test_restores_bit_equal_with_types_structure_and_host(saved):
    (step, state, host), reports = restore(saved)
    assert (step, reports) == (3, [])
    assert host == {"step": 3, **HOST}
    assert_bit_equal(state, make_state(3))
    assert isinstance(state["host_side"], np.ndarray)
    assert jnp.issubdtype(state["key"].dtype, jax.dtypes.prng_key)
    assert not any(p.suffix in (".pkl", ".pickle") for p in saved.rglob("*"))


def test_reads_one_step_on_request_and_concrete_arrays_as_targets(saved):
    with Checkpointer(saved) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3]
        step, state, _ = checkpointer.restore(make_state(0), step=2)
        assert step == 2
        assert_bit_equal(state, make_state(2))
        with pytest.raises(CheckpointError, match="of step 7"):
            checkpointer.restore(make_state(0), step=7)


def test_keeps_the_sharding_of_the_abstract_state(tmp_path):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    state = {"w": jax.device_put(jnp.arange(4.0), sharding)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        _, restored, _ = checkpointer.restore(state)
        assert restored["w"].sharding == sharding
        plain = jax.ShapeDtypeStruct((4,), jnp.float32)
        _, restored, _ = checkpointer.restore({"w": plain})
        assert restored["w"].sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_donating_the_saved_arrays_changes_nothing(tmp_path):
    step_function = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {f"w{i}": jnp.full((400_000,), float(i)) for i in range(4)}
    with Checkpointer(tmp_path, keep=5) as checkpointer:
        for step in range(1, 4):
            checkpointer.save(step, state, {})
            for _ in range(5):
                state = step_function(state)
        for step in range(1, 4):
            _, restored, _ = checkpointer.restore(state, step=step)
            for i in range(4):
                np.testing.assert_array_equal(restored[f"w{i}"], i + 5.0 * (step - 1))


def test_a_later_change_of_host_is_not_saved(tmp_path):
    host = {"data": {"position": 1}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(2)}, host)
        host["data"]["position"] = 2
        assert checkpointer.restore({"w": jnp.ones(2)})[2] == {"data": {"position": 1}}


def test_a_flipped_byte_in_any_file_is_found_and_the_one_before_is_used(saved, tmp_path):
    files = sorted(p.relative_to(saved) for p in (saved / "00000003").rglob("*") if p.is_file())
    assert len(files) > 5
    for i, name in enumerate(files):
        directory = shutil.copytree(saved, tmp_path / str(i))
        content = bytearray((directory / name).read_bytes())
        content[len(content) // 2] ^= 0x10
        (directory / name).write_bytes(content)
        (step, state, _), reports = restore(directory)
        assert step == 2, name
        assert_bit_equal(state, make_state(2))
        relative = name.relative_to("00000003").as_posix()
        assert len(reports) == 1
        assert "00000003 is damaged" in reports[0]
        assert relative in reports[0]
        assert "00000002 is used instead" in reports[0]


@pytest.mark.parametrize("damage", ["missing", "short", "no manifest", "cut manifest", "space"])
def test_other_damage_is_found_too(copy, damage):
    newest = copy / "00000003"
    files = [p for p in (newest / "state").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    manifest = newest / "manifest.json"
    if damage == "missing":
        largest.unlink()
    elif damage == "short":
        largest.write_bytes(largest.read_bytes()[:-1])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "cut manifest":
        manifest.write_text(manifest.read_text()[:-40])
    else:
        manifest.write_text(manifest.read_text() + " ")
    (step, _, _), reports = restore(copy)
    assert step == 2
    assert len(reports) == 1
    assert ("half-written" if damage == "no manifest" else "damaged") in reports[0]


def test_two_damaged_ones_lead_to_the_third_and_three_to_an_error(copy):
    for name in ("00000002", "00000003"):
        (copy / name / "state" / "_METADATA").write_text("{}")
    (step, _, _), reports = restore(copy)
    assert step == 1
    assert len(reports) == 2
    (copy / "00000001" / "host" / "metadata").unlink()
    with pytest.raises(CheckpointError, match=r"No usable checkpoint.*00000001 is damaged.*host"):
        restore(copy)
    for name in ("00000001", "00000002", "00000003"):
        shutil.rmtree(copy / name)
    with pytest.raises(CheckpointError, match="none is left"):
        restore(copy)


def test_a_damaged_checkpoint_is_replaced_by_the_next_save(copy):
    (copy / "00000003" / "host" / "metadata").write_text("{}")
    with Checkpointer(copy, keep=2, report=lambda _: None) as checkpointer:
        assert checkpointer.restore(abstract(make_state(0)))[0] == 2
        checkpointer.save(3, make_state(30), {})
        assert checkpointer.steps() == [2, 3]
    (step, state, _), reports = restore(copy)
    assert (step, reports) == (3, [])
    assert_bit_equal(state, make_state(30))


def test_keeps_the_newest_and_the_best(tmp_path):
    scores = [0.1, 0.9, float("nan"), 0.3, None, 0.2]
    with Checkpointer(tmp_path, keep=2, keep_best=True) as checkpointer:
        for step, score in enumerate(scores):
            checkpointer.save(step, {"w": jnp.full(2, step)}, {}, score=score)
        assert checkpointer.steps() == [1, 4, 5]
        assert checkpointer.best_step() == 1
        assert checkpointer.restore({"w": jnp.zeros(2, jnp.int32)}, step=1)[1]["w"][0] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "00000001",
        "00000004",
        "00000005",
        "latest.json",
    ]


def test_saving_a_step_again_replaces_it_and_an_older_one_is_refused(copy):
    with Checkpointer(copy, keep=2) as checkpointer:
        checkpointer.save(3, make_state(30), {})
        with pytest.raises(CheckpointError, match="holds checkpoint 3, newer than step 2"):
            checkpointer.save(2, make_state(2), {})
        assert checkpointer.steps() == [2, 3]
        assert_bit_equal(checkpointer.restore(make_state(0))[1], make_state(30))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["params"].pop("w"), "params/w is in it but not in this run"),
        (lambda s: s["params"].update(new=jnp.ones(1)), "params/new is missing in it"),
        (
            lambda s: s["params"].update(w=jnp.ones((5, 8))),
            r"params/w is float32\[5, 7\] in it but float32\[5, 8\]",
        ),
        (
            lambda s: s["params"].update(half=jnp.ones(7, jnp.float32)),
            r"params/half is bfloat16\[7\] in it but float32\[7\]",
        ),
        (
            lambda s: s.update(key=jax.random.key(0, impl="rbg")),
            r"key is key<fry>\[\] in it but key<rbg>",
        ),
    ],
)
def test_a_state_that_does_not_fit_names_the_leaf(saved, change, message):
    state = make_state(0)
    change(state)
    with Checkpointer(saved) as checkpointer, pytest.raises(CheckpointError, match=message):
        checkpointer.restore(state)


def test_changed_settings_are_named(tmp_path):
    state = {"w": jnp.ones(2)}
    settings = {"lr": 1e-3, "clip": (0.1, 0.2), "seed": 1}
    with Checkpointer(tmp_path, fingerprint=settings) as checkpointer:
        checkpointer.save(1, state, {})
        assert checkpointer.restore(state)[0] == 1
    other = {"lr": 2e-3, "clip": (0.1, 0.2), "layers": 2}
    with (
        Checkpointer(tmp_path, fingerprint=other) as checkpointer,
        pytest.raises(CheckpointError, match="in which layers, lr, seed differed: put"),
    ):
        checkpointer.restore(state)


def test_what_cannot_be_saved_is_refused(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match="Leaf lr is a float, not an array"):
            checkpointer.save(1, {"lr": 0.1}, {})
        for host, name in [
            ({"a": (1, 2)}, r"host\['a'\] is a tuple"),
            ({"a": [np.float32(1)]}, r"host\['a'\]\[0\] is a float32"),
            ({"a": {1: 2}}, r"host\['a'\] has the key 1"),
        ]:
            with pytest.raises(TypeError, match=name):
                checkpointer.save(1, {"w": jnp.ones(1)}, host)
        with pytest.raises(CheckpointError, match="Two leaves"):
            checkpointer.save(1, {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {})
        assert checkpointer.restore({"w": jnp.ones(1)}) is None
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)


@pytest.fixture
def full_disk(monkeypatch):
    """A context in which no save is completed."""

    @contextlib.contextmanager
    def full_disk():
        def fail(*_):
            raise OSError("No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("jaxrlhf.checkpoint._write_manifest", fail)
            yield

    return full_disk


def test_a_failed_background_write_is_raised_by_the_next_wait(tmp_path, full_disk):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"w": jnp.ones(2)}, {})
    checkpointer.wait()
    with full_disk():
        checkpointer.save(2, {"w": jnp.ones(2)}, {})
        with pytest.raises(CheckpointError, match=r"could not be written.*No space left"):
            checkpointer.wait()
    checkpointer.close()
    reports: list[str] = []
    with Checkpointer(tmp_path, report=reports.append) as checkpointer:
        assert checkpointer.restore({"w": jnp.ones(2)})[0] == 1
        assert "00000002 is half-written" in reports[0]
        checkpointer.save(2, {"w": jnp.ones(2)}, {})
        assert "00000002 is half-written: it was removed" in reports[1]
        assert checkpointer.restore({"w": jnp.ones(2)})[0] == 2


def test_a_failed_save_is_told_by_the_next_poll_and_the_next_save_is_tried(tmp_path, full_disk):
    reports: list[str] = []
    with Checkpointer(tmp_path, report=reports.append) as checkpointer:
        checkpointer.poll()
        for step, told in ((1, checkpointer.poll), (2, lambda: None)):
            with full_disk():
                checkpointer.save(step, {"w": jnp.ones(2)}, {})
                concurrent.futures.wait([checkpointer._pending])
            told()
            assert [f"{s:08d} could not be written" in " ".join(reports) for s in (1, 2)] == [
                True, False,
            ]  # fmt: skip
        assert len(reports) == 2  # of step 1: that it failed, and that it was removed
        checkpointer.save(3, {"w": jnp.full(2, 3.0)}, {})
        assert "00000002 could not be written (No space left on device): check" in reports[2]
        checkpointer.poll()
        assert checkpointer.restore({"w": jnp.ones(2)})[0] == 3


def test_a_save_that_cannot_begin_is_a_sentence_and_the_next_is_tried(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(
                checkpointer._orbax,
                "save",
                lambda *_, **__: (_ for _ in ()).throw(OSError(28, "x")),
            )
            with pytest.raises(CheckpointError, match="00000001 could not be written"):
                checkpointer.save(1, {"w": jnp.ones(2)}, {})
        checkpointer.save(1, {"w": jnp.ones(2)}, {})
        assert checkpointer.restore({"w": jnp.ones(2)})[0] == 1


CHILD = """
import os, pathlib, signal, sys
import jax.numpy as jnp
from jaxrlhf import checkpoint

directory, point = sys.argv[1:]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def make(step):
    return {f"w{i}": jnp.full((200_000,), 100.0 * i + step) for i in range(4)}

with checkpoint.Checkpointer(directory, keep=2, report=print) as checkpointer:
    found = checkpointer.restore(make(0))
    start = 0 if found is None else found[0]
    if found is not None:
        assert found[2] == {"position": start}, found[2]
        assert all((found[1][k] == v).all() for k, v in make(start).items())
    print("start", start, flush=True)
    for step in range(start + 1, start + 4):
        checkpointer.wait()
        if step == start + 3:
            if point == "manifest":
                checkpoint._write_manifest = die
            elif point == "rename":
                os.replace = die
            elif point == "marker":
                real = checkpoint._write_atomically
                checkpoint._write_atomically = lambda path, text: (
                    die() if path.name == "latest.json" else real(path, text))
            elif point == "prune":
                checkpoint.shutil.rmtree = die
        checkpointer.save(step, make(step), {"position": step})
        if step == start + 3 and point == "at once":
            die()
        print("saved", step, flush=True)
"""


def run_child(directory, point) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(directory), point], capture_output=True, text=True
    )
    expected = 0 if point == "none" else -signal.SIGKILL
    assert result.returncode == expected, result.stderr
    assert result.stderr == ""
    return result.stdout.splitlines()


def test_kill_at_any_point_of_a_save_leaves_a_usable_directory(tmp_path):
    """Each child restores what the one before left (checking every value), saves twice, dies."""
    start = 0
    for point in ("at once", "manifest", "rename", "marker", "prune", "none"):
        lines = run_child(tmp_path, point)
        said = [line for line in lines if "half-written" in line]
        assert f"start {start}" in lines
        if start != 2:  # "at once" may come before orbax has made anything
            assert bool(said) == (start in (4, 6)), (point, lines)
        # Killed before the manifest: two steps are kept; after it: all three.
        start += 2 if point in ("at once", "manifest", "rename") else 3
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"{start - 1:08d}", f"{start:08d}", "latest.json"]


def test_kill_during_the_first_save_starts_afresh_and_says_so(tmp_path):
    reports: list[str] = []
    (tmp_path / "00000001.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with Checkpointer(tmp_path, report=reports.append) as checkpointer:
        assert checkpointer.restore({"w": jnp.ones(2)}) is None
        assert "nothing is restored" in reports[0]
        checkpointer.save(1, {"w": jnp.ones(2)}, {})
        assert checkpointer.restore({"w": jnp.ones(2)})[0] == 1
    assert len(list(tmp_path.iterdir())) == 2


LOOP = """
import itertools, sys
import jax.numpy as jnp
from jaxrlhf.checkpoint import Checkpointer

checkpointer = Checkpointer(sys.argv[1], keep=2)
state = {f"w{i}": jnp.zeros((300_000,)) for i in range(4)}
found = checkpointer.restore(state)
for step in itertools.count(1 if found is None else found[0] + 1):
    checkpointer.save(step, {k: v + step for k, v in state.items()}, {"position": step})
    print(step, flush=True)
"""


def test_kill_at_random_times_of_a_loop_of_saves(tmp_path, rng):
    last = 0
    state = {f"w{i}": jnp.zeros((300_000,)) for i in range(4)}
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(int(rng.integers(2, 5))):
            begun = int(child.stdout.readline())
        time.sleep(rng.uniform(0, 0.3))
        os.kill(child.pid, signal.SIGKILL)
        begun = max([begun, *(int(line) for line in child.stdout.read().split())])
        child.wait()
        child.stdout.close()
        with Checkpointer(tmp_path, report=lambda _: None) as checkpointer:
            step, restored, host = checkpointer.restore(state)
        assert max(last, begun - 1) <= step <= begun + 1
        assert host == {"position": step}
        assert all((leaf == step).all() for leaf in restored.values())
        last = step


def test_saves_and_restores_print_nothing(tmp_path):
    code = textwrap.dedent("""
        import sys, jax.numpy as jnp
        from jaxrlhf.checkpoint import Checkpointer
        with Checkpointer(sys.argv[1]) as c:
            c.save(1, {"w": jnp.ones(2)}, {})
            c.restore({"w": jnp.ones(2)})
    """)
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert json.loads((tmp_path / "latest.json").read_text()) == {"name": "00000001"}
