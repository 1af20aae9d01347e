"""`python -m overwire`: the command line, which is the engine's."""

from __future__ import annotations

import sys

from . import _engine

__all__ = ["main"]


def main() -> int:
    """Runs the command of sys.argv and returns its exit code."""
    return _engine.cli(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
