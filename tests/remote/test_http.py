"""Tests that URLs work in place of paths, with `overwire serve` as the server and with injected faults."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import processes
import pytest

SECRET = "planted-s3cr3t"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Yields serve(*options), which starts a server of tmp_path and returns its URL."""
    with contextlib.ExitStack() as running:
        yield lambda *options: running.enter_context(processes.overwire_serve(tmp_path, *options))


def test_serve_ends_by_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "overwire", "serve", str(tmp_path)]
    with processes.started(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline().startswith("http")
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130


def weights(seed: int = 1, n: int = 12) -> dict[str, np.ndarray[Any, Any]]:
    made = np.random.default_rng(seed)
    return {f"layer.{i}.weight": made.normal(0, 0.02, (64, 300 + i)).astype(np.float32) for i in range(n)}


def same(got: Any, want: Any) -> None:
    assert set(got) == set(want)
    for name in want:
        assert got[name].tobytes() == want[name].tobytes(), name


@pytest.mark.parametrize(
    "compress, options", [(True, ()), (False, ()), (True, ("--no-ranges",)), (False, ("--chunked",))]
)
def test_every_function(serve: Callable[..., str], tmp_path: Path, compress: bool, options: tuple[str, ...]) -> None:
    """load_file, `stream`, safe_open with slices, `preload`, `inspect`, `verify`, `convert` and the command line accept
    a URL, whether or not the server supports range requests."""
    want = weights()
    ow.save_file(want, tmp_path / "m.safetensors", {"made": "here"}, compress=compress)
    url = serve(*options) + "m.safetensors"
    same(ow.load_file(url, framework="np"), want)
    same(dict(ow.stream(url, framework="np")), want)
    with ow.safe_open(url, framework="np") as f:
        name = "layer.3.weight"
        assert f.metadata() == {"made": "here"}
        assert f.get_slice(name)[5:9, 7:20].tobytes() == np.ascontiguousarray(want[name][5:9, 7:20]).tobytes()
    job = ow.preload(url)
    assert job.wait(30)
    same(ow.load_file(url, framework="np"), want)
    assert ow.inspect(url)["sources"][0]["uri"] == url
    assert ow.verify(url)["tensors"] == len(want)
    ow.convert(url, tmp_path / "back.safetensors", compress=False)
    same(ow.load_file(tmp_path / "back.safetensors", framework="np"), want)
    done = subprocess.run([sys.executable, "-m", "overwire", "verify", url, "--json"], capture_output=True, check=True)
    assert json.loads(done.stdout)["ok"]
    done = subprocess.run([sys.executable, "-m", "overwire", "fetch", "-s", url, url], capture_output=True, check=True)
    assert done.stdout == (tmp_path / "m.safetensors").read_bytes() * 2


def test_shards_and_folders(serve: Callable[..., str], tmp_path: Path) -> None:
    """The URL of an index.json, and one that ends in a slash, stand for the whole model."""
    want = weights(n=20)
    ow.save_file(want, tmp_path / "model.safetensors", max_shard_size="300KB")
    assert len(list(tmp_path.glob("model-*"))) > 3
    url = serve()
    same(ow.load_file(url + "model.safetensors.index.json?x=1", framework="np"), want)
    same(ow.load_file(url, framework="np"), want)
    ow.convert(url, tmp_path / "plain/", compress=False)
    assert (tmp_path / "plain/model.safetensors.index.json").exists()
    same(ow.load_file(tmp_path / "plain", framework="np"), want)
    os.unlink(tmp_path / "model.safetensors.index.json")
    with pytest.raises(ow.NotFoundError):
        ow.load_file(url, framework="np")


def test_hostile_index(serve: Callable[..., str], tmp_path: Path) -> None:
    """An index may only name files next to it, and nothing else is requested."""
    url = serve()
    for name in ("../x.safetensors", "/etc/passwd", "http://169.254.169.254/x", "file:///etc/passwd", "a/b", "..", "", "a\0b", "-o"):
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ow.NotFoundError if name == "-o" else ow.FormatError):
            ow.load_file(url + "m.safetensors.index.json", framework="np")


def test_faults(serve: Callable[..., str], tmp_path: Path) -> None:
    """If the network breaks one answer in four, loads are slower but return the right bytes."""
    want = weights(n=200)
    ow.save_file(want, tmp_path / "m.safetensors")
    url = serve("--faults", "reset=0.1,short=0.05,whole=0.02,range=0.03,503=0.05", "--seed", "7") + "m.safetensors"
    good = 0
    for _ in range(40):
        try:
            found = ow.load_file(url, framework="np", storage_options={"retries": 50, "timeout": 5})
        except ow.OverwireError:  # opening a file fails after three tries
            continue
        same(found, want)
        if (good := good + 1) == 4:
            break
    assert good == 4


def test_changed(serve: Callable[..., str], tmp_path: Path) -> None:
    """Reading a file that was replaced after it was opened raises CorruptError."""
    ow.save_file(weights(n=40), tmp_path / "m.safetensors", compress=False)
    with ow.safe_open(serve() + "m.safetensors", framework="np") as f:
        ow.save_file(weights(2, n=40), tmp_path / "m.safetensors", compress=False)
        with pytest.raises(ow.CorruptError, match="changed while it was read"):
            f.get_tensors()


def test_errors_keep_secrets(
    serve: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Secrets in a URL, a header, a token or the environment are never shown."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    ow.save_file(weights(n=1), tmp_path / "m.safetensors")
    base = serve().replace("://", f"://user:{SECRET}@")
    options = {"token": SECRET, "headers": {"X-Key": SECRET}}
    seen = [ow.inspect(f"{base}m.safetensors?sig={SECRET}", storage_options=options), ow.last_report()]
    seen.append(ow.plan(f"{base}m.safetensors?sig={SECRET}", storage_options=options))
    job = ow.preload(f"{base}missing?sig={SECRET}", storage_options=options)
    seen.append(job)
    bad: list[tuple[str, Any]] = [
        (f"{base}missing?sig={SECRET}", options),
        (f"http://user:{SECRET}@127.0.0.1:1/x?{SECRET}", options),
        (f"{base}m.safetensors?sig={SECRET}", {"tokn": SECRET}),
        (f"{base}m.safetensors?sig={SECRET}", {"timeout": SECRET}),
        (f"{base}m.safetensors?sig={SECRET}", {"headers": {SECRET: object()}}),
        (f"gopher://user:{SECRET}@h/x", None),
    ]
    for url, how in bad:
        with pytest.raises(ow.OverwireError) as caught:
            ow.load_file(url, storage_options=how)
        seen += [caught.value, caught.value.source]
    assert not any(SECRET in text for text in map(repr, seen)), seen
    assert SECRET not in caplog.text


def test_unknown_options(serve: Callable[..., str], tmp_path: Path) -> None:
    """An option that the scheme does not support is refused, and the error lists the supported ones."""
    with pytest.raises(ow.ArgumentError, match="headers, token, cacert"):
        ow.load_file(serve() + "m", storage_options={"region": "x"})
    with pytest.raises(ow.ArgumentError, match="headers, token, cacert"):
        ow.plan(serve() + "m", storage_options={"region": "x"})


def test_credentials_are_kept_apart(serve: Callable[..., str], tmp_path: Path) -> None:
    """A load does not use a preload that was made with another token."""
    ow.save_file(weights(n=1), tmp_path / "m.safetensors")
    url = serve() + "m.safetensors"
    ow.preload(url, storage_options={"token": "a"}).wait()
    from overwire.model import opened as models

    with models.Model(url, storage_options={"token": "b"}) as model:
        model.join()
        assert not model.joined
    with models.Model(url, storage_options={"token": "a"}) as model:
        model.join()
        assert model.joined


def test_preload_from_the_environment(serve: Callable[..., str], tmp_path: Path) -> None:
    """OVERWIRE_PRELOAD may be a URL."""
    want = weights(n=3)
    ow.save_file(want, tmp_path / "m.safetensors")
    url = serve() + "m.safetensors"
    code = f"""
import overwire, json
tensors = overwire.load_file({url!r}, framework="np")
from overwire.model import joining
assert joining._started
print(json.dumps(sorted(tensors)))
"""
    env = {**os.environ, "OVERWIRE_PRELOAD": url}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert json.loads(done.stdout) == sorted(want) and done.stderr == ""


def test_external_downloader(serve: Callable[..., str], tmp_path: Path) -> None:
    """With OVERWIRE_DOWNLOADER, another program, such as curl or overwire itself, fetches over HTTP. A missing file is
    an error."""
    want = weights(n=3)
    ow.save_file(want, tmp_path / "m.safetensors")
    url = serve()
    ours = tmp_path / "remotefile"
    ours.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m overwire fetch "$@"\n')
    ours.chmod(0o755)
    code = "import overwire, sys; print(len(overwire.load_file(sys.argv[1], framework='np')))"
    for program in ("/usr/bin/curl", str(ours)):
        if not os.path.exists(program):
            continue
        env = {**os.environ, "OVERWIRE_DOWNLOADER": program}
        done = subprocess.run([sys.executable, "-c", code, url + "m.safetensors"], capture_output=True, text=True, env=env, check=True)
        assert done.stdout == "3\n"
        done = subprocess.run([sys.executable, "-c", code, url + "none"], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 1 and "exit status" in done.stderr


def test_memory(serve: Callable[..., str], tmp_path: Path) -> None:
    """Whatever the size of the file, a load over HTTP needs a few MiB in addition to its tensors, and a download only
    its window."""
    for name, megabytes in (("small", 40), ("large", 120)):
        plain = tmp_path / f"{name}-plain.safetensors"
        command = [sys.executable, "-m", "overwire", "bench", "gen", "llama-bf16", "--size", f"{megabytes}MB", str(plain)]
        subprocess.run(command, check=True, capture_output=True)
        ow.convert(plain, tmp_path / f"{name}.safetensors")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(600 << 20)
    url = serve()
    load = """if True:
        import sys, overwire, numpy
        def field(name):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) << 10
        open("/proc/self/clear_refs", "w").write("5")
        before = field("VmRSS")
        job = overwire.preload(sys.argv[1])
        job.wait(100)
        print(field("VmHWM") - before - overwire.inspect(sys.argv[1])["totals"]["all"]["bytes"])
    """
    fetch = """if True:
        import resource, subprocess, sys
        subprocess.run([sys.executable, "-m", "overwire", "fetch", sys.argv[1]], check=True, stdout=subprocess.DEVNULL)
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
    """

    def beside(code: str, name: str) -> int:
        done = subprocess.run([sys.executable, "-c", code, url + name], capture_output=True, text=True, check=True)
        return int(done.stdout)

    for name in ("small", "small-plain", "large", "large-plain"):
        assert beside(load, f"{name}.safetensors") < 64 << 20, name
    assert beside(fetch, "sparse") < 160 << 20


def test_fetch_statuses(serve: Callable[..., str], tmp_path: Path) -> None:
    """`overwire fetch` reports a failure by its exit status and never hangs. The file named by -o is complete or
    absent."""
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    url = serve()
    dead = serve("--faults", "short=1")
    out = tmp_path / "out"

    def fetch(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-m", "overwire", "fetch", *words], capture_output=True, timeout=60, check=False)

    assert fetch(url + "none").returncode == 3
    assert fetch("http://127.0.0.1:1/x").returncode == 4
    assert fetch("--storage", '{"retries": "2"}', dead + "a").returncode == 4
    done = fetch(url + "a", url + "none")
    assert done.returncode == 3 and done.stdout in (b"", b"x" * 100_000)
    assert fetch("-o", str(out), url + "a", url + "none").returncode == 3
    assert not out.exists() and not list(tmp_path.glob(".overwire*"))
    assert fetch("-o", str(out), url + "a").returncode == 0
    assert out.read_bytes() == b"x" * 100_000


def test_bundles(serve: Callable[..., str], tmp_path: Path) -> None:
    """load_compressed_pickle accepts the URL of a bundle and joins its preload. Preloading the URL of a meta.csv
    preloads its containers."""
    made = {"weights": weights(n=4), "step": 7}
    ow.compress_pickle(made, tmp_path / "b/x.pkl")
    url = serve()
    for uri in (url + "b/x.pkl", url + "b/x.pkl?sig=a/b"):
        got = ow.load_compressed_pickle(uri)
        assert got["step"] == 7
        same(got["weights"], made["weights"])
    assert ow.verify(url + "b/nya/meta.csv")["ok"] and ow.verify(url + "b/x.pkl")["ok"]
    assert ow.preload(url + "b/nya/meta.csv").wait(30)
    same(ow.load_compressed_pickle(url + "b/x.pkl")["weights"], made["weights"])
    os.unlink(tmp_path / "b/nya/x.safetensors")
    with pytest.raises(ow.NotFoundError, match="upload"):
        ow.load_compressed_pickle(url + "b/x.pkl")
    with pytest.raises(ow.NotFoundError):
        ow.load_compressed_pickle(url + "none.pkl")


@pytest.mark.parametrize(
    "uri, first",
    [
        ("https://u:p@h/a/x.pkl?s=/1", "https://u:p@h/a/nya/x.safetensors?s=/1"),
        ("https://u:p?@h/a/x.pkl", "https://u:p?@h/a/nya/x.safetensors"),
        ("hf://org/name/a/x.pkl@v1", "hf://org/name/a/nya/x.safetensors@v1"),
        ("hf://org/name@v1/a/x.pkl", "hf://org/name/a/nya/x.safetensors@v1"),
        ("https://h/a/my%20x.pkl?s=1#f", "https://h/a/nya/my%20x.safetensors?s=1#f"),
        ("s3://b/a?/x.pkl", "s3://b/a?/nya/x.safetensors"),
    ],
)
def test_container_next_to_a_uri(uri: str, first: str) -> None:
    """The container is searched for in folders next to the pickle, whatever follows the pickle's name in the URI."""
    from overwire.bundles import containers

    places = containers.remote_containers_of(uri, containers.FOLDERS)
    assert places[3] == first and places[0] == first.replace("/nya/", "/tensors/")


def test_cache(serve: Callable[..., str], tmp_path: Path) -> None:
    """With cache=, the first load stores the file in the cache and later loads read it from there. A new version is
    fetched."""
    want = weights(n=4)
    ow.save_file(want, tmp_path / "m.safetensors")
    url = serve() + "m.safetensors"
    folder = tmp_path / "cache"
    for _ in range(2):
        same(ow.load_file(url, framework="np", storage_options={"cache": folder}), want)
    (kept,) = [p for p in folder.iterdir() if p.suffix not in (".lock", ".note")]
    assert kept.read_bytes() == (tmp_path / "m.safetensors").read_bytes()
    again = weights(2, n=4)
    ow.save_file(again, tmp_path / "m.safetensors")
    same(ow.load_file(url, framework="np", storage_options={"cache": folder}), again)
    assert len([p for p in folder.iterdir() if p.suffix not in (".lock", ".note")]) == 2


def test_notices_are_logged_by_the_function_that_causes_them(
    serve: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a function uses a cached file because the store is unreachable, or finds that a store cannot list files, the
    warning is logged during that call."""
    want = weights(n=4)
    (tmp_path / "m").mkdir()
    ow.save_file(want, tmp_path / "m" / "model.safetensors")
    with processes.overwire_serve(tmp_path) as root:
        url = root + "m/"
        options = {"cache": tmp_path / "cache", "retries": 0}
        ow.load_file(url + "model.safetensors", framework="np", storage_options=options)
        assert not caplog.records
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # lists folders only as HTML pages
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ow.convert(f"http://127.0.0.1:{server.server_port}/m/", tmp_path / "copy/", compress=False)
        server.shutdown()
    assert ["cannot list files" in record.getMessage() for record in caplog.records] == [True]
    caplog.clear()
    same(ow.load_file(url + "model.safetensors", framework="np", storage_options=options), want)
    assert ["cannot be reached" in record.getMessage() for record in caplog.records] == [True]
