"""Steps of group_worker.py: blocks that ranks say they need, and ranks that leave."""

from __future__ import annotations

import os
import time
from array import array
from pathlib import Path
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
from overwire import _verbs, distributed, plumbing
from overwire.distributed import blocks as block_loads
from overwire.distributed import relays

# Where a rank's blocks are loaded to.
DEVICE = "cpu"


def leaving(step: str, folder: Path, method: Any) -> Any:
    """In the place of a method that a rank calls when the engines have met: rank 1 ends
    there, once all others have come so far, too: what it has sent them they have then. Its
    engine, which has no requests, has kept theirs waiting."""
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


def wants(path: Path, rank: int, size: int) -> dict[str, list[tuple[int, int, int, int]]]:
    """Blocks of every kind: halves of either dimension, both, whole tensors, two of one
    tensor, what another rank has too, and what only one rank wants."""
    out: dict[str, list[tuple[int, int, int, int]]] = {}
    for at, (name, tensor) in enumerate(sorted(ow.load_file(path).items())):
        if tensor.dtype == torch.float4_e2m1fn_x2:
            continue
        if tensor.dim() < 2 or not tensor.numel():
            blocks = [(0, -1, 0, -1)] * bool(tensor.numel() and tensor.dim() and at % size == rank)
        else:
            rows, cols = tensor.shape[:2]
            (lo0, hi0), (lo1, hi1) = distributed.shard_range(rows, size, rank), distributed.shard_range(cols, size, rank)
            twice = [(lo0, hi0, 0, -1), (0, 1, 0, cols // 2)]
            ways = [[(lo0, hi0, 0, -1)], [(0, rows, lo1, hi1)], [(0, -1, 0, -1)], twice, [(lo0, hi0, lo1, hi1)]]
            blocks = [one for one in ways[at % 5] if (one[0] < one[1] or one[1] == -1) and (one[2] < one[3] or one[3] == -1)]
        out[name] = blocks
    return out


def together(path: Path, prepared: Any = None, first: Any = lambda: None) -> Any:
    """Loads `wants` by the group and compares; returns what did it, or why none did."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    whole = ow.load_file(expected_of(path))
    with ow.safe_open(path, framework="pt", device=DEVICE) as file:
        requests, targets = array("q"), []
        for name, blocks in wants(expected_of(path), rank, size).items():
            for lo0, hi0, lo1, hi1 in blocks:
                want = whole[name][lo0 : None if hi0 < 0 else hi0]
                want = want if want.dim() < 2 else want[:, lo1 : None if hi1 < 0 else hi1]
                target = torch.empty(want.shape, dtype=want.dtype, device=DEVICE)
                targets.append((name, target, want))
                requests.extend((file._live().place(name), target.data_ptr(), lo0, hi0, lo1, hi1))

        def prepare() -> Any:
            if prepared is not None:
                return prepared()
            return plumbing.Blocks(DEVICE, [file], [requests.tobytes()], ["the table"])

        made, why = plumbing.meet(world, prepare)
        if made is None or (why := made.land(first)):
            return why
        for name, target, want in targets:
            mine, want = target.cpu().contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(mine, want), name
        return made


def expected_of(path: Path) -> Path:
    return path.parent / "plain.safetensors"


def blocks(folder: Path) -> None:
    """Ranks that say which blocks they need read each stored byte once; what fails on one
    ends all, and where one cannot take part, all hear of it."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    relays.SHARE = (1 << 20) + 4096
    assert plumbing.shares(world)
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

    def fails() -> Any:
        raise ow.FormatError("overwire: rank 1's own")

    for named in ({"prepared": fails}, {"first": fails}):
        try:
            together(good, **named if rank == 1 else {})
        except ow.FormatError as error:
            assert rank == 1 or "on rank 1: rank 1's own" in str(error), error
        else:
            raise AssertionError("rank 1's error is lost")
    assert together(good, (lambda: None) if rank == 1 else None) == "rank 1 has no plan"
    other = plumbing.Blocks(DEVICE, [], [], ["another table"])
    assert together(good, (lambda: other) if rank == 1 else None) == "tables differ between ranks 0 and 1"
    if rank == 1:
        relays.relay_join = lambda *_: (_ for _ in ()).throw(ow.NotSupportedError("overwire: no peer access"))
    assert together(good) == "rank 1: overwire: no peer access"
    relays.relay_join = _verbs.relay_join
    assert together(good).read >= 0


def block_gone(folder: Path) -> None:
    """A rank that dies meanwhile: the others say so by themselves."""
    relays.SHARE = (1 << 20) + 4096
    block_loads.Job.wait = leaving("block_gone", folder, block_loads.Job.wait)
    if dist.get_rank() == 1:
        block_loads.relay_aim = lambda *_: None
    try:
        together(folder / "compressed.safetensors")
    except ow.IOFailure as error:
        assert "rank 1 is gone" in str(error), error
    else:
        raise AssertionError("no rank missed rank 1")
    print("done block_gone", flush=True)
    os._exit(0)
