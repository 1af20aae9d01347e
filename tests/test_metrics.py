"""metrics, their Prometheus text, spans of OpenTelemetry, and JSON logs."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
from overwire import metering


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    ow.save_file({"a": np.random.default_rng(1).normal(0, 0.02, (512, 512)).astype("f4"), "b": np.zeros(3, "f4")}, path)
    return path


def test_what_verbs_did_is_added_up(model: Path, tmp_path: Path) -> None:
    """Runs, tensors, bytes, seconds and stages of each verb, and errors by their class; also of threads, and of more than are kept."""
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
    assert after.seconds > before.seconds and set(after.stages) <= set(metering._STAGES) and after.stages["decode"] > 0
    threads = [
        threading.Thread(target=lambda: [metering.note("none", '{"bytes": 2, "seconds": 0.5}') for _ in range(300)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metering.note("none", "null")
    one = ow.metrics()["none"]
    assert (one.runs, one.bytes, one.seconds) == (1201, 2400, 600.0) and len(metering._noted) == 0
    one.errors["x"] = 1
    assert not ow.metrics()["none"].errors  # a copy is given


def test_a_fork_while_another_thread_counts() -> None:
    """The child can ask what was done; no lock of another thread stays."""
    holds, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with metering._lock:
            holds.set()
            go_on.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads beside a fork
        child = os.fork()
    if not child:
        signal.alarm(10)
        metering.note("none", "null")
        os._exit(0 if ow.metrics()["none"].runs else 1)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_prometheus(model: Path) -> None:
    """Its text is read by Prometheus' own parser, labels with odd characters too."""
    parser = pytest.importorskip("prometheus_client.parser")
    ow.load_file(model, framework="np")
    metering.note('od"d\\\n', "", "Error")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(ow.metrics().prometheus())
        for sample in family.samples
    }
    load = ow.metrics()["load"]
    assert samples["overwire_bytes_total", ("verb", "load")] == load.bytes
    assert samples["overwire_stage_seconds_total", ("stage", "decode"), ("verb", "load")] == load.stages["decode"]
    assert samples["overwire_errors_total", ("error", "Error"), ("verb", 'od"d\\\n')] >= 1


def test_spans(model: Path) -> None:
    """Where the program has OpenTelemetry each verb is a span below the program's own, with its counters; errors say so."""
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    exporting = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = exporting.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with trace.get_tracer("test").start_as_current_span("start-up"):
        ow.load_file(model, framework="np")
    metering.note("verify", "", "CorruptError")
    load, whole, failed = exporter.get_finished_spans()
    assert load.name == "overwire.load" and load.parent.span_id == whole.context.span_id
    assert load.attributes["overwire.bytes"] == 512 * 512 * 4 + 12 and load.attributes["overwire.stages.decode_ns"] > 0
    assert whole.start_time <= load.start_time < load.end_time <= whole.end_time
    assert failed.attributes["error.type"] == "CorruptError" and failed.status.status_code is trace.StatusCode.ERROR


def test_json_logs(script: Callable[..., Any], model: Path) -> None:
    """OVERWIRE_LOG=json has one object a line on stderr, with a load's counters."""
    done = script(
        f"import overwire as ow; ow.load_file({str(model)!r}, framework='np')", OVERWIRE_LOG="json", OVERWIRE_THREADS="many"
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    warning, load = lines
    assert warning["level"] == "warning" and "OVERWIRE_THREADS" in warning["message"] and "report" not in warning
    assert load["level"] == "info" and load["message"].startswith("loaded 2 tensors") and load["time"] > 1e9
    assert load["report"]["verb"] == "load" and load["report"]["bytes"] == 512 * 512 * 4 + 12 and load["report"]["stages"]["decode_ns"] > 0
