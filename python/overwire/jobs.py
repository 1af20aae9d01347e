"""Runs engine jobs: waits for them, shows progress, cancels them, and keeps the last report.

A `Job` owns one engine job. As a context manager it leaves nothing running: an exception inside the block cancels the
job, waits until the engine no longer uses the caller's buffers, and frees the job.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from . import _verbs
from ._engine import TAKE_LAST, TAKE_NEXT, TAKE_RAW, JobNumber, core, forget, forked, release
from ._imports import Undisturbed
from ._locks import new_lock
from .counting import note
from .errors import ArgumentError, CancelledError, DeadlineError
from .paths import is_remote

if TYPE_CHECKING:
    from ._core import Result
    from .metering import LastReport
    from .progress import Progress, Watcher

log = logging.getLogger("overwire")

# The seconds between two progress readings.
_TICK = 0.1

# Smaller loads of a single tensor are logged at DEBUG instead of INFO.
_LARGE = 256 << 20

# The words for finished work in log lines.
_DONE = {
    "load": "loaded", "stream": "streamed", "save": "saved", "convert": "converted", "verify": "verified",
    "pin": "pinned", "sleep": "put to sleep", "fetch": "fetched",
}  # fmt: skip

_lock = new_lock()
_last = "null"
_has_warned = False  # whether the warning about GPUDirect Storage was logged


def _say_once(reason: str) -> None:
    """Logs that GPUDirect Storage was requested but is not available. Later calls do nothing."""
    global _has_warned
    with _lock:
        is_first, _has_warned = not _has_warned, True
    if is_first:
        log.warning("overwire: GPUDirect Storage is not available, reading through host memory: %s", reason)


def last_report() -> LastReport | None:
    """Returns the report of the call that finished last in this process, in any thread.

    The report is a dict of the engine's counters (see `LastReport`), or None before the first call. Raises nothing.
    """
    from ._notebook import Facts

    with _lock:
        text = _last
    report = json.loads(text)
    return cast("LastReport", Facts("Last report", report)) if isinstance(report, dict) else None


def sentence(verb: str, report: dict[str, Any]) -> str:
    """Describes a report in one line: the work, its speed, and its slowest stage. Returns "" for
    a report without a duration."""
    seconds, nbytes = report.get("seconds"), report.get("bytes", report.get("bytes_in"))
    if seconds is None or nbytes is None:
        return ""
    from ._notebook import size

    count = report.get("tensors")
    tensors = "" if count is None else f"{count:,} tensor{'' if count == 1 else 's'}, "
    text = f"{_DONE.get(verb, verb)} {tensors}{size(nbytes)}"
    if "bytes_out" in report:
        text += f" as {size(report['bytes_out'])}"
    read = nbytes - report.get("mapped", 0)
    if read < nbytes:
        text += f" ({'all' if not read else size(nbytes - read)} of it mapped, not read)"
    text += f" in {seconds:.3g} s" if seconds >= 0.001 else " in less than 1 ms"
    stages = report.get("stages") or {}
    if read > 0 and verb == "load" and stages.get("workers") == 0:
        return text + ", because they were preloaded"
    if read > 0 and seconds > 0:
        text += f", {read / seconds / 1e9:.2f} GB/s"
    busy = {
        "planning": stages.get("plan_ns", 0),
        "reading": stages.get("read_ns", 0) + stages.get("answer_ns", 0) + stages.get("permit_ns", 0),
        "decoding": stages.get("check_ns", 0) + stages.get("decode_ns", 0),
        "waiting for the device": stages.get("wait_ns", 0),
        "encoding": stages.get("encode_ns", 0),
        "hashing": stages.get("hash_ns", 0),
        "writing": stages.get("write_ns", 0) + stages.get("publish_ns", 0),
    }
    most = max(busy, key=busy.__getitem__)
    if read > 0 and busy[most] > 0:
        text += f", {100 * busy[most] / sum(busy.values()):.0f} % of the work {most}"
    return text


def progress_of(number: int) -> Progress:
    """Returns the progress of a job."""
    from .progress import Progress

    return Progress(*memoryview(_verbs.progress(number)[1]).cast("q"))


def time_limit(timeout: float | None) -> float | None:
    """Returns the monotonic time when a call that begins now must end, or None for no limit. Raises
    ArgumentError unless the timeout is a positive number of seconds."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError(f"overwire: timeout {timeout!r}: expected seconds, more than 0")
    return time.monotonic() + timeout


def check_wait(timeout: float | None) -> None:
    """Raises ArgumentError unless the timeout is None or a number of seconds. A timeout of 0 or less means not to
    wait."""
    if timeout is None or not isinstance(timeout, bool) and isinstance(timeout, (int, float)) and timeout == timeout:
        return
    raise ArgumentError(f"overwire: timeout {timeout!r}: expected seconds, or None to wait for the end")


class Landed:
    """Tensors that have landed, in columns.

    capsules: a DLPack capsule ("dltensor") per tensor, owned by the caller, or None if the tensor has a destination or
    was returned before. addresses: the address of each tensor, or 0 without memory or bytes.
    missing: the number of addresses that are 0. positions: the request numbers, for `next`.
    """

    __slots__ = ("addresses", "capsules", "missing", "positions")

    def __init__(self, numbers: bytes, capsules: list[Any], positions: bool):
        flat = memoryview(numbers).cast("q")
        count = len(capsules)
        self.capsules = capsules
        self.missing = flat[0]
        self.positions = flat[1 : 1 + count].tolist() if positions else range(count)
        self.addresses = flat[-count:].tolist() if count else []

    def pairs(self) -> list[tuple[Any, int]]:
        """Returns the capsule and the address of each tensor."""
        return list(zip(self.capsules, self.addresses, strict=True))

    def usable(self) -> Iterator[tuple[int, Any]]:
        """Yields (position, capsule) of each tensor that has memory and bytes."""
        if not self.missing:
            return zip(self.positions, self.capsules, strict=True)
        rows = zip(self.positions, self.capsules, self.addresses, strict=True)
        return ((at, capsule) for at, capsule, address in rows if address)


def heed(uris: Iterable[str], hosted: bool = False) -> None:
    """Logs the engine's notices about opened files, for instance that a model came from the cache because its store
    could not be reached. hosted: whether the files may come from the host store; other local files have no notices."""
    if hosted or any(map(is_remote, uris)):
        for text in _verbs.notices():
            log.warning("overwire: %s", text)


def shown(uri: str) -> str:
    """Returns a URI for logs and messages, in which the engine hides possible secrets. Local paths
    are unchanged. In a forked child, which has no engine, only the scheme is shown."""
    if not is_remote(uri):
        return uri
    return uri.partition("://")[0] + "://***" if forked() else _verbs.shown(uri)


class Job:
    """A running engine job, identified by its number."""

    __slots__ = ("_end", "_freed", "_report", "_watcher", "number", "verb")

    def __init__(self, number: JobNumber, verb: str, watcher: Watcher | None = None, end: float | None = None):
        """end: the result of `time_limit`, or None for no limit."""
        self.number = number
        self._end = end
        self.verb = verb
        self._watcher = watcher
        self._freed = False
        self._report: str | None = None  # set when the engine has freed the job

    def wait(self) -> None:
        """Waits for the end and raises the job's error. Ctrl-C ends the wait. When the time limit has passed, the job
        is cancelled and DeadlineError is raised, unless the job still succeeds."""
        while True:
            remaining = None if self._end is None else max(0.0, self._end - time.monotonic())
            tick = remaining if self._watcher is None else _TICK if remaining is None else min(remaining, _TICK)
            if self.ended(tick):
                return
            if remaining is not None and time.monotonic() >= (self._end or 0.0):
                self._end_late()
                return

    def _end_late(self) -> None:
        _verbs.cancel(self.number)
        try:
            core().wait(self.number, None)
        except CancelledError as error:
            raise DeadlineError(f"overwire: {self.verb}: not done within its timeout; it was cancelled") from error

    def ended(self, timeout: float | None) -> bool:
        """Waits at most `timeout` seconds. Returns whether the job has ended, or raises the job's error."""
        over: bool = core().wait(self.number, timeout)
        if self._watcher is not None:
            self._watcher.update(self.progress())
        return over

    def settle(self, pairs: Sequence[int], stream: int) -> None:
        """Sets the destinations of requests that had none. pairs: request, address, request, address ...
        The load writes to them after the work that is now queued on the stream."""
        _verbs.settle(self.number, stream, array("q", pairs).tobytes())

    def next(self, timeout: float | None, raw: bool = False) -> Landed | None:
        """Returns the tensors that have landed since the last call. The result is empty at the end of the load, and
        None after the timeout."""
        result = core().take(self.number, timeout, TAKE_NEXT | (TAKE_RAW if raw else 0))
        if self._watcher is not None:
            self._watcher.update(self.progress())
        return None if result is None else Landed(result[1], result[2], True)

    def take(self, raw: bool = False) -> Landed:
        """Waits for the end. Returns the memory of all requests, in their order. The caller owns it.
        The engine then frees the job."""
        result = self.result(TAKE_RAW if raw else 0)
        return Landed(result[1], result[2], False)

    def finish(self) -> Any:
        """Waits for the end and returns the job's report. The engine then frees the job."""
        return json.loads(self.result()[0])

    def result(self, how: int = 0) -> Result:
        """Waits for the end and returns the job's result, including its report. how: TAKE_RAW or 0.
        The engine then frees the job."""
        if self._watcher is not None or self._end is not None:
            self.wait()
        result: Result = core().take(self.number, None, TAKE_LAST | how)
        forget(self.number)
        self._freed = True
        self._report = result[0]
        if self._watcher is not None:
            self._watcher.close()
        return result

    def progress(self) -> Progress:
        """Returns the progress of the job."""
        return progress_of(self.number)

    def report(self) -> Any:
        """Returns the report of an ended job."""
        return json.loads(self._said())

    def _said(self) -> str:
        return self._report if self._report is not None else _verbs.report(self.number)[0]

    def keep_memory(self, memory: object) -> None:
        """Keeps `memory`, to which the job writes, alive until the job has ended, even if this object is dropped."""
        self.number.memory = memory

    def cancel(self) -> None:
        """Cancels the job and waits for its end, so that it no longer uses the caller's memory. Does nothing in a
        forked child, because the parent owns the job."""
        if self._freed or forked():
            return
        try:
            _verbs.cancel(self.number)
        except ArgumentError:
            return  # the engine has freed the job, but an interrupt came before this was noted
        with Undisturbed(ctrl_c=True), suppress(Exception):  # the job may use the caller's buffers until it ends
            while not core().wait(self.number, 1.0):
                pass

    def free(self) -> None:
        """Frees the job, and the tensors that the caller has not taken."""
        if not self._freed:
            self._freed = True
            if self._watcher is not None:
                self._watcher.close()
            release(self.number)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.done()
        else:
            note(self.verb, "", kind.__name__)
            self.abandon()

    def abandon(self) -> None:
        """Cancels and frees the job, so that it no longer uses the caller's memory."""
        try:
            self.cancel()
        finally:
            self.free()

    def done(self) -> None:
        """Ends a job that has succeeded. `last_report` then returns its report."""
        try:
            self._remember_report()
        finally:
            self.free()

    def _remember_report(self) -> None:
        global _last
        text = self._said()
        note(self.verb, text)
        if not text.startswith("{"):
            return  # the job has no report, or its report is a list
        with _lock:
            _last = text
        if log.isEnabledFor(logging.INFO):
            report = json.loads(text)
            if isinstance(report, dict) and (report_text := sentence(self.verb, report)):
                # Loads of a single small tensor are frequent.
                small = report.get("tensors") == 1 and report.get("bytes", 0) < _LARGE
                extra = {"report": {"verb": self.verb, **report}}
                log.log(logging.DEBUG if small else logging.INFO, "%s", report_text, extra=extra)
            log.debug("%s: %s", self.verb, text)
        if '"no_gds"' in text:
            _say_once(json.loads(text)["no_gds"])
