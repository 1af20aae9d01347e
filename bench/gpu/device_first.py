"""Compares the first and later loads of builds of overwire and of other loaders, in fresh processes.

    python bench/gpu/device_first.py --build new=python
    python bench/gpu/device_first.py --build old=/tmp/old/python --build new=python --rounds 7 --states
    python bench/gpu/device_first.py --build new=python --baseline /tmp/copyways --cores 16,8,4
    python bench/gpu/device_first.py --build new=python --baseline /tmp/copyways --gpus 2 --size 8GB
    python bench/gpu/device_first.py --build new=python --device cpu --size 50MB --state-size 3MB --dir /tmp    no GPU

--build: a name, and the folder of the package with its engine. Each load runs in a new fork of a process that has
imported torch, and rows run in random order. A fork imports its loader and creates the CUDA context, then loads the
file twice. A first load's time includes the modules that it imports. The time to import the loader itself has its own
column. In a round before the first one, the tensors of both loads are compared with the plain file, and nothing is
timed.

--baseline: a program compiled from copyways.cu, which only reads and copies. It runs once in each round. The table has
its best way of reading, and each row's share of it. For compressed rows, that rate is divided by the compression ratio.
--gpus: the number of GPUs. For each row, as many processes load at the same time, each its own files to its own GPU.
Rates count the bytes of all processes and the time of the slowest.

--states: what a first load of --state-size waits for. Each fork first does a part of the work: nothing, importing
load_file's module, starting the engine, a load of a few bytes to the host, preparing the GPU, or a load of a few bytes
to the GPU. --cores: the numbers of cores to run on, one after the other. Ctrl-C ends a part and reports what it has
measured. --out gets the results as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

COPYWAYS = "copyways"
WHICH = ("first", "later")
PEERS = "instanttensor,safetensors prefetch,fastsafetensors tuned,Run:ai model streamer"
STATES = ("nothing", "imported", "started", "host", "prepared", "gpu")


def run_in_forks(works: list[Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    """Runs each of `works` in a fork, all at the same time. Returns the largest value of each field of their results,
    or {"failed": the reason}."""
    children = []
    for work in works:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                text = json.dumps(work())
            except BaseException as error:  # a failing loader gets a row
                text = json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]})
            with os.fdopen(writer, "w") as pipe:
                pipe.write(text)
            os._exit(0)
        os.close(writer)
        children.append((child, reader))
    results: list[dict[str, Any]] = []
    for child, reader in children:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        results.append(json.loads(text or '{"failed": "the process ended early"}'))
    failed = [one for one in results if "failed" in one]
    return failed[0] if failed else {name: max(one[name] for one in results) for name in results[0]}


def loader_of(build: str, peer: str, device: str) -> tuple[Callable[[str], Any], float]:
    """Returns a function that loads a file, and the seconds to import the loader. First creates the CUDA context, then
    imports the loader as a program does."""
    sys.path.insert(0, build)
    if device != "cpu":
        torch = importlib.import_module("torch")
        torch.cuda.set_device(torch.empty(1, device=device).device)
    face = importlib.import_module("overwire._bench_faces")._FACES[peer] if peer else None
    began = time.perf_counter()
    module: Any = importlib.import_module(face.module if face else "overwire")
    seconds = time.perf_counter() - began
    if face:
        return lambda file: face.load(module, file, device), seconds
    return lambda file: module.load_file(file, device=device), seconds


def await_gpu(device: str) -> int:
    """Waits for the work of a GPU. Returns its free memory, or 0 for the host."""
    import torch

    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def load_twice(
    build: str, peer: str, file: Path, plain: Path | None, meet: Callable[[], object], device: str
) -> dict[str, Any]:
    """Loads a file twice. plain: compares the tensors with this file instead of timing the loads. meet: waits for the
    other processes that load at the same time."""
    load, importing = loader_of(build, peer, device)
    row: dict[str, Any] = {"import": importing}
    for which in WHICH:
        gc.collect()
        unused = await_gpu(device)
        meet()
        used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        tensors = load(str(file))
        left = await_gpu(device)
        row[which] = time.perf_counter() - began
        now = resource.getrusage(resource.RUSAGE_SELF)
        row[f"{which} cpu"] = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        if which == "first":
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            row["extra"] = unused - left - nbytes if left else 0
        if plain is not None:
            wrong = importlib.import_module("overwire._bench_saves").find_difference(tensors, plain)
            if wrong:
                return {"failed": f"WRONG bytes of the {which} load: {wrong}"}
        del tensors
    return row


def copy_file(program: str, file: Path, meet: Callable[[], object], device: str, gpus: int) -> dict[str, Any]:
    """Runs the baseline program. Returns the seconds of the first pass and of later ones, for each way of reading."""
    meet()
    threads = min(12, len(os.sched_getaffinity(0)) // gpus)
    command = [program, str(file), str(threads), device.partition(":")[2] or "0"]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        return {"failed": child.stderr[-300:]}
    ways: dict[str, list[float]] = json.loads(child.stdout)
    size = file.stat().st_size / 1e9
    return {f"{way} {which}": size / rates[at] for way, rates in ways.items() for at, which in enumerate(WHICH)}


def load_from(build: str, state: str, device: str, file: Path, tiny: Path) -> dict[str, Any]:
    """Times a first load after a part of its work was done."""
    load, _ = loader_of(build, "", device)
    overwire: Any = importlib.import_module("overwire")
    if state != "nothing":
        overwire.load_file  # noqa: B018  imports its module
    if state not in ("nothing", "imported"):
        importlib.import_module("overwire._engine").core()
    if state in ("host", "prepared", "gpu"):
        overwire.load_file(tiny)
    if state == "prepared" and device != "cpu":
        importlib.import_module("overwire._verbs").prepare(device, 0)
    if state == "gpu":
        load(str(tiny))
    time.sleep(0.1)
    began = time.perf_counter()
    tensors = load(str(file))
    await_gpu(device)
    seconds = time.perf_counter() - began
    del tensors
    return {"seconds": seconds}


def spread(values: list[float]) -> str:
    """Formats a median and the range."""
    return f"{statistics.median(values):7.1f} ({min(values):.1f} to {max(values):.1f})"


class Report:
    """Prints lines, and writes all results to a file after each row."""

    def __init__(self, out: str | None) -> None:
        self._out, self._rows = out, list[dict[str, Any]]()

    def add(self, text: str, **row: Any) -> None:
        """Prints a row and stores it."""
        print(text, flush=True)
        self._rows.append(row)
        if self._out:
            Path(self._out).write_text(json.dumps(self._rows, indent=1))


def run_row(args: argparse.Namespace, row: tuple[str, ...], files: dict[str, Path], compares: bool) -> dict[str, Any]:
    """Loads once on each GPU, all at the same time."""
    name, folder, peer, kind = row
    meet = partial(multiprocessing.get_context("fork").Barrier(args.gpus).wait, 60)
    works: list[Callable[[], dict[str, Any]]] = []
    for number in range(args.gpus):
        file, plain = (path_for(files[one], number) for one in (kind, "plain"))
        device = f"cuda:{number}" if args.gpus > 1 and args.device != "cpu" else args.device
        if name == COPYWAYS:
            works.append(partial(copy_file, folder, file, meet, device, args.gpus))
        else:
            works.append(partial(load_twice, folder, peer, file, plain if compares else None, meet, device))
    return run_in_forks(works)


def path_for(file: Path, number: int) -> Path:
    """Returns the copy of a file that is loaded to a GPU."""
    return Path(f"{file}-{number}") if number else file


def measure_loads(
    args: argparse.Namespace, report: Report, files: dict[str, Path], cores: int, seconds: float
) -> None:
    """Measures all builds and peers on some cores."""
    rows = [(name, folder, "", kind) for name, folder in args.builds.items() for kind in files]
    last = list(args.builds.values())[-1]
    rows += [(peer, last, peer, "plain") for peer in args.peers]
    if args.baseline:
        rows.append((COPYWAYS, args.baseline, "", "plain"))
    runs: dict[Any, list[dict[str, Any]]] = {row: [] for row in rows}
    failed, until = set(), time.monotonic() + seconds
    first_number = -1 if args.compares and cores == args.cores[0] else 0
    with contextlib.suppress(KeyboardInterrupt):  # the results so far are reported
        for number in range(first_number, max(args.rounds, args.peer_rounds)):
            for row in random.sample(rows, len(rows)) if time.monotonic() < until else ():
                rounds = args.peer_rounds if row[2] and row[2] != "instanttensor" else args.rounds
                if row in failed or number >= rounds or number < 0 and row[0] == COPYWAYS:
                    continue
                result = run_row(args, row, files, number < 0)
                if "failed" in result:
                    failed.add(row)
                    text = f"{cores:2} cores  {row[0]}, {row[3]}: {result['failed']}"
                    report.add(text, row=row, cores=cores, **result)
                elif number >= 0:
                    runs[row].append(result)
    show_loads(args, report, files, cores, {row: results for row, results in runs.items() if results})


def show_loads(
    args: argparse.Namespace, report: Report, files: dict[str, Path], cores: int, runs: dict[Any, list[dict[str, Any]]]
) -> None:
    """Prints the medians of all rows, and their shares of the baseline."""
    sizes = {kind: path.stat().st_size for kind, path in files.items()}
    nbytes, limit = args.gpus * sizes["plain"], 0.0

    def rates(results: list[dict[str, Any]], which: str) -> list[float]:
        return [nbytes / one[which] / 1e9 for one in results]

    for row in [row for row in runs if row[0] == COPYWAYS]:
        results = runs.pop(row)
        ways = {way: statistics.median(rates(results, way)) for way in results[0]}
        best = max((way for way in ways if way.endswith("later")), key=ways.__getitem__)
        limit = ways[best]
        every = ", ".join(f"{way} {rate:.1f}" for way, rate in ways.items())
        text = f"{cores:2} cores  baseline {limit:.1f} GB/s ({best}; {every})  n={len(results)}"
        report.add(text, name=COPYWAYS, cores=cores, runs=results)
    for row, results in runs.items():
        first, later = (rates(results, which) for which in WHICH)
        busy = statistics.median(one["later cpu"] for one in results)
        extra = statistics.median(one["extra"] for one in results) / 1e6
        text = f"{cores:2} cores  {row[0] + ', ' + row[3]:<40} first {spread(first)}  later {spread(later)} GB/s"
        if limit:
            most = limit * sizes["plain"] / sizes[row[3]]
            text += f"  {statistics.median(first) / most:.3f} / {statistics.median(later) / most:.3f} of the baseline"
        importing = 1e3 * statistics.median(one["import"] for one in results)
        text += f"  CPU {busy:.2f} s  {extra:.0f} MB extra  import {importing:.1f} ms  n={len(results)}"
        report.add(text, name=row[0], file=row[3], cores=cores, baseline=limit, runs=results)


def measure_states(args: argparse.Namespace, report: Report, file: Path, tiny: Path) -> None:
    """Measures first loads from each state."""
    rows = [(name, state) for name in args.builds for state in STATES]
    runs: dict[tuple[str, str], list[float]] = {row: [] for row in rows}
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(args.state_rounds):
            for name, state in random.sample(rows, len(rows)):
                result = run_in_forks([partial(load_from, args.builds[name], state, args.device, file, tiny)])
                if "failed" in result:
                    report.add(f"{name}, {state}: {result['failed']}", name=name, state=state, **result)
                else:
                    runs[name, state].append(1e3 * result["seconds"])
    for (name, state), values in runs.items():
        if values:
            report.add(f"state {name + ', ' + state:<24} {spread(values)} ms", name=name, state=state, ms=values)


def make_files(args: argparse.Namespace, folder: Path) -> None:
    """Writes the files with the last build."""
    env = {**os.environ, "PYTHONPATH": list(args.builds.values())[-1]}

    def run(*words: str) -> None:
        command = [sys.executable, "-m", "overwire", *words]
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)

    for name, size in (("plain", args.size), ("small", args.state_size), ("tiny", "1MB")):
        if not (folder / name).exists():
            run("bench", "gen", "llama-bf16", "--size", size, str(folder / name))
    if not (folder / "compressed").exists():
        run("compress", str(folder / "plain"), "-o", str(folder / "compressed"))
    for number in range(1, args.gpus):
        for kind in ("plain", "compressed"):
            shutil.copyfile(folder / kind, path_for(folder / kind, number))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", required=True, help="NAME=FOLDER of a package")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", default="16GB")
    parser.add_argument("--state-size", default="2GB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-rounds", type=int, default=3, help="rounds of peers other than InstantTensor")
    parser.add_argument("--state-rounds", type=int, default=5)
    parser.add_argument("--baseline", default="", help="a program compiled from copyways.cu")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs to load to at the same time")
    parser.add_argument("--seconds", default="", help="time for the rounds of each number of cores (default: no limit)")
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--cores", default=str(len(os.sched_getaffinity(0))))
    parser.add_argument("--compares", type=int, default=1, help="0: does not compare bytes")
    parser.add_argument("--dir", default="/dev/shm", help="where the files are written")
    parser.add_argument("--keep", help="a folder for the files, which is kept and reused")
    parser.add_argument("--out", help="a file for the results")
    args = parser.parse_args(words)
    args.builds = dict(one.split("=", 1) for one in args.build)
    args.builds = {name: str(Path(folder).resolve()) for name, folder in args.builds.items()}
    args.peers = [peer for peer in args.peers.split(",") if peer]
    args.cores = [int(count) for count in args.cores.split(",")]
    args.seconds = [float(one) for one in args.seconds.split(",") if one] or [1e9] * len(args.cores)
    import torch  # noqa: F401  imported once, before the forks

    sys.dont_write_bytecode = False
    for folder in args.builds.values():
        subprocess.run([sys.executable, "-m", "compileall", "-q", f"{folder}/overwire"], check=False)
    report = Report(args.out)
    with tempfile.TemporaryDirectory(prefix="overwire-first-", dir=args.dir) as temporary:
        folder = Path(args.keep or temporary)
        folder.mkdir(exist_ok=True)
        make_files(args, folder)
        files = {kind: folder / kind for kind in ("plain", "compressed")}
        ratio = files["compressed"].stat().st_size / files["plain"].stat().st_size
        report.add(f"plain {files['plain'].stat().st_size} bytes, compressed to {ratio:.4f}", ratio=ratio)
        every = sorted(os.sched_getaffinity(0))
        for cores, seconds in zip(args.cores, args.seconds, strict=True):
            os.sched_setaffinity(0, every[:cores])
            measure_loads(args, report, files, cores, seconds)
        os.sched_setaffinity(0, every)
        if args.states:
            measure_states(args, report, folder / "small", folder / "tiny")


if __name__ == "__main__":
    main(sys.argv[1:])
