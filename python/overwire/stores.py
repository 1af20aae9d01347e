"""Whole files and objects of stores: written, streamed, and given a URL for a while."""

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
from .errors import ArgumentError
from .jobs import Job, shown
from .model.storage import storage
from .paths import is_there, local

if TYPE_CHECKING:
    from ._requests import FetchPin, FetchRequest

# The descriptors of this process, by which a file without a name gets one.
_OWN_FILES = "/proc/self/fd"

# How long a read may keep Ctrl-C waiting, in milliseconds.
_SLICE_MS = 50


def write_bytes(
    uri: str,
    data: bytes | mmap.mmap,
    options: Mapping[str, object] | None,
    stale: Sequence[str] = (),
    *,
    once: bool = False,
) -> None:
    """Replaces one file or object in one step, and then removes what it makes
    stale. A local file keeps its mode, owner and ACL; a symbolic link is followed.

    once: an object of S3 is not replaced: ArgumentError if there is one; of several writers
    at once, one succeeds. (A store that lacks conditional writes keeps the last.)

    Raises NotFoundError without the folder, AccessError, ArgumentError for what is
    no regular file, IOFailure."""
    reach = storage(options, [uri])
    pointer, size, holder = buffer_of(data)
    try:
        with Job(
            _verbs.put({"path": uri, "stale": list(stale), "once": once, "storage": reach}, pointer, size), "save"
        ) as job:
            job.wait()
    finally:
        del holder  # a map of a file cannot be closed before


def remove_objects(uris: Sequence[str], options: Mapping[str, object] | None) -> None:
    """Removes objects of stores; no error for those that are not there. Tries all, and
    raises the first error of a store."""
    with Job(_verbs.remove({"uris": list(uris), "storage": storage(options, uris)}), "remove") as job:
        job.wait()


def publish(made: str, path: str) -> None:
    """Gives the finished file `made` the name `path` in the same folder, as if
    `write_bytes` had written it; raises what that does, and leaves `made` then.

    If there is a file to replace, create `made` with mode 0600."""
    with Job(_verbs.rename({"path": path, "made": made}), "save") as job:
        job.wait()


def resolve_links(path: str) -> str:
    """Where a local path to write to leads: symbolic links of its last element are followed. AccessError for a link, in
    any folder of the way, that another user may have planted."""
    return _verbs.follow(local(path))


def refuse_planted(path: str) -> None:
    """Raises AccessError where an element of a path belongs to another user, in a folder that everyone may write:
    neither to this user, nor to root, nor to the folder's owner."""
    _verbs.refuse_planted(path)


def presign(uri: str, seconds: int, *, storage_options: Mapping[str, object] | None = None) -> str:
    """A URL that reads an s3:// object without credentials, for the given seconds, at
    most seven days. Anyone who has it can read the object: keep it secret.

    Raises ArgumentError for unsigned access, AccessError without credentials,
    NotSupportedError for other stores.
    """
    return _verbs.presign({"uri": uri, "seconds": seconds, "storage": storage(storage_options, [uri])})


class ObjectReader(io.RawIOBase):
    """The bytes of a path or URI in order, from `begin` to `end` (exclusive; None:
    to its end), read ahead by several connections, which resume where they break.

    Several paths or URIs are read one after the other, as one file. `sizes`, the
    bytes that each of them has, lets an external downloader (OVERWIRE_DOWNLOADER)
    be started once for all; an object of another size is CorruptError.

    One that has a single source can seek; backwards, or more than 16 MiB
    forwards, the reading begins anew, of the same object: one that has come in
    its place since, with another size, ETag or date, is CorruptError. Errors of the
    store are raised by the reads.
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
        # with the environment as it is now, however often it connects
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
            spec: FetchRequest = {
                "uris": self._uris, "fd": sink, "from": self._at, "to": self._end or 0, "pin": self._pin
            }
            spec["storage"] = self._reach
            if self._sizes is not None:
                spec["sizes"] = self._sizes
            self._job = Job(_verbs.fetch(spec), "fetch")
        finally:
            os.close(sink)

    def found(self) -> tuple[int, str] | None:
        """Size and identity of a single source, once its first byte, or its end, was
        read: an ETag (in double quotes) or a date, "" where the store gives neither."""
        if self._pin is None and self._job is not None and len(self._uris) == 1:
            report = self._job.report() or {}
            self._pin, self._headers = report.get("pin"), report.get("headers") or {}
        if self._pin is None:
            return None
        return self._pin["size"], b64decode(self._pin["identity"] or "").decode("latin-1")

    def headers(self) -> dict[str, list[str]]:
        """Those of a single source's first answer, once `found` gives something; empty
        where no HTTP server gave any."""
        return self._headers

    def _stop_reading(self) -> None:
        job, self._job = self._job, None
        if self._pipe >= 0:  # first: its writer would not notice a cancel
            os.close(self._pipe)
            self._pipe = -1
        if job is not None:
            job.abandon()

    def readinto(self, buffer: Any, /) -> int:
        """Some bytes, 0 at the end. Raises what the store does."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        view = memoryview(buffer).cast("B")
        if self._job is None or not len(view):
            return 0
        # In slices: a signal that comes just before a read would else be heard after it.
        waiting = select.poll()
        waiting.register(self._pipe, select.POLLIN)
        while not waiting.poll(_SLICE_MS):
            pass
        count = os.readv(self._pipe, [view])
        if not count:
            self._job.wait()  # an error of the store
        self.found()
        self._at += count
        return count

    def readall(self) -> bytes:
        """What is left."""
        blocks, block = [], bytearray(4 << 20)
        while count := self.readinto(block):
            blocks.append(bytes(memoryview(block)[:count]))
        return b"".join(blocks)

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Goes to an offset; ValueError relative to the end, or before the beginning."""
        if whence == io.SEEK_CUR:
            offset += self._at
        elif whence != io.SEEK_SET:
            raise ValueError(f"{shown(self._uris[0])}: the end is not known")
        if offset < 0:
            raise ValueError(f"{shown(self._uris[0])}: offset {offset}")
        if 0 < offset - self._at <= self._NEAR and self._job is not None:
            scratch = bytearray(min(offset - self._at, 1 << 20))
            while self._at < offset and self.readinto(memoryview(scratch)[: offset - self._at]):
                pass
        if offset != self._at:
            if len(self._uris) != 1:
                raise io.UnsupportedOperation("several sources that are read as one do not seek")
            self._at = offset
            self._start_reading()
        return offset

    def close(self) -> None:
        """Ends the reading."""
        if not self.closed:
            self._stop_reading()
        super().close()


class ObjectWriter(io.BufferedRandom):
    """A file that becomes an object of a store, or a local file, when it is closed: until then
    the bytes are in an unnamed temporary file, and readers find the old object.

    A `with` block that ends by an exception, or `drop`, leaves the store unchanged.
    What is still open when the process ends is written then, unless an exception ends it;
    and what was written to, when its last reference goes. Of several threads that close it one
    writes, and the others wait. A forked child has it closed, and writes nothing.
    """

    _hidden_name = ""  # the temporary file's, if it has one

    def __init__(self, uri: str, *, storage_options: Mapping[str, object] | None = None) -> None:
        self._uri, self._options = uri, storage_options
        self._lock = new_lock()
        self._is_ending = self._is_over = False
        storage(storage_options, [uri])  # refuses wrong ones now
        _verbs.knobs()  # the engine runs, and ends after what is registered now
        _finish_at_exit()
        number = self._open_temporary()
        try:
            raw = io.FileIO(number, "r+")
        except BaseException:
            os.close(number)
            raise
        super().__init__(raw)
        _unfinished.add(self)

    def _open_temporary(self) -> int:
        """A descriptor of the file for the bytes."""
        with tempfile.NamedTemporaryFile(prefix="overwire-") as temporary:
            return os.dup(temporary.fileno())

    def drop(self) -> None:
        """Closes it, and writes nothing."""
        self._end_once(self._drop_temporary)

    def close(self) -> None:
        """Writes the object, and returns when it stands."""
        self._end_once(self._write_all)

    def _end_once(self, end: Callable[[], None]) -> None:
        # One call at a time. The lock lets a signal handler of the same thread in.
        with self._lock:
            if self._is_ending:
                raise ArgumentError(
                    f"overwire: save {shown(self._uri)}: a signal handler ends the file whose end it interrupts"
                )
            self._is_ending = True
            try:
                if not self.closed:  # where it is over, the rest of an end was interrupted
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
        self.raw.close()  # what is buffered, which a full disk would not take, goes with it

    @skip_at_exit
    def __del__(self) -> None:
        # What was interrupted before anything was written leaves the old object. `getattr`: so may the constructor be.
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
    """A local file that appears, whole, when it is closed, in place of an older one; see
    `ObjectWriter`. Its bytes are in its own folder, without a name where the file system
    has such files, so that a process that is killed leaves nothing."""

    def __init__(self, path: str) -> None:
        self._real = resolve_links(path)  # a symbolic link stays
        super().__init__(path)
        # shows later saves, which remove what killed ones have left, that this one lives
        with contextlib.suppress(OSError):
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def name(self) -> str:
        """The path."""
        return self._uri

    def _open_temporary(self) -> int:
        # What replaces a private file is private from the beginning.
        mode = 0o600 if is_there(self._real) else 0o666
        flags = os.O_RDWR | os.O_CLOEXEC
        if os.path.isdir(_OWN_FILES):  # where it gets its name
            try:
                return os.open(os.path.dirname(self._real), flags | os.O_TMPFILE, mode)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
        self._hidden_name = self._new_hidden_name()
        return os.open(self._hidden_name, flags | os.O_CREAT | os.O_EXCL, mode)

    def _new_hidden_name(self) -> str:
        """A name of the kind that the engine takes for an unfinished file of this path."""
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
            self._hidden_name = self._new_hidden_name()  # an interrupt leaves none behind
            # Without src_dir_fd, which counts for relative paths only, the link of /proc would be linked.
            try:
                os.link(f"{_OWN_FILES}/{self.fileno()}", self._hidden_name, src_dir_fd=self.fileno())
            except OSError:  # a sandbox, or a file system, where no one makes links
                self._copy_to_hidden_name()
        publish(self._hidden_name, self._real)

    def _copy_to_hidden_name(self) -> None:
        mode = os.fstat(self.fileno()).st_mode & 0o777
        with open(self._hidden_name, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as copy:
            self.seek(0)
            shutil.copyfileobj(self, copy, 1 << 20)


_unfinished: weakref.WeakSet[ObjectWriter] = weakref.WeakSet()


def _leave_writers() -> None:
    # What is buffered is the parent's, and so is the place in the file that both have, and its name.
    for writer in list(_unfinished):
        writer._hidden_name = ""
        writer.raw.close()


os.register_at_fork(after_in_child=_leave_writers)


@cache
def _finish_at_exit() -> None:
    atexit.register(_finish_writers)


def _finish_writers() -> None:
    # of the program, not of a line of a console
    has_failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    with contextlib.ExitStack() as stack:  # each has its turn, whatever became of others
        for writer in list(_unfinished):
            stack.callback(writer.drop if has_failed else writer.close)
