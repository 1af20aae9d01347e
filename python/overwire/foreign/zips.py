"""Reads the directories of zip archives. An archive may be a part of a larger file. The sizes of reads are limited, and
no entry is read."""

from __future__ import annotations

import os
import struct
import zipfile
from typing import BinaryIO, cast

# The most bytes of an archive's directory.
_DIRECTORY = 16 << 20

#: The begin and end of an archive in its file.
Span = tuple[int, int]


class LargeDirectory(zipfile.BadZipFile):
    """Raised if the directory of an archive claims to be larger than the limit."""


class Part:
    """A part of a file, as a file object for zipfile. Reads are limited, because the archive's claims about the size
    and offset of its directory are untrusted."""

    def __init__(self, file: BinaryIO, span: Span) -> None:
        self._file = file
        self._start, self._end = span
        self.seekable = file.seekable
        file.seek(self._start)
        #: The error of the last failed read. zipfile replaces it with BadZipFile.
        self.failure: Exception | None = None

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: self._start, os.SEEK_CUR: self._file.tell(), os.SEEK_END: self._end}[whence]
        if not self._start <= base + offset < 1 << 63:
            if whence != os.SEEK_SET:  # zipfile seeks back from the end, and takes this error as a sign of a short file
                raise OSError(f"{offset} bytes before the end")
            raise zipfile.BadZipFile(f"its directory is at the invalid offset {offset}")
        return self._file.seek(base + offset) - self._start

    def read(self, size: int = -1) -> bytes:
        try:
            if size > _DIRECTORY:
                raise LargeDirectory(f"its directory has {size} bytes; at most {_DIRECTORY} are supported")
            rest = max(self._end - self._file.tell(), 0)
            return self._file.read(min(rest, size if size >= 0 else _DIRECTORY))
        except (OSError, LargeDirectory) as error:
            self.failure = error
            raise


#: The errors of zipfile for invalid archives.
BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError)


def span_of(file: BinaryIO) -> Span:
    """Returns the span of a whole file."""
    return 0, os.fstat(file.fileno()).st_size


def entries_of(file: BinaryIO, span: Span | None = None) -> list[zipfile.ZipInfo]:
    """Returns the entries of an archive. Raises the errors of BAD_ZIP, and of reading."""
    directory = Part(file, span or span_of(file))
    try:
        with zipfile.ZipFile(cast(BinaryIO, directory)) as archive:
            return archive.infolist()
    except zipfile.BadZipFile:
        if directory.failure is not None:
            raise directory.failure from None
        raise
