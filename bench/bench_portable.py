"""Measures how fast the reader without the engine reads compressed bf16 weights on one core, for docs/portable.md.

    taskset -c 0 python bench/bench_portable.py [MB]

Prints MB/s of tensors for each of five runs, by wall time and by processor time, next to the rate at which numpy copies
them. The bytes are first compared with the engine's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import overwire as ow
from overwire._engine import cli
from overwire.portable import read


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    with tempfile.TemporaryDirectory() as folder:
        plain, path = Path(folder) / "m.safetensors", Path(folder) / "m.ow.safetensors"
        assert cli(["bench", "gen", "llama-bf16", str(plain), "--size", f"{size}MB"]) == 0
        ow.convert(plain, path)
        weights = ow.load_file(plain, framework="bytes")
        with read.safe_open(path, "bytes") as file:
            assert all(bytes(data) == bytes(weights[name]) for name, data in file.tensors())
        nbytes = sum(len(data) for data in weights.values())
        for _ in range(5):
            clock, own = time.perf_counter(), time.process_time()
            with read.safe_open(path, "bytes") as file:
                for _name, _data in file.tensors():
                    pass
            clock, own = time.perf_counter() - clock, time.process_time() - own
            start = time.perf_counter()
            for data in weights.values():
                bytearray(data)
            copy = time.perf_counter() - start
            print(f"{nbytes / clock / 1e6:.0f} MB/s, {nbytes / own / 1e6:.0f} by process time; copied at {nbytes / copy / 1e6:.0f}")


if __name__ == "__main__":
    main()
