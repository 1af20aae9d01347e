"""`python -m overwire`: the command line, which is the engine's."""

from __future__ import annotations

from ._engine import main

if __name__ == "__main__":
    main()
