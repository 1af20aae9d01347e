"""Compares the first and later loads of builds of overwire and of other loaders, in fresh processes.

    python bench/gpu/device_first.py --build new=python
    python bench/gpu/device_first.py --build old=/tmp/old/python --build new=python --rounds 7 --states
    python bench/gpu/device_first.py --build new=python --device cpu --size 50MB --state-size 3MB --dir /tmp    no GPU

--build: a name, and the folder of the package with its engine. Each load runs in a new fork of a process that has
imported torch, and rows run in random order. A fork imports its loader and creates the CUDA context, then loads the
file twice. Modules that the first call imports are part of its time. In a round before the first one, the tensors of
both loads are compared with the plain file, and nothing is timed.

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
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PEERS = "instanttensor,safetensors prefetch,fastsafetensors tuned,Run:ai model streamer"
STATES = ("nothing", "imported", "started", "host", "prepared", "gpu")


def run_in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs `work` in a fork and returns its result, or {"failed": the reason}."""
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
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(text or '{"failed": "the process ended early"}')
    return result


def loader_of(build: str, peer: str, device: str) -> Callable[[str], Any]:
    """Returns a function that loads a file. Imports the loader as a program does, and creates the CUDA context."""
    sys.path.insert(0, build)
    if device != "cpu":
        importlib.import_module("torch").empty(1, device=device)
    if not peer:
        overwire = importlib.import_module("overwire")
        return lambda file: overwire.load_file(file, device=device)
    face = importlib.import_module("overwire._bench_faces")._FACES[peer]
    module = importlib.import_module(face.module)
    return lambda file: face.load(module, file, device)


def await_gpu(device: str) -> int:
    """Waits for the work of a GPU. Returns its free memory, or 0 for the host."""
    import torch

    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def load_twice(build: str, peer: str, device: str, file: Path, plain: Path | None) -> dict[str, Any]:
    """Loads a file twice. plain: compares the tensors with this file instead of timing the loads."""
    load = loader_of(build, peer, device)
    row: dict[str, Any] = {}
    for which in ("first", "later"):
        gc.collect()
        unused = await_gpu(device)
        used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        tensors = load(str(file))
        left = await_gpu(device)
        row[which] = time.perf_counter() - began
        now = resource.getrusage(resource.RUSAGE_SELF)
        row[f"{which} cpu"] = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        if which == "first":
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            row["beside"] = unused - left - nbytes if left else 0
        if plain is not None:
            wrong = importlib.import_module("overwire._bench_saves").find_difference(tensors, plain)
            if wrong:
                return {"failed": f"WRONG bytes of the {which} load: {wrong}"}
        del tensors
    return row


def load_from(build: str, state: str, device: str, file: Path, tiny: Path) -> dict[str, Any]:
    """Times a first load after a part of its work was done."""
    load = loader_of(build, "", device)
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


def measure_loads(args: argparse.Namespace, report: Report, files: dict[str, Path], cores: int) -> None:
    """Measures all builds and peers on some cores."""
    rows = [(name, folder, "", kind) for name, folder in args.builds.items() for kind in files]
    last = list(args.builds.values())[-1]
    rows += [(peer, last, peer, "plain") for peer in args.peers]
    nbytes = files["plain"].stat().st_size
    runs: dict[Any, list[dict[str, Any]]] = {row: [] for row in rows}
    failed = set()
    first_number = -1 if args.compares and cores == args.cores[0] else 0
    with contextlib.suppress(KeyboardInterrupt):  # the results so far are reported
        for number in range(first_number, max(args.rounds, args.peer_rounds)):
            for row in random.sample(rows, len(rows)):
                _, folder, peer, kind = row
                rounds = args.peer_rounds if peer and peer != "instanttensor" else args.rounds
                if row in failed or number >= rounds:
                    continue
                compared = files["plain"] if number < 0 else None
                result = run_in_fork(partial(load_twice, folder, peer, args.device, files[kind], compared))
                if "failed" in result:
                    failed.add(row)
                    report.add(f"{cores:2} cores  {row[0]}, {kind}: {result['failed']}", row=row, cores=cores, **result)
                elif number >= 0:
                    runs[row].append(result)
    for row, results in runs.items():
        if results:
            first, later = ([nbytes / one[which] / 1e9 for one in results] for which in ("first", "later"))
            busy = statistics.median(one["later cpu"] for one in results)
            beside = statistics.median(one["beside"] for one in results) / 1e6
            text = f"{cores:2} cores  {row[0] + ', ' + row[3]:<40} first {spread(first)}  later {spread(later)} GB/s"
            text += f"  CPU {busy:.2f} s  {beside:.0f} MB extra  n={len(results)}"
            report.add(text, name=row[0], file=row[3], cores=cores, runs=results)


def measure_states(args: argparse.Namespace, report: Report, file: Path, tiny: Path) -> None:
    """Measures first loads from each state."""
    rows = [(name, state) for name in args.builds for state in STATES]
    runs: dict[tuple[str, str], list[float]] = {row: [] for row in rows}
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(args.state_rounds):
            for name, state in random.sample(rows, len(rows)):
                result = run_in_fork(partial(load_from, args.builds[name], state, args.device, file, tiny))
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


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", required=True, help="NAME=FOLDER of a package")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", default="16GB")
    parser.add_argument("--state-size", default="2GB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-rounds", type=int, default=3, help="rounds of peers other than InstantTensor")
    parser.add_argument("--state-rounds", type=int, default=5)
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
        for cores in args.cores:
            os.sched_setaffinity(0, every[:cores])
            measure_loads(args, report, files, cores)
        os.sched_setaffinity(0, every)
        if args.states:
            measure_states(args, report, folder / "small", folder / "tiny")


if __name__ == "__main__":
    main(sys.argv[1:])
