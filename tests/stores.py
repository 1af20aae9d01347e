"""Starts real servers for tests: versitygw for S3, and redis-server. Both check credentials."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parent.parent

S3_KEY = "AKIAOVERWIRETESTKEY1"
S3_SECRET = "planted/Secret+OfTheS3Server0123456789ab"
REDIS_PASSWORD = "planted-Redis-Password-0123456789"
# No log, message or trace may contain any of these.
SECRETS = ("planted", S3_KEY, "X-Amz-Signature", "Credential=")


def found(name: str) -> str | None:
    """Returns the path of a program in build/bin or on PATH."""
    own = ROOT / "build" / "bin" / name
    return str(own) if own.exists() else shutil.which(name)


def _program(name: str, how: str) -> str:
    path = found(name)
    if not path:
        pytest.skip(f"no {name}: {how}")
    return path


# A loopback address that no other test process uses, so that a free port stays free until a server binds it.
HOST = f"127.{64 + (os.getpid() >> 16 & 63)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"


def _port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def _running(argv: list[str], port: int, **env: str) -> Iterator[None]:
    with (
        tempfile.TemporaryFile() as log,
        processes.started(argv, env=os.environ | env, stdout=log, stderr=log, stdin=subprocess.DEVNULL) as process,
    ):
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((HOST, port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    log.seek(0)
                    raise AssertionError(f"{argv[0]} did not start: {log.read().decode()}") from None
                time.sleep(0.02)
        yield


@contextmanager
def s3() -> Iterator[tuple[dict[str, object], Path]]:
    """Starts an S3 server with one bucket, "models", and yields its storage options and its folder."""
    program = _program("versitygw", "`make build/bin/versitygw` builds it, as `make test` does")
    for parent in (None, "/dev/shm"):
        root = Path(tempfile.mkdtemp(prefix="overwire-s3-", dir=parent))
        try:
            os.setxattr(root, "user.overwire", b"x")
            break
        except OSError:
            shutil.rmtree(root)
    else:
        pytest.skip("no folder here has extended attributes, which versitygw needs")
    try:
        (root / "data" / "models").mkdir(parents=True)
        (root / "iam").mkdir()
        port = _port()
        argv = [program, "--port", f"{HOST}:{port}", "--keep-alive", "--quiet"]
        argv += ["--iam-dir", str(root / "iam"), "posix", str(root / "data")]
        with _running(argv, port, ROOT_ACCESS_KEY=S3_KEY, ROOT_SECRET_KEY=S3_SECRET):
            yield {"endpoint_url": f"http://{HOST}:{port}", "key": S3_KEY, "secret": S3_SECRET}, root / "data" / "models"
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Front(BaseHTTPRequestHandler):
    """A proxy in front of a store. It keeps the Host header, because that is signed. It records each request as
    (method, path with query, headers, status, size of the answer's body), and refuses requests that the test
    selects."""

    protocol_version = "HTTP/1.1"
    behind: str
    asked: list[tuple[str, str, Message, int, int]]
    refuse: str  # requests with this text in their path are answered with AccessDenied
    methods: tuple[str, ...]  # only these methods are refused; empty means all
    wrong: int  # how many of the next GET answers of 512 KiB or more get one wrong byte

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.refuse and self.refuse in self.path and self.command in (self.methods or (self.command,)):
            status, headers, answer = 403, {}, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        else:
            behind = http.client.HTTPConnection(self.behind, timeout=30)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            behind.request(self.command, self.path, body, headers)
            got = behind.getresponse()
            status, headers, answer = got.status, dict(got.headers), got.read()
            behind.close()
        if self.wrong and self.command == "GET" and status < 300 and len(answer) >= 1 << 19:
            type(self).wrong -= 1
            answer = answer[:-9] + bytes([answer[-9] ^ 1]) + answer[-8:]
        self.asked.append((self.command, self.path, self.headers, status, len(answer)))
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server", *(["content-length"] if answer else [])):
                self.send_header(name, value)
        if answer or "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        with contextlib.suppress(ConnectionError):  # the client may have disconnected
            self.end_headers()
            self.wfile.write(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def front(url: str) -> Iterator[tuple[str, type[Front]]]:
    """Yields the URL of a `Front` for a server, and the proxy class, which has its records and settings."""
    kind = type("OneFront", (Front,), {"behind": url.split("/")[2], "asked": [], "refuse": "", "methods": (), "wrong": 0})
    waiting = {"request_queue_size": 128}  # connections of a busy machine; more are reset
    server = type("Server", (ThreadingHTTPServer,), waiting)(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", kind
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def redis(password: str | None = REDIS_PASSWORD, config: Path | None = None) -> Iterator[tuple[dict[str, object], str]]:
    """Starts Redis, and yields its storage options and the prefix of its URIs. password: None for a server without a
    password. config: a file that contains the password and is used instead of it."""
    program = _program("redis-server", "a package of the system (Debian: redis-server)")
    with tempfile.TemporaryDirectory() as folder:
        port = _port()
        argv = [program, *([str(config)] if config else [])]
        argv += ["--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", folder]
        if config is None:
            argv += ["--requirepass", password or ""]
        with _running(argv, port):
            yield {"password": password} if password else {}, f"redis://{HOST}:{port}/"
