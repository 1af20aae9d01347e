"""Runs the engine's command line as `python -m overwire`."""

from __future__ import annotations

from ._engine import main

if __name__ == "__main__":
    main()
