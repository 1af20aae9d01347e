"""Tests metrics, their Prometheus text, OpenTelemetry spans and JSON logs."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import processes
import pytest
from overwire import counting
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    ow.save_file({"a": np.random.default_rng(1).normal(0, 0.02, (512, 512)).astype("f4"), "b": np.zeros(3, "f4")}, path)
    return path


def test_calls_are_counted(model: Path, tmp_path: Path) -> None:
    """Runs, tensors, bytes, seconds and stages are counted for each function, and errors by class. This includes calls
    on other threads, and more calls than the queue of pending updates holds."""
    before = ow.metrics().get("load", ow.VerbMetrics())
    for _ in range(3):
        ow.load_file(model, framework="np")
    damaged = bytearray(model.read_bytes())
    damaged[-200_000] ^= 1
    (tmp_path / "d.safetensors").write_bytes(damaged)
    with pytest.raises(ow.CorruptError):
        ow.load_file(tmp_path / "d.safetensors", framework="np")
    after = ow.metrics()["load"]
    assert after.runs - before.runs == 3 and after.tensors - before.tensors == 6
    assert after.bytes - before.bytes == 3 * (512 * 512 * 4 + 12)
    assert after.errors.get("CorruptError", 0) - before.errors.get("CorruptError", 0) == 1
    assert after.seconds > before.seconds and set(after.stages) <= set(counting._STAGES.values()) and after.stages["decode"] > 0
    threads = [
        threading.Thread(target=lambda: [counting.note("none", '{"bytes": 2, "seconds": 0.5}') for _ in range(300)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counting.note("none", "null")
    one = ow.metrics()["none"]
    assert (one.runs, one.bytes, one.seconds) == (1201, 2400, 600.0) and len(counting._noted) == 0
    one.errors["x"] = 1
    assert not ow.metrics()["none"].errors  # the caller gets a copy


def test_a_signal_handler_reads_metrics_during_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a signal handler reads `metrics` between two updates, each call is counted once, and none fails."""

    class Interrupted(deque[tuple[str, str, str]]):
        def popleft(self) -> tuple[str, str, str]:
            if len(self) % 2:
                signal.raise_signal(signal.SIGUSR1)
            return super().popleft()

    calls: list[int] = []

    def ask(number: int, frame: object) -> None:
        calls.append(number)
        if len(calls) == 1:
            ow.metrics()

    monkeypatch.setattr(counting, "_noted", Interrupted())
    before = signal.signal(signal.SIGUSR1, ask)
    try:
        for count in range(1, 5):
            calls.clear()
            counting._totals.pop("asked", None)
            for _ in range(count):
                counting.note("asked", '{"bytes": 2}')
            assert ow.metrics()["asked"].runs == count and calls
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_fork_while_another_thread_holds_the_lock() -> None:
    """A forked child can read its own counts, even if another thread held the lock during the fork."""
    counting.note("before", "null")
    holds, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with counting._lock:
            holds.set()
            go_on.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about threads during a fork
        child = os.fork()
    if not child:
        signal.alarm(10)
        counting.note("none", "null")
        os._exit(0 if ow.metrics()["none"].runs and "before" not in ow.metrics() else 1)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_missing_files_count_as_open_errors(tmp_path: Path) -> None:
    """If a load, a stream, safe_open, `inspect` or a bundle finds no file, this counts as one "open" error. Alternative
    names that are tried in order do not count."""
    errors = lambda: ow.metrics().get("open", ow.VerbMetrics()).errors.get("NotFoundError", 0)  # noqa: E731
    before = errors()
    for verb in (ow.load_file, ow.safe_open, ow.inspect, lambda path: list(ow.stream(path, framework="np"))):
        with pytest.raises(ow.NotFoundError):
            verb(tmp_path / "none.safetensors")
    assert errors() == before + 4
    ow.save_bundle([np.zeros(9)], tmp_path / "x.pkl")
    assert len(ow.load_bundle(tmp_path / "x.pkl")) == 1 and errors() == before + 4
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(ow.NotFoundError):
        ow.load_bundle(tmp_path / "x.pkl")
    assert errors() == before + 5


def test_cache_metrics(tmp_path: Path) -> None:
    """Objects and bytes are counted by where they came from: a store, the cache, or the cache while the store was
    offline. The Prometheus text contains the counts."""
    (tmp_path / "served").mkdir()
    size = ow.save_file({"a": np.ones((300, 300), "f4")}, tmp_path / "served" / "m.safetensors").bytes_out
    options = {"cache": str(tmp_path / "cache"), "retries": 0}
    before = ow.metrics().cache
    with processes.overwire_serve(tmp_path / "served") as address:
        uri = address.rstrip("/") + "/m.safetensors"
        for _ in range(3):
            ow.load_file(uri, framework="np", storage_options=options)
    ow.load_file(uri, framework="np", storage_options=options)  # the server has stopped
    after = ow.metrics().cache
    assert (after.fetches - before.fetches, after.fetch_bytes - before.fetch_bytes) == (1, size)
    assert (after.hits - before.hits, after.hit_bytes - before.hit_bytes) == (3, 3 * size)
    assert after.away - before.away == 1 and after.evictions == before.evictions
    text = ow.metrics().prometheus()
    samples = {
        (sample.name, sample.labels.get("origin")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "cache" in sample.name
    }
    assert samples["overwire_cache_objects_total", "cache"] == after.hits
    assert samples["overwire_cache_objects_total", "store"] == after.fetches
    assert samples["overwire_cache_bytes_total", "cache"] == after.hit_bytes
    assert samples["overwire_cache_bytes_total", "store"] == after.fetch_bytes
    assert samples["overwire_cache_away_total", None] == after.away


def test_prometheus(model: Path) -> None:
    """Prometheus' own parser can read the text, even with unusual characters in labels."""
    ow.load_file(model, framework="np")
    counting.note('od"d\\\n', "", "Error")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(ow.metrics().prometheus())
        for sample in family.samples
    }
    load = ow.metrics()["load"]
    assert samples["overwire_bytes_total", ("verb", "load")] == load.bytes
    assert samples["overwire_stage_seconds_total", ("stage", "decode"), ("verb", "load")] == load.stages["decode"]
    assert samples["overwire_errors_total", ("error", "Error"), ("verb", 'od"d\\\n')] >= 1


def test_spans(model: Path) -> None:
    """With OpenTelemetry, each call is a span inside the program's span, with its counters and errors."""
    from opentelemetry import trace  # imported only here, because every later call in the process makes a span
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with trace.get_tracer("test").start_as_current_span("start-up"):
        ow.load_file(model, framework="np")
    counting.note("verify", "", "CorruptError")
    load, whole, failed = exporter.get_finished_spans()
    assert load.name == "overwire.load" and load.parent.span_id == whole.context.span_id
    assert load.attributes["overwire.bytes"] == 512 * 512 * 4 + 12 and load.attributes["overwire.stages.decode_ns"] > 0
    assert whole.start_time <= load.start_time < load.end_time <= whole.end_time
    assert failed.attributes["error.type"] == "CorruptError" and failed.status.status_code is trace.StatusCode.ERROR


def test_json_logs(script: Callable[..., Any], model: Path) -> None:
    """OVERWIRE_LOG=json prints one object per line on stderr, with a load's counters."""
    done = script(
        f"import overwire as ow; ow.load_file({str(model)!r}, framework='np')", OVERWIRE_LOG="json", OVERWIRE_THREADS="many"
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    warning, load = lines
    assert warning["level"] == "warning" and "OVERWIRE_THREADS" in warning["message"] and "report" not in warning
    assert load["level"] == "info" and load["message"].startswith("loaded 2 tensors") and load["time"] > 1e9
    assert load["report"]["verb"] == "load" and load["report"]["bytes"] == 512 * 512 * 4 + 12 and load["report"]["stages"]["decode_ns"] > 0
