"""Stores the weights of one block compressed in host or device memory, with their offsets in a slot.

Each tensor becomes one native X16 stream (overwire.codecs). If a file has the stream, it is loaded. Otherwise the
tensor is encoded: for a GPU by the GPU, so that only stored bytes are copied to the host, or by the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from .. import _verbs, codecs, gpu
from .._undo import after_error
from ..errors import CorruptError, DeviceError, OutOfMemoryError
from ..frameworks.torch import SAVED, _errors_of
from ..jobs import Job

_ALIGN = 256
#: The tensor bytes of a chunk of a stream.
CHUNK = 1 << 20


class Place(NamedTuple):
    """The position of a tensor in a slot, with its dtype, shape and strides."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view of a slot's memory. memory: a uint8 tensor."""
        return (
            memory[self.offset : self.offset + self.nbytes]
            .view(self.dtype)
            .as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)
        )


class FileStream(NamedTuple):
    """The stream of a tensor in a file. number: its position in the files' streams. like: a tensor with the tensor's
    dtype, shape and strides, in row-major order. chunk: the tensor bytes of the stream's chunks."""

    number: int
    nbytes: int
    chunk: int
    like: torch.Tensor
    uri: str
    name: str


class StoredBlock(NamedTuple):
    """A stored block. streams: the offset in `memory` and the length of each tensor's stream, and the tensor bytes of
    its chunks. nbytes: the bytes of the decoded block in a slot, including gaps. digests: the digests of the tensors'
    bytes."""

    places: list[Place]
    streams: list[tuple[int, int, int]]
    memory: StoredMemory
    nbytes: int
    digests: bytes

    def pack_tasks(self, source: int, slot: int) -> bytes:
        """Returns the tasks with which a GPU decodes the block from the address of its stored bytes into a slot."""
        return gpu.pack_streams(
            (source + offset, length, slot + place.offset, place.nbytes, chunk)
            for place, (offset, length, chunk) in zip(self.places, self.streams, strict=True)
            if place.nbytes
        )

    def is_in(self, memory: torch.Tensor) -> bool:
        """Returns whether a slot's memory contains the bytes of all tensors. Waits for torch's current stream."""
        rows = [(memory.data_ptr() + one.offset, one.nbytes) for one in self.places]
        return _digest_rows(rows, memory) == self.digests


class HostMemory:
    """Host memory for stored bytes, page-locked if `device` is a GPU. It is freed with its last reference."""

    is_on_device = False

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._pinned_by = 0  # the id of the process that has page-locked it
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(
                f"overwire: offload: cannot allocate {nbytes} bytes of host memory: {error}", asked=nbytes
            ) from error
        with contextlib.suppress(OSError):  # the kernel may not support huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address: int = self.tensor.data_ptr()
        if device.type == "cuda" and nbytes:
            self.tensor.zero_()  # allocates the pages on all cores, which is faster than in the driver
            with torch.cuda.device(device):
                status = int(torch.cuda.cudart().cudaHostRegister(self.address, nbytes, 0))  # type: ignore[no-untyped-call]
            if status:
                raise DeviceError(
                    f"overwire: offload: cannot page-lock {nbytes} bytes of host memory: CUDA error {status}"
                )
            self._pinned_by = os.getpid()

    def __del__(self) -> None:
        if getattr(self, "_pinned_by", 0) == os.getpid():
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


class DeviceMemory:
    """Device memory of torch's allocator. Raises OutOfMemoryError."""

    is_on_device = True

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with _errors_of(str(device), nbytes):
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes, self.address = nbytes, self.tensor.data_ptr()


StoredMemory = HostMemory | DeviceMemory
_Allocate = Callable[[int], StoredMemory]


def place_tensors(tensors: list[torch.Tensor]) -> tuple[list[Place], int]:
    """Returns consecutive positions for tensors in a slot, and the total bytes."""
    places, end = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        places.append(Place(end, nbytes, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())))
        end += -(-nbytes // _ALIGN) * _ALIGN
    return places, end


def encode_block(
    contents: Sequence[torch.Tensor | FileStream],
    device: torch.device,
    allocate: _Allocate | None = None,
    load: Callable[[list[tuple[int, int]], bool], None] | None = None,
) -> StoredBlock:
    """Stores the tensors of a block in the memory that `allocate` returns for their stored bytes, by default host
    memory. The tensors must be dense, with their dimensions in any order. They are not changed.

    load: loads streams of files, given by number and address, to the host or the device. Their chunks are stored as
    they are. They are decoded once, to find out whether all bytes are right, and for the digests.

    Raises OutOfMemoryError, DeviceError, CorruptError, and the errors of `load`.
    """
    places, nbytes = place_tensors([one.like if isinstance(one, FileStream) else one for one in contents])
    tensors = [one for one in contents if isinstance(one, torch.Tensor)]
    rows = [t.detach().as_strided((t.numel(),), (1,)).view(torch.uint8) for t in tensors]
    on_gpu, digests = device.type == "cuda", b""
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        if on_gpu:
            with _errors_of(str(device), nbytes):
                rows = [row.to(device) for row in rows]
        if rows and len(rows) == len(contents):
            digests = _digest_rows([(row.data_ptr(), row.numel()) for row in rows], rows[0])
        spans = (_encode_on_gpu if on_gpu else _encode_on_host)(tensors, rows, device)
        rest = iter(spans)
        sizes = [(one if isinstance(one, FileStream) else next(rest)).nbytes for one in contents]
        chunks = [one.chunk if isinstance(one, FileStream) else CHUNK for one in contents]
        offsets, end = _place_streams(sizes)
        memory = allocate(end) if allocate else HostMemory(end, device)
        streams = [(offset, length, chunk) for (offset, length), chunk in zip(offsets, chunks, strict=True)]
        block = StoredBlock(places, streams, memory, nbytes, digests)
        rest, loads = iter(spans), []
        for one, (offset, _) in zip(contents, offsets, strict=True):
            if isinstance(one, FileStream):
                loads.append((one.number, memory.address + offset))
            else:
                _copy_span(next(rest), memory.address + offset, device)
        if on_gpu:
            gpu.stream_sync(gpu.current_stream(device.index), device.index)
        if loads and load is not None:
            del spans, rows
            load(loads, memory.is_on_device)
            return block._replace(digests=_check_streams(block, contents, device))
    return block


def _copy_span(span: codecs.Span, address: int, device: torch.device) -> None:
    if span.nbytes and device.type == "cuda":
        number = device.index
        gpu.copy(address, span.address, span.nbytes, device=number, stream=gpu.current_stream(number), wait=False)
    elif span.nbytes:
        ctypes.memmove(address, span.address, span.nbytes)


def _check_streams(block: StoredBlock, contents: Sequence[torch.Tensor | FileStream], device: torch.device) -> bytes:
    # Decodes a block, and returns the digests of its tensors.
    with _errors_of(str(device), block.nbytes):
        memory = torch.empty(block.nbytes, dtype=torch.uint8, device=device)
    try:
        if device.type == "cuda":
            with _errors_of(str(device), block.memory.nbytes):
                source = block.memory.tensor.to(device)
            tasks = block.pack_tasks(source.data_ptr(), memory.data_ptr())
            for error in gpu.decode(device.index, gpu.current_stream(device.index), tasks, "X16").wait():
                if isinstance(error, BaseException):
                    raise error
        else:
            decode_on_host(block, range(len(contents)), memory)
    except CorruptError:
        on_host = copy_to_host(block)
        for number, one in enumerate(contents):
            if isinstance(one, FileStream):
                try:
                    decode_tensor(on_host, number)
                except CorruptError as error:
                    where = f"{one.uri} tensor {one.name!r} chunk {error.chunk}"
                    raise CorruptError(
                        f"overwire: offload: {where}: {error}", source=one.uri, tensor=one.name, chunk=error.chunk
                    ) from error
        raise
    return _digest_rows([(memory.data_ptr() + one.offset, one.nbytes) for one in block.places], memory)


def copy_to_host(block: StoredBlock) -> StoredBlock:
    """Returns a block with its stored bytes in host memory that is not page-locked. Raises OutOfMemoryError."""
    memory = HostMemory(block.memory.nbytes, torch.device("cpu"))
    memory.tensor.copy_(block.memory.tensor)
    return block._replace(memory=memory)


def _digest_rows(rows: list[tuple[int, int]], memory: torch.Tensor) -> bytes:
    # Returns the digests of byte ranges on the device of `memory`. rows: addresses and lengths.
    number = memory.device.index if memory.is_cuda else -1
    numbers = array("q", [address for address, _ in rows] + [nbytes for _, nbytes in rows])
    stream = gpu.current_stream(number) if memory.is_cuda else 0
    job = Job(_verbs.digest(number, stream, len(rows), numbers.tobytes()), "digest")
    with after_error(job.abandon):
        return bytes(job.result()[1])


def decode_tensor(block: StoredBlock, number: int) -> torch.Tensor:
    """Returns a copy of a block's tensor in host memory. Raises CorruptError and OutOfMemoryError."""
    place = block.places[number]
    with _errors_of("cpu", place.nbytes):
        memory = torch.empty(place.nbytes, dtype=torch.uint8)
    decode_on_host(block, [number], memory, place.offset)
    return place._replace(offset=0).view(memory)


def decode_on_host(block: StoredBlock, numbers: Iterable[int], memory: torch.Tensor, base: int = 0) -> None:
    """Decodes tensors of a block on the CPU. memory: the bytes of a slot from byte `base` on. Raises CorruptError."""
    sources, outs = [], []
    for number in numbers:
        place, (offset, length, _) = block.places[number], block.streams[number]
        if place.nbytes:
            sources.append(codecs.Span(block.memory.address + offset, length, block.memory))
            outs.append(codecs.Span(memory.data_ptr() + place.offset - base, place.nbytes, memory))
    for outcome in codecs.run("decode", sources, algorithm="X16", out=outs):
        if outcome.error is not None:
            raise outcome.error


def _encode_on_host(
    tensors: list[torch.Tensor], rows: list[torch.Tensor], device: torch.device
) -> list[codecs.Span]:
    spans = []
    for tensor, row in zip(tensors, rows, strict=True):
        content = codecs.Span(row.data_ptr(), row.numel(), row)
        spans.append(codecs.span(codecs.encode(content, "X16", chunk_size=CHUNK, dtype=SAVED.get(tensor.dtype))))
    return spans


def _encode_on_gpu(
    tensors: list[torch.Tensor], rows: list[torch.Tensor], device: torch.device
) -> list[codecs.Span]:
    # Returns addresses on the GPU.
    if not rows:
        return []
    number, stream = device.index, gpu.current_stream(device.index)
    spaces, end = _place_streams(codecs.max_size([row.numel() for row in rows], "X16", chunk_size=CHUNK))
    with _errors_of(str(device), end):
        space = torch.empty(end, dtype=torch.uint8, device=device)
    contents = [
        (row.data_ptr(), row.numel(), space.data_ptr() + offset, length, CHUNK, _transform_of(tensor, row))
        for tensor, row, (offset, length) in zip(tensors, rows, spaces, strict=True)
    ]
    spans = []
    for length, (offset, _) in zip(gpu.encode(number, stream, contents).wait(), spaces, strict=True):
        if isinstance(length, BaseException):
            raise length
        spans.append(codecs.Span(space.data_ptr() + offset, int(length or 0), space))
    return spans


def _place_streams(lengths: list[int]) -> tuple[list[tuple[int, int]], int]:
    streams, end = [], 0
    for length in lengths:
        streams.append((end, length))
        end += -(-length // _ALIGN) * _ALIGN
    return streams, end


def _transform_of(tensor: torch.Tensor, row: torch.Tensor) -> int:
    dtype = SAVED.get(tensor.dtype)
    number = gpu.transform(dtype)
    if number is None:  # several transforms are possible; a sample from the middle of the tensor decides
        middle = max(0, row.numel() // 2 - (128 << 10)) & ~15
        sample = row[middle : middle + (256 << 10)].cpu()
        number = gpu.transform(dtype, codecs.Span(sample.data_ptr(), sample.numel(), sample))
    return number or 0
