"""How much memory of loaded files is alive, in buffers or in tensors."""

from __future__ import annotations

import threading
import weakref
from typing import Any

__all__ = ["live_allocation_bytes", "live_allocation_count", "track"]

_lock = threading.Lock()
_count = 0
_bytes = 0


def track(owner: Any, nbytes: int) -> None:
    """Counts `nbytes` until `owner`, the object that backs the memory, is freed."""
    global _count, _bytes
    with _lock:
        _count += 1
        _bytes += nbytes
    weakref.finalize(owner, _forget, nbytes).atexit = False


def _forget(nbytes: int) -> None:
    global _count, _bytes
    with _lock:
        _count -= 1
        _bytes -= nbytes


def live_allocation_count() -> int:
    """Memories of loaded tensors that somebody holds: one a tensor."""
    return _count


def live_allocation_bytes() -> int:
    """Their bytes."""
    return _bytes
