"""Groups of a save's own: what its ranks send one another in a thread next to training meets nothing that training sends.

A group is made by the thread of the save, on the ranks that take part, through the store of the
default group; training's groups are not used, and no other rank has to call anything. The writer keeps
it for its later saves, and leaves it to other writers' when it goes: torch 2.5 may wait for ever where
a gloo group is destroyed.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .._locks import new_lock
from ..errors import IOFailure

# How many frames may lie between a writer that torch calls and the step of torch's that calls it.
_MOST_FRAMES = 12
# How often a rank asks the store whether the others have come, in seconds.
_PAUSE = 0.01

_lock = new_lock()
_free_groups: dict[str, OwnGroup] = {}  # by name, of this process


class OwnGroup(NamedTuple):
    """A gloo group: its name, which is the same on all of its ranks, and their ranks in the default group."""

    name: str
    members: tuple[int, ...]
    group: Any


def is_next_to_training() -> bool:
    """Whether this save runs in a thread of its own, as those of `dcp.async_save` do."""
    return dist.is_available() and dist.is_initialized() and threading.current_thread() is not threading.main_thread()


def reserve_groups(members: Sequence[int] | None = None) -> dict[str, OwnGroup]:
    """The free groups of some ranks, or of any with this one, by name: no other save of this process gets them
    until `free_groups`."""
    with _lock:
        some = [one for one in _free_groups.values() if members is None or one.members == tuple(members)]
        for one in some:
            del _free_groups[one.name]
    return {one.name: one for one in living_groups(some)}


def living_groups(groups: Iterable[OwnGroup]) -> list[OwnGroup]:
    """Those that the program has not destroyed with all others."""
    return [one for one in groups if one.group in c10d._world.pg_map]


def free_groups(groups: Iterable[OwnGroup]) -> None:
    """Leaves groups to other writers' saves."""
    with _lock:
        _free_groups.update((one.name, one) for one in groups)


def make_group(name: str, members: Sequence[int]) -> OwnGroup:
    """A gloo group of ranks of the default group, in this order; collective among them. name: the same on
    all of them, and of this group only. Raises IOFailure."""
    ranks = list(members)
    try:
        store = c10d._get_default_store()
        new_group: Any = c10d._new_process_group_helper  # new_group takes its names from counts that training changes
        made, _ = new_group(
            len(ranks), ranks.index(dist.get_rank()), ranks, c10d.Backend("gloo"), store, name,
            timeout=c10d.default_pg_timeout,
        )  # fmt: skip
        c10d._world.pg_group_ranks[made] = {member: rank for rank, member in enumerate(ranks)}
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise IOFailure(
            f"overwire: CheckpointWriter: its ranks cannot meet in a gloo group: {error}: give it one, process_group="
        ) from error
    return OwnGroup(name, tuple(ranks), made)


def separate_from_training(checkpoint: str, writers_group: Any, own_groups: list[OwnGroup]) -> None:
    """Called in the first step of a save for which the program may have given torch no group: torch's own
    messages would use training's, too, and meet them. They use the writer's group, if it has all ranks, or
    a gloo group. Collective. Raises IOFailure, after which torch sends nothing.

    checkpoint: the same on all ranks. own_groups: those of the writer, among which the group is then."""
    wrapper = _wrapper_of_save()
    if wrapper is None or not wrapper.use_dist or wrapper.group is not None or dist.get_world_size() == 1:
        return
    if writers_group is not None and dist.get_world_size(writers_group) == dist.get_world_size():
        wrapper.group = writers_group
        return
    try:
        own = _meet_at_store(checkpoint, own_groups)
    except BaseException as failure:
        error = failure if isinstance(failure, IOFailure) else IOFailure(f"overwire: CheckpointWriter: {failure}")

        def refuse(*_: Any, **__: Any) -> Any:
            raise error

        wrapper.gather_object = refuse
        raise error from None
    wrapper.group = own.group


def _meet_at_store(checkpoint: str, own_groups: list[OwnGroup]) -> OwnGroup:
    # The ranks of one save agree on a group without one: each takes a number, as many as there are ranks
    # meet, and count who has which group.
    store, size = c10d._get_default_store(), dist.get_world_size()
    key = f"overwire/{hashlib.sha256(checkpoint.encode('utf-8', 'surrogateescape')).hexdigest()}"
    key = f"{key}/{(store.add(key, 1) - 1) // size}"
    if not any(one.members == tuple(range(size)) for one in own_groups):
        own_groups.extend(reserve_groups(range(size)).values())
    offers = sorted((one for one in own_groups if one.members == tuple(range(size))), key=lambda one: one.name)
    for one in offers:
        store.add(f"{key}/{one.name}", 1)
    store.add(f"{key}/all", 1)
    end = time.monotonic() + c10d.default_pg_timeout.total_seconds()
    while store.add(f"{key}/all", 0) < size:
        if time.monotonic() > end:
            raise IOFailure(f"overwire: CheckpointWriter: not all of {size} ranks have begun the save {checkpoint}")
        time.sleep(_PAUSE)
    for one in offers:
        if store.add(f"{key}/{one.name}", 0) == size:
            return one
    own_groups.append(made := make_group(key, range(size)))
    return made


def _wrapper_of_save() -> Any:
    # What torch sends and receives by in the save that calls this.
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
