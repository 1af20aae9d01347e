"""Starts the engine before the modules that need it are imported, so that both happen at the same time."""

from __future__ import annotations

from typing import Any

from .._engine import open_library
from ..frameworks.choose import check_framework
from .sources import check_source


def start_engine(source: Any, framework: Any = None) -> None:
    """Starts the Go runtime, which then initialises while the caller imports modules. Before that, raises the errors
    for invalid sources and frameworks, so that a program that catches them can still fork."""
    check_source(source)
    check_framework(framework)
    open_library()
