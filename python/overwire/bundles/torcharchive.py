"""Tells torch.save archives from other files, and says what the others are.

Reads a file's first bytes and its directory of entries, without trusting the sizes and positions there. Deflated
entries (torch.load reads them, torch.save does not write them) are first inflated into a temporary file, within
limits, so that the archive's bytes can be mapped.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from typing import BinaryIO, cast

from .._tables import HEAD_BYTES
from ..errors import CorruptError, FormatError, NotFoundError, NotSupportedError, OverwireError, error_of_system
from ..files import FileKind, kind_of_head, regular

#: The most bytes in an archive's directory.
_DIRECTORY = 16 << 20
#: Deflated entries may have _SPARE bytes plus _TIMES the bytes of their file.
_TIMES, _SPARE = 64, 256 << 20
_BLOCK = 1 << 20

#: The rule of an error about another library's weights, which a folder may contain.
FOREIGN = "Foreign"
_UNKNOWN = "fetch or copy it again, or move it elsewhere if it holds no weights"


class _LargeDirectory(zipfile.BadZipFile):
    pass


class _Directory:
    """A file, as zipfile reads its directory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell = file.tell
        #: The error of the last failed read. zipfile itself would report that the file is not an archive.
        self.failure: Exception | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and not 0 <= offset < 1 << 63:
            raise zipfile.BadZipFile(f"its directory is at {offset}")
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        try:
            if size > _DIRECTORY:
                raise _LargeDirectory(f"its directory has {size} bytes: expected {_DIRECTORY} or fewer")
            return self._file.read(size if size >= 0 else _DIRECTORY)
        except (OSError, _LargeDirectory) as error:
            self.failure = error
            raise


#: The exceptions that zipfile raises for files that are not archives.
BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError)


def entries_of(file: BinaryIO) -> list[zipfile.ZipInfo]:
    """Returns the entries of an archive. Raises BAD_ZIP and errors of reading."""
    directory = _Directory(file)
    try:
        with zipfile.ZipFile(cast(BinaryIO, directory)) as archive:
            return archive.infolist()
    except zipfile.BadZipFile:
        if directory.failure is not None:
            raise directory.failure from None
        raise


def _kind_of(path: str, head: bytes) -> FileKind:
    if (kind := kind_of_head(head)) is not None:
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
        return FileKind("a file that begins with zeros only" if head else "an empty file", _UNKNOWN, False)
    return FileKind("a file of an unknown kind", _UNKNOWN, False)


def refusal_of(path: str) -> OverwireError | None:
    """Returns the error to raise for a file that is not a torch.save archive; None if it is one.

    It is a CorruptError or NotSupportedError for an archive that is damaged or too large, else a FormatError that
    names the kind of the file. Its rule is FOREIGN if a folder of torch.save files may contain such files. Raises
    errors of opening and reading."""
    try:
        with open(path, "rb", opener=regular) as file:
            try:
                return None if _has_pickle(entries_of(file)) else not_torch(path, file, None)
            except BAD_ZIP as error:
                return not_torch(path, file, error)
    except OverwireError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(f"overwire: open {path}: it leads to a missing file", source=path) from error
    except OSError as error:
        raise error_of_system(error, "open", path) from error


def _has_pickle(entries: list[zipfile.ZipInfo]) -> bool:
    return any(entry.filename.endswith("/data.pkl") for entry in entries)


def not_torch(path: str, file: BinaryIO, error: Exception | None) -> OverwireError:
    """Returns the error for a file that is not a torch.save archive. error: from zipfile; None if the file is a zip
    archive without a torch.save pickle. Raises errors of reading."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    where = f"overwire: open {path}: "
    if isinstance(error, _LargeDirectory) and head.startswith(b"PK"):
        return NotSupportedError(f"{where}a torch.save archive, but {error}", source=path)
    if head.startswith(b"PK"):
        if error is None:
            text = "a zip archive without the data.pkl of torch.save: load it with the library that wrote it"
            return FormatError(where + text, source=path)
        reason = "" if "not a zip file" in str(error) else f" ({error})"
        text = f"a torch.save archive that is truncated or damaged{reason}: copy or fetch it again"
        return CorruptError(where + text, source=path)
    kind = _kind_of(path, head)
    claim = f" ({error})" if isinstance(error, _LargeDirectory) else ""
    text = f"expected a torch.save file (of torch 1.6 or later), but this is {kind.what}{claim}: {kind.do}"
    return FormatError(where + text, source=path, rule=FOREIGN if kind.foreign else None)


def inflate_entries(path: str, file: BinaryIO, entries: list[zipfile.ZipInfo], folder: str | None) -> BinaryIO | None:
    """Returns a nameless temporary file with the same entries, uncompressed; None if they are uncompressed in `file`.

    folder: a folder on the disk for it. Raises CorruptError for entries that do not inflate to their stated size and
    checksum, NotSupportedError for other compression methods and for more bytes than an honest file has."""
    is_plain = all(entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1 for entry in entries)
    if is_plain or len({entry.filename for entry in entries}) != len(entries):  # duplicates are refused by the caller
        return None
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
            text = f"{entry.filename:.200} is encrypted, or compressed with a method that torch.load cannot read"
            raise NotSupportedError(f"overwire: open {path}: {text}: pack the archive again", source=path)
    total, size = sum(entry.file_size for entry in entries), os.fstat(file.fileno()).st_size
    if total > _TIMES * size + _SPARE:
        text = f"its entries have {total} bytes, more than {_TIMES} times the bytes of the file"
        raise NotSupportedError(f"overwire: open {path}: {text}", source=path)
    out = cast(BinaryIO, tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
    try:
        with zipfile.ZipFile(file) as archive, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as plain:
            for entry in entries:
                with archive.open(entry) as source, plain.open(entry.filename, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, _BLOCK)
                if plain.getinfo(entry.filename).file_size != entry.file_size:
                    raise zipfile.BadZipFile("it ends early")
        return out
    except (*BAD_ZIP, zlib.error, EOFError) as error:
        out.close()
        text = f"{entry.filename:.200} is damaged ({error}): copy or fetch it again"
        raise CorruptError(f"overwire: open {path}: {text}", source=path) from error
    except BaseException:
        out.close()
        raise
