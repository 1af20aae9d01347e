"""Tests ranks that map each other's memory (OVERWIRE_EXCHANGE=mapped) on one GPU or several.

    python bench/gpu/device_ranks_one.py [--ranks 2,4] [--size 4GB] [--dir /dev/shm] [--limit 480]

For each number of ranks, separate processes form a gloo group. Rank r uses GPU r modulo the number of GPUs. The ranks
load, stream and fill modules with whole tensors, tensor-parallel slices and columns of all matrices, compressed and
plain. Each tensor is compared byte for byte with a plain load by one rank. Then one rank raises during a load, and one
is killed. The others must report that within seconds and load again.

At the end a table shows the slowest rank's time in the best of three loads: with mapped memory, with torch.distributed
(gloo, through the CPU), and without exchange. The baselines are pinned copies by all ranks at the same time and by one
rank. The exit status is 0 if everything was correct. On one GPU all ranks share one link, so the rates say little.

Each step prints its name and start time, and after 15 seconds the stacks of its threads. `--limit` bounds the whole
run: then every rank prints its stacks and is killed. All ranks end with this process.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Seconds after which a step prints its stacks.
SLOW = 15


def begin(what: str) -> None:
    print(f"{time.monotonic() - float(os.environ['RANKS_BEGAN']):7.2f} s  {what}", flush=True)


def rank_main(folder: Path, rank: int, size: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the parent
    faulthandler.register(signal.SIGUSR1, file=sys.stdout, all_threads=True)

    def step(what: str, all_say: bool = True) -> None:
        faulthandler.dump_traceback_later(SLOW, repeat=True, file=sys.stdout)
        if rank == 0 or all_say:
            begin(f"rank {rank} of {size}: {what}")

    step("imports overwire and torch")
    import overwire as ow
    import torch
    import torch.distributed as dist
    from overwire import distributed
    from overwire.distributed import group as grouping
    from overwire.distributed import load as relays

    step("looks for GPUs")
    cuda = torch.cuda.is_available()
    device = f"cuda:{rank % torch.cuda.device_count()}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    step("joins the group")
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=datetime.timedelta(seconds=60))
    world = dist.group.WORLD
    members = grouping.members_of(world)

    def use(exchange: str) -> None:  # replaces the setting, which the engine reads only once
        grouping.exchange_setting = lambda: exchange

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def cut(name: str, shape: tuple[int, ...]) -> int | None:
        if len(shape) < 2:
            return None
        return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0

    plain, packed = folder / "plain.safetensors", folder / "packed.safetensors"
    step(f"loads {plain.name} by itself to {device}")
    whole = ow.load_file(plain, device=device, mmap=False)
    wait()

    def check(got: dict[str, Any], shard: Any) -> None:
        assert got.keys() == whole.keys()
        for name, tensor in whole.items():
            dim = shard(name, tuple(tensor.shape)) if shard else None
            if dim is not None:
                lo, hi = distributed.shard_range(tensor.shape[dim], size, rank)
                tensor = tensor.narrow(dim, lo, hi - lo).contiguous()
            assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype, f"rank {rank}: {name}"
            same = torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
            assert same, f"rank {rank}: {name}"

    def most(value: float) -> float:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, value)
        return max(found)

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        dist.barrier()
        wait()
        start = time.perf_counter()
        made = work()
        wait()
        return most(time.perf_counter() - start), made

    def count(tensors: dict[str, Any]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    modules: dict[Any, Any] = {}  # keyed by cut; made once, outside the timing

    def filled(path: Path, shard: Any) -> dict[str, Any]:
        module = modules.get(shard)
        if module is None:
            modules.clear()
            module = modules[shard] = torch.nn.Module()
            for name, tensor in whole.items():
                shape = list(tensor.shape)
                dim = shard(name, tuple(shape)) if shard else None
                if dim is not None:
                    lo, hi = distributed.shard_range(shape[dim], size, rank)
                    shape[dim] = hi - lo
                at = module
                *above, last = name.split(".")
                for word in above:
                    if word not in dict(at.named_children()):
                        at.add_module(word, torch.nn.Module())
                    at = at.get_submodule(word)
                at.register_buffer(last, torch.zeros(shape, dtype=tensor.dtype, device=device))
        ow.load_model(module, path, group=world, shard=shard, device=device)
        return dict(module.state_dict())

    # Compare bytes first.
    use("mapped")
    for path in (packed, plain):
        for shard in (None, cut):
            for nth in range(2):
                step(f"{path.stem}, {'tensor-parallel' if shard else 'whole'}, mapped, load {nth}", all_say=False)
                check(ow.load_file(path, group=world, shard=shard, device=device), shard)
            assert members.reached and not members.unreachable, members.unreachable
            say(f"{size} ranks, {path.stem}, {'tensor-parallel' if shard else 'whole'}: every tensor of every rank is correct")

    # Streams, modules and columns of all matrices.
    def columns(name: str, shape: tuple[int, ...]) -> int | None:
        return 1 if len(shape) > 1 else None

    for path in (packed, plain):
        for title, shard in (("whole", None), ("tensor-parallel", cut), ("columns", columns)):
            ways: dict[str, Any] = {
                "stream": lambda path=path, shard=shard: dict(ow.stream(path, device, group=world, shard=shard)),
                "load_model": lambda path=path, shard=shard: filled(path, shard),
                "load_file": lambda path=path, shard=shard: ow.load_file(path, group=world, shard=shard, device=device),
            }
            for way, load in ways.items():
                for exchange in ("mapped", "collective") if way != "load_file" or title == "columns" else ():
                    use(exchange)
                    step(f"{path.stem}, {title}, {way}, {exchange}", all_say=False)
                    check(load(), shard)
                    times, held = [], 0
                    for _ in range(2 if exchange == "mapped" else 1):
                        seconds, got = timed(load)
                        times.append(seconds)
                        held = count(got)
                        del got
                    rate = held / min(times) / 1e9
                    what = f"{path.stem}, {title}, {way}, {exchange}"
                    say(f"{what:<44} {rate:8.1f} GB/s per rank {rate * size:8.1f} in total, every tensor correct")
    use("mapped")

    # One rank raises.
    step("rank 1 raises", all_say=False)
    aim = relays.relay_aim
    if rank == 1:
        relays.relay_aim = lambda *_: 1 // 0
    began = time.perf_counter()
    try:
        ow.load_file(packed, group=world, device=device)
    except (ZeroDivisionError, ow.OverwireError) as error:
        assert rank == 1 or "on rank 1: ZeroDivisionError" in str(error), error
    else:
        raise AssertionError("rank 1's error was not reported")
    say(f"rank 1 raises: all ranks have ended after {most(time.perf_counter() - began):.2f} s")
    relays.relay_aim = aim
    check(ow.load_file(packed, group=world, device=device), None)

    # The table.
    step("the table", all_say=False)
    if cuda:
        here, host = (
            torch.empty(1 << 30, dtype=torch.uint8, device=device),
            torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True),
        )

        def copies() -> None:
            for at in range(0, 1 << 30, 64 << 20):
                here[at : at + (64 << 20)].copy_(host, non_blocking=True)

        copies()
        rate = (1 << 30) / min(timed(copies)[0] for _ in range(3)) / 1e9
        say(f"{'floor: simultaneous pinned copies by all ranks':<44} {rate:8.1f} GB/s per rank")
        del here, host
    for path in (packed, plain):
        seconds = min(
            timed(lambda path=path: ow.load_file(path, device=device, mmap=False) if rank == 0 else None)[0]
            for _ in range(3)
        )
        say(f"{f'floor: {path.stem}, only rank 0':<44} {count(whole) / seconds / 1e9:8.1f} GB/s")
        for shard in (None, cut):
            for exchange in ("mapped", "collective", "none"):
                use(exchange)
                step(f"{path.stem}, {'tensor-parallel' if shard else 'whole'}, {exchange}", all_say=False)
                first, got = timed(
                    lambda path=path, shard=shard: ow.load_file(path, group=world, shard=shard, device=device)
                )
                times = []
                for _ in range(3):
                    del got
                    seconds, got = timed(
                        lambda path=path, shard=shard: ow.load_file(path, group=world, shard=shard, device=device)
                    )
                    times.append(seconds)
                check(got, shard)
                held = count(got)
                title = f"{path.stem}, {'tensor-parallel' if shard else 'whole'}, {exchange}"
                rate = held / min(times) / 1e9
                say(f"{title:<44} {rate:8.1f} GB/s per rank {rate * size:8.1f} in all {held / first / 1e9:8.1f} first")
                del got
    use("mapped")

    # One rank is killed during a load, after several delays, with a new group for each.
    step("rank 1 is killed", all_say=False)
    mine = float(os.environ.get("RANKS_KILL", "0.05"))
    dist.barrier()
    if rank == 1:
        threading.Timer(mine, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.perf_counter()
    try:
        while time.perf_counter() - began < 60:
            ow.load_file(packed, group=world, device=device)
    except ow.IOFailure as error:
        took = time.perf_counter() - began - mine
        assert "is gone" in str(error) or "cannot be reached" in str(error), error
        assert took < 20, f"rank {rank} took {took:.1f} s to notice"
        check(ow.load_file(packed, device=device, mmap=False), None)
        say(f"rank 1 is killed: rank 0 gets an error after {took:.2f} s, and loads again: {str(error)[:90]}")
    else:
        raise AssertionError("no rank reported the loss of rank 1")
    os._exit(0)


def made(folder: Path, size: str, end: float) -> bool:
    """Writes the model, plain and compressed. Meanwhile a process imports torch, so that its files are in the page
    cache for the ranks."""
    begin("python imports torch, in the background")
    warm = subprocess.Popen([sys.executable, "-c", "import torch; torch.cuda.is_available()"])
    plain, packed = folder / "plain.safetensors", folder / "packed.safetensors"
    for command in (["bench", "gen", "llama-bf16", "--size", size, "-f", str(plain)], ["compress", "-f", str(plain), "-o", str(packed)]):
        begin(f"overwire {' '.join(command)}, {shutil.disk_usage(folder).free / 1e9:.1f} GB free")
        try:
            left = max(1, end - time.monotonic())
            done = subprocess.run(
                [sys.executable, "-m", "overwire", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=left
            )
        except subprocess.TimeoutExpired as late:
            print(f"it did not end: {late.output!r}", flush=True)
            warm.kill()
            return False
        if done.returncode:
            print(f"status {done.returncode}: {done.stdout.decode(errors='replace')}", flush=True)
            warm.kill()
            return False
    try:
        status = warm.wait(max(1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = "none: it did not end"
    finally:
        warm.kill()
        warm.wait()
    begin(f"torch was imported: status {status}")
    return status == 0


def together(folder: Path, size: int, end: float) -> int:
    """Runs size ranks and returns how many failed."""
    began = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, __file__], env=began | {"RANKS_ONE": f"{rank} {size} {folder}"}, stderr=subprocess.STDOUT)
        for rank in range(size)
    ]
    wrong = 0
    try:
        while any(one.poll() is None for one in ranks) and time.monotonic() < end:
            time.sleep(0.05)
        late = [one for one in ranks if one.poll() is None]
        for one in late:
            one.send_signal(signal.SIGUSR1)
            time.sleep(0.5)  # keeps the stacks of the ranks separate
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    for rank, one in enumerate(ranks):
        if one in late or one.returncode != (-signal.SIGKILL if rank == 1 else 0):
            print(f"{size} ranks: rank {rank} ended with status {'none: it did not end' if one in late else one.returncode}", flush=True)
            wrong += 1
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--size", default="4GB")
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--limit", type=float, default=480, help="seconds for the whole run")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.environ["RANKS_BEGAN"] = str(time.monotonic())
    end = time.monotonic() + args.limit
    with tempfile.TemporaryDirectory(prefix="overwire-ranks-", dir=args.dir) as name:
        folder = Path(name)
        wrong = 0 if made(folder, args.size, end) else 1
        for size in map(int, args.ranks.split(",")) if not wrong else ():
            wrong += together(folder, size, end)
    print("wrong" if wrong else "all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    if "RANKS_ONE" in os.environ:
        rank, size, folder = os.environ["RANKS_ONE"].split(" ", 2)
        rank_main(Path(folder), int(rank), int(size))
    else:
        sys.exit(main())
