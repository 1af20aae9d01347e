"""Shows the progress of a load or save as a bar, or passes it to a callable."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from .errors import ArgumentError


class Progress(NamedTuple):
    """One progress reading: the numbers of tensor bytes (not stored bytes) and tensors, done and in total.

    The totals are 0 until the work is planned.
    """

    bytes: int
    total_bytes: int
    tensors: int
    total_tensors: int


Progress.__module__ = "overwire"  # users and pickles find it there


#: The values of `progress=`: None or False for no display, True for a bar, or a callable that
#: gets a `Progress` about ten times a second and once at the end.
ProgressLike = None | bool | Callable[[Progress], Any]


class Watcher:
    """Passes progress readings to a callable. `close` is called once, after the last reading."""

    def __init__(self, call: Callable[[Progress], Any]) -> None:
        self._call = call

    def update(self, now: Progress) -> None:
        """Shows one reading."""
        self._call(now)

    def close(self) -> None:
        """Ends the display."""


class _Bar(Watcher):
    """A tqdm bar that counts tensor bytes. It appears with the first reading.

    In a notebook, the bar is removed at the end, because a saved notebook would show the first text of the widget that
    tqdm hides.
    """

    def __init__(self, make_bar: Callable[..., Any], is_widget: bool) -> None:
        self._make_bar = make_bar
        self._is_widget = is_widget
        self._bar: Any = None
        self._shown: Any = None

    def update(self, now: Progress) -> None:
        if self._bar is None:
            self._bar = self._make_bar(display=False) if self._is_widget else self._make_bar()
            if self._is_widget:
                display = import_module("IPython.display").display  # not a requirement of this package
                self._shown = display(self._bar.container, display_id=True)
        self._bar.total = now.total_bytes or None
        self._bar.update(now.bytes - self._bar.n)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.update({"text/plain": ""}, raw=True)


class _Line(Watcher):
    """One line on stderr. On a terminal it is rewritten in place, otherwise it is printed at the end."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._start = time.monotonic()
        self._text = ""

    def update(self, now: Progress) -> None:
        seconds = max(time.monotonic() - self._start, 1e-9)
        total = f"/{now.total_bytes / 1e9:.2f}" if now.total_bytes else ""
        size = now.bytes / 1e9
        count = spell_count(now.tensors, "tensor")
        self._text = f"{self._verb}: {size:.2f}{total} GB, {count}, {size / seconds:.2f} GB/s"
        if sys.stderr.isatty():
            sys.stderr.write("\r" + self._text)
            sys.stderr.flush()

    def close(self) -> None:
        text, self._text, self._start = self._text, "", time.monotonic()
        if text:
            sys.stderr.write("\n" if sys.stderr.isatty() else text + "\n")
            sys.stderr.flush()


def spell_count(count: int, noun: str) -> str:
    """Returns a count and its noun, in the plural unless the count is 1."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def check_progress(progress: object) -> None:
    """Raises ArgumentError for an invalid `progress=`."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        kind = type(progress).__name__
        raise ArgumentError(f"overwire: progress: expected True, False, None or a callable, got {kind}")


def watch(progress: ProgressLike, verb: str) -> Watcher | None:
    """Makes the watcher for a `progress=` argument, or None for no display. The watcher shows nothing before its first
    reading, so it can be made before the work starts. Several jobs can use the watcher, one after another."""
    check_progress(progress)
    if progress is None or progress is False:
        return None
    if progress is True:
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            return _Line(verb)
        is_widget = any(kind.__name__ == "tqdm_notebook" for kind in tqdm.__mro__)
        return _Bar(partial(tqdm, desc=verb, unit="B", unit_scale=True, leave=False), is_widget)
    return Watcher(progress)
