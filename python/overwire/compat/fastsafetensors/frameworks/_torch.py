"""Implements the framework adapter for torch. Importing this module imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

import overwire
from overwire._compat_api import regular, torch_dtype

from .. import cpp
from ..allocation import track
from ..common import SingleGroup, is_cuda
from ..dlpack import from_cuda_buffer
from ..st_types import DTYPE_SIZES as DTYPE_SIZES
from ..st_types import Device, DType, TensorFrame
from . import FrameworkOpBase, ProcessGroupBase, TensorBase
from . import get_framework_op as by_name

# F6 tensors are loaded as bytes. Dtypes that the installed torch lacks are left out.
_kinds = {dtype: torch.uint8 if dtype.bits == 6 else torch_dtype(dtype.value) for dtype in DType}
dtype_convert: dict[DType, torch.dtype] = {dtype: kind for dtype, kind in _kinds.items() if kind is not None}

_dtypes = {kind: dtype for dtype, kind in reversed(dtype_convert.items())}

#: The integer dtypes that replace dtypes which older DLPack versions lack.
need_workaround_dtypes = {DType.F8_E5M2: DType.I8, DType.F8_E4M3: DType.I8, DType.F8_E8M0: DType.U8, DType.F4: DType.U8}


def fst_dtype(dtype: torch.dtype) -> DType:
    """Returns the file's dtype for a torch dtype. Raises KeyError for a dtype that safetensors lacks."""
    return _dtypes[dtype]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@dataclass
class TorchTensor(TensorBase):
    real_tensor: torch.Tensor

    def get_raw(self) -> torch.Tensor:
        return self.real_tensor

    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> TorchTensor:
        where = None if device is None else _name(device)
        kind = None if dtype is DType.AUTO else dtype_convert[dtype]
        if where is None and kind is None:
            return self
        result = self.real_tensor.to(device=where, dtype=kind)
        return TorchTensor(device or self.device, self.dtype if kind is None else dtype, result)

    def view(self, dtype: DType) -> TorchTensor:
        return TorchTensor(self.device, dtype, self.real_tensor.view(dtype_convert[dtype]))

    def __getitem__(self, index: Any) -> TorchTensor:
        if self.real_tensor.dtype == dtype_convert.get(DType.F4):
            pairs = self.real_tensor.view(torch.uint8)[index]  # torch cannot index pairs
            return self._with(pairs.contiguous().view(self.real_tensor.dtype))
        return super().__getitem__(index)

    def copy_to_buffer(self, buf: memoryview) -> None:
        if len(buf) != self.real_tensor.nbytes:
            raise ValueError(f"copy_to_buffer: {self.real_tensor.nbytes} bytes to a buffer of {len(buf)}")
        if len(buf):
            torch.frombuffer(buf, dtype=torch.uint8).copy_(_bytes(self.real_tensor.detach().contiguous()))


class TorchProcessGroup(ProcessGroupBase):
    """Wraps a torch.distributed group, or None. Tensors are sent as bytes, through the host if the group's
    backend cannot send GPU memory."""

    def __init__(self, real_pg: Any) -> None:
        self.real_pg = real_pg

    def size(self) -> int:
        return int(self.real_pg.size()) if self.real_pg else 1

    def rank(self) -> int:
        return int(self.real_pg.rank()) if self.real_pg else 0

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.real_pg, rank)

    def _wire(self, tensor: TorchTensor) -> torch.Tensor:
        flat = _bytes(tensor.real_tensor)
        through_host = flat.is_cuda and "cuda:nccl" not in str(dist.get_backend_config(self.real_pg))
        return flat.cpu() if through_host else flat

    def _arrived(self, tensor: TorchTensor, wire: torch.Tensor) -> None:
        if wire.device != tensor.real_tensor.device:
            _bytes(tensor.real_tensor).copy_(wire)

    def broadcast(self, dst: TorchTensor, rank: int) -> None:
        if self.real_pg:
            wire = self._wire(dst)
            dist.broadcast(wire, self._global(rank), group=self.real_pg)
            self._arrived(dst, wire)

    def scatter(self, dst: TorchTensor, scatter_list: list[TorchTensor], src: int) -> None:
        """Scatters the list's tensors, which must have the size of dst."""
        if self.real_pg:
            wire = self._wire(dst)
            parts = [self._wire(part) for part in scatter_list]
            dist.scatter(wire, parts or None, self._global(src), group=self.real_pg)
            self._arrived(dst, wire)

    def send(self, t: TorchTensor, dst_rank: int, tag: int) -> None:
        if self.real_pg:
            dist.send(self._wire(t), self._global(dst_rank), group=self.real_pg, tag=tag)

    def recv(self, t: TorchTensor, src_rank: int, tag: int) -> None:
        if self.real_pg:
            wire = self._wire(t)
            dist.recv(wire, self._global(src_rank), group=self.real_pg, tag=tag)
            self._arrived(t, wire)

    def agree(self, error: BaseException | None) -> None:
        if self.size() > 1:
            overwire.distributed.agree(self.real_pg, error)
        elif error is not None:
            raise error


def _name(device: Device) -> str:
    return device.as_str().replace("gpu", "cuda")


class TorchOp(FrameworkOpBase):
    """The framework adapter for torch."""

    def get_name(self) -> str:
        return "pytorch"

    def get_device(self, device: Any, pg: ProcessGroupBase) -> Device:
        return Device.of(device)

    def get_device_name(self, index: int) -> str:
        try:
            return torch.cuda.get_device_name(index) if torch.cuda.is_available() else ""
        except (AssertionError, RuntimeError):  # the GPU does not exist
            return ""

    def set_device(self, device: Device) -> None:
        if is_cuda(device) and device.index is not None:
            torch.cuda.set_device(device.index)

    def alloc_tensor_memory(self, length: int, dev: Device) -> cpp.gds_device_buffer:
        memory = torch.empty(max(length, 1), dtype=torch.uint8, device=_name(dev))
        track(memory.untyped_storage(), length)
        return self.lease(cpp.gds_device_buffer(memory.data_ptr(), length, is_cuda(dev), memory))

    def pinned(self, length: int) -> TorchTensor:
        return TorchTensor(Device(), DType.U8, torch.empty(length, dtype=torch.uint8, pin_memory=True))

    def mmap_file_pinned(self, filename: str, length: int, offset: int) -> TorchTensor:
        host = torch.empty(length, dtype=torch.uint8)
        with open(filename, "rb", opener=regular) as file:
            file.seek(offset)
            if file.readinto(host.numpy()) < length:  # type: ignore[arg-type,unused-ignore]
                raise RuntimeError(f"{filename}: truncated: it ends before byte {offset + length}")
        return TorchTensor(Device(), DType.U8, host.pin_memory())

    def view_of(
        self, gbuf: cpp.gds_device_buffer, begin: int, frame: TensorFrame, device: Device, owner: Any = None
    ) -> TorchTensor:
        nbytes = frame.data_offsets[1] - frame.data_offsets[0]
        if gbuf.owner is not None:
            flat = gbuf.owner[begin : begin + nbytes]
        else:
            at = from_cuda_buffer(gbuf.get_base_address() + begin, [nbytes], [1], DType.U8, device, owner)
            flat = from_dlpack(at)
        kind = dtype_convert[frame.dtype]
        if flat.data_ptr() % max(kind.itemsize, 1):
            flat = flat.clone()
        if frame.dtype.bits == 6:
            return TorchTensor(device, frame.dtype, flat)
        if not nbytes:
            flat = torch.empty(0, dtype=torch.uint8, device=_name(device))
        return TorchTensor(device, frame.dtype, flat.view(kind).view(self.get_native_shape(frame.dtype, frame.shape)))

    def wrap(self, tensor: Any, dtype: DType, device: Device) -> TorchTensor:
        storage = tensor.untyped_storage()
        track(storage, storage.nbytes())
        kind = dtype if dtype_convert.get(dtype) == tensor.dtype else _dtypes[tensor.dtype]
        return TorchTensor(device, kind, tensor)

    def wrap_tensor(self, tensor: torch.Tensor) -> TorchTensor:
        if tensor.dtype not in _dtypes:
            raise TypeError(f"safetensors files cannot hold {tensor.dtype}")
        return TorchTensor(Device.of(tensor.device), _dtypes[tensor.dtype], tensor)

    def synchronize(self, device: Device) -> None:
        if is_cuda(device):
            torch.cuda.synchronize(_name(device))

    def synchronize_current_stream(self, device: Device) -> None:
        if is_cuda(device):
            torch.cuda.current_stream(_name(device)).synchronize()

    def get_global_rank(self) -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def get_empty_tensor(self, shape: list[int], dtype: DType, device: Device) -> TorchTensor:
        native = self.get_native_shape(dtype, shape)
        return TorchTensor(device, dtype, torch.empty(native, dtype=dtype_convert[dtype], device=_name(device)))

    def concat_tensors(self, tensors: list[Any], dim: int) -> TorchTensor:
        first = tensors[0]
        if len({tensor.dtype for tensor in tensors}) > 1 or first.dtype.bits > 8:
            result = torch.cat([tensor.real_tensor for tensor in tensors], dim)
        else:  # join as bytes: torch supports few small dtypes
            octets = torch.cat([tensor.real_tensor.view(torch.uint8) for tensor in tensors], dim)
            result = octets.view(first.real_tensor.dtype)
        return TorchTensor(first.device, first.dtype, result)

    def copy_tensor(self, dst: TorchTensor, src: TorchTensor) -> None:
        dst.real_tensor.copy_(src.real_tensor)
        dst.dtype = src.dtype if dst.real_tensor.dtype == src.real_tensor.dtype else dst.dtype

    def from_dlpack(self, dl_tensor: Any, device: Device, dtype: DType) -> TorchTensor:
        return TorchTensor(device, dtype, from_dlpack(dl_tensor))

    def get_cuda_ver(self) -> str:
        return str(torch.version.cuda) if torch.cuda.is_available() else "0.0"

    def get_process_group(self, pg: Any) -> TorchProcessGroup:
        if pg is None or isinstance(pg, SingleGroup):
            return TorchProcessGroup(None)
        if isinstance(pg, TorchProcessGroup):
            return pg
        if dist.is_available() and isinstance(pg, dist.ProcessGroup):
            return TorchProcessGroup(pg)
        raise ValueError("pg must be an instance of torch.distributed.ProcessGroup")

    def is_equal(self, wrapped: TorchTensor, real: Any) -> bool:
        if not isinstance(real, torch.Tensor):
            raise TypeError("real is not torch.Tensor")
        actual = wrapped.real_tensor
        if actual.shape != real.shape or actual.dtype != real.dtype:
            return False
        # torch cannot compare tensors of these dtypes, but equal bits mean equal numbers.
        small = wrapped.dtype in (DType.F4, DType.F8_E8M0)
        if small:
            actual, real = _bytes(actual.contiguous()), _bytes(real.contiguous())
        return torch.equal(actual, real)

    def randn(self, s: tuple[int, ...], device: Device, dtype: DType) -> TorchTensor:
        values = torch.randn(s, device=_name(device)).to(dtype_convert[dtype])
        return TorchTensor(device, dtype, values)

    def support_fp8(self) -> bool:
        return DType.F8_E4M3 in dtype_convert


def get_framework_op() -> FrameworkOpBase:
    return by_name("pytorch")
