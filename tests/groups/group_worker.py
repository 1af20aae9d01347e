"""Runs the ranks of tests/groups/test_distributed.py as forks of one process that has imported torch. The arguments are
the steps."""

from __future__ import annotations

import datetime
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import group_blocks
import group_cells
import overwire as ow
import torch
import torch.distributed as dist
from group_apart import closed, forked_streams, freed, interrupted, refused, replaced, stopped
from group_blocks import blinded, block_gone, block_hosts, block_shards, block_stores, blocks, join_strangers, leaving
from group_counts import counted, reads
from group_faults import faults
from group_recorded import recorded
from overwire import _verbs, distributed
from overwire.distributed import group as grouping
from overwire.distributed import load as relays
from overwire.distributed import tensors as loading
from overwire.model.opened import Model

# Steps of other modules, which can also be named on the command line.
__all__ = ["block_gone", "block_hosts", "block_shards", "block_stores", "blocks", "recorded"]
__all__ += ["closed", "faults", "forked_streams", "freed", "interrupted", "refused", "replaced"]
__all__ += ["stopped"]

BACKEND = os.environ.get("GROUP_BACKEND", "gloo")
# Ranks load tensors to this device.
DEVICE = "cpu"


def expected(path: Path, shard: dict[str, int], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Returns the tensors that loading and slicing on one rank give."""
    whole = ow.load_file(path)
    out = {}
    for name, tensor in whole.items():
        dim = shard.get(name)
        if dim is not None:
            lo, hi = distributed.shard_range(tensor.shape[dim], ranks, rank)
            raw = tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor
            tensor = raw.narrow(dim, lo, hi - lo).contiguous().view(tensor.dtype)
        out[name] = tensor
    return out


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want), (list(got), list(want))
    for name, tensor in want.items():
        assert got[name].device.type == DEVICE.partition(":")[0]
        mine = got[name].cpu()
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape, (name, mine.shape, tensor.shape)
        assert mine.is_contiguous(), name
        assert (
            DEVICE != "cpu" or mine.untyped_storage().nbytes() <= max(tensor.numel() * tensor.element_size(), 64) + 64
        ), name
        assert torch.equal(mine.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


SHARD = {"rows": 0, "uneven": 0, "columns": 1, "deep": 2, "few": 0, "bytes8": -1, "small.0": 0, "small.1": 1, "pairs": 1}


def by(exchange: str) -> None:
    """Sets OVERWIRE_EXCHANGE for the following loads."""
    grouping.exchange_setting = lambda: exchange


def small() -> None:
    """Makes buffers so small that a load has many pieces, several rounds of the ring, and several windows of a
    stream."""
    relays.SHARE, relays._AGREE, loading._WINDOW = (1 << 20) + 4096, 3, 3 << 20


def every_way(folder: Path, group: Any, *files: str) -> None:
    small()
    for file in files or ("plain.safetensors", "compressed.safetensors"):
        want = expected(folder / file, SHARD, dist.get_rank(group), dist.get_world_size(group))
        for exchange in ("collective", "none"):
            by(exchange)
            for shard in ({}, SHARD):
                got = ow.load_file(folder / file, group=group, shard=shard, device=DEVICE)
                same(got, want if shard else expected(folder / file, {}, 0, 1))


def cells(folder: Path) -> None:
    """Every function works with every kind of source, for whole tensors and slices."""
    small()
    group_cells.cells(folder, DEVICE, expected, by)


def tiny(folder: Path) -> None:
    """Small tensors of all kinds (of odd sizes, empty, tied, without dimensions, with fewer rows than ranks) load
    through mapped memory and collectives, whole and cut along either dimension."""
    rank, size, tied = dist.get_rank(), dist.get_world_size(), torch.randn(129, 67).bfloat16()
    tensors = {"tied.a": tied, "tied.b": tied, "odd": torch.randn(257, 31), "few": torch.randn(3, 5)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 7), "line": torch.arange(1001).half()}
    for coding in ("plain", "compressed"):
        path = folder / f"tiny-{coding}.safetensors"
        if rank == 0:
            ow.save_file(tensors, path, compress=coding == "compressed")
        dist.barrier()
        for shard in ({}, {"tied.a": 0, "tied.b": 1, "odd": 1, "few": 0, "empty": 0, "line": 0}):
            want = expected(path, shard, rank, size)
            for exchange in ("mapped", "collective"):
                by(exchange)
                same(ow.load_file(path, group=dist.group.WORLD, shard=shard, device=DEVICE), want)


def hosts(folder: Path) -> None:
    """Ranks on two hosts (two and two, then one and three) map the memory of the ranks on their own host. Each host
    reads the file once."""
    rank, path, size = dist.get_rank(), folder / "compressed.safetensors", (folder / "compressed.safetensors").stat().st_size
    small()
    by("mapped")
    for name, here in ((lambda: f"host{rank // 2}", (0, 1)), (lambda: "alone" if rank == 0 else "together", (1, 2, 3))):
        grouping.host_identity = name
        world = dist.new_group()  # a new group, whose ranks have not exchanged anything
        read = reads(world)
        for shard in ({}, SHARD):
            same(ow.load_file(path, group=world, shard=shard, device=DEVICE), expected(path, shard, rank, 4))
            every = read()
            assert size * 0.7 < sum(every[at] for at in here) < 1.02 * size, (here, every, size)


def spread(folder: Path) -> None:
    """Two hosts with two ranks each together read every stored byte once. A failure on one rank ends the load on
    all."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.new_group()
    grouping.host_identity = lambda: f"host{rank // 2}"
    relays.SHARE, relays._AGREE = 3 << 20, 1  # pieces of several chunks
    by("collective")
    read = reads(world)
    for file in ("plain.safetensors", "compressed.safetensors"):
        path, stored = folder / file, (folder / file).stat().st_size
        for shard in ({}, SHARD):
            same(ow.load_file(path, group=world, shard=shard, device=DEVICE), expected(path, shard, rank, size))
            every = read()
            assert 0.9 * stored < sum(every) < 1.02 * stored and max(every) < 0.6 * stored, (file, every, stored)
    met = 0
    for reader in range(size):
        try:
            ow.load_file(folder / f"{'damaged' if rank == reader else 'compressed'}.safetensors", group=world, device=DEVICE)
        except ow.CorruptError as error:
            assert error.tensor and (rank == reader or f"on rank {reader}" in str(error)), error
            met += 1
    assert met == 1, met


def afar(folder: Path) -> None:
    """Ranks on several hosts share reads from a store, so the server sends each byte once. Local files are read on each
    host."""
    rank, size, path = dist.get_rank(), dist.get_world_size(), folder / "compressed.safetensors"
    stored, sent = path.stat().st_size, []
    relays.SHARE = (1 << 20) + 4096
    by("auto")
    for hosts in (size, 2):
        grouping.host_identity = lambda hosts=hosts: f"host{rank % hosts}"
        world = dist.new_group()
        read = reads(world)
        with ExitStack() as stack:
            url = [stack.enter_context(counted(path, sent)) if rank == 0 else ""]
            dist.broadcast_object_list(url)
            for shard in ({}, SHARD):
                sent.clear()
                dist.barrier()
                got = ow.load_file(url[0], group=world, shard=shard, device=DEVICE)
                assert 0.9 * stored < sum(read()) < 1.02 * stored
                same(got, expected(path, shard, rank, size))
                # Each rank also reads the header.
                assert rank or 0.9 * stored < sum(sent) < 1.02 * stored + size * (256 << 10), (sent, stored)
        same(ow.load_file(path, group=world, device=DEVICE), expected(path, {}, rank, size))
        assert DEVICE != "cpu" or not any(read())


def meetings(folder: Path) -> None:
    """Ranks that map each other's memory use at most three collectives per load, in the first load of a group and in
    later loads."""
    rank, path, number = dist.get_rank(), folder / "compressed.safetensors", [0]
    small()
    by("mapped")

    def counting(real: Any) -> Any:
        return lambda *args, **named: (number.__setitem__(0, number[0] + 1), real(*args, **named))[1]

    for name in ("all_reduce", "all_gather_into_tensor", "broadcast", "all_gather_object", "barrier", "all_to_all_single"):
        setattr(dist, name, counting(getattr(dist, name)))
    module = torch.nn.Linear(2, 2).to(DEVICE)
    if rank == 0:
        ow.save_model(module, folder / "meetings.safetensors")
    dist.barrier()
    world = dist.new_group()
    for act, most in (
        (lambda: ow.load_file(path, group=world, device=DEVICE), 3),
        (lambda: ow.load_file(path, group=world, device=DEVICE, shard=SHARD), 3),
        (lambda: ow.load_file(path, group=world, device=DEVICE, keys=["whole", f"small.{rank}"]), 3),  # only one rank requests the second
        (lambda: list(ow.stream(path, DEVICE, group=world)), 3),
        (lambda: ow.load_model(module, folder / "meetings.safetensors", group=world), 3),
    ):
        number[0] = 0
        act()
        assert number[0] <= most, (number, most)


def subgroup(folder: Path) -> None:
    """Ranks 1 and 3 load in their own group. The other ranks make no call."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        every_way(folder, group, "compressed.safetensors")
    else:
        try:
            ow.load_file(folder / "plain.safetensors", group=group)
        except ow.ArgumentError as error:
            assert "not in the group" in str(error)
        else:
            raise AssertionError("a group without this process was accepted")


def wanted(folder: Path) -> None:
    """Each rank loads with its own keys and filter, as for experts."""
    rank = dist.get_rank()
    path = folder / "compressed.safetensors"
    whole = ow.load_file(path)

    def mine(name: str) -> bool:
        return not name.startswith("small.") or int(name[6:]) % 2 == rank

    got = ow.load_file(path, group=dist.group.WORLD, filter=mine, dtype=torch.float64)
    names = [name for name in whole if mine(name)]
    floats = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    assert list(got) == names
    for name in names:
        want = whole[name].to(torch.float64) if whole[name].dtype in floats else whole[name]
        assert got[name].dtype == want.dtype and torch.equal(
            got[name].reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)
        )
    got = ow.load_file(path, group=dist.group.WORLD, keys=["rows", "few"] if rank else ["few"])
    assert list(got) == (["rows", "few"] if rank else ["few"])


def failing(folder: Path) -> None:
    """A failure on one rank is raised on all ranks, and the group can still be used."""
    rank, world = dist.get_rank(), dist.group.WORLD
    good = folder / "compressed.safetensors"
    bad = folder / "damaged.safetensors" if rank == 1 else good
    relays.SHARE, relays._AGREE = (1 << 20) + 4096, 3
    for exchange in ("none", "collective"):
        by(exchange)
        try:
            got = ow.load_file(bad, group=world, shard={"rows": 0})
        except ow.CorruptError as error:
            assert error.tensor and error.offset and "damaged" in str(error.source), vars(error)
            assert rank == 1 or "on rank 1" in str(error), error
        else:
            # The tensor is damaged only in rank 1's file, and another rank may have read its bytes.
            assert exchange == "collective", list(got)

    # Each shared part is read by one rank. If that is the rank with the damaged file, it detects the damage, and all
    # ranks report it. No error names another rank.
    met = []
    for damaged in range(2):
        for reader in range(2):
            try:
                ow.load_file(folder / f"damaged{damaged}.safetensors" if rank == reader else good, group=world)
            except ow.CorruptError as error:
                assert "checksum" in str(error) and f"damaged{damaged}" in str(error), error
                assert rank == reader or f"on rank {reader}" in str(error), error
                met.append((damaged, reader))
    assert len(met) == 2 and {damaged for damaged, _ in met} == {0, 1}, met

    def raises(kind: type[Exception], text: str, *args: Any, **named: Any) -> None:
        try:
            ow.load_file(*args, group=world, **named)
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no {kind.__name__}")

    raises(ow.NotFoundError, "absent", folder / ("absent" if rank == 0 else "plain.safetensors"))
    raises(ow.ArgumentError, "tensors differs", folder / ("other.safetensors" if rank == 0 else "plain.safetensors"))
    raises(ow.ArgumentError, "shard differs", good, shard={"rows": 0} if rank else {})
    raises(ow.ArgumentError, "dimension 7", good, shard={"rows": 7} if rank else {})
    raises(ow.OutOfMemoryError, "max_memory", good, max_memory=1000 if rank else None)
    raises(ow.TensorNotFoundError, "nothing", good, shard={"nothing": 0})

    def break_late(now: Any) -> None:
        if rank == 0:
            raise ValueError("the callable broke")

    raises(Exception, "the callable broke", good, progress=break_late)
    same(ow.load_file(good, group=world), expected(good, {}, rank, 2))


def hurt(folder: Path) -> None:
    """If a file is invalid, becomes invalid or disappears only on rank 1, both ranks at once raise the same typed error
    with the location. The next load works."""
    rank, world = dist.get_rank(), dist.group.WORLD
    good = folder / "plain.safetensors"
    own = folder / f"hurt-{rank}.safetensors"
    header = good.read_bytes()[8 : 8 + int.from_bytes(good.read_bytes()[:8], "little")]
    starts = Model.start, relays.relay

    def restore() -> None:
        Model.start, relays.relay = starts  # type: ignore[method-assign]

    def meanwhile(change: Any) -> None:  # between opening the file and the first read
        def before(start: Any) -> Any:
            def first(*args: Any, **named: Any) -> Any:
                if rank == 1:
                    change()
                restore()
                return start(*args, **named)

            return first

        Model.start, relays.relay = before(starts[0]), before(starts[1])  # type: ignore[method-assign]

    def raises(kind: type[Exception], text: str, path: Any, other: Path = good, **named: Any) -> Exception:
        try:
            ow.load_file(path if rank == 1 else other, group=world, mmap=False, **named)
        except kind as error:
            assert text in str(error), error
            assert rank == 1 or "on rank 1" in str(error), error
            return error
        finally:
            restore()
        raise AssertionError(f"no {kind.__name__}")

    for old, new, text in (
        (b'"F32"', b'"F33"', "F33"),  # no such dtype
        (b'"data_offsets":[0,', b'"data_offsets":[1,', ""),  # tensors do not start at offset 1
        (b'"shape":[', b'"shape":[-', ""),
        (b"{", b"[", ""),
    ):
        assert old in header
        data = good.read_bytes()
        own.write_bytes(
            data[:8] + header.replace(old, new, 1).ljust(len(header))[: len(header)] + data[8 + len(header) :]
        )
        found = raises(ow.FormatError, text, own)
        assert rank == 0 or str(own) in str(found), found
    packed = folder / "compressed.safetensors"  # a copy counts as the same file, because its checksums are the same
    for shape in ({}, {"rows": 0}):
        own.write_bytes(packed.read_bytes())
        meanwhile(lambda: os.truncate(own, own.stat().st_size - 100_000))
        error = raises(ow.CorruptError, "truncated" if not shape else "", own, packed, shard=shape)
        assert str(own) in str(error) or rank == 0, error
    raises(ow.OverwireError, "", "http://127.0.0.1:1/x.safetensors", storage_options={"retries": 0} if rank == 1 else None)

    # If a file is replaced by a rename, the ranks still read the file that they opened.
    own.write_bytes(packed.read_bytes())

    def replace() -> None:
        (folder / "new").write_bytes((folder / "other.safetensors").read_bytes())
        os.replace(folder / "new", own)

    meanwhile(replace)
    try:
        same(ow.load_file(own if rank == 1 else packed, group=world, mmap=False), expected(packed, {}, rank, 2))
    finally:
        restore()
    same(ow.load_file(good, group=world), expected(good, {}, rank, 2))


def dying(folder: Path) -> None:
    """If a rank dies during a load, the other rank gets an error that says so."""
    rank = dist.get_rank()
    by("collective")
    relays.SHARE, relays._AGREE = (1 << 20) + 4096, 1

    def die(now: Any) -> None:
        if rank == 1 and now.bytes:
            print("done dying", flush=True)
            os._exit(0)

    try:
        ow.load_file(folder / "compressed.safetensors", group=dist.group.WORLD, progress=die)
    except ow.IOFailure as error:
        assert "cannot be reached" in str(error), error
        print("done dying", flush=True)
        os._exit(0)
    raise AssertionError("no rank reported the loss of rank 1")


def mapped(folder: Path) -> None:
    """The engines exchange data by mapping each other's memory, for whole tensors, slices and two consecutive loads. A
    failure on one rank ends the load on all ranks."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    relays.SHARE = (1 << 20) + 4096
    members = grouping.members_of(world)
    prepared: list[str] = []  # the devices that are prepared while headers are read
    real = loading.prepare_gpu
    loading.prepare_gpu = lambda device, exchange: prepared.append(device) or real(device, exchange)
    for file in ("plain.safetensors", "compressed.safetensors"):
        for shard in ({}, SHARD):
            got = ow.load_file(folder / file, group=world, shard=shard, device=DEVICE)
            assert prepared and all(device.startswith(DEVICE) for device in prepared), prepared
            assert members.reached and not members.unreachable, members.unreachable
            same(got, expected(folder / file, shard, rank, size))
    good, met = folder / "compressed.safetensors", 0
    for reader in range(size):
        try:
            ow.load_file(folder / "damaged.safetensors" if rank == reader else good, group=world, device=DEVICE)
        except ow.CorruptError as error:
            assert "checksum" in str(error) and error.tensor, error
            assert rank == reader or f"on rank {reader}" in str(error), error
            met += 1
    assert met == 1, met  # only one rank reads each byte, so only one has found the damage

    aim, relays.relay_aim = relays.relay_aim, lambda *_: 1 // 0 if rank == 1 else aim(*_)
    try:
        ow.load_file(good, group=world, device=DEVICE)
    except (ZeroDivisionError, ow.OverwireError) as error:
        assert rank == 1 or "on rank 1: ZeroDivisionError" in str(error), error
    else:
        raise AssertionError("rank 1's error was not reported")
    relays.relay_aim = aim

    if rank == 1:  # rank 1's engine fails, but for another reason than mapping
        relays.relay_join = lambda *_: (_ for _ in ()).throw(ow.NotSupportedError("overwire: a graph"))
    try:
        ow.load_file(good, group=world, device=DEVICE)
    except ow.NotSupportedError as error:
        assert str(error) == ("overwire: a graph" if rank == 1 else "overwire: on rank 1: a graph"), error
    else:
        raise AssertionError("rank 1's error was not reported")
    relays.relay_join = _verbs.relay_join
    assert not members.unreachable

    want = expected(good, {}, rank, size)
    for lost in blinded():
        for _ in range(2):
            same(ow.load_file(good, group=world, device=DEVICE), want)
            assert members.unreachable and (rank != lost or "process 1073741824" in members.unreachable), members.unreachable
        members.unreachable = ""
    same(ow.load_file(good, group=world, device=DEVICE), want)


def streamed(folder: Path) -> None:
    """Streams and load_model in a group give the same tensors as load_file: in windows, in order, and for tensors that
    only one rank wants. If a rank closes its stream early or fails, the stream ends on all ranks."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    relays.SHARE = (1 << 20) + 4096
    loading._WINDOW = 3 << 20
    for file in ("plain.safetensors", "compressed.safetensors"):
        path = folder / file
        for shard in ({}, SHARD):
            want = expected(path, shard, rank, size)
            got = dict(ow.stream(path, DEVICE, group=world, shard=shard))
            same({name: got[name] for name in want}, want)
            assert len(got) == len(want)
            few = list(ow.stream(path, DEVICE, group=world, shard=shard, max_memory="6MB", in_order=True))
            assert [name for name, _ in few] == list(want)
            same(dict(few), want)
        keys = [*list(want)[::-2], f"small.{rank}"]
        got = dict(ow.stream(path, DEVICE, group=world, keys=keys, in_order=True, dtype="float16"))
        assert list(got) == list(dict.fromkeys(keys)) and got["whole"].dtype == torch.float16
        into_module(path, rank, size, world)

    path = folder / "compressed.safetensors"
    try:
        for number, _ in enumerate(ow.stream(path, DEVICE, group=world)):
            if number == 2 and rank == 1:
                break
        assert rank == 1
    except ow.OverwireError as error:
        assert rank != 1 and "on rank 1: " in str(error) and "closed before its end" in str(error), error
    met = 0
    for reader in range(size):
        damaged = folder / "damaged.safetensors"
        try:
            for _ in ow.stream(damaged if rank == reader else path, DEVICE, group=world):
                pass
        except ow.CorruptError as error:
            assert error.tensor and (rank == reader or f"on rank {reader}" in str(error)), error
            met += 1
    assert met >= 1, met
    try:
        list(ow.stream(path, DEVICE, group=world, max_memory=1000 if rank == 1 else None))
    except ow.OutOfMemoryError as error:
        assert "max_memory is 1000" in str(error), error
    else:
        raise AssertionError("a budget of 1000 bytes was enough")
    same(ow.load_file(path, group=world, device=DEVICE), expected(path, {}, rank, size))


def into_module(path: Path, rank: int, size: int, world: Any) -> None:
    """load_model fills tensors in place: cast, transposed, and on meta. All ranks report a mismatch before any tensor
    changes."""
    shard = {"rows": 0, "columns": 1, "deep": 2}
    names = ("whole", "rows", "columns", "deep", "scalar", "empty", "uneven", "flags", "small.0")
    want = {name.replace(".", "_"): tensor for name, tensor in expected(path, shard, rank, size).items() if name in names}
    source = ow.load_file(path)
    renamed = path.with_name(f"module-{path.stem}.safetensors")
    if rank == 0:
        plain = path.stem == "plain"
        ow.save_file({name.replace(".", "_"): source[name] for name in names}, renamed, compress=not plain)
    dist.barrier()
    module = torch.nn.Module()
    for name, tensor in want.items():
        module.register_buffer(name, torch.zeros_like(tensor, device="meta" if name == "flags" else DEVICE))
    module.rows = torch.zeros(*want["rows"].shape, device=DEVICE)  # has another dtype than in the file
    module.uneven = torch.zeros(want["uneven"].shape[::-1], dtype=torch.bfloat16, device=DEVICE).T
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items() if name != "flags"}
    assert ow.load_model(module, renamed, group=world, shard=shard, device=DEVICE) == ([], [])
    for name, tensor in module.state_dict().items():
        assert name == "flags" or tensor.data_ptr() == before[name]
        assert torch.equal(tensor.cpu(), want[name].to(tensor.dtype)), name
    if rank == size - 1:
        module.whole = torch.zeros(3, device=DEVICE)
    try:
        ow.load_model(module, renamed, group=world, shard=shard, device=DEVICE)
    except ow.ModelMismatchError as error:
        assert "'whole' has shape (3,)" in str(error), error
    else:
        raise AssertionError("a module of another shape was loaded")


def chosen(folder: Path) -> None:
    """With OVERWIRE_EXCHANGE=auto on the CPU, each rank reads the bytes that it needs from local files. From a store,
    one rank per host reads. If ranks cannot map each other's memory, one rank of the group reads."""
    rank, size, world, info = dist.get_rank(), dist.get_world_size(), dist.group.WORLD, Model.info
    small()
    members, read = grouping.members_of(world), reads(world)
    for apart in (False, True):
        if apart and rank == 1:
            relays.relay_join = join_strangers
        for remote in (False, True):
            Model.info = lambda self, remote=remote: [one | {"remote": remote} for one in info(self)]  # type: ignore
            for file in ("plain.safetensors", "compressed.safetensors"):
                want, stored = expected(folder / file, SHARD, rank, size), (folder / file).stat().st_size
                same(ow.load_file(folder / file, group=world, shard=SHARD, device=DEVICE), want)
                assert sum(read()) <= 1.05 * stored * remote
                same(dict(ow.stream(folder / file, DEVICE, group=world, shard=SHARD, in_order=True)), want)
                assert bool(sum(read())) == remote
        assert bool(members.unreachable) == apart and members.reached
    relays.relay_join, Model.info = _verbs.relay_join, info
    members.unreachable = ""


def gone(folder: Path) -> None:
    """If a rank dies while the engines exchange data, the other ranks detect it and can load again."""
    rank = dist.get_rank()
    good = folder / "compressed.safetensors"
    relays.SHARE = (1 << 20) + 4096
    relays.Job.next = leaving("gone", folder, relays.Job.next)
    if rank == 1:
        relays.relay_aim = lambda *_: None
    try:
        ow.load_file(good, group=dist.group.WORLD, device=DEVICE)
    except ow.IOFailure as error:
        assert "rank 1 is gone" in str(error), error
    else:
        raise AssertionError("no rank reported the loss of rank 1")
    same(ow.load_file(good, device=DEVICE), expected(good, {}, 0, 1))
    print("done gone", flush=True)
    os._exit(0)


def forked(count: int) -> int:
    """Forks the ranks, and returns each rank's number in that rank. The parent exits when all ranks have ended."""
    ranks = {}
    for rank in range(count):
        if not (pid := os.fork()):
            return rank
        ranks[pid] = rank
    ended = {ranks[pid]: os.waitstatus_to_exitcode(status) for pid, status in (os.wait() for _ in range(count))}
    sys.exit(f"ended with {ended}" if any(ended.values()) else 0)


if __name__ == "__main__":
    folder, devices = Path(sys.argv[1]), os.environ.get("GROUP_DEVICES", "cpu").split(",")
    size = int(os.environ["WORLD_SIZE"])
    rank = forked(size)
    DEVICE = group_blocks.DEVICE = devices[rank % len(devices)]
    torch.set_num_threads(1)
    if DEVICE != "cpu":
        torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(folder / sys.argv[2]), size)
    dist.init_process_group(BACKEND, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60), store=store)
    for step in sys.argv[3:]:
        {"every_way": lambda: every_way(folder, dist.group.WORLD)}.get(step, lambda step=step: globals()[step](folder))()
        dist.barrier()
        print(f"done {step}", flush=True)  # in one write, because the ranks share the output
    dist.destroy_process_group()
