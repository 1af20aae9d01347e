"""Counts the buffers and tensors of loaded files that are in use, and their bytes."""

from __future__ import annotations

import weakref
from typing import Any

from overwire._compat_api import new_lock

# Weak references to memory owners, and their bytes. The keys are ids, because owners need not be
# hashable. No lock is used: garbage collection may call `_forget` at any point, and each step here is atomic.
_live: dict[int, tuple[weakref.ref[Any], int]] = {}


def track(owner: Any, nbytes: int) -> None:
    """Counts `nbytes` until `owner`, the object that backs the memory, is freed."""
    reference = weakref.ref(owner, _forget)
    _live[id(reference)] = reference, nbytes


def _forget(held: Any) -> None:
    _live.pop(id(held), None)


def live_allocation_count() -> int:
    """Returns the number of loaded buffers and tensors with memory in use."""
    return len(_live)


def live_allocation_bytes() -> int:
    """Returns the number of bytes of loaded memory in use."""
    return sum(nbytes for _, nbytes in list(_live.values()))


class SharedDeviceAllocation:
    """A reference-counted buffer. The last `release` frees it with `framework.free_tensor_memory`.
    The creator has the first reference, and each tensor from
    `dlpack.from_cuda_buffer(..., owner)` has one.

    owns_memory: False for an empty buffer, which is not freed. All methods may be called from any thread. The functions
    of this module do not count the buffer.
    """

    def __init__(self, gbuf: Any, framework: Any, device: Any, owns_memory: bool = True) -> None:
        self._gbuf, self._framework, self._device, self._owns = gbuf, framework, device, owns_memory
        self._references = 1
        self._lock = new_lock()

    def get_base_address(self) -> int:
        """Returns the address. Raises RuntimeError if the buffer was freed."""
        gbuf = self._gbuf
        if gbuf is None:
            raise RuntimeError("SharedDeviceAllocation: the buffer was freed")
        return int(gbuf.get_base_address())

    def acquire(self) -> SharedDeviceAllocation:
        """Adds a reference. Raises RuntimeError if the buffer was freed."""
        with self._lock:
            if self._references == 0:
                raise RuntimeError("SharedDeviceAllocation: the buffer was freed")
            self._references += 1
        return self

    def release(self) -> None:
        """Drops a reference. Does nothing if the buffer was freed."""
        with self._lock:
            if self._references == 0:
                return
            self._references -= 1
            if self._references:
                return
            gbuf, self._gbuf = self._gbuf, None
        if self._owns:
            self._framework.free_tensor_memory(gbuf, self._device)

    @property
    def live(self) -> bool:
        """Whether the buffer has not been freed yet."""
        return self._gbuf is not None

    def refcount(self) -> int:
        return self._references
