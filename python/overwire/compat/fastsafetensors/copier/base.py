"""What a copier is, and the one that loads by overwire's engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import overwire

from .. import cpp
from ..common import SafeTensorsMetadata, is_cuda
from ..frameworks import FrameworkOpBase, TensorBase
from ..st_types import Device, DType

__all__ = ["CopierConstructFunc", "CopierInterface", "DummyDeviceBuffer", "EngineCopier"]


class CopierInterface(ABC):
    """Brings one file's tensors to a device: `submit_io`, then `wait_io`."""

    @abstractmethod
    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> cpp.gds_device_buffer:
        """Starts. Returns what is counted until it is freed by the framework."""

    @abstractmethod
    def wait_io(self, gbuf: cpp.gds_device_buffer, dtype: DType = DType.AUTO, noalign: bool = False) -> dict[str, TensorBase]:
        """Waits; the file's tensors by name. Raises what reading raised."""


CopierConstructFunc = Callable[[SafeTensorsMetadata, Device, FrameworkOpBase], CopierInterface]


class DummyDeviceBuffer(cpp.gds_device_buffer):
    """A buffer of nothing, for copiers that need none."""

    def __init__(self) -> None:
        super().__init__(0, 0, False)


def converts(own: DType, wanted: DType) -> bool:
    """Whether dtype= changes such a tensor. Packed types and bare exponents are
    parts of a scheme, and complex numbers would lose a half: they stay."""
    if wanted is DType.AUTO or wanted is own:
        return False
    return own.bits >= 8 and own not in (DType.F8_E8M0, DType.C64)


class EngineCopier(CopierInterface):
    """Loads by overwire: plain or compressed files, straight to the device.

    names: only these tensors; None: all. read: as for `overwire.load_file`.
    dtype: what `wait_io` will be asked for, as far as it is known: floats become
    that as they land.
    """

    read: str | None = None
    dtype = DType.AUTO

    def __init__(
        self, metadata: SafeTensorsMetadata, device: Device, reader: Any, framework: FrameworkOpBase, names: list[str] | None = None
    ) -> None:
        self.metadata, self.device, self.framework = metadata, device, framework
        self.names = names
        self._stream: Iterator[tuple[str, Any]] | None = None

    def set_o_direct(self, enable: bool) -> None:
        """Nothing: the engine chooses."""

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> cpp.gds_device_buffer:
        names = list(self.metadata.tensors) if self.names is None else self.names
        offsets = [self.metadata.tensors[name].data_offsets for name in names]
        nbytes = sum(end - begin for begin, end in offsets)
        torch = self.framework.get_name() == "pytorch"
        where = self.device.as_str().replace("gpu", "cuda") if torch else "cpu"
        self._stream = overwire.stream(
            self.metadata.src, device=where, framework="pt" if torch else "np", keys=self.names, read=self.read,
            dtype=self.dtype.value if torch and self.dtype is not DType.AUTO else None,
        )  # fmt: skip
        # Stands for the tensors, each of which has memory of its own.
        return self.framework.lease(cpp.gds_device_buffer(0, nbytes, is_cuda(self.device), self))

    def wait_io(self, gbuf: cpp.gds_device_buffer, dtype: DType = DType.AUTO, noalign: bool = False) -> dict[str, TensorBase]:
        assert self._stream is not None, "wait_io comes after submit_io"
        stream, self._stream = self._stream, None
        found: dict[str, TensorBase] = {}
        for name, tensor in stream:
            frame = self.metadata.tensors[name]
            wrapped = self.framework.wrap(tensor, frame.dtype, self.device)
            if converts(frame.dtype, dtype):
                wrapped = wrapped.to(dtype=dtype)
            found[name] = wrapped
            if not gbuf._ptr:
                gbuf._ptr = wrapped.data_ptr()
        return {name: found[name] for name in self.metadata.tensors if name in found}
