"""Checks the source of a call, and starts the engine before the modules that need it are imported."""

from __future__ import annotations

import os
from typing import Any

from .._engine import open_library
from ..errors import ArgumentError
from ..frameworks import check_framework
from ..paths import local


def start_engine(framework: Any = None) -> None:
    """Starts the Go runtime, which then initialises while the caller imports modules. An invalid framework raises its
    error before the runtime starts, so that a program that catches the error can still fork. For the same reason, call
    `check_source` before this function."""
    check_framework(framework)
    open_library()


def named(verb: str, source: Any, filename: Any, name: str = "source") -> Any:
    """Returns the source of a call, which may also be passed as `filename=`, as in safetensors."""
    if filename is None:
        return source
    if source is not None:
        raise TypeError(f"{verb}() got both {name} and filename")
    return filename


def check_source(source: Any) -> None:
    """Raises ArgumentError for a source of an invalid type or text. Opens nothing."""
    if isinstance(source, (str, bytes, os.PathLike)):
        local(source)
    elif not hasattr(source, "read") and not hasattr(source, "shared_model"):
        try:
            iter(source)
        except TypeError:
            raise source_error(source) from None


def source_error(source: Any) -> ArgumentError:
    """Returns the error for a source of an invalid type."""
    kind = type(source).__name__
    return ArgumentError(f"overwire: source: expected a path, a list of paths or an open file, got {kind}")
