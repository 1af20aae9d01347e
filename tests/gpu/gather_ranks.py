"""Runs the ranks of tests/gpu/test_gpu_gather.py as forks of one process. The arguments are a folder, the number of
ranks, and the case: "mapped", "file" (blocks come from a compressed file), "host" (GPUs do not map each other's memory)
or "killed" (rank 1 dies)."""

from __future__ import annotations

import datetime
import os
import random
import signal
import sys
from collections import deque
from pathlib import Path

import overwire as ow
import torch
import torch.distributed as dist
from overwire import gpu
from overwire.distributed import group as grouping
from overwire.offloading.blocks import Block, Weight
from overwire.offloading.sharing import BlockGroup
from overwire.offloading.source import Source
from overwire.offloading.stored import HostMemory, SharedMemory, StoredBlock, encode_block

# A rank that runs for more than HANGS seconds is considered to hang. Each rank has BUFFERS buffers.
HANGS, BUFFERS = 120, 3

HOST = torch.device("cpu")


class Rank:
    """A rank, its blocks in a group's memory, and the bytes that they must have after decoding."""

    def __init__(self, members: grouping.Members, number: int, file: Path | None) -> None:
        device = torch.device("cuda", number)
        torch.manual_seed(5)
        self.tensors = [
            [torch.randn(size).bfloat16(), torch.randn(size // 3 + 1)] for size in (40_000, 1, 90_000, 31, 20_000)
        ]
        model = torch.nn.Module()
        model.lists = torch.nn.ModuleList(torch.nn.ParameterList(both) for both in self.tensors)
        self.blocks = [
            Block(f"block {at}", both, [Weight("w", one, HOST) for one in both.parameters()])
            for at, both in enumerate(model.lists)
        ]
        self.device, self.stream, self.source = number, gpu.stream_new(number), None
        if file is not None:
            if members.rank == 0:
                ow.save_model(model, file, compress=True)
            dist.barrier()
            self.source = Source(model, file, HOST, is_shared=True)
        self.group = BlockGroup(members, device, self.blocks, {}, self.source)
        if file is not None:
            self.group._device = HOST  # torch does not see the fake GPU, so the check is done on the CPU
        self.stored = [self._store(at) for at in range(len(self.blocks))]
        self.memories = [one.memory for one in self.stored if isinstance(one.memory, SharedMemory)]
        self.group.open_ring(max(one.nbytes for one in self.memories), BUFFERS, self.memories)
        self.decodings: list[tuple[int, gpu.Batch, gpu.Memory]] = []

    def _store(self, at: int) -> StoredBlock:
        name, source, contents, load = f"block {at}", self.source, self.tensors[at], None
        if source is not None:
            contents, load = source.read_block(self.blocks[at].weights), source.load_streams
        return self.group.agree_on(
            name, lambda: encode_block(contents, HOST, lambda nbytes: self.group.allocate_part(name, nbytes), load)
        )

    def fetch(self, at: int) -> None:
        self.group.fetch_part(self.memories[at], self.stream)

    def decode(self, at: int) -> None:
        """Queues the decoding of the oldest block, which must be block number `at`."""
        one = self.stored[at]
        out = gpu.alloc(one.nbytes, self.device, self.stream)
        source = self.group.take_block(self.memories[at], self.stream)
        tasks = one.pack_tasks(source, out.address)
        self.decodings.append((at, gpu.decode(self.device, self.stream, tasks, "X16"), out))

    def compare(self) -> None:
        """Compares all decoded blocks with the expected bytes."""
        for at, batch, out in self.decodings:
            assert batch.wait() == [None, None]
            for place, tensor in zip(self.stored[at].places, self.tensors[at], strict=True):
                got = torch.empty(place.nbytes, dtype=torch.uint8)
                where = got.data_ptr(), out.address + place.offset, place.nbytes
                gpu.copy(*where, device=self.device, stream=self.stream)
                assert torch.equal(got, tensor.view(torch.uint8)), at


def run_rank(folder: Path, rank: int, ranks: int, case: str) -> None:
    signal.alarm(HANGS)
    torch.set_num_threads(1)
    # Nothing is pinned, because torch does not see the fake GPU.
    HostMemory.pin_range = lambda *_: None  # type: ignore[method-assign]
    grouping.exchange_setting = lambda: "none" if case == "host" else "auto"
    store = dist.FileStore(str(folder / f"store-{ranks}-{case}"), ranks)
    limit = datetime.timedelta(seconds=HANGS)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=limit, store=store)
    with grouping.group_verb(dist.group.WORLD, f"cuda:{rank % 2}") as members:
        one = Rank(members, rank % 2, folder / "blocks.safetensors" if case == "file" else None)
    assert one.group._whole == (case == "host")
    dice, coming = random.Random(11), deque[int]()
    try:
        for step in range(60):
            if rank == 1 and step == 30 and case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if coming and (len(coming) == BUFFERS or dice.random() < 0.5):
                one.decode(coming.popleft())
            else:
                coming.append(dice.randrange(5))
                one.fetch(coming[-1])
        while coming:
            one.decode(coming.popleft())
    except ow.IOFailure as error:
        assert case == "killed" and "rank 1 of this host is gone" in str(error) and "'block " in str(error), repr(error)
    else:
        assert case != "killed"
    one.compare()
    for memory, kept in zip(one.memories, one.stored, strict=True):  # even the parts of a dead rank stay in memory
        decoded = torch.empty(kept.nbytes, dtype=torch.uint8)
        ow.offloading.stored.decode_on_host(kept, range(2), decoded)
        assert kept.is_in(decoded) and memory.nbytes
    one.group.close_all()
    print("done", flush=True)


def main() -> None:
    folder, ranks, case = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    children = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            run_rank(folder, rank, ranks, case)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [-9 if rank == 1 and case == "killed" else 0 for rank in range(ranks)], codes


if __name__ == "__main__":
    main()
