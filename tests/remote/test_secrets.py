"""Tests that a caller's secrets are never shown.

One program uses a secret of each kind in loads and saves that succeed and that fail, with servers that repeat
everything they receive. Everything that the program and its children have printed or written is then searched for the
secrets.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import overwire as ow
import processes
import pytest
import stores

SECRETS = {
    "S3 key": "AKIAOVERWIRESWEEPKEY",
    "S3 secret": "sweep/S3+Secret0123456789abcdefghijklmnop",
    "session token": "sweepSessionToken0123456789//+==",
    "SSE-C key": "sweepSSEC0123456789abcdefghijklm",  # 32 bytes
    "basic auth": "sweep-Basic-Passw0rd",
    "Authorization": "sweepAuthorizationHeader0123",
    "header": "sweepOwnHeader0123456",
    "token": "sweepBearerToken0123456",
    "redis password": "sweep-Redis-Password-0123456789",
    "hf token": "hf_sweepHuggingFace0123456789",
    "presigned": "sweepsignature0123456789abcdef",
    "decryption key": "5377656570446563727970746f6e4b65795f33325f42797465732121212121" + "21",
    "decryption password": "sweep decryption password",
    "proxy": "sweepProxyPassword0123",
}

PROGRAM = r"""
import json, logging, os, pickle, sys, traceback
import numpy as np
import overwire as ow

plan = json.load(sys.stdin)
secret, base, echo, folder = plan["secrets"], plan["base"], plan["echo"], plan["folder"]
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
counts = {"good": 0, "bad": 0}

def show(*what):
    for one in what:
        print(one, repr(one), getattr(one, "_repr_html_", str)(), dict(one) if isinstance(one, dict) else "")

def did(verb, *args, **kwargs):
    try:
        result = verb(*args, **kwargs)
        counts["good"] += 1
        show(ow.last_report())
        return result
    except Exception as error:
        counts["bad"] += 1
        show(error, error.args, getattr(error, "__notes__", None), vars(error))
        traceback.print_exception(error)
        show(pickle.loads(pickle.dumps(error)))

def every(uri, options, save=False):
    load = dict(framework="np", storage_options=options)
    did(ow.load_file, uri, **load)
    did(lambda: list(ow.stream(uri, **load)))
    opened = did(ow.safe_open, uri, **load)
    if opened is not None:
        show(opened, did(opened.metadata))
        opened.__exit__(None, None, None)
    show(did(ow.plan, uri, **load), did(ow.inspect, uri, storage_options=options), did(ow.verify, uri, storage_options=options))
    did(ow.read_bytes, uri, storage_options=options)
    job = did(ow.preload, uri, storage_options=options)
    if job is not None:
        show(job)
        did(job.result, 60)
        did(ow.load_file, uri, **load)
    did(ow.load_compressed_pickle, uri + ".pkl", storage_options=options)
    did(ow.convert, uri, folder + "/converted.safetensors", storage_options=options)
    if save:
        tensors = {"a": np.arange(999, dtype=np.float32), "b": np.ones((30, 40), np.float16)}
        show(did(ow.save_file, tensors, uri, {"made": "here"}, storage_options=options))
        did(ow.compress_pickle, {"w": tensors}, uri + ".pkl", storage_options=options)

def with_user(url):
    return url.replace("://", "://user:" + secret["basic auth"] + "@")

query = "?X-Amz-Signature=" + secret["presigned"] + "&sig=" + secret["presigned"]
reach = {"token": secret["token"]}
named = {"headers": {"Authorization": "Basic " + secret["Authorization"], "X-Own": secret["header"]}}
os.environ["HF_TOKEN"] = secret["hf token"]
os.environ["HF_ENDPOINT"] = echo

for place in (base, echo):
    every(with_user(place) + "m.safetensors" + query, named)
    every(place + "m.safetensors" + query, {**reach, "retries": 1, "cache": folder + "/cache"})
    every(place + "none.safetensors" + query, {**reach, "headers": {"X-Own": secret["header"]}})
    every(place + "m.safetensors", {**reach, "timeout": secret["token"]})
    every(place + "m.safetensors", {**reach, "tokn": secret["token"]})
every("hf://org/model/m.safetensors", {"retries": 0})
every(echo + "redirect" + query, named)
os.environ["http_proxy"] = "http://user:" + secret["proxy"] + "@" + echo.split("/")[2]
every("http://nowhere.invalid/m.safetensors", {"retries": 0})
del os.environ["http_proxy"]

s3 = {"key": secret["S3 key"], "secret": secret["S3 secret"]}
if plan["s3"]:
    every("s3://models/m.safetensors", {**s3, "endpoint_url": plan["s3"]}, save=True)
    every("s3://models/wrong.safetensors", {**s3, "secret": secret["S3 secret"][::-1], "endpoint_url": plan["s3"]}, save=True)
    from overwire.stores import presign
    url = did(presign, "s3://models/m.safetensors", 60, storage_options={**s3, "endpoint_url": plan["s3"]})
    every(url, None)
    every(url.replace("models", "model"), None)
every("s3://models/m.safetensors", {**s3, "token": secret["session token"], "sse_customer_key": secret["SSE-C key"],
    "endpoint_url": echo, "retries": 0}, save=True)
every("s3://models/m.safetensors", {**s3, "secret": "", "token": secret["session token"], "endpoint_url": echo}, save=True)
every("s3://models/m.safetensors", {**s3, "endpoint_url": with_user(echo)}, save=True)
os.environ.update(AWS_ACCESS_KEY_ID=s3["key"], AWS_SECRET_ACCESS_KEY=s3["secret"], AWS_SESSION_TOKEN=secret["session token"])
every("s3://models/m.safetensors", {"endpoint_url": echo, "retries": 0}, save=True)

if plan["redis"]:
    every(plan["redis"] + "m", {"password": secret["redis password"]}, save=True)
    every(plan["redis"] + "m", {"password": secret["redis password"] + "x"}, save=True)
    every(plan["redis"].replace("://", "://:" + secret["redis password"] + "@") + "m", None, save=True)

tensors = {"a": np.arange(9999, dtype=np.float32)}
for word, kind in (("decryption key", "key"), ("decryption password", "password")):
    path, other = folder + f"/{kind}.tensors", folder + f"/{kind}-wrong.tensors"
    did(ow.save_file, tensors, path, storage_options={f"encryption_{kind}": secret[word]})
    if kind == "key":
        did(ow.save_file, tensors, folder + "/none/x.tensors", storage_options={f"encryption_{kind}": secret[word]})
    verify = lambda options: did(ow.verify, path, storage_options=options)
    load = lambda options: did(ow.load_file, path, framework="np", storage_options=options)
    convert = lambda options: did(ow.convert, path, folder + "/plain.safetensors", storage_options=options)
    # Each password takes time, so only a few uses of each kind.
    load({f"decryption_{kind}": secret[word]})
    verify({f"decryption_{kind}": secret[word][::-1]})
    for options in ({f"decryption_{kind}": secret[word], f"encryption_{kind}": secret[word]}, {f"decryption_{kind}": [secret[word]]}):
        load(options), verify(options), convert(options)

show(ow.doctor())
print(json.dumps(counts))
"""

COMMANDS = r"""
import os, sys
import overwire.compat.nyacomp
import overwire as ow
print(ow.doctor())
ow.load_file(os.environ["PRELOAD_PATH"], framework="np")
try:
    ow.load_file(os.environ["PRELOAD_PATH"].replace("m.safe", "none.safe"), framework="np")
except ow.OverwireError as error:
    print(repr(error), error)
"""


class _Echo(BaseHTTPRequestHandler):
    """Refuses each request and repeats its path and headers in the answer."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(length)
        shown = " ".join(f"{name}: {value}" for name, value in self.headers.items()).replace("<", "&lt;").replace("&", "&amp;")
        status = {"redirect": 302, "m.safetensors": 403}.get(self.path.split("?")[0].rsplit("/", 1)[-1], 400)
        body = f"<Error><Code>Refused</Code><Message>{self.path} {shown}</Message><RequestId>{shown}</RequestId></Error>".encode()
        self.send_response(status, f"{shown} {self.path}"[:400])
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Location", f"http://127.0.0.1:1{self.path}")
        self.send_header("x-amz-request-id", shown[:900])
        self.send_header("X-Error-Message", shown[:900])
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def _forms(secret: str) -> set[bytes]:
    """Returns a secret as it is and in each encoding."""
    plain = secret.encode()
    found = {
        plain, quote(secret, safe="").encode(), quote(secret).encode(), plain.hex().encode(),
        json.dumps(secret)[1:-1].encode(),
    }
    for whole in (plain, b"user:" + plain, b":" + plain):
        text = base64.b64encode(whole).rstrip(b"=")
        found |= {text, text.replace(b"+", b"-").replace(b"/", b"_")}
    if len(secret) == 64:
        found.add(bytes.fromhex(secret))
    return found


class _Watch:
    """Records the command lines of this process's descendants for a while."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        root = str(threading.main_thread().native_id)
        while not self._stop.wait(0.03):
            wanted = [root]
            while wanted:
                for task in Path(f"/proc/{wanted.pop()}/task").glob("*/children"):
                    try:
                        children = task.read_text().split()
                    except OSError:
                        continue
                    wanted += children
                    for child in children:
                        try:
                            self.seen.add(Path(f"/proc/{child}/cmdline").read_bytes())
                        except OSError:
                            continue

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def test_secrets_are_shown_nowhere(tmp_path: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret is in a debug log; in the text, repr, traceback or pickle of an exception; in a report, a plan, a
    trace, `doctor` or the downloader's log; in the name or contents of any file; or in a child's command line."""
    import numpy as np

    served, left = tmp_path / "served", tmp_path / "left"
    served.mkdir()
    left.mkdir()
    tensors: dict[str, Any] = {f"layer.{i}": np.arange(5000, dtype=np.float32) * i for i in range(3)}
    ow.save_file(tensors, served / "m.safetensors")
    ow.compress_pickle(tensors, served / "m.safetensors.pkl")
    shown: dict[str, bytes] = {}
    settings = {"TMPDIR": str(left), "OVERWIRE_LOG": "debug", "OVERWIRE_TRACE": str(left / "trace.json"), "HOME": str(left)}
    with ExitStack() as stack:
        base = stack.enter_context(processes.overwire_serve(served))
        monkeypatch.setattr(stores, "S3_KEY", SECRETS["S3 key"])
        monkeypatch.setattr(stores, "S3_SECRET", SECRETS["S3 secret"])
        s3 = redis = ""
        if stores.found("versitygw"):
            s3 = str(stack.enter_context(stores.s3())[0]["endpoint_url"])
        if stores.found("redis-server"):
            password = left / "password"  # kept off the server's command line
            password.write_text(f'requirepass "{SECRETS["redis password"]}"\n')
            redis = stack.enter_context(stores.redis(config=password))[1]
            password.unlink()
        plan = {"secrets": SECRETS, "base": base, "echo": echo, "folder": str(left), "s3": s3, "redis": redis}
        env = {**_environment(), **settings}
        watch = stack.enter_context(_Watch())
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], input=json.dumps(plan).encode(), capture_output=True, env=env
        )
        shown |= {"output": done.stdout, "log": done.stderr}
        assert done.returncode == 0, done.stderr[-3000:]
        counts = json.loads(done.stdout.splitlines()[-1])
        assert counts["good"] > 20 and counts["bad"] > 100, counts
        if stores.found("curl"):
            private = base.replace("://", f"://user:{SECRETS['basic auth']}@") + f"m.safetensors?sig={SECRETS['presigned']}"
            slow = tmp_path / "curl"  # runs long enough to be observed
            slow.write_text(f'#!/bin/sh\nsleep 0.2\nexec {shutil.which("curl")} "$@"\n')
            slow.chmod(0o755)
            more = {"PRELOAD_PATH": private, "DOWNLOADER_PATH": str(slow), "DOWNLOAD_LOG": "1", "OVERWIRE_TRACE": str(left / "other.json")}
            done = subprocess.run([sys.executable, "-c", COMMANDS], capture_output=True, env=env | more)
            assert done.returncode == 0, done.stderr
            shown |= {"downloads": done.stdout, "log of downloads": done.stderr}
            for words in (["doctor", "--env"], ["doctor", "--json"]):
                done = subprocess.run([sys.executable, "-m", "overwire", *words], capture_output=True, env=env | more)
                shown[" ".join(words)] = done.stdout + done.stderr
            assert (left / "downloader.log").read_bytes() and any(b"--config" in line for line in watch.seen)
    assert (left / "trace.json").stat().st_size and list((left / "cache").iterdir())
    shown["command lines"] = b"\n".join(watch.seen)
    for path in left.rglob("*"):
        shown[f"the name {path.name}"] = str(path.relative_to(left)).encode()
        if path.is_file():
            shown[f"the file {path.name}"] = path.read_bytes()
    leaks = [
        (name, where, text[max(at - 150, 0) : at + 80])
        for name, secret in SECRETS.items()
        for form in _forms(secret)
        for where, text in shown.items()
        if (at := text.find(form)) >= 0
    ]
    assert not leaks, "\n".join(map(str, leaks[:20]))
    print(f"{len(SECRETS)} secrets, {counts['good']} calls succeed, {counts['bad']} fail, {len(shown)} places")


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:1/m?user=a@b&token=planted",
        "http://user:pass/planted@127.0.0.1/m",
        "redis://:pass planted@127.0.0.1:1/m",
        "redis://u:pass/planted@127.0.0.1:1/m",
        "redis://u:planted@127.0.0.1:1/\udcff",
        "s3://key:pass/planted word@bucket/m",
        "hf://user:planted@org/name/m",
    ],
)
def test_no_part_of_a_password_in_a_uri_is_shown(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """Errors and logs never show the user, password or query of a URI, whatever characters they contain."""
    for verb in (ow.load_file, ow.inspect, ow.read_bytes):
        with pytest.raises(ow.OverwireError) as caught:
            verb(uri, storage_options={"retries": 0})
        assert "planted" not in f"{caught.value} {caught.value!r} {vars(caught.value)} {caplog.text}"


def _environment() -> dict[str, str]:
    import os

    dropped = ("OVERWIRE_", "PRELOAD", "AWS_", "HF_")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped) and "proxy" not in name.lower()}
