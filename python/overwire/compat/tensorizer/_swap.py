"""Replaces functions of torch while any thread is inside a context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from overwire._compat_api import new_lock

_T = TypeVar("_T")


class Swap:
    """Installs replacements while any context is active, and restores the originals after the last one.
    stand_ins: a function that is called on entry of the first context, and returns (owner, name, replacement) for each
    function to replace."""

    def __init__(self, stand_ins: Callable[[], Sequence[tuple[Any, str, Any]]]) -> None:
        self._stand_ins = stand_ins
        self._lock = new_lock()
        self._users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    @contextlib.contextmanager
    def on(self, variable: ContextVar[_T], value: _T) -> Iterator[None]:
        """A context in which the variable has the value, in this thread or task only. Replacements read the variable to
        decide whether they apply."""
        with self._lock:
            if self._users == 0:
                for owner, name, replacement in self._stand_ins():
                    self._originals.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, replacement)
            self._users += 1
        token = variable.set(value)
        try:
            yield
        finally:
            variable.reset(token)
            with self._lock:
                self._users -= 1
                while self._originals and self._users == 0:
                    setattr(*self._originals.pop())
