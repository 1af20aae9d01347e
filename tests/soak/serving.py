"""Loops over stores: servers that are slow, cut answers short or send wrong ones, and real Redis and S3 servers."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import overwire as ow

from .models import Tensors, random_tensors, store, version, which
from .outcomes import Failure, Round

# Loads over a network may raise these errors. CorruptError means that the object or the server's answer has changed.
REFUSALS = (
    ow.IOFailure, ow.DeadlineError, ow.CorruptError, ow.FormatError, ow.NotFoundError, ow.NotSupportedError,
    ow.AccessError,
)


class Handler(BaseHTTPRequestHandler):
    """Serves ranges of one object. With the probability `chance`, an answer has one of FAULTS."""

    protocol_version = "HTTP/1.1"
    objects: list[tuple[str, bytes]] = []  # pairs (ETag, bytes); only the first is served
    chance = 0.0
    faults: tuple[str, ...] = ()
    rng: random.Random

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            self._answer()

    def _answer(self) -> None:
        etag, whole = self.objects[0]
        fault = self.rng.choice(self.faults) if self.rng.random() < self.chance else ""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first, last = 0, len(whole) - 1
        if asked and fault != "whole":
            first = int(asked[1])
            last = min(last, int(asked[2] or last))
        if fault in ("503", "500", "429", "404"):
            self.send_response(int(fault))
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "noise":
            self.wfile.write(self.rng.randbytes(200))
            self.close_connection = True
            return
        if first > last:
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = whole[first : last + 1]
        if fault == "bytes":
            body = self.rng.randbytes(len(body))
        self._send(fault, etag, whole, asked is not None and fault != "whole", first, last, body)

    def _send(self, fault: str, etag: str, whole: bytes, partial: bool, first: int, last: int, body: bytes) -> None:
        self.send_response(206 if partial else 200)
        self.send_header("ETag", f'"{self.rng.random()}"' if fault == "etag" else etag)
        self.send_header("Accept-Ranges", "bytes")
        shift = self.rng.choice((-1, 1, 100)) if fault == "range" else 0
        total = len(whole) + (self.rng.choice((-1, 1, 1 << 40)) if fault == "total" else 0)
        if partial:
            self.send_header("Content-Range", f"bytes {first + shift}-{last + shift}/{total}")
        if fault == "gzip":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body) + (self.rng.choice((-1, 1, 1000)) if fault == "length" else 0)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("cut", "stall"):
            self.wfile.write(body[: self.rng.randrange(len(body) + 1)])
            self.wfile.flush()
            if fault == "stall":
                time.sleep(1.5)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(body)
        if fault == "length":
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


FAULTS = ("cut", "cut", "stall", "drop", "503", "500", "429", "404", "whole", "length", "range", "total", "etag", "gzip", "noise")


@contextlib.contextmanager
def serving(
    rng: random.Random, data: bytes, chance: float, faults: tuple[str, ...]
) -> Iterator[tuple[str, type[Handler]]]:
    """Yields the URL of a server for an object, and the handler class, which has the object."""
    kind = type("OneHandler", (Handler,), {"objects": [('"0"', data)], "chance": chance, "faults": faults, "rng": rng})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/model.safetensors", kind
    finally:
        server.shutdown()
        server.server_close()


def servers(round_: Round) -> None:
    """If a server cuts, stalls or refuses an answer, sends a wrong length, range or ETag, or replaces its object, a
    load gets an error of a known class or one complete version."""
    rng = round_.rng
    base = random_tensors(rng, rng.choice((1 << 12, 1 << 18, 1 << 22)))
    versions = {number: version(base, number) for number in range(3)}
    # Without checksums, a client cannot detect wrong bytes.
    form = rng.choice(("compressed", "plain"))
    faults = (*FAULTS, "bytes") if form == "compressed" else FAULTS
    faults = tuple(rng.sample(faults, rng.randint(1, 5)))
    bodies = [store(rng, round_.folder / f"v{number}", versions[number], form).path.read_bytes() for number in versions]
    with serving(random.Random(round_.seed), bodies[0], rng.choice((0.05, 0.3, 1.0)), faults) as (url, kind):
        loaders = [partial(_load, url, versions, round_.folder / "cache") for _ in range(rng.randint(1, 3))]
        replacing = [partial(_replace, kind, bodies)] if rng.random() < 0.5 else []
        round_.doing = f"{form}, {', '.join(faults)}"
        round_.beside(*loaders, *replacing)


def _load(url: str, versions: dict[int, Tensors], cache: Path, round_: Round, rng: random.Random) -> None:
    options: dict[str, Any] = {"timeout": 0.5, "retries": rng.randint(0, 4)}
    if rng.random() < 0.3:
        options["cache"] = str(cache)
    with round_.may_raise(*REFUSALS):
        if rng.random() < 0.3:
            loaded = dict(ow.stream(url, framework="pt", storage_options=options))
        else:
            loaded = ow.load_file(url, framework="pt", storage_options=options)
        which(loaded, versions)
        round_.count("loads")


def _replace(kind: type[Handler], bodies: list[bytes], round_: Round, rng: random.Random) -> None:
    number = rng.randrange(len(bodies))
    kind.objects[0] = (f'"{number}"', bodies[number])
    round_.count("replaced objects")
    time.sleep(rng.random() * 0.3)


def stores(round_: Round) -> None:
    """One or two writers replace an object in Redis or S3 and are killed. Readers get one complete version or an error
    that the object was replaced. Afterwards, the object is complete. Servers that are not installed are skipped."""
    import pytest
    import stores as real

    rng = round_.rng
    base = random_tensors(rng, rng.choice((1 << 12, 1 << 20)))
    versions = {number: version(base, number) for number in range(3)}
    name = rng.choice(("redis", "s3"))
    with contextlib.ExitStack() as stack:
        try:
            options, place = stack.enter_context(real.redis() if name == "redis" else real.s3())
        except pytest.skip.Exception:
            round_.count(f"{name} is not installed")
            return
        uri = f"{place}model.safetensors" if name == "redis" else "s3://models/model.safetensors"
        round_.in_child(lambda child: _put(child, uri, options, versions, 0))
        while round_.lasts():
            writers = [
                round_.child(lambda child: _put_on(child, uri, options, versions)) for _ in range(rng.randint(1, 2))
            ]
            reader = round_.child(lambda child: _get_on(child, uri, options, versions))
            time.sleep(rng.random() * 0.5)
            for writer in writers:
                writer.kill()
            reader.result()
            round_.in_child(lambda child: _get(child, uri, options, versions))
            round_.count(f"kills: {name}")


def _put(round_: Round, uri: str, options: Any, versions: dict[int, Tensors], number: int) -> None:
    ow.save_file(versions[number], uri, compress=round_.rng.random() < 0.5, storage_options=options)
    round_.count("saves")


def _put_on(round_: Round, uri: str, options: Any, versions: dict[int, Tensors]) -> None:
    while True:
        _put(round_, uri, options, versions, round_.rng.randrange(len(versions)))


def _get(round_: Round, uri: str, options: Any, versions: dict[int, Tensors]) -> None:
    which(ow.load_file(uri, framework="pt", storage_options=options), versions)
    round_.count("loads")


def _get_on(round_: Round, uri: str, options: Any, versions: dict[int, Tensors]) -> None:
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        with round_.may_raise(ow.CorruptError):  # the object may be replaced during the read
            _get(round_, uri, options, versions)
    if not round_.counts["loads"] and not round_.counts["refusals"]:
        raise Failure("hang", "no load has ended in half a second")
