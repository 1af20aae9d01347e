"""Tests which credentials and headers a server gets if another server redirects load_file, `fetch` or S3 to it."""

from __future__ import annotations

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

SECRET = "planted-s3cr3t"


class Server:
    """A server that supports range requests. `answer` returns what is sent for a path: bytes, or status, headers and
    body, or None for 404. `asked` records each path with the request's headers."""

    def __init__(self, host: str = "127.0.0.1", answer: Callable[[str], Any] = lambda path: None) -> None:
        self.answer, self.asked, self.headers = answer, list[tuple[str, dict[str, str]]](), dict[str, str]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                said = outer.answer(self.path)
                status, headers, body = (
                    (404, {}, b"") if said is None else said if isinstance(said, tuple) else (200, {}, said)
                )
                headers = {**outer.headers, **headers}
                span = self.headers.get("Range", "")
                if status == 200 and span.startswith("bytes="):
                    begin, _, end = span[6:].partition("-")
                    part = body[int(begin) : int(end) + 1]
                    headers["Content-Range"] = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(body)}"
                    status, body = 206, part
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_HEAD = do_PUT = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def servers() -> Iterator[Callable[..., Server]]:
    """Makes servers that are closed after the test."""
    made: list[Server] = []

    def make(*args: Any) -> Server:
        made.append(Server(*args))
        return made[-1]

    yield make
    for server in made:
        server.close()


def saved(path: Path, seed: int = 1, n: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    """Saves a plain file with tensors of 1 MB, which take several requests each."""
    made = np.random.default_rng(seed)
    tensors = {f"layer.{i}": made.normal(0, 0.02, (250_000,)).astype(np.float32) for i in range(n)}
    ow.save_file(tensors, path, compress=False)
    return tensors


def same(got: Any, want: Any) -> None:
    assert set(got) == set(want)
    for name in want:
        assert got[name].tobytes() == want[name].tobytes(), name


def test_within_a_private_network(servers: Callable[..., Server], tmp_path: Path) -> None:
    """After a redirect to another server of the same machine, a file is loaded over several connections, and the second
    server gets none of the caller's credentials."""
    want = saved(tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    store = servers("127.0.0.1", lambda path: data)
    store.headers["ETag"] = '"one"'
    first = servers("127.0.0.1", lambda path: (302, {"Location": store.url + "/blob"}, b""))
    options = {"token": SECRET, "headers": {"X-Key": SECRET, "Cookie": f"id={SECRET}"}}
    for _ in range(2):
        same(ow.load_file(f"{first.url}/m.safetensors?sig={SECRET}", framework="np", storage_options=options), want)
        same(dict(ow.stream(f"{first.url}/m.safetensors?sig={SECRET}", framework="np", storage_options=options)), want)
    assert len(store.asked) >= 8 and all(SECRET in str(said) for said in first.asked)
    assert not any(SECRET in str(said) or "referer" in said[1] for said in store.asked)
    command = [sys.executable, "-m", "overwire", "fetch", f"{first.url}/m.safetensors"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == data


def test_forbidden_redirects(servers: Callable[..., Server]) -> None:
    """A redirect to a cloud metadata service, to a file, or in an endless loop is refused, and the error shows no
    secret."""
    for location in (
        "http://169.254.169.254/latest",
        "http://[fe80::1]/",
        "http://[64:ff9b::a9fe:a9fe]/x",
        "file:///etc/passwd",
        "s3://b/k",
    ):
        server = servers("127.0.0.1", lambda path, to=location: (302, {"Location": to}, b""))
        with pytest.raises(ow.AccessError, match="refused") as caught:
            ow.load_file(f"{server.url}/m.safetensors?sig={SECRET}", framework="np", storage_options={"token": SECRET, "timeout": 5})
        assert SECRET not in repr(caught.value)
    server = servers("127.0.0.1", lambda path: (307, {"Location": path + "x"}, b""))
    with pytest.raises(ow.OverwireError, match="more than 5 redirects"):
        ow.read_bytes(server.url + "/x", storage_options={"retries": 0})


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_s3(servers: Callable[..., Server], code: int) -> None:
    """If an S3 store redirects a read, write or list, this is an error, so keys and tokens reach only the store."""
    other = servers("127.0.0.1", lambda path: b"x" * 100)
    store = servers("127.0.0.1", lambda path: (code, {"Location": f"{other.url}/?{SECRET}"}, b""))
    options = {"endpoint_url": store.url, "key": "AKIAPLANTED", "secret": SECRET, "token": SECRET, "retries": 0}
    for call in (
        lambda: ow.load_file("s3://models/m.safetensors", framework="np", storage_options=options),
        lambda: ow.load_file("s3://models/folder/", framework="np", storage_options=options),
        lambda: ow.save_file({"x": np.zeros(3)}, "s3://models/x.safetensors", storage_options=options),
    ):
        with pytest.raises(ow.AccessError, match="redirect") as caught:
            call()
        assert SECRET not in repr(caught.value)
    assert store.asked and not other.asked


def test_s3_without_credentials(
    servers: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials, a public object is read by unsigned requests. Unreadable certificates are only an error with
    TLS. The environment is read at each call."""
    want = saved(tmp_path / "m.safetensors", n=1)
    data = (tmp_path / "m.safetensors").read_bytes()
    store = servers("127.0.0.1", lambda path: data)
    store.headers["ETag"] = '"one"'
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none.pem"))
    same(ow.load_file("s3://models/m.safetensors", framework="np", storage_options={"endpoint_url": store.url}), want)
    same(ow.load_file(store.url + "/m.safetensors", framework="np"), want)
    assert not any("authorization" in said for _, said in store.asked)
    with pytest.raises(ow.NotFoundError, match=r"none\.pem"):
        ow.load_file(store.url.replace("http", "https") + "/m.safetensors", framework="np", storage_options={"retries": 0})
    store.answer = lambda path: (403, {}, b"<Error><Code>AccessDenied</Code></Error>")
    with pytest.raises(ow.AccessError, match=r"no credentials.*AccessDenied"):
        ow.load_file("s3://models/m.safetensors", framework="np", storage_options={"endpoint_url": store.url})


def test_hub_branch_that_moves(servers: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a Hub branch moves after the index was read, the load still reads the shards of the first commit."""
    files: dict[str, dict[str, bytes]] = {}
    wants = []
    for commit, seed in (("1" * 40, 1), ("2" * 40, 2)):
        folder = tmp_path / commit
        folder.mkdir()
        made = np.random.default_rng(seed)
        tensors = {f"layer.{i}": made.normal(0, 0.02, (100_000,)).astype(np.float32) for i in range(6)}
        ow.save_file(tensors, folder / "model.safetensors", compress=False, max_shard_size="900KB")
        files[commit] = {path.name: path.read_bytes() for path in folder.iterdir()}
        wants.append(tensors)
    left = [0]  # number of answers before the branch moves

    def answer(path: str) -> Any:
        revision, name = path.split("/")[-2:]
        if revision == "main":
            left[0] -= 1
            revision = "1" * 40 if left[0] >= 0 else "2" * 40
        return 200, {"X-Repo-Commit": revision, "ETag": f'"{revision}-{name}"'}, files[revision][name]

    hub = servers("127.0.0.1", answer)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    for answers in (1, 2, 3):
        left[0] = answers
        same(ow.load_file("hf://org/name/model.safetensors.index.json", framework="np"), wants[0])
    left[0] = 0
    same(ow.load_file("hf://org/name", framework="np"), wants[1])


def test_servers_without_etag_and_date(servers: Callable[..., Server], tmp_path: Path) -> None:
    """If a server sends neither ETag nor date and its file changes during a load, the tensors are all old or all
    new."""
    wants, datas = [], []
    for seed in (1, 2):
        wants.append(saved(tmp_path / "m.safetensors", seed))
        datas.append((tmp_path / "m.safetensors").read_bytes())
    assert len(datas[0]) == len(datas[1])
    for after in range(4):
        server = servers()
        server.answer = lambda path, server=server, after=after: datas[len(server.asked) > after]
        got = ow.load_file(server.url + "/m.safetensors", framework="np")
        same(got, wants[got["layer.0"].tobytes() == wants[1]["layer.0"].tobytes()])
