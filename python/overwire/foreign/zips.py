"""The directories of zip archives, which may be a part of a file: what they claim is bounded, and no entry is read."""

from __future__ import annotations

import os
import struct
import zipfile
from typing import BinaryIO, cast

# The most bytes of an archive's directory.
_DIRECTORY = 16 << 20

#: Where an archive begins and ends in its file.
Span = tuple[int, int]


class LargeDirectory(zipfile.BadZipFile):
    """A directory that claims more bytes than are read."""


class Part:
    """A part of a file as zipfile reads an archive, whose directory's size and place the file only claims."""

    def __init__(self, file: BinaryIO, span: Span) -> None:
        self._file = file
        self._start, self._end = span
        self.seekable = file.seekable
        file.seek(self._start)
        #: What the last read that failed raised: zipfile says of it that the file is no archive.
        self.failure: Exception | None = None

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: self._start, os.SEEK_CUR: self._file.tell(), os.SEEK_END: self._end}[whence]
        if not self._start <= base + offset < 1 << 63:
            if whence != os.SEEK_SET:  # zipfile looks that far back, and takes this for a short file
                raise OSError(f"{offset} bytes before the end")
            raise zipfile.BadZipFile(f"its directory is at {offset}")
        return self._file.seek(base + offset) - self._start

    def read(self, size: int = -1) -> bytes:
        try:
            if size > _DIRECTORY:
                raise LargeDirectory(f"its directory has {size} bytes, of which {_DIRECTORY} are supported")
            rest = max(self._end - self._file.tell(), 0)
            return self._file.read(min(rest, size if size >= 0 else _DIRECTORY))
        except (OSError, LargeDirectory) as error:
            self.failure = error
            raise


#: What zipfile raises for what is no archive.
BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError)


def span_of(file: BinaryIO) -> Span:
    """The whole of a file."""
    return 0, os.fstat(file.fileno()).st_size


def entries_of(file: BinaryIO, span: Span | None = None) -> list[zipfile.ZipInfo]:
    """The entries of an archive. Raises BAD_ZIP, and what reading raises."""
    directory = Part(file, span or span_of(file))
    try:
        with zipfile.ZipFile(cast(BinaryIO, directory)) as archive:
            return archive.infolist()
    except zipfile.BadZipFile:
        if directory.failure is not None:
            raise directory.failure from None
        raise
