"""Defines the interface of copiers, and the copier that loads with overwire's engine."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from overwire import stream as stream_tensors  # import it now, not at the first call
from overwire._compat_api import new_lock

from .. import cpp
from ..common import SafeTensorsMetadata, is_cuda
from ..frameworks import FrameworkOpBase, TensorBase
from ..st_types import Device, DType, converts


def _whole_number(value: Any, what: str) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{what}: {value!r} is not a number")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what}: {value!r} is not a whole number") from None


def validated_byte_ranges(
    metadata: SafeTensorsMetadata, byte_ranges: list[tuple[int, int]] | None
) -> list[tuple[int, int]] | None:
    """Checks the ranges [begin, end) of a file and returns a copy, or None for None (the whole file). Raises ValueError
    unless the ranges are in the file's data, in order, disjoint and not empty."""
    if byte_ranges is None:
        return None
    ranges: list[tuple[int, int]] = []
    position = metadata.header_length
    limit = metadata.header_length + metadata.data_length if metadata.compressed else metadata.size_bytes
    for at, pair in enumerate(byte_ranges):
        what = f"{metadata.src}: byte_ranges[{at}]"
        try:
            begin, end = pair
        except (TypeError, ValueError):
            raise ValueError(f"{what}: {pair!r} is not a pair (begin, end)") from None
        begin, end = _whole_number(begin, what), _whole_number(end, what)
        if not position <= begin < end <= limit:
            text = f"is empty, not in order, or not in the data [{metadata.header_length}, {limit})"
            raise ValueError(f"{what}: [{begin}, {end}) {text}")
        ranges.append((begin, end))
        position = end
    return ranges


def validated_chunk_allocation_size(byte_ranges: list[tuple[int, int]], allocation_size: int | None) -> int | None:
    """Returns allocation_size as an int. Raises ValueError if it is less than the span of all ranges."""
    if allocation_size is None:
        return None
    size = _whole_number(allocation_size, "allocation_size")
    span = max(end for _, end in byte_ranges) - min(begin for begin, _ in byte_ranges) if byte_ranges else 1
    if size < span or size < 1:
        raise ValueError(f"allocation_size {size}: expected at least {span}, the span of the ranges")
    return size


class CopierInterface(ABC):
    """Copies one file's tensors to a device: `submit_io`, then `wait_io`.

    If a copier can return a tensor before all tensors have arrived, `enable_tensor_readiness` returns True. The caller
    then calls `prepare_tensors` instead of `wait_io`. It calls `wait_tensor` before it uses a tensor, and `finish_io`
    at the end.
    """

    metadata: SafeTensorsMetadata

    def enable_tensor_readiness(self) -> bool:
        """Returns whether the caller can wait for individual tensors. Called before `submit_io`."""
        return False

    def prepare_tensors(self, gbuf: cpp.gds_device_buffer, owner: Any = None) -> Mapping[str, TensorBase]:
        """Returns the file's tensors by name, before their bytes have arrived."""
        raise NotImplementedError(f"{type(self).__name__} cannot return tensors before all have arrived")

    def wait_tensor(self, name: str) -> None:  # noqa: B027
        """Waits for the bytes of a tensor from `prepare_tensors`. Raises the error of the read."""

    def finish_io(self) -> None:  # noqa: B027
        """Waits for all submitted reads. Afterwards the buffer may be freed."""

    def set_byte_ranges(self, byte_ranges: list[tuple[int, int]] | None) -> None:
        """Limits the copier to these ranges [begin, end) of the file, although it may read more. Called before
        `submit_io`."""
        validated_byte_ranges(self.metadata, byte_ranges)

    def set_chunk(
        self, byte_ranges: list[tuple[int, int]], names: set[str], allocation_size: int | None = None
    ) -> None:
        """Limits the copier to these tensors, and its buffer to the span of their ranges or to allocation_size bytes.
        Called before `submit_io`. A copier that cannot do this raises NotImplementedError, because the caller has a
        memory limit."""
        text = f"{type(self).__name__} only loads whole files: max_batch_bytes and device_memory_budget need a copier"
        raise NotImplementedError(f"{text} with set_chunk")

    @classmethod
    def chunk_transient_multiplier(cls, paths: list[str]) -> int:
        """Returns the number of device bytes that each byte of a chunk needs while the chunk loads."""
        raise NotImplementedError(f"{cls.__name__} lacks chunk_transient_multiplier, which device_memory_budget needs")

    @classmethod
    def chunk_device_overhead(cls, paths: list[str]) -> int:
        """Returns the device bytes that each chunk takes in addition."""
        return 0

    @classmethod
    def fixed_device_overhead(cls, paths: list[str]) -> int:
        """Returns the device bytes that the copier takes regardless of the chunks."""
        raise NotImplementedError(f"{cls.__name__} lacks fixed_device_overhead, which device_memory_budget needs")

    @abstractmethod
    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> cpp.gds_device_buffer:
        """Starts reading, and returns the buffer. `get_mem_used` counts the buffer until the framework frees it."""

    @abstractmethod
    def wait_io(
        self, gbuf: cpp.gds_device_buffer, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> Mapping[str, TensorBase]:
        """Waits for the file's tensors, and returns them by name. Raises the error of the read. owner: the
        SharedDeviceAllocation of gbuf, for `metadata.get_tensors`. It is only passed to copiers that have this
        parameter."""


CopierConstructFunc = Callable[[SafeTensorsMetadata, Device, FrameworkOpBase], CopierInterface]


class DummyDeviceBuffer(cpp.gds_device_buffer):
    """An empty buffer, for copiers that do not need one."""

    def __init__(self) -> None:
        super().__init__(0, 0, False)


class _Arriving(Mapping[str, TensorBase]):
    # A mapping of names to tensors. Looking up a tensor waits until it has arrived.

    def __init__(self, names: list[str], copier: EngineCopier) -> None:
        self._names, self._copier = dict.fromkeys(names), copier

    def __getitem__(self, name: str) -> TensorBase:
        if name not in self._names:
            raise KeyError(name)
        self._copier.wait_tensor(name)
        return self._copier.found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class EngineCopier(CopierInterface):
    """Loads plain or compressed files through overwire, directly to the device.

    names: the tensors to load, or None for all tensors; set it before `submit_io`. read: as for
    `overwire.load_file`. dtype: the dtype that `wait_io` will get, if it is known in advance;
    floats are then converted to it during the load. found: the tensors that have arrived. Several threads may wait at
    the same time.
    """

    read: Any = None
    dtype = DType.AUTO

    def __init__(self, metadata: SafeTensorsMetadata, device: Device, reader: Any, framework: FrameworkOpBase) -> None:
        self.metadata, self.device, self.framework = metadata, device, framework
        self.names: list[str] | None = None
        self.found: dict[str, TensorBase] = {}
        self._stream: Iterator[tuple[str, Any]] | None = None
        self._gbuf: cpp.gds_device_buffer | None = None
        self._error: BaseException | None = None
        self._lock = new_lock()

    def set_o_direct(self, enable: bool) -> None:
        """Does nothing: the engine decides whether to use O_DIRECT."""

    def enable_tensor_readiness(self) -> bool:
        return True

    def set_byte_ranges(self, byte_ranges: list[tuple[int, int]] | None) -> None:
        """Loads only tensors that are completely inside the ranges."""
        ranges = validated_byte_ranges(self.metadata, byte_ranges)
        self.names = None if ranges is None else self._names_within(ranges)

    def set_chunk(
        self, byte_ranges: list[tuple[int, int]], names: set[str], allocation_size: int | None = None
    ) -> None:
        """Selects tensors. allocation_size is only checked, because each tensor has its own memory."""
        ranges = validated_byte_ranges(self.metadata, byte_ranges) or []
        validated_chunk_allocation_size(ranges, allocation_size)
        if missing := set(names) - set(self._names_within(ranges)):
            raise ValueError(f"{self.metadata.src}: set_chunk: {sorted(missing)[:3]} are not in the ranges")
        self.names = [name for name in self.metadata.tensors if name in names]

    def _names_within(self, ranges: list[tuple[int, int]]) -> list[str]:
        # Tensors and ranges are both in file order.
        inside, at = [], 0
        for name, frame in self.metadata.tensors.items():
            begin, end = (self.metadata.header_length + offset for offset in frame.data_offsets)
            while at < len(ranges) and ranges[at][1] < end:
                at += 1
            if begin == end or (at < len(ranges) and ranges[at][0] <= begin):
                inside.append(name)
        return inside

    @classmethod
    def chunk_transient_multiplier(cls, paths: list[str]) -> int:
        return 1

    @classmethod
    def fixed_device_overhead(cls, paths: list[str]) -> int:
        return 0

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> cpp.gds_device_buffer:
        if max_copy_block_size <= 0:
            raise ValueError(f"max_copy_block_size {max_copy_block_size} must be positive")
        names = self._wanted_names()
        offsets = [self.metadata.tensors[name].data_offsets for name in names]
        nbytes = sum(end - begin for begin, end in offsets)
        torch = self.framework.get_name() == "pytorch"
        where = self.device.as_str().replace("gpu", "cuda") if torch else "cpu"
        self.found, self._error = {}, None
        self._stream = stream_tensors(
            self.metadata.src, device=where, framework="pt" if torch else "np", keys=self.names, read=self.read,
            dtype=self.dtype.value if torch and self.dtype is not DType.AUTO else None,
        )  # fmt: skip
        # The buffer only represents the tensors. Each tensor has its own memory.
        self._gbuf = self.framework.lease(cpp.gds_device_buffer(0, nbytes, is_cuda(self.device), self))
        return self._gbuf

    def _wanted_names(self) -> list[str]:
        return list(self.metadata.tensors) if self.names is None else self.names

    def _advance(self, until: str | None) -> None:
        # Receives tensors from the stream, up to the one named `until`, or all tensors if it is None.
        while until is None or until not in self.found:
            with self._lock:
                if self._error is not None:
                    raise self._error
                stream = self._stream
                if stream is None or (until is not None and until in self.found):
                    return
                try:
                    name, tensor = next(stream)
                except StopIteration:
                    self._stream = None
                    return
                except BaseException as error:
                    interrupt = RuntimeError(f"{self.metadata.src}: loading was interrupted")
                    self._stream, self._error = None, error if isinstance(error, Exception) else interrupt
                    raise
                result = self.framework.wrap(tensor, self.metadata.tensors[name].dtype, self.device)
                if self._gbuf is not None and not self._gbuf._ptr:
                    self._gbuf._ptr = result.data_ptr()
                self.found[name] = result

    def prepare_tensors(self, gbuf: cpp.gds_device_buffer, owner: Any = None) -> Mapping[str, TensorBase]:
        """Returns a mapping in which looking up a tensor waits for it."""
        return _Arriving(self._wanted_names(), self)

    def wait_tensor(self, name: str) -> None:
        self._advance(name)
        if name not in self.found:
            raise ValueError(f"{self.metadata.src}: tensor {name} is not loaded: the filter or names exclude it")

    def finish_io(self) -> None:
        self._advance(None)

    def cancel(self) -> None:
        """Cancels loading, and frees the tensors that have arrived."""
        with self._lock:
            self._stream, self._gbuf, self.found = None, None, {}
            self._error = ValueError(f"{self.metadata.src}: the buffer is closed")

    def wait_io(
        self, gbuf: cpp.gds_device_buffer, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> Mapping[str, TensorBase]:
        assert self._gbuf is not None, "call submit_io before wait_io"
        self._advance(None)
        tensors, self.found, self._gbuf = self.found, {}, None
        for name, tensor in tensors.items():
            if converts(self.metadata.tensors[name].dtype, dtype):
                tensors[name] = tensor.to(dtype=dtype)
        return {name: tensors[name] for name in self.metadata.tensors if name in tensors}
