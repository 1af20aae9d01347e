"""Saves that go on while the caller does."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from .. import _verbs
from .._engine import forked
from ..errors import ArgumentError, CancelledError, DeadlineError, ForkedError
from ..jobs import Job, log, shown, time_limit
from ..paths import is_file, is_remote, path_of
from ..progress import Progress
from .reports import Report

_lock = threading.RLock()  # a signal handler may come while this thread has it
_last: dict[str, Saving] = {}  # by path: what runs, or failed and no one knows


class After(NamedTuple):
    """What follows a save in the background, in another thread: `then` once its files are
    there, `undo` after an error in either, and `over` at the end in any case."""

    then: Callable[[Report], None] | None
    undo: Callable[[], None]
    over: Callable[[], None]


class Saving:
    """A save whose tensors may change already, while its files are written: see
    `save_file(wait=False)`. Threads may share it.

    The files appear when all are complete, atomically. An error is logged, and raised by
    `wait`, or else by the next save to the path. At the end of the interpreter a save is
    finished. A cancelled or killed one leaves the old files.
    """

    __module__ = "overwire"

    def __init__(self, path: str, key: str) -> None:
        #: Where it saves to.
        self.path = path
        self._key = key
        self._job: Job | None = None
        self._ended = threading.Event()
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._starter = threading.get_ident()  # the thread in `begin`; 0 after that
        self._seen = Progress(0, 0, 0, 0)

    def __repr__(self) -> str:
        state = (
            "running" if not self._ended.is_set() else "complete" if self._error is None else f"failed: {self._error}"
        )
        return f"Saving({shown(self.path)!r}, {state})"

    def done(self) -> bool:
        """Whether it has ended, well or not. Raises ForkedError in a forked child, if it
        ran when the process forked."""
        self._refuse_child("done")
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Report:
        """Waits until the files are there, and returns what was written.

        timeout: seconds after which DeadlineError is raised; the save goes on then.

        Raises the save's own error (IOFailure, AccessError, CancelledError ...), each
        time, and ForkedError in a forked child. Ctrl-C ends the wait, not the save.
        """
        self._refuse_child("wait")
        time_limit(timeout)
        if not self._ended.wait(timeout):
            raise DeadlineError(f"overwire: save {shown(self.path)}: not done within {timeout} s; it goes on")
        self._forget_saving()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def cancel(self) -> bool:
        """Stops it, unless it is complete, and waits for its end. Returns whether it was
        stopped: `wait` raises CancelledError then, and the old files are as they were."""
        self._refuse_child("cancel")
        with _lock:
            job = None if self._ended.is_set() else self._job
            self._cancelled = self._cancelled or job is not None
        if job is not None:
            with contextlib.suppress(ArgumentError):  # the engine has ended it meanwhile
                _verbs.cancel(job.number)
        self._ended.wait()
        self._forget_saving()
        return isinstance(self._error, CancelledError)

    def progress(self) -> Progress:
        """How far the writing is, in bytes and tensors of what is saved. Raises ForkedError
        in a forked child, if it ran when the process forked."""
        self._refuse_child("progress")
        if not self._ended.is_set() and self._job is not None:
            with contextlib.suppress(ArgumentError):  # it ends just now
                self._seen = self._job.progress()
        return self._seen

    @property
    def report(self) -> Report | None:
        """What was written; None before it is complete, and after an error."""
        return self._report

    def _refuse_child(self, what: str) -> None:
        if not self._ended.is_set() and forked():
            raise ForkedError(f"overwire: Saving.{what}: the save runs in the process that this one was forked from")

    def _forget_saving(self) -> None:
        with _lock:
            if _last.get(self._key) is self:
                del _last[self._key]

    def _run_saving(self, after: After) -> None:
        # In a thread of its own, to the end.
        assert self._job is not None
        try:
            try:
                with self._job as job:
                    report = Report.of(job.finish())
                if after.then is not None:
                    if self._cancelled:
                        raise CancelledError(f"overwire: save {shown(self.path)}: cancelled")
                    after.then(report)
            except BaseException:
                after.undo()
                raise
            finally:
                after.over()
            self._report, self._seen = (
                report, Progress(report.bytes_in, report.bytes_in, report.tensors, report.tensors)
            )
        except BaseException as error:
            self._error = error
            if not isinstance(error, CancelledError):
                log.error("a save that no one waited for has failed: %s", error)
        finally:
            self._ended.set()
            if self._error is None or isinstance(self._error, CancelledError):
                self._forget_saving()


def _key_of(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(path_of(path) if is_file(path) else path)


def settle(path: str) -> None:
    """Waits for the save of a path that runs in the background; raises its error, if it has
    failed and no one knows it."""
    if not _last:
        return
    while True:
        with _lock:
            earlier = _last.get(_key_of(path))
        if earlier is None:
            return
        _follow_saving(earlier)


def _follow_saving(earlier: Saving) -> None:
    if earlier._starter == threading.get_ident():
        raise ArgumentError(
            f"overwire: save {shown(earlier.path)}: a signal handler saves to the path whose save it interrupts"
        )
    earlier.wait()


def begin(path: str, start: Callable[[], Job], after: After, *, key: str | None = None) -> Saving:
    """Starts a save in the background, after the one of the same path before it.

    start: starts the job. key: the path of the whole, of which path is a part. Returns
    when the tensors may change. Raises what fails until then."""
    saving = Saving(key or path, _key_of(key or path))
    try:
        while True:
            with _lock:
                earlier = _last.setdefault(saving._key, saving)
            if earlier is saving:
                break
            _follow_saving(earlier)
        saving._job = start()
        try:
            while saving._job.next(0.1) is None:
                pass
        except BaseException:
            saving._job.abandon()
            raise
    except BaseException as error:
        try:
            after.undo()
        finally:
            after.over()
            saving._error = error
            saving._ended.set()
            saving._forget_saving()
        raise
    saving._starter = 0
    try:
        threading.Thread(target=saving._run_saving, args=(after,), name="overwire saving").start()
    except RuntimeError:  # at the end of the interpreter
        saving._run_saving(after)
    return saving
