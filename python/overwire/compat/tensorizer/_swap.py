"""Replaces functions of torch while any thread is inside a context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from overwire.plumbing import new_lock

_T = TypeVar("_T")


class Swap:
    """stand_ins: returns (owner, name, replacement) when the first context is entered. Leaving the
    last context restores the originals."""

    def __init__(self, stand_ins: Callable[[], Sequence[tuple[Any, str, Any]]]) -> None:
        self._stand_ins = stand_ins
        self._lock = new_lock()
        self._users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    @contextlib.contextmanager
    def on(self, variable: ContextVar[_T], value: _T) -> Iterator[None]:
        """A context in which the variable has the value, only in this thread or task. Replacements
        read the variable to know whether they apply."""
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
