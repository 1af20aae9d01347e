"""Makes DLPack capsules from memory addresses, for plug-ins that read into that memory."""

from __future__ import annotations

from typing import Any

from overwire import codecs

from .allocation import SharedDeviceAllocation
from .st_types import Device, DeviceType, DType, stand_in

# DLPack's type codes, by the name of the dtype or its first letter.
_CODES = {"BF16": 4, "BOOL": 6, "C64": 5, "F": 2, "I": 0, "U": 1}


class _Reference:
    """One reference to an allocation. It is released when this object is freed."""

    def __init__(self, allocation: SharedDeviceAllocation) -> None:
        self._allocation = allocation.acquire()

    def __del__(self) -> None:
        if hasattr(self, "_allocation"):
            self._allocation.release()


def from_cuda_buffer(
    dev_ptr: int, shape: list[int], strides: list[int], dtype: DType, dev: Device, owner: Any = None
) -> Any:
    """Makes a capsule for memory on a GPU or, despite the name, on the host.

    strides: in elements. owner: an object that is kept alive until the consumer releases the capsule; a
    SharedDeviceAllocation gets a reference. Without an owner, the caller must keep the memory alive as long as the
    capsule.
    """
    as_is = stand_in(dtype)
    code = _CODES.get(as_is.value) or _CODES[as_is.value[0]]
    keep = _Reference(owner) if isinstance(owner, SharedDeviceAllocation) else owner
    place = (1, 0) if dev.type == DeviceType.CPU else (2, dev.index or 0)
    return codecs.dlpack(keep, dev_ptr, tuple(shape), tuple(strides), (code, as_is.bits, 1), place)
