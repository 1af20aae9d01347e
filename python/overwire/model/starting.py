"""Starts the engine before the modules that need it are imported, so that both happen at the same time."""

from __future__ import annotations

from typing import Any

from .._engine import open_library
from ..frameworks.choose import check_framework


def start_engine(framework: Any = None) -> None:
    """Starts the Go runtime, which then initialises while the caller imports modules. Before that, raises the error of
    an invalid framework, so that a program that catches it can still fork. Call `check_source` before this, for the
    same reason."""
    check_framework(framework)
    open_library()
