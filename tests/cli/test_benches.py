"""Tests the programs in bench on the CPU.

bench/gpu/device_run.sh prints the same rows for a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import overwire as ow
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import bench_start  # noqa: E402
import bench_tensorizer  # noqa: E402

torch = pytest.importorskip("torch")


@pytest.mark.slow
def test_links_have_rows_next_to_their_limits(tmp_path: Path) -> None:
    """Every simulated link and the plain loopback have rows for both kinds of file, and no temporary file is left."""
    command = [sys.executable, ROOT / "bench/bench_net.py", "--size", "8MB", "--repeat", "1", "--json"]
    done = subprocess.run([*command, "--dir", tmp_path], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 11
    assert all(row["value"] > 0 and row["floor"] > 0 for row in rows)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["plain", "crc32", "key"])
def test_the_benchmark_of_tensorizer_files(tmp_path: Path, how: str) -> None:
    """Loads of a .tensors file by overwire and by tensorizer are each timed twice. A wrong byte ends the program."""
    pytest.importorskip("tensorizer")
    tensors = {"a": torch.randn(300, 400).bfloat16(), "b": torch.arange(7), "c": torch.tensor(2.5)}
    path = str(tmp_path / "m.tensors")
    bench_tensorizer.write(bench_tensorizer.module_of("ours"), tensors, path, how)
    for side in bench_tensorizer.SIDES if how != "crc32" else ("ours",):
        loaded = dict(bench_tensorizer.open_file(bench_tensorizer.module_of(side), path, how, "cpu").items())
        bench_tensorizer.compare(tensors, loaded, path)
        with pytest.raises(SystemExit, match="'b' did not come back"):
            bench_tensorizer.compare({**tensors, "b": torch.arange(1, 8)}, loaded, path)
        assert all(seconds > 0 for seconds in bench_tensorizer.measure_one("read", side, path, how, "cpu", ""))


def test_the_memory_figure_excludes_the_tensors(tmp_path: Path) -> None:
    """The memory figure excludes the tensors. The kernel's counters may lag by a few pages per thread and core, so the
    tensors are much larger than that."""
    file = tmp_path / "large.safetensors"
    ow.save_file({"a": torch.randint(0, 255, (64 << 20,), dtype=torch.uint8)}, file, compress=False)
    row = bench_start.measure_memory("", str(file), "cpu")
    # The rest is the ring and other allocations of the process.
    assert -16 <= row["host memory besides the tensors, MiB"] < 200


def test_starts_count_from_the_start_of_the_process(tmp_path: Path) -> None:
    """The first tensor arrives before the last, and both times include the time before the load."""
    ow.save_file({"a": torch.ones(5), "b": torch.ones(7)}, tmp_path / "m.safetensors")
    words = ["first", str(time.time_ns() - 10**10), str(tmp_path / "m.safetensors"), "cpu"]
    row = json.loads(bench_start.run_python(bench_start.__file__, "--one", *words))
    assert 10 < row["first tensor loaded, no torch, s"] <= row["all loaded, no torch, s"] < 100


def test_codecs_have_rows_or_a_reason() -> None:
    """Without a GPU, the codec benchmark says so. With a GPU, X16 makes weights smaller."""
    command = [sys.executable, ROOT / "bench/bench_codecs.py", "--json", "--size", "64MiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.get("missing") or all(0.6 < row["ratio"] < 0.75 for row in report["rows"] if "X16" in row["what"])


def test_parts_of_a_start_on_old_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12, only the whole start is measured. It is not reported as the time to load the weights."""
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "gpu"))
    import device_starts

    assert device_starts.parts_of({"whole": 3.0}) == {"whole": 3.0}
    assert device_starts.parts_of({"whole": 3.0, "own weights": 1.0}) == {"whole": 3.0, "weights": 1.0}
    assert device_starts.parts_of({"whole": 3.0, "own weights": 1.0, "weights": 2.0}) == {"whole": 3.0, "weights": 2.0}
