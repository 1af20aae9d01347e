"""Measures ranks that load blocks of several open files together.

    python bench/bench_blocks.py [--ranks 2] [--size 2GB] [--repeat 5] [--dir /dev/shm]

Makes a model of four shards, plain and compressed. Each rank is a process with its own GPU, or with the CPU if there
are not enough GPUs. It opens each shard separately, and all shards as one file. All ranks load tensor-parallel blocks.
First every block is compared with torch's slice. Then three variants alternate: each shard as a separate file, all
shards as one file, and each rank separately. The output is the slowest rank's median seconds, and the GB read and
copied. OVERWIRE_EXCHANGE has no effect here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

SHARDS = 4


def make(folder: Path, size: str) -> None:
    import overwire as ow

    whole = folder / "whole.safetensors"
    subprocess.run([sys.executable, "-m", "overwire", "bench", "gen", "llama-bf16", "--size", size, "-f", str(whole)], check=True)
    with ow.safe_open(whole, framework="pt") as file:
        names = file.offset_keys()
        for number in range(SHARDS):
            tensors = file.get_tensors(names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS])
            ow.save_file(tensors, folder / f"plain-{number}.safetensors", compress=False)
            ow.save_file(tensors, folder / f"compressed-{number}.safetensors")
            del tensors
    whole.unlink()


def blocks(
    files: list[Any], device: str, rank: int, size: int
) -> tuple[list[bytes], list[tuple[Any, str, tuple[slice, ...], Any]]]:
    """Returns the requests by file, and all targets: file, name, torch's slices, memory."""
    import torch
    from overwire import _compat_api, distributed

    requests, targets = [], []
    for file in files:
        flat = array("q")
        for at, (name, dtype, shape) in enumerate(_compat_api.table_of(file)):
            cut, block = tuple(slice(None) for _ in shape), (0, -1, 0, -1)
            if len(shape) == 2:
                dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
                lo, hi = distributed.shard_range(shape[dim], size, rank)
                cut = (slice(None), slice(lo, hi)) if dim else (slice(lo, hi), slice(None))
                block = (0, shape[0], lo, hi) if dim else (lo, hi, 0, -1)
                shape = (shape[0], hi - lo) if dim else (hi - lo, shape[1])
            target = torch.empty(shape, dtype=_compat_api.torch_dtype(dtype), device=device)
            flat.extend((at, target.data_ptr(), *block))
            targets.append((file, name, cut, target))
        requests.append(flat.tobytes())
    return requests, targets


def rank_main(folder: Path, rank: int, size: int, repeat: int) -> None:
    import overwire as ow
    import torch
    import torch.distributed as dist
    from overwire import _compat_api

    gpu = torch.cuda.device_count() >= size
    device = f"cuda:{rank}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=size, store=dist.FileStore(str(folder / "store"), size))
    world = dist.group.WORLD

    def together(files: list[Any], requests: list[bytes]) -> tuple[int, int]:
        offer = device, files, requests, [str(at) for at in range(len(files))]
        made, why = _compat_api.meet_to_load(world, lambda: offer)
        assert made is not None, why
        assert not (why := made.try_land(lambda: None)), why
        return made.read, made.copied

    def alone(files: list[Any], requests: list[bytes]) -> tuple[int, int]:
        for file, one in zip(files, requests, strict=True):
            with _compat_api.landing(file, device, one) as job:
                job.take()
        return 0, 0

    for kind in ("compressed", "plain"):
        paths = [folder / f"{kind}-{number}.safetensors" for number in range(SHARDS)]
        each = [ow.safe_open(path, framework="pt", device=device) for path in paths]
        joined = [ow.safe_open(paths, framework="pt", device=device)]
        rows = {f"{SHARDS} files": (together, each), "1 file": (together, joined), "by itself": (alone, joined)}
        times: dict[str, list[float]] = {row: [] for row in rows}
        moved: dict[str, list[int]] = {}
        wanted = {id(files): blocks(files, device, rank, size) for files in (each, joined)}
        for turn in range(repeat + 1):
            for row, (way, files) in rows.items():
                requests, targets = wanted[id(files)]
                if not turn:
                    for *_, target in targets:
                        target.zero_()
                dist.barrier()
                began = time.perf_counter()
                moves = way(files, requests)
                if gpu:
                    torch.cuda.synchronize()
                found: list[Any] = [None] * size
                dist.all_gather_object(found, (time.perf_counter() - began, *moves))
                for file, name, cut, target in targets if not turn else ():
                    assert torch.equal(file.get_tensor(name)[cut], target), (row, name)
                if turn:
                    times[row].append(max(one[0] for one in found))
                    moved[row] = [sum(one[at] for one in found) for at in (1, 2)]
        for row, seconds in times.items() if rank == 0 else ():
            read, copied = (f"{n / 1e9:.2f}" for n in moved[row])
            print(f"{kind:12}{row:10} {statistics.median(seconds):.3f} s  read {read}, copied {copied}", flush=True)
        for file in (*each, *joined):
            file.close()
        wanted.clear()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(Path(args.dir), int(args.rank), args.ranks, args.repeat)
        return
    with tempfile.TemporaryDirectory(prefix="overwire-blocks-", dir=args.dir) as name:
        make(Path(name), args.size)
        command = [sys.executable, __file__, *sys.argv[1:], "--dir", name, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], env=os.environ | {"OMP_NUM_THREADS": "1"}) for rank in range(args.ranks)]
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank has failed")


if __name__ == "__main__":
    main()
