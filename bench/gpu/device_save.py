"""Measures saves from a GPU against their baselines, after comparing bytes.

    python bench/gpu/device_save.py [--gb 15] [--to /dev/shm/saves] [--seconds 95]

Each figure is a line: seconds, GB/s of tensor bytes, and the process's CPU time in user space and in the kernel.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import overwire
import torch

START = time.monotonic()


def model(total: int) -> dict[str, Any]:
    """Returns 290 bf16 tensors as in a transformer, with about `total` bytes."""
    torch.manual_seed(1)
    rows = total // (2 * 4096 * 145)
    tensors: dict[str, Any] = {}
    for i in range(145):
        tensors[f"layer{i}_weight"] = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16).mul_(0.02)
        tensors[f"layer{i}_norm"] = torch.randn(4096, device="cuda").mul_(0.1).add_(1).to(torch.bfloat16)
    return tensors


def timed(name: str, size: int, work: Callable[[], Any]) -> Any:
    """Runs work and prints its figure."""
    torch.cuda.synchronize()
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    out = work()
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    figures = f"{seconds:7.3f} s {size / seconds / 1e9:6.2f} GB/s, processor {user:5.1f} + {system:4.1f} s"
    print(f"{name:34} {figures} {stages(out)}", flush=True)
    return out


def stages(report: Any) -> str:
    """Returns the stages of a save with their seconds, summed over threads."""
    return " ".join(f"{name} {seconds:.2f}" for name, seconds in getattr(report, "stages", {}).items())


def same(tensors: dict[str, Any], path: str) -> None:
    """Compares the contents of a file, folder or bundle."""
    bundle = os.path.exists(f"{path}/m.pkl")
    load: Any = overwire.load_compressed_pickle if bundle else overwire.load_file
    back = load(f"{path}/m.pkl" if bundle else path, device="cuda")
    assert back.keys() == tensors.keys(), path
    for name, tensor in tensors.items():
        assert torch.equal(back[name].view(torch.int16), tensor.view(torch.int16)), (path, name)
    del back
    torch.cuda.empty_cache()


def floors(folder: str, size: int) -> None:
    """Measures the machine without overwire."""
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    for _ in range(2):
        timed(
            "floor: pinned copy down, 4 GB",
            4 << 30,
            lambda: [host.copy_(device, non_blocking=True) for _ in range(4)] and torch.cuda.synchronize(),
        )
    data = memoryview(host.numpy())
    piece = 10 << 20

    def put(threads: int, files: int) -> None:
        out = [os.open(f"{folder}/floor{i}", os.O_CREAT | os.O_RDWR | os.O_TRUNC) for i in range(files)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            todo = [(i % files, i // files * piece) for i in range(size // piece)]
            list(pool.map(lambda t: os.pwrite(out[t[0]], data[t[1] % (900 << 20) :][:piece], t[1]), todo))
        for number in out:
            os.close(number)

    for threads, files in ((1, 1), (4, 1), (16, 1), (16, 8)):
        timed(f"floor: pwrite, {threads} threads, {files} files", size, lambda t=threads, f=files: put(t, f))  # type: ignore[misc]
        for i in range(files):
            os.unlink(f"{folder}/floor{i}")


def peers(folder: str, tensors: dict[str, Any], size: int) -> None:
    """Measures other libraries with the same task."""
    import safetensors.torch

    timed("safetensors save_file", size, lambda: safetensors.torch.save_file(tensors, f"{folder}/peer"))
    os.unlink(f"{folder}/peer")
    timed("torch.save", size, lambda: torch.save(tensors, f"{folder}/peer"))
    os.unlink(f"{folder}/peer")
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):
        begun = time.perf_counter()
        future = timed("dcp.async_save, until it returns", size, lambda: dcp.async_save(tensors, checkpoint_id=f"{folder}/dcp"))
        future.result()
        print(f"{'dcp.async_save, until complete':44} {time.perf_counter() - begun:7.3f} s", flush=True)
        shutil.rmtree(f"{folder}/dcp")
    dist.destroy_process_group()


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=15.0)
    parser.add_argument("--to", default="/dev/shm/overwire-saves")
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--only", default="", help="parts of the names of figures to run, separated by |")
    options = parser.parse_args()
    folder = options.to
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    tensors = model(int(options.gb * 1e9))
    size = sum(t.nbytes for t in tensors.values())
    print(
        f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}; "
        f"{size / 1e9:.2f} GB in {len(tensors)} tensors",
        flush=True,
    )

    floors(folder, int(min(size * 0.66, 6e9)))
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor))

    shard = size // 8 + (1 << 20)
    ways: list[tuple[str, Callable[[str], Any]]] = [
        ("save_file, one file", lambda p: overwire.save_file(tensors, p + "/m.safetensors")),
        ("save_file, 8 shards", lambda p: overwire.save_file(tensors, p + "/m.safetensors", max_shard_size=shard)),
        ("save_file, plain, one file", lambda p: overwire.save_file(tensors, p + "/m.safetensors", compress=False)),
        ("save_file, plain, 8 shards", lambda p: overwire.save_file(tensors, p + "/m.safetensors", compress=False, max_shard_size=shard)),
        ("save_file, wait=False, one file", lambda p: overwire.save_file(tensors, p + "/m.safetensors", wait=False)),
        ("save_file, wait=False, 8 shards", lambda p: overwire.save_file(tensors, p + "/m.safetensors", max_shard_size=shard, wait=False)),
        ("save_model, one file", lambda p: overwire.save_model(module, p + "/m.safetensors")),
        ("save_model, 8 shards", lambda p: overwire.save_model(module, p + "/m.safetensors", max_shard_size=shard)),
        ("compress_pickle", lambda p: overwire.compress_pickle(tensors, p + "/m.pkl")),
        ("compress_pickle, wait=False", lambda p: overwire.compress_pickle(tensors, p + "/m.pkl", wait=False)),
    ]
    ways = [way for way in ways if any(part in way[0] for part in options.only.split("|"))]
    for name, save in ways:
        for turn in range(2):
            if time.monotonic() - START > options.seconds - 35:
                print("out of time", flush=True)
                break
            path = f"{folder}/{turn}"
            os.makedirs(path)
            out = timed(name, size, lambda save=save, path=path: save(path))  # type: ignore[misc]
            if isinstance(out, overwire.Saving):
                out = timed("  from then until it is complete", size, out.wait)
                print(f"  staged at {out.staged:.3f} s, complete at {out.seconds:.3f} s", flush=True)
            assert isinstance(out, float) or out.on_gpu >= 0.99 * size, out
            if turn == 0:
                same(tensors, path)
            shutil.rmtree(path)
    for _ in range(0 if options.only else 2):
        timed("sleep(to_file=)", size, lambda: overwire.sleep(tensors, to_file=f"{folder}/s.safetensors", release=False).close())
    if not options.only:
        assert overwire.verify(f"{folder}/s.safetensors")["ok"]
        os.unlink(f"{folder}/s.safetensors")
    if time.monotonic() - START < options.seconds - 10:
        few = dict(list(tensors.items())[:40])
        peers(folder, few, sum(t.nbytes for t in few.values()))
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
