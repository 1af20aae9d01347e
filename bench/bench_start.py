"""Measures the time before a load's first byte, and a load's memory, in fresh processes that alternate.

    python bench/bench_start.py [--size 2GB] [--repeat 5] [--dir /dev/shm] [--device cuda]

import: the time that `import overwire` adds to a bare interpreter. first: from the start of the process to the first
tensor and to all of them, without torch. preload: from the start of the process until tensors that were loaded during
`import torch` are usable in torch, compared with only the import. memory: the peak in addition to the tensors, on the
host and on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


def seconds_since(began: str) -> float:
    return (time.time_ns() - int(began)) / 1e9


def load_alone(began: str, file: str, device: str) -> dict[str, float]:
    """Loads with the engine, without torch."""
    import overwire

    running = overwire.preload([file], device=device)
    while running.progress().tensors == 0 and not running.wait(0.0005):
        pass
    first = seconds_since(began)
    running.wait()
    assert "torch" not in sys.modules
    return {"first tensor loaded, no torch, s": first, "all loaded, no torch, s": seconds_since(began)}


def load_ahead(began: str, file: str, device: str) -> dict[str, float]:
    """Begins a load before torch is imported, and uses the tensors in torch."""
    import overwire

    overwire.preload([file], device=device)
    import torch

    imported = seconds_since(began)
    tensors = overwire.load_file(file, device=device)
    if device != "cpu":
        torch.cuda.synchronize(device)
    next(iter(tensors.values())).reshape(-1)[0].item()
    usable = seconds_since(began)
    return {"usable in torch, preloaded, s": usable, "of it after torch's import, s": usable - imported}


def import_torch(began: str, *_: str) -> dict[str, float]:
    import torch  # noqa: F401

    return {"import only torch, s": seconds_since(began)}


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure_memory(_: str, file: str, device: str) -> dict[str, float]:
    """Samples the GPU's memory while a load runs, and reads the host's high-water mark from the system."""
    import overwire
    import torch

    def used() -> int:
        if device == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)

    overwire.load_file  # noqa: B018  # imports its module first
    if device != "cpu":
        torch.zeros(1, device=device)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    host, before = status_bytes("VmRSS"), used()
    peak, ended = before, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.is_set():
            peak = max(peak, used())
            time.sleep(0.0005)

    sampler = threading.Thread(target=sample)
    sampler.start()
    tensors = overwire.load_file(file, device=device, mmap=False)
    if device != "cpu":
        torch.cuda.synchronize(device)
    ended.set()
    sampler.join()
    size = sum(tensor.nbytes for tensor in tensors.values())
    row = {"host memory besides the tensors, MiB": status_bytes("VmHWM") - host - (size if device == "cpu" else 0)}
    if device != "cpu":
        row["device memory besides the tensors, MiB"] = max(peak, used()) - before - size
        row["pinned host memory, MiB"] = (overwire.last_report() or {})["stages"]["ring_bytes"]
    return {name: value / 2**20 for name, value in row.items()}


ROWS = {"first": load_alone, "preload": load_ahead, "torch": import_torch, "memory": measure_memory}


def run_python(*words: str) -> str:
    return subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def time_imports(repeat: int) -> None:
    """Prints the time that `import overwire` adds to a bare interpreter, in alternating runs."""
    seconds: dict[str, list[float]] = {"pass": [], "import overwire": []}
    for number in range(3 * repeat + 1):
        for code, times in seconds.items():
            start = time.perf_counter()
            run_python("-c", code)
            if number:  # the first run reads Python's files into memory
                times.append(time.perf_counter() - start)
    bare, ours = (statistics.median(times) for times in seconds.values())
    code = "import os, sys, overwire; print(len(os.listdir('/proc/self/task')), {'torch', 'numpy'} & set(sys.modules))"
    seen = run_python("-c", code)
    threads, modules = seen.split(None, 1)
    beside = f"a bare interpreter {1e3 * bare:.2f}; threads: {threads}, {modules.strip()}"
    print(f"{'import overwire, ms':<42} {1e3 * (ours - bare):9.2f}  {beside}")


def main(words: list[str]) -> None:
    if words[:1] == ["--one"]:
        print(json.dumps(ROWS[words[1]](str(words[2]), *words[3:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GB", help="bytes of the tensors, generated bf16, compressed")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dir", help="folder for temporary files")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(words)
    device = "cuda:0" if args.device == "cuda" else args.device
    time_imports(args.repeat)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        plain, file = f"{folder}/plain", f"{folder}/m.safetensors"
        run_python("-m", "overwire", "bench", "gen", "llama-bf16", "--size", args.size, plain)
        run_python("-m", "overwire", "compress", plain, "-o", file)
        Path(plain).unlink()
        values: dict[str, list[Any]] = {}
        for number in range(args.repeat + 1):
            for row in ROWS:
                result = json.loads(run_python(__file__, "--one", row, str(time.time_ns()), file, device))
                for name, value in result.items():
                    values.setdefault(name, []).extend([value] if number else [])
    for name, runs in values.items():
        print(f"{name:<42} {statistics.median(runs):9.3f}  {min(runs):.3f} to {max(runs):.3f} in {len(runs)}")


if __name__ == "__main__":
    main(sys.argv[1:])
