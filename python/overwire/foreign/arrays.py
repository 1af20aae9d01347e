"""Reads numpy's files: .npy, an array after a short header, and .npz, a zip archive of .npy files.

    "\\x93NUMPY" version(2) length(2, or 4 from version 2 on) header data
    header: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } and spaces up to a newline

Arrays of objects are pickles, and are refused. The decompressed size of an archive is limited.

Source: numpy.lib.format's documentation.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import CorruptError, FormatError, NotSupportedError, OverwireError, UntrustedPickleError
from .content import BLOCK, Content, bytes_of
from .joined import Files, open_files, pack_strided
from .zips import BAD_ZIP, entries_of

MAGIC = b"\x93NUMPY"

_HEADER = re.compile(
    rb"\{\s*'descr':\s*(?P<descr>'[^']{1,40}'|\[[^\n]*\]),\s*'fortran_order':\s*(?P<order>True|False),"
    rb"\s*'shape':\s*\((?P<shape>[0-9, L]{0,1000})\),?\s*\}\s*"
)
# The limits for the bytes of a header, for dimensions, and for the bytes of a read.
_MOST, _DIMS, _STEP = 1 << 16, 64, 1 << 20
# The arrays of an archive together may have _TIMES its size plus _SPARE bytes.
_TIMES, _SPARE = 64, 256 << 20

_DTYPES = {
    "|b1": "BOOL", "|i1": "I8", "|u1": "U8", "<i2": "I16", "<u2": "U16", "<i4": "I32", "<u4": "U32", "<i8": "I64",
    "<u8": "U64", "<f2": "F16", "<f4": "F32", "<f8": "F64", "<c8": "C64",
}  # fmt: skip


class _Bytes(NamedTuple):
    """A file, or an entry of an archive: `stored` bytes at `start`, or `size` bytes after decompression."""

    files: Files
    path: str
    name: str
    start: int
    stored: int
    size: int
    checksum: int | None
    deflated: bool
    is_array: bool = True  # whether the name ends in .npy

    def error_of(self, why: str, kind: type[OverwireError] = FormatError) -> OverwireError:
        return kind(f"overwire: open {self.path}: {self.name}: {why}", source=self.path, tensor=self.name)

    def read_blocks(self) -> Iterator[bytearray | bytes]:
        """Yields the content in order, and checks its length and checksum. Raises CorruptError."""
        inflate = zlib.decompressobj(-15) if self.deflated else None
        total = length = 0
        for at in range(0, self.stored, _STEP):
            block = bytearray(min(_STEP, self.stored - at))
            self.files.fill_block(self.path, memoryview(block), self.start + at)
            rest: bytes | bytearray = block
            while rest:
                if inflate is None:
                    data, rest = rest, b""
                else:
                    try:
                        data = inflate.decompress(rest, BLOCK)
                    except zlib.error as error:
                        raise self.error_of(f"damaged: {error}", CorruptError) from None
                    rest = inflate.unconsumed_tail
                total, length = zlib.crc32(data, total), length + len(data)
                if length > self.size:
                    raise self.error_of(f"it has more than the {self.size} bytes that its archive states", CorruptError)
                yield data
        if length != self.size:
            raise self.error_of(f"it has only {length} of {self.size} bytes: copy or fetch it again", CorruptError)
        if self.checksum not in (None, total):
            raise self.error_of(f"checksum mismatch: {self.checksum:08x} stored, {total:08x} computed", CorruptError)


class _Array:
    """An array. Its data follow `skip` bytes of header."""

    def __init__(self, source: _Bytes, dtype: str, shape: tuple[int, ...], is_fortran: bool, skip: int) -> None:
        self.dtype, self.shape = dtype, shape
        self._source, self._is_fortran, self._skip = source, is_fortran and len(shape) > 1, skip

    def read_blocks(self) -> Iterator[memoryview]:
        """Yields the bytes in C order, as `content.Stored` requires. An array in Fortran order becomes one block."""
        if not self._is_fortran:
            yield from self._read_data()
            return
        item = bytes_of(self.dtype, (1,))
        strides = tuple(itertools.accumulate(self.shape[:-1], int.__mul__, initial=item))
        yield pack_strided(memoryview(b"".join(self._read_data())), 0, self.shape, strides, item, self._source.path)

    def _read_data(self) -> Iterator[memoryview]:
        skip = self._skip
        for block in self._source.read_blocks():
            if len(block) > skip:
                yield memoryview(block)[skip:]
            skip = max(skip - len(block), 0)


@contextlib.contextmanager
def open_arrays(path: str) -> Iterator[Content]:
    """Opens a .npz file, or a .npy file. The array of a .npy file has the file's name without its extension.

    Raises UntrustedPickleError for arrays of objects, NotSupportedError for dtypes that
    safetensors lacks, FormatError, and CorruptError for wrong checksums and lengths.
    """
    with open_files() as files:
        size = files.size_of(path)
        content = Content([], {}, [], files.mode, path.endswith(".npz"))
        if path.endswith(".npz"):
            sources = _read_entries(files, path)
        else:
            name = os.path.splitext(os.path.basename(path))[0]
            sources = [_Bytes(files, path, name, 0, size, size, None, False)]
        for source in sources:
            _add_array(content, source)
        yield content
        files.compare_files()


def _add_array(content: Content, source: _Bytes) -> None:
    head = b""
    for block in source.read_blocks():
        head += block[: _MOST + 12]
        if len(head) >= _MOST + 12:
            break
    if head[:6] != MAGIC or len(head) < 12:
        if source.is_array:
            raise source.error_of("it does not begin like an array, so it is damaged: copy or fetch it again")
        content.left.append(f"{source.name}: not an array")
        return
    version, start = head[6], 10 if head[6] == 1 else 12
    length = struct.unpack_from("<H" if version == 1 else "<I", head, 8)[0]
    match = _HEADER.fullmatch(head, start, start + length) if version in (1, 2, 3) and length <= _MOST else None
    if match is None:
        raise source.error_of("malformed header of the array")
    kind = match["descr"].decode("latin-1").strip("'")
    shape = tuple(int(dim.strip(b" L")) for dim in match["shape"].split(b",") if dim.strip())
    if kind.startswith("[") or kind[1:2] in ("U", "S", "M", "m"):
        content.left.append(f"{source.name}: an array of {kind[:100]}")
        return
    if kind[1:2] == "O":
        raise source.error_of("a pickled array of objects is not loaded: save arrays of numbers", UntrustedPickleError)
    if kind not in _DTYPES:
        void = " (numpy saves bfloat16 and float8 arrays as such a type)" if kind[1:2] == "V" else ""
        raise source.error_of(f"safetensors has no type {kind}{void}: save it as another dtype", NotSupportedError)
    if len(shape) > _DIMS or any(dim >= 1 << 62 for dim in shape):
        raise source.error_of(f"malformed shape of {len(shape)} dimensions")
    dtype = _DTYPES[kind]
    if (size := bytes_of(dtype, shape)) != source.size - start - length:
        why = f"{source.size - start - length} bytes of data for shape {list(shape)} of {dtype}, expected {size}"
        raise source.error_of(f"{why}: copy or fetch it again", CorruptError)
    content.tensors.append((source.name, _Array(source, dtype, shape, match["order"] == b"True", start + length)))


def _read_entries(files: Files, path: str) -> list[_Bytes]:
    """Lists the entries of an archive. Raises an error if they overlap or are too large for a valid archive."""

    def make_error(why: str, kind: type[OverwireError] = FormatError) -> OverwireError:
        return kind(f"overwire: open {path}: {why}", source=path)

    size = files.size_of(path)
    try:
        with files.open_file(path) as number, open(number, "rb", closefd=False) as file:
            is_archive = file.read(2) == b"PK"
            entries = entries_of(file)
    except BAD_ZIP as error:
        kind = CorruptError if is_archive else FormatError
        what = "a .npz file, truncated or damaged" if is_archive else "not a .npz file"
        raise make_error(f"{what} ({error}): copy or fetch it again", kind) from error
    sources: list[_Bytes] = []
    for info in entries:
        name = info.filename.removesuffix(".npy")
        head = bytearray(30)
        if not 0 <= info.header_offset <= size - 30:
            raise make_error(f"{name} is outside of the file")
        files.fill_block(path, memoryview(head), info.header_offset)
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
        if head[:4] != b"PK\3\4" or start + info.compress_size > size:
            raise make_error(f"{name} is truncated: copy or fetch it again", CorruptError)
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        if info.flag_bits & 1 or not deflated and info.compress_type != zipfile.ZIP_STORED:
            raise make_error(f"{name} is encrypted, or compressed with a method other than deflate", NotSupportedError)
        if not deflated and info.compress_size != info.file_size:
            raise make_error(f"{name} has {info.compress_size} bytes, but should have {info.file_size}")
        place = (start, info.compress_size, info.file_size, info.CRC, deflated)
        sources.append(_Bytes(files, path, name, *place, info.filename.endswith(".npy")))
    if len({source.name for source in sources}) != len(sources):
        raise make_error("two arrays have the same name")
    spans = sorted((source.start, source.stored) for source in sources)
    if any(low + count > high for (low, count), (high, _) in itertools.pairwise(spans)):
        raise make_error("its entries overlap")
    if (total := sum(source.size for source in sources)) > _TIMES * size + _SPARE:
        why = f"its arrays have {total} bytes, more than {_TIMES} times the size of the file"
        raise make_error(why, NotSupportedError)
    return sources
