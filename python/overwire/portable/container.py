"""The header and index of a file, checked as docs/format.md asks: sections 1, 2 and 4."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError, FormatError, NotSupportedError
from .sums import crc32c

Bytes = NDArray[np.uint8]

# Section 5: code -> name and bits.
DTYPES = {
    1: ("BOOL", 8), 2: ("F4", 4), 3: ("F6_E2M3", 6), 4: ("F6_E3M2", 6), 5: ("U8", 8), 6: ("I8", 8), 7: ("F8_E5M2", 8),
    8: ("F8_E4M3", 8), 9: ("F8_E8M0", 8), 10: ("F8_E4M3FNUZ", 8), 11: ("F8_E5M2FNUZ", 8), 12: ("I16", 16),
    13: ("U16", 16), 14: ("F16", 16), 15: ("BF16", 16), 16: ("I32", 32), 17: ("U32", 32), 18: ("F32", 32),
    19: ("C64", 64), 20: ("F64", 64), 21: ("I64", 64), 22: ("U64", 64),
}  # fmt: skip
BITS = dict(DTYPES.values())

_INDEX, _NOTE = "overwire.index", "overwire"
_LONGEST_HEADER = 100_000_000
_LARGEST_INDEX = 1 << 30
_LARGEST_CHUNK = 16 << 20
_X16, _PLANES = 1, 6
_TRANSFORMS = {  # of X16, by dtype
    "BF16": {1}, "F16": {2}, "F32": {3}, "C64": {3}, "F8_E4M3": {4}, "F8_E4M3FNUZ": {4}, "F8_E5M2": {5},
    "F8_E5M2FNUZ": {5}, "F4": {7}, "F8_E8M0": {8}, "BOOL": {8},
} | {name: {6, 7, 8} for name in ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")}  # fmt: skip


class StoredChunk(NamedTuple):
    """A chunk as the index has it; offset in the file."""

    offset: int
    stored: int
    logical: int
    sum: int
    codec: int
    transform: int
    tiles: int


class Tensor(NamedTuple):
    """A tensor: where its bytes are (plain files: `offset`; else `chunks`, in the grid of
    `parts` column parts), or the name of the one that it is an alias of."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    chunks: list[StoredChunk]
    parts: int
    alias: str | None


class Container(NamedTuple):
    """A file: its tensors in the order of the header, and its metadata without overwire's entry."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None
    compressed: bool


def parse(data: Bytes, path: str) -> Container:
    """Reads and checks all but the tensors of a file, given its bytes.

    Raises FormatError for what is no safetensors file, CorruptError for a container that
    breaks a rule, NotSupportedError for one that a newer version has written.
    """
    _check_format(len(data) >= 8, path, "too short")
    size = int(data[:8].view("<u8")[0])
    _check_format(size <= min(_LONGEST_HEADER, len(data) - 8), path, f"its header has {size} bytes")
    try:
        header = json.loads(bytes(data[8 : 8 + size]).decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"overwire: {path}: its header: {error}", source=path) from None
    _check_format(isinstance(header, dict), path, "its header is no object")
    base = 8 + size
    metadata = header.pop("__metadata__", None)
    texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    _check_format(metadata is None or texts, path, "its metadata")
    entries = _entries_of_header(header, base, len(data), path)
    if (metadata is not None and _NOTE in metadata) != (_INDEX in entries):
        raise CorruptError(
            f"overwire: {path}: an index without its note in the metadata, or the other way round", source=path
        )
    if _INDEX not in entries:
        return Container(entries, metadata, False)
    assert metadata is not None
    _check_note(metadata[_NOTE], path)
    first = next(iter(entries))
    index = entries.pop(_INDEX)
    _check_sound(
        first == _INDEX and index.offset == base and index.dtype == "U8" and base % 4096 == 0,
        path,
        "the place of its index",
    )
    tensors = _read_index(data, base, index.nbytes, entries, path)
    rest = {key: value for key, value in metadata.items() if key != _NOTE}
    return Container(tensors, rest, True)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands there twice")
    return dict(pairs)


def _check_format(ok: bool, path: str, what: str) -> None:
    if not ok:
        raise FormatError(f"overwire: {path}: {what}", source=path)


def _check_sound(ok: bool, path: str, what: str) -> None:
    if not ok:
        raise CorruptError(f"overwire: {path}: corrupt data: {what}", source=path)


def _entries_of_header(header: dict[str, Any], base: int, size: int, path: str) -> dict[str, Tensor]:
    # The tensors of a safetensors header, in the order of their bytes.
    rows = []
    for name, entry in header.items():
        _check_format(
            isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, path, f"tensor {name!r}"
        )
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        _check_format(
            dtype in BITS and isinstance(shape, list) and len(shape) <= 64, path, f"tensor {name!r}: dtype or shape"
        )
        numbers = [*shape, *offsets] if isinstance(offsets, list) and len(offsets) == 2 else [None]
        _check_format(all(type(n) is int and 0 <= n < 1 << 63 for n in numbers), path, f"tensor {name!r}: a number")
        bits = _count_elements(shape) * BITS[dtype]
        _check_format(
            bits % 8 == 0 and offsets[1] - offsets[0] == bits // 8,
            path,
            f"tensor {name!r}: its bytes are not its shape's",
        )
        rows.append(
            (offsets[0], offsets[1], name, Tensor(dtype, tuple(shape), bits // 8, base + offsets[0], [], 1, None))
        )
    end = 0
    for low, high, name, _ in sorted(rows, key=lambda row: row[:3]):
        _check_format(low == end, path, f"tensor {name!r}: a hole or an overlap before it")
        end = high
    _check_format(base + end == size, path, f"{size} bytes, and its tensors end at {base + end}")
    return {name: tensor for _, _, name, tensor in sorted(rows, key=lambda row: row[:3])}


def _count_elements(shape: Any) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _check_note(text: str, path: str) -> None:
    try:
        note = json.loads(text)
        major, minor = (int(n) for n in note["format"].split("."))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(f"overwire: {path}: corrupt data: its note in the metadata", source=path) from None
    if major != 1:
        raise NotSupportedError(f"overwire: {path}: format {major}.{minor}: this reader knows 1", source=path)


def _read_index(data: Bytes, base: int, size: int, entries: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    blob = data[base : base + size]
    _check_sound(72 <= size <= _LARGEST_INDEX and size % 64 == 0 and bytes(blob[:4]) == b"OWIX", path, "its index")
    major, features = int(blob[4:6].view("<u2")[0]), int(blob[8:16].view("<u8")[0])
    if major != 1 or features >> 2:
        raise NotSupportedError(
            f"overwire: {path}: an index of version {major} with features {features:#x}", source=path
        )
    tensors, chunks, dims = (int(n) for n in blob[16:28].view("<u4"))
    records = tuple(int(n) for n in blob[28:32].view("<u2"))
    length = 64 + 8 * dims + 64 * tensors + 32 * chunks
    _check_sound(
        records == (64, 32) and int(blob[32:40].view("<u8")[0]) == size and -(-(length + 8) // 64) * 64 == size,
        path,
        "its index's sizes",
    )
    _check_sound(
        crc32c(blob[:length]) == int(blob[length : length + 4].view("<u4")[0]), path, "the checksum of its index"
    )
    _check_sound(not blob[length + 4 :].any() and not blob[44:64].any(), path, "its index's reserved bytes")
    _check_sound(crc32c(data[:base]) == int(blob[40:44].view("<u4")[0]), path, "the checksum of its header")
    _check_sound(tensors == len(entries), path, "the number of its tensors")
    extents = blob[64 : 64 + 8 * dims].view("<u8")
    at = 64 + 8 * dims
    rows = blob[at : at + 64 * tensors].reshape(-1, 64)
    table = blob[at + 64 * tensors : length].reshape(-1, 32)
    names = list(entries)
    out: dict[str, Tensor] = {}
    dim = chunk = 0
    for name, row in zip(names, rows, strict=True):
        code, rank, layout, parts = (int(n) for n in row[:4])
        _check_sound(code in DTYPES and rank <= 64 and layout <= 2 and dim + rank <= dims, path, f"tensor {name!r}")
        dtype, bits = DTYPES[code]
        shape = tuple(int(n) for n in extents[dim : dim + rank])
        dim += rank
        nbytes, stored_size = (int(n) for n in row[8:24].view("<u8"))
        first, count = (int(n) for n in row[24:32].view("<u4"))
        chunk_bytes, target = int(row[4:8].view("<u4")[0]), int(row[48:52].view("<u4")[0])
        entry = entries[name]
        _check_sound(
            nbytes * 8 == _count_elements(shape) * bits and first == chunk and not row[52:].any(),
            path,
            f"tensor {name!r}",
        )
        _check_sound((target != 0xFFFFFFFF) == (layout == 2) and chunk + count <= chunks, path, f"tensor {name!r}")
        if layout == 2 or not nbytes:
            _check_sound(
                count == 0 and stored_size == 0 and parts == 1 and chunk_bytes == 0 and entry.nbytes == 0,
                path,
                f"tensor {name!r}",
            )
        else:
            _check_sound(
                entry.nbytes == stored_size and 0 < chunk_bytes <= _LARGEST_CHUNK and chunk_bytes % 4096 == 0,
                path,
                f"tensor {name!r}",
            )
        if layout == 1:
            _check_sound(
                (entry.dtype, entry.shape, stored_size) == (dtype, shape, nbytes) and parts == 1,
                path,
                f"tensor {name!r}",
            )
        elif layout == 0:
            _check_sound(entry.dtype == "U8" and nbytes > 0, path, f"tensor {name!r}")
        alias = None
        if layout == 2:
            _check_sound(
                target < tensors and int(rows[target][2]) != 2, path, f"tensor {name!r}: what it is an alias of"
            )
            alias = names[target]
        own = [_chunk_of(record, path, name) for record in table[chunk : chunk + count]]
        tensor = Tensor(dtype, shape, nbytes, entry.offset, own, parts, alias)
        if count or nbytes and alias is None:
            _check_grid(tensor, chunk_bytes, layout == 1, entry, path, name)
        out[name] = tensor
        chunk += count
    _check_sound(dim == dims and chunk == chunks, path, "what its index counts")
    for name, tensor in out.items():
        if tensor.alias is not None:
            holder = out[tensor.alias]
            _check_sound(
                (holder.dtype, holder.nbytes) == (tensor.dtype, tensor.nbytes),
                path,
                f"tensor {name!r}: what it is an alias of",
            )
    return out


def _chunk_of(record: Bytes, path: str, name: str) -> StoredChunk:
    (offset,), (stored_size, logical, total) = record[:8].view("<u8"), record[8:20].view("<u4")
    _check_sound(
        not record[22:24].any() and not record[26:].any(), path, f"tensor {name!r}: the reserved bytes of a chunk"
    )
    return StoredChunk(
        int(offset),
        int(stored_size),
        int(logical),
        int(total),
        int(record[20]),
        int(record[21]),
        int(record[24:26].view("<u2")[0]),
    )


def _check_grid(tensor: Tensor, chunk_bytes: int, plain: bool, entry: Tensor, path: str, name: str) -> None:
    rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.nbytes // rows
    element = max(8, BITS[tensor.dtype]) // 8
    _check_sound(tensor.parts in (1, 2, 4, 8), path, f"tensor {name!r}: its column parts")
    _check_sound(
        tensor.parts == 1 or row_bytes * rows == tensor.nbytes and row_bytes % (tensor.parts * element) == 0,
        path,
        f"tensor {name!r}: its column parts",
    )
    part = tensor.nbytes // tensor.parts
    sizes = [min(chunk_bytes, part - at) for at in range(0, part, chunk_bytes)] * tensor.parts
    _check_sound([chunk.logical for chunk in tensor.chunks] == sizes, path, f"tensor {name!r}: its chunks")
    end, last = entry.offset, entry.offset + entry.nbytes
    for number, chunk in enumerate(tensor.chunks):
        fits = chunk.offset >= end and chunk.offset + chunk.stored <= last and 0 < chunk.stored <= chunk.logical
        if plain:
            fits = fits and chunk.codec == 0 and chunk.offset == end
        is_raw = chunk.codec == 0 and chunk.stored == chunk.logical and not chunk.transform and not chunk.tiles
        is_raw = (
            is_raw
            or chunk.codec == _X16
            and chunk.transform in _TRANSFORMS.get(tensor.dtype, ())
            and chunk.offset % 16 == 0
        )
        is_raw = (
            is_raw or chunk.codec == _PLANES and 1 <= chunk.transform <= 7 and tensor.parts == 1 and not chunk.tiles
        )
        if not fits or not is_raw:
            raise CorruptError(
                f"overwire: {path}: corrupt data: tensor {name!r} chunk {number}",
                source=path,
                tensor=name,
                chunk=number,
            )
        end = chunk.offset + chunk.stored
