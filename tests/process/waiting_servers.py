"""Servers that never send a complete answer, for waiting_worker.py."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time

HEADER = json.dumps({"a": {"dtype": "U8", "shape": [2 << 20], "data_offsets": [0, 2 << 20]}}).encode()
MODEL = (len(HEADER) + -len(HEADER) % 8).to_bytes(8, "little") + HEADER + b" " * (-len(HEADER) % 8) + bytes(2 << 20)

FIRST = (
    f'HTTP/1.1 206 Partial Content\r\nETag: "1"\r\nContent-Range: bytes 0-262143/{len(MODEL)}\r\n'
    "Content-Length: 262144\r\n\r\n"
).encode()


class Server(threading.Thread):
    """Accepts connections, and answers according to its kind:

        silent    sends nothing
        trickle   sends a header, then a byte now and then
        headers   sends an endless header
        line      sends an endless Redis line
        stops     sends the first 256 KiB of a model, then nothing
        store     answers the start of an S3 upload, then sends nothing
    """

    def __init__(self, kind: str) -> None:
        super().__init__(daemon=True)
        self.kind = kind
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        self.peers: set[tuple[str, int]] = set()  # peers of all connections so far
        self.reached = threading.Event()
        self.open: dict[socket.socket, bytes] = {}
        self.dribbles: set[socket.socket] = set()
        self.start()

    def reset(self) -> None:
        """Clears the recorded connections."""
        self.peers.clear()
        self.reached.clear()

    def drained(self) -> int:
        """Waits until all connections are closed, and returns how many there were. Opens a connection itself, which is
        accepted after all waiting ones."""
        with socket.create_connection(("127.0.0.1", self.port)) as mark:
            while mark.getsockname() not in self.peers:
                time.sleep(0.005)
        while self.open:
            time.sleep(0.005)
        return len(self.peers) - 1

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self.listener, *self.open], [], [], 0.05)
            for sock in ready:
                if sock is self.listener:
                    got, peer = sock.accept()
                    self.open[got] = b""  # before the answer, so that drained() counts it as open
                    self.peers.add(peer)
                    continue
                try:
                    data = sock.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    del self.open[sock]
                    self.dribbles.discard(sock)
                    sock.close()
                elif sock not in self.dribbles:
                    self.open[sock] += data
                    self.answer(sock)
            for sock in list(self.dribbles):
                with contextlib.suppress(OSError):
                    sock.send(b"X-More: and more\r\n" if self.kind == "headers" else b"x")

    def answer(self, sock: socket.socket) -> None:
        text = self.open[sock]
        if text.startswith((b"GET", b"HEAD", b"PUT", b"POST", b"DELETE")) and b"\r\n\r\n" not in text:
            return
        self.open[sock] = b""
        if self.kind == "stops" and b"range: bytes=0-262143" in text.lower():
            sock.sendall(FIRST + MODEL[:262144])
            return
        if self.kind == "store" and text.startswith(b"POST") and b"?uploads" in text:
            body = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        if self.kind == "trickle":
            sock.sendall(FIRST)
            self.dribbles.add(sock)
        elif self.kind == "headers":
            sock.sendall(b"HTTP/1.1 200 OK\r\n")
            self.dribbles.add(sock)
        elif self.kind == "line":
            sock.sendall(b"+")
            self.dribbles.add(sock)
        self.reached.set()
