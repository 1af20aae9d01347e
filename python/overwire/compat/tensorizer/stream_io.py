"""tensorizer.stream_io: files and HTTP objects as streams.

Loading does not go through these: a TensorDeserializer gives paths and URIs,
and streams that were opened from the first byte on, to the engine. redis:// and
s3:// cannot be opened as streams here; the engine takes the URIs that it knows.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

__all__ = ["CAInfo", "CURLStreamFile", "open_stream"]


class CAInfo:
    """Whom to trust: exactly one of cacert (a file), capath (a folder) and
    allow_untrusted. ValueError otherwise, FileNotFoundError for what is not there."""

    def __init__(
        self, *, cacert: str | os.PathLike[str] | None = None, capath: str | os.PathLike[str] | None = None, allow_untrusted: bool = False
    ) -> None:
        if sum((cacert is not None, capath is not None, bool(allow_untrusted))) != 1:
            raise ValueError("Exactly one of cacert, capath and allow_untrusted must be given")
        for path, there, what in ((cacert, os.path.isfile, "file"), (capath, os.path.isdir, "directory")):
            if path is not None and not there(path):
                raise FileNotFoundError(f"Not a {what}: {os.fspath(path)}")
        self.cacert, self.capath, self.allow_untrusted = cacert, capath, bool(allow_untrusted)

    @property
    def curl_flags(self) -> tuple[str, ...]:
        """The same, as options of curl."""
        if self.allow_untrusted:
            return ("--insecure",)
        if self.cacert is not None:
            return ("--cacert", os.fspath(self.cacert))
        assert self.capath is not None
        return ("--capath", os.fspath(self.capath))

    def context(self) -> ssl.SSLContext:
        """The same, for Python."""
        import ssl

        context = ssl.create_default_context(
            cafile=None if self.cacert is None else os.fspath(self.cacert), capath=None if self.capath is None else os.fspath(self.capath)
        )
        if self.allow_untrusted:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class CURLStreamFile(io.BufferedIOBase):
    """A readable HTTP(S) object that can seek: forwards by reading on, backwards by
    a new request.

    begin, end: the bytes to read, end exclusive, None: all. headers: of every
    request. buffer_size: how much to ask the connection for at once. ValueError
    for a range that is none, OSError for an object that does not open.
    """

    def __init__(
        self,
        uri: str,
        begin: int | None = None,
        end: int | None = None,
        headers: Mapping[str, Any] | None = None,
        *,
        buffer_size: int | None = None,
        certificate_handling: CAInfo | None = None,
    ) -> None:
        super().__init__()
        self._response: Any = None
        if begin is not None and begin < 0 or end is not None and end <= (begin or 0):
            raise ValueError(f"Invalid range: {begin} to {end}")
        self.uri = uri
        self.whole = begin in (None, 0) and end is None and certificate_handling is None
        self._headers = dict(headers or {})
        self.storage_options = {"headers": self._headers} if self._headers else None
        self._end = end
        self._buffer_size = buffer_size or 16 << 20
        self._context = None if certificate_handling is None else certificate_handling.context()
        self._note = ""
        self.response_headers: Any = {}
        self.popen_latencies: list[float] = []
        self.http_response_latencies: list[float] = []
        self.bytes_read = self.bytes_skipped = self.read_operations = 0
        self._at = begin or 0
        self._connect()

    def register_error_context(self, msg: str) -> None:
        """A text to add to the errors of this stream."""
        self._note = msg

    def _connect(self) -> None:
        import urllib.error
        import urllib.request

        self._drop()
        request = urllib.request.Request(self.uri, headers={**self._headers, "Accept-Encoding": "identity"})
        if self._at or self._end is not None:
            request.add_header("Range", f"bytes={self._at}-{'' if self._end is None else self._end - 1}")
        start = time.monotonic()
        try:
            response = urllib.request.urlopen(request, context=self._context)
        except (urllib.error.URLError, OSError) as error:
            reason = f"HTTP status {error.code}" if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", error)
            raise OSError(f"Failed to open stream for {self.uri}: {reason}{self._note and f' ({self._note})'}") from error
        self.http_response_latencies.append(time.monotonic() - start)
        self.popen_latencies.append(0.0)
        if request.has_header("Range") and response.status != 206:
            response.close()
            raise OSError(f"Failed to open stream for {self.uri}: the server does not serve ranges")
        self._response, self.response_headers = response, response.headers

    def _drop(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.close()

    def read(self, size: int | None = -1, /) -> bytes:
        """At most size bytes, all of them unless the object ends before; None or
        less than 0: all that are left."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        blocks, left = [], -1 if size is None or size < 0 else size
        while left:
            block = self._response.read(self._buffer_size if left < 0 else min(left, self._buffer_size))
            if not block:
                break
            blocks.append(block)
            left -= len(block) if left > 0 else 0
        got = b"".join(blocks)
        self._at += len(got)
        self.bytes_read += len(got)
        self.read_operations += 1
        return got

    read1 = read

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer; OSError if the object ends before it is full."""
        view = memoryview(buffer).cast("B")
        got = self.read(len(view))
        if len(got) < len(view):
            raise OSError(f"Requested {len(view)} != {len(got)} bytes read from {self.uri}{self._note and f' ({self._note})'}")
        view[:] = got
        return len(got)

    readinto1 = readinto

    def readline(self, size: int | None = -1, /) -> bytes:
        """Not for these."""
        raise io.UnsupportedOperation("readline")

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def writable(self) -> bool:
        """False."""
        return False

    def fileno(self) -> int:
        """-1: there is no descriptor."""
        return -1

    def tell(self) -> int:
        """The offset in the object."""
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Goes to an offset of the object; ValueError relative to its end."""
        if whence == io.SEEK_CUR:
            position += self._at
        elif whence != io.SEEK_SET:
            raise ValueError("Seeking relative to the end is not supported")
        if position < 0:
            raise ValueError("Seeking before the beginning")
        if 0 <= position - self._at <= self._buffer_size:
            skip = position - self._at
            self.bytes_skipped += len(self.read(skip))
        if position != self._at:
            self._at = position
            self._connect()
        return position

    def close(self) -> None:
        """Ends the connection."""
        self._drop()
        super().close()


def open_stream(
    path_uri: str | bytes | os.PathLike[str],
    mode: str = "rb",
    s3_access_key_id: str | None = None,
    s3_secret_access_key: str | None = None,
    s3_endpoint: str | None = None,
    s3_config_path: str | os.PathLike[str] | None = None,
    buffer_size: int | None = None,
    force_http: bool | None = None,
    *,
    begin: int | None = None,
    end: int | None = None,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
    certificate_handling: CAInfo | None = None,
) -> Any:
    """Opens a path, in any binary mode, or an http(s) URI, for reading.

    Folders of a path that is written to are made. begin, end: as for
    CURLStreamFile; of a path, where reading begins. ValueError for a text mode and
    for writing to HTTP, NotImplementedError for redis:// and s3://.
    """
    if isinstance(path_uri, os.PathLike):
        path, scheme = os.fsdecode(os.fspath(path_uri)), ""
    else:
        path = os.fsdecode(path_uri)
        scheme = path.partition("://")[0].lower() if "://" in path else ""
    if scheme in ("http", "https"):
        if mode != "rb":
            raise ValueError(f'Only the mode "rb" is valid when opening http(s):// streams (got "{mode}")')
        return CURLStreamFile(path, begin, end, buffer_size=buffer_size, certificate_handling=certificate_handling)
    if scheme in ("s3", "redis"):
        raise NotImplementedError(f"{scheme}:// streams; give the URI to TensorDeserializer itself")
    if scheme and scheme != "file":
        raise ValueError(f"Unsupported scheme: {scheme}://")
    if "b" not in mode:
        raise ValueError(f'Only binary modes are valid when opening local file streams (got "{mode}")')
    path = path.removeprefix("file://") if scheme else path
    if set(mode) & set("wax+") and os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    stream = open(path, mode)  # noqa: SIM115 - the caller's
    if begin is not None:
        stream.seek(begin)
    return stream
