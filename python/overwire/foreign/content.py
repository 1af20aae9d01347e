"""Represents the contents of another library's file, and writes them to a plain safetensors file.

Tensors are read in blocks, in the order of the plain file, so memory use does not grow with the
model. Several threads copy tensors. The first error stops all of them.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .. import _verbs
from .._imports import start_thread
from .._tables import BITS
from .._undo import keep_error
from ..errors import ArgumentError, FormatError, OverwireError, error_of_system
from ..frameworks.views import Bytes

if TYPE_CHECKING:
    from .._requests import SaveRequest

#: The most bytes of a block.
BLOCK = 16 << 20

#: The most characters that plain values may take in a file's metadata.
VALUES = 1 << 20

_THREADS = 4


class Stored(Protocol):
    """A tensor in a file of another library.

    dtype: a safetensors name. shape: in elements, even if an element has less than a byte.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_blocks(self) -> Iterator[memoryview]:
        """Yields the bytes in order. A block is valid until the next block is requested. Raises CorruptError,
        IOFailure."""


class Mapped:
    """A tensor in memory, or in a mapped file."""

    def __init__(self, memory: Bytes) -> None:
        self.dtype, self.shape, self._memory = memory.dtype, memory.shape, memory

    def read_blocks(self) -> Iterator[memoryview]:
        """Yields the bytes in order, like `Stored.read_blocks`."""
        for at in range(0, self._memory.nbytes, BLOCK):
            size = min(BLOCK, self._memory.nbytes - at)
            yield memoryview((ctypes.c_ubyte * size).from_address(self._memory.pointer + at))


class Content(NamedTuple):
    """The contents of a file or folder.

    tensors: names and tensors. values: plain values (numbers, texts, lists of them) by path.
    left: a line about each object that a plain file cannot contain. mode: the permission bits that all files of the
    source have in common. has_sums: whether checksums cover all bytes, and reading compares them.
    """

    tensors: list[tuple[str, Stored]]
    values: dict[str, Any]
    left: list[str]
    mode: int = 0o666
    has_sums: bool = False


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the number of bytes of a tensor."""
    return math.prod(shape) * BITS[dtype] // 8


def text_of(values: dict[str, Any]) -> str | None:
    """Encodes values as JSON. Returns None if the text is longer than `VALUES`, because values with many references
    could make it huge."""
    parts, letters = [], 0
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(values):
        letters += len(part)
        if letters > VALUES:
            return None
        parts.append(part)
    return "".join(parts)


def write_plain(content: Content, number: int, source: str, is_header: bool = False) -> list[str]:
    """Writes a plain safetensors file to an empty file, given by its descriptor.

    source: the path in errors. is_header: whether to write only the header, and leave a hole for
    the tensors. Returns a line about each object that is left out. Raises FormatError for names
    that safetensors files cannot have, the errors of reading the tensors, and IOFailure.
    """
    notes, left = {"format": "pt"}, list(content.left)
    values = text_of(content.values)
    if content.values and values is not None:
        notes["torch.values"] = values
    elif content.values:
        left.append(f"{len(content.values)} plain values with more than {VALUES} characters in total")
    header, order = _lay_out(content, notes, source)
    try:
        os.fchmod(number, content.mode & 0o666 | 0o600)
        _write_all(number, memoryview(header), 0)
        starts, at = {}, len(header)
        for one in order:
            starts[one] = at
            at += bytes_of(content.tensors[one][1].dtype, content.tensors[one][1].shape)
        os.ftruncate(number, at)
        if not is_header:
            _copy_tensors([(content.tensors[one][1], starts[one]) for one in order], number)
    except OSError as error:
        raise error if isinstance(error, OverwireError) else error_of_system(error, "save", source) from error
    return [f"{source}: {what}" for what in left]


def _lay_out(content: Content, notes: dict[str, str], source: str) -> tuple[bytes, list[int]]:
    # Returns the header with its length, and the tensors' positions in file order.
    # The engine makes the header from names, dtypes and sizes, and does not read the tensors at this address.
    anywhere = ctypes.create_string_buffer(1)
    sizes = [bytes_of(tensor.dtype, tensor.shape) for _, tensor in content.tensors]
    spec: SaveRequest = {"path": source, "metadata": notes}
    spec["names"] = [name for name, _ in content.tensors]
    spec["dtypes"] = [tensor.dtype for _, tensor in content.tensors]
    spec["shapes"] = [list(tensor.shape) for _, tensor in content.tensors]
    numbers = [n for size in sizes for n in (ctypes.addressof(anywhere) if size else 0, size, 0)]
    try:
        front = _verbs.plain_front(spec, array("q", numbers).tobytes())
    except ArgumentError as error:  # the name cannot be stored in a safetensors file
        reason = str(error).rpartition("bad argument: ")[2]
        is_named = error.tensor is None or repr(error.tensor)[1:-1] in reason
        name = "" if is_named else f"tensor {error.tensor!r}: "
        raise FormatError(f"overwire: open {source}: {name}{reason}", source=source, tensor=error.tensor) from error
    header = front["header"].encode()
    return len(header).to_bytes(8, "little") + header, front["order"]


def _copy_tensors(tensors: list[tuple[Stored, int]], number: int) -> None:
    """Writes tensors to their offsets in the file, several at a time."""
    failure = keep_error()  # the first error of a worker, or Ctrl-C; all workers stop at their next block

    def copy_tensor(one: tuple[Stored, int]) -> None:
        tensor, at = one
        with failure:
            blocks = iter(tensor.read_blocks())
            while failure.error is None and (block := next(blocks, None)) is not None:
                _write_all(number, block, at)
                at += len(block)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, _THREADS)) as pool, failure:
        list(start_thread(pool.map, copy_tensor, tensors))
    if failure.error is not None:
        raise failure.error


def _write_all(number: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(number, data, at)
        data, at = data[count:], at + count
