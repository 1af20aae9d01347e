"""tensorizer.stream_io: files, and objects of HTTP, S3 and Redis, as streams.

Loading does not go through these: a TensorDeserializer gives paths and URIs,
and streams that were opened from the first byte on, to the engine.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import OverwireError
from ...files import regular
from ...storage import shown
from ...stores import ObjectReader, ObjectWriter
from . import _s3
from ._s3 import default_s3_read_endpoint, default_s3_write_endpoint

if TYPE_CHECKING:
    import ssl

__all__ = ["CAInfo", "CURLStreamFile", "RedisStreamFile", "open_stream"]

# A server that sends nothing for so long is given up, in seconds.
_STALLED = 60.0

_parse_s3_uri = _s3.parse_uri
_infer_credentials = _s3.infer_credentials
_get_s3cfg_values = _s3.s3cfg_values
_enforce_scheme = _s3.enforce_scheme
_s3_default_config_paths = _s3._s3_default_config_paths


class CAInfo:
    """Whom to trust: exactly one of cacert (a file), capath (a folder) and
    allow_untrusted. ValueError otherwise, and for what is not there."""

    def __init__(
        self, *, cacert: str | os.PathLike[str] | None = None, capath: str | os.PathLike[str] | None = None, allow_untrusted: bool = False
    ) -> None:
        if sum((cacert is not None, capath is not None, bool(allow_untrusted))) != 1:
            raise ValueError(
                "Exactly one of cacert, capath, or allow_untrusted=True must be specified. For default certificate verification"
                " behaviour, use certificate_handling=None instead of an explicit CAInfo instance"
            )
        for name, path, there in (("cacert file", cacert, os.path.isfile), ("capath directory", capath, os.path.isdir)):
            if path is not None and not there(path):
                raise ValueError(f"Invalid {name} path: {os.fspath(path)}")
        self.cacert, self.capath, self.allow_untrusted = cacert, capath, bool(allow_untrusted)

    def __hash__(self) -> int:
        return hash(self.curl_flags)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CAInfo) and self.curl_flags == other.curl_flags

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


class _Readable(io.BufferedIOBase):
    """What the files here that can be read have in common."""

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


class CURLStreamFile(_Readable):
    """A readable HTTP(S) object that can seek: forwards by reading on, backwards by
    a new request.

    begin, end: the bytes to read, end exclusive, None: all. headers: of every
    request. buffer_size: how much to ask the connection for at once. ValueError
    for a range that is none, OSError for an object that does not open.
    """

    _name = ""  # for errors, where the URL itself is a secret

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
        if begin is not None and begin < 0:
            raise ValueError("Invalid begin, must be non-negative")
        if end is not None and end <= (begin or 0):
            raise ValueError(f"End marker must come strictly after begin marker (requested range: {begin or 0} to {end})")
        if certificate_handling is not None and not isinstance(certificate_handling, CAInfo):
            raise TypeError(
                "certificate_handling must either be None (for default SSL certificate verification), or a CAInfo object,"
                f" not {certificate_handling.__class__.__name__}"
            )
        self.uri = uri
        self._ca = certificate_handling
        self._headers = dict(headers or {})
        #: What the engine opens instead, from the first byte on: a URI and storage_options.
        self.reach: tuple[str, dict[str, Any]] | None = None
        if begin in (None, 0) and end is None:
            self.reach = uri, {} if not self._headers else {"headers": self._headers}
            if certificate_handling is not None:
                ca = certificate_handling
                self.reach[1].update(cacert=ca.cacert, capath=ca.capath, insecure=ca.allow_untrusted)
        self._end = end
        self._buffer_size = buffer_size or 16 << 20
        self._context = None if certificate_handling is None else certificate_handling.context()
        self._note: list[str] = []
        self.response_headers: Any = {}
        self.popen_latencies: list[float] = []
        self.http_response_latencies: list[float] = []
        self.bytes_read = self.bytes_skipped = self.read_operations = 0
        self._at = begin or 0
        self._connect()

    def register_error_context(self, msg: str) -> None:
        """A text to add to the errors of this stream."""
        self._note.append(msg)

    def _told(self) -> str:
        return "".join(f"\n{note}" for note in self._note)

    def _fork(self, begin: int | None = None, end: int | None = None) -> CURLStreamFile:
        """The same object from elsewhere."""
        clone = CURLStreamFile(self.uri, begin, end, self._headers, buffer_size=self._buffer_size, certificate_handling=self._ca)
        clone._name, clone._note = self._name, list(self._note)
        return clone

    def _connect(self) -> None:
        import urllib.error
        import urllib.request

        self._drop()
        request = urllib.request.Request(self.uri, headers={**self._headers, "Accept-Encoding": "identity"})
        if self._at or self._end is not None:
            request.add_header("Range", f"bytes={self._at}-{'' if self._end is None else self._end - 1}")
        start = time.monotonic()
        try:
            response = urllib.request.urlopen(request, context=self._context, timeout=_STALLED)
        except (urllib.error.URLError, OSError) as error:
            reason = f"HTTP status {error.code}" if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", error)
            raise OSError(f"Failed to open stream for {self._name or shown(self.uri)}: {reason}{self._told()}") from error
        self.http_response_latencies.append(time.monotonic() - start)
        self.popen_latencies.append(0.0)
        if request.has_header("Range") and response.status != 206:
            response.close()
            raise OSError(f"Failed to open stream for {self._name or shown(self.uri)}: the server does not serve ranges")
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
            raise OSError(f"Requested {len(view)} != {len(got)} bytes read from {self._name or shown(self.uri)}{self._told()}")
        view[:] = got
        return len(got)

    readinto1 = readinto

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


class RedisStreamFile(_Readable):
    """A readable file in Redis that can seek: redis://host[:port]/prefix, the values
    `prefix:...:offset` one after the other, or one value. rediss:// is with TLS.

    begin, end: the bytes to read, end exclusive, None: all. buffer_size: how much
    is kept at once. ValueError for another URI; what the server says is raised by
    the reads, as OSError. The password is REDISCLI_AUTH's.
    """

    def __init__(self, uri: str, *, begin: int | None = None, end: int | None = None, buffer_size: int | None = None) -> None:
        super().__init__()
        self._file: Any = None
        _parse_redis_uri(uri)
        if begin is not None and begin < 0:
            raise ValueError("Invalid begin, must be non-negative")
        start = time.monotonic()
        self.uri = uri
        self.reach: tuple[str, dict[str, Any]] | None = None if begin or end is not None else (uri, {})
        self._file = io.BufferedReader(ObjectReader(uri, begin or 0, end), buffer_size or 1 << 20)
        #: Seconds until the reading had begun, and of each wait for bytes.
        self.setup_latency = time.monotonic() - start
        self.response_latencies: list[float] = []
        self.bytes_read = self.bytes_skipped = self.read_operations = 0

    def _timed(self, read: Any, *args: Any) -> Any:
        if self.closed:
            raise OSError("RedisStreamFile closed.")
        start = time.monotonic()
        try:
            got = read(*args)
        except OverwireError as error:
            raise OSError(str(error)) from error
        self.response_latencies.append(time.monotonic() - start)
        self.read_operations += 1
        self.bytes_read += got if isinstance(got, int) else len(got)
        return got

    def read(self, size: int | None = -1, /) -> bytes:
        """At most size bytes, all of them unless the file ends before."""
        data: bytes = self._timed(self._file.read, -1 if size is None else size)
        return data

    read1 = read

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer, or as much of it as the file has left."""
        n: int = self._timed(self._file.readinto, buffer)
        return n

    readinto1 = readinto

    def tell(self) -> int:
        """The offset in the file."""
        n: int = self._file.tell()
        return n

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Goes to an offset; ValueError relative to the end."""
        if whence == io.SEEK_END:
            raise ValueError("Unsupported `whence`")
        before = self._file.tell()
        after: int = self._file.seek(position, whence)
        self.bytes_skipped += max(0, after - before)
        return after

    def close(self) -> None:
        """Ends the connection."""
        if self._file is not None:
            self._file.close()
        super().close()


def _parse_redis_uri(uri: str) -> tuple[str, int, str]:
    from urllib.parse import urlsplit

    parts = urlsplit(uri)
    if parts.scheme.lower() not in ("redis", "rediss"):
        raise ValueError(f"Invalid Redis URI: {uri}")
    return parts.hostname or "", parts.port or 6379, parts.path.lstrip("/")


def s3_download(
    path_uri: str,
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_endpoint: str | None = default_s3_read_endpoint,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
    buffer_size: int | None = None,
    begin: int | None = None,
    end: int | None = None,
    certificate_handling: CAInfo | None = None,
) -> CURLStreamFile:
    """An s3:// object as a stream, by a URL that is signed for a day; unsigned for
    "" and "", and where no credentials are found. Signatures are version 4.

    ValueError for another URI and for a range that is none, OSError for an object
    that does not open.
    """
    options = _s3.direct_options(s3_access_key_id, s3_secret_access_key, _with_scheme(s3_endpoint), s3_region_name)
    return _S3StreamFile(path_uri, options, begin, end, buffer_size, certificate_handling)


class _S3StreamFile(CURLStreamFile):
    """An s3:// object by a signed URL, which is a secret and does not show."""

    def __init__(
        self, uri: str, options: dict[str, Any], begin: int | None, end: int | None, buffer_size: int | None, ca: CAInfo | None
    ) -> None:
        self._name = uri
        _s3.parse_uri(uri)
        try:
            url = _s3.url_of(uri, options)
        except OverwireError as error:
            raise OSError(f"Failed to open stream for {uri}: {error}") from error
        super().__init__(url, begin, end, buffer_size=buffer_size, certificate_handling=ca)
        if self.reach is not None and (ca is None or ca.cacert is not None):
            self.reach = uri, options if ca is None else options | {"cacert": ca.cacert}


def _with_scheme(endpoint: str | None) -> str | None:
    return endpoint if endpoint is None or "://" in endpoint else "https://" + endpoint


def s3_upload(
    path: str,
    target_uri: str,
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_endpoint: str | None = default_s3_write_endpoint,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
) -> None:
    """Copies a local file into an s3:// object, which shows when it is whole.
    ValueError for another URI; raises what `overwire.save_file` raises."""
    _s3.parse_uri(target_uri)
    _s3.upload(path, target_uri, _s3.direct_options(s3_access_key_id, s3_secret_access_key, _with_scheme(s3_endpoint), s3_region_name))


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
    """Opens a path in any binary mode, http(s):// and redis:// for reading, s3:// for
    reading ("rb") or writing ("wb", "wb+", "ab", "ab+").

    What is written to s3:// lies in a temporary file until it is closed; a `with`
    block that ends by an exception writes nothing. Folders of a path that is
    written to are made. begin, end: as for CURLStreamFile; of a path, where
    reading begins. s3_*: credentials ("" and "": none), endpoint and region; where
    they are found otherwise `_s3.options_for` says. s3_config_path: instead of
    ~/.s3cfg. force_http: without TLS, for s3://. s3_signature_version: has no
    effect, signatures are version 4.

    ValueError for other modes and schemes, OSError for what does not open.
    """
    if isinstance(path_uri, os.PathLike):
        path, scheme = os.fsdecode(os.fspath(path_uri)), ""
    else:
        path = os.fsdecode(path_uri)
        scheme = path.partition("://")[0].lower() if "://" in path else ""
    normal = "".join(sorted(mode))
    if scheme in ("http", "https"):
        if normal != "br":
            raise ValueError('Only the mode "rb" is valid when opening http(s):// streams.')
        return CURLStreamFile(path, begin, end, buffer_size=buffer_size, certificate_handling=certificate_handling)
    if scheme in ("redis", "rediss"):
        if normal != "br":
            raise ValueError('Only the mode "rb" is valid when opening redis:// streams.')
        return RedisStreamFile(path, begin=begin, end=end, buffer_size=buffer_size)
    if scheme == "s3":
        if normal not in ("br", "bw", "ab", "+bw", "+ab"):
            raise ValueError('Only the modes "rb", "wb[+]", and "ab[+]" are valid when opening s3:// streams.')
        options = _s3.options_for(
            normal != "br", s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_config_path, force_http, s3_region_name
        )
        if normal != "br":
            return ObjectWriter(path, storage_options=options)
        return s3_download(
            path, options.get("key", "" if options.get("anon") else None), options.get("secret", "" if options.get("anon") else None),
            options["endpoint_url"], s3_region_name, s3_signature_version, buffer_size, begin, end, certificate_handling,
        )  # fmt: skip
    if scheme and scheme != "file":
        raise ValueError(f"Unsupported scheme: {scheme}://")
    if "b" not in mode:
        raise ValueError('Only binary modes ("rb", "wb", "wb+", etc.) are valid when opening local file streams.')
    path = path.removeprefix("file://") if scheme else path
    if set(mode) & set("wax") and os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    # The caller's. A pipe that is to be read would wait for a writer, and cannot seek.
    stream = open(path, mode, -1 if buffer_size is None else buffer_size, opener=regular if normal == "br" else None)  # noqa: SIM115
    stream.seek(begin or 0)
    return stream
