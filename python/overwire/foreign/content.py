"""What a file of another library holds, and the plain safetensors file that is made of it.

A tensor gives its bytes in blocks, in the order of the plain file, so that memory does
not grow with the model. Tensors are copied by several threads; the first error ends all.
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
from ..errors import ArgumentError, FormatError, OverwireError, error_of_system
from ..frameworks.frame import Bytes

if TYPE_CHECKING:
    from .._requests import SaveRequest

#: The most bytes of a block.
BLOCK = 16 << 20

#: The most bytes of plain values that the metadata of a file keeps.
VALUES = 1 << 20

_THREADS = 4


class Stored(Protocol):
    """A tensor in a file of another library.

    dtype: a name of safetensors. shape: in elements, as the plain file's header has it.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_blocks(self) -> Iterator[memoryview]:
        """Its bytes in order; a block is valid until the next one. Raises CorruptError, IOFailure."""


class Mapped:
    """A tensor whose bytes are in memory, or mapped."""

    def __init__(self, memory: Bytes) -> None:
        self.dtype, self.shape, self._memory = memory.dtype, memory.shape, memory

    def read_blocks(self) -> Iterator[memoryview]:
        """See `Stored`."""
        for at in range(0, self._memory.nbytes, BLOCK):
            size = min(BLOCK, self._memory.nbytes - at)
            yield memoryview((ctypes.c_ubyte * size).from_address(self._memory.pointer + at))


class Content(NamedTuple):
    """What a file or folder holds.

    tensors: by name. values: plain values (numbers, texts, lists of them) by their paths.
    left: what has no place in a plain file, a line each. mode: the permissions that all
    its files give.
    """

    tensors: list[tuple[str, Stored]]
    values: dict[str, Any]
    left: list[str]
    mode: int = 0o666


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor of the shape."""
    return math.prod(shape) * BITS[dtype] // 8


def text_of(values: dict[str, Any]) -> str | None:
    """Values as JSON; None where that has more letters than metadata keeps: one value may stand for many."""
    parts, letters = [], 0
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(values):
        letters += len(part)
        if letters > VALUES:
            return None
        parts.append(part)
    return "".join(parts)


def write_plain(content: Content, number: int, source: str, is_header: bool = False) -> list[str]:
    """Writes a plain safetensors file to an empty file that is open by its number.

    source: in errors. is_header: only the header is written, and the tensors are a hole.
    Returns what is left out. Raises FormatError for names that no safetensors file can
    have, what reading the tensors raises, and IOFailure.
    """
    notes, left = {"format": "pt"}, list(content.left)
    values = text_of(content.values)
    if content.values and values is not None:
        notes["torch.values"] = values
    elif content.values:
        left.append(f"{len(content.values)} plain values of more than {VALUES} letters")
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
    # The header of the file with its length, and the positions of the tensors in their order.
    # The engine lays a header out by names, dtypes and sizes: it reads none of the bytes.
    anywhere = ctypes.create_string_buffer(1)
    sizes = [bytes_of(tensor.dtype, tensor.shape) for _, tensor in content.tensors]
    spec: SaveRequest = {"path": source, "metadata": notes}
    spec["names"] = [name for name, _ in content.tensors]
    spec["dtypes"] = [tensor.dtype for _, tensor in content.tensors]
    spec["shapes"] = [list(tensor.shape) for _, tensor in content.tensors]
    numbers = [n for size in sizes for n in (ctypes.addressof(anywhere) if size else 0, size, 0)]
    try:
        front = _verbs.plain_front(spec, array("q", numbers).tobytes())
    except ArgumentError as error:  # of a name that no file can have
        reason = str(error).rpartition("bad argument: ")[2]
        is_named = error.tensor is None or repr(error.tensor)[1:-1] in reason
        name = "" if is_named else f"tensor {error.tensor!r}: "
        raise FormatError(f"overwire: open {source}: {name}{reason}", source=source, tensor=error.tensor) from error
    header = front["header"].encode()
    return len(header).to_bytes(8, "little") + header, front["order"]


def _copy_tensors(tensors: list[tuple[Stored, int]], number: int) -> None:
    """Writes tensors to their places in the file, several at a time."""
    failures: list[BaseException] = []

    def copy_tensor(one: tuple[Stored, int]) -> None:
        tensor, at = one
        try:
            for block in tensor.read_blocks():
                if failures:
                    return
                _write_all(number, block, at)
                at += len(block)
        except BaseException as error:
            failures.append(error)
            raise

    with ThreadPoolExecutor(min(os.cpu_count() or 1, _THREADS)) as pool:
        try:
            list(start_thread(pool.map, copy_tensor, tensors))
        except BaseException as error:  # also Ctrl-C here: the others stop at their next block
            failures.append(error)
            pool.shutdown(cancel_futures=True)
            raise failures[0] from None


def _write_all(number: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(number, data, at)
        data, at = data[count:], at + count
