"""Steps of group_worker.py in which the ranks' files, arguments or calls differ."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import group_blocks
import overwire as ow
import pytest
import torch
import torch.distributed as dist
from overwire.distributed import group as grouping
from overwire.distributed import load as relays
from overwire.distributed import stream as streaming


def fails(kind: type[BaseException], text: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}: {text}")


def replaced(folder: Path) -> None:
    """If a file is replaced while ranks open it, all ranks load the new file. If the ranks still open different files
    when they try again, no rank loads a mixture."""
    rank, world, path, sign = dist.get_rank(), dist.group.WORLD, folder / "replaced.safetensors", folder / "opened"

    def write(value: float) -> None:
        ow.save_file({f"w{at}": torch.full((300, 1000), value) for at in range(8)}, path, compress=False)

    for exchange in ("mapped", "collective"):
        grouping.exchange_setting = lambda exchange=exchange: exchange
        if rank == 0:
            sign.unlink(missing_ok=True)
            write(1.0)
        dist.barrier()
        if rank == 1:  # opens after rank 0
            while not sign.exists():
                pass
            write(2.0)
        got = ow.load_file(path, group=world, filter=lambda _: sign.touch() is None)
        assert all((tensor == 2).all() for tensor in got.values()), exchange
        dist.barrier()
        copy = folder / f"copy-{exchange}.safetensors"
        if rank == 1:
            shutil.copy(path, copy)
        text = "is not the same file on ranks 0 and 1"
        for act in (ow.load_file, ow.stream):
            fails(ow.CorruptError, text, lambda act=act, copy=copy: act(copy if rank == 1 else path, group=world))
        plain = folder / "plain.safetensors"
        if rank == 1:
            shutil.copy(plain, copy)
        fails(ow.CorruptError, text, lambda copy=copy, plain=plain: group_blocks.together(copy if rank == 1 else plain))
        if rank == 1:
            shutil.copy(folder / "compressed.safetensors", copy)
        dist.barrier()
        # the checksums show that the file is a copy of rank 0's
        assert "whole" in ow.load_file(copy if rank == 1 else folder / "compressed.safetensors", group=world)


def refused(folder: Path) -> None:
    """A wrong argument on rank 1, or a setting that differs between ranks, raises an error on all ranks. The group can
    still be used."""
    rank, world, path = dist.get_rank(), dist.group.WORLD, folder / "compressed.safetensors"
    module, weights = torch.nn.Linear(2, 2), folder / "linear.safetensors"
    if rank == 0:
        ow.save_model(module, weights)
    dist.barrier()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("max_memory", {"max_memory": "much"}),
        ("no_such_option", {"no_such_option": 1}),
        ("device", {"device": "nowhere"}),
        ("mmap", {"mmap": 3}),
        ("keys", {"keys": "whole"}),
    ]
    for text, options in wrong:
        mine = options if rank == 1 else {}
        for verb in (ow.load_file, ow.stream, lambda _, **named: ow.load_model(module, weights, **named)):
            fails((TypeError, ow.OverwireError), text, lambda verb=verb, mine=mine: verb(path, group=world, **mine))  # type: ignore[arg-type]
    for named in ({"framework": "np"}, {"base": "x"}):
        fails(ow.OverwireError, "", lambda named=named: ow.load_file(path, group=world, **(named if rank == 1 else {})))
    fails(ow.OverwireError, "expected a torch.nn.Module", lambda: ow.load_model(3 if rank == 1 else module, weights, group=world))
    assert "whole" in ow.load_file(path, group=world)
    real, grouping.exchange_setting = grouping.exchange_setting, lambda: ("none", "mapped")[rank]
    fails(ow.ArgumentError, "EXCHANGE differs between ranks 0 and 1", lambda: group_blocks.together(path))
    fails(ow.ArgumentError, "EXCHANGE differs between ranks 0 and 1", lambda: ow.load_file(path, group=world))
    grouping.exchange_setting = real


def closed(folder: Path) -> None:
    """If one rank closes or drops a stream before it takes a tensor, the stream ends on all ranks."""
    rank, world, path = dist.get_rank(), dist.group.WORLD, folder / "compressed.safetensors"
    for exchange in ("mapped", "none"):
        grouping.exchange_setting = lambda exchange=exchange: exchange
        for drop in (False, True):
            stream = ow.stream(path, group=world)
            if rank == 0:
                if not drop:
                    stream.close()  # type: ignore[attr-defined]
                stream = iter(())
            else:
                fails(ow.CancelledError, "on rank 0: stream: the stream was closed before its end", lambda stream=stream: dict(stream))
    assert "whole" in ow.load_file(path, group=world)


def interrupted(folder: Path) -> None:
    """A signal handler that takes a tensor from the group stream that it interrupts, or closes it, gets an error. The
    stream continues on all ranks."""
    rank, world, path = dist.get_rank(), dist.group.WORLD, folder / "compressed.safetensors"
    for exchange in ("mapped", "none"):
        grouping.exchange_setting = lambda exchange=exchange: exchange
        stream: Any = ow.stream(path, group=world)
        came: list[int] = []

        def handle(number: int, _: Any, stream: Any = stream, came: list[int] = came) -> None:
            fails(ow.ArgumentError, "next() within next()", lambda: next(stream))
            fails(ow.ArgumentError, "close() within next()", stream.close)
            came.append(number)

        def raise_within(steps: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            yield from steps

        signal.signal(signal.SIGUSR1, handle)
        if rank == 0:
            stream._arrivals._tensors = raise_within(stream._arrivals._tensors)
        assert dict(stream).keys() == ow.load_file(path).keys(), exchange
        assert came == [signal.SIGUSR1] * (rank == 0)


def forked_streams(folder: Path) -> None:
    """A forked child of a rank cannot use the group or its streams, even while a thread of the rank waits in a stream.
    The child exits without sending anything to the other ranks."""
    world, path = dist.group.WORLD, folder / "compressed.safetensors"
    want = ow.load_file(path)

    def fork_child(streams: list[Any]) -> None:
        if child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            return
        signal.alarm(20)
        try:
            fails(ow.ForkedError, "forked from", lambda: next(streams[0]))
            for act in (ow.load_file, ow.stream):
                fails(ow.ForkedError, "parent of this forked process", lambda act=act: act(path, group=world))
            streaming._close_all()  # as at exit
            streams.pop().close()
            gc.collect()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    for exchange in ("mapped", "collective", "none"):
        grouping.exchange_setting = lambda exchange=exchange: exchange
        streams = [ow.stream(path, group=world)]
        got = dict([next(streams[0])])
        fork_child(streams)
        got.update(streams[0])
        assert got.keys() == want.keys(), exchange
        got, inside, leave = {}, threading.Event(), threading.Event()

        def wait(_: Any, inside: threading.Event = inside, leave: threading.Event = leave) -> None:
            inside.set()
            leave.wait()

        streams = [ow.stream(path, group=world, progress=wait)]
        thread = threading.Thread(target=got.update, args=streams)
        thread.start()
        assert inside.wait(60)
        fork_child(streams)
        leave.set()
        thread.join()
        assert got.keys() == want.keys(), exchange
        for name, tensor in want.items():
            assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert ow.load_file(path, group=world).keys() == want.keys()


def stopped(folder: Path) -> None:
    """A timeout or Ctrl-C on a rank ends its load even if another rank is stopped (SIGSTOP). When the stopped rank
    continues, its load also ends."""
    rank, path, process, aim = dist.get_rank(), folder / "compressed.safetensors", [os.getpid()], relays.relay_aim
    dist.broadcast_object_list(process, 1)

    def stop(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        aim(*args)

    for kind, exchange in ((KeyboardInterrupt, "mapped"), (TimeoutError, "collective")):
        group = dist.new_group()
        grouping.exchange_setting = lambda exchange=exchange: exchange

        def interrupt(*_: Any, kind: type[BaseException] = kind) -> None:
            raise kind("enough")

        if rank == 0:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            fails(kind, "enough", lambda group=group: ow.load_file(path, group=group))
            os.kill(process[0], signal.SIGCONT)
        else:
            relays.relay_aim = stop
            fails(ow.OverwireError, "rank 0", lambda group=group: ow.load_file(path, group=group))
            relays.relay_aim = aim
        dist.barrier()


def freed(folder: Path) -> None:
    """Destroying a group frees its threads and descriptors, whether its loads have succeeded or failed."""
    path = folder / "compressed.safetensors"

    def used() -> tuple[int, int]:
        group = dist.new_group()
        ow.load_file(path, group=group)
        dict(ow.stream(path, group=group))
        group_blocks.together(path, group=group)
        with pytest.raises(ow.TensorNotFoundError):
            ow.load_file(path, group=group, keys=["no such"])
        left_open = ow.stream(path, group=group)
        next(left_open)
        streaming._close_all()  # as at exit
        gone = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert gone() is None and repr(left_open)
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    first = [used() for _ in range(2)][-1]
    last = [used() for _ in range(8)][-1]
    # The number of engine threads varies. Each group that is not freed has three threads and four descriptors.
    assert last[0] < first[0] + 8 and last[1] < first[1] + 8, (first, last)
