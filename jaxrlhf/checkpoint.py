"""Asynchronous checkpoints through orbax, each with a checksum manifest that is verified first.

A checkpoint is the directory ``00000030`` (the step; ``00000030.1`` when that name was taken):

* ``state/``: the arrays, under flat names such as ``actor/params/embed``, written by orbax;
* ``host/``: a JSON object (data position, KL state, ...), part of the same commit;
* ``manifest.json``: size and sha256 of every file, written last and atomically.

A directory without a manifest is a save that was cut short. orbax alone restores flipped bits
without a word, so every file is compared with the manifest before anything is read.
"""

import concurrent.futures
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

MANIFEST = "manifest.json"
LATEST = "latest.json"
_NAME = re.compile(r"(\d{8,})(?:\.(\d+))?(\.orbax-checkpoint-tmp.*)?")
_REMOVED = ".removed"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none that fits could be read."""


class Checkpointer:
    """Writes and reads the checkpoints of one run; owns the directory and a background thread.

    ``save`` returns when the arrays have been taken over, so that the caller may donate them; the
    files, the manifest and the removal of old checkpoints follow in the background. An error there
    is reported by the next call of ``poll`` or ``save``, which go on, or raised by the next one of
    ``restore``, ``wait`` or ``close``.

    Args:
      directory: holds the checkpoints and nothing else; made when missing.
      keep: number of newest checkpoints that stay (at least 1).
      keep_best: also keep the one whose ``score`` was highest.
      fingerprint: JSON object of what must not change between save and restore; a restore with
        another one is an error that names the keys.
      report: called with one sentence for each damaged or half-written checkpoint, saying what
        was done, and for each failed save. Default: a warning of the logger
        ``jaxrlhf.checkpoint``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        keep_best: bool = False,
        fingerprint: Mapping[str, Any] | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least one checkpoint.")
        self.directory = pathlib.Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._keep_best = keep_best
        self._fingerprint = None if fingerprint is None else json.loads(json.dumps(fingerprint))
        self._report = report or logging.getLogger(__name__).warning
        self._unusable: set[str] = set()  # names that a restore found to be damaged
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self, step: int, state: Any, host: Mapping[str, Any], *, score: float | None = None
    ) -> None:
        """Starts to write one checkpoint, after waiting for the one before it.

        Args:
          step: number of the finished training step; none newer may lie in the directory.
          state: pytree of jax (or numpy) arrays; typed PRNG keys are fine, None is no leaf.
          host: JSON object; tuples, numpy values and non-string keys are an error, as they would
            come back as something else.
          score: what ``keep_best`` compares; higher is better.

        Raises:
          CheckpointError: the save could not begin, or a newer checkpoint is in the way.
          TypeError: a leaf is no array, or ``host`` is not JSON.
        """
        self._report_failure()  # of the save before: this one may succeed
        host = _json_copy(host, "host")
        leaves = _named_leaves(state)
        manifest = {
            "step": int(step),
            "score": None if score is None else float(score),
            "fingerprint": self._fingerprint,
            "leaves": {name: _describe(name, leaf) for name, leaf in leaves.items()},
        }
        self._check_newest(step)
        self._remove_half_written()
        path = self._free_path(step)
        self._unusable.discard(path.name)
        # orbax refuses empty arrays; their shape and dtype in the manifest say all.
        arrays = {name: _as_plain_array(leaf) for name, leaf in leaves.items() if leaf.size}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host)
        )
        try:
            self._orbax.save(path, args=items)
        except Exception as error:
            raise _not_written(path, error) from error
        self._pending = self._thread.submit(self._finish, path, manifest)

    def restore(
        self, abstract_state: Any, *, step: int | None = None
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Reads the newest usable checkpoint, after comparing every file with the manifest.

        Args:
          abstract_state: pytree like the saved one, of arrays or ``jax.ShapeDtypeStruct``; the
            restored leaves have its shapes, dtypes and shardings (no sharding: the first device).
          step: read exactly this checkpoint instead (the best one, say).

        Returns:
          ``(step, state, host)``, or None when no checkpoint was ever completed here.

        Raises:
          CheckpointError: checkpoints were completed but none is usable, or the usable one does
            not fit ``abstract_state`` or the fingerprint; it names the leaf or the keys.
        """
        self.wait()
        path = self._newest_usable(step)
        if path is None:
            return None
        manifest = _read_manifest(path)
        _check_fingerprint(path.name, manifest["fingerprint"], self._fingerprint)
        abstract = _named_leaves(abstract_state)
        _check_leaves(path.name, manifest["leaves"], abstract)
        targets = {name: _restore_target(leaf) for name, leaf in abstract.items()}
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore({k: v for k, v in targets.items() if v.size}),
            host=ocp.args.JsonRestore(),
        )
        read = self._orbax.restore(path, args=items)
        arrays = {name: read.state.get(name, target) for name, target in targets.items()}
        leaves = [_as_typed(arrays[name], manifest["leaves"][name]) for name in abstract]
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return manifest["step"], state, read.host

    def steps(self) -> list[int]:
        """Returns the steps of the completed checkpoints, oldest first (files not verified).

        Waits for a save that is under way, as ``best_step`` does.
        """
        self.wait()
        return [manifest["step"] for _, manifest in self._complete()]

    def best_step(self) -> int | None:
        """Returns the step of the completed checkpoint with the highest score, if any has one."""
        self.wait()
        best = _best(self._complete())
        return None if best is None else int(best[1]["step"])

    def poll(self) -> None:
        """Reports the last save if it has failed by now; never waits."""
        if self._pending is not None and self._pending.done():
            self._report_failure()

    def _report_failure(self) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            self._report(str(error))

    def wait(self) -> None:
        """Waits until the last save is complete, manifest included; raises if it failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Waits for the last save and ends the threads; the object cannot be used afterwards."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def _finish(self, path: pathlib.Path, manifest: dict[str, Any]) -> None:
        """Runs in the background: waits for orbax, seals the checkpoint, removes old ones."""
        try:
            self._orbax.wait_until_finished()
            _write_manifest(path, manifest)
            _write_atomically(self.directory / LATEST, json.dumps({"name": path.name}))
            self._prune()
        except Exception as error:
            raise _not_written(path, error) from error

    def _prune(self) -> None:
        complete = self._complete()
        keep = {path for path, _ in complete[-self._keep :]}
        best = _best(complete) if self._keep_best else None
        if best is not None:
            keep.add(best[0])
        for path in self._paths():
            if path not in keep:
                _remove(path)

    def _paths(self) -> list[pathlib.Path]:
        """All checkpoint directories, oldest first, those that orbax never committed included."""
        paths = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted((path for path in paths if path.suffix != _REMOVED), key=_order)

    def _complete(self) -> list[tuple[pathlib.Path, dict[str, Any]]]:
        """Those with a readable manifest, oldest first; of each step only the last written."""
        by_step = {}
        for path in self._paths():
            if not _is_half_written(path) and path.name not in self._unusable:
                try:
                    by_step[_order(path)[0]] = path, _read_manifest(path)
                except CheckpointError:
                    continue  # a restore reports it; it is only not counted here
        return list(by_step.values())

    def _free_path(self, step: int) -> pathlib.Path:
        path, attempt = self.directory / f"{step:08d}", 0
        while path.exists():
            attempt += 1
            path = self.directory / f"{step:08d}.{attempt}"
        return path

    def _check_newest(self, step: int) -> None:
        newest = max(self.steps(), default=-1)
        if newest > step:
            raise CheckpointError(
                f"{self.directory} holds checkpoint {newest}, newer than step {step} that is to be "
                "saved: restore it first, remove it, or give another directory."
            )

    def _remove_half_written(self) -> None:
        for path in self._paths():
            if _is_half_written(path):
                self._report(f"Checkpoint {path.name} is half-written: it was removed.")
                _remove(path)
        for path in self.directory.glob(f"*{_REMOVED}"):
            shutil.rmtree(path)

    def _newest_usable(self, step: int | None) -> pathlib.Path | None:
        problems: dict[str, str] = {}
        for path in reversed(self._paths()):
            if step is not None and _order(path)[0] != step:
                continue
            problem = _problem(path)
            if problem is None:
                self._report_unused(problems, f"{path.name} is used instead")
                return path
            problems[path.name] = problem
            self._unusable.add(path.name)
        # A kill during the very first save lost nothing: only then may the run start afresh.
        if step is None and not self._was_completed():
            self._report_unused(problems, "no checkpoint was completed, so nothing is restored")
            return None
        found = "; ".join(f"{name} is {text}" for name, text in problems.items()) or "none is left"
        wanted = "" if step is None else f" of step {step}"
        raise CheckpointError(
            f"No usable checkpoint{wanted} in {self.directory} ({found}): "
            "put back a good copy, or start anew in another directory."
        )

    def _report_unused(self, problems: dict[str, str], outcome: str) -> None:
        for name, problem in problems.items():
            self._report(f"Checkpoint {name} is {problem}: {outcome}.")

    def _was_completed(self) -> bool:
        finished = [path for path in self._paths() if not _is_half_written(path)]
        return bool(finished) or (self.directory / LATEST).exists()


def _not_written(path: pathlib.Path, error: Exception) -> CheckpointError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if len(reason) > 300:  # tensorstore names each path twice; the cause stands last
        reason = f"{reason[:150]} … {reason[-150:]}"
    return CheckpointError(
        f"Checkpoint {path} could not be written ({reason}): check the disk's free space "
        "and rights, then resume from the checkpoint before it."
    )


def _order(path: pathlib.Path) -> tuple[int, int, bool]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0), match[3] is None


def _is_half_written(path: pathlib.Path) -> bool:
    match = _NAME.fullmatch(path.name)
    return match is None or match[3] is not None or not (path / MANIFEST).exists()


def _best(
    complete: list[tuple[pathlib.Path, dict[str, Any]]],
) -> tuple[pathlib.Path, dict[str, Any]] | None:
    scored = [entry for entry in complete if entry[1]["score"] is not None]
    scored = [entry for entry in scored if not math.isnan(entry[1]["score"])]
    return max(scored, key=lambda entry: entry[1]["score"], default=None)


def _remove(path: pathlib.Path) -> None:
    """Renames first, so that a kill in between leaves nothing that looks like a checkpoint."""
    trash = path.with_name(path.name + _REMOVED)
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash)


# The manifest.


def _digest(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def _sealed(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # the manifest must not reach the disk before what it vouches for
    return _digest(path)


def _render(manifest: Mapping[str, Any]) -> str:
    """The only text that a manifest may have: any changed byte shows, in spaces too."""
    body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "manifest_sha256": seal}, indent=1, sort_keys=True) + "\n"


def _write_manifest(directory: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        files = {
            path.relative_to(directory).as_posix(): entry
            for path, entry in zip(paths, pool.map(_sealed, paths), strict=True)
        }
    _write_atomically(directory / MANIFEST, _render({**manifest, "files": files}))


def _write_atomically(path: pathlib.Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        text = path.read_bytes().decode()
        manifest = json.loads(text)
        intact = isinstance(manifest, dict) and _render(manifest) == text
    except ValueError:  # not UTF-8, or not JSON
        intact = False
    if not intact:
        raise CheckpointError(f"{path} was changed after it was written.")
    return manifest


def _problem(path: pathlib.Path) -> str | None:
    """What makes a checkpoint unusable, or None after every file was found as it was written."""
    if _is_half_written(path):
        return "half-written (it has no manifest)"
    try:
        files = _read_manifest(path)["files"]
    except CheckpointError:
        return f"damaged ({MANIFEST} was changed)"
    missing = sorted(name for name in files if not (path / name).is_file())
    if missing:
        return f"damaged ({missing[0]} is missing)"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = pool.map(_digest, [path / name for name in files])
        for name, entry in zip(files, found, strict=True):
            if entry["size"] != files[name]["size"]:
                return f"damaged ({name} has {entry['size']} bytes, not {files[name]['size']})"
            if entry != files[name]:
                return f"damaged ({name} has another sha256 than its manifest says)"
    return None


# Leaves.


def _json_copy(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_json_copy(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; JSON keeps strings only, so use one.")
        return {key: _json_copy(item, f"{name}[{key!r}]") for key, item in value.items()}
    raise TypeError(
        f"{name} is a {type(value).__name__}, which JSON does not give back: "
        "use None, bool, int, float, str, list or dict."
    )


def _named_leaves(tree: Any) -> dict[str, Any]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        raise CheckpointError("Two leaves of the state have one name: do not use / in its keys.")
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(name: str, leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise TypeError(
            f"Leaf {name} is a {type(leaf).__name__}, not an array: make it one or put it in host."
        )
    entry: dict[str, Any] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if _is_key(leaf):
        entry["prng_impl"] = str(jax.random.key_impl(leaf))
    return entry


def _as_plain_array(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_typed(array: Any, entry: Mapping[str, Any]) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):  # an empty array, which orbax did not store
        array = jnp.zeros(array.shape, array.dtype, device=array.sharding)
    impl = entry.get("prng_impl")
    return array if impl is None else jax.random.wrap_key_data(array, impl=impl)


def _restore_target(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=sharding)


def _check_leaves(name: str, saved: Mapping[str, Any], abstract: Mapping[str, Any]) -> None:
    faults = [f"{leaf} is missing in it" for leaf in abstract if leaf not in saved]
    faults += [f"{leaf} is in it but not in this run" for leaf in saved if leaf not in abstract]
    for leaf, wanted in abstract.items():
        if leaf in saved:
            theirs = f"{saved[leaf]['dtype']}{saved[leaf]['shape']}"
            ours = f"{wanted.dtype}{list(wanted.shape)}"
            if theirs != ours:
                faults.append(f"{leaf} is {theirs} in it but {ours} in this run")
    if faults:
        more = f" (and {len(faults) - 1} more leaves)" if len(faults) > 1 else ""
        raise CheckpointError(
            f"Checkpoint {name} does not fit this run: {faults[0]}{more}; "
            "use the model and optimiser it was written with, or another directory."
        )


def _check_fingerprint(name: str, saved: Any, ours: Any) -> None:
    if saved is None or ours is None or saved == ours:
        return
    missing = object()
    keys = sorted(saved.keys() | ours.keys())
    changed = [key for key in keys if saved.get(key, missing) != ours.get(key, missing)]
    raise CheckpointError(
        f"Checkpoint {name} was written by a run in which {', '.join(changed)} differed: "
        "put back what it was, or start anew in another directory."
    )
