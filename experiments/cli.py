"""The command line of every experiment: its flags, its start, and errors as a user meets them.

What a user can mend is one sentence; a fault of ours keeps its traceback.
"""

import functools
import linecache
import logging as standard_logging
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

import configs
import experiments
import jaxrlhf
from experiments.settings import Settings
from experiments.workdir import open_workdir

CONFIG = config_flags.DEFINE_config_file("config", None, "The recipe, as file.py[:argument].")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the run, resumed where one lies there; default: a new one."
)
TRACEBACK = flags.DEFINE_bool(
    "traceback", False, "Show the whole traceback where the program would print one sentence."
)
flags.mark_flag_as_required("config")
_CLOSED = "Event loop is closed"
_OURS = [pathlib.Path(package.__path__[0]) for package in (jaxrlhf, experiments, configs)]


def run(main: Callable[[list[str]], None]) -> None:
    """``app.run``, with errors as this module's docstring says."""
    app.run(one_sentence(main), flags_parser=parse_flags)


def open_run(
    argv: list[str], check: Callable[[Settings], None]
) -> tuple[Settings, pathlib.Path, Any]:
    """Checks ``--config`` with ``check``, then opens ``--workdir``.

    Returns:
      The config (nothing read yet), the run's directory and its lock, to be kept until the end.

    Raises:
      ValueError: one sentence that names the flag or the keys.
    """
    _silence_orbax()
    check(Settings(CONFIG.value))  # a view of its own: what only checks read counts as unread
    workdir, lock = open_workdir(CONFIG.value, WORKDIR.value, recipe_name(argv))
    return Settings(CONFIG.value), workdir, lock


def _silence_orbax() -> None:
    """orbax tells much at INFO, and a failed save in hundreds of lines; ours is one sentence."""
    logging.set_verbosity(logging.FATAL)  # absl's logger, which here is orbax's alone
    standard_logging.getLogger("asyncio").setLevel(standard_logging.CRITICAL)
    sys.unraisablehook = _tell_unraisable


def _tell_unraisable(fault: Any) -> None:
    """Leaves out what tensorstore's callbacks say, once for each array of a failed save."""
    if not isinstance(fault.exc_value, RuntimeError) or str(fault.exc_value) != _CLOSED:
        sys.__unraisablehook__(fault)


def recipe_name(argv: list[str]) -> str:
    """``gsm8k-tiny`` for ``--config=configs/gsm8k.py:tiny``.

    Raises:
      ValueError: words on the command line that are no flags.
    """
    if argv[1:]:
        raise ValueError(f"{argv[1:]} are no flags; write settings as --config.name=value.")
    file, _, argument = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return "-".join([pathlib.Path(file).stem, *re.findall(r"[\w.]+", argument)])[:60]


def one_sentence(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """Wraps ``main`` for ``app.run``: what our code refuses ends in ``error: …`` and status 1.

    The messages of this project's own ``raise`` statements are written for the user, and an
    OSError names the file that could not be used. Whatever else a library or the interpreter
    raises is a fault, and keeps its traceback.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> None:
        try:
            main(argv)
        except Exception as error:
            if TRACEBACK.value or not is_refusal(error):
                raise
            sys.exit(f"error: {error}\n(--traceback shows where this was found)")

    return run


def parse_flags(argv: list[str]) -> list[str]:
    """The ``flags_parser`` of ``app.run``: a ``--config.name`` that no recipe has is a sentence."""
    try:
        return app.parse_flags_with_usage(argv)
    except AttributeError as error:  # ml_collections' word for it, the name in quotes of quotes
        name, *_ = re.findall(r"\w+", str(error))
        sys.exit(f"error: the recipe has no setting {name}; configs/common.py has all their names")


def is_refusal(error: BaseException) -> bool:
    """Whether the operating system or a ``raise`` statement of this project made this error."""
    if isinstance(error, OSError):
        return True
    entry: types.TracebackType | None = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    if entry is None:
        return False
    file = entry.tb_frame.f_code.co_filename
    ours = any(pathlib.Path(file).absolute().is_relative_to(folder) for folder in _OURS)
    return ours and linecache.getline(file, entry.tb_lineno).lstrip().startswith("raise ")
