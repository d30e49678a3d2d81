"""A run's directory: its own, locked while it runs, and resumed with unchanged settings only."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from experiments.settings import flatten
from jaxrlhf.data.prompts import PromptDataset

# What a resumed run may change; everything else must be as it was. Of the template's options the
# prompts' tokens in the fingerprint take care.
CHANGEABLE = ("total_epochs", "total_steps", "save_freq", "test_freq", "keep_checkpoints")
CHANGEABLE_GROUPS = ("logging.", "data.template_options.")


def open_workdir(config: ConfigDict, workdir: str | None, name: str) -> tuple[pathlib.Path, Any]:
    """Makes or reopens the run's directory, writes ``config.json`` and locks the directory.

    Args:
      config: the resolved config.
      workdir: the directory to use (and to resume from); None makes a fresh one below ``runs/``.
      name: the recipe's name, for a fresh directory.

    Returns:
      The directory, and the lock (keep it referenced as long as the run lasts).

    Raises:
      ValueError: the directory holds a run with other settings (the keys are named), is in use
        by another process, or holds something else than a run.
    """
    path = _new_path(name) if workdir is None else pathlib.Path(workdir).absolute()
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as refused:
        lock = refused.enter_context((path / ".lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path} is in use by another run; choose another --workdir."
            ) from None
        stored = path / "config.json"
        if stored.exists():
            _check_unchanged(config, json.loads(stored.read_text()), path)
        elif {child.name for child in path.iterdir()} - {".lock", "config.partial"}:
            raise ValueError(
                f"{path} is not empty and holds no config.json; choose another --workdir."
            )
        write_json(stored, config.to_dict())
        refused.pop_all()  # the lock stays
    return path, lock


def _new_path(name: str) -> pathlib.Path:
    """Makes ``runs/NAME-TIME``, with ``-2`` and so on where runs start within one second."""
    base = pathlib.Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("itertools.count ended")


def fingerprint(
    model: pathlib.Path, train: PromptDataset, validation: PromptDataset
) -> dict[str, str]:
    """What a resumed run starts from beside its settings: a sha256 of each, by what it is called.

    Args:
      model: the start model's directory, whose weights are the reference too.
      train, validation: the prompts that are used; their records hold the ground truths.
    """
    return {
        "the start model's config": _files_digest(model, "*config.json"),
        "the start model's weights": _files_digest(model, "*.safetensors"),
        "the training records": _digest(train.records),
        "the validation records": _digest(validation.records),
        # Some templates print today's date.
        "the prompts' tokens (if the chat template prints the date: --config.data.template_options."
        "date_string sets it)": _digest([*train.token_ids, *validation.token_ids]),
    }


def _files_digest(directory: pathlib.Path, pattern: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob(pattern)):
        with path.open("rb") as file:
            part = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {part}\n".encode())
    return digest.hexdigest()


def _digest(records: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the path to an OSError that names none, as those of writes and fsyncs (a full disk)."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file so that it is either the old one or the new one, never half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    partial.replace(path)


def _check_unchanged(config: ConfigDict, stored: dict[str, Any], path: pathlib.Path) -> None:
    old, new = flatten(stored), flatten(config)
    changed = [
        f"{key} ({old.get(key, 'absent')} -> {new.get(key, 'absent')})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, "absent") != new.get(key, "absent")
        and key not in CHANGEABLE
        and not key.startswith(CHANGEABLE_GROUPS)
    ]
    if changed:
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        raise ValueError(
            f"{path} holds a run with other settings: {', '.join(changed[:8])}{more}; "
            "set them back, or choose another --workdir."
        )
