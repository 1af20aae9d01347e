"""Measures loads from the host store against files and InstantTensor, and sleep in the store. bench/gpu/device_host.sh
runs all parts on one GPU or on two.

    PYTHONPATH=python python bench/gpu/device_host.py PART --work FOLDER [--size 16] [--rounds 3] [--device cuda]
        [--disk FOLDER]

--work is a folder in memory, such as one in /dev/shm. --size is the GB of bf16 weights. The parts are:

files   generates p.safetensors (plain) and c.safetensors (compressed) in --work for other parts.
packed  loads c.safetensors from the store and as a file, and p.safetensors as a file and with InstantTensor. The limit
        is the PCIe link, divided by the stored size. "attach" is the time from safe_open to the bytes of the smallest
        tensor, in one process.
plain   loads p.safetensors from the store, as a file and with InstantTensor. The store does not accept plain files in
        memory, because their times of change do not show every change. So the store gets a copy in --disk, and the
        loads of the file read --work.
sleep   times sleep and wake of a Llama in two processes, with the store and, in the first process, without it. The
        second process must not need more memory.
ten     puts ten models of a fortieth of --size into the store, and prints the size of the store.
two     loads c.safetensors and a copy of it from the store to two GPUs at the same time.

Each load runs in a new process, which has imported torch and used the device before the clock starts. The kinds
alternate. All loads of a model must have the same digests. The exit status is 1 if they differ, if a load from the
store missed it, if another load used it, or if the second process needs memory. Loads begin when the store has moved
its entries to huge pages.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import overwire as ow
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from device_sleep import floors, llama

SETTLED = 3.1  # seconds after which the store accepts a plain file
GOALS = {"share of the link": 0.9, "GB/s": 65, "times InstantTensor": 1.5, "two GPUs, GB/s": 150}


def run_forked(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Starts a call in a new process, and returns a function that waits for its result."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                json.dump(call(*args), out)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    os.close(writer)

    def wait() -> Any:
        with os.fdopen(reader) as result:
            text = result.read()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{call.__name__} failed")
        return json.loads(text)

    return wait


def overwire(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "overwire", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"overwire {' '.join(words)}: {done.stderr}")
    return done.stdout


@contextlib.contextmanager
def running_store(work: Path) -> Iterator[None]:
    """Runs a store, which OVERWIRE_HOST names."""
    os.environ["OVERWIRE_HOST"] = str(work / "socket")
    store = subprocess.Popen([sys.executable, "-m", "overwire", "host", "--budget", "1TB"], stdout=subprocess.PIPE)
    try:
        assert store.stdout is not None
        store.stdout.readline()
        yield
    finally:
        store.terminate()
        store.wait()


def used() -> int:
    return int(json.loads(overwire("host", "list", "--json"))["used"])


def huge_pages() -> int:
    """Returns the bytes of memfds and files in memory that are in huge pages."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows.get("ShmemHugePages", "0").split()[0]) << 10


def put(*paths: Path) -> None:
    """Puts files into the store, and waits until it has moved them to huge pages."""
    begun, before = time.perf_counter(), huge_pages()
    overwire("host", "put", *map(str, paths))
    took, size = time.perf_counter() - begun, sum(path.stat().st_size for path in paths)
    print(f"put: {size / 1e9:.2f} GB in {took:.2f} s, {size / took / 1e9:.1f} GB/s", flush=True)
    moved, end = -1, time.monotonic() + 25
    while moved < (moved := huge_pages() - before) < 0.99 * size and time.monotonic() < end:
        time.sleep(1.5)
    print(f"huge pages: {moved / 1e9:.2f} GB after {time.perf_counter() - begun - took:.1f} s more", flush=True)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def load(kind: str, path: str, device: str) -> dict[str, Any]:
    """Loads a file twice, and returns the seconds of both loads."""
    torch.ones(1, device=device)
    synchronize(device)
    seconds = []
    for _ in range(2):
        tensors: dict[str, torch.Tensor] = {}
        if kind == "instanttensor":
            import instanttensor

            begun = time.perf_counter()
            with instanttensor.safe_open(path, framework="pt", device=torch.cuda.current_device()) as file:
                tensors = dict(file.tensors())
        else:
            begun = time.perf_counter()
            tensors = ow.load_file(path, device=device, host=kind == "store")
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return {
        "seconds": seconds, "bytes": sum(one.nbytes for one in tensors.values()), "hits": ow.metrics().host.hits,
        "digest": str(sorted(ow.digest(tensors).items())),
    }  # fmt: skip


def imports(module: str) -> bool:
    with contextlib.suppress(ImportError, OSError):
        return bool(importlib.import_module(module))
    return False


def link(nbytes: int, device: str) -> float:
    """Returns the bytes per second of a copy from pinned memory."""
    return nbytes / floors(nbytes, device)["up"]


def compare(loads: list[tuple[str, Path]], device: str, rounds: int) -> int:
    """Prints the rates of loads in alternating processes, and returns 1 if a load is wrong."""
    if device == "cpu" or not run_forked(imports, "instanttensor")():
        loads = [(kind, path) for kind, path in loads if kind != "instanttensor"]
        print("InstantTensor is not measured")
    limit = 0.0 if device == "cpu" else run_forked(link, 4 << 30, device)()
    results: list[list[dict[str, Any]]] = [[] for _ in loads]
    for _ in range(rounds):
        for (kind, path), done in zip(loads, results, strict=True):
            done.append(run_forked(load, kind, str(path), device)())
    rates = {}
    for (kind, path), done in zip(loads, results, strict=True):
        size = done[0]["bytes"]
        first, second = (size / statistics.median(one["seconds"][at] for one in done) / 1e9 for at in (0, 1))
        rates[kind, path.name] = second
        line = f"{path.name} from {kind}: {first:.1f} and {second:.1f} GB/s of tensors"
        if limit:
            most = limit * size / path.stat().st_size / 1e9
            line += f"; limit {most:.1f}, shares {first / most:.3f} and {second / most:.3f}"
        print(line, flush=True)
    if instant := rates.get(("instanttensor", "p.safetensors")):
        print(", ".join(f"{kind} {name}: {rate / instant:.2f} x InstantTensor" for (kind, name), rate in rates.items()))
    print(f"goals for compressed loads from the store: {GOALS}")
    wrong = len({one["digest"] for done in results for one in done}) - 1
    wrong += sum(
        one["hits"] != 2 * (kind == "store") for (kind, _), done in zip(loads, results, strict=True) for one in done
    )
    if wrong:
        print(f"WRONG: {wrong} loads differ, missed the store, or used it by mistake")
    return int(wrong > 0)


def attach(path: str, device: str) -> dict[str, float]:
    """Returns the milliseconds from safe_open to the bytes of the smallest tensor."""
    torch.ones(1, device=device)
    synchronize(device)
    times = []
    for host in (True, False) * 21:
        begun = time.perf_counter()
        with ow.safe_open(path, framework="pt", device=device, host=host) as file:
            file.get_tensor(min(file.keys(), key=lambda name: file.get_slice(name).get_shape()))
            synchronize(device)
        times.append((time.perf_counter() - begun) * 1e3)
    return {"first": times[0], "store": statistics.median(times[2::2]), "file": statistics.median(times[3::2])}


def do_files(asked: argparse.Namespace) -> int:
    plain, packed = (asked.work / name for name in ("p.safetensors", "c.safetensors"))
    begun = time.perf_counter()
    overwire("bench", "gen", "llama-bf16", str(plain), "--size", f"{asked.size}GB", "-f")
    print(f"generated in {time.perf_counter() - begun:.1f} s", flush=True)
    overwire("compress", str(plain), "-o", str(packed), "-q", "-f")
    ratio = packed.stat().st_size / plain.stat().st_size
    print(f"compressed after {time.perf_counter() - begun:.1f} s to {ratio:.4f}", flush=True)
    return 0


def do_packed(asked: argparse.Namespace) -> int:
    plain, packed = asked.work / "p.safetensors", asked.work / "c.safetensors"
    with running_store(asked.work):
        put(packed)
        for device in dict.fromkeys(("cpu", asked.device)):
            times = run_forked(attach, str(packed), device)()
            print(f"attach to {device}, ms: " + ", ".join(f"{name} {value:.2f}" for name, value in times.items()))
        loads = [("store", packed), ("file", packed), ("instanttensor", plain), ("file", plain)]
        return compare(loads, asked.device, asked.rounds)


def do_plain(asked: argparse.Namespace) -> int:
    plain, copy = asked.work / "p.safetensors", asked.disk / "p.safetensors"
    try:
        with running_store(asked.work):
            shutil.copyfile(plain, copy)
            time.sleep(SETTLED)
            put(copy)
            return compare([("store", copy), ("file", plain), ("instanttensor", plain)], asked.device, asked.rounds)
    finally:
        copy.unlink(missing_ok=True)


def sleep(size: float, device: str, is_first: bool) -> dict[str, Any]:
    """Sleeps in the store, and in the first process also without it. Returns medians of times."""
    tensors = llama(size, device)
    digests = ow.digest(tensors)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        synchronize(device)
        begun = time.perf_counter()
        result = call()
        synchronize(device)
        times.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    timed("put", lambda: ow.prepare_sleep(tensors, host=True).wait())
    stored = shared = 0
    for host, end in ((True, ""), (False, " without"))[: 1 + is_first] * 4:
        asleep = timed("sleep" + end, lambda host=host: ow.sleep(tensors, host=host))  # type: ignore[misc]
        if host:
            stored, shared = asleep.stored, asleep.shared
        timed("wake" + end, asleep.wake)
        if ow.digest(tensors) != digests:
            sys.exit("WRONG BYTES")
    medians = {name: statistics.median(all_of[1:] or all_of) for name, all_of in times.items()}
    return {"times": medians, "stored": stored, "shared": shared}


def do_sleep(asked: argparse.Namespace) -> int:
    sizes = []
    with running_store(asked.work):
        for engine in ("first", "second"):
            result = run_forked(sleep, asked.size, asked.device, engine == "first")()
            sizes.append(used())
            times = ", ".join(f"{name} {value:.3f} s" for name, value in result["times"].items())
            print(f"{engine} process: {times}; {result['stored'] / 1e9:.2f} GB of its own memory, "
                  f"{result['shared'] / 1e9:.2f} GB of the store", flush=True)  # fmt: skip
            if result["stored"]:
                print("WRONG: a sleep needs memory of its process")
                return 1
    if sizes[0] != sizes[1]:
        print(f"WRONG: the second process needs memory: {sizes}")
        return 1
    return 0


def do_ten(asked: argparse.Namespace) -> int:
    plain, packed, total = asked.work / "one.safetensors", [], 0
    for seed in range(10):
        overwire("bench", "gen", "llama-bf16", str(plain), "--size", f"{asked.size / 40}GB", "--seed", str(seed), "-f")
        packed.append(asked.work / f"ten-{seed}.safetensors")
        overwire("compress", str(plain), "-o", str(packed[-1]), "-q", "-f")
        total += plain.stat().st_size
    with running_store(asked.work):
        put(*packed)
        ratio = used() / total
    for path in (plain, *packed):
        path.unlink()
    print(
        f"ten models of {total / 1e10:.2f} GB take {ratio:.4f} of their size; "
        f"ten of 16 GB would take {160 * ratio:.0f} GB"
    )
    return 0


def load_when_asked(path: str, device: str, gates: list[tuple[int, int]], at: int) -> dict[str, Any]:
    """Loads a file each time that a byte comes through a gate. Returns when each load begins and ends."""
    for _, writer in gates:
        os.close(writer)
    torch.ones(1, device=device)
    synchronize(device)
    spans, digest = [], ""
    while os.read(gates[at][0], 1):
        begun = time.monotonic()
        tensors = ow.load_file(path, device=device, host=True)
        synchronize(device)
        spans.append([begun, time.monotonic()])
        digest = str(sorted(ow.digest(tensors).items()))
        del tensors
    return {"spans": spans, "digest": digest, "hits": ow.metrics().host.hits}


def do_two(asked: argparse.Namespace) -> int:
    first, second = (asked.work / name for name in ("c.safetensors", "c2.safetensors"))
    shutil.copyfile(first, second)
    with running_store(asked.work):
        put(first, second)
        gates = [os.pipe(), os.pipe()]
        waits = []
        for at, path in enumerate((first, second)):
            device = asked.device if asked.device == "cpu" else f"{asked.device}:{at}"
            waits.append(run_forked(load_when_asked, str(path), device, gates, at))
        time.sleep(8)  # until both have used their GPUs
        for _ in range(asked.rounds + 1):
            for _, writer in gates:
                os.write(writer, b"x")
            time.sleep(2)
        for _, writer in gates:
            os.close(writer)
        results = [wait() for wait in waits]
    second.unlink()
    size = 2 * (asked.work / "p.safetensors").stat().st_size
    for at, both in enumerate(zip(*(one["spans"] for one in results), strict=True)):
        took = max(end for _, end in both) - min(begun for begun, _ in both)
        parts = ", ".join(f"{end - begun:.3f}" for begun, end in both)
        print(
            f"load {at + 1} of two models to two GPUs: {took:.3f} s, {size / took / 1e9:.1f} GB/s in total ({parts} s)"
        )
    print(f"goals: {GOALS}")
    if len({one["digest"] for one in results}) > 1 or any(one["hits"] != asked.rounds + 1 for one in results):
        print("WRONG: the loads differ, or missed the store")
        return 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("files", "packed", "plain", "sleep", "ten", "two"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--disk", type=Path, default=Path("/tmp"))
    parser.add_argument("--size", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    os.environ.pop("OVERWIRE_HOST", None)
    sys.exit(globals()[f"do_{asked.part}"](asked))


if __name__ == "__main__":
    main()
