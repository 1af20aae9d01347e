"""Decodes X16 chunks with numpy (docs/format.md, section 3).

The lanes of all segments of several chunks are decoded in parallel. Each step is a few numpy operations on arrays of
lanes. All fields of a chunk are checked as the format requires.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError

Bytes = NDArray[np.uint8]

# Maps a transform to the bits of an element, whether there is a palette, the bits of a symbol value, and the bits of
# each plane, in order.
_TRANSFORMS: dict[int, tuple[int, bool, int, tuple[int, ...]]] = {
    1: (16, True, 8, (8,)), 2: (16, True, 5, (8, 1, 1, 1)), 3: (32, True, 8, (8, 8, 8)), 4: (8, False, 4, (4,)),
    5: (8, True, 5, (1, 1, 1)), 6: (8, False, 4, (4,)), 7: (4, False, 4, ()), 8: (8, True, 8, ()),
}  # fmt: skip
_TILE = 256
_HEAD = 96


class Chunk(NamedTuple):
    """A stored chunk: its bytes, its decoded length, transform and tiles per segment."""

    stored: Bytes
    logical: int
    transform: int
    tiles: int


class _Head(NamedTuple):
    # The header of a chunk: the escape symbol (-1 for none), tables by slot, and the directory, which is empty if all
    # symbols are `constant`.
    constant: int
    escape: int
    symbol: Bytes
    freq: NDArray[np.int64]
    rank: NDArray[np.int64]
    palette: Bytes
    offsets: NDArray[np.int64]
    escapes: NDArray[np.int64]
    planes_at: int


def decode(chunks: Sequence[Chunk]) -> list[Bytes]:
    """Returns the logical bytes of several chunks, which should be a few MiB in total. Raises
    CorruptError with the number of the chunk."""
    heads = []
    for at, chunk in enumerate(chunks):
        with _naming_chunk(at):
            heads.append(_read_head(chunk))
    positions = [at for at, head in enumerate(heads) if head.constant < 0]
    decoded_chunks = _symbols_of([chunks[at] for at in positions], [heads[at] for at in positions], positions)
    symbol_data = dict(zip(positions, decoded_chunks, strict=True))
    out = []
    for at, (chunk, head) in enumerate(zip(chunks, heads, strict=True)):
        with _naming_chunk(at):
            out.append(_finish_chunk(chunk, head, symbol_data.get(at)))
    return out


def _tiles_of(chunk: Chunk) -> int:
    return chunk.logical // (_TILE * _TRANSFORMS[chunk.transform][0] // 8)


def _read_head(chunk: Chunk) -> _Head:
    _check_chunk(chunk.transform in _TRANSFORMS, f"transform {chunk.transform}")
    content, tiles = chunk.stored, _tiles_of(chunk)
    _check_chunk(len(content) >= _HEAD and tiles >= 1, "too short")
    _check_chunk(int(content[4:8].view("<u4")[0]) == tiles, "its number of tiles")
    _check_chunk(content[0] <= 1 and not content[80:96].any(), "its reserved bytes")
    return _constant_head(chunk) if content[0] == 1 else _coded_head(chunk, tiles)


def _finish_chunk(chunk: Chunk, head: _Head, symbol_data: tuple[Bytes, list[int]] | None) -> Bytes:
    # symbol_data: the chunk's symbols, and where the escapes of each segment begin, or None if all symbols are
    # `constant`.
    content, tiles = chunk.stored, _tiles_of(chunk)
    symbols, escape_starts = symbol_data or (np.full(tiles * _TILE, head.constant, np.uint8), [])
    values = _translate_bytes(symbols, head.palette)
    if head.escape >= 0:
        values = values.copy()
        _put_escapes(chunk, head, escape_starts, symbols, values)
    planes, end = _planes_of(content, head.planes_at, tiles, _TRANSFORMS[chunk.transform][3])
    body: Bytes = _assemble_values(chunk.transform, values, planes)
    tail = chunk.logical - len(body)
    end = _round_up(end) if tail else end
    _check_chunk(len(content) == end + tail, "its length")
    return np.concatenate([body, content[end:]]) if tail else body


@contextlib.contextmanager
def _naming_chunk(at: int) -> Iterator[None]:
    try:
        yield
    except CorruptError as error:
        error.chunk = at
        raise


def _check_chunk(ok: bool, what: str) -> None:
    if not ok:
        raise CorruptError(f"overwire: corrupt data: X16: check failed: {what}")


def _round_up(offset: int) -> int:
    return -(-offset // 16) * 16


def _constant_head(chunk: Chunk) -> _Head:
    content, symbol = chunk.stored, int(chunk.stored[1])
    _check_chunk(symbol < 16 and not content[3] and not content[32:80].any(), "a chunk with a single symbol")
    none = np.zeros(0, np.int64)
    return _Head(symbol, -1, none.astype(np.uint8), none, none, _palette_of(chunk, 1 << symbol, -1), none, none, _HEAD)


def _palette_of(chunk: Chunk, present: int, escape: int) -> Bytes:
    _, has_palette, width, _ = _TRANSFORMS[chunk.transform]
    palette: Bytes = chunk.stored[16:32].copy()
    if not has_palette:
        _check_chunk(bool((palette == np.arange(16)).all()) and escape < 0, "its palette")
        return palette
    _check_chunk(bool((palette < 1 << width).all()), "a palette entry")
    for symbol in range(16):
        if not present >> symbol & 1 or symbol == escape:
            _check_chunk(palette[symbol] == 0, "a palette entry without a symbol")
    return palette


def _coded_head(chunk: Chunk, tiles: int) -> _Head:
    content = chunk.stored
    freq, divider, alias = (content[at : at + 16].astype(np.int64) for at in (32, 48, 64))
    escape = int(content[3]) - 1
    _check_chunk(content[1] == 0 and int(freq.sum()) == 256 and escape < 16, "its frequencies")
    _check_chunk(bool((divider <= 16).all() and (alias < 16).all()), "its tables")
    _check_chunk(bool(((divider == 16) == (alias == np.arange(16))).all()), "its tables")
    _check_chunk(escape < 0 or bool(freq[escape] > 0), "its escape symbol")
    symbol, rank, frequencies = np.zeros(256, np.uint8), np.zeros(256, np.int64), divider.copy()
    for bucket in range(16):
        own = int(divider[bucket])
        slots = slice(16 * bucket, 16 * bucket + own)
        symbol[slots], rank[slots] = bucket, np.arange(own)
        if own < 16:
            other = int(alias[bucket])
            slots = slice(16 * bucket + own, 16 * bucket + 16)
            symbol[slots], rank[slots] = other, np.arange(frequencies[other], frequencies[other] + 16 - own)
            frequencies[other] += 16 - own
    _check_chunk(bool((frequencies == freq).all()), "its tables")
    palette = _palette_of(chunk, sum(1 << k for k in range(16) if freq[k]), escape)
    _check_chunk(1 <= chunk.tiles <= 256, "its tiles per segment")
    segments = -(-tiles // chunk.tiles)
    _check_chunk(len(content) >= _HEAD + 8 * (segments + 1), "its directory")
    directory = content[_HEAD : _HEAD + 8 * (segments + 1)].view("<u4").astype(np.int64).reshape(-1, 2)
    offsets, escapes = directory[:, 0], directory[:, 1]
    _check_chunk(int(offsets[0]) == _round_up(_HEAD + 8 * (segments + 1)) and not (offsets % 16).any(), "its directory")
    _check_chunk(not content[_HEAD + 8 * (segments + 1) : int(offsets[0])].any(), "the padding of its directory")
    fits = bool((np.diff(offsets) >= 128).all()) and int(offsets[-1]) <= len(content)
    _check_chunk(fits and escapes[-1] == 0, "its directory")
    _check_chunk(escape >= 0 or not escapes.any(), "its escapes")
    return _Head(-1, escape, symbol, freq[symbol], rank, palette, offsets, escapes, int(offsets[-1]))


def _symbols_of(
    chunks: Sequence[Chunk], heads: Sequence[_Head], numbers: Sequence[int]
) -> list[tuple[Bytes, list[int]]]:
    # Returns each chunk's symbols, and where each segment's words end, which is where its escapes begin.
    # Segments are sorted by decreasing tiles, so the active segments are always the first ones.
    if not chunks:
        return []
    lengths = [len(chunk.stored) + -len(chunk.stored) % 2 for chunk in chunks]
    base = np.cumsum([0, *lengths])
    coded_bytes = np.zeros(int(base[-1]), np.uint8)
    for start, chunk in zip(base, chunks, strict=False):
        coded_bytes[start : start + len(chunk.stored)] = chunk.stored
    words = coded_bytes.view("<u2")
    owner = np.repeat(np.arange(len(chunks)), [len(head.offsets) - 1 for head in heads])
    tiles = np.concatenate([_tiles_of_segments(chunk, head) for chunk, head in zip(chunks, heads, strict=True)])
    order = np.argsort(-tiles, kind="stable")
    owner, tiles = owner[order], tiles[order]
    starts = np.concatenate([head.offsets[:-1] + at for head, at in zip(heads, base, strict=False)])[order] // 2
    ends = np.concatenate([head.offsets[1:] + at for head, at in zip(heads, base, strict=False)])[order] // 2
    freq = np.concatenate([head.freq for head in heads])
    rank = np.concatenate([head.rank for head in heads])
    x = np.ascontiguousarray(words[starts[:, None] + np.arange(64)]).view("<u4").astype(np.int64).reshape(-1)
    bases = np.repeat(owner << 8, 32)
    at = starts + 64
    _expect_all(x.reshape(-1, 32) >= 1 << 16, owner, numbers, "a state")
    out = np.zeros((len(tiles), int(tiles[0]), 8, 32), np.uint8)
    slot, part = np.empty_like(x), np.empty_like(x)
    for tile in range(int(tiles[0])):
        live = int(np.searchsorted(-tiles, -tile, "left"))
        lanes, slot, part, table = x[: 32 * live], slot[: 32 * live], part[: 32 * live], bases[: 32 * live]
        for pair in range(0, 8, 2):
            for step in (pair, pair + 1):
                np.bitwise_and(lanes, 255, out=slot)
                out[:live, tile, step] = slot.reshape(live, 32)  # slots; replaced by symbols at the end
                slot += table
                lanes >>= 8
                np.take(freq, slot, out=part, mode="clip")  # clip avoids a copy of `out`
                lanes *= part
                np.take(rank, slot, out=part, mode="clip")
                lanes += part
            short = np.flatnonzero(lanes < 1 << 16)  # in the order of segments and lanes
            segment = short >> 5
            counts = np.bincount(segment, minlength=live)
            first = at[:live] + counts - np.cumsum(counts)
            at[:live] += counts
            _expect_all(at[:live] <= ends[:live], owner, numbers, "a word after the end of its segment")
            lanes[short] = lanes[short] << 16 | words[first[segment] + np.arange(len(short))]
    _expect_all(x.reshape(-1, 32) == 1 << 16, owner, numbers, "a final state")
    back = np.argsort(order, kind="stable")
    at, out = at[back], out[back]
    # Symbol 128 h + 8 (4 q + g) + t is step t of lane 16 h + 4 g + q.
    natural = out.reshape(*out.shape[:3], 2, 4, 4).transpose(0, 1, 3, 5, 4, 2)
    results, position = [], 0
    for number, chunk, head, start in zip(numbers, chunks, heads, base, strict=False):
        count = len(head.offsets) - 1
        escape_starts = 2 * at[position : position + count] - start
        with _naming_chunk(number):
            _check_ends(chunk, head, escape_starts)
        own = natural[position : position + count, : min(chunk.tiles, _tiles_of(chunk))]
        results.append((_translate_bytes(own, head.symbol)[: _tiles_of(chunk) * _TILE], escape_starts.tolist()))
        position += count
    return results


def _translate_bytes(data: Bytes, table: Bytes) -> Bytes:
    # Computes table[data] as a flat array. bytes.translate is several times as fast as numpy.
    return np.frombuffer(data.tobytes().translate(table.tobytes().ljust(256, b"\0")), np.uint8)


def _tiles_of_segments(chunk: Chunk, head: _Head) -> NDArray[np.int64]:
    segments = len(head.offsets) - 1
    tiles = np.full(segments, chunk.tiles, np.int64)
    tiles[-1] = _tiles_of(chunk) - (segments - 1) * chunk.tiles
    return tiles


def _expect_all(ok: NDArray[np.bool_], owner: NDArray[np.int64], numbers: Sequence[int], what: str) -> None:
    if not ok.all():
        row = int(np.argwhere(~ok)[0][0])
        raise CorruptError(f"overwire: corrupt data: X16: check failed: {what}", chunk=numbers[int(owner[row])])


def _check_ends(chunk: Chunk, head: _Head, at: NDArray[np.int64]) -> None:
    # Escapes follow the last word, and fewer than 16 zeros follow the escapes.
    ends = at + 3 * head.escapes[:-1]
    _check_chunk(bool(((ends <= head.offsets[1:]) & (head.offsets[1:] - ends < 16)).all()), "the end of a segment")
    for k, end in enumerate(ends.tolist()):
        _check_chunk(not chunk.stored[end : head.offsets[k + 1]].any(), "the padding of a segment")


def _put_escapes(chunk: Chunk, head: _Head, starts: list[int], symbols: Bytes, values: Bytes) -> None:
    _, _, width, _ = _TRANSFORMS[chunk.transform]
    per_segment = chunk.tiles * _TILE
    for k, (start, count) in enumerate(zip(starts, head.escapes[:-1].tolist(), strict=True)):
        own = slice(k * per_segment, (k + 1) * per_segment)
        places = np.flatnonzero(symbols[own] == head.escape)
        _check_chunk(len(places) == count, "the number of escapes")
        middle = start + 2 * count
        positions, own_values = chunk.stored[start:middle].view("<u2"), chunk.stored[middle : middle + count]
        _check_chunk(bool((positions == places).all()), "the positions of escapes")
        _check_chunk(bool((own_values.astype(int) < 1 << width).all()), "an escape value")
        values[own][places] = own_values


def _planes_of(stored: Bytes, at: int, tiles: int, widths: tuple[int, ...]) -> tuple[list[Bytes], int]:
    # Returns each plane with one byte per symbol, and the end of the last stored plane.
    constant, end, planes = int(stored[2]), at, []
    _check_chunk(constant >> len(widths) == 0, "its planes")
    count = tiles * _TILE
    for k, width in enumerate(widths):
        value = int(stored[8 + k])
        if constant >> k & 1:
            _check_chunk(value < 1 << width, "the value of a plane")
            planes.append(np.full(count, value, np.uint8))
            continue
        _check_chunk(value == 0, "the value of a plane")
        start = _round_up(end)
        end = start + count * width // 8
        _check_chunk(end <= len(stored), "a plane")
        plane = stored[start:end]
        if width == 4:
            plane = np.stack([plane & 15, plane >> 4], axis=1).reshape(-1)
        elif width == 1:
            plane = np.unpackbits(plane, bitorder="little")
        planes.append(plane)
    _check_chunk(not stored[8 + len(widths) : 16].any(), "the values of its planes")
    return planes, end


def _assemble_values(transform: int, values: Bytes, planes: list[Bytes]) -> Bytes:
    kind = {16: np.uint16, 32: np.uint32}.get(_TRANSFORMS[transform][0], np.uint8)
    wide = values.astype(kind)
    p = [plane.astype(kind) for plane in planes]
    if transform == 1:
        wide <<= 7
        wide |= p[0] >> 1
        wide |= p[0] << 15
        return wide.astype("<u2", copy=False).view(np.uint8)
    if transform == 2:
        return (p[3] << 15 | wide << 10 | p[2] << 9 | p[1] << 8 | p[0]).astype("<u2").view(np.uint8)
    if transform == 3:
        return ((p[0] & 1) << 31 | wide << 23 | (p[0] >> 1) << 16 | p[1] << 8 | p[2]).astype("<u4").view(np.uint8)
    if transform == 4:
        return (p[0] >> 3 << 7 | wide << 3 | p[0] & 7).astype(np.uint8)
    if transform == 5:
        return (p[2] << 7 | wide << 2 | p[1] << 1 | p[0]).astype(np.uint8)
    if transform == 6:
        return (wide << 4 | p[0]).astype(np.uint8)
    if transform == 7:
        return (wide[1::2] << 4 | wide[0::2]).astype(np.uint8)
    return values
