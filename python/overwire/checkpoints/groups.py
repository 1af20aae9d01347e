"""Finds the process group of a save, and makes one for saves that run next to training.

`dcp.async_save` saves in a thread. If the program gives torch no group, torch's messages and ours would
use the default group at the same time as training's messages do. Such a save gets a gloo group
instead. The thread makes it through the store of the default group, so that training's threads have nothing to call.

A writer keeps its group for its later saves, and leaves it to other writers when it goes. Groups are destroyed
by `dist.destroy_process_group()` only: torch 2.5 may wait forever where a single gloo group is destroyed.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .._locks import new_lock
from ..errors import IOFailure

# The most frames between storage_meta and the method of torch's _DistWrapper that calls it.
_MOST_FRAMES = 12
# The shortest and the longest pause in which a rank asks the store whether the others have come, in seconds.
_PAUSES = (0.005, 0.2)

_lock = new_lock()
_free_groups: dict[str, OwnGroup] = {}  # of this process, by name


class OwnGroup(NamedTuple):
    """A gloo group of all ranks. name: the same on all of them. group: torch owns it, and ends it with the others."""

    name: str
    group: weakref.ReferenceType[Any]

    def is_there(self) -> bool:
        """Whether the program has not destroyed its groups since."""
        return (group := self.group()) is not None and group in c10d._world.pg_map


def is_next_to_training() -> bool:
    """Whether this save runs in a thread of its own, as those of `dcp.async_save` do."""
    return dist.is_available() and dist.is_initialized() and threading.current_thread() is not threading.main_thread()


def free_groups(groups: Iterable[OwnGroup]) -> None:
    """Leaves groups to other writers."""
    with _lock:
        _free_groups.update((one.name, one) for one in groups)


def group_of_save(checkpoint: str, writers_group: Any, own_groups: list[OwnGroup]) -> Any:
    """Returns the group of the torch save that calls this in its first step, or None for the default group.

    A save next to training must not use training's group. If the program gave torch no group, the save gets the
    writer's group if that has all ranks, or else a gloo group, which is added to own_groups. This is collective.
    Raises IOFailure, and torch then sends nothing. checkpoint: the path, the same on all ranks."""
    wrapper = _wrapper_of_save()
    if wrapper is None:
        return None
    size = dist.get_world_size() if wrapper.use_dist else 1
    if wrapper.group is None and size > 1 and is_next_to_training():
        if writers_group is not None and dist.get_world_size(writers_group) == size:
            wrapper.group = writers_group
            return writers_group
        try:
            wrapper.group = _meet_at_store(checkpoint, own_groups)
        except BaseException as failure:
            error = failure if isinstance(failure, IOFailure) else IOFailure(f"overwire: CheckpointWriter: {failure}")

            def refuse(*_: Any, **__: Any) -> Any:
                raise error

            wrapper.gather_object = refuse
            raise error from failure
    return wrapper.group


def _meet_at_store(checkpoint: str, own_groups: list[OwnGroup]) -> Any:
    # The ranks have no group yet, so they count in the store. Each rank takes a number, and the ranks with
    # consecutive numbers belong to one save. They use a group that all of them have, or make one.
    store, size = c10d._get_default_store(), dist.get_world_size()
    key = f"overwire/{hashlib.sha256(checkpoint.encode('utf-8', 'surrogateescape')).hexdigest()}"
    meeting = f"{key}/{(store.add(key, 1) - 1) // size}"
    own_groups[:] = [one for one in own_groups if one.is_there()] or _take_free_groups()
    offers = sorted(own_groups, key=lambda one: one.name)
    counters = [*(f"{meeting}/{one.name}" for one in offers), f"{meeting}/all"]  # the last counts arrived ranks
    for counter in counters:
        store.add(counter, 1)
    end, pause = time.monotonic() + c10d.default_pg_timeout.total_seconds(), _PAUSES[0]
    while (here := store.add(counters[-1], 0)) < size:
        if time.monotonic() > end:
            for counter in (*counters, key):
                store.add(counter, -1)  # so that the next save of this path counts from 0
            raise IOFailure(
                f"overwire: CheckpointWriter: only {here} of {size} ranks have begun the save of {checkpoint} in time:"
                " give each rank the same path"
            )
        # store.wait would block training's use of the store meanwhile.
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    for counter, one in zip(counters, offers, strict=False):
        if store.add(counter, 0) == size and (group := one.group()) is not None:
            return group
    group = _make_group(meeting)
    own_groups.append(OwnGroup(meeting, weakref.ref(group)))
    return group


def _take_free_groups() -> list[OwnGroup]:
    with _lock:
        groups = list(_free_groups.values())
        _free_groups.clear()
    return [one for one in groups if one.is_there()]


def _make_group(name: str) -> Any:
    # Makes a gloo group of all ranks. dist.new_group would name it by a count that training changes concurrently.
    ranks = list(range(dist.get_world_size()))
    try:
        new_group: Any = c10d._new_process_group_helper
        made, _ = new_group(
            len(ranks), dist.get_rank(), ranks, c10d.Backend("gloo"), c10d._get_default_store(), name,
            timeout=c10d.default_pg_timeout,
        )  # fmt: skip
        c10d._world.pg_group_ranks[made] = {rank: rank for rank in ranks}
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise IOFailure(
            f"overwire: CheckpointWriter: the ranks cannot make a gloo group: {error}: give dcp.async_save a"
            " process_group that training does not use"
        ) from error
    return made


def _wrapper_of_save() -> Any:
    # Finds the object through which torch sends the messages of the save that calls this.
    from torch.distributed.checkpoint.utils import _DistWrapper

    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        own = frame.f_locals.get("self")
        if isinstance(own, _DistWrapper):
            return own
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
