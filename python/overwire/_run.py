"""Implements `overwire run PROGRAM ...`, which makes an unmodified program read safetensors files through overwire.

The program replaces this process. The first folder of PYTHONPATH has a patched safetensors package (see `compat.path`).
Processes that the program starts inherit PYTHONPATH. Nothing is written to disk, and other programs are not affected.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

# Exit statuses of the command line.
_USAGE, _NOT_FOUND = 2, 3


def run(words: list[str]) -> NoReturn:
    """Replaces this process with a program and its arguments, optionally after "--". Exits with status 2 if
    no program is named or if the program ignores PYTHONPATH, and with 3 if the program cannot be started."""
    if words[:1] == ["--"]:
        words = words[1:]
    elif words and words[0].startswith("-"):
        todo = "see: overwire run --help (put -- before a program that begins with -)"
        _exit_with(_USAGE, f"run has no option {words[0]}; {todo}")
    if not words or not words[0]:
        _exit_with(_USAGE, "run needs a program; write: overwire run PROGRAM ARGUMENTS")
    if os.path.basename(words[0]).startswith("python"):
        for word in words[1:]:
            if not word.startswith("-") or word.startswith("--") or word in ("-", "-c", "-m"):
                break
            if set(word[1:]) & set("IE"):
                why = "ignores PYTHONPATH, which overwire run needs: leave that option out"
                _exit_with(_USAGE, f"{words[0]} {word} {why}")
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compat", "_path", "safetensors")
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        os.execvpe(words[0], words, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    except (FileNotFoundError, NotADirectoryError):
        _exit_with(_NOT_FOUND, f"run: program not found: {words[0]}")
    except (OSError, ValueError) as error:
        _exit_with(_NOT_FOUND, f"run: {words[0]}: {getattr(error, 'strerror', None) or error}")


def _exit_with(status: int, text: str) -> NoReturn:
    sys.stderr.write(f"overwire: {text}\n")
    sys.exit(status)
