"""Builds commands for child processes that run overwire's code and import from the same places as this process."""

from __future__ import annotations

import os
import sys

# -c and -m put the working folder first on sys.path. It may contain untrusted files, such as a downloaded model.
_LEAVE_FOLDER = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "


def code_command(code: str, *words: str) -> list[str]:
    """Returns the command that runs Python code with arguments."""
    begins_here = "" in sys.path or os.getcwd() in sys.path  # whether this process also imports from the working folder
    return [sys.executable, "-c", code if begins_here else _LEAVE_FOLDER + code, *words]


def module_command(name: str, *words: str) -> list[str]:
    """Returns the command that runs a module as `__main__` with arguments."""
    return code_command(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *words)
