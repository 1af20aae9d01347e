"""Parses file headers, and defines the process group of one rank."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from math import prod
from typing import Any

import overwire
from overwire._compat_api import regular

from . import cpp
from .frameworks import FrameworkOpBase, TensorBase
from .st_types import Device, DeviceType, DType, converts
from .st_types import TensorFrame as TensorFrame

#: The longest header that the format allows, in bytes.
MAX_HEADER = 100_000_000


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def set_debug() -> None:
    """Turns on overwire's debug log."""
    logging.getLogger("overwire").setLevel(logging.DEBUG)


def is_debug(logger: logging.Logger) -> bool:
    return logger.isEnabledFor(logging.DEBUG)


def is_gpu_found() -> bool:
    return cpp.is_cuda_found() or cpp.is_hip_found()


def resolve_runtime_lib_name(framework: Any = None) -> str:
    """Returns "": no CUDA runtime library is needed."""
    return ""


resolve_cudart_lib_name = resolve_runtime_lib_name


def get_device_numa_node(device: int | None) -> int | None:
    """Returns the NUMA node of a GPU, or None if it is unknown."""
    bus = "" if device is None else cpp.get_device_pci_bus(device)
    if not bus:
        return None
    try:
        with open(f"/sys/bus/pci/devices/{bus[-12:]}/numa_node", encoding="ascii") as file:
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


class SingleGroup:
    """A process group that only contains this process."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class SafeTensorsMetadata:
    """The header of one file.

    tensors: maps names to TensorFrames, in file order. For a file that overwire has
    compressed, the offsets are those of the plain file.
    header_length: the bytes of the header, and the 8 bytes before it. metadata: the writer's metadata, or "".

    Like the original, it accepts bytes after the data, and `__metadata__` values that are
    not strings. Loading is strict.
    """

    def __init__(
        self,
        string: str,
        header_length: int,
        size_bytes: int,
        framework: FrameworkOpBase,
        src: str = "",
        keep_orig_dict: bool = False,
    ) -> None:
        self.src, self.framework = src, framework
        self.header_length, self.size_bytes = header_length, size_bytes
        ser = json.loads(string)
        self.metadata: Any = ser.pop("__metadata__", "")
        self.compressed = isinstance(self.metadata, dict) and "overwire" in self.metadata and os.path.exists(src)
        if self.compressed:
            ser = self._compressed()
        elif keep_orig_dict:
            self.ser = ser
        self.tensors: dict[str, TensorFrame] = {}
        order = sorted(ser.items(), key=lambda item: item[1]["data_offsets"]) if ser else []
        start = 0
        for name, entry in order:
            begin, end = entry["data_offsets"]
            if begin != start or end < begin:
                raise ValueError(f"validate(tensor {name}): InvalidOffset s={begin}, start={start}, e={end}, src={src}")
            frame = self.tensors[name] = TensorFrame.from_buffer(entry)
            nbytes = prod(frame.shape) * frame.dtype.bits // 8
            if end - begin != nbytes:
                text = f"validate(tensor {name}): TensorInvalidInfo, e-s={end - begin}, nbytes={nbytes}, src={src}"
                raise ValueError(text)
            start = end
        if not self.compressed and header_length + start > size_bytes:
            text = f"MetadataIncompleteBuffer, src={src}, start={start}, header_length={header_length},"
            raise ValueError(f"{text} size_bytes={size_bytes}")
        self.data_length = start
        # The alignment in the file only matters for plug-ins that read a file unchanged. Each of our tensors has its
        # own memory.
        self.aligned = header_length % framework.get_device_ptr_align() == 0

    def _compressed(self) -> dict[str, Any]:
        ser: dict[str, Any] = {}
        at = 0
        kind: Any = "pt" if self.framework.get_name() == "pytorch" else "np"
        with overwire.safe_open(self.src, framework=kind) as file:
            self.metadata = file.metadata() or ""
            for name in file.offset_keys():
                view = file.get_slice(name)
                shape, dtype = view.get_shape(), DType(view.get_dtype())
                nbytes = prod(shape) * dtype.bits // 8
                ser[name] = {"dtype": dtype.value, "shape": shape, "data_offsets": [at, at + nbytes]}
                at += nbytes
        return ser

    @classmethod
    def from_buffer(cls, buf: int, buffer_len: int, filename: str, framework: FrameworkOpBase) -> SafeTensorsMetadata:
        """Parses a file in host memory at the address `buf`."""
        return cls._read_header(lambda at, size: cpp.read_buffer(buf + at, size), buffer_len, filename, framework)

    @classmethod
    def from_fd(
        cls, fd: int, filename: str, framework: FrameworkOpBase, keep_orig_dict: bool = False
    ) -> SafeTensorsMetadata:
        """Parses an open file from its current position, which should be 0."""
        return cls._read_header(
            lambda at, size: _next(fd, size, filename), os.fstat(fd).st_size, filename, framework, keep_orig_dict
        )

    @classmethod
    def _read_header(
        cls,
        read: Callable[[int, int], bytes],
        total: int,
        filename: str,
        framework: FrameworkOpBase,
        keep_orig_dict: bool = False,
    ) -> SafeTensorsMetadata:
        # read: takes an offset and a length, and returns bytes of the file; called in order. total: the file's size.
        if total < 8:
            raise ValueError(f"{filename}: HeaderTooSmall, buffer_len={total}")
        size = int.from_bytes(read(0, 8), "little")
        if size > MAX_HEADER:
            raise ValueError(f"{filename}: HeaderTooLarge, n={size}, buffer_len={total}")
        if size > total - 8:
            raise ValueError(f"{filename}: InvalidHeaderLength, n={size}, buffer_len={total}")
        return cls(read(8, size).decode("utf-8"), size + 8, total, framework, filename, keep_orig_dict)

    @classmethod
    def from_file(cls, filename: str, framework: FrameworkOpBase) -> SafeTensorsMetadata:
        """Parses the file at a path."""
        fd = regular(filename)
        try:
            return cls.from_fd(fd, filename, framework)
        finally:
            os.close(fd)

    def get_tensors(
        self,
        gbuf: cpp.gds_device_buffer,
        device: Device,
        copy_start_offset: int,
        dtype: DType = DType.AUTO,
        owner: Any = None,
    ) -> dict[str, TensorBase]:
        """Returns the tensors of a file that a plug-in has read into `gbuf`, starting at the file's offset
        `copy_start_offset`. Aligned tensors share the buffer's memory. The tensors keep the buffer alive if the
        framework allocated it, or else through `owner`, a SharedDeviceAllocation. Raises ValueError for a compressed
        file."""
        return self._get_tensors(gbuf, device, copy_start_offset, dtype, None, owner)

    def _get_tensors(
        self, gbuf: cpp.gds_device_buffer, device: Device, copy_start_offset: int, dtype: DType = DType.AUTO,
        names: Collection[str] | None = None, owner: Any = None,
    ) -> dict[str, TensorBase]:  # fmt: skip
        # names: the tensors to return if gbuf has only a part of the file. Plug-ins that read parts of files call this
        # method, so its name must not change.
        if self.compressed:
            raise ValueError(f"{self.src}: the file is compressed by overwire, so its bytes are not its tensors' bytes")
        framework, out = self.framework, {}
        for name, frame in self.tensors.items():
            if names is None or name in names:
                begin = self.header_length - copy_start_offset + frame.data_offsets[0]
                tensor = framework.view_of(gbuf, begin, frame, device, owner)
                out[name] = tensor.to(dtype=dtype) if converts(frame.dtype, dtype) else tensor
        return out

    def select_byte_ranges(self, keep_tensor: Callable[[str], bool], merge_gap: int = 4096) -> list[tuple[int, int]]:
        """Returns the ranges [begin, end) of the file with the tensors that `keep_tensor` accepts by
        name, in order. Tensors at most merge_gap bytes apart share a range. For a compressed file,
        the ranges are those of the plain file."""
        ranges: list[tuple[int, int]] = []
        for name, frame in self.tensors.items():  # in file order
            begin, end = (self.header_length + offset for offset in frame.data_offsets)
            if begin == end or not keep_tensor(name):
                continue
            if ranges and begin - ranges[-1][1] <= merge_gap:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((begin, end))
        return ranges

    def __repr__(self) -> str:
        return str({"__metadata__": self.metadata, "tensors": self.tensors})


def _next(fd: int, size: int, filename: str) -> bytes:
    # os.read may return fewer bytes than requested.
    parts = []
    while size > 0:
        part = os.read(fd, size)
        if not part:
            raise ValueError(f"{filename}: InvalidHeaderLength: the file ends {size} bytes before its header")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def is_cuda(device: Device) -> bool:
    """Returns whether a device is a GPU, under any of its names."""
    return device.type in (DeviceType.CUDA, DeviceType.GPU)
