"""Runs one rank of `overwire bench --ranks`: machine limits, loads over a group, other libraries.

Rank 0 prints one JSON document per row to standard output. Tensors are compared with the plain
file, which is read without overwire. If one tensor differs, all ranks exit.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import overwire as ow

from ._bench_saves import read_plain
from ._verbs import read_floor
from .distributed import shard_range

dist: Any = torch.distributed  # the type stubs are incomplete

_SLOTS = 6 << 20  # pinned bytes per reading thread: the size of SlotsEach steps in gosrc/bench/floors.go
_THREADS = 16  # minimum number of reading threads over all ranks


def _cut_of_llama(name: str, shape: tuple[int, ...]) -> int | None:
    """Returns the dimension along which Megatron slices a Llama tensor: 1 for row-parallel layers, 0 for other
    matrices, None (no slices) for vectors."""
    if len(shape) < 2:
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def _load_instanttensor(file: str, device: str) -> dict[str, Any]:
    library = importlib.import_module("instanttensor")
    with library.safe_open([file], framework="pt", device=device, process_group=dist.group.WORLD) as reader:
        return dict(reader.tensors())


def _load_fastsafetensors(file: str, device: str) -> dict[str, Any]:
    library = importlib.import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(dist.group.WORLD, device, nogds=True)
    loader.add_filenames({rank: [file] if rank == 0 else [] for rank in range(dist.get_world_size())})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # the caller owns the memory, as in other rows
    buffer.close()
    loader.close()
    return tensors


class _Rank:
    def __init__(self, task: dict[str, Any]) -> None:
        self.rank, self.ranks, self.way = task["rank"], task["ranks"], task["way"]
        self.folder, self.repeat = Path(task["folder"]), task["repeat"]
        self.cuda = task["device"] == "cuda"
        self.device = f"cuda:{self.rank % torch.cuda.device_count()}" if self.cuda else "cpu"
        self.shares_gpus = self.cuda and self.ranks > torch.cuda.device_count()
        self.floors: dict[str, float] = {}

    def join(self) -> None:
        """Collective: creates the group. Ranks that share a GPU use gloo, because NCCL does not support them."""
        if self.cuda:
            torch.cuda.set_device(self.device)
        backend = "nccl" if self.cuda and not self.shares_gpus else "gloo"
        store = dist.FileStore(str(self.folder / f"store-{self.way}"), self.ranks)
        limit = datetime.timedelta(seconds=120)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks, timeout=limit)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def gather_most(self, value: float) -> float:
        maxima: list[float] = [0.0] * self.ranks
        dist.all_gather_object(maxima, value)
        return max(maxima)

    def time_work(self, work: Callable[[], Any]) -> tuple[float, float, Any]:
        """Collective: runs `work`. Returns the slowest rank's seconds, the CPU seconds of all ranks, and the result."""
        dist.barrier()
        self.wait()
        began, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.wait()
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, (time.perf_counter() - began, time.process_time() - cpu))
        return max(seconds for seconds, _ in every), sum(cpu for _, cpu in every), result

    def say(self, **row: Any) -> None:
        if self.rank == 0:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()

    def load_reference(self) -> None:
        """Maps the plain file without overwire. Copies the tensors to the GPU if they take less than a third of its
        free memory."""
        self.whole = read_plain(self.folder / "plain.safetensors")
        self.bytes = sum(plain.numel() for plain, _, _ in self.whole.values())
        if self.cuda:
            ranks = self.ranks if self.shares_gpus else 1
            if self.bytes * 3 * ranks < torch.cuda.mem_get_info(self.device)[0]:
                self.whole = {name: (plain.to(self.device), *rest) for name, (plain, *rest) in self.whole.items()}

    def check_shard(self, title: str, got: dict[str, Any], shard: Any) -> int:
        """Collective: compares all tensors on all ranks. Returns the number of this rank's tensor bytes."""
        wrong = "" if got.keys() == self.whole.keys() else "names"
        for name, (plain, dtype, shape) in self.whole.items() if not wrong else ():
            own_tensor, want = got[name], list(shape)
            bytes_of = plain.view(*shape[:-1], -1) if shape else plain  # its last dimension counts bytes
            dim = shard(name, tuple(shape)) if shard else None
            if dim is not None:
                low, high = shard_range(shape[dim], self.ranks, self.rank)
                want[dim] = high - low
                unit = dtype.itemsize if dim == len(shape) - 1 else 1
                bytes_of = bytes_of.narrow(dim, low * unit, (high - low) * unit)
            same = list(own_tensor.shape) == want and own_tensor.dtype == dtype
            octets = own_tensor.contiguous().view(-1).view(torch.uint8).to(bytes_of.device)
            if not (same and torch.equal(octets, bytes_of.reshape(-1))):
                wrong = name
                break
        if self.gather_most(bool(wrong)):
            where = f"rank {self.rank}, {wrong}" if wrong else "another rank"
            raise SystemExit(f"{title}: the tensors differ from the plain file: {where}")
        return sum(tensor.nbytes for tensor in got.values())

    def read_floor(self, path: Path, mine: bool) -> tuple[float, float, int]:
        """Collective: measures how fast threads can read a file as plain bytes. They read into pinned memory and copy
        from there to the GPU; without a GPU they read into memory that was written before. mine: whether each rank
        reads its part; otherwise rank 0 reads the whole file. Returns the seconds, the CPU seconds, and the file's
        bytes."""
        size = path.stat().st_size
        low, high = 0, size if self.rank == 0 else 0
        if mine:
            low, high = size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks
        threads = max(2, _THREADS // self.ranks, min(_THREADS, (os.cpu_count() or 1) // self.ranks))
        here = torch.zeros(max(high - low, 1), dtype=torch.uint8, device=self.device)
        slots = torch.zeros(threads * _SLOTS, dtype=torch.uint8, pin_memory=self.cuda)
        number = here.device.index if self.cuda else -1

        def read_chunk() -> None:
            read_floor(str(path), low, high, number, here.data_ptr(), slots.data_ptr(), threads)

        return (*min(self.time_work(read_chunk)[:2] for _ in range(self.repeat + 1)), size)

    def measure_floors(self) -> None:
        """Measures the machine's limits: each rank reads its part, then rank 0 reads all."""
        for name in ("packed", "plain"):
            for is_own, who in ((True, "each rank reads its part"), (False, "rank 0 reads all")):
                seconds, cpu, size = self.read_floor(self.folder / f"{name}.safetensors", is_own)
                # The rate counts tensor bytes. All ranks together read the file once.
                rate = self.bytes / seconds / 1e9
                self.say(row=f"floor: {_title_of(name)}, {who}", all=rate, stored=size / seconds / 1e9, cpu=cpu)
                self.floors.setdefault(name, rate)  # the limit: each rank reads its part

    def add_row(self, title: str, load: Callable[[], dict[str, Any]], shard: Any, floor: float) -> None:
        """Collective: checks a load's tensors, then times it."""
        first, _, tensors = self.time_work(load)
        nbytes = self.check_shard(title, tensors, shard)
        times = []
        for _ in range(self.repeat):
            del tensors
            seconds, cpu, tensors = self.time_work(load)
            times.append((seconds, cpu))
        self.check_shard(title, tensors, shard)
        everywhere: list[Any] = [None] * self.ranks
        dist.all_gather_object(everywhere, nbytes)
        seconds, cpu = min(times)
        most = max(everywhere) / 1e9
        row: dict[str, Any] = {"row": title, "rank": most / seconds, "all": sum(everywhere) / seconds / 1e9}
        row["first"], row["cpu"] = most / first, cpu
        if floor:  # the limit is reading: each byte is read once, however many ranks receive it
            row["floor"] = self.bytes / seconds / 1e9 / floor
        self.say(**row, verified=True)

    def ways_to_load(self) -> None:
        """Collective: measures overwire's loads over one transport."""
        for name in ("packed", "plain"):
            path = self.folder / f"{name}.safetensors"
            for mode, shard in (("whole", None), ("tensor-parallel", _cut_of_llama)):
                load = partial(ow.load_file, path, self.device, group=dist.group.WORLD, shard=shard, mmap=False)
                self.add_row(f"{_title_of(name)}, {mode}, {self.way}", load, shard, self.floors.get(name, 0.0))

    def other_libraries(self) -> None:
        """Collective: measures other libraries that load over a group. A missing or failing library gets a row with
        the reason."""
        for name, peer in {"instanttensor": _load_instanttensor, "fastsafetensors": _load_fastsafetensors}.items():
            title = f"{name}, plain, whole"
            absent = "" if importlib.util.find_spec(name) else "not installed"
            if not self.cuda or self.shares_gpus:
                absent = "it requires one GPU per rank"
            if absent:
                self.say(row=title, left_out=absent)
                continue
            why, load = "", partial(peer, str(self.folder / "plain.safetensors"), self.device)
            try:
                load()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if self.gather_most(bool(why)):
                self.say(row=title, left_out=why or "failed on another rank")
                continue
            self.add_row(title, load, None, self.floors.get("plain", 0.0))


def _title_of(name: str) -> str:
    return "compressed" if name == "packed" else name


def main(task: dict[str, Any]) -> None:
    """Runs one rank's part of one transport."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: kill this process if the command ends
    torch.set_num_threads(1)
    rank = _Rank(task)
    rank.join()
    rank.load_reference()
    rank.floors.update(task["floors"])
    if task["first"]:
        rank.measure_floors()
        rank.say(floors=rank.floors)
    rank.ways_to_load()
    if task["first"]:
        rank.other_libraries()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except SystemExit as wrong:  # gloo may abort an interpreter that exits while its group is open
        sys.stderr.write(f"{wrong}\n")
        sys.stderr.flush()
        os._exit(1)
