"""Reads and writes local files and store objects as Python files, and makes temporary URLs for objects.

A local file is replaced atomically, and an object appears when it is complete.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import io
import mmap
import os
import secrets
import select
import shutil
import sys
import tempfile
import weakref
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from . import _verbs
from ._engine import buffer_of
from ._imports import skip_at_exit
from ._locks import new_lock
from ._undo import after_error
from .errors import ArgumentError
from .jobs import Job, shown
from .model.storage import storage
from .paths import is_remote, is_there, local

if TYPE_CHECKING:
    from ._requests import FetchPin, FetchRequest, PutRequest

# The folder of this process's descriptors, through which unnamed files get a name.
_OWN_FILES = "/proc/self/fd"

# The most milliseconds by which a read delays Ctrl-C.
_SLICE_MS = 50

__all__ = [
    "FileWriter", "ObjectReader", "ObjectWriter", "open_writer", "presign", "publish", "refuse_planted", "shown",
]  # fmt: skip


def write_bytes(
    uri: str,
    data: bytes | mmap.mmap,
    options: Mapping[str, object] | None,
    stale: Sequence[str] = (),
    *,
    once: bool = False,
) -> None:
    """Replaces a file or object atomically, and then removes the `stale` files. A local file keeps its mode, owner and
    ACL. A symbolic link is followed.

    once: whether to raise ArgumentError instead of replacing an existing S3 object. If several writers try at the same
    time, one of them succeeds. (In a store without conditional writes, the last writer wins.)

    Raises NotFoundError if the folder does not exist, AccessError, ArgumentError if the
    target is not a regular file, IOFailure."""
    reach = storage(options, [uri])
    pointer, size, holder = buffer_of(data)
    try:
        request: PutRequest = {"path": uri, "stale": list(stale), "once": once, "storage": reach}
        with Job(_verbs.put(request, pointer, size), "save") as job:
            job.wait()
    finally:
        del holder  # a mapped file cannot be closed while this exists


def remove_objects(uris: Sequence[str], options: Mapping[str, object] | None) -> None:
    """Removes store objects. Missing objects are not an error. Tries all objects, then raises the first error."""
    with Job(_verbs.remove({"uris": list(uris), "storage": storage(options, uris)}), "remove") as job:
        job.wait()


def publish(made: str, path: str) -> None:
    """Replaces `path` atomically with the finished file `made` of the same folder. `path` keeps its mode, owner and
    ACL. A symbolic link is followed. If `path` exists, the caller must create `made` with mode 0600.

    Raises NotFoundError if the folder does not exist, AccessError, ArgumentError if `path` is not a regular file,
    IOFailure. After an error, `made` still exists."""
    with Job(_verbs.rename({"path": path, "made": made}), "save") as job:
        job.wait()


def resolve_links(path: str) -> str:
    """Resolves a local path to write to: follows symbolic links of its last element. Raises AccessError
    if another user may have planted a link in any folder on the way."""
    return _verbs.follow(local(path))


def refuse_planted(path: str) -> None:
    """Raises AccessError if a path element in a world-writable folder belongs to another user. The current user, root
    and the folder's owner are trusted."""
    _verbs.refuse_planted(path)


def presign(uri: str, seconds: int, *, storage_options: Mapping[str, object] | None = None) -> str:
    """Returns a URL that reads an s3:// object without credentials for the given seconds, at most
    seven days. Keep the URL secret, because anyone who has it can read the object.

    Raises ArgumentError for unsigned access, AccessError without credentials, NotSupportedError for other stores.
    """
    return _verbs.presign({"uri": uri, "seconds": seconds, "storage": storage(storage_options, [uri])})


class ObjectReader(io.RawIOBase):
    """Reads the bytes of a path or URI in order, from `begin` to `end` (exclusive, by default the end of the object).
    Several connections read ahead; a broken connection is resumed.

    Several paths or URIs are read in order, as one file. With `sizes`, the size of each source in bytes, an external
    downloader (OVERWIRE_DOWNLOADER) is started only once, and an object of another size raises CorruptError.

    A reader of a single source can seek. Seeking backwards, or more than 16 MiB forwards, opens the object again, and
    raises CorruptError if its size, ETag or date has changed. Reads raise the store's errors.
    """

    _NEAR = 16 << 20

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        begin: int = 0,
        end: int | None = None,
        *,
        sizes: Sequence[int] | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self._job: Job | None = None
        self._pipe = -1
        self._uris = [local(one) for one in ([source] if isinstance(source, (str, bytes, os.PathLike)) else source)]
        self._sizes = None if sizes is None else list(sizes)
        self._end, self._at = end, begin
        # later connections also use the current environment
        self._reach = storage(storage_options, self._uris)
        self._pin: FetchPin | None = None
        self._headers: dict[str, list[str]] = {}
        self._start_reading()

    def _start_reading(self) -> None:
        self._stop_reading()
        if self._end is not None and self._at >= self._end:
            return
        self._pipe, sink = os.pipe()
        try:
            with contextlib.suppress(OSError):
                fcntl.fcntl(sink, 1031, 1 << 20)  # F_SETPIPE_SZ
            spec: FetchRequest = {"uris": self._uris, "fd": sink, "from": self._at, "to": self._end or 0}
            spec["pin"], spec["storage"] = self._pin, self._reach
            if self._sizes is not None:
                spec["sizes"] = self._sizes
            self._job = Job(_verbs.fetch(spec), "fetch")
        finally:
            os.close(sink)

    def found(self) -> tuple[int, str] | None:
        """Returns the size and identity of a single source, or None until its first byte or its end has
        been read. The identity is an ETag (in double quotes) or a date, or "" if the store has neither."""
        if self._pin is None and self._job is not None and len(self._uris) == 1:
            report = self._job.report() or {}
            self._pin, self._headers = report.get("pin"), report.get("headers") or {}
        if self._pin is None:
            return None
        return self._pin["size"], b64decode(self._pin["identity"] or "").decode("latin-1")

    def headers(self) -> dict[str, list[str]]:
        """Returns the headers of a single source's first HTTP response. Empty until `found` returns a result, and for
        sources without HTTP."""
        return self._headers

    def _stop_reading(self) -> None:
        job, self._job = self._job, None
        if self._pipe >= 0:  # closes the pipe first, because a job that writes to it does not notice a cancel
            os.close(self._pipe)
            self._pipe = -1
        if job is not None:
            job.abandon()

    def readinto(self, buffer: Any, /) -> int:
        """Reads some bytes into a buffer. Returns their number, 0 at the end. Raises the store's errors."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        view = memoryview(buffer).cast("B")
        if self._job is None or not len(view):
            return 0
        # Waits in short intervals, because a signal just before a blocking read would be handled only after the read.
        waiting = select.poll()
        waiting.register(self._pipe, select.POLLIN)
        while not waiting.poll(_SLICE_MS):
            pass
        count = os.readv(self._pipe, [view])
        if not count:
            self._job.wait()  # raises the store's error
        self.found()
        self._at += count
        return count

    def readall(self) -> bytes:
        """Reads and returns the remaining bytes."""
        blocks, block = [], bytearray(4 << 20)
        while count := self.readinto(block):
            blocks.append(bytes(memoryview(block)[:count]))
        return b"".join(blocks)

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Seeks to an offset. Raises ValueError for an offset that is relative to the end or before the beginning."""
        if whence == io.SEEK_CUR:
            offset += self._at
        elif whence != io.SEEK_SET:
            raise ValueError(f"{shown(self._uris[0])}: cannot seek from the end: the size is not known")
        if offset < 0:
            raise ValueError(f"{shown(self._uris[0])}: invalid offset {offset}: expected 0 or more")
        if 0 < offset - self._at <= self._NEAR and self._job is not None:
            scratch = bytearray(min(offset - self._at, 1 << 20))
            while self._at < offset and self.readinto(memoryview(scratch)[: offset - self._at]):
                pass
        if offset != self._at:
            if len(self._uris) != 1:
                raise io.UnsupportedOperation("cannot seek: several sources are read as one file")
            self._at = offset
            self._start_reading()
        return offset

    def close(self) -> None:
        """Stops reading and closes the file."""
        if not self.closed:
            self._stop_reading()
        super().close()


class ObjectWriter(io.BufferedRandom):
    """A file that is written to a store, or to a local path, when it is closed. Until then the bytes
    are in an unnamed temporary file, and readers see the old object.

    `drop`, or an exception in a `with` block, leaves the store unchanged. A file that is still open is written at
    process exit, unless an exception ends the process. A file with data is also written when its last reference is
    dropped. If several threads close the file, one of them writes and the others wait. In a forked child the file is
    closed and never written.
    """

    _hidden_name = ""  # the temporary file's name, if it has one

    def __init__(self, uri: str, *, storage_options: Mapping[str, object] | None = None) -> None:
        self._uri, self._options = uri, storage_options
        self._lock = new_lock()
        self._is_ending = self._is_over = False
        storage(storage_options, [uri])  # refuses invalid options now
        _verbs.knobs()  # starts the engine, so that its exit handler runs after the one registered below
        _finish_at_exit()
        number = self._open_temporary()
        with after_error(os.close, number):
            raw = io.FileIO(number, "r+")
        super().__init__(raw)
        _unfinished.add(self)

    def _open_temporary(self) -> int:
        """Opens the temporary file and returns its descriptor."""
        with tempfile.NamedTemporaryFile(prefix="overwire-") as temporary:
            return os.dup(temporary.fileno())

    def drop(self) -> None:
        """Closes the file without writing the object."""
        self._end_once(self._drop_temporary)

    def close(self) -> None:
        """Writes the object and closes the file."""
        self._end_once(self._write_all)

    def _end_once(self, end: Callable[[], None]) -> None:
        # Only one call runs at a time. The lock is reentrant, so a signal handler can get here during a call.
        with self._lock:
            if self._is_ending:
                why = "a signal handler interrupted a close or drop of this file"
                raise ArgumentError(f"overwire: save {shown(self._uri)}: {why}")
            self._is_ending = True
            try:
                if not self.closed:  # if _is_over is set, an earlier call was interrupted
                    self._drop_temporary() if self._is_over else end()
            finally:
                self._is_ending = False

    def _write_all(self) -> None:
        self._is_over = True
        try:
            self.flush()
            self._write_object()
        finally:
            self._drop_temporary()

    def _drop_temporary(self) -> None:
        self.raw.close()  # discards buffered bytes, because flushing them to a full disk would fail

    @skip_at_exit
    def __del__(self) -> None:
        # An empty file does not replace the old object, because an interrupt may have come before the first write. The
        # attribute is missing if the constructor was interrupted.
        if getattr(self, "raw", None) is not None and not self.closed:
            is_empty = not self.tell() and not os.fstat(self.fileno()).st_size
            self._end_once(self._drop_temporary if is_empty else self._write_all)

    def _write_object(self) -> None:
        size = os.fstat(self.fileno()).st_size
        if size == 0:
            write_bytes(self._uri, b"", self._options)
            return
        with mmap.mmap(self.fileno(), size, access=mmap.ACCESS_READ) as view:
            write_bytes(self._uri, view, self._options)

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.drop()


class FileWriter(ObjectWriter):
    """A local file that replaces an older one when it is closed; see `ObjectWriter`. Until then its bytes are in the
    target's folder, in an unnamed file if the file system supports that, so a killed process leaves nothing."""

    def __init__(self, path: str) -> None:
        self._real = resolve_links(path)  # replaces the target of a symbolic link instead of the link
        super().__init__(path)
        # later saves remove the unfinished files of killed processes, which have no lock
        with contextlib.suppress(OSError):
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def name(self) -> str:
        """The path of the file that is replaced."""
        return self._uri

    def _open_temporary(self) -> int:
        # A file that replaces a private file must be private from the start.
        mode = 0o600 if is_there(self._real) else 0o666
        flags = os.O_RDWR | os.O_CLOEXEC
        if os.path.isdir(_OWN_FILES):  # the file gets its name through this folder
            try:
                return os.open(os.path.dirname(self._real), flags | os.O_TMPFILE, mode)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
        self._hidden_name = self._new_hidden_name()
        return os.open(self._hidden_name, flags | os.O_CREAT | os.O_EXCL, mode)

    def _new_hidden_name(self) -> str:
        """Returns a name that the engine recognizes as an unfinished file of this path."""
        folder, base = os.path.split(self._real)
        return os.path.join(folder, f".{os.fsdecode(os.fsencode(base)[:224])}.overwire-{secrets.token_hex(8)}")

    def _drop_temporary(self) -> None:
        super()._drop_temporary()
        name, self._hidden_name = self._hidden_name, ""
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)

    def _write_object(self) -> None:
        if not self._hidden_name:
            self._hidden_name = self._new_hidden_name()  # set first, so that an interrupt removes the file
            # src_dir_fd has no effect on an absolute path, but without this argument Python links the /proc link
            # instead of the file.
            try:
                os.link(f"{_OWN_FILES}/{self.fileno()}", self._hidden_name, src_dir_fd=self.fileno())
            except OSError:  # a sandbox or file system that forbids links
                self._copy_to_hidden_name()
        publish(self._hidden_name, self._real)

    def _copy_to_hidden_name(self) -> None:
        mode = os.fstat(self.fileno()).st_mode & 0o777
        with open(self._hidden_name, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as copy:
            self.seek(0)
            shutil.copyfileobj(self, copy, 1 << 20)


def open_writer(uri: str, *, storage_options: Mapping[str, object] | None = None) -> ObjectWriter:
    """Opens a file that replaces a path or an object of a store when it is closed: a `FileWriter` for a local path, an
    `ObjectWriter` for a URI."""
    if is_remote(uri) or storage_options is not None:
        return ObjectWriter(uri, storage_options=storage_options)
    return FileWriter(local(uri))


_unfinished: weakref.WeakSet[ObjectWriter] = weakref.WeakSet()


def _leave_writers() -> None:
    # In a forked child the buffered bytes, the shared file offset and the name belong to the parent.
    for writer in list(_unfinished):
        writer._hidden_name = ""
        writer.raw.close()


os.register_at_fork(after_in_child=_leave_writers)


@cache
def _finish_at_exit() -> None:
    atexit.register(_finish_writers)


def _finish_writers() -> None:
    # whether an exception ended the program; in an interactive console, an exception ends only a line
    has_failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    with contextlib.ExitStack() as stack:  # ends every writer, even if another one fails
        for writer in list(_unfinished):
            stack.callback(writer.drop if has_failed else writer.close)
