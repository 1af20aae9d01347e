"""Measures the cost of calls between Python and the engine: python bench/bench_binding.py

Prints figures and asserts nothing about time. A file of 18,867 tensors of 1 KB (as many as in a mixture-of-experts
checkpoint) is opened, listed, loaded and exported.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "process"))

import engine_calls as e
from process_helper import write_plain

COUNT, SIZE = 18_867, 1024


def best(
    times: int, prepare: Callable[[], Any], act: Callable[[Any], Any], after: Callable[[Any, Any], None]
) -> tuple[float, float]:
    """Returns the smallest and the median seconds of several runs of act."""
    took = []
    for _ in range(times):
        given = prepare()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        made = act(given)
        took.append(time.perf_counter() - start)
        gc.enable()
        after(given, made)
    return min(took), statistics.median(took)


def show(what: str, took: tuple[float, float], each: int = COUNT) -> None:
    print(f"{what:<44} {took[0] / each * 1e9:9.0f} ns, median {took[1] / each * 1e9:9.0f} ns")


def main() -> None:
    start = time.perf_counter()
    e.knobs()
    print(f"{'first call: the library, Go and its settings':<44} {(time.perf_counter() - start) * 1e3:9.1f} ms")
    with tempfile.TemporaryDirectory() as t:
        path = write_plain(f"{t}/many.safetensors", {f"layers.{i}.weight": ("U8", [SIZE], bytes(SIZE)) for i in range(COUNT)})
        spec = json.dumps({"uris": [path], "map": False})

        def loaded(_: Any = None) -> int:
            job = e.load_start(model, None, "{}")
            e.job_wait(job, None)
            return job

        def free(job: int, *_: Any) -> None:
            e.job_free(job)

        n = 2000
        model = e.open_model(spec)
        show("a verb with a result (progress), of 2000", calls(n, e.job_progress, job := loaded()), n)
        show("a wait for an ended job", calls(n, e.job_wait, job, 0), n)
        free(job)
        print(f"a tensor, of {COUNT}:")
        show("  open_model: headers and index", best(7, lambda: None, lambda _: e.open_model(spec), lambda _, h: e.close_model(h)))
        show("  model_table", best(7, lambda: model, e.model_table, lambda *_: None))
        show("  load, in all, without exporting", best(7, lambda: None, loaded, lambda _, job: free(job)))
        show("  job_take: structure, capsule, tuple", best(7, loaded, e.job_take, free))
        dropping: list[Any] = []

        def drop(_: Any) -> None:
            dropping.clear()

        def taken() -> int:
            job = loaded()
            dropping.extend(e.job_take(job))
            return job

        show("  dropping them", best(7, taken, drop, free))


def calls(n: int, function: Callable[..., Any], *args: Any) -> tuple[float, float]:
    def many(_: Any) -> None:
        for _ in range(n):
            function(*args)

    return best(7, lambda: None, many, lambda *_: None)


if __name__ == "__main__":
    main()
