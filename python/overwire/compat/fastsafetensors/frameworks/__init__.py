"""Defines the interface between fastsafetensors' classes and the frameworks torch and paddle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

from .. import cpp
from ..st_types import Device, DType, TensorFrame, stand_in

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class TensorBase(ABC):
    """Wraps a framework's tensor."""

    device: Device
    dtype: DType

    @abstractmethod
    def get_raw(self) -> Any:
        """Returns the framework's own tensor."""

    def _with(self, raw: Any) -> Self:
        # Wraps another tensor. Subclasses have the constructor arguments device, dtype and tensor.
        return type(self)(self.device, self.dtype, raw)  # type: ignore[call-arg]

    def contiguous(self) -> Self:
        return self._with(self.get_raw().contiguous())

    @abstractmethod
    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> Self: ...

    def clone(self) -> Self:
        return self._with(self.get_raw().clone())

    def detach(self) -> Self:
        return self._with(self.get_raw().detach())

    @abstractmethod
    def view(self, dtype: DType) -> Self: ...

    def reshape(self, shape: list[int]) -> Self:
        return self._with(self.get_raw().reshape(shape))

    def __getitem__(self, index: Any) -> Self:
        return self._with(self.get_raw()[index])

    def data_ptr(self) -> int:
        return int(self.get_raw().data_ptr())

    @property
    def shape(self) -> list[int]:
        return list(self.get_raw().shape)

    def get_shape(self) -> list[int]:
        """Returns the shape in a file. The last dimension of F4 counts elements there, not pairs."""
        shape = list(self.shape)
        if self.dtype is not DType.F4:
            return shape
        if not shape:
            raise ValueError("F4 tensors hold pairs of elements, so they need at least one dimension")
        return [*shape[:-1], 2 * shape[-1]]

    def get_nbytes(self) -> int:
        """Returns the number of bytes of the elements."""
        return prod(self.get_shape()) * self.dtype.bits // 8

    @abstractmethod
    def copy_to_buffer(self, buf: memoryview) -> None:
        """Writes the tensor's bytes in C order to a buffer of the same size."""


class ProcessGroupBase(ABC):
    """A group of ranks that exchange wrapped tensors. Ranks are numbered as in the group."""

    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def rank(self) -> int: ...

    @abstractmethod
    def broadcast(self, dst: Any, rank: int) -> None: ...

    @abstractmethod
    def scatter(self, dst: Any, scatter_list: list[Any], src: int) -> None: ...

    @abstractmethod
    def send(self, t: Any, dst_rank: int, tag: int) -> None: ...

    @abstractmethod
    def recv(self, t: Any, src_rank: int, tag: int) -> None: ...

    def agree(self, error: BaseException | None) -> None:
        """Raises the error. If the group supports it, an error is also raised on the other ranks."""
        if error is not None:
            raise error


class FrameworkOpBase(ABC):
    """A framework adapter. It counts its open buffers."""

    def __init__(self) -> None:
        # No lock is used: garbage collection may free a buffer at any point.
        self._leases: dict[int, int] = {}

    def lease(self, gbuf: cpp.gds_device_buffer) -> cpp.gds_device_buffer:
        """Counts a buffer until `free_tensor_memory`. Returns the buffer."""
        self._leases[id(gbuf)] = gbuf.get_length()
        return gbuf

    def get_mem_used(self) -> int:
        """Returns the total size of open buffers in bytes, including shared buffers."""
        return sum(list(self._leases.values()))

    @abstractmethod
    def get_name(self) -> str: ...

    @abstractmethod
    def get_device(self, device: Any, pg: ProcessGroupBase) -> Device: ...

    def get_device_name(self, index: int) -> str:
        """Returns the name of the GPU with this number, or "" if it does not exist."""
        return ""

    @abstractmethod
    def set_device(self, device: Device) -> None: ...

    @abstractmethod
    def alloc_tensor_memory(self, length: int, dev: Device) -> cpp.gds_device_buffer:
        """Allocates memory into which a plug-in reads a file. The memory is freed after `free_tensor_memory` was called
        and no tensor in it is left."""

    def free_tensor_memory(self, gbuf: cpp.gds_device_buffer, dev: Device) -> None:
        """Frees a buffer. Tensors in it stay valid."""
        gbuf.owner = None
        self.uncount(gbuf)

    def uncount(self, gbuf: cpp.gds_device_buffer) -> None:
        """Stops counting a buffer, even if it is still in use."""
        self._leases.pop(id(gbuf), None)

    @abstractmethod
    def view_of(
        self, gbuf: cpp.gds_device_buffer, begin: int, frame: TensorFrame, device: Device, owner: Any = None
    ) -> Any:
        """Makes a tensor over bytes in a buffer. owner: an object that keeps the buffer's memory alive if the framework
        did not allocate it."""

    @abstractmethod
    def wrap_tensor(self, tensor: Any) -> Any:
        """Wraps a caller's tensor. Raises TypeError for a dtype that safetensors lacks."""

    @abstractmethod
    def synchronize(self, device: Device) -> None:
        """Waits for the work that is queued on a GPU. Does nothing for the host."""

    def synchronize_current_stream(self, device: Device) -> None:
        """Waits for the work that is queued on this thread's current stream. May also wait for other streams."""
        self.synchronize(device)

    def get_runtime_lib_dirs(self) -> list[str]:
        """Returns an empty list: no CUDA runtime library is needed."""
        return []

    @abstractmethod
    def get_global_rank(self) -> int:
        """Returns this process's global rank, or 0 if the process is not distributed."""

    @abstractmethod
    def wrap(self, tensor: Any, dtype: DType, device: Device) -> Any:
        """Wraps a tensor that overwire has loaded."""

    @abstractmethod
    def get_empty_tensor(self, shape: list[int], dtype: DType, device: Device) -> Any:
        """Allocates memory for a tensor. shape: the shape in a file."""

    @abstractmethod
    def concat_tensors(self, tensors: list[Any], dim: int) -> Any: ...

    @abstractmethod
    def copy_tensor(self, dst: Any, src: Any) -> None: ...

    def get_dtype_size(self, dtype: DType) -> float:
        """Returns the number of bytes of an element. Raises KeyError for AUTO."""
        if dtype is DType.AUTO:
            raise KeyError(dtype)
        return dtype.bits / 8

    @abstractmethod
    def from_dlpack(self, dl_tensor: Any, device: Device, dtype: DType) -> Any: ...

    @abstractmethod
    def get_cuda_ver(self) -> str: ...

    def get_device_ptr_align(self) -> int:
        return 16

    def as_workaround_dtype(self, dtype: DType) -> DType:
        """Returns the integer dtype that replaces a dtype which older DLPack versions lack."""
        return stand_in(dtype)

    def get_storage_shape(self, dtype: DType, shape: list[int], strides: list[int]) -> tuple[list[int], list[int]]:
        """Returns the shape and strides of a tensor's storage. Dtypes of less than 8 bits are stored as flat bytes."""
        if dtype.bits >= 8:
            return shape, strides
        return [prod(shape) * dtype.bits // 8], [1]

    def get_native_shape(self, dtype: DType, st_shape: list[int]) -> list[int]:
        """Returns the shape of a tensor in the framework, where the last dimension of F4 counts pairs."""
        if dtype is not DType.F4:
            return list(st_shape)
        if not st_shape or st_shape[-1] % 2:
            raise ValueError(f"F4 tensors come in pairs: the last dimension of {st_shape} is odd")
        return [*st_shape[:-1], st_shape[-1] // 2]

    def get_native_slices(self, dtype: DType, st_shape: list[int], slices: Any) -> Any:
        """Converts slices of elements to slices of the framework's tensor."""
        if dtype is not DType.F4 or len(slices) < len(st_shape):
            return slices
        lo, hi, step = slices[-1].indices(st_shape[-1])
        if lo % 2 or hi % 2 or step != 1:
            raise ValueError(f"F4 tensors come in pairs: slice {slices[-1]} of {st_shape} cuts one")
        return (*slices[:-1], slice(lo // 2, hi // 2, 1))

    def pinned(self, length: int) -> Any:
        """Allocates pinned host memory. Returns a wrapped U8 tensor that owns the memory. Raises NotImplementedError if
        the framework cannot pin memory."""
        raise NotImplementedError(f"{type(self).__name__} cannot pin memory")

    def mmap_file_pinned(self, filename: str, length: int, offset: int) -> Any:
        """Reads bytes [offset, offset + length) of a file into pinned anonymous memory. Returns a wrapped U8 tensor
        that owns the memory. Raises NotImplementedError if the framework cannot pin memory."""
        raise NotImplementedError(f"{type(self).__name__} cannot pin memory")

    @abstractmethod
    def get_process_group(self, pg: Any) -> ProcessGroupBase: ...

    @abstractmethod
    def is_equal(self, wrapped: Any, real: Any) -> bool: ...

    @abstractmethod
    def randn(self, s: tuple[int, ...], device: Device, dtype: DType) -> Any: ...

    @abstractmethod
    def support_fp8(self) -> bool: ...


_OPS = {"pt": "_torch:TorchOp", "pytorch": "_torch:TorchOp", "torch": "_torch:TorchOp", "paddle": "_paddle:PaddleOp"}


@cache
def _op(kind: str) -> FrameworkOpBase:
    module, _, name = kind.partition(":")
    framework: FrameworkOpBase = getattr(import_module(f"{__name__}.{module}"), name)()
    return framework


def get_framework_op(name: str) -> FrameworkOpBase:
    """Returns the adapter for "pt", "pytorch", "torch" or "paddle". Raises ValueError for other names."""
    if name not in _OPS:
        raise ValueError(f"Unknown framework name: {name}")
    return _op(_OPS[name])
