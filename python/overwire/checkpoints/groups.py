"""Finds the process group of a save, and creates a group for saves that run next to training.

`dcp.async_save` saves on another thread. If the program passes no group to torch, the messages of the save would use
the default group at the same time as training. Such a save gets a gloo group instead. The saving thread creates it
through the store of the default group, so the training threads need not call anything.

A writer uses its group for all its saves. When the writer is freed, other writers can use these groups. Only
`dist.destroy_process_group()` destroys these groups, because torch 2.5 may hang if a single gloo group is destroyed.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .._locks import new_lock
from ..errors import IOFailure

# The most frames between storage_meta and the method of torch's _DistWrapper that calls it.
_MOST_FRAMES = 12
# The shortest and the longest pause between two checks of the store for other ranks, in seconds.
_PAUSES = (0.005, 0.2)

# The time limit for connecting the ranks that have met. If one of them has just ended, the others wait this long.
_CONNECT = timedelta(seconds=120)

_GROUP_IS_GONE = "destroy_process_group() was called during this save: wait for its result() first"

_lock = new_lock()
_free_groups: dict[str, OwnGroup] = {}  # groups of this process without a writer, by name


class OwnGroup(NamedTuple):
    """A gloo group of all ranks. name: the same on all ranks. group: owned by torch, which destroys all groups
    together."""

    name: str
    group: weakref.ReferenceType[Any]

    def is_there(self) -> bool:
        """Returns whether the group still exists. The program may have destroyed all groups."""
        return (group := self.group()) is not None and group in c10d._world.pg_map


def is_next_to_training() -> bool:
    """Returns whether this save runs on its own thread, like saves of `dcp.async_save`."""
    return dist.is_available() and dist.is_initialized() and threading.current_thread() is not threading.main_thread()


def free_groups(groups: Iterable[OwnGroup]) -> None:
    """Makes groups available to other writers."""
    with _lock:
        _free_groups.update((one.name, one) for one in groups)


def group_of_save(checkpoint: str, writers_group: Any, own_groups: list[OwnGroup]) -> Any:
    """Returns the group of the running torch save, or None for the default group. Must be called in the save's first
    step. Collective.

    A save next to training must not use training's group. If the program passed no group to torch, the save gets the
    writer's group if it has all ranks. Otherwise the save gets a gloo group, which is added to own_groups. Raises
    IOFailure if no such group can be made; torch then sends no messages. checkpoint: the path, the same on all
    ranks."""
    if (wrapper := _wrapper_of_save()) is None:
        return None
    try:
        size = dist.get_world_size() if wrapper.use_dist else 1
        if wrapper.group is None and size > 1 and is_next_to_training():
            if writers_group is not None and dist.get_world_size(writers_group) == size:
                wrapper.group = writers_group
            else:
                wrapper.group = _meet_at_store(checkpoint, own_groups)
    except BaseException as failure:
        why = failure if dist.is_initialized() else _GROUP_IS_GONE
        error = failure if isinstance(failure, IOFailure) else IOFailure(f"overwire: CheckpointWriter: {why}")

        def refuse(*_: Any, **__: Any) -> Any:
            raise error

        wrapper.gather_object = refuse
        raise error from failure
    return wrapper.group


def _meet_at_store(checkpoint: str, own_groups: list[OwnGroup]) -> Any:
    # The ranks have no group yet, so they use counters in the store. Each rank takes a number, and each `size`
    # consecutive numbers belong to one save. The ranks use a group that all of them have, or create one.
    store, size = c10d._get_default_store(), dist.get_world_size()
    key = f"overwire/{hashlib.sha256(checkpoint.encode('utf-8', 'surrogateescape')).hexdigest()}"
    meeting = f"{key}/{(store.add(key, 1) - 1) // size}"
    own_groups[:] = [one for one in own_groups if one.is_there()] or _take_free_groups()
    offers = sorted(own_groups, key=lambda one: one.name)
    counters = [*(f"{meeting}/{one.name}" for one in offers), f"{meeting}/all"]  # the last one counts all ranks
    for counter in counters:
        store.add(counter, 1)
    end, pause = time.monotonic() + c10d.default_pg_timeout.total_seconds(), _PAUSES[0]
    while (here := store.add(counters[-1], 0)) < size:
        if time.monotonic() > end or not dist.is_initialized():
            for counter in (*counters, key):
                store.add(counter, -1)  # the next save of this path must count from 0
            why = _GROUP_IS_GONE
            if dist.is_initialized():
                why = f"only {here} of {size} ranks have begun the save of {checkpoint} in time: pass the same path on"
                why += " each rank"
            raise IOFailure(f"overwire: CheckpointWriter: {why}")
        # Polls, because store.wait would block training's use of the store.
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
    # Creates a gloo group of all ranks. Does not call dist.new_group, because that names the group by a counter that
    # training may change at the same time.
    ranks = list(range(dist.get_world_size()))
    try:
        new_group: Any = c10d._new_process_group_helper
        made, _ = new_group(
            len(ranks), dist.get_rank(), ranks, c10d.Backend("gloo"), c10d._get_default_store(), name,
            timeout=min(_CONNECT, c10d.default_pg_timeout),
        )  # fmt: skip
        c10d._world.pg_group_ranks[made] = {rank: rank for rank in ranks}
        c10d._set_pg_timeout(c10d.default_pg_timeout, made)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        why = f"the ranks cannot create a gloo group: {error}"
        todo = "pass dcp.async_save a process_group that training does not use"
        raise IOFailure(f"overwire: CheckpointWriter: {why}: {todo}") from error
    return made


def _wrapper_of_save() -> Any:
    # Returns the torch object that sends the messages of the calling save, or None.
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
