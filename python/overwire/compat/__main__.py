"""Runs `python -m overwire.compat path NAME`: prints a folder for PYTHONPATH. If the folder is on PYTHONPATH,
unmodified programs that import the library NAME get overwire's version."""

from __future__ import annotations

import sys

from . import names, path


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] != "path" or argv[1] not in names():
        print(f"usage: python -m overwire.compat path {{{','.join(names())}}}", file=sys.stderr)
        return 2
    print(path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
