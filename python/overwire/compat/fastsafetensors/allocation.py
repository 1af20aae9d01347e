"""How much memory of loaded files is alive, in buffers or in tensors."""

from __future__ import annotations

import weakref
from typing import Any

from overwire.plumbing import new_lock

# References to what backs memory, and how much; by identity: what they refer to need not be
# hashable. No lock: memory may be freed by a collection in the middle of anything, and each
# step here is one.
_live: dict[int, tuple[weakref.ref[Any], int]] = {}


def track(owner: Any, nbytes: int) -> None:
    """Counts `nbytes` until `owner`, the object that backs the memory, is freed."""
    reference = weakref.ref(owner, _forget)
    _live[id(reference)] = reference, nbytes


def _forget(held: Any) -> None:
    _live.pop(id(held), None)


def live_allocation_count() -> int:
    """Memories of loaded tensors that are in use: one per tensor."""
    return len(_live)


def live_allocation_bytes() -> int:
    """Their bytes."""
    return sum(nbytes for _, nbytes in list(_live.values()))


class SharedDeviceAllocation:
    """A buffer that several share: it is freed, by `framework.free_tensor_memory`,
    when the last of them releases it. Its maker holds the first reference;
    tensors made by `dlpack.from_cuda_buffer(..., owner)` hold one each.

    owns_memory: False for a buffer of nothing, which is not freed. Every method may
    be called from any thread. Memory is counted where it is allocated, not here.
    """

    def __init__(self, gbuf: Any, framework: Any, device: Any, owns_memory: bool = True) -> None:
        self._gbuf, self._framework, self._device, self._owns = gbuf, framework, device, owns_memory
        self._references = 1
        self._lock = new_lock()

    def get_base_address(self) -> int:
        """RuntimeError when it was freed."""
        gbuf = self._gbuf
        if gbuf is None:
            raise RuntimeError("SharedDeviceAllocation: the buffer was freed")
        return int(gbuf.get_base_address())

    def acquire(self) -> SharedDeviceAllocation:
        """One reference more. RuntimeError when it was freed."""
        with self._lock:
            if self._references == 0:
                raise RuntimeError("SharedDeviceAllocation: the buffer was freed")
            self._references += 1
        return self

    def release(self) -> None:
        """One reference less. Does nothing when it was freed."""
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
        """Whether it was not freed yet."""
        return self._gbuf is not None

    def refcount(self) -> int:
        return self._references
