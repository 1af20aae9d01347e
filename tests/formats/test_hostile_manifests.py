"""Tests that a manifest which names anything other than files next to it is refused with a typed error, before anything
that it names is opened.

The targets exist: a file outside the folder, and a server that counts its requests.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import processes
import pytest
from overwire.compat.nyacomp import _nyacomp

OUTSIDE = "outside.safetensors"


class Place:
    """A folder on a server, a file outside the folder that must not be read, and a second server that must get no
    request."""

    def __init__(self, root: Path, url: str, canary: str) -> None:
        self.root, self.folder, self.url, self.canary = root, root / "models", url, canary


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("hostile")
    (root / "models/sub").mkdir(parents=True)
    for path in (root / OUTSIDE, root / "models/sub/x.safetensors"):
        ow.save_file({"x": np.arange(4, dtype=np.uint8)}, path)
    (root / "outside.raw").write_bytes(b"1234")
    (root / "models/link.safetensors").symlink_to(root / OUTSIDE)
    body = (root / OUTSIDE).read_bytes()
    asked: list[str] = []

    class Canary(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    canary = ThreadingHTTPServer(("127.0.0.1", 0), Canary)
    threading.Thread(target=canary.serve_forever, daemon=True).start()
    with processes.overwire_serve(root / "models") as url:
        yield Place(root, url, f"http://127.0.0.1:{canary.server_port}")
    canary.shutdown()
    canary.server_close()
    shutil.rmtree(root)
    assert asked == []


def names(place: Place) -> list[str]:
    """Returns names that an index.json must not contain."""
    far = ["s3://bucket/x", "redis://127.0.0.1/x", "hf://org/name/x", "http://169.254.169.254/x", "http://[::1]/x", "gopher://h/x"]
    up = ["..", ".", "", "/", f"../{OUTSIDE}", f"sub/../../{OUTSIDE}", f"./../{OUTSIDE}", f"..//{OUTSIDE}", f"..\\{OUTSIDE}",
          f"%2e%2e/{OUTSIDE}", "sub/x.safetensors", "./sub/x.safetensors", "sub\\x.safetensors"]  # fmt: skip
    here = [f"{place.root}/{OUTSIDE}", f"/{place.root}/{OUTSIDE}", f"file://{place.root}/{OUTSIDE}", f"file:{place.root}/{OUTSIDE}",
            f"{place.canary}/x.safetensors", f"{place.canary[5:]}/x.safetensors", f"{place.url}x.safetensors", "/dev/stdin",
            "/proc/self/mem", f"{OUTSIDE}\0.safetensors", "a\0b", "C:x", "C:\\x", "-o/tmp/x", "@/etc/passwd"]  # fmt: skip
    return far + up + here


def refuses(load: Callable[[], object]) -> None:
    with pytest.raises((ow.FormatError, ow.NotFoundError, ow.ArgumentError, ow.NotSupportedError)):
        load()


@pytest.mark.parametrize("far", [False, True], ids=["local", "http"])
def test_index_json(place: Place, far: bool) -> None:
    """An index that contains a forbidden name is refused, as a local file and over HTTP."""
    index = place.folder / "model.safetensors.index.json"
    all_names = names(place)
    assert len(all_names) == 34
    for name in all_names:
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        refuses(lambda: ow.load_file(place.url + index.name if far else index, framework="np"))
    index.unlink()


def test_a_meta_csv_from_a_url(place: Place) -> None:
    """A meta.csv from a server cannot make overwire read a local file or contact another server."""
    meta = place.folder / "meta.csv"
    outside = [f"{place.root}/outside.raw", f"/{place.root}/outside.raw", "../outside.raw", "/../outside.raw", f"file://{place.root}/outside.raw",
               f"{place.canary}/x.raw", f"{place.canary}/x.gz", "http://169.254.169.254/latest/x.raw", "s3://bucket/x.raw", "gopher://h/x.raw",
               f"{place.url[:-1]}@{place.canary[7:]}/x.raw", f"{place.url[:-1]}.evil.invalid/x.raw", "..raw/..", "a\\raw", "x?raw",
               "%2e%2e%2foutside.raw", f"{place.root}/{OUTSIDE}", f"{place.canary}/x.safetensors"]  # fmt: skip
    for name in outside:
        meta.write_text(f"0\n{name} 4 uint8 4 4")
        refuses(lambda: _nyacomp.decompress_from_meta(place.url + "meta.csv"))
    meta.unlink()


def test_links_are_not_served(place: Place) -> None:
    """`overwire serve` follows no link that leads out of its folder."""
    refuses(lambda: ow.load_file(place.url + "link.safetensors", framework="np"))


def test_an_import_requests_no_url(tmp_path: Path, script) -> None:
    """Importing nyacomp's drop-in preloads a local meta.csv. The URLs in it are requested during the import only if
    DOWNLOAD=1 is set, but by an explicit load in any case."""
    asked: list[str] = []

    class Counts(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Counts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    meta = tmp_path / "data/nya/meta.csv"  # nyacomp's default
    meta.parent.mkdir(parents=True)
    meta.write_text(f"0\nhttp://127.0.0.1:{server.server_port}/x.safetensors 4 uint8 4 4")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", "")]))
    source = "import logging; logging.basicConfig()\nimport overwire.compat.nyacomp as n, overwire, time; time.sleep(.5)\n"
    try:
        for env in ({"PRELOAD_PATH": str(meta)}, {"OVERWIRE_PRELOAD": "data/nya/meta.csv"}, {"PRELOAD_PATH": "data/meta.csv"}):
            assert "DOWNLOAD=1" in script(source, PYTHONPATH=path, **env).stderr
        script(source, PYTHONPATH=path)
        assert asked == []
        hand = "try: overwire.preload('data/nya/meta.csv').wait(60)\nexcept overwire.NotFoundError: pass\nelse: raise AssertionError"
        script(source + hand, PYTHONPATH=path, OVERWIRE_NO_PRELOAD="1")
        assert asked
        asked.clear()
        found = "from overwire.bundles.manifest import Manifest\nfound = Manifest.read_csv('data/nya/meta.csv').list_containers()\n"
        waits = found + "try: overwire.load_file(found)\nexcept overwire.NotFoundError: pass"
        script(source + waits, PYTHONPATH=path, PRELOAD_PATH=str(meta), DOWNLOAD="1")
        assert asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_redis_server_in_a_file_gets_no_request(tmp_path: Path) -> None:
    """A meta.csv that names a Redis server is refused before a connection is made, because that server would get the
    password from the environment."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0)
        for scheme in ("redis", "rediss", "REDIS"):
            url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}/m.safetensors"
            (tmp_path / "meta.csv").write_text(f"0\n{url} 4 uint8 4 4")
            for verb in (_nyacomp.decompress_from_meta, lambda path: ow.preload(path).wait(60)):
                with pytest.raises(ow.AccessError, match="REDISCLI_AUTH"):
                    verb(str(tmp_path / "meta.csv"))
        with pytest.raises(BlockingIOError):
            server.accept()
