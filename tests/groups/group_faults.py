"""Steps of group_worker.py in which rank 1 fails at any point of a load. This must end the load on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import group_blocks
import overwire as ow
import torch
import torch.distributed as dist
from overwire.distributed import group as grouping
from overwire.distributed import load as relays

HOME = str(Path(grouping.__file__).parent)

# How many evenly spaced calls rank 1 fails at, one at a time.
POINTS = 8


class Fault:
    """Counts calls in the package `distributed` once a load has begun, and raises an error at one of them."""

    def __init__(self, at: int, kind: type[BaseException]) -> None:
        self.at, self.kind, self.calls, self.begun = at, kind, 0, False

    def __enter__(self) -> Fault:
        sys.setprofile(self.called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(HOME):
            return
        if event == "return" and code.co_name == "begin":
            self.begun = True
        if event != "call" or not self.begun:
            return
        self.calls += 1
        if self.calls == self.at:
            raise self.kind("the fault")


def attempt(act: Callable[[], Any], at: int, kind: type[BaseException]) -> tuple[str, int]:
    """Returns this rank's error, or "" if there is none, and the number of calls."""
    fault = Fault(at, kind)
    try:
        with fault:
            act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", fault.calls
    return "", fault.calls


def faults(folder: Path) -> None:
    """If rank 1 fails between any two calls, no rank waits for the group's timeout. Each rank gets rank 1's message or
    all its tensors."""
    rank, path = dist.get_rank(), folder / "compressed.safetensors"
    relays.SHARE, relays._AGREE = (1 << 20) + 4096, 3
    want = ow.load_file(path)
    group: list[Any] = [dist.new_group()]
    module = torch.nn.Module()
    for name, tensor in want.items():
        module.register_buffer(name.replace(".", "_"), torch.zeros_like(tensor))
    renamed = folder / "renamed.safetensors"
    if rank == 0:
        ow.save_file({name.replace(".", "_"): tensor for name, tensor in want.items()}, renamed)
    dist.barrier()

    def load() -> None:
        assert list(ow.load_file(path, group=group[0])) == list(want)

    def stream() -> None:
        assert len(dict(ow.stream(path, group=group[0]))) == len(want)

    def fill() -> None:
        ow.load_model(module, renamed, group=group[0])

    def blocks() -> None:
        group_blocks.together(path, group=group[0])

    acts = (load, "mapped"), (load, "collective"), (stream, "mapped"), (stream, "none"), (fill, "mapped"), (blocks, "mapped")
    for act, exchange in acts:
        grouping.exchange_setting = lambda exchange=exchange: exchange
        said, calls = attempt(act, 0, RuntimeError)
        assert not said, said
        number = [calls]
        dist.broadcast_object_list(number, 1)
        for point in range(POINTS):
            at = 1 + point * number[0] // POINTS
            kind = KeyboardInterrupt if point % 2 else RuntimeError
            said, _ = attempt(act, at if rank == 1 else 0, kind)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, (said, grouping.members_of(group[0])._step.broken))
            for text, _ in every:
                assert not text or "the fault" in text or "on rank 1: " in text, (act.__name__, exchange, at, every)
            if any(broken for _, broken in every):
                group[0] = dist.new_group()
