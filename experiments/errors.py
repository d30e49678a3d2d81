"""Errors as a user meets them: one sentence for what they can mend, a traceback for our faults."""

import functools
import linecache
import pathlib
import re
import sys
import types
from collections.abc import Callable

from absl import app, flags

import configs
import experiments
import jaxrlhf

TRACEBACK = flags.DEFINE_bool(
    "traceback", False, "Show the whole traceback where the program would print one sentence."
)
_OURS = [pathlib.Path(package.__path__[0]) for package in (jaxrlhf, experiments, configs)]


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
