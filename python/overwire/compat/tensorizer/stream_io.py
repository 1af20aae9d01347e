"""Implements tensorizer.stream_io: streams of files, HTTP and S3 objects, and Redis values.

A TensorDeserializer does not read through these streams. It passes paths and URIs to the engine, and also the sources
of streams that start at the first byte.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Mapping
from io import SEEK_CUR, SEEK_END, SEEK_SET
from typing import Any

from ... import read_bytes
from ..._compat_api import await_path, regular
from ...errors import OverwireError
from ...stores import ObjectReader, shown
from ...stores import open_writer as open_target
from . import _s3
from ._s3 import default_s3_read_endpoint, default_s3_write_endpoint

__all__ = ["CAInfo", "CURLStreamFile", "RedisStreamFile", "open_stream"]

logger = logging.getLogger(__name__)

#: The path of the program curl. It is never started.
curl_path: str | None = None

# The settings file of s3cmd.
_s3_default_config_paths = (os.path.expanduser("~/.s3cfg"),)

# The storage_options of all streams. If a server sends nothing for `timeout` seconds, the request is repeated a few
# times.
_PATIENCE: dict[str, float] = {"timeout": 30.0}

_parse_s3_uri = _s3.parse_uri
_infer_credentials = _s3.infer_credentials
_get_s3cfg_values = _s3.s3cfg_values
_enforce_scheme = _s3.enforce_scheme
_is_caios = _s3.virtual_only


class CAInfo:
    """The certificate authorities to trust. Exactly one of cacert (a file), capath (a folder) and allow_untrusted must
    be given. Raises ValueError otherwise, and for missing files."""

    def __init__(
        self,
        *,
        cacert: str | os.PathLike[str] | None = None,
        capath: str | os.PathLike[str] | None = None,
        allow_untrusted: bool = False,
    ) -> None:
        if sum((cacert is not None, capath is not None, bool(allow_untrusted))) != 1:
            text = "Exactly one of cacert, capath, or allow_untrusted=True must be specified. For default certificate "
            text += "verification behaviour, use certificate_handling=None instead of an explicit CAInfo instance"
            raise ValueError(text)
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
        """The settings as options of curl."""
        if self.allow_untrusted:
            return ("--insecure",)
        if self.cacert is not None:
            return ("--cacert", os.fspath(self.cacert))
        assert self.capath is not None
        return ("--capath", os.fspath(self.capath))

    def options(self, uri: str) -> dict[str, Any]:
        """Returns the settings as storage_options for a URI. If the URI does not use TLS, files without certificates
        are ignored."""
        if self.allow_untrusted:
            return {"insecure": True}
        name, path = ("cacert", self.cacert) if self.cacert is not None else ("capath", self.capath)
        assert path is not None
        return {} if uri.lower().startswith("http:") and not _certificates(path) else {name: path}


def _certificates(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file, or a file in a folder, contains a certificate."""
    try:
        if os.path.isdir(path):
            return any(_certificates(entry) for entry in os.scandir(path) if entry.is_file())
        return b"-----BEGIN CERTIFICATE-----" in read_bytes(os.path.abspath(path), 64 << 20)
    except OSError:  # the file was deleted after it was listed
        return False


class _Stream(io.BufferedReader):
    """The base class of all streams: a readable, seekable object in a store. The engine reads it."""

    #: A URI and storage_options that the engine opens instead, if the stream starts at the first byte.
    reach: tuple[str, dict[str, Any]] | None = None

    def _open(
        self, uri: str, begin: int | None, end: int | None, buffer_size: int | None, options: dict[str, Any]
    ) -> ObjectReader:
        if begin is not None and begin < 0:
            raise ValueError("Invalid begin, must be non-negative")
        if end is not None and end <= (begin or 0):
            text = f"End marker must come strictly after begin marker (requested range: {begin or 0} to {end})"
            raise ValueError(text)
        self.bytes_read = self.bytes_skipped = self.read_operations = 0
        self._end = end
        self._buffer_size = buffer_size or 1 << 20
        if not begin and end is None:
            self.reach = uri, options
        source = ObjectReader(uri, begin or 0, end, storage_options={**_PATIENCE, **options})
        super().__init__(source, self._buffer_size)
        return source

    def _describe_error(self, error: object) -> str:
        """Returns the text for an OSError."""
        return str(error)

    def _timed(self, call: Any, *args: Any) -> Any:
        """Calls a function, passes its duration to `_waited`, and converts its errors to OSError."""
        if self.closed:
            raise OSError(f"{type(self).__name__} closed.")
        start = time.monotonic()
        try:
            return call(*args)
        except OverwireError as error:
            raise OSError(self._describe_error(error)) from error
        finally:
            self._waited(time.monotonic() - start)

    def _waited(self, seconds: float) -> None:
        """Called with the duration of each call."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads `size` bytes, or fewer at the end of the object. None or a negative size reads the rest.
        Raises OSError if the store fails."""
        data: bytes = self._timed(super().read, size)
        self.read_operations += 1
        self.bytes_read += len(data)
        return data

    read1 = read

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer, or only a part of it at the end of the stream. Returns the number of bytes."""
        n: int = self._timed(super().readinto, buffer)
        self.read_operations += 1
        self.bytes_read += n
        return n

    readinto1 = readinto

    def tell(self) -> int:
        """Returns the offset in the object."""
        if self.closed:
            raise OSError(f"{type(self).__name__} closed.")
        return super().tell()

    def seek(self, position: int, whence: int = SEEK_SET, /) -> int:
        """Seeks to an offset of the object. Raises ValueError for an offset that is relative to the end or before the
        start. Seeking backwards, or more than 16 MiB forwards, requests the object again; if it has changed, the next
        read raises OSError."""
        if whence == SEEK_END:
            raise ValueError("Unsupported `whence`")
        before = self.tell()
        after = before + position if whence == SEEK_CUR else position
        if after < 0:
            raise ValueError("Seeking before the beginning")
        self._timed(super().seek, after)
        self.bytes_skipped += max(0, after - before)
        return after

    def readline(self, size: int | None = -1, /) -> bytes:
        """Not supported."""
        raise io.UnsupportedOperation("readline")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def writable(self) -> bool:
        """Returns False."""
        return False

    def fileno(self) -> int:
        """Returns -1, because there is no descriptor."""
        return -1

    def close(self) -> None:
        """Closes the connection."""
        super().close()


class CURLStreamFile(_Stream):
    """A readable, seekable HTTP(S) object.

    begin, end: the range [begin, end) of bytes to read, by default all. headers: sent with every request to the URI's
    server, but not to other servers that it redirects to.
    buffer_size: the size of the buffer in bytes.

    Broken connections are resumed. Raises OSError for an object that changes during a read, for a failure that
    persists, and for an object that cannot be opened. Raises ValueError for an invalid range.
    """

    _name = ""  # shown in errors instead of the URL if that is secret

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
        if certificate_handling is not None and not isinstance(certificate_handling, CAInfo):
            text = "certificate_handling must either be None (for default SSL certificate verification), or a CAInfo"
            raise TypeError(f"{text} object, not {certificate_handling.__class__.__name__}")
        if uri.partition("://")[0].lower() not in ("http", "https"):
            raise ValueError(f"Invalid HTTP URI: {shown(uri)}")
        self.uri = uri
        self._ca = certificate_handling
        self._headers = dict(headers or {})
        options = {} if certificate_handling is None else certificate_handling.options(uri)
        # The engine sets the encoding of the body itself.
        if extra_headers := {
            name: str(value) for name, value in self._headers.items() if name.lower() != "accept-encoding"
        }:
            options["headers"] = extra_headers
        self._note: list[str] = []
        self.popen_latencies: list[float] = []
        self.http_response_latencies: list[float] = []
        start = time.monotonic()
        try:
            source = self._open(uri, begin, end, buffer_size, options)
            self.peek(1)
        except OverwireError as error:
            raise OSError(f"Failed to open stream for {self._name or shown(uri)}: {error}") from error
        size, _ = source.found() or (0, "")
        if begin and begin >= size:
            text = f"it has {size} bytes, and byte {begin} was requested"
            raise OSError(f"Failed to open stream for {self._name or shown(uri)}: {text}")
        self.http_response_latencies.append(time.monotonic() - start)
        self.popen_latencies.append(0.0)
        from email.message import Message

        #: The headers of the server's first response, except those about the range that the engine
        #: requested. Content-Length is the length of this stream.
        self.response_headers = Message()
        for name, values in source.headers().items():
            if name.lower() not in ("content-length", "content-range"):
                for value in values:
                    self.response_headers[name] = value
        self.response_headers["Content-Length"] = str(min(size, end or size) - (begin or 0))

    def register_error_context(self, msg: str) -> None:
        """Sets a text to add to this stream's errors."""
        self._note.append(msg)

    def _describe_error(self, error: object) -> str:
        return "\n".join([f"Failed to read from {self._name or shown(self.uri)}: {error}", *self._note])

    def _fork(self, begin: int | None = None, end: int | None = None) -> CURLStreamFile:
        """Opens the same object with another range."""
        clone = CURLStreamFile(
            self.uri, begin, end, self._headers, buffer_size=self._buffer_size, certificate_handling=self._ca
        )
        clone._name, clone._note = self._name, list(self._note)
        return clone

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer up to the range's `end`, and returns 0 there. Raises OSError if the object ends earlier."""
        view = memoryview(buffer).cast("B")
        limit = len(view) if self._end is None else max(0, min(len(view), self._end - self.tell()))
        count = super().readinto(view[:limit])
        if count < limit:
            raise OSError(self._describe_error(f"Requested {limit} != {count}: the object is shorter"))
        return count

    readinto1 = readinto


class RedisStreamFile(_Stream):
    """A readable, seekable file in Redis at redis://host[:port]/prefix: the values
    `prefix:...:offset` in order, or one value. rediss:// uses TLS.

    begin, end: the range [begin, end) of bytes to read, by default all. buffer_size: the size of the buffer in bytes.
    Raises ValueError for any other URI. Reads raise the server's errors as OSError. The password comes from
    REDISCLI_AUTH.
    """

    def __init__(
        self, uri: str, *, begin: int | None = None, end: int | None = None, buffer_size: int | None = None
    ) -> None:
        _parse_redis_uri(uri)
        start = time.monotonic()
        self.uri = uri
        #: The duration of each wait for bytes, in seconds.
        self.response_latencies: list[float] = []
        self._open(uri, begin, end, buffer_size, {})
        self.setup_latency = time.monotonic() - start

    def _waited(self, seconds: float) -> None:
        self.response_latencies.append(seconds)


def _parse_redis_uri(uri: str) -> tuple[str, int, str]:
    from urllib.parse import urlsplit

    parts = urlsplit(uri)
    if parts.scheme.lower() not in ("redis", "rediss"):
        raise ValueError(f"Invalid Redis URI: {shown(uri)}")
    return parts.hostname or "", parts.port or 6379, parts.path.lstrip("/")


def _s3_download_url(
    path_uri: str,
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_endpoint: str | None = default_s3_read_endpoint,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
) -> str:
    """Returns the URL that `s3_download` opens. The URL is a secret. Raises ValueError for a URI that is not s3://, and
    OSError if the URL cannot be signed."""
    return _s3.url_of(path_uri, _s3.direct_options(s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_region_name))


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
    """Opens an s3:// object as a stream, through a URL that is signed for a day. The URL is not signed
    if both credentials are "" or if none are found. Signatures are version 4.

    Raises ValueError for any other URI and for an invalid range, and OSError if the object cannot be opened.
    """
    options = _s3.direct_options(s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_region_name)
    return _S3StreamFile(path_uri, options, begin, end, buffer_size, certificate_handling)


class _S3StreamFile(CURLStreamFile):
    """An s3:// object read through a signed URL. The URL is a secret and never shown."""

    def __init__(
        self,
        uri: str,
        options: dict[str, Any],
        begin: int | None,
        end: int | None,
        buffer_size: int | None,
        ca: CAInfo | None,
    ) -> None:
        self._name = uri
        try:
            url = _s3.url_of(uri, options)
        except OverwireError as error:
            raise OSError(f"Failed to open stream for {uri}: {error}") from error
        super().__init__(url, begin, end, buffer_size=buffer_size, certificate_handling=ca)
        trust = {} if ca is None else ca.options(url)
        if self.reach is not None and not trust.keys() - {"cacert"}:  # s3:// supports only cacert
            self.reach = uri, options | trust


def s3_upload(
    path: str,
    target_uri: str,
    s3_access_key_id: str | None,
    s3_secret_access_key: str | None,
    s3_endpoint: str | None = default_s3_write_endpoint,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
) -> None:
    """Copies a local file to an s3:// object, which appears when it is complete. Raises ValueError for any other URI,
    and the errors of `overwire.save_file`."""
    import shutil

    _s3.parse_uri(target_uri)
    options = _s3.direct_options(s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_region_name)
    with open(path, "rb", opener=regular) as source, open_target(target_uri, storage_options=options) as target:
        shutil.copyfileobj(source, target, 16 << 20)


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
    """Opens a path in any binary mode, http(s):// and redis:// for reading, and s3:// for
    reading ("rb") or writing ("wb", "wb+", "ab", "ab+").

    Writes to s3:// go to a temporary file until the stream is closed. If an exception ends a `with` block, the object
    is not written. Missing folders of a path to write are made.
    begin, end: as for CURLStreamFile; for a path, begin is the first offset. s3_*: credentials (none if both are ""),
    endpoint and region; `_s3.options_for` lists where they come from by default. s3_config_path: the file to use
    instead of ~/.s3cfg. force_http: disables TLS for s3://.
    s3_signature_version: has no effect, because signatures always have version 4.

    Raises ValueError for other modes and schemes, and OSError if the stream cannot be opened.
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
            normal != "br", s3_access_key_id, s3_secret_access_key, s3_endpoint, s3_config_path, force_http,
            s3_region_name,
        )  # fmt: skip
        if normal != "br":
            return open_target(path, storage_options=options)
        return _S3StreamFile(path, options, begin, end, buffer_size, certificate_handling)
    if scheme and scheme != "file":
        raise ValueError(f"Unsupported scheme: {scheme}://")
    if "b" not in mode:
        raise ValueError('Only binary modes ("rb", "wb", "wb+", etc.) are valid when opening local file streams.')
    path = path.removeprefix("file://") if scheme else path
    if set(mode) & set("wax") and os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    if set(mode) & set("wax+"):
        await_path(path)  # a background save would replace the open file
    # `regular` refuses pipes, which cannot seek. Opening a pipe would wait for a writer.
    size = -1 if buffer_size is None else buffer_size
    stream = open(path, mode, size, opener=regular if normal == "br" else None)  # noqa: SIM115
    stream.seek(begin or 0)
    return stream


def open_writer(path_uri: str | bytes | os.PathLike[str]) -> Any:
    """Opens a path like `open_stream` with mode "wb+", but an existing file stays until the stream is closed, and
    `drop` discards the new file. Devices and pipes are opened directly."""
    path = os.fsdecode(path_uri)
    if not isinstance(path_uri, os.PathLike) and path[:7].lower() == "file://":
        path = path[7:]
    elif not isinstance(path_uri, os.PathLike) and "://" in path:
        return open_stream(path_uri, "wb+")
    if os.path.exists(path) and not os.path.isfile(path):
        return open_stream(path_uri, "wb+")
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return open_target(path)
