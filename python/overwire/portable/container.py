"""Parses the header and index of a file, and checks the rules in sections 1, 2 and 4 of docs/format.md."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from math import isfinite, prod
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CorruptError, FormatError, NotSupportedError

if TYPE_CHECKING:  # only the index of a compressed file needs numpy
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

# The name and bits of each dtype code (section 5).
DTYPES = {
    1: ("BOOL", 8), 2: ("F4", 4), 3: ("F6_E2M3", 6), 4: ("F6_E3M2", 6), 5: ("U8", 8), 6: ("I8", 8), 7: ("F8_E5M2", 8),
    8: ("F8_E4M3", 8), 9: ("F8_E8M0", 8), 10: ("F8_E4M3FNUZ", 8), 11: ("F8_E5M2FNUZ", 8), 12: ("I16", 16),
    13: ("U16", 16), 14: ("F16", 16), 15: ("BF16", 16), 16: ("I32", 32), 17: ("U32", 32), 18: ("F32", 32),
    19: ("C64", 64), 20: ("F64", 64), 21: ("I64", 64), 22: ("U64", 64),
}  # fmt: skip
BITS = dict(DTYPES.values())

_INDEX, _NOTE = "overwire.index", "overwire"
_NOTICE = ("U8", [0], [1, 1])  # an entry that makes readers without overwire refuse the file
_LONGEST_HEADER = 100_000_000
_LARGEST_INDEX = 1 << 30
_LARGEST_CHUNK = 16 << 20
_X16, _PLANES = 1, 6
_TRANSFORMS = {  # transforms of X16, keyed by dtype
    "BF16": {1}, "F16": {2}, "F32": {3}, "C64": {3}, "F8_E4M3": {4}, "F8_E4M3FNUZ": {4}, "F8_E5M2": {5},
    "F8_E5M2FNUZ": {5}, "F4": {7}, "F8_E8M0": {8}, "BOOL": {8},
} | {name: {6, 7, 8} for name in ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")}  # fmt: skip
_PLANES_OF = {  # transforms of planes, keyed by dtype; transform 1 is allowed for every dtype
    "I16": 2, "U16": 2, "I32": 3, "U32": 3, "I64": 4, "U64": 4, "F16": 5, "BF16": 5, "F32": 6, "C64": 6, "F64": 7,
}  # fmt: skip
_MOST_TILES = 256
_VERSION = re.compile("([0-9]+)[.]([0-9]+)")
_MINOR = 4  # the newest minor version that this reader knows
_MINOR_NOTICE = 4  # the first minor version with a notice (section 1.3)
_WIDE = ("I16", "U16", "I32", "U32", "I64", "U64")


class StoredChunk(NamedTuple):
    """A chunk in the index. offset: the position of its bytes in the file."""

    offset: int
    stored: int
    logical: int
    sum: int
    codec: int
    transform: int
    tiles: int


class Tensor(NamedTuple):
    """A tensor. In a plain file its bytes are at `offset`. In a compressed file they are in `chunks`, which form a grid
    with `parts` column parts. alias: the name of the tensor that stores the bytes of this one, or None."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    chunks: list[StoredChunk]
    parts: int
    alias: str | None


class Container(NamedTuple):
    """A file. tensors: in the order of the header. metadata: without overwire's entry."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None
    compressed: bool


def parse(data: Bytes | memoryview, path: str) -> Container:
    """Parses and checks a file, except for the tensors' bytes. data: the file's bytes.

    Raises FormatError for bytes that are not a safetensors file, CorruptError for a container that breaks a rule, and
    NotSupportedError for a container that a newer version wrote.
    """
    checks = _Checks(path)
    checks.is_file(len(data) >= 8, "too short")
    size = int.from_bytes(bytes(data[:8]), "little")
    checks.is_file(size <= _LONGEST_HEADER, f"its header has {size} bytes, more than {_LONGEST_HEADER}")
    checks.is_sound(8 + size <= len(data), f"truncated: its header has {size} bytes, but the file has {len(data)}")
    try:
        header = json.loads(bytes(data[8 : 8 + size]).decode(), **STRICTLY)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"overwire: {path}: malformed header: {error}", source=path) from None
    checks.is_file(isinstance(header, dict), "its header is not a JSON object")
    base = 8 + size
    metadata = header.pop("__metadata__", None)
    texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    checks.is_file(metadata is None or texts, "its metadata is not an object of strings")
    note = None if metadata is None else metadata.get(_NOTE)
    entries, notice = _entries_of_header(header, base, len(data), checks, note is not None)
    if _INDEX not in entries and (note is None or _note_of(note) is None):  # the entry may be another program's
        checks.is_file(notice is None, f"tensor {notice!r}: a gap or an overlap before it")
        return Container(entries, metadata, False)
    if metadata is None or note is None or _INDEX not in entries:
        text = f"overwire: {path}: it has only one of the index and the note about it in the metadata"
        raise CorruptError(text, source=path)
    minor = _check_note(note, path)
    checks.is_file(notice is None or minor >= _MINOR_NOTICE, f"tensor {notice!r}: a gap or an overlap before it")
    checks.is_sound(notice is not None or minor < _MINOR_NOTICE, "the entry that makes other readers refuse the file")
    first, index = next(iter(entries)), entries.pop(_INDEX)
    is_first = first == _INDEX and index.offset == base and index.dtype == "U8" and base % 4096 == 0
    checks.is_sound(is_first, "the position of its index")
    tensors = _read_index(data, base, index.nbytes, entries, checks)
    rest = {key: value for key, value in metadata.items() if key != _NOTE}
    return Container(tensors, rest, True)


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key appears twice")
    for pair in pairs:
        for text in pair:
            if isinstance(text, str):
                text.encode()  # raises ValueError for an unpaired surrogate
    return dict(pairs)


def _parse_finite(number: str) -> float:
    value = float(number)
    if not isfinite(value):  # NaN and Infinity are not JSON
        raise ValueError(f"the number {number:.20}")
    return value


def _parse_integer(number: str) -> float:
    return -0.0 if number == "-0" else int(number)  # as -0.0, which is refused as an unsigned integer


# Stricter rules than json's own.
STRICTLY: dict[str, Any] = dict(
    object_pairs_hook=_checked_object, parse_constant=_parse_finite, parse_float=_parse_finite,
    parse_int=_parse_integer,
)  # fmt: skip


class _Checks(NamedTuple):
    # Raises the errors for a file that breaks a rule of the format.
    path: str

    def is_file(self, ok: bool, what: str) -> None:
        """Raises FormatError unless ok, because the file is then not a safetensors file."""
        if not ok:
            raise FormatError(f"overwire: {self.path}: {what}", source=self.path)

    def is_sound(self, ok: bool, what: str, name: str = "") -> None:
        """Raises CorruptError unless ok. what: the part that is wrong; "" means the tensor's index entry. name: the
        tensor's name."""
        if not ok:
            where, what = f"tensor {name!r}: " if name else "", what or "its entry in the index"
            raise CorruptError(f"overwire: {self.path}: corrupt data: {where}check failed: {what}", source=self.path)


def _entries_of_header(
    header: dict[str, Any], base: int, size: int, checks: _Checks, marked: bool
) -> tuple[dict[str, Tensor], str | None]:
    # Returns the tensors of a safetensors header, in the order of their bytes, and the name of the notice of a marked
    # file.
    rows, notice = [], None
    # A plain file may have a tensor of one byte at the position of a marked file's notice, followed by an empty tensor.
    marked = marked and not any(isinstance(one, dict) and one.get("data_offsets") == [0, 1] for one in header.values())
    for name, entry in header.items():
        where = f"tensor {name!r}"
        is_entry = isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= set(entry)
        checks.is_file(is_entry, f"{where}: its entry lacks dtype, shape or data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_dtype = isinstance(dtype, str) and dtype in BITS
        checks.is_file(is_dtype and isinstance(shape, list) and len(shape) <= 64, f"{where}: invalid dtype or shape")
        numbers = [*shape, *offsets] if isinstance(offsets, list) and len(offsets) == 2 else [None]
        checks.is_file(all(type(n) is int and 0 <= n < 1 << 63 for n in numbers), f"{where}: invalid shape or offsets")
        if marked and notice is None and (dtype, shape, offsets) == _NOTICE:
            notice = name
            continue
        products = accumulate((*shape, BITS[dtype]), mul)
        checks.is_file(all(n < 1 << 64 for n in products), f"{where}: its shape is too large")
        nbytes, rest = divmod(prod(shape) * BITS[dtype], 8)
        checks.is_file(not rest and offsets[1] - offsets[0] == nbytes, f"{where}: its offsets do not match its shape")
        rows.append((*offsets, name, Tensor(dtype, tuple(shape), nbytes, base + offsets[0], [], 1, None)))
    rows.sort(key=lambda row: row[:3])
    end = 0
    for low, high, name, _ in rows:
        checks.is_file(low == end, f"tensor {name!r}: a gap or an overlap before it")
        end = high
    checks.is_sound(base + end <= size, f"truncated: the file has {size} of {base + end} bytes")
    checks.is_file(base + end == size, f"the file has {size - base - end} bytes after the last tensor")
    return {name: tensor for _, _, name, tensor in rows}, notice


def _note_of(text: str) -> tuple[Any, Any] | None:
    # Returns the format and index from the note, or None if the note is not overwire's.
    try:
        note = json.loads(text)
        facts = note.get("format") or "", note.get("index") or ""
    except (ValueError, AttributeError, RecursionError):
        return None
    return facts if all(isinstance(fact, str) for fact in facts) else None


def _check_note(text: str, path: str) -> int:
    # Returns the minor version.
    version, index = _note_of(text) or ("", "")
    numbers = _VERSION.fullmatch(version)
    major, minor = (int(n) for n in numbers.groups()) if numbers else (1 << 16, 0)
    if max(major, minor) >= 1 << 16:
        raise CorruptError(f"overwire: {path}: corrupt data: its note in the metadata is malformed", source=path)
    if major == 1 and index != _INDEX:
        raise CorruptError(f"overwire: {path}: corrupt data: its note does not name the index", source=path)
    if major != 1:
        raise NotSupportedError(f"overwire: {path}: format {major}.{minor}: this reader supports format 1", source=path)
    return minor


def _read_index(
    data: Bytes | memoryview, base: int, size: int, entries: dict[str, Tensor], checks: _Checks
) -> dict[str, Tensor]:
    import numpy as np

    from .sums import crc32c

    data = np.frombuffer(data, np.uint8)
    blob = data[base : base + size]
    checks.is_sound(72 <= size <= _LARGEST_INDEX and size % 64 == 0 and bytes(blob[:4]) == b"OWIX", "its index")
    (major, minor), features = blob[4:8].view("<u2").tolist(), int(blob[8:16].view("<u8")[0])
    is_newer = minor > _MINOR  # newer versions may use the reserved bytes
    if major != 1 or features >> 2:
        text = f"overwire: {checks.path}: unsupported index version {major} with features {features:#x}"
        raise NotSupportedError(text, source=checks.path)
    tensors, chunks, dims = (int(n) for n in blob[16:28].view("<u4"))
    length = 64 + 8 * dims + 64 * tensors + 32 * chunks
    fits = int(blob[32:40].view("<u8")[0]) == size and -(-(length + 8) // 64) * 64 == size
    checks.is_sound(blob[28:32].view("<u2").tolist() == [64, 32] and fits, "its index's sizes")
    is_same = crc32c(blob[:length]) == int(blob[length : length + 4].view("<u4")[0])
    checks.is_sound(is_same, "the checksum of its index")
    is_clean = not blob[length + 4 :].any() and (is_newer or not blob[44:64].any())
    checks.is_sound(is_clean, "its index's reserved bytes")
    checks.is_sound(crc32c(data[:base]) == int(blob[40:44].view("<u4")[0]), "the checksum of its header")
    checks.is_sound(tensors == len(entries), "the number of its tensors")
    extents = blob[64 : 64 + 8 * dims].view("<u8")
    at = 64 + 8 * dims
    rows = blob[at : at + 64 * tensors].reshape(-1, 64)
    table = blob[at + 64 * tensors : length].reshape(-1, 32)
    names = list(entries)
    out: dict[str, Tensor] = {}
    dim = chunk = 0
    for name, row in zip(names, rows, strict=True):
        code, rank, layout, parts = (int(n) for n in row[:4])
        checks.is_sound(code in DTYPES and rank <= 64 and layout <= 2 and dim + rank <= dims, "", name)
        dtype, bits = DTYPES[code]
        shape = tuple(int(n) for n in extents[dim : dim + rank])
        dim += rank
        nbytes, stored_size = (int(n) for n in row[8:24].view("<u8"))
        first, count = (int(n) for n in row[24:32].view("<u4"))
        chunk_bytes, target = int(row[4:8].view("<u4")[0]), int(row[48:52].view("<u4")[0])
        entry = entries[name]
        begins = first == chunk or not count and first < chunk  # as in the engine
        is_sized = nbytes * 8 == prod(shape) * bits and (is_newer or not row[52:].any())
        checks.is_sound(is_sized and begins, "", name)
        checks.is_sound((target != 0xFFFFFFFF) == (layout == 2) and chunk + count <= chunks, "", name)
        if layout == 2 or not nbytes:
            checks.is_sound((count, stored_size, parts, chunk_bytes, entry.nbytes) == (0, 0, 1, 0, 0), "", name)
        else:
            fits = 0 < chunk_bytes <= _LARGEST_CHUNK and chunk_bytes % 4096 == 0
            checks.is_sound(entry.nbytes == stored_size and fits, "", name)
        if layout == 1:
            plain = (entry.dtype, entry.shape, stored_size) == (dtype, shape, nbytes)
            checks.is_sound(plain and parts == 1, "", name)
        elif layout == 0:
            checks.is_sound(entry.dtype == "U8" and nbytes > 0, "", name)
        alias = None
        if layout == 2:
            holds = target < tensors and int(rows[target][2]) != 2
            same = holds and rows[target][32:48].tobytes() == row[32:48].tobytes()
            checks.is_sound(same, "the tensor that it is an alias of", name)
            alias = names[target]
        own = [_chunk_of(record, is_newer, checks, name) for record in table[chunk : chunk + count]]
        tensor = out[name] = Tensor(dtype, shape, nbytes, entry.offset, own, parts, alias)
        if count or nbytes and alias is None:
            _check_grid(tensor, chunk_bytes, layout == 1, entry, checks, name)
        chunk += count
    checks.is_sound(dim == dims and chunk == chunks, "the counts in its index")
    checks.is_sound(features == _features_of(out), "the features of its index")
    for name, tensor in out.items():
        holder = out[name if tensor.alias is None else tensor.alias]
        same = (holder.dtype, holder.nbytes) == (tensor.dtype, tensor.nbytes)
        checks.is_sound(same, "the tensor that it is an alias of", name)
    return out


def _features_of(tensors: dict[str, Tensor]) -> int:
    """Returns the critical bits that an index of these tensors must set."""
    features = 0
    for tensor in tensors.values():
        codecs = {chunk.codec for chunk in tensor.chunks}
        features |= (_X16 in codecs and tensor.dtype in _WIDE) | (_PLANES in codecs) << 1
    return features


def _chunk_of(record: Bytes, is_newer: bool, checks: _Checks, name: str) -> StoredChunk:
    is_clean = not record[22:24].any() and (is_newer or not record[26:].any())
    checks.is_sound(is_clean, "the reserved bytes of a chunk", name)
    offset, (stored_size, logical, total) = int(record[:8].view("<u8")[0]), record[8:20].view("<u4").tolist()
    tiles = int(record[24:26].view("<u2")[0])
    return StoredChunk(offset, stored_size, logical, total, int(record[20]), int(record[21]), tiles)


def _check_grid(tensor: Tensor, chunk_bytes: int, plain: bool, entry: Tensor, checks: _Checks, name: str) -> None:
    rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.nbytes // rows
    element = max(8, BITS[tensor.dtype]) // 8
    checks.is_sound(tensor.parts in (1, 2, 4, 8), "its column parts", name)
    divides = row_bytes * rows == tensor.nbytes and row_bytes % (tensor.parts * element) == 0
    checks.is_sound(tensor.parts == 1 or divides, "its column parts", name)
    part = tensor.nbytes // tensor.parts
    count = -(-part // chunk_bytes) * tensor.parts  # checked before a list of this length is made
    checks.is_sound(len(tensor.chunks) == count, "its chunks", name)
    checks.is_sound(plain or entry.nbytes % 64 == 0, "its stored bytes", name)
    sizes = [min(chunk_bytes, part - at) for at in range(0, part, chunk_bytes)] * tensor.parts
    checks.is_sound([chunk.logical for chunk in tensor.chunks] == sizes, "its chunks", name)
    end, last = entry.offset, entry.offset + entry.nbytes
    for number, chunk in enumerate(tensor.chunks):
        fits = chunk.offset >= end and chunk.offset + chunk.stored <= last and 0 < chunk.stored <= chunk.logical
        fits = fits and (chunk.codec == 0 and chunk.offset == end if plain else chunk.offset % 16 == 0)
        if chunk.codec == _X16:
            is_valid = 1 <= chunk.tiles <= _MOST_TILES
            is_known = chunk.transform in _TRANSFORMS.get(tensor.dtype, ())
        elif chunk.codec == _PLANES:
            is_valid = tensor.parts == 1 and not chunk.tiles
            is_known = chunk.transform in (1, _PLANES_OF.get(tensor.dtype, 1))
        else:
            is_valid = bool(chunk.codec) or not (chunk.stored < chunk.logical or chunk.transform or chunk.tiles)
            is_known = chunk.codec == 0
        where = f"overwire: {checks.path}: tensor {name!r} chunk {number}: "
        if not fits or not is_valid:
            raise CorruptError(f"{where}corrupt data", source=checks.path, tensor=name, chunk=number)
        if not is_known:
            text = f"{where}codec {chunk.codec} with transform {chunk.transform} for {tensor.dtype}"
            text += ": a newer reader may support it"
            raise NotSupportedError(text, source=checks.path, tensor=name, chunk=number)
        end = chunk.offset + chunk.stored
