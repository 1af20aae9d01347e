"""Steps of group_worker.py in which each rank requests blocks, or a rank exits."""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
from overwire import _compat_api, _verbs, distributed
from overwire.distributed import blocks as block_loads
from overwire.distributed import group as grouping
from overwire.distributed import load as relays
from overwire.distributed.blocks import Blocks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from processes import overwire_serve  # noqa: E402

# Ranks load tensors to this device.
DEVICE = "cpu"

Wanted = dict[str, list[tuple[int, int, int, int]]]


def leaving(step: str, folder: Path, method: Any) -> Any:
    """Replaces a method that each rank calls after the engines have connected. When all ranks have reached it, rank 1
    exits in it. The other ranks have then received its messages but still wait for its engine, which has answered no
    request."""
    rank, size = dist.get_rank(), dist.get_world_size()
    signs = [folder / f"{step}-{size}-{other}" for other in range(size)]

    def call(*args: Any, **kwargs: Any) -> Any:
        signs[rank].touch()
        if rank != 1:
            return method(*args, **kwargs)
        while not all(sign.exists() for sign in signs):
            time.sleep(0.01)
        print(f"done {step}", flush=True)
        os._exit(0)

    return call


def wants(path: Path, rank: int, size: int) -> Wanted:
    """Returns blocks of every kind: a rank's part along one or both dimensions, whole tensors, two blocks of one
    tensor, and blocks that only this rank or also another rank wants."""
    out: Wanted = {}
    for at, (name, tensor) in enumerate(sorted(ow.load_file(path).items())):
        if tensor.dtype == torch.float4_e2m1fn_x2:
            continue
        if tensor.dim() < 2 or not tensor.numel():
            blocks = [(0, -1, 0, -1)] * bool(tensor.numel() and tensor.dim() and at % size == rank)
        else:
            rows, cols = tensor.shape[:2]
            (lo0, hi0), (lo1, hi1) = (
                distributed.shard_range(rows, size, rank), distributed.shard_range(cols, size, rank),
            )
            twice = [(lo0, hi0, 0, -1), (0, 1, 0, cols // 2)]
            ways = [[(lo0, hi0, 0, -1)], [(0, rows, lo1, hi1)], [(0, -1, 0, -1)], twice, [(lo0, hi0, lo1, hi1)]]
            blocks = [
                one for one in ways[at % 5] if (one[0] < one[1] or one[1] == -1) and (one[2] < one[3] or one[3] == -1)
            ]
        out[name] = blocks
    return out


def together(
    path: Path,
    *more: Path,
    prepared: Callable[[], Any] | None = None,
    first: Callable[[], None] = lambda: None,
    opened: Callable[[], None] = lambda: None,
    wanted: Callable[[Path, int, int], Wanted] = wants,
    where: Callable[[Path], Any] = lambda path: path,
    group: Any = None,
) -> Any:
    """Loads the wanted blocks of files as a group and compares them. Returns the load, or the reason why there was
    none. opened: called when the files are open and nothing has been read. where: returns a file's path or URL."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), group or dist.group.WORLD
    with ExitStack() as stack:
        files, requests, targets = [], [], []
        for one in (path, *more):
            whole = ow.load_file(expected_of(one), mmap=False)
            files.append(stack.enter_context(ow.safe_open(where(one), framework="pt", device=DEVICE)))
            requests.append(array("q"))
            for name, blocks in wanted(expected_of(one), rank, size).items():
                for lo0, hi0, lo1, hi1 in blocks:
                    want = whole[name][lo0 : None if hi0 < 0 else hi0]
                    want = want if want.dim() < 2 else want[:, lo1 : None if hi1 < 0 else hi1]
                    target = torch.empty(want.shape, dtype=want.dtype, device=DEVICE)
                    targets.append((f"{one.name} {name}", target, want))
                    requests[-1].extend((files[-1]._live_model().place(name), target.data_ptr(), lo0, hi0, lo1, hi1))

        def prepare() -> Any:
            if prepared is not None:
                return prepared()
            return Blocks(DEVICE, files, [one.tobytes() for one in requests], ["the table"] * len(files))

        opened()
        made, why = _compat_api.meet_to_load(world, prepare)
        if made is None or (why := made.try_land(first)):
            return why
        for name, target, want in targets:
            mine, want = (
                target.cpu().contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8),
            )
            assert torch.equal(mine, want), name
        return made


def blinded() -> Iterator[int]:
    """Makes one rank's engine unable to map another rank's memory: first rank 0's, then rank 1's. On a GPU, only rank
    1's."""
    for lost in (0, 1) if DEVICE == "cpu" else (1,):
        if dist.get_rank() == lost:
            relays.relay_join = join_strangers
        yield lost
        relays.relay_join = _verbs.relay_join


def join_strangers(offers: list[Any], job: int) -> None:
    """Simulates separate process id namespaces: the process ids of other ranks are invalid."""
    me = dist.get_rank()
    _verbs.relay_join([one if one["rank"] == me else {**one, "process": 1 << 30} for one in offers], job)


def expected_of(path: Path) -> Path:
    """Returns the plain file with the tensors that a file should have. The file itself may be damaged or compressed."""
    other = path.parent / f"{path.stem.partition('-')[0]}-plain.safetensors"
    return other if other.exists() else path.parent / "plain.safetensors"


def blocks(folder: Path) -> None:
    """Ranks that request blocks together read each stored byte once. A failure on one rank ends the load on all ranks.
    If one rank cannot take part, all ranks get the reason."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    block_loads.SHARE = (1 << 20) + 4096
    assert _compat_api.should_share_reading(world, False) and _compat_api.should_share_reading(world, True)
    for file in ("plain.safetensors", "compressed.safetensors"):
        made = together(folder / file)
        read: list[Any] = [None] * size
        dist.all_gather_object(read, made.read)
        stored = (folder / file).stat().st_size
        assert 0.5 * stored < sum(read) <= 1.05 * stored, (file, read, stored)
        assert DEVICE == "cpu" or made.copied, file
    good, met = folder / "compressed.safetensors", []
    for reader in range(size):
        try:
            together(folder / "damaged.safetensors" if rank == reader else good)
        except ow.CorruptError as error:
            assert "checksum" in str(error) and error.tensor and (rank == reader or f"on rank {reader}" in str(error)), error
            met.append(reader)
    assert len(met) == 1, met

    # The rank with the damage may also free its memory before other ranks map it.
    join, relays.relay_join = relays.relay_join, lambda *_: (time.sleep(0 if rank == met[0] else 0.3), join(*_))[1]
    try:
        together(folder / "damaged.safetensors" if rank == met[0] else good)
    except ow.CorruptError as error:
        assert rank == met[0] or f"on rank {met[0]}" in str(error), error
    else:
        raise AssertionError("the damage was not reported")
    finally:
        relays.relay_join = join

    def fails() -> Any:
        raise ow.FormatError("overwire: rank 1's own")

    for named in ({"prepared": fails}, {"first": fails}):
        try:
            together(good, **named if rank == 1 else {})
        except ow.FormatError as error:
            assert rank == 1 or "on rank 1: rank 1's own" in str(error), error
        else:
            raise AssertionError("rank 1's error was not reported")
    assert together(good, prepared=(lambda: None) if rank == 1 else None) == "rank 1 has no plan"
    other = Blocks(DEVICE, [], [], ["another table"])
    assert together(good, prepared=(lambda: other) if rank == 1 else None) == "tables differ between ranks 0 and 1"
    for lost in blinded():
        why = together(good)
        assert why and (rank != lost or "process 1073741824" in why), why
    assert together(good).read >= 0


def block_stores(folder: Path) -> None:
    """By default, ranks share the reads from a store, so the server sends each byte once."""
    size, world = dist.get_world_size(), dist.group.WORLD
    block_loads.SHARE = (1 << 20) + 4096
    assert _compat_api.should_share_reading(world, True) and not _compat_api.should_share_reading(world, False)
    with ExitStack() as stack:
        url = [stack.enter_context(overwire_serve(folder)) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(url)
        for file in ("plain.safetensors", "compressed.safetensors"):
            made = together(folder / file, where=lambda path: url[0] + path.name)
            read: list[Any] = [None] * size
            dist.all_gather_object(read, made.read)
            stored = (folder / file).stat().st_size
            assert 0.5 * stored < sum(read) <= 1.05 * stored, (file, read, stored)
        dist.barrier()  # rank 0's `with` block stops the server


def shards(folder: Path, at: Path) -> list[Path]:
    """Writes files that have the same tensor names, tied tensors and every codec. Nothing is requested from one of
    them."""
    sizes = {"a": (1021, 512), "b": (700, 1030), "c": (512, 600), "unwanted": (300, 300)}
    if dist.get_rank() == 0:
        at.mkdir(exist_ok=True)  # another test may have created the file
        for seed, (name, shape) in enumerate(sizes.items()):
            torch.manual_seed(seed)
            same = torch.randn(shape).bfloat16()
            tensors = {"same": same, "tied": same, "rows": torch.randn(shape), f"only.{name}": torch.randn(77, 3)}
            ow.save_file(tensors, at / f"{name}-plain.safetensors", compress=False)
            ow.save_file(tensors, at / f"{name}-packed.safetensors", level="smaller" if name == "c" else "default")
        for name in ("a", "b", "c"):
            damaged = bytearray((at / f"{name}-packed.safetensors").read_bytes())
            damaged[len(damaged) // 2] ^= 0x40
            (at / f"{name}-damaged.safetensors").write_bytes(damaged)
    dist.barrier()
    return [at / f"{name}-packed.safetensors" for name in sizes]


def block_shards(folder: Path) -> None:
    """One group load gets blocks from several files, even if these have the same tensor names. An error names its file.
    The bytes are those of the files that were opened."""
    rank, size = dist.get_rank(), dist.get_world_size()
    block_loads.SHARE = (1 << 20) + 4096
    files = shards(folder, folder / f"shards-{size}")
    plain = [expected_of(file) for file in files]
    begun: list[int] = []
    relays.relay = lambda spec, *rest: (begun.append(len(spec["more"])), _verbs.relay(spec, *rest))[1]

    def some(path: Path, rank: int, size: int) -> Wanted:
        return {} if path.name.startswith("unwanted") else wants(path, rank, size)

    def of_last(path: Path, rank: int, size: int) -> Wanted:
        return some(path, rank, size) if rank == size - 1 or path.name.startswith("c") else {}

    for paths in (files, plain, [files[0], plain[1], files[2], plain[3]], [plain[3], files[2], plain[0], files[1]]):
        for wanted in (some, of_last):
            made = together(*paths, wanted=wanted)
            read: list[Any] = [None] * size
            dist.all_gather_object(read, made.read)
            stored = sum(path.stat().st_size for path in paths if not path.name.startswith("unwanted"))
            # Data of level "smaller" is decoded while it is read, so the decoded size is counted.
            stored = max(stored, sum(path.stat().st_size for path in plain[:3]) if files[2] in paths else 0)
            assert made.read and sum(read) <= 1.05 * stored, (paths, read, stored)
    assert begun == [2] * 8, begun
    assert together(*files, wanted=lambda *_: {}).read == 0 and len(begun) == 8

    for number, name in enumerate("abc"):
        damaged, met = files.copy(), []
        damaged[number] = files[number].with_name(f"{name}-damaged.safetensors")
        for reader in range(size):
            try:
                together(*(damaged if rank == reader else files), wanted=some)
            except ow.CorruptError as error:
                assert error.source == str(damaged[number]) and damaged[number].name in str(error), error
                assert error.tensor in ("same", "rows") and error.chunk is not None and error.chunk >= 0, error
                assert rank == reader or f"on rank {reader}" in str(error), error
                met.append(reader)
        assert met, name

    def replaced() -> None:
        dist.barrier()
        if rank == 0:
            for file in files:
                (file.parent / "other").write_bytes(files[3].read_bytes())
                os.replace(file.parent / "other", file)
        dist.barrier()

    def cut_short() -> None:
        dist.barrier()
        if rank == 0:
            os.truncate(plain[1], plain[1].stat().st_size // 2)
        dist.barrier()

    assert together(*files, wanted=some, opened=replaced).read > 0
    try:
        together(*plain, wanted=some, opened=cut_short)
    except ow.CorruptError as error:
        assert error.source == str(plain[1]), error
    else:
        raise AssertionError("a truncated file was loaded")


def block_hosts(folder: Path) -> None:
    """One rank is on one host and two ranks are on another. A host that needs nothing reads nothing. The size of a
    share is raised if the largest chunk does not fit into it."""
    rank, name = dist.get_rank(), grouping.host_identity
    block_loads.SHARE = 256  # too small for a chunk
    grouping.host_identity = lambda: "alone" if rank == 0 else "together"
    world = dist.new_group()
    for idle in ((), (0,), (1, 2)):
        made = together(
            folder / "compressed.safetensors",
            folder / "plain.safetensors",
            wanted=lambda path, rank, size, idle=idle: {} if rank in idle else wants(path, rank, size),
            group=world,
        )
        assert (made.read == 0) == (rank in idle), (idle, made.read)
    grouping.host_identity = name


def block_gone(folder: Path) -> None:
    """If a rank dies during a load, the other ranks detect it and get an error."""
    block_loads.SHARE = (1 << 20) + 4096
    relays.Job.next = leaving("block_gone", folder, relays.Job.next)
    if dist.get_rank() == 1:
        relays.relay_aim = lambda *_: None
    try:
        together(folder / "compressed.safetensors")
    except ow.IOFailure as error:
        assert "rank 1 is gone" in str(error), error
    else:
        raise AssertionError("no rank reported the loss of rank 1")
    print("done block_gone", flush=True)
    os._exit(0)
