"""How much memory of loaded files is alive, in buffers or in tensors."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["live_allocation_bytes", "live_allocation_count", "track"]


class _Held(weakref.ref[Any]):
    # A reference to what backs memory; it knows how much.
    __slots__ = ("nbytes",)
    nbytes: int


# By identity: what they refer to need not be hashable. No lock: memory may be
# freed by a collection in the middle of anything, and each step here is one.
_live: dict[int, _Held] = {}


def track(owner: Any, nbytes: int) -> None:
    """Counts `nbytes` until `owner`, the object that backs the memory, is freed."""
    held = _Held(owner, _forget)
    held.nbytes = nbytes
    _live[id(held)] = held


def _forget(held: Any) -> None:
    _live.pop(id(held), None)


def live_allocation_count() -> int:
    """Memories of loaded tensors that somebody holds: one a tensor."""
    return len(_live)


def live_allocation_bytes() -> int:
    """Their bytes."""
    return sum(held.nbytes for held in list(_live.values()))
