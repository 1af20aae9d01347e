"""Runs the ranks of tests/offload/test_offload_groups.py as forks of one process. The arguments are a folder, the
number of ranks, and the cases."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
from overwire.offloading import tiers

# A rank that runs for more seconds than this is considered to hang.
HANGS = 120


class Layer(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, rows), torch.nn.Linear(rows, 64)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    """A model that runs its blocks in any order. Some blocks are smaller than one page for each rank."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(Layer(rows) for rows in (700, 300, 1, 500, 300)).bfloat16()
        self.order = list(range(5))
        self.before = [parameter.detach().clone() for parameter in self.parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in self.order:
            x = self.layers[at](x)
        return x

    def assert_whole(self) -> None:
        assert all(map(torch.equal, self.parameters(), self.before))


@torch.inference_mode()
def run(model: Model, order: list[int] | None = None) -> torch.Tensor:
    model.order = list(range(5)) if order is None else order
    return model(torch.linspace(-1, 1, 128).reshape(2, 64).bfloat16()).clone()


def fails(kind: type[BaseException], *words: str) -> Any:
    """Returns a context that expects an error of this class with these words."""

    class Expect:
        error: Any = None

        def __enter__(self) -> Any:
            return self

        def __exit__(self, found: Any, error: Any, trace: Any) -> bool:
            self.error = error
            assert isinstance(error, kind) and all(word in str(error) for word in words), repr(error)
            return True

    return Expect()


def same(group: Any, rank: int, ranks: int) -> None:
    """Checks that outputs match the resident model's in each order of the blocks, and that each rank stores its
    part."""
    model, plain = Model(), Model()
    with ow.offload(Model(), "cpu") as alone:
        stored = alone.stored
    folder = tempfile.TemporaryDirectory()
    ow.save_model(plain, f"{folder.name}/weights.safetensors", compress=True)
    options: list[dict[str, Any]] = [{}, {"slots": 1}, {"slots": 3, "keep": 80_000}, {"where": "auto", "room": 100_000}]
    options += [{**one, "source": f"{folder.name}/weights.safetensors"} for one in (options[0], options[3])]
    for one in options:
        with ow.offload(model, "cpu", group=group, **one) as offloaded:
            every: list[Any] = [None] * ranks
            dist.all_gather_object(every, offloaded.stored, group=group)
            if not one:
                assert sum(every) == stored and max(every) < stored / ranks + 5 * 4096, (every, stored)
            assert offloaded.blocks == every_name(one), offloaded.blocks
            for order in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 0, 2, 2, 1], [3], [1, 3, 0], [0, 1, 2, 3, 4]):
                assert torch.equal(run(model, order), run(plain, order)), (one, order)
            assert not any(block.is_changed for block in offloaded._away), "the digests are wrong"
        model.assert_whole()  # a rank may close while another one runs the last pass
    folder.cleanup()  # a forked rank exits without cleaning up


def every_name(options: dict[str, Any]) -> list[str]:
    model = Model()
    with ow.offload(model, "cpu", keep=options.get("keep")) as offloaded:
        return offloaded.blocks


def reads(group: Any, rank: int, ranks: int) -> None:
    """Each rank reads its part of each block's stored chunks. A chunk that is in two parts is read twice."""
    folder = shared_folder(group)
    sides, chunk = {"small": 64, "large": 2048}, 1 << 20
    if rank == 0:
        for name, side in sides.items():
            ow.save_model(squares(side, "cpu"), folder / f"{name}.safetensors", compress=True)
    dist.barrier(group)
    for name, side in sides.items():  # the first offload also imports modules
        before, model = bytes_read(), squares(side, "meta")
        with ow.offload(model, "cpu", group=group, source=folder / f"{name}.safetensors") as offloaded:
            mine, part = bytes_read() - before, offloaded.stored
        assert all(map(torch.equal, model.parameters(), squares(side, "cpu").parameters()))
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (mine, part), group=group)
    stored, noise = sum(part for _, part in every), 500_000  # the header is read with some chunks
    assert all(mine <= part + 2 * 2 * chunk * 0.7 + noise for mine, part in every), every
    assert stored <= sum(mine for mine, _ in every) <= stored + 2 * (ranks - 1) * chunk * 0.7 + ranks * noise, every


def squares(side: int, device: str) -> Any:
    """Returns a model of two blocks."""
    torch.manual_seed(4)
    with torch.device(device):
        layers = torch.nn.ModuleList(torch.nn.Linear(side, side, bias=False) for _ in range(2)).bfloat16()
    return torch.nn.Sequential(layers).requires_grad_(False)


def bytes_read() -> int:
    """Returns how many bytes this process has read with system calls."""
    with open("/proc/self/io") as counts:
        return int(next(line for line in counts if line.startswith("rchar")).split()[1])


def shared_folder(group: Any) -> Path:
    """Returns a new folder, the same on all ranks."""
    names = [tempfile.mkdtemp(dir=sys.argv[1])]
    dist.broadcast_object_list(names, group=group, group_src=0)
    return Path(names[0])


def damaged(group: Any, rank: int, ranks: int) -> None:
    """If a chunk is wrong, or one rank has a different file, all ranks raise an error, and the model is on meta
    again."""
    folder = shared_folder(group)
    if rank == 0:
        for name in ("one", "two"):
            ow.save_model(squares(128, "cpu"), folder / f"{name}.safetensors", compress=True)
        with open(folder / "one.safetensors", "r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(b"damaged")
        for name in ("four", "five"):
            model = squares(128, "cpu")
            torch.manual_seed(len(name) + (name == "five"))
            for parameter in model.parameters():  # bytes that do not compress, so the files have the same size
                parameter.data = torch.randint(0, 256, (128, 256), dtype=torch.uint8).view(torch.bfloat16)
            ow.save_model(model, folder / f"{name}.safetensors", compress=True)
    dist.barrier(group)
    model = squares(128, "meta")
    with fails(ow.CorruptError, "one.safetensors", "0.1.weight"):
        ow.offload(model, "cpu", group=group, source=folder / "one.safetensors")
    with fails(ow.CorruptError, "is not the same file on ranks 0 and 1"):
        ow.offload(model, "cpu", group=group, source=folder / f"{'five' if rank == 1 else 'four'}.safetensors")
    with fails(ow.ArgumentError, "the content of source= differs between ranks 0 and 1"):
        ow.offload(model, "cpu", group=group, source=folder / f"{'two' if rank == 1 else 'four'}.safetensors")
    assert all(one.is_meta for one in model.parameters())
    with ow.offload(model, "cpu", group=group, source=folder / "two.safetensors"):
        pass
    assert all(map(torch.equal, model.parameters(), squares(128, "cpu").parameters()))


def arguments(group: Any, rank: int, ranks: int) -> None:
    """Checks that arguments which differ between ranks, or are refused, raise an error on all ranks and leave the model
    unchanged."""
    model = Model(3 if rank != 1 else 4)
    with fails(ow.ArgumentError, "'layers.0' has different weights on rank 1"):
        ow.offload(model, "cpu", group=group)
    model.assert_whole()
    with fails(ow.ArgumentError, "where='device'"):
        ow.offload(model, "cpu", group=group, where="device")
    with fails(ow.ArgumentError, "the streamed blocks differs between ranks 0 and 1"):
        ow.offload(model, "cpu", group=group, keep=200_000 if rank == 1 else None)
    with fails(ow.ArgumentError, "slots differs between ranks 0 and 1"):
        ow.offload(model, "cpu", group=group, slots=3 if rank == 1 else 2)
    with fails(ow.OutOfMemoryError, "max_memory"):
        ow.offload(Model(), "cpu", group=group, max_memory=60_000 // ranks)
    model.assert_whole()


def beginning(group: Any, rank: int, ranks: int) -> None:
    """Checks that all ranks raise an error if one fails while blocks are stored, and that each has all weights
    again."""
    model, encode, calls = Model(), tiers.encode_block, [0]

    def fail(*given: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 4:
            raise ow.OutOfMemoryError("no memory")
        return encode(*given)

    tiers.encode_block = fail
    try:
        with fails(ow.OutOfMemoryError, "no memory", "'layers.3'"):
            ow.offload(model, "cpu", group=group)
    finally:
        tiers.encode_block = encode
    model.assert_whole()


def order(group: Any, rank: int, ranks: int) -> None:
    """Checks that all ranks raise an error that names the block if one rank runs another block, and that they can start
    again."""
    model = Model()
    for _ in range(2):
        with ow.offload(model, "cpu", group=group):
            expected = run(model)
            with fails(ow.ArgumentError, "rank 1 runs block 'layers.3' where rank 0 runs 'layers.1'"):
                run(model, [0, 1, 2, 3] if rank != 1 else [0, 3, 1, 2])
            with fails(ow.IOFailure, "cannot be used after an earlier error: offload: rank 1"):
                run(model, [4])
        model.assert_whole()
        assert torch.equal(run(model), expected)
        dist.barrier(group)


def change(module: Any, args: Any, output: Any) -> None:
    module.up.bias.data.add_(1)


def escapes(group: Any, rank: int, ranks: int) -> None:
    """Checks that all ranks load the same blocks and give the right outputs if blocks keep or change their weights."""
    model, plain = Model(), Model()

    def keep(module: Any, args: Any, output: Any) -> None:
        module.kept = module.up.weight[0]

    for one in (model, plain):
        one.layers[1].register_forward_hook(keep)
        one.layers[3].register_forward_hook(change)
    with ow.offload(model, "cpu", group=group):
        for _ in range(3):
            assert torch.equal(run(model), run(plain))
            assert torch.equal(model.layers[1].kept, plain.layers[1].kept)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def differs(group: Any, rank: int, ranks: int) -> None:
    """Checks that all outputs are right if only rank 1 keeps a view of a block's weights, or changes a block."""
    kept: list[Any] = []
    for slots in (1, 2, 5):
        model, plain = Model(), Model()
        if rank == 1:
            for one in (model, plain):
                one.layers[1].register_forward_hook(lambda module, *_: kept.append(module.up.weight.detach()[:2]))
                one.layers[3].register_forward_hook(change)
        with ow.offload(model, "cpu", group=group, slots=slots):
            orders = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 4, 1], [3, 2, 0, 1], [4, 1, 1, 0]]
            for number, order in enumerate(orders * 3):
                assert torch.equal(run(model, order), run(plain, order)), (slots, number)
                if number % 4 == 2:
                    kept.clear()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def lost(group: Any, rank: int, act: Callable[[Any], None], *words: str) -> None:
    """Lets rank 1 act in the middle of a pass, and checks that the other ranks raise an error with these words and have
    all weights."""
    model = Model()
    offloaded = ow.offload(model, "cpu", group=group)
    run(model)
    if rank == 1:
        run(model, [0, 1])
        act(offloaded)
        with fails(ow.IOFailure, "has closed"):
            run(model, [2, 3])  # the other ranks have announced the first block
        offloaded.close()
        model.assert_whole()
        return
    began = time.monotonic()
    with fails(ow.IOFailure, "block 'layers.2'", "Offloaded.close() restores") as failure:
        run(model)
    # If this rank is slow, another rank may already have raised this error and closed.
    assert "has closed" in str(failure.error) or all(word in str(failure.error) for word in words), failure.error
    assert time.monotonic() - began < 20
    offloaded.close()
    model.assert_whole()


def killed(group: Any, rank: int, ranks: int) -> None:
    lost(group, rank, lambda _: os.kill(os.getpid(), signal.SIGKILL), "rank 1 of this host is gone")


def closed(group: Any, rank: int, ranks: int) -> None:
    lost(group, rank, close_and_leave, "rank 1 of this host has closed")


def close_and_leave(offloaded: Any) -> None:
    offloaded.close()
    print("done", flush=True)
    os._exit(0)


def late(group: Any, rank: int, ranks: int) -> None:
    lost(group, rank, lambda _: time.sleep(8), "rank 1 has not run it within 3 s")


def interrupted(group: Any, rank: int, ranks: int) -> None:
    """Checks that Ctrl-C on a rank that waits for the others ends the pass on all ranks."""
    model = Model()
    with ow.offload(model, "cpu", group=group):
        run(model)
        if rank == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with fails(KeyboardInterrupt):
                run(model, [2])
            dist.barrier(group)
        else:
            dist.barrier(group)  # rank 1 was interrupted
            with fails(ow.IOFailure, "rank 1 of this host"):
                run(model, [2, 3, 4])
    model.assert_whole()


def dies_beginning(group: Any, rank: int, ranks: int) -> None:
    """Checks that, if a rank dies while blocks are stored, all other ranks raise an error and have all weights."""
    model, encode, calls = Model(), tiers.encode_block, [0]

    def die(*given: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(*given)

    tiers.encode_block = die
    with fails(ow.IOFailure, "rank 1"):
        ow.offload(model, "cpu", group=group)
    model.assert_whole()


CASES = {one.__name__: one for one in (same, reads, damaged, arguments, beginning, order, escapes, differs, killed)}
CASES |= {one.__name__: one for one in (closed, late, interrupted, dies_beginning)}


def run_rank(folder: Path, rank: int, ranks: int, cases: list[str]) -> None:
    signal.alarm(HANGS)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{ranks}-{cases[0]}"), ranks)
    limit = datetime.timedelta(seconds=HANGS)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=limit, store=store)
    group = dist.new_group(timeout=datetime.timedelta(seconds=3 if cases == ["late"] else HANGS))
    dist.barrier()
    for case in cases:
        CASES[case](group, rank, ranks)
        until = time.monotonic() + 20  # memory is freed once all ranks have closed
        while any(map(is_shared, os.listdir("/proc/self/fd"))):
            assert time.monotonic() < until, case
            time.sleep(0.05)
    print("done", flush=True)


def is_shared(number: str) -> bool:
    with suppress(FileNotFoundError):
        return "memfd:overwire" in os.readlink(f"/proc/self/fd/{number}")
    return False


def main() -> None:
    folder, ranks, cases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    children = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            run_rank(folder, rank, ranks, cases)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0 if rank != 1 or not {"killed", "dies_beginning"} & set(cases) else -9 for rank in range(ranks)], codes


if __name__ == "__main__":
    main()
