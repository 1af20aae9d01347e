"""Counts the finished loads, saves and other calls of this process.

Calls are queued, and added up when the counters are read. If the program has imported OpenTelemetry's
API, each call also becomes a span.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ._locks import new_lock

log = logging.getLogger("overwire")

# Maps counters of a report, which are nanoseconds summed over workers, to the names of stages.
_WORK = "read answer permit check decode wait plan encode hash write publish"
_STAGES = {f"{stage}_ns": stage for stage in _WORK.split()}
# Maps counters of `VerbMetrics` to the field of the reports that they add up.
_SUMS = {name: name for name in ("tensors", "bytes", "mapped", "direct", "seconds")} | {"written": "bytes_out"}
_TABLES = ("errors", "stages")  # counters by name
_KEPT = 256  # maximum number of queued calls

_lock = new_lock()
_noted: deque[tuple[str, str, str]] = deque()
_totals: dict[str, dict[str, Any]] = {}  # counters by function; their names are the fields of `VerbMetrics`


def _in_child() -> None:
    _noted.clear()
    _totals.clear()


os.register_at_fork(after_in_child=_in_child)


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


def add_up() -> dict[str, dict[str, Any]]:
    """Returns copies of the counters by function, with the fields of `VerbMetrics`."""
    with _lock:
        _add_up()
        return {verb: {**one, **{name: {**one[name]} for name in _TABLES}} for verb, one in _totals.items()}


def _add_up() -> None:
    notes: list[tuple[str, str, str]] = []
    with suppress(IndexError):  # a signal handler may queue a call, or empty the queue
        while True:
            notes.append(_noted.popleft())
    reports: list[Any] = json.loads(f"[{','.join(text or 'null' for _, text, _ in notes)}]")
    for (verb, _, error), report in zip(notes, reports, strict=True):
        if (one := _totals.get(verb)) is None:
            zeros = {"runs": 0, **dict.fromkeys(_SUMS, 0), "seconds": 0.0}
            one = _totals.setdefault(verb, zeros | {name: {} for name in _TABLES})
        if error:
            one["errors"][error] = one["errors"].get(error, 0) + 1
            continue
        one["runs"] += 1
        if not isinstance(report, dict):
            continue
        for name, field in _SUMS.items():
            one[name] += _number_of(report, "bytes_in" if field == "bytes" and field not in report else field)
        counters: Any = report.get("stages")
        for name, duration in counters.items() if isinstance(counters, dict) else ():
            if duration and (stage := _STAGES.get(name)):
                one["stages"][stage] = one["stages"].get(stage, 0.0) + duration / 1e9


def _number_of(report: Mapping[str, Any], name: str) -> Any:
    # Returns 0 for lists, which some reports have under the same names.
    value = report.get(name, 0)
    return value if isinstance(value, (int, float)) else 0


def _trace_span(verb: str, text: str, error: str) -> None:
    # The call has already ended. The span's parent is the caller's current span.
    trace: Any = sys.modules["opentelemetry.trace"]
    report = json.loads(text) if text else None
    facts = report if isinstance(report, dict) else {}
    end, prefix = time.time_ns(), "overwire"
    start = end - int(facts.get("seconds", 0.0) * 1e9)
    span = trace.get_tracer(prefix).start_span(f"{prefix}.{verb}", start_time=start)
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
