"""Distinguishes torch.save archives from other files, and names the kinds of other files in errors.

It reads a file's first bytes and its directory of entries. Deflated entries, which torch.load reads although torch.save
does not write them, are inflated to a temporary file, because later code maps the bytes of an archive.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from typing import BinaryIO, cast

from .._tables import HEAD_BYTES
from .._undo import after_error
from ..errors import CorruptError, FormatError, NotFoundError, NotSupportedError, OverwireError
from ..filekinds import FileKind, kind_of_file
from ..files import regular
from ..foreign.zips import BAD_ZIP, LargeDirectory, Part, Span, entries_of, span_of
from ..paths import classed_errors

#: The entries of an archive may inflate to at most _TIMES its size plus _SPARE bytes.
_TIMES, _SPARE = 64, 256 << 20
_BLOCK = 1 << 20

#: The `rule` of an error about the weights of another library, which a folder of torch.save files may contain.
FOREIGN = "Foreign"
_UNKNOWN = "fetch or copy it again, or move it elsewhere if it does not contain weights"


def _kind_of(path: str, head: bytes) -> FileKind:
    if (kind := kind_of_file(path, head)) is not None:
        return kind
    stem, ending = os.path.splitext(path)
    for what, has_sibling in (
        ("an OpenVINO file", os.path.isfile(f"{stem}.xml")),
        ("an ncnn file", os.path.isfile(f"{stem}.param")),
        ("a Core ML file", ".mlpackage/" in path),
    ):
        if ending == ".bin" and has_sibling:
            return FileKind(what, "leave it unchanged", True)
    if not head.strip(b"\0"):
        return FileKind("a file that begins with zeros" if head else "an empty file", _UNKNOWN, False)
    return FileKind("a file of an unknown kind", _UNKNOWN, False)


def refusal_of(path: str) -> OverwireError | None:
    """Returns the error to raise for a file that is not a torch.save archive, or None if it is one.

    The error is a CorruptError for a damaged archive, a NotSupportedError for one that is too large, and otherwise a
    FormatError that names the kind of the file. The `rule` of the error is FOREIGN if a folder of torch.save files may
    contain such files. Raises errors of opening and reading."""
    try:
        with classed_errors(path, "open"), open(path, "rb", opener=regular) as file:
            try:
                has_pickle = any(entry.filename.endswith("/data.pkl") for entry in entries_of(file))
                return None if has_pickle else not_torch(path, file, None)
            except BAD_ZIP as error:
                return not_torch(path, file, error)
    except NotFoundError as error:
        raise NotFoundError(f"overwire: open {path}: it is missing or links to a missing file", source=path) from error


def not_torch(path: str, file: BinaryIO, error: Exception | None, span: Span | None = None) -> OverwireError:
    """Returns the error for a file, or a part of a file, that is not a torch.save archive. error: the error of zipfile,
    or None for a valid zip archive without a torch.save pickle. Raises errors of reading."""
    file.seek(span[0] if span else 0)
    head = file.read(HEAD_BYTES)
    where = f"overwire: open {path}: "
    if isinstance(error, LargeDirectory) and head.startswith(b"PK"):
        return NotSupportedError(f"{where}the torch.save archive is too large: {error}", source=path)
    if head.startswith(b"PK"):
        if error is None:
            text = "this zip archive has no data.pkl, so torch.save did not write it: load it with the library that did"
            return FormatError(where + text, source=path)
        reason = "" if "not a zip file" in str(error) else f" ({error})"
        text = f"the torch.save archive is truncated or damaged{reason}: copy or fetch it again"
        return CorruptError(where + text, source=path)
    kind = _kind_of(path, head)
    claim = f" ({error})" if isinstance(error, LargeDirectory) else ""
    text = f"expected a torch.save file (of torch 1.6 or later), but this is {kind.what}{claim}: {kind.do}"
    return FormatError(where + text, source=path, rule=FOREIGN if kind.foreign else None)


def inflate_entries(
    path: str, file: BinaryIO, entries: list[zipfile.ZipInfo], span: Span | None, folder: str | None
) -> BinaryIO | None:
    """Returns an unnamed temporary file with the inflated entries, or None if no entry of `file` is compressed.

    span: as for `entries_of`. folder: the folder for the temporary file. Raises CorruptError if an entry does not
    inflate to the size that it claims, and NotSupportedError for other compression methods, encryption, or an archive
    that inflates to too many bytes."""
    is_plain = all(entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1 for entry in entries)
    if is_plain or len({entry.filename for entry in entries}) != len(entries):  # the caller refuses duplicate names
        return None
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
            text = f"{entry.filename:.200} is encrypted, or compressed with a method that torch.load cannot read"
            raise NotSupportedError(f"overwire: open {path}: {text}: pack the archive again", source=path)
    low, high = span or span_of(file)
    total, size = sum(entry.file_size for entry in entries), high - low
    if total > _TIMES * size + _SPARE:
        text = f"its entries inflate to {total} bytes, more than {_TIMES} times the size of the file"
        raise NotSupportedError(f"overwire: open {path}: {text}", source=path)
    out = cast(BinaryIO, tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
    with after_error(out.close):
        try:
            part = cast(BinaryIO, Part(file, (low, high)))
            with zipfile.ZipFile(part) as archive, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as plain:
                for entry in entries:
                    with archive.open(entry) as source, plain.open(entry.filename, "w", force_zip64=True) as target:
                        shutil.copyfileobj(source, target, _BLOCK)
                    if plain.getinfo(entry.filename).file_size != entry.file_size:
                        raise zipfile.BadZipFile("it ends early")
        except (*BAD_ZIP, zlib.error, EOFError) as error:
            text = f"{entry.filename:.200} is damaged ({error}): copy or fetch it again"
            raise CorruptError(f"overwire: open {path}: {text}", source=path) from error
    return out
