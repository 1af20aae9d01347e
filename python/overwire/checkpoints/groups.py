"""Groups of a save's own: what its ranks send one another in a thread next to training meets nothing that training sends.

A group is made by the thread of the save, on the ranks that take part, through the store of the
default group; training's groups are not used, and no other rank has to call anything. It lives until
the writer's next save, when all ranks have left it.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import IOFailure

# How many frames may lie between a writer that torch calls and the step of torch's that calls it.
_MOST_FRAMES = 12


def is_next_to_training() -> bool:
    """Whether this save runs in a thread of its own, as those of `dcp.async_save` do."""
    return dist.is_available() and dist.is_initialized() and threading.current_thread() is not threading.main_thread()


def make_group(name: str, members: Sequence[int]) -> Any:
    """A gloo group of ranks of the default group, in this order; collective among them. name: the same on
    all of them, and of this group only. Raises IOFailure."""
    members = list(members)
    try:
        store = c10d._get_default_store()
        made, _ = c10d._new_process_group_helper(
            len(members), members.index(dist.get_rank()), members, c10d.Backend("gloo"), store, name,
            timeout=c10d.default_pg_timeout,
        )  # fmt: skip
        c10d._world.pg_group_ranks[made] = {member: rank for rank, member in enumerate(members)}
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise IOFailure(
            f"overwire: CheckpointWriter: its ranks cannot meet in a gloo group: {error}: give it one, process_group="
        ) from error
    return made


def drop_groups(groups: list[Any]) -> None:
    """Ends the groups of a writer's earlier saves."""
    while groups:
        with contextlib.suppress(Exception):  # the program has destroyed all groups
            dist.destroy_process_group(groups.pop())


def separate_from_training(checkpoint: str, own_group: Any) -> Any:
    """Called in the first step of a save for which the program may have given torch no group: torch's own
    messages would use training's, too, and meet them. They use the writer's own group, if it has all ranks,
    or a new one, which this returns; else None. Collective. Raises IOFailure, after which torch sends nothing.

    checkpoint: the same on all ranks. Each rank takes a number at the store; as many as there are ranks meet."""
    wrapper = _wrapper_of_save()
    if wrapper is None or not wrapper.use_dist or wrapper.group is not None or dist.get_world_size() == 1:
        return None
    if own_group is not None and dist.get_world_size(own_group) == dist.get_world_size():
        wrapper.group = own_group
        return None
    try:
        key = f"overwire/checkpoint/{hashlib.sha256(checkpoint.encode('utf-8', 'surrogateescape')).hexdigest()}"
        ticket = c10d._get_default_store().add(key, 1)
        ranks = range(dist.get_world_size())
        wrapper.group = make_group(f"{key}/{(ticket - 1) // len(ranks)}", ranks)
    except BaseException as failure:
        error = failure if isinstance(failure, IOFailure) else IOFailure(f"overwire: CheckpointWriter: {failure}")

        def refuse(*_: Any, **__: Any) -> Any:
            raise error

        wrapper.gather_object = refuse
        raise error from None
    return wrapper.group


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
