"""A run's directory: its own, locked while it runs, and resumed with unchanged settings only."""

import contextlib
import fcntl
import json
import pathlib
import time
from typing import Any

from ml_collections import ConfigDict

from experiments.settings import flatten

# What a resumed run may change; everything else must be as it was.
CHANGEABLE = ("total_epochs", "total_steps", "save_freq", "test_freq", "keep_checkpoints")


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
    path = pathlib.Path(workdir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
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
        and not key.startswith("logging.")
    ]
    if changed:
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        raise ValueError(
            f"{path} holds a run with other settings: {', '.join(changed[:8])}{more}; "
            "set them back, or choose another --workdir."
        )
