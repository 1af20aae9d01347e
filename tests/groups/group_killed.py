"""Ranks of which one is killed, or stopped, before a load of theirs or within its first meetings: forks of one process
that has imported torch. Prints a line for each case."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import overwire as ow
import torch
import torch.distributed as dist
from overwire.distributed import group as grouping
from overwire.distributed import load as relays
from overwire.distributed import tensors as loading

RANKS, VICTIM = 3, 1
# Seconds of the group's own time-out: the others need not wait for it where a rank is dead, and give up one that is
# stopped after it. An alarm ends a rank that waits on.
TIMEOUTS = {signal.SIGKILL: 300, signal.SIGSTOP: 2}
ALARM = 60


def end_by(number: signal.Signals) -> NoReturn:
    """Ends this process, or stops it until it is killed."""
    os.kill(os.getpid(), number)
    os._exit(3)


def before(number: signal.Signals) -> None:
    """Before it calls the verb."""
    end_by(number)


def opening(number: signal.Signals) -> None:
    """While it opens the file; the others are at the meeting."""
    loading.Model.__init__ = lambda *_, **__: end_by(number)  # type: ignore[assignment,method-assign]


def meeting(number: signal.Signals) -> None:
    """When it has sent a part of what it brings to the meeting."""
    gather = dist.all_gather_into_tensor

    def begin(*args: Any, **options: Any) -> NoReturn:
        gather(*args, **options)
        end_by(number)

    dist.all_gather_into_tensor = begin


def offering(number: signal.Signals) -> None:
    """Between the first meeting and the second, where the ranks tell what they map."""
    relays.relay_offer = lambda *_: end_by(number)


def try_load(path: Path, rank: int, act: Callable[[signal.Signals], None], number: signal.Signals) -> None:
    """On one rank: the load fails where one is missed, in time, and those that are left load without it."""
    if rank == VICTIM:
        act(number)
    try:
        ow.load_file(path, group=dist.group.WORLD)
    except ow.IOFailure as error:
        assert "cannot be reached" in str(error) or f"rank {VICTIM}" in str(error), error
    else:
        raise AssertionError("no rank was missed")
    left = [other for other in range(RANKS) if other != VICTIM]
    group = dist.new_group(left, use_local_synchronization=True)
    got, want = ow.load_file(path, group=group), ow.load_file(path)
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def run_rank(path: Path, store: Path, rank: int, case: tuple[Any, ...]) -> NoReturn:
    """Never returns to what forked it."""
    act, exchange, number = case
    status = 1
    try:
        signal.alarm(ALARM)
        grouping.exchange_setting = lambda: exchange
        dist.init_process_group(
            "gloo", rank=rank, world_size=RANKS, store=dist.FileStore(str(store), RANKS),
            timeout=datetime.timedelta(seconds=TIMEOUTS[number]),
        )
        try_load(path, rank, act, number)
        status = 0
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(status)


def run_case(path: Path, store: Path, case: tuple[Any, ...]) -> None:
    """All ranks of one case: those that are left end well, and the victim as it was to."""
    pids = []
    for rank in range(RANKS):
        if not (pid := os.fork()):
            run_rank(path, store, rank, case)
        pids.append(pid)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]) for rank in range(RANKS) if rank != VICTIM]
    os.kill(pids[VICTIM], signal.SIGKILL)
    victim = os.waitstatus_to_exitcode(os.waitpid(pids[VICTIM], 0)[1])
    act, exchange, number = case
    assert (ended, victim) == ([0] * (RANKS - 1), -signal.SIGKILL), (act.__name__, exchange, number.name, ended, victim)
    print(f"done {act.__name__} {exchange} {number.name}", flush=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    cases = [(act, way, signal.SIGKILL) for act in (before, opening, meeting) for way in ("mapped", "collective", "none")]
    cases += [(offering, "mapped", signal.SIGKILL)]
    cases += [(meeting, "mapped", signal.SIGSTOP), (offering, "mapped", signal.SIGSTOP)]
    for count, case in enumerate(cases):
        run_case(folder / "compressed.safetensors", folder / f"store-killed-{count}", case)
