"""Counts the bytes that ranks read and that a server sends, for steps of group_worker.py."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from overwire.distributed import load as relays


def reads(group: Any) -> Callable[[], list[int]]:
    """Returns a function that returns how many stored bytes each rank has read in group loads since the last call."""
    mine: list[int] = []
    done = relays.Job.done

    def noted(job: Any) -> None:
        report = job.report() or {}
        if "ours" in report:  # only a group load's report has this field
            mine.append(report["stages"]["read_bytes"])
        done(job)

    relays.Job.done = noted  # type: ignore[method-assign]

    def since() -> list[int]:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, sum(mine), group=group)
        mine.clear()
        return every

    return since


@contextmanager
def counted(path: Path, sent: list[int], host: str = "127.0.0.1") -> Iterator[str]:
    """Serves a file over HTTP and records the body size of each answer."""
    data = path.read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(b"", len(data))

        def do_GET(self) -> None:
            first, _, last = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")
            body = data[int(first) : int(last) + 1 if last else None]
            sent.append(len(body))
            self.answer(body, len(body), f"bytes {first}-{int(first) + len(body) - 1}/{len(data)}")

        def answer(self, body: bytes, size: int, span: str = "") -> None:
            self.send_response(206 if span else 200)
            for name, value in (("Content-Length", str(size)), ("ETag", '"one"'), ("Accept-Ranges", "bytes"), ("Content-Range", span)):
                if value:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer((host, 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://{host}:{server.server_address[1]}/{path.name}"
        finally:
            server.shutdown()
            thread.join()
