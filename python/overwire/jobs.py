"""Running verbs of the engine: waiting, progress, cancelling, the last report.

A `Job` owns one engine job. Used as a context manager it leaves nothing behind:
an exception inside cancels the job, waits until the engine has let go of every
buffer it was given, and frees it.
"""

from __future__ import annotations

import json
import logging
import threading
from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from . import _engine
from .progress import Progress, Watcher

__all__ = ["Job", "last_report", "log"]

log = logging.getLogger("overwire")

# Seconds between two readings for a watcher.
_TICK = 0.1

_lock = threading.Lock()
_last = "null"
_said = False


def _say_once(reason: str) -> None:
    """One line for GPUDirect Storage that was asked for and is not to be had."""
    global _said
    with _lock:
        said, _said = _said, True
    if not said:
        log.warning("read through the host instead: %s", reason)


def last_report() -> dict[str, Any] | None:
    """What the verb that finished last in this process did.

    A dict of the engine's counters (stages with their bytes, seconds and
    waits), None before the first verb. With several threads at work, "last" is
    whichever ended last.
    """
    with _lock:
        text = _last
    report = json.loads(text)
    return report if isinstance(report, dict) else None


class Job:
    """One running engine job, by its number."""

    __slots__ = ("_freed", "_watcher", "number", "verb")

    def __init__(self, number: int, verb: str, watcher: Watcher | None = None):
        self.number = number
        self.verb = verb
        self._watcher = watcher
        self._freed = False

    def wait(self) -> None:
        """Waits for the end and raises the job's error. Ctrl-C ends the wait."""
        watcher = self._watcher
        if watcher is None:
            _engine.job_wait(self.number, None)
        else:
            while not _engine.job_wait(self.number, _TICK):
                watcher.update(self.progress())
            watcher.update(self.progress())

    def ended(self, timeout: float) -> bool:
        """Whether it has ended, after `timeout` seconds at most; raises its error."""
        over = _engine.job_wait(self.number, timeout)
        if self._watcher is not None:
            self._watcher.update(self.progress())
        return over

    def settle(self, pairs: Sequence[int], stream: int) -> None:
        """Tells where requests land that were to learn it while the load runs:
        request, address, request, address; after what is queued on the stream."""
        flat = array("q", pairs)
        _engine.load_settle(self.number, flat.buffer_info()[0], len(flat) // 2, stream)

    def next(self, timeout: float | None, raw: bool) -> list[tuple[int, Any, int]]:
        """Positions newly landed, with capsule and pointer; [] at the end."""
        landed = _engine.job_next(self.number, timeout, raw)
        if self._watcher is not None:
            self._watcher.update(self.progress())
        return landed

    def gather(self, timeout: float | None) -> tuple[list[Any], list[int]] | None:
        """As `next`, in columns: capsules and positions of what has bytes, exported
        as it is; None at the end, or when time is up."""
        columns = _engine.job_gather(self.number, timeout)
        if self._watcher is not None:
            self._watcher.update(self.progress())
        return columns

    def capsules(self) -> tuple[list[Any], list[int]]:
        """As `take`, in columns: capsules, and where they are None."""
        return _engine.job_capsules(self.number)

    def take(self, raw: bool = False) -> list[tuple[Any, int]]:
        """After `wait`: what each request landed in, ownership included."""
        return _engine.job_take(self.number, raw)

    def progress(self) -> Progress:
        """How far it is."""
        return Progress(*_engine.job_progress(self.number))

    def report(self) -> Any:
        """What the job says of itself, after it has ended."""
        return json.loads(_engine.job_report(self.number))

    def cancel(self) -> None:
        """Asks the job to stop and waits until it has: nothing of it then
        touches memory that was lent to it."""
        _engine.job_cancel(self.number)
        while True:
            try:
                if _engine.job_wait(self.number, 1.0):
                    return
            except KeyboardInterrupt:
                continue  # the buffers are not ours again before the job ends
            except BaseException:
                return  # the job's own error: it has ended

    def free(self) -> None:
        """Lets the engine forget the job; memory not taken is released."""
        if not self._freed:
            self._freed = True
            if self._watcher is not None:
                self._watcher.close()
            _engine.job_free(self.number)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.done()
            return
        try:
            self.cancel()
        finally:
            self.free()

    def done(self) -> None:
        """Ends a job that has succeeded; its report is the last one."""
        try:
            self._remember()
        finally:
            self.free()

    def _remember(self) -> None:
        global _last
        text = _engine.job_report(self.number)
        with _lock:
            _last = text
        log.debug("%s: %s", self.verb, text)
        if '"no_gds"' in text:
            _say_once(json.loads(text)["no_gds"])
