"""Measures how one thread spends its time. Functions are assigned to phases, and each phase's own time, without phases
inside it, is summed per component.

`table` prints wall time, the thread's CPU time, and calls. Wall time beyond CPU time was spent waiting. Full passes of
the cycle collector are a phase.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Phases"]


class Phases:
    """The phases of the thread that creates it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._rows: dict[tuple[str, str], list[float]] = {}
        self._stack: list[tuple[str, str]] = []
        self._at = (0.0, 0.0)
        self._undo: list[Callable[[], None]] = []

    def _add(self) -> None:
        now = (time.perf_counter(), time.thread_time())
        if self._stack:
            row = self._rows.setdefault(self._stack[-1], [0.0, 0.0, 0])
            row[0] += now[0] - self._at[0]
            row[1] += now[1] - self._at[1]
        self._at = now

    @contextlib.contextmanager
    def phase(self, name: str, component: str | None = None) -> Iterator[None]:
        """Counts the block's time for this phase, without phases inside it."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._add()
        self._stack.append((component or (self._stack[-1][0] if self._stack else "pipeline"), name))
        self._rows.setdefault(self._stack[-1], [0.0, 0.0, 0])[2] += 1
        try:
            yield
        finally:
            self._add()
            self._stack.pop()

    def time(
        self, owner: Any, name: str, phase: str, component: Callable[[Any, Any], str] | None = None, beside: Any = None
    ) -> None:
        """Assigns a function of a module or class to a phase, if it exists. component returns the component's name from
        the call's arguments. `beside` is a module that has imported the function and gets the same wrapper."""
        static = inspect.getattr_static(owner, name, None)
        if static is None:
            return
        kind = type(static) if isinstance(static, (classmethod, staticmethod)) else None
        function = static.__func__ if kind is not None else static

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase, None if component is None else component(args, kwargs)):
                return function(*args, **kwargs)

        stand_in = timed if kind is None else kind(timed)
        for place in (owner, beside) if beside is not None and getattr(beside, name, None) is static else (owner,):
            self._put(place, name, stand_in, static)

    def _put(self, owner: Any, name: str, stand_in: Any, static: Any) -> None:
        own = name in vars(owner)
        setattr(owner, name, stand_in)
        self._undo.append(lambda: setattr(owner, name, static) if own else delattr(owner, name))

    def collector(self, full: int = 2) -> None:
        """Makes full passes of the cycle collector a phase."""
        open_: list[Any] = []

        def seen(when: str, info: dict[str, Any]) -> None:
            if info["generation"] != full or threading.get_ident() != self._thread:
                return
            if when == "start":
                open_.append(self.phase("cycle collector"))
                open_[-1].__enter__()
            elif open_:
                open_.pop().__exit__(None, None, None)

        gc.callbacks.append(seen)
        self._undo.append(lambda: gc.callbacks.remove(seen))

    def close(self) -> None:
        """Restores every function."""
        while self._undo:
            self._undo.pop()()

    def rows(self) -> list[tuple[str, str, float, float, int]]:
        """Returns rows of component, phase, wall seconds, CPU seconds and calls."""
        return [
            (component, phase, wall, cpu, int(calls)) for (component, phase), (wall, cpu, calls) in self._rows.items()
        ]


def table(tables: dict[str, list[tuple[str, str, float, float, int]]], least: float = 0.0005) -> str:
    """Returns several runs side by side, by component and phase: wall milliseconds, CPU milliseconds and calls. Rows
    below `least` seconds in every run are summed."""
    found: dict[tuple[str, str], dict[str, tuple[float, float, int]]] = {}
    for run, rows in tables.items():
        for component, phase, wall, cpu, calls in rows:
            found.setdefault((component, phase), {})[run] = (wall, cpu, calls)
    order = list(dict.fromkeys(component for component, _ in found))
    lines = [f"{'component':14} {'phase':34}" + "".join(f" | {run:>8} ms  cpu  calls" for run in tables)]

    def line(component: str, phase: str, values: dict[str, tuple[float, float, int]]) -> str:
        cells = (values.get(run, (0.0, 0.0, 0)) for run in tables)
        return f"{component:14} {phase:34}" + "".join(f" | {1e3 * wall:11.1f} {1e3 * cpu:5.0f} {calls:5}" for wall, cpu, calls in cells)

    total: dict[str, tuple[float, float, int]] = {}
    for component in order:
        small: dict[str, tuple[float, float, int]] = {}
        here = {phase: values for (name, phase), values in found.items() if name == component}
        for phase, values in here.items():
            little = max(wall for wall, _, _ in values.values()) < least
            for run, value in values.items():
                total[run] = tuple(map(sum, zip(total.get(run, (0, 0, 0)), value, strict=True)))  # type: ignore[assignment]
                if little:
                    small[run] = tuple(map(sum, zip(small.get(run, (0, 0, 0)), value, strict=True)))  # type: ignore[assignment]
            if not little:
                lines.append(line(component, phase, values))
        if small:
            lines.append(line(component, "(smaller ones)", small))
    lines.append(line("all", "", total))
    return "\n".join(lines)
