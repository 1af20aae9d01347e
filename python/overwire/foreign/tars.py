"""Reads NeMo's .nemo files: tar archives with model_config.yaml, tokenizers, and a torch.save file model_weights.ckpt.

A header of 512 bytes precedes each member. Its fields are: name at 0, size at 124 (octal, or binary after a byte 0x80),
checksum at 148, kind at 156, "ustar" at 257, the name's prefix at 345. Members of kind L and x contain a longer name or
size for the next member.

Only the headers and the weights are read. Links are not followed, and nothing is unpacked.

Source: POSIX pax, GNU tar's manual; NeMo's documentation.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from ..bundles.torchfiles import opened as opened_archive
from ..errors import CorruptError, FormatError, NotSupportedError, OverwireError
from .content import Content, Mapped
from .joined import Files, open_files

WEIGHTS = "model_weights.ckpt"

_BLOCK = 512
# The limits for members, and for the bytes of a long name.
_MEMBERS, _NAME = 100_000, 1 << 16
_PAX = re.compile(rb"\d+ (path|size)=([^\n]*)\n")
_REGULAR = (b"0", b"\0", b"7")


class _Member(NamedTuple):
    name: str
    kind: bytes
    start: int
    size: int


@contextlib.contextmanager
def open_nemo(path: str, compare: bool = True, scratch: str | None = None) -> Iterator[Content]:
    """Opens the weights of a .nemo file. `left` lists its other members. compare, scratch: as for `torchfiles.opened`.

    Raises FormatError for an archive that is damaged or has no weights, CorruptError for a truncated archive,
    NotSupportedError for weights in parts, and the errors of torch.save files.
    """
    with open_files() as files:
        members = list(_members(files, path))

    def make_error(why: str, kind: type[OverwireError] = FormatError) -> OverwireError:
        return kind(f"overwire: open {path}: {why}", source=path)

    weights = [one for one in members if os.path.basename(one.name) == WEIGHTS]
    parts = [one for one in members if one.name.endswith((".distcp", "/.metadata"))]
    if parts or len(weights) > 1:
        where = os.path.dirname(parts[0].name) if parts else ", ".join(one.name for one in weights[:4])
        advice = f"unpack it with `tar -xf` and convert {where}" if parts else "merge these parts with NeMo"
        raise make_error(f"its weights are in several files ({where}): {advice}", NotSupportedError)
    if not weights:
        raise make_error(f"a tar archive without {WEIGHTS}: unpack it with `tar -xf`, and name a file in it")
    [one] = weights
    if one.kind not in _REGULAR:
        raise make_error(f"its {one.name} is a link, or sparse (kind {one.kind!r})")
    with opened_archive(path, (one.start, one.start + one.size), compare, scratch) as content:
        others = [f"{other.name} ({other.size} bytes)" for other in members if other is not one and other.kind != b"5"]
        tensors = [(name, Mapped(memory)) for name, memory in content.tensors]
        yield Content(list(tensors), content.values, [*content.left, *others], files.mode, content.has_sums)


def _members(files: Files, path: str) -> Iterator[_Member]:
    """Yields the members in order, after checking that each is inside the file and after the previous member."""

    def make_error(why: str, at: int, kind: type[OverwireError] = FormatError) -> OverwireError:
        return kind(f"overwire: open {path}: at byte {at}: {why}", source=path, offset=at)

    def read(start: int, count: int) -> bytes:
        block = bytearray(count)
        files.fill_block(path, memoryview(block), start)
        return bytes(block)

    whole, at, count = files.size_of(path), 0, 0
    longer: dict[bytes, bytes] = {}
    while at + _BLOCK <= whole:
        head = read(at, _BLOCK)
        if not any(head):
            return
        if head[257:262] != b"ustar" and at == 0:
            raise make_error("not a tar archive: if the file is compressed, decompress it with gunzip", 0)
        if _octal(head[148:156]) != sum(head) - sum(head[148:156]) + 8 * 32:
            raise make_error("checksum mismatch in a header: copy or fetch the file again", at, CorruptError)
        kind, size = head[156:157], _octal(head[124:136])
        if kind not in b"Lxg" and b"size" in longer:
            text = longer.pop(b"size")
            size = int(text) if re.fullmatch(rb"\d{1,19}", text) else None
        count += 1
        if size is None or count > _MEMBERS:
            raise make_error(f"a malformed size, or more than {_MEMBERS} members", at)
        start = at + _BLOCK
        if start + size > whole:
            why = f"truncated, a member ends at byte {start + size} and the file has {whole}: copy or fetch it again"
            raise make_error(why, at, CorruptError)
        at = start + (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if kind in (b"L", b"x"):
            if size > _NAME:
                raise make_error(f"a name of {size} bytes: at most {_NAME} are supported", start)
            text = read(start, size)
            longer |= {b"path": text.rstrip(b"\0")} if kind == b"L" else dict(_PAX.findall(text))
        elif kind not in (b"g", b"K"):
            prefix = head[345:500].split(b"\0")[0] if head[257:263] == b"ustar\0" else b""
            name = longer.pop(b"path", b"") or b"/".join(filter(None, (prefix, head[:100].split(b"\0")[0])))
            longer.clear()
            yield _Member(os.fsdecode(name).removeprefix("./"), kind, start, size)
    raise make_error("truncated, its end is missing: copy or fetch it again", at, CorruptError)


def _octal(field: bytes) -> int | None:
    """Parses a number in a header. Returns None if it is malformed or negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0")
    return int(text, 8) if re.fullmatch(rb"[0-7]*", text) and text else None if text else 0
