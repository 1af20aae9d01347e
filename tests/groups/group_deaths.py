"""Runs the ranks of tests/groups/test_deaths.py. The arguments name a point at which rank 1 of three dies, stops, fails
or never arrives. The other ranks must report this, leave nothing open, and load again in a new group."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
from overwire.distributed import group as grouping
from overwire.distributed import load as relays
from overwire.distributed import tensors as loading

RANKS, LOST = 3, 1

# In seconds. If nothing else detects a lost rank, the group's timeout of TIME_OUT does. After HANGS, a rank is
# considered to hang.
TIME_OUT, HANGS = 10, 90


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    """Exits like a program that fails before the load."""
    os._exit(3)


def stay_away() -> None:
    time.sleep(3600)


def fail() -> None:
    raise ValueError("the fault")


def hook_point(point: str, act: Callable[[], None]) -> None:
    """Makes rank 1 call act() at a given point of its next load."""

    def before(module: Any, name: str, due: int = 0) -> None:
        real, calls = getattr(module, name), [0]

        def call(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] > due:
                setattr(module, name, real)
                act()
            return real(*args)

        setattr(module, name, call)

    if point == "opening":
        before(loading, "prepare_gpu")
    elif point == "mapped":
        before(relays, "relay_aim")
    elif point == "collective":
        before(relays, "relay_wait", 2)
    else:
        act()


def count_open() -> tuple[int, list[str]]:
    """Returns the number of threads and the kinds of descriptors of this process."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
        except FileNotFoundError:
            continue  # listing the folder opened this descriptor, now closed
    return len(os.listdir("/proc/self/task")), sorted(links)


def join(folder: Path, name: str, ranks: list[int], rank: int) -> None:
    store = dist.FileStore(str(folder / name), len(ranks))
    limit = datetime.timedelta(seconds=HANGS)
    dist.init_process_group("gloo", rank=ranks.index(rank), world_size=len(ranks), timeout=limit, store=store)


def load_and_compare(path: Path, want: dict[str, torch.Tensor], group: Any = None) -> None:
    tensors = ow.load_file(path, group=group)
    assert tensors.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(tensors[name], tensor), name


def run_rank(folder: Path, rank: int, case: str, point: str, way: str) -> None:
    signal.alarm(HANGS)
    torch.set_num_threads(1)
    path = folder / "model.safetensors"
    exchange = point if point in ("mapped", "collective") else "mapped"
    grouping.exchange_setting = lambda: exchange
    relays.SHARE, relays._AGREE = (1 << 20) + 4096, 2
    want = ow.load_file(path, mmap=False)
    join(folder, f"{case}-warm", list(range(RANKS)), rank)  # the first load creates threads and descriptors that stay
    load_and_compare(path, want, dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    threads, links = count_open()
    join(folder, f"{case}-first", list(range(RANKS)), rank)
    # Connecting takes seconds on a busy machine, and the group's timeout also limits it.
    limit = TIME_OUT if way in ("stop", "away") else HANGS
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=limit))
    dist.barrier()  # rank 1 must not die while other ranks connect
    if point == "between":
        load_and_compare(path, want, group)
    if rank == LOST:
        hook_point(point, {"kill": kill, "stop": stop, "leave": leave, "away": stay_away, "fail": fail}[way])
    try:
        ow.load_file(path, group=group)
    except ow.OverwireError as error:
        assert "rank 1" in str(error) and isinstance(error, ow.IOFailure) == (way != "fail"), repr(error)
    except ValueError as error:
        assert rank == LOST and str(error) == "the fault", repr(error)
    else:
        raise AssertionError("no rank reported the loss of rank 1")
    del group
    dist.destroy_process_group()
    gc.collect()
    until = time.monotonic() + 60
    # The number of engine threads varies. A group that is not freed has three threads and several descriptors.
    while not (freed := (now := count_open())[0] < threads + 3 and now[1] == links) and time.monotonic() < until:
        time.sleep(0.02)
    assert freed, (threads, links, now)
    ranks = list(range(RANKS)) if way == "fail" else [other for other in range(RANKS) if other != LOST]
    join(folder, f"{case}-again", ranks, rank)
    load_and_compare(path, want, dist.group.WORLD)
    dist.destroy_process_group()


def main() -> None:
    folder, point, way = Path(sys.argv[1]), *sys.argv[2:4]
    children = []
    for rank in range(RANKS):
        if not (pid := os.fork()):
            run_rank(folder, rank, f"{point}-{way}", point, way)
            print("done", flush=True)
            os._exit(0)
        children.append(pid)
    ended = {rank: os.waitpid(children[rank], 0)[1] for rank in range(RANKS) if rank != LOST}
    if way != "fail":
        os.kill(children[LOST], signal.SIGKILL)  # the rank may be stopped or sleeping
    status = os.waitstatus_to_exitcode(os.waitpid(children[LOST], 0)[1])
    assert status == {"fail": 0, "leave": 3}.get(way, -signal.SIGKILL), status
    sys.exit(f"ended with {ended}" if any(ended.values()) else 0)


if __name__ == "__main__":
    main()
