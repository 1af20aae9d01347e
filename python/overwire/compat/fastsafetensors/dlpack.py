"""DLPack capsules of memory by its address, for plug-ins that read into it."""

from __future__ import annotations

from typing import Any

from overwire import codecs

from .allocation import SharedDeviceAllocation
from .st_types import Device, DeviceType, DType

__all__ = ["from_cuda_buffer"]

# DLPack's codes by the first letter of a type. Types that DLPack came to late travel as
# integers of their size.
_CODES = {"I": 0, "U": 1, "F": 2}
_KINDS = {DType.BF16: (4, 16, 1), DType.BOOL: (6, 8, 1), DType.C64: (5, 64, 1), DType.F8_E5M2: (0, 8, 1), DType.F8_E4M3: (0, 8, 1)}


def _kind(dtype: DType) -> tuple[int, int, int]:
    if dtype in _KINDS:
        return _KINDS[dtype]
    if dtype.bits < 16 and dtype.value.startswith("F"):
        return 1, 8, 1
    return _CODES[dtype.value[0]], dtype.bits, 1


class _Reference:
    """One reference to an allocation, released with this object."""

    def __init__(self, allocation: SharedDeviceAllocation) -> None:
        self._allocation = allocation.acquire()

    def __del__(self) -> None:
        if hasattr(self, "_allocation"):
            self._allocation.release()


def from_cuda_buffer(dev_ptr: int, shape: list[int], strides: list[int], dtype: DType, dev: Device, owner: Any = None) -> Any:
    """A capsule of memory on the host or a GPU; despite its name, of either.

    strides: in elements. owner: kept alive until the consumer lets go, of a
    SharedDeviceAllocation by a reference; without one, the memory must outlive it.
    """
    keep = _Reference(owner) if isinstance(owner, SharedDeviceAllocation) else owner
    place = (1, 0) if dev.type == DeviceType.CPU else (2, dev.index or 0)
    return codecs.dlpack(keep, dev_ptr, tuple(shape), tuple(strides), _kind(dtype), place)
