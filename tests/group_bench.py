"""Loads by several ranks, one GPU each, beside what the machine can do at all.

    torchrun --nproc-per-node 2 tests/group_bench.py --dir /tmp [--size 8GB] [--out rows.json] [--limit 150]

Rank 0 makes a model (Llama shape, bf16), plain and compressed. Every row is
preceded by a comparison: what each rank got, against its own part of the plain
file as safetensors reads it. A row's time is the slowest rank's, from a barrier
to the end of all work on the GPU; its rates count the bytes of the tensors that
a rank holds afterwards, and the sum over ranks. Without GPUs it runs on gloo and
host memory, to be tested. Rows that no longer begin within --limit seconds are
named and left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
from overwire import distributed
from overwire.distributed import group as grouping

RANK, LOCAL = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
CUDA = torch.cuda.is_available()
DEVICE = f"cuda:{LOCAL % torch.cuda.device_count()}" if CUDA else "cpu"
BEGAN = time.monotonic()


def tensor_parallel(name: str, shape: tuple[int, ...]) -> int | None:
    """How Megatron cuts a Llama: outputs of the first layers, inputs of the second."""
    if len(shape) < 2:
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def most(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return most(time.perf_counter() - start), result


def nbytes(tensors: dict[str, Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Forced(grouping.Rates):
    """Every batch goes one way, where there is that way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def choose(self, kind: tuple[Any, ...], ways: tuple[str, ...]) -> tuple[str, bool]:
        return (self.way if self.way in ways else ways[0]), False


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []

    def late(self, what: str) -> bool:
        """Whether there is no time for it; all ranks say the same."""
        late = most(time.monotonic() - BEGAN) > self.args.limit
        if late:
            self.say({"row": what, "left_out": "no time"})
        return late

    def say(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if RANK:
            return
        words = [f"{row['row']:<44}"]
        words += [f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items() if key != "row"]
        print("  ".join(words), flush=True)
        if self.args.out:
            Path(self.args.out).write_text(json.dumps(self.rows, indent=1))

    def floor(self, name: str, work: Callable[[], int]) -> None:
        """work returns the bytes that this rank got."""
        work()
        times = []  # of rank 0, if only one works
        for _ in range(3):
            seconds, got = timed(work)
            times.append(seconds)
        each = got / min(times) / 1e9
        self.say({"row": f"floor: {name}", "GB/s a rank": each, "GB/s in all": each * dist.get_world_size()})

    def floors(self) -> None:
        size, step = (1 << 30, 64 << 20) if CUDA else (64 << 20, 8 << 20)
        ranks = dist.get_world_size()
        here = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        host = torch.zeros(step, dtype=torch.uint8, pin_memory=CUDA)

        def copy() -> int:
            for at in range(0, size, step):
                here[at : at + step].copy_(host, non_blocking=True)
            return size

        self.floor("pinned copies to every GPU at once", copy)
        part = size // ranks
        mine = here[RANK * part : (RANK + 1) * part]

        def gather() -> int:
            dist.all_gather_into_tensor(here[: part * ranks], mine)
            return part * ranks

        def broadcast() -> int:
            dist.broadcast(here, 0)
            return size

        members = grouping.members_of(dist.group.WORLD)
        members.settle([grouping.host_name()] * ranks)
        piece = 30 << 20 if CUDA else 1 << 20  # as relays have it

        def pieces() -> int:
            for _ in range(0, size, piece * ranks):
                members.gather(here, piece)
            return -(-size // (piece * ranks)) * piece * ranks

        self.floor("all-gather of 1 GiB", gather)
        self.floor("broadcast of 1 GiB", broadcast)
        self.floor(f"all-gathers of {piece >> 20} MiB a rank", pieces)

    def reading(self, path: Path) -> None:
        """The page cache into pinned memory, nothing else."""
        size, block, threads = min(path.stat().st_size, 4 << 30), 1 << 20, 16
        host = torch.empty(threads * 8 * block, dtype=torch.uint8, pin_memory=CUDA).numpy()
        file = os.open(path, os.O_RDONLY)

        def read(part: int) -> None:
            for number, at in enumerate(range(part * block, size, threads * block)):
                slot = (number % 8 * threads + part) * block
                os.preadv(file, [host[slot : slot + block]], at)

        def all_of_it() -> int:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(read, range(threads)))
            return size

        self.floor(f"page cache into pinned memory, {threads} threads a rank", all_of_it)
        self.floor("the same, rank 0 alone", lambda: 0 if RANK else all_of_it())
        os.close(file)

    def reference(self, path: Path) -> dict[str, Any]:
        """The plain file by another reader, if there is one."""
        try:
            from safetensors.torch import load_file
        except ImportError:
            return {name: tensor.to(DEVICE) for name, tensor in ow.load_file(path).items()}
        return dict(load_file(path, device=DEVICE))

    def check(self, got: dict[str, Any], shard: Any) -> None:
        """Bit for bit, on every rank."""
        wrong = 0.0
        if got.keys() != self.whole.keys():
            wrong = 1e9
        for name, tensor in self.whole.items() if not wrong else ():
            dim = None if shard is None else shard(name, tuple(tensor.shape))
            if dim is not None:
                lo, hi = distributed.shard_range(tensor.shape[dim], dist.get_world_size(), RANK)
                tensor = tensor.narrow(dim, lo, hi - lo).contiguous()
            same = got[name].shape == tensor.shape and got[name].dtype == tensor.dtype
            wrong += not (same and torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)))
        if most(wrong):
            raise SystemExit(f"rank {RANK}: {wrong:.0f} tensors did not come back bit for bit")

    def loads(self, name: str, path: Path, shard: Any, way: str | None, runs: int = 2) -> None:
        """way: None chooses by measuring, "alone" uses no group, of "solo" rank 0 does that while the others wait."""
        title = f"{name}, {way or 'chosen'}"
        if self.late(title):
            return
        group: Any = dist.group.WORLD
        members = grouping.members_of(group)
        members.rates = grouping.Rates() if way is None else Forced(way)

        def load() -> dict[str, Any]:
            if way == "solo" and RANK:
                return {}
            if way in ("alone", "solo"):
                return ow.load_file(path, device=DEVICE, mmap=False)
            return ow.load_file(path, device=DEVICE, group=group, shard=shard, mmap=False)

        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        fresh, got = timed(load)
        beside = torch.cuda.max_memory_allocated() - before - nbytes(got) if CUDA else 0
        if way != "solo":
            self.check(got, shard)
        del got
        members.rates = grouping.Rates() if way is None else members.rates
        times: list[float] = []
        for _ in range(runs + (way is None)):
            seconds, got = timed(load)
            times.append(seconds)
            size = nbytes(got)
            del got
        row: dict[str, Any] = {"row": title, "fresh": size / fresh / 1e9, "second": size / times[0] / 1e9, "best": size / min(times) / 1e9}
        row["in all"] = row["best"] * (1 if way == "solo" else dist.get_world_size())
        row |= {"verified": way != "solo", "MiB of torch's beside": beside >> 20}
        row |= {"ms": min(times) * 1e3, "ms of the engine": (ow.last_report() or {}).get("seconds", 0) * 1e3}  # the latter of the last
        stages = (ow.last_report() or {}).get("stages", {})  # of the last job: seconds, summed over its workers
        mine = {key[:-3]: round(value / 1e9, 3) for key, value in stages.items() if key.endswith("_ns")}
        row["stages"] = [{}] * dist.get_world_size()
        dist.all_gather_object(row["stages"], {**mine, "workers": stages.get("workers")})
        if way is None:
            row["ways"] = {kind: {w: round(rate / 1e9, 1) for w, rate in ways.items()} for kind, ways in distributed.rates(group).items()}
        self.say(row)
        if self.args.debug and way == "gather":
            self.timeline(title, load)

    def timeline(self, title: str, load: Callable[[], Any]) -> None:
        """What happened to each piece of a relay, on every rank, in microseconds."""
        log = logging.getLogger("overwire")
        log.setLevel(logging.DEBUG)
        timed(load)
        log.setLevel(logging.WARNING)
        mine = ow.last_report() or {}
        sent: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sent, {key: mine.get(key) for key in ("timeline", "trace", "seconds", "stages")})
        self.rows.append({"row": f"timeline: {title}", "ranks": sent})
        for rank, one in enumerate(sent if RANK == 0 else ()):
            pieces = one["timeline"] or []
            copies = (one["trace"] or {}).get("copy_stream")
            print(f"-- rank {rank}: {one['seconds']:.4f} s, {len(pieces)} pieces, copies {copies}, {one['stages']}")
            names = list(pieces[0]) if pieces else []
            print("  piece " + " ".join(f"{name:>9}" for name in names))
            middle = len(pieces) // 2
            for at in sorted({*range(6), *range(middle, middle + 12), *range(len(pieces) - 4, len(pieces))} & set(range(len(pieces)))):
                print(f"  {at:>5} " + " ".join(f"{pieces[at][name]:>9}" for name in names))
        sys.stdout.flush()

    def run(self) -> None:
        folder = Path(self.args.dir)
        plain, packed = folder / "plain.safetensors", folder / "packed.safetensors"
        if RANK == 0:
            start = time.monotonic()
            for command in (
                ["bench", "gen", "llama-bf16", "--size", self.args.size, "-f", str(plain)],
                ["compress", "-f", str(plain), "-o", str(packed)],
            ):
                subprocess.run([sys.executable, "-m", "overwire", *command], check=True, capture_output=True)
            print(f"{dist.get_world_size()} ranks, {DEVICE}, {self.args.size} made in {time.monotonic() - start:.1f} s", flush=True)
        dist.barrier()
        self.floors()
        self.reading(packed)
        self.whole = self.reference(plain)
        first = True
        for name, path in (("compressed", packed), ("plain", plain)):
            if self.args.only and name != self.args.only:
                continue
            if first:  # threads, pinned memory and connections of both kinds of load
                ow.load_file(path, device=DEVICE, mmap=False)
                first = False
            packed_ways = (["each"], ["own", "gather"])
            whole, parts = packed_ways if name == "compressed" else (["each", "broadcast"], ["own", "gather", "scatter"])
            for way in ("gather", "solo", "alone", *whole, None):
                self.loads(f"{name}, whole", path, None, way)
            for way in (*parts, None):
                self.loads(f"{name}, tensor-parallel", path, tensor_parallel, way)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--size", default="8GB")
    parser.add_argument("--out", default="")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which no row begins")
    parser.add_argument("--debug", action="store_true", help="tell what happened to each piece that was shared")
    parser.add_argument("--only", default="", help="compressed or plain")
    args = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    logging.getLogger("overwire").addHandler(logging.NullHandler())
    device = torch.device(DEVICE) if CUDA else None
    dist.init_process_group("nccl" if CUDA else "gloo", timeout=datetime.timedelta(seconds=60), device_id=device)
    Bench(args).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
