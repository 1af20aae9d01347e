"""Starts the engine before the modules that need it are imported, so that both happen at the same time."""

from __future__ import annotations

from typing import Any

from .._engine import open_library
from ..frameworks.choose import check_framework


def start_engine(framework: Any = None) -> None:
    """Starts the Go runtime, which then initialises while the caller imports modules. An invalid framework raises its
    error before the runtime starts, so that a program that catches the error can still fork. For the same reason, call
    `check_source` before this function."""
    check_framework(framework)
    open_library()
