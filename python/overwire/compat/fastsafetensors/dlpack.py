"""DLPack capsules of memory by its address, for plug-ins that read into it."""

from __future__ import annotations

import ctypes
from typing import Any

from .allocation import SharedDeviceAllocation
from .st_types import Device, DeviceType, DType

__all__ = ["from_cuda_buffer"]

_CODES = {"I": 0, "U": 1, "F": 2}


class DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


class DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DLManagedTensor._fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]

# What is out, by address: the structure, its arrays, and the memory's owner.
_live: dict[int, tuple[Any, ...]] = {}
_NAME = b"dltensor"

_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", _api))
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


def _forget(address: int) -> None:
    held = _live.pop(address, None)
    if held is not None and isinstance(held[3], SharedDeviceAllocation):
        held[3].release()


def _unused(capsule: int) -> None:
    # Only a capsule that was not taken still has this name.
    if _valid(capsule, _NAME):
        _forget(_pointer(capsule, _NAME))


_delete, _drop = _Deleter(_forget), _Destructor(_unused)


def _type(dtype: DType) -> tuple[int, int]:
    # Types that DLPack came to late travel as integers of their size.
    name = dtype.value
    if dtype is DType.BF16:
        return 4, 16
    if dtype is DType.BOOL:
        return 6, 8
    if dtype is DType.C64:
        return 5, 64
    if dtype.bits < 16 and name.startswith("F"):
        return (0 if name in ("F8_E5M2", "F8_E4M3") else 1), 8
    return _CODES[name[0]], dtype.bits


def from_cuda_buffer(dev_ptr: int, shape: list[int], strides: list[int], dtype: DType, dev: Device, owner: Any = None) -> Any:
    """A capsule of memory on the host or a GPU; despite its name, of either.

    strides: in elements. owner: kept alive until the consumer lets go, of a
    SharedDeviceAllocation by a reference; without one, the memory must outlive it.
    """
    rank = len(shape)
    dims, steps = (ctypes.c_int64 * rank)(*shape), (ctypes.c_int64 * rank)(*strides)
    managed = DLManagedTensor()
    tensor = managed.dl_tensor
    tensor.data = dev_ptr
    tensor.device = DLDevice(1, 0) if dev.type == DeviceType.CPU else DLDevice(2, dev.index or 0)
    tensor.ndim = rank
    code, bits = _type(dtype)
    tensor.dtype = DLDataType(code, bits, 1)
    tensor.shape, tensor.strides, tensor.byte_offset = dims, steps, 0
    managed.deleter = _delete
    address = ctypes.addressof(managed)
    if isinstance(owner, SharedDeviceAllocation):
        owner.acquire()
    _live[address] = (managed, dims, steps, owner)
    return _new(address, _NAME, ctypes.cast(_drop, ctypes.c_void_p))
