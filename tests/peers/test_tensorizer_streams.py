"""Tests tensorizer's HTTP and S3 streams: headers, redirects, bodies that end early, objects that change, certificates,
interrupts and failed uploads."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import torch
import warm
from overwire.compat.tensorizer import (
    CryptographyError,
    DecryptionParams,
    TensorDeserializer,
    TensorSerializer,
    stream_io,
)
from overwire.stores import ObjectReader, ObjectWriter

DATA = np.random.default_rng(1).bytes(600_000)
SECRET = {"Authorization": "Bearer SECRET", "X-Api-Key": "SECRET", "Cookie": "SECRET"}

# The range of the engine's first request.
OPENING = "bytes=0-262143"


class Handler(BaseHTTPRequestHandler):
    """Serves DATA and its ranges. Calls `say` before each answer, and records requests."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, str]]
    say: Callable[[Handler, bytes], bool] | None  # returns True if it has answered the request
    tag: str = '"1"'
    data: bytes = DATA

    def do_GET(self) -> None:
        self.asked.append(dict(self.headers.items()))
        kind = type(self)
        if kind.say is not None and kind.say(self, kind.data):
            return
        self.part(kind.data)

    def part(self, data: bytes, cut: int | None = None, headers: dict[str, str] | None = None) -> None:
        begin, end = 0, len(data)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(len(data), int(last) + 1 if last else len(data))
            if begin >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - begin))
        for name, value in ({"ETag": type(self).tag} if headers is None else headers).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data[begin : end if cut is None else begin + cut])
        self.close_connection |= cut is not None

    def redirect(self, to: str, status: int = 302) -> None:
        self.send_response(status)
        self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(say: Any = None, tls: ssl.SSLContext | None = None, **more: Any) -> Iterator[tuple[str, type[Handler]]]:
    kind = type("OneHandler", (Handler,), {"asked": [], "say": staticmethod(say) if say else None, **more})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    server.block_on_close = False
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}", kind
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_headers_stay_with_the_first_host(status: int) -> None:
    """If a server redirects to another, the caller's headers are never sent there: not in the first request, when the
    stream seeks back, or when the stream is converted."""
    with contextlib.ExitStack() as stack:
        other, there = stack.enter_context(serving())
        first, here = stack.enter_context(serving(lambda h, _: h.redirect(other + "/x", status) or True))
        stream = stack.enter_context(stream_io.CURLStreamFile(first + "/x", headers=SECRET, buffer_size=1000))
        assert stream.read() == DATA
        assert stream.seek(5) == 5 and stream.read(10) == DATA[5:15]
        with stream._fork(7, 17) as fork:
            assert fork.read() == DATA[7:17]
        with pytest.raises(ValueError, match="Not a tensorizer file"):
            TensorDeserializer(stream, device="cpu")
        assert len(here.asked) >= 4 and len(there.asked) >= 4
        assert all(headers[name] == value for headers in here.asked for name, value in SECRET.items())
        assert not [headers for headers in there.asked if "SECRET" in str(headers)]


def test_headers_within_a_host() -> None:
    """After a redirect to another path of the same server, the headers are sent."""

    def say(h: Handler, _: bytes) -> bool:
        if h.path == "/x":
            h.redirect("/y")
        return h.path == "/x"

    with serving(say) as (url, kind):
        with stream_io.CURLStreamFile(url + "/x", 3, 9, headers=SECRET) as stream:
            assert stream.read() == DATA[3:9]
        assert all(headers["X-Api-Key"] == "SECRET" for headers in kind.asked) and len(kind.asked) >= 2


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "one-get"])
def test_headers_of_the_answer(ranges: bool, tmp_path: Path) -> None:
    """The headers of the answer can be read, even repeated ones. Content-Length is the length of the stream.
    `cache_status` of a file gives what a cache has answered."""
    def say(h: Handler, data: bytes) -> bool:
        if not ranges:
            del h.headers["Range"]
        h.part(data, headers={"ETag": '"1"', "X-Cache-Status": "HIT", "Via": "a", "via": "b"})
        return True

    (writer := TensorSerializer(path := tmp_path / "x.tensors")).write_state_dict({"a": torch.arange(9)})
    writer.close()
    with serving(say, data=path.read_bytes()) as (url, _):
        with stream_io.CURLStreamFile(url + "/x", 3, 9) as stream:
            found = stream.response_headers
            assert found["etag"] == '"1"' and found["Content-Length"] == "6" and found["Content-Range"] is None
            assert sorted(found.get_all("via")) == ["a", "b"]
        with stream_io.CURLStreamFile(url + "/x") as whole, TensorDeserializer(whole, device="cpu") as file:
            assert file.cache_status == "HIT" and torch.equal(file["a"], torch.arange(9))


def test_reads_at_the_end_equal_the_references() -> None:
    """Reads at the end of a range, after it and past the object, and messages after closing, are the same as in the
    reference, which needs curl."""
    theirs = pytest.importorskip("tensorizer.stream_io")
    modules = [stream_io, theirs] if shutil.which("curl") else [stream_io]

    def look(module: Any) -> list[Any]:
        seen: list[Any] = []

        def note(call: Callable[[], Any]) -> None:
            try:
                seen.append(call())
            except OSError:
                seen.append("OSError")

        with module.CURLStreamFile(url, 10, 110) as stream:
            for size in (60, 60, 60, 0):
                buffer = bytearray(size)
                note(lambda buffer=buffer: (stream.readinto(buffer), bytes(buffer), stream.tell()))
            note(lambda: stream.read(5))
        note(lambda: stream.read(5))
        with module.CURLStreamFile(url, len(DATA) - 10) as stream:
            note(lambda: stream.readinto(bytearray(20)))  # the object ends before the range
        with module.CURLStreamFile(url, len(DATA) - 10, len(DATA) + 10) as stream:
            note(lambda: stream.readinto(bytearray(15)))
        note(lambda: module.CURLStreamFile(url, len(DATA)))
        note(lambda: module.CURLStreamFile(url + "/none"))
        with module.CURLStreamFile(url) as stream:
            note(lambda: stream.response_headers["content-length"])
            note(lambda: stream.response_headers["ETag"])
        return seen

    def say(h: Handler, _: bytes) -> bool:
        if none := h.path.endswith("none"):
            h.send_error(404)
        return none

    with serving(say) as (url, _):
        url += "/x"
        ours, *other = map(look, modules)
    assert ours[0] == (60, DATA[10:70], 70) and ours[2] == (0, bytes(60), 110) and ours[-2:] == [str(len(DATA)), '"1"']
    assert other in ([], [ours])


@pytest.mark.parametrize("ranges", [True, False])
def test_a_body_that_ends_early(ranges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a body is truncated, the read is resumed. If every body is truncated, OSError is raised. A read never returns
    too few bytes."""
    cuts = iter((1000, 0, 300_000))
    data = DATA * 4

    def once(h: Handler, data: bytes) -> bool:
        if not ranges:
            del h.headers["Range"]
        elif (cut := next(cuts, None)) is not None:
            h.part(data, cut)
            return True
        return False

    def always(h: Handler, data: bytes) -> bool:
        if not ranges:
            del h.headers["Range"]
        h.part(data, 100)
        return True

    with serving(once, data=data) as (url, kind), stream_io.open_stream(url) as stream:
        assert stream.read() == data
        stream.seek(0)
        assert stream.read(3) == data[:3] and len(kind.asked) >= 2
    monkeypatch.setattr(stream_io, "_PATIENCE", {"timeout": 30, "retries": 2})
    with serving(always, data=data) as (url, _), pytest.raises(OSError, match="127.0.0.1"), stream_io.open_stream(url) as stream:
        stream.read()


@pytest.mark.parametrize("how", ["tag", "date", "size"])
def test_an_object_that_changes(how: str) -> None:
    """Seeking back after the object has changed reads the object that was opened, or raises an error."""
    new = bytes(len(DATA) + (how == "size"))
    was = {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"} if how == "date" else None
    now = {"Last-Modified": "Tue, 02 Jan 2024 00:00:00 GMT"} if how == "date" else None
    changed = threading.Event()

    def say(h: Handler, data: bytes) -> bool:
        h.part(new if changed.is_set() else data, headers=now if changed.is_set() else was)
        return True

    with serving(say) as (url, kind), stream_io.CURLStreamFile(url, buffer_size=100) as stream:
        first = stream.read(300_000)
        assert first == DATA[:300_000]
        stream.seek(0)
        assert stream.read(1000) == DATA[:1000]
        changed.set()
        kind.tag = '"2"' if how == "tag" else kind.tag
        stream.register_error_context("the note")
        stream.seek(5000)
        stream.seek(0)
        with pytest.raises(OSError, match="changed since it was opened(.|\n)*the note"):
            stream.read(1000)
        with stream_io.CURLStreamFile(url) as again:
            assert again.read() == new


def test_readers_that_seek(tmp_path: Path) -> None:
    """ObjectReader can seek back in a local file, and notices a change. It cannot seek back in several objects."""
    path = tmp_path / "x"

    def put(data: bytes, day: int) -> None:
        (tmp_path / "new").write_bytes(data)
        os.utime(tmp_path / "new", (day, day))
        os.replace(tmp_path / "new", path)

    put(b"b" * 100, 2)
    with ObjectReader(path) as reader:
        assert reader.read(1) == b"b" and reader.found() is not None
        reader.seek(0)
        assert reader.readall() == b"b" * 100 and reader.read() == b""
        put(b"c" * 100, 3)
        reader.seek(0)
        with pytest.raises(ow.CorruptError, match="changed since it was opened"):
            reader.read(1)
    with ObjectReader([path, path]) as both:
        assert both.readall() == b"c" * 200
        with pytest.raises(io.UnsupportedOperation):
            both.seek(0)


def test_stalled_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a server stops answering, the stream raises OSError with the server's name."""
    over = threading.Event()

    def say(h: Handler, data: bytes) -> bool:
        if h.headers["Range"] != OPENING:
            over.wait(60)  # no answer at all
        else:
            h.part(data)
        return True

    def opened(url: str) -> Any:
        for timeout in (0.2, 2):  # on a busy machine, opening may take longer
            monkeypatch.setattr(stream_io, "_PATIENCE", {"timeout": timeout, "retries": 1})
            with contextlib.suppress(OSError):
                return stream_io.open_stream(url)
        monkeypatch.setattr(stream_io, "_PATIENCE", {"timeout": 20, "retries": 1})
        return stream_io.open_stream(url)

    try:
        with serving(say) as (url, _), opened(url) as stream, pytest.raises(OSError, match="127.0.0.1.*timed out"):
            stream.read()
    finally:
        over.set()
    with serving(lambda h, _: h.connection.close() or True) as (url, _), pytest.raises(OSError, match="Failed to open stream"):
        stream_io.open_stream(url)


INTERRUPTED = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from overwire.compat.tensorizer import stream_io
try:
    print("begun", flush=True)
    with stream_io.CURLStreamFile(sys.argv[1]) as stream:
        print("opened", flush=True)
        stream.read()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("when", ["opening", "reading"])
def test_interrupted(when: str) -> None:
    """Ctrl-C ends the opening of a stream and reads from a server that does not answer."""
    silent, over = threading.Event(), threading.Event()

    def say(h: Handler, data: bytes) -> bool:
        if when == "reading" and h.headers["Range"] == OPENING:
            return False
        silent.set()
        over.wait(120)
        return True

    with serving(say) as (url, _):
        command = [sys.executable, "-c", INTERRUPTED, url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            if when == "reading":
                assert process.stdout.readline() == "opened\n"
            assert silent.wait(60)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)  # without the signal, the program would wait for 90 s
        finally:
            over.set()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert said == "interrupted\n" and process.returncode == 0


# Tests with TLS.


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """Returns a self-signed certificate for 127.0.0.1 and the server's TLS context."""
    folder = tmp_path_factory.mktemp("authority")
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl to make the certificate")
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    (folder / "path").mkdir()
    shutil.copy(folder / "cert.pem", folder / "path" / "one.pem")
    return folder, context


def test_certificates(authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> None:
    """All three forms of CAInfo work. Environment variables are read when a stream is opened, and its later connections
    use the same values."""
    folder, context = authority
    variables = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    ways = [{"cacert": str(folder / "cert.pem")}, {"capath": folder / "path"}, {"allow_untrusted": True}]
    with serving(tls=context) as (url, _):
        with pytest.raises(OSError, match="Failed to open stream"):
            stream_io.open_stream(url)
        for way in ways:
            with stream_io.open_stream(url, certificate_handling=stream_io.CAInfo(**way)) as stream:
                assert stream.read(5) == DATA[:5]
                stream.seek(500_000)
                stream.seek(1)
                assert stream.read() == DATA[1:]
                with stream._fork(2, 4) as fork:
                    assert fork.read() == DATA[2:4]
                with pytest.raises(ValueError, match="Not a tensorizer file"):
                    TensorDeserializer(stream, device="cpu")
        for name in variables:
            monkeypatch.setenv(name, str(folder / ("path" if name.endswith("DIR") else "cert.pem")))
            with stream_io.CURLStreamFile(url, buffer_size=10) as stream:
                monkeypatch.delenv(name)
                assert stream.read(1000) == DATA[:1000]
                stream.seek(3)
                assert stream.read(1000) == DATA[3:1003]
            with pytest.raises(OSError, match="Failed to open stream"):
                stream_io.CURLStreamFile(url)


def test_certificates_without_tls(authority: tuple[Path, ssl.SSLContext], tmp_path: Path) -> None:
    """An http:// endpoint accepts all forms of CAInfo, even without a certificate in them. After a redirect to https
    they are used."""
    folder, context = authority
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.pem").write_text("none")
    cert = {"cacert": folder / "cert.pem"}
    ways: list[dict[str, Any]] = [cert, {"capath": folder / "path"}, {"allow_untrusted": True}]
    ways += [{"cacert": str(tmp_path / "none.pem")}, {"capath": str(tmp_path / "empty")}]
    over = serving(lambda h, _: h.redirect(secure) or True)
    with serving() as (url, _), serving(tls=context) as (secure, _), over as (to, _):
        for way in ways:
            with stream_io.open_stream(url, certificate_handling=stream_io.CAInfo(**way)) as stream:
                assert stream.read(5) == DATA[:5]
        with stream_io.open_stream(to, certificate_handling=stream_io.CAInfo(**cert)) as stream:
            assert stream.read(5) == DATA[:5]


def test_redirects_from_https_to_http_are_refused(authority: tuple[Path, ssl.SSLContext]) -> None:
    """A redirect from https to http is refused."""
    _, context = authority
    with serving() as (plain, kind), serving(lambda h, _: h.redirect(plain) or True, context) as (url, _):
        with pytest.raises(OSError, match="https to http"):
            stream_io.CURLStreamFile(url, certificate_handling=stream_io.CAInfo(allow_untrusted=True))
        assert not kind.asked


# Tests with S3.


def bare(monkeypatch: pytest.MonkeyPatch, home: Path, endpoint: str) -> None:
    """Prepares an environment that has an endpoint but no credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setattr(stream_io, "_s3_default_config_paths", ())


def test_public_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials, requests for an object are unsigned, whether it is read as a stream, from a stream or by
    URI. Credentials that the caller passes are always used."""
    serializer = TensorSerializer(tmp_path / "x.tensors")
    serializer.write_tensor(0, "a", 0, np.arange(1000))  # type: ignore[arg-type]
    serializer.close()
    whole = (tmp_path / "x.tensors").read_bytes()

    def say(h: Handler, _: bytes) -> bool:
        signed = "Authorization" in h.headers or "X-Amz-" in h.path
        h.send_error(403) if signed or not h.path.startswith("/public/x.tensors") else h.part(whole)
        return True

    with serving(say) as (url, _):
        bare(monkeypatch, tmp_path, url)
        with stream_io.open_stream("s3://public/x.tensors") as stream:
            assert stream.read(5) == b"|TZR|"
        for source in (stream_io.open_stream("s3://public/x.tensors"), "s3://public/x.tensors"):
            with TensorDeserializer(source, device="cpu") as found:
                assert found["a"].tolist() == list(range(1000))
        with pytest.raises(OSError, match="s3://public/x.tensors"):
            stream_io.open_stream("s3://public/x.tensors", s3_access_key_id="K", s3_secret_access_key="S")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S")
        with pytest.raises(OSError, match="s3://public/x.tensors"):
            stream_io.open_stream("s3://public/x.tensors")


class Refusing(Handler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "no" in self.path:
            self.send_error(403)
        else:
            self.asked.append({"path": self.path})
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_POST = do_PUT


LEFT_OPEN = """
import sys
from overwire.compat.tensorizer import stream_io
given = {"s3_access_key_id": "K", "s3_secret_access_key": "S", "s3_endpoint": sys.argv[1], "force_http": True}
kept = [stream_io.open_stream(f"s3://bucket/{name}", "wb", **given) for name in ("no1", "yes1", "no2", "yes2")]
for stream in kept:
    stream.write(b"x")
"""


def test_uploads_that_fail(tmp_path: Path) -> None:
    """Closing a stream reports that its upload has failed. At exit, a failed upload does not stop the others."""
    kind = type("OneRefusing", (Refusing,), {"asked": [], "say": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    given = {"s3_access_key_id": "K", "s3_secret_access_key": "S", "s3_endpoint": url, "force_http": True}
    try:
        for end in ("close", "exit", "serializer"):
            stream = stream_io.open_stream("s3://bucket/no", "wb", **given)
            stream.write(b"x" * 100_000)
            with pytest.raises(ow.AccessError, match="s3://bucket/no"):
                if end == "close":
                    stream.close()
                elif end == "exit":
                    with stream:
                        pass
                else:
                    TensorSerializer(stream).close()
            assert stream.closed
            stream.close()
        with pytest.raises(ow.AccessError):
            ObjectWriter("s3://bucket/no", storage_options={"endpoint_url": url, "key": "K", "secret": "S"}).close()
        done = warm.fresh(["-c", LEFT_OPEN, url], timeout=120)
        assert "AccessError" in done.stderr
        assert sorted(headers["path"].partition("?")[0] for headers in kind.asked) == ["/bucket/yes1", "/bucket/yes2"]
    finally:
        server.shutdown()
        server.server_close()


def test_errors_of_a_callers_file() -> None:
    """If a write to a caller's file object without a descriptor fails, the object's own error is raised."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if len(data) > 1_000_000:
                raise OSError("it is full")
            return super().write(data)

    serializer = TensorSerializer(Full())
    with pytest.raises(OSError, match="it is full"):
        serializer.write_tensor(0, "a", 0, np.zeros(1_000_000))  # type: ignore[arg-type]


def test_only_the_engine_opens_connections() -> None:
    """No Python module opens connections, except distributed/group.py between ranks."""
    other = {"aiohttp", "boto3", "botocore", "ftplib", "http", "httpx", "requests", "socket", "ssl", "urllib3"}
    package = Path(ow.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if path.name != "group.py":
                    assert name.partition(".")[0] not in other, path
                assert not name.startswith(("urllib.request", "urllib.error")), path


def test_to_redis_refuses_a_truncated_file(tmp_path: Path) -> None:
    """If a file is shorter than its index says, to_redis stores no truncated value."""
    path = tmp_path / "x.tensors"
    ow.save_file({"a": np.arange(40_000, dtype=np.int64), "b": np.arange(9.0)}, path)

    class Client(dict[str, bytes]):
        set = dict.__setitem__
        exists = dict.__contains__

    whole, cut = Client(), Client()
    with TensorDeserializer(path, lazy_load=True) as reader:
        reader.to_redis(whole, "m")
        os.truncate(path, path.stat().st_size - 1000)
        with pytest.raises(ow.CorruptError):
            reader.to_redis(cut, "m")
    assert whole and all(whole[key] == value for key, value in cut.items())


@pytest.mark.parametrize("lazy", [False, True])
def test_a_file_is_opened_and_indexed_once(tmp_path: Path, lazy: bool) -> None:
    """Whatever a TensorDeserializer loads, it requests the beginning of the file once. Its results are right, and a key
    that the file does not need is refused."""
    want = {f"t{n}": torch.randn(300 + n, 500) for n in range(5)}
    serializer = TensorSerializer(str(tmp_path / "x.tensors"))
    serializer.write_state_dict(want)
    serializer.close()
    with serving(data=(tmp_path / "x.tensors").read_bytes()) as (url, server):
        for check in (False, True, "crc32"):
            server.asked.clear()
            with TensorDeserializer(url + "/x", device="cpu", lazy_load=lazy, verify_hash=check) as file:
                got = {"t3": file["t3"], **dict(file.items())}
            assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
            begins = [asked for asked in server.asked if asked.get("Range", "bytes=0-").startswith("bytes=0-")]
            assert len(begins) == 1, (check, server.asked)
        key = DecryptionParams.from_key(bytes(32))
        with pytest.raises(CryptographyError, match="not be encrypted|not flagged"):
            TensorDeserializer(url + "/x", device="cpu", encryption=key)
