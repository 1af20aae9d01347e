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
        part = memory[self.offset : self.offset + self.nbytes].view(self.dtype)
        return part.as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)


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
    bytes, each of 16 bytes, or b"" as long as streams of files are not checked. files: for each tensor its stream in a
    file, or None; empty if there are no such streams. await_files: waits until these streams are in `memory`; None if
    they are."""

    places: list[Place]
    streams: list[tuple[int, int, int]]
    memory: StoredMemory
    nbytes: int
    digests: bytes
    files: Sequence[FileStream | None] = ()
    await_files: Callable[[], None] | None = None

    def bytes_on_host(self) -> int:
        """Returns how many bytes of host memory this process's part of the block takes."""
        return 0 if self.memory.is_on_device else self.memory.part[1] - self.memory.part[0]

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
        return digest_rows(rows, memory.device) == self.digests


class HostMemory:
    """Host memory for stored bytes, page-locked if `device` is a GPU. It is freed when nothing refers to this object.

    part: the range of bytes that this process stores."""

    is_on_device = False

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            text = f"overwire: offload: cannot allocate {nbytes} bytes of host memory: {error}"
            raise OutOfMemoryError(text, asked=nbytes) from error
        with contextlib.suppress(OSError):  # the kernel may not support huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._use_tensor(torch.frombuffer(self._map, dtype=torch.uint8), nbytes, (0, nbytes), device)

    def _use_tensor(self, tensor: torch.Tensor, nbytes: int, part: tuple[int, int], device: torch.device) -> None:
        self.tensor, self.nbytes, self.part = tensor, nbytes, part
        self.address: int = tensor.data_ptr()
        self._pins: list[int] = []  # addresses that are page-locked
        self._pinned_by = os.getpid()
        if device.type == "cuda":
            self.tensor[slice(*part)].zero_()  # allocates pages on all cores; the driver is slower
            self.pin_range(part, device)

    def pin_range(self, part: tuple[int, int], device: torch.device) -> None:
        """Page-locks a range. Raises DeviceError."""
        at, nbytes = self.address + part[0], part[1] - part[0]
        if not nbytes:
            return
        with torch.cuda.device(device):
            status = int(torch.cuda.cudart().cudaHostRegister(at, nbytes, 0))  # type: ignore[no-untyped-call]
        if status:
            raise DeviceError(f"overwire: offload: cannot page-lock {nbytes} bytes of host memory: CUDA error {status}")
        self._pins.append(at)

    def unpin_all(self) -> None:
        """Undoes `pin_range`."""
        while self._pins and self._pinned_by == os.getpid():
            torch.cuda.cudart().cudaHostUnregister(self._pins.pop())  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        if hasattr(self, "_pinned_by"):
            self.unpin_all()


class DeviceMemory:
    """Device memory of torch's allocator. Raises OutOfMemoryError."""

    is_on_device = True

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with _errors_of(str(device), nbytes):
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes, self.address, self.part = nbytes, self.tensor.data_ptr(), (0, nbytes)


class SharedMemory(HostMemory):
    """A block's stored bytes in memory of the host that the ranks of a group share. This rank writes and page-locks
    only its part. The part of rank r has `share` bytes and begins at r times `share`.

    place: the offset in all shared memory. number: the block's number in the group. digests: the digests of the block's
    streams. owner: an object that keeps the memory mapped.
    """

    def __init__(self, base: int, place: int, nbytes: int, ranks: tuple[int, int], device: torch.device) -> None:
        """base: the address of all shared memory. ranks: this rank, and how many there are."""
        self.place, self.digests = place, b""
        self.number, self.owner = 0, object()
        self.share = round_up(-(-nbytes // ranks[1]))  # page-locked memory has whole pages
        low = min(ranks[0] * self.share, nbytes)
        octets = (ctypes.c_uint8 * nbytes).from_address(base + place)
        part = low, min(low + self.share, nbytes)
        self._use_tensor(torch.frombuffer(octets, dtype=torch.uint8), nbytes, part, device)


StoredMemory = HostMemory | DeviceMemory
_Allocate = Callable[[int], StoredMemory]


def place_tensors(tensors: list[torch.Tensor]) -> tuple[list[Place], int]:
    """Returns consecutive positions for tensors in a slot, and the total bytes."""
    spans, end = place_streams([tensor.numel() * tensor.element_size() for tensor in tensors])
    places = [
        Place(offset, nbytes, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        for tensor, (offset, nbytes) in zip(tensors, spans, strict=True)
    ]
    return places, end


def encode_block(
    contents: Sequence[torch.Tensor | FileStream],
    device: torch.device,
    allocate: _Allocate | None = None,
    load: Callable[[list[tuple[int, int, int, int]], StoredMemory], Callable[[], None] | None] | None = None,
) -> StoredBlock:
    """Stores the tensors of a block in the memory that `allocate` returns for their stored bytes, by default host
    memory. The tensors must be dense, with their dimensions in any order. They are not changed.

    load: starts to load parts of the streams of files into memory, given by stream number, address, and range [lo, hi)
    in the stream, and returns a function that waits for them. Their chunks are stored as they are. Call `check_streams`
    for a block with such streams. In shared memory only this rank's part is loaded.

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
        if len(rows) == len(contents):
            digests = digest_rows([(row.data_ptr(), row.numel()) for row in rows], device)
        spans = iter((_encode_on_gpu if on_gpu else _encode_on_host)(tensors, rows, device))
        parts = [one if isinstance(one, FileStream) else next(spans) for one in contents]
        offsets, end = place_streams([one.nbytes for one in parts])
        chunks = [one.chunk if isinstance(one, FileStream) else CHUNK for one in parts]
        streams = [(*span, chunk) for span, chunk in zip(offsets, chunks, strict=True)]
        memory = allocate(end) if allocate is not None else HostMemory(end, device)
        block = StoredBlock(places, streams, memory, nbytes, digests)
        pairs = [(offset, one) for (offset, _), one in zip(offsets, parts, strict=True)]
        _fill_memory(memory, [(offset, one) for offset, one in pairs if isinstance(one, codecs.Span)], device)
        if not block.digests and load is not None:
            files = [one if isinstance(one, FileStream) else None for one in contents]
            loads = _parts_to_load(memory, pairs)
            del spans, parts, pairs, rows  # they may have device memory, which the check needs
            block = block._replace(files=files, await_files=load(loads, memory))
            if block.await_files is not None and isinstance(memory, SharedMemory):
                block.await_files()
    return block


def _parts_to_load(
    memory: StoredMemory, contents: list[tuple[int, codecs.Span | FileStream]]
) -> list[tuple[int, int, int, int]]:
    # Returns the parts of the files' streams that this process stores. contents: streams with their offsets.
    start, end = memory.part
    parts = []
    for offset, one in contents:
        low, high = max(offset, start), min(offset + one.nbytes, end)
        if isinstance(one, FileStream) and low < high:
            parts.append((one.number, memory.address + low, low - offset, high - offset))
    return parts


def _fill_memory(memory: StoredMemory, spans: list[tuple[int, codecs.Span]], device: torch.device) -> None:
    # Copies the part of the streams that `memory` stores. spans: streams with their offsets.
    stream = gpu.current_stream(device.index) if device.type == "cuda" else 0
    start, end = memory.part
    for offset, span in spans:
        low, high = max(offset, start), min(offset + span.nbytes, end)
        if low >= high:
            continue
        to, source, nbytes = memory.address + low, span.address + low - offset, high - low
        if device.type == "cuda":
            gpu.copy(to, source, nbytes, device=device.index, stream=stream, wait=False)
        else:
            ctypes.memmove(to, source, nbytes)
    if device.type == "cuda":
        gpu.stream_sync(stream, device.index)
    if isinstance(memory, SharedMemory):
        memory.digests = digest_rows([(span.address, span.nbytes) for _, span in spans], device)


def check_streams(block: StoredBlock, device: torch.device, memory: torch.Tensor | None = None) -> bytes:
    """Waits for the streams of files, decodes the block once to find out whether all bytes are right, and returns the
    digests of its tensors. memory: for the decoded block, or None to allocate it.

    Raises OutOfMemoryError, DeviceError, and CorruptError, which names the file, the tensor and the chunk."""
    if memory is None:
        with _errors_of(str(device), block.nbytes):
            memory = torch.empty(block.nbytes, dtype=torch.uint8, device=device)
    if block.await_files is not None:
        block.await_files()
    try:
        if device.type == "cuda":
            with _errors_of(str(device), block.memory.nbytes):
                source = block.memory.tensor.to(device)
            tasks = block.pack_tasks(source.data_ptr(), memory.data_ptr())
            for error in gpu.decode(device.index, gpu.current_stream(device.index), tasks, "X16").wait():
                if isinstance(error, BaseException):
                    raise error
        else:
            decode_on_host(block, range(len(block.places)), memory)
    except CorruptError:
        on_host = copy_to_host(block)
        for number, one in enumerate(block.files):
            if one is not None:
                try:
                    decode_tensor(on_host, number)
                except CorruptError as error:
                    text = f"overwire: offload: {one.uri} tensor {one.name!r} chunk {error.chunk}: {error}"
                    raise CorruptError(text, source=one.uri, tensor=one.name, chunk=error.chunk) from error
        raise
    return digest_rows([(memory.data_ptr() + one.offset, one.nbytes) for one in block.places], device)


def copy_to_host(block: StoredBlock, numbers: Sequence[int] | None = None) -> StoredBlock:
    """Returns a copy of a block with only the given tensors (by default all), without digests. Its stored bytes are in
    host memory that is not page-locked. Raises OutOfMemoryError."""
    numbers = range(len(block.places)) if numbers is None else numbers
    places, streams = [block.places[number] for number in numbers], [block.streams[number] for number in numbers]
    spans, end = place_streams([length for _, length, _ in streams])
    slot_spans, nbytes = place_streams([place.nbytes for place in places])
    memory = HostMemory(end, torch.device("cpu"))
    for (offset, length), (start, _, _) in zip(spans, streams, strict=True):
        memory.tensor[offset : offset + length].copy_(block.memory.tensor[start : start + length])
    places = [place._replace(offset=offset) for place, (offset, _) in zip(places, slot_spans, strict=True)]
    streams = [(*span, chunk) for span, (_, _, chunk) in zip(spans, streams, strict=True)]
    files = [block.files[number] for number in numbers] if block.files else ()
    return StoredBlock(places, streams, memory, nbytes, b"", files)


def digest_rows(rows: list[tuple[int, int]], device: torch.device) -> bytes:
    """Returns the digests of byte ranges on a device. rows: addresses and lengths."""
    if not rows:
        return b""
    number = device.index if device.type == "cuda" else -1
    numbers = array("q", [address for address, _ in rows] + [nbytes for _, nbytes in rows])
    stream = gpu.current_stream(number) if device.type == "cuda" else 0
    job = Job(_verbs.digest(number, stream, 0, len(rows), numbers.tobytes()), "digest")
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


def _encode_on_host(tensors: list[torch.Tensor], rows: list[torch.Tensor], device: torch.device) -> list[codecs.Span]:
    spans = []
    for tensor, row in zip(tensors, rows, strict=True):
        content = codecs.Span(row.data_ptr(), row.numel(), row)
        spans.append(codecs.span(codecs.encode(content, "X16", chunk_size=CHUNK, dtype=SAVED.get(tensor.dtype))))
    return spans


def _encode_on_gpu(tensors: list[torch.Tensor], rows: list[torch.Tensor], device: torch.device) -> list[codecs.Span]:
    # Returns addresses on the GPU.
    if not rows:
        return []
    number, stream = device.index, gpu.current_stream(device.index)
    spaces, end = place_streams(max_sizes([row.numel() for row in rows]))
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


def max_sizes(sizes: list[int]) -> list[int]:
    """Returns the largest lengths of the streams of tensors of these bytes."""
    longest: list[int] = codecs.max_size(sizes, "X16", chunk_size=CHUNK)
    return longest


def place_streams(lengths: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Returns consecutive offsets for streams, each with its length, and the total bytes."""
    streams, end = [], 0
    for length in lengths:
        streams.append((end, length))
        end += round_up(length, _ALIGN)
    return streams, end


def round_up(nbytes: int, unit: int = mmap.PAGESIZE) -> int:
    """Returns the smallest multiple of a unit that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


def _transform_of(tensor: torch.Tensor, row: torch.Tensor) -> int:
    dtype = SAVED.get(tensor.dtype)
    number = gpu.transform(dtype)
    if number is None:  # several transforms are possible; a sample from the middle of the tensor decides
        middle = max(0, row.numel() // 2 - (128 << 10)) & ~15
        sample = row[middle : middle + (256 << 10)].cpu()
        number = gpu.transform(dtype, codecs.Span(sample.data_ptr(), sample.numel(), sample))
    return number or 0
