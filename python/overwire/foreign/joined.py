"""Reads tensors that are stored in parts. A part is a box of the tensor, in consecutive bytes of a file.

`check_cover` first checks that the parts contain each element exactly once. The tensor is then read in bands of rows,
which needs only a few blocks of memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .._locks import new_lock
from .._tables import BITS
from ..errors import CorruptError, NotSupportedError, OverwireError, error_of_system
from ..files import regular, state_of_file
from .content import BLOCK

# The limits for files that are open at the same time, for nested divisions of boxes, and for boxes that are searched
# for an overlap.
_OPEN, _DIVISIONS, _PAIRS = 64, 64, 512


#: Offsets and sizes, in elements.
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Files:
    """The files that contain parts. At most _OPEN of them are open at a time. A file that has changed raises
    CorruptError."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._states: dict[str, tuple[int, ...] | None] = {}
        self._lock = new_lock()
        #: The permission bits that all files have in common.
        self.mode = 0o666

    def close_files(self) -> None:
        """Closes all files."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def compare_files(self) -> None:
        """Raises CorruptError if a file has changed since it was opened."""
        for path, state in self._states.items():
            if state_of_file(path) != state:
                raise _changed(path)

    @contextlib.contextmanager
    def open_file(self, path: str) -> Iterator[int]:
        """Opens a file and yields its descriptor. Raises NotFoundError, AccessError, and ArgumentError if the path is
        not a regular file."""
        with self._lock:
            number = os.dup(self._find(path))
        try:
            yield number
        finally:
            os.close(number)

    def _find(self, path: str) -> int:
        if (number := self._open.get(path)) is not None:
            self._open.move_to_end(path)
            return number
        try:
            number = regular(path)
        except OverwireError:
            raise
        except OSError as error:
            raise error_of_system(error, "open", path) from error
        self._open[path] = number
        if len(self._open) > _OPEN:
            os.close(self._open.popitem(last=False)[1])
        if self._states.setdefault(path, state := state_of_file(number)) != state:
            raise _changed(path)
        self.mode &= os.fstat(number).st_mode
        return number

    def size_of(self, path: str) -> int:
        """Returns the size of a file in bytes. Raises the errors of `open_file`."""
        with self.open_file(path) as number:
            return os.fstat(number).st_size

    def fill_block(self, path: str, out: memoryview, at: int) -> None:
        """Fills `out` with the bytes of a file at offset `at`. Raises CorruptError if the file is too short, and
        IOFailure."""
        with self.open_file(path) as number:
            while out:
                try:
                    count = os.preadv(number, [out], at)
                except OSError as error:
                    raise error_of_system(error, "read", path) from error
                if not count:
                    raise _changed(path)
                out, at = out[count:], at + count


@contextlib.contextmanager
def open_files() -> Iterator[Files]:
    """A context with files that are closed at its end."""
    files = Files()
    try:
        yield files
    finally:
        files.close_files()


def _changed(path: str) -> CorruptError:
    return CorruptError(f"overwire: read {path}: changed while it was read", source=path)


class Run:
    """Consecutive bytes of a file, which are read in order. A checksum, if any, is compared after the last byte."""

    def __init__(self, files: Files, path: str, start: int, size: int, checksum: int = 0) -> None:
        self._files, self._checksum = files, checksum
        self.path, self.start, self.size = path, start, size
        self._total = 0

    def fill_block(self, out: memoryview, at: int) -> None:
        """Fills `out` with the bytes at offset `at` of the run. Raises CorruptError, IOFailure."""
        self._files.fill_block(self.path, out, self.start + at)
        if self._checksum:
            self._total = zlib.crc32(out, self._total if at else 0)
            if at + len(out) == self.size and self._total != self._checksum:
                why = f"checksum mismatch: {self._checksum:08x} stored, {self._total:08x} computed"
                text = f"overwire: read {self.path} at byte {self.start}: {why}: copy or fetch it again"
                raise CorruptError(text, source=self.path, offset=self.start)


class PackedRun(Run):
    """A tensor that is strided, or that is only a part of its storage. The whole storage is read, and the elements are
    put in row-major order.

    start: the offset in the file. strides: counted in bytes. item: the bytes of an element.
    """

    def __init__(self, storage: Run, start: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> None:
        self.path, self.start, self.size = storage.path, start, math.prod(shape) * item
        self._storage, self._shape, self._strides, self._item = storage, shape, strides, item
        self._packed: memoryview | None = None

    def fill_block(self, out: memoryview, at: int) -> None:
        """Fills `out` with the bytes at offset `at`, like `Run.fill_block`. Raises NotSupportedError without numpy."""
        if self._packed is None:
            whole = memoryview(bytearray(self._storage.size))
            self._storage.fill_block(whole, 0)
            at_first = self.start - self._storage.start
            self._packed = pack_strided(whole, at_first, self._shape, self._strides, self._item, self.path)
        out[:] = self._packed[at : at + len(out)]
        if at + len(out) == self.size:
            self._packed = None


def pack_strided(
    whole: memoryview, at: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int, path: str
) -> memoryview:
    """Returns the bytes of a strided tensor in row-major order. Raises NotSupportedError without numpy."""
    try:
        import numpy as np
    except ImportError:
        why = "reading a strided tensor needs the package numpy: pip install numpy"
        raise NotSupportedError(f"overwire: read {path}: {why}", source=path) from None
    return memoryview(np.ndarray(shape, f"V{item}", whole, at, strides).tobytes())


class Chunk(NamedTuple):
    """A part of a tensor: its box, and its bytes in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    run: Run


class Joined:
    """A tensor that consists of parts that `check_cover` has accepted.

    name: the tensor's name in errors. dtype, shape: see `Stored`. box: the shape in the units of the parts' offsets and
    sizes, by default `shape`.
    """

    def __init__(
        self, name: str, dtype: str, shape: tuple[int, ...], chunks: list[Chunk], box: tuple[int, ...] | None = None
    ) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self._chunks = [one for one in chunks if 0 not in one.sizes]
        self._box = shape if box is None else box
        self._item = BITS[dtype] // 8 or 1

    def read_blocks(self) -> Iterator[memoryview]:
        """Yields the bytes in order, like `Stored.read_blocks`."""
        if size := math.prod(self._box) * self._item:
            # A tensor without dimensions is read as a row of one element.
            parts = [(one if self._box else Chunk((0,), (1,), one.run), 0) for one in self._chunks]
            band, aside = (memoryview(bytearray(min(size, BLOCK))) for _ in range(2))
            yield from self._bands(self._box or (1,), 0, parts, (band, aside))

    def _bands(
        self, box: tuple[int, ...], axis: int, parts: list[tuple[Chunk, int]], memory: tuple[memoryview, memoryview]
    ) -> Iterator[memoryview]:
        # Yields the elements at one index of each dimension before `axis`. parts: the parts, each with the offset of
        # these elements in its bytes.
        row = math.prod(box[axis + 1 :]) * self._item
        if row > BLOCK:
            for at in range(box[axis]):
                below: list[tuple[Chunk, int]] = []
                for one, start in parts:
                    if 0 <= (index := at - one.offsets[axis]) < one.sizes[axis]:
                        below.append((one, start + index * math.prod(one.sizes[axis + 1 :]) * self._item))
                yield from self._bands(box, axis + 1, below, memory)
            return
        rows = min(BLOCK // row, box[axis])
        band, aside = memory
        waiting = sorted(parts, key=lambda part: part[0].offsets[axis], reverse=True)
        live: list[tuple[Chunk, int]] = []
        for low in range(0, box[axis], rows):
            high = min(low + rows, box[axis])
            while waiting and waiting[-1][0].offsets[axis] < high:
                live.append(waiting.pop())
            for one, start in live:
                first = max(low, one.offsets[axis])
                count = min(high, one.offsets[axis] + one.sizes[axis]) - first
                own = math.prod(one.sizes[axis + 1 :]) * self._item
                at = start + (first - one.offsets[axis]) * own
                place = band[(first - low) * row :][: count * row]
                self._fill(one, place if own == row else aside[: count * own], at)
                if own != row:
                    _scatter(place, aside, count, one, box, axis, self._item)
            live = [part for part in live if part[0].offsets[axis] + part[0].sizes[axis] > high]
            yield band[: (high - low) * row]

    def _fill(self, chunk: Chunk, out: memoryview, at: int) -> None:
        try:
            chunk.run.fill_block(out, at)
        except OverwireError as error:
            error.tensor, error.chunk = self.name, self._chunks.index(chunk) if chunk in self._chunks else 0
            error.args = (f"{error} (chunk {error.chunk} of tensor {self.name!r})",)
            raise


def _scatter(
    band: memoryview, packed: memoryview, count: int, one: Chunk, box: tuple[int, ...], axis: int, item: int
) -> None:
    """Copies `count` packed rows of a part to their columns in a band of whole rows."""
    last = len(box) - 1
    while last > axis + 1 and one.sizes[last] == box[last]:
        last -= 1
    run = math.prod(one.sizes[last:]) * item  # the number of bytes that are contiguous in both the part and the band
    strides = [math.prod(box[dim + 1 :]) * item for dim in range(axis, last)]
    base = sum(one.offsets[dim] * math.prod(box[dim + 1 :]) * item for dim in range(axis + 1, last + 1))
    counts = (count, *one.sizes[axis + 1 : last])
    places = [range(0, size * stride, stride) for size, stride in zip(counts, strides, strict=True)]
    at = 0
    for place in itertools.product(*places):
        low = base + sum(place)
        band[low : low + run] = packed[at : at + run]
        at += run


def check_cover(shape: tuple[int, ...], boxes: list[Box], make_error: Callable[[str, int], Exception]) -> None:
    """Raises make_error(why, number of a box) unless the boxes contain each element of a tensor exactly once.

    All boxes have as many dimensions as the shape. Boxes without elements are ignored.
    """
    for number, (offsets, sizes) in enumerate(boxes):
        if any(low + size > dim for low, size, dim in zip(offsets, sizes, shape, strict=True)):
            why = f"offset {list(offsets)} and size {list(sizes)} are outside of shape {list(shape)}"
            raise make_error(why, number)
    real = [number for number, (_, sizes) in enumerate(boxes) if 0 not in sizes]
    if 0 in shape:
        return
    todo = [(real, (0,) * len(shape), shape, 0)]
    while todo:
        inside, low, high, depth = todo.pop()
        if not inside:
            raise make_error(f"no chunk has the elements from {list(low)} to {list(high)}", 0)
        if len(inside) == 1:
            offsets, sizes = boxes[inside[0]]
            ends = tuple(map(sum, zip(offsets, sizes, strict=True)))
            if (offsets, ends) != (low, high):
                region = f"instead of those from {list(low)} to {list(high)}"
                why = f"only the elements from {list(offsets)} to {list(ends)} are stored {region}"
                raise make_error(why, inside[0])
            continue
        for axis in range(len(shape)):
            groups = _divide(boxes, inside, axis)
            if len(groups) > 1:
                break
        else:
            raise make_error(*_overlap(boxes, inside))
        if depth == _DIVISIONS:
            raise make_error("its chunks are nested too deeply", inside[0])
        at = low[axis]
        for group, start, end in groups:
            if start > at:
                todo.append(([], _with(low, axis, at), _with(high, axis, start), depth + 1))
            todo.append((group, _with(low, axis, start), _with(high, axis, end), depth + 1))
            at = end
        if at < high[axis]:
            todo.append(([], _with(low, axis, at), high, depth + 1))


def _with(numbers: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*numbers[:at], value, *numbers[at + 1 :])


def _divide(boxes: list[Box], inside: list[int], axis: int) -> list[tuple[list[int], int, int]]:
    """Divides boxes into groups that do not overlap along an axis. Returns each group with its begin and end on the
    axis."""
    groups: list[tuple[list[int], int, int]] = []
    for number in sorted(inside, key=lambda one: boxes[one][0][axis]):
        start = boxes[number][0][axis]
        end = start + boxes[number][1][axis]
        if groups and start < groups[-1][2]:
            group, first, last = groups[-1]
            group.append(number)
            groups[-1] = group, first, max(last, end)
        else:
            groups.append(([number], start, end))
    return groups


def _overlap(boxes: list[Box], inside: list[int]) -> tuple[str, int]:
    """Returns the error text for boxes that cannot be divided, and the number of one of them."""
    for one, other in itertools.combinations(inside[:_PAIRS], 2):
        (low, size), (start, length) = boxes[one], boxes[other]
        if all(a < c + d and c < a + b for a, b, c, d in zip(low, size, start, length, strict=True)):
            return f"its chunks {one} and {other} overlap, at {list(low)} and at {list(start)}", other
    return "its chunks overlap, or cannot be separated by rows or columns", inside[0]
