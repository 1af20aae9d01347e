"""Counts the loads, saves and other calls of this process, for monitoring.

Finished calls are queued, and added up when the counters are read. If the program has imported
OpenTelemetry's API, each call also becomes a span.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from . import _verbs
from ._engine import forked, is_loaded
from ._locks import new_lock

log = logging.getLogger("overwire")

# Stages of a report. Their counters are nanoseconds, summed over workers.
_STAGES = {
    f"{stage}_ns": stage
    for stage in "read answer permit check decode wait plan encode hash write publish".split()
}
_KEPT = 256  # maximum number of queued calls

_lock = new_lock()
_noted: deque[tuple[str, str, str]] = deque()
_totals: dict[str, VerbMetrics] = {}


def _in_child() -> None:
    _noted.clear()
    _totals.clear()


os.register_at_fork(after_in_child=_in_child)


@dataclass
class VerbMetrics:
    """The counters of one function, such as "load", in this process.

    runs: calls that succeeded. errors: failed calls, by error class.
    tensors, bytes: tensors that the calls returned or wrote, and their bytes. mapped, direct:
        bytes that were mapped, and bytes that were read by direct I/O. written: bytes of
        written files.
    seconds: total duration of the calls.
    stages: seconds summed over workers, by activity: "read" (reading), "answer" (waiting for
        the first byte of a response), "permit" (waiting for a connection), "check" (verifying),
        "decode" (decoding), "wait" (waiting for the device). For saves see `Report.stages`.
    """

    __module__ = "overwire"

    runs: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    mapped: int = 0
    direct: int = 0
    written: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


@dataclass
class CacheMetrics:
    """The counters of the caches of remote objects (OVERWIRE_CACHE, or the option "cache") in
    this process.

    hits, hit_bytes: objects that were in the cache, and their bytes. fetches, fetch_bytes:
        objects that were read from their store, and their bytes. away: hits while the store
        could not be reached. evictions: objects that were removed because of the size limit.
    """

    __module__ = "overwire"

    hits: int = 0
    hit_bytes: int = 0
    fetches: int = 0
    fetch_bytes: int = 0
    away: int = 0
    evictions: int = 0


class Metrics(dict[str, VerbMetrics]):
    """The result of `metrics`: a `VerbMetrics` for each function that has run, by name, and `cache`,
    a `CacheMetrics`."""

    __module__ = "overwire"

    def __init__(self, verbs: Mapping[str, VerbMetrics], cache: CacheMetrics) -> None:
        super().__init__(verbs)
        self.cache = cache

    def _repr_html_(self) -> str:
        from . import _notebook as html

        rows = (
            (verb, one.runs, sum(one.errors.values()), one.tensors, html.size(one.bytes), f"{one.seconds:.3g}")
            for verb, one in self.items()
        )
        head = ("function", "runs", "errors", "tensors", "bytes", "seconds")
        return html.block("Metrics", (), html.table("Calls of this process", head, rows))

    def prometheus(self) -> str:
        """Returns the counters in Prometheus' text format, version 0.0.4."""
        lines: list[str] = []
        for name, kind, text in (
            ("runs", int, "Calls that succeeded."),
            ("tensors", int, "Tensors that were loaded or written."),
            ("bytes", int, "Bytes of loaded or written tensors."),
            ("mapped", int, "Bytes of tensors that were mapped instead of read."),
            ("direct", int, "Bytes of tensors that were read by direct I/O."),
            ("written", int, "Bytes of files that were written."),
            ("seconds", float, "Total duration of the calls in seconds."),
        ):
            lines += _counter_lines(
                name, text, [({"verb": verb}, kind(getattr(one, name))) for verb, one in self.items()]
            )
        for name, key, text, field_name in (
            ("errors", "error", "Calls that failed.", "errors"),
            ("stage_seconds", "stage", "Seconds summed over workers, by activity.", "stages"),
        ):
            counts = [(verb, label, n) for verb, one in self.items() for label, n in getattr(one, field_name).items()]
            lines += _counter_lines(name, text, [({"verb": verb, key: label}, n) for verb, label, n in counts])
        one = self.cache
        for name, text, rows in (
            ("cache_objects", "Remote objects, by origin.", _rows_by_origin(one.hits, one.fetches)),
            ("cache_bytes", "Bytes of remote objects, by origin.", _rows_by_origin(one.hit_bytes, one.fetch_bytes)),
            ("cache_away", "Cached objects used while their store could not be reached.", [({}, one.away)]),
            ("cache_evictions", "Objects removed from the cache because of its size limit.", [({}, one.evictions)]),
        ):
            lines += _counter_lines(name, text, rows)
        return "\n".join(lines) + "\n"


def metrics() -> Metrics:
    """Returns the counters of this process's loads, saves and other calls since it began. Raises nothing.

        nbytes = overwire.metrics()["load"].bytes
        text = overwire.metrics().prometheus()
    """
    with _lock:
        _add_up()
        verbs = {verb: replace(one, errors={**one.errors}, stages={**one.stages}) for verb, one in _totals.items()}
    return Metrics(verbs, _cache_metrics())


def _cache_metrics() -> CacheMetrics:
    if not is_loaded() or forked():
        return CacheMetrics()  # the engine has these counters, and it is not loaded
    return CacheMetrics(**_verbs.cache_counts())


def _rows_by_origin(cache: int, store: int) -> list[tuple[dict[str, str], float]]:
    return [({"origin": "cache"}, cache), ({"origin": "store"}, store)]


def note(verb: str, report: str, error: str = "") -> None:
    """Queues a finished call to be counted. report: its report as JSON. error: the name of its error's class, or ""."""
    with _lock:
        _noted.append((verb, report, error))
        if len(_noted) > _KEPT:
            _add_up()
    if "opentelemetry.trace" in sys.modules:
        try:
            _trace_span(verb, report, error)
        except Exception as failure:  # a failing tracer must not change the result of the call
            log.warning("overwire: metrics: OpenTelemetry did not accept the span of %s: %r", verb, failure)


def _add_up() -> None:
    notes: list[tuple[str, str, str]] = []
    with suppress(IndexError):  # a signal handler may queue a call, or empty the queue
        while True:
            notes.append(_noted.popleft())
    reports: list[Any] = json.loads(f"[{','.join(text or 'null' for _, text, _ in notes)}]")
    for (verb, _, error), report in zip(notes, reports, strict=True):
        one = _totals.get(verb) or _totals.setdefault(verb, VerbMetrics())
        if error:
            one.errors[error] = one.errors.get(error, 0) + 1
            continue
        one.runs += 1
        if not isinstance(report, dict):
            continue
        one.tensors += _number_of(report, "tensors")
        one.bytes += _number_of(report, "bytes" if "bytes" in report else "bytes_in")
        one.mapped += _number_of(report, "mapped")
        one.direct += _number_of(report, "direct")
        one.written += _number_of(report, "bytes_out")
        one.seconds += _number_of(report, "seconds")
        counters: Any = report.get("stages")
        for name, duration in counters.items() if isinstance(counters, dict) else ():
            if duration and (stage := _STAGES.get(name)):
                one.stages[stage] = one.stages.get(stage, 0.0) + duration / 1e9


def _number_of(report: Mapping[str, Any], name: str) -> Any:
    # Some reports have lists under the same names.
    value = report.get(name, 0)
    return value if isinstance(value, (int, float)) else 0


def _trace_span(verb: str, text: str, error: str) -> None:
    # The call has already ended. The span's parent is the caller's current span.
    trace: Any = sys.modules["opentelemetry.trace"]
    report = json.loads(text) if text else None
    facts = report if isinstance(report, dict) else {}
    end = time.time_ns()
    prefix = "overwire"
    span = trace.get_tracer(prefix).start_span(
        f"{prefix}.{verb}", start_time=end - int(facts.get("seconds", 0.0) * 1e9)
    )
    for name, value in facts.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            span.set_attribute(f"{prefix}.{name}", value)
    stages = facts.get("stages")
    for name, value in stages.items() if isinstance(stages, dict) else ():
        span.set_attribute(f"{prefix}.stages.{name}", value)
    if error:
        span.set_attribute("error.type", error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, error))
    span.end(end_time=end)


def _counter_lines(name: str, text: str, rows: Sequence[tuple[dict[str, str], float]]) -> list[str]:
    lines = [f"# HELP overwire_{name}_total {text}", f"# TYPE overwire_{name}_total counter"] if rows else []
    for labels, value in rows:
        inside = ",".join(f'{key}="{_escape_label(label)}"' for key, label in labels.items())
        lines.append(f"overwire_{name}_total{f'{{{inside}}}' if labels else ''} {value!r}")
    return lines


def _escape_label(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
