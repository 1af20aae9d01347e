"""Implements the framework adapter for paddle. Importing this module imports paddle.

overwire loads numpy arrays, which become paddle tensors without a copy. For a GPU, paddle then copies them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy
import paddle  # type: ignore[import-not-found,import-untyped,unused-ignore]
import paddle.distributed as dist  # type: ignore[import-not-found,import-untyped,unused-ignore]

from .. import cpp
from ..allocation import track
from ..common import SingleGroup, is_cuda
from ..dlpack import from_cuda_buffer
from ..st_types import Device, DeviceType, DType, TensorFrame, dense_strides
from . import FrameworkOpBase, ProcessGroupBase, TensorBase
from . import get_framework_op as by_name

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def _kind(dtype: DType) -> Any:
    kind = getattr(paddle, _NAMES.get(dtype.value, ""), None)
    if kind is None:
        raise TypeError(f"paddle does not have the dtype {dtype.value}")
    return kind


@dataclass
class PaddleTensor(TensorBase):
    real_tensor: Any

    def get_raw(self) -> Any:
        return self.real_tensor

    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> PaddleTensor:
        tensor = self.real_tensor
        if dtype is not DType.AUTO:
            tensor = tensor.astype(_kind(dtype))
        if device is not None:
            tensor = tensor.to(device=_name(device))
        return PaddleTensor(device or self.device, self.dtype if dtype is DType.AUTO else dtype, tensor)

    def view(self, dtype: DType) -> PaddleTensor:
        return PaddleTensor(self.device, dtype, self.real_tensor.view(_kind(dtype)))

    def copy_to_buffer(self, buf: memoryview) -> None:
        if len(buf) != self.get_nbytes():
            raise ValueError(f"copy_to_buffer: {self.get_nbytes()} bytes to a buffer of {len(buf)}")
        if len(buf):
            host = self.real_tensor.cpu().contiguous()
            ctypes.memmove(numpy.frombuffer(buf, numpy.uint8).ctypes.data, host.data_ptr(), len(buf))


class PaddleProcessGroup(ProcessGroupBase):
    """Wraps a paddle.distributed group, or None."""

    def __init__(self, real_pg: Any) -> None:
        self.real_pg = real_pg

    def size(self) -> int:
        return int(self.real_pg.nranks) if self.real_pg else 1

    def rank(self) -> int:
        return int(self.real_pg.rank) if self.real_pg else 0

    def broadcast(self, dst: PaddleTensor, rank: int) -> None:
        if self.real_pg:
            dist.broadcast(dst.real_tensor, self.real_pg.ranks[rank], group=self.real_pg)

    def scatter(self, dst: PaddleTensor, scatter_list: list[PaddleTensor], src: int) -> None:
        if self.real_pg:
            parts = [part.real_tensor for part in scatter_list]
            dist.scatter(dst.real_tensor, parts or None, self.real_pg.ranks[src], group=self.real_pg)

    def send(self, t: PaddleTensor, dst_rank: int, tag: int) -> None:
        if self.real_pg:
            dist.send(t.real_tensor, self.real_pg.ranks[dst_rank], group=self.real_pg)

    def recv(self, t: PaddleTensor, src_rank: int, tag: int) -> None:
        if self.real_pg:
            dist.recv(t.real_tensor, self.real_pg.ranks[src_rank], group=self.real_pg)


def _name(device: Device) -> str:
    return device.as_str().replace("cuda", "gpu")


class PaddleOp(FrameworkOpBase):
    """The framework adapter for paddle."""

    def get_name(self) -> str:
        return "paddle"

    def get_device(self, device: Any, pg: ProcessGroupBase) -> Device:
        place = Device.of(device)
        return Device(DeviceType.GPU, place.index) if is_cuda(place) else place

    def get_device_name(self, index: int) -> str:
        return str(paddle.device.cuda.get_device_name(index)) if paddle.device.cuda.device_count() > index else ""

    def set_device(self, device: Device) -> None:
        paddle.set_device(_name(device))

    def alloc_tensor_memory(self, length: int, dev: Device) -> cpp.gds_device_buffer:
        if is_cuda(dev):
            memory = paddle.empty([max(length, 1)], dtype="uint8")
            pointer = int(memory.data_ptr())
        else:
            memory = numpy.empty(max(length, 1), numpy.uint8)
            pointer = int(memory.ctypes.data)
        track(memory, length)
        return self.lease(cpp.gds_device_buffer(pointer, length, is_cuda(dev), memory))

    def view_of(
        self, gbuf: cpp.gds_device_buffer, begin: int, frame: TensorFrame, device: Device, owner: Any = None
    ) -> PaddleTensor:
        holder = owner if gbuf.owner is None else gbuf.owner
        return self._at(gbuf.get_base_address() + begin, frame.shape, frame.dtype, device, holder)

    def _at(self, pointer: int, shape: list[int], dtype: DType, device: Device, owner: Any) -> PaddleTensor:
        capsule = from_cuda_buffer(pointer, shape, dense_strides(shape), dtype, device, owner)
        tensor = paddle.utils.dlpack.from_dlpack(capsule)
        kind = _kind(dtype)
        return PaddleTensor(device, dtype, tensor if tensor.dtype == kind else tensor.view(kind))

    def wrap(self, tensor: Any, dtype: DType, device: Device) -> PaddleTensor:
        track(tensor, tensor.nbytes)
        if not tensor.size:
            return self.get_empty_tensor(list(tensor.shape), dtype, device)
        view = self._at(int(tensor.ctypes.data), list(tensor.shape), dtype, Device(), tensor)
        return view.to(device) if is_cuda(device) else view

    def wrap_tensor(self, tensor: Any) -> PaddleTensor:
        for name, kind in _NAMES.items():
            if tensor.dtype == getattr(paddle, kind, None):
                is_gpu = tensor.place.is_gpu_place()
                place = Device(DeviceType.GPU, tensor.place.gpu_device_id()) if is_gpu else Device()
                return PaddleTensor(place, DType(name), tensor)
        raise TypeError(f"safetensors files cannot hold {tensor.dtype}")

    def synchronize(self, device: Device) -> None:
        if is_cuda(device):
            paddle.device.cuda.synchronize()

    def get_global_rank(self) -> int:
        return int(dist.get_rank()) if dist.is_initialized() else 0

    def get_empty_tensor(self, shape: list[int], dtype: DType, device: Device) -> PaddleTensor:
        return PaddleTensor(device, dtype, paddle.empty(shape, dtype=_kind(dtype)))

    def concat_tensors(self, tensors: list[Any], dim: int) -> PaddleTensor:
        result = paddle.concat([tensor.real_tensor for tensor in tensors], axis=dim)
        return PaddleTensor(tensors[0].device, tensors[0].dtype, result)

    def copy_tensor(self, dst: PaddleTensor, src: PaddleTensor) -> None:
        paddle.assign(src.real_tensor, output=dst.real_tensor)
        dst.dtype = src.dtype

    def from_dlpack(self, dl_tensor: Any, device: Device, dtype: DType) -> PaddleTensor:
        return PaddleTensor(device, dtype, paddle.utils.dlpack.from_dlpack(dl_tensor))

    def get_cuda_ver(self) -> str:
        return str(paddle.version.cuda()) if paddle.device.is_compiled_with_cuda() else "0.0"

    def get_process_group(self, pg: Any) -> PaddleProcessGroup:
        if pg is None or isinstance(pg, SingleGroup):
            return PaddleProcessGroup(None)
        if isinstance(pg, PaddleProcessGroup):
            return pg
        if hasattr(pg, "nranks") and hasattr(pg, "ranks"):
            return PaddleProcessGroup(pg)
        raise ValueError("pg must be a group of paddle.distributed")

    def is_equal(self, wrapped: PaddleTensor, real: Any) -> bool:
        if not isinstance(real, paddle.Tensor):
            raise TypeError("real is not paddle.Tensor")
        return bool(paddle.equal_all(wrapped.real_tensor, real))

    def randn(self, s: tuple[int, ...], device: Device, dtype: DType) -> PaddleTensor:
        return PaddleTensor(device, dtype, paddle.randn(list(s)).astype(_kind(dtype)))

    def support_fp8(self) -> bool:
        return hasattr(paddle, "float8_e4m3fn")


def get_framework_op() -> FrameworkOpBase:
    return by_name("paddle")
