"""`overwire run PROGRAM ...`: an unmodified program that reads safetensors through overwire.

The program takes the place of this process, with a folder before all others on
PYTHONPATH in which the package safetensors is found patched (see `compat.path`); the
processes that it starts inherit that. Nothing is written, and no other program notices.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

# The exit statuses of the command line.
_USAGE, _NOT_FOUND = 2, 3


def run(words: list[str]) -> NoReturn:
    """Replace this process by a program and its arguments; "--" may stand before them.
    Exits with 2 where no program is named, or it cannot be reached by PYTHONPATH, and
    with 3 where there is none of that name."""
    if words[:1] == ["--"]:
        words = words[1:]
    elif words and words[0].startswith("-"):
        _exit_with(
            _USAGE,
            f"run has no option {words[0]}; see: overwire run --help (a program that begins with - goes after --)",
        )
    if not words or not words[0]:
        _exit_with(_USAGE, "run needs a program; write: overwire run PROGRAM ARGUMENTS")
    if os.path.basename(words[0]).startswith("python"):
        for word in words[1:]:
            if not word.startswith("-") or word.startswith("--") or word in ("-", "-c", "-m"):
                break
            if set(word[1:]) & set("IE"):
                _exit_with(
                    _USAGE,
                    f"{words[0]} {word} ignores PYTHONPATH, by which the program would reach overwire: leave that "
                    f"option out",
                )
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compat", "_path", "safetensors")
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        os.execvpe(words[0], words, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    except (FileNotFoundError, NotADirectoryError):
        _exit_with(_NOT_FOUND, f"run: no program is called {words[0]}")
    except (OSError, ValueError) as error:
        _exit_with(_NOT_FOUND, f"run: {words[0]}: {getattr(error, 'strerror', None) or error}")


def _exit_with(status: int, text: str) -> NoReturn:
    sys.stderr.write(f"overwire: {text}\n")
    sys.exit(status)
