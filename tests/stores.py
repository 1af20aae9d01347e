"""Real servers for tests: versitygw as S3, redis-server. Both check passwords."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

S3_KEY = "AKIAOVERWIRETESTKEY1"
S3_SECRET = "planted/Secret+OfTheS3Server0123456789ab"
REDIS_PASSWORD = "planted-Redis-Password-0123456789"
#: What no text may show.
SECRETS = ("planted", S3_KEY, "X-Amz-Signature", "Credential=")


def found(name: str) -> str | None:
    """The path of a program: in build/bin, or as the shell finds it."""
    own = ROOT / "build" / "bin" / name
    return str(own) if own.exists() else shutil.which(name)


def _program(name: str, how: str) -> str:
    path = found(name)
    if not path:
        pytest.skip(f"no {name}: {how}")
    return path


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def _running(argv: list[str], port: int, **env: str) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, env=os.environ | env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if time.monotonic() > until or process.poll() is not None:
                        log.seek(0)
                        raise AssertionError(f"{argv[0]} did not start: {log.read().decode()}") from None
                    time.sleep(0.02)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def s3() -> Iterator[tuple[dict[str, object], Path]]:
    """Storage options of a server with one bucket, "models", and its folder."""
    program = _program("versitygw", "`make more` builds it into build/bin")
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
        argv = [program, "--port", f"127.0.0.1:{port}", "--keep-alive", "--quiet"]
        argv += ["--iam-dir", str(root / "iam"), "posix", str(root / "data")]
        with _running(argv, port, ROOT_ACCESS_KEY=S3_KEY, ROOT_SECRET_KEY=S3_SECRET):
            yield {"endpoint_url": f"http://127.0.0.1:{port}", "key": S3_KEY, "secret": S3_SECRET}, root / "data" / "models"
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def redis(password: str | None = REDIS_PASSWORD, config: Path | None = None) -> Iterator[tuple[dict[str, object], str]]:
    """Storage options of a server, and what its URIs begin with. None: it asks for no password. config: a file that says
    which, in place of `password`."""
    program = _program("redis-server", "a package of the system (Debian: redis-server)")
    with tempfile.TemporaryDirectory() as folder:
        port = _port()
        argv = [program, *([str(config)] if config else [])]
        argv += ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        if config is None:
            argv += ["--requirepass", password or ""]
        with _running(argv, port):
            yield {"password": password} if password else {}, f"redis://127.0.0.1:{port}/"
