"""Tests tensorizer's streams with real Redis and S3 servers: overwire.compat.tensorizer and tensorizer itself ("the
reference") exchange files, requests are refused, and writers are interrupted."""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overwire as ow
import overwire.compat.tensorizer as ours
import pytest
import stores
import tensorizer as theirs
import torch
import warm

STATE = {"m": [torch.arange(6.0), {"w": torch.ones(2, 3).bfloat16()}], "big": torch.randn(300_000), "e": torch.zeros(0, 4)}


def same(tree: Any) -> bool:
    flat = [(tree["m"][0], STATE["m"][0]), (tree["m"][1]["w"], STATE["m"][1]["w"]), (tree["big"], STATE["big"]), (tree["e"], STATE["e"])]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in flat)


def write(module: Any, to: Any, encryption: Any = None) -> None:
    s = module.TensorSerializer(to, encryption=encryption)
    s.write_state_dict(STATE)
    s.close()


@pytest.fixture(scope="module")
def redis_at() -> Iterator[tuple[Any, str]]:
    """Yields a client of the package redis, and the prefix of its URIs."""
    client_of = pytest.importorskip("redis")
    with stores.redis(password=None) as (_, base):
        client = client_of.Redis(host=stores.HOST, port=int(base.rstrip("/").rpartition(":")[2]))
        yield client, base
        client.close()


def test_files_are_exchanged_through_redis(redis_at: tuple[Any, str], tmp_path: Path) -> None:
    """Both libraries, and overwire's own functions, load plain and encrypted files that either library has copied to
    Redis."""
    client, base = redis_at
    for writer, encrypted in itertools.product((ours, theirs), (False, True)):
        key = f"{writer.__name__}.{encrypted}"
        path = tmp_path / key
        params = ours.EncryptionParams.random() if encrypted else None
        write(ours, path, params)
        de = writer.TensorDeserializer(
            path, device="cpu", lazy_load=True, encryption=params and writer.DecryptionParams.from_key(params.key)
        )
        de.to_redis(client, key)
        de.close()
        names = {n for n in client.scan_iter(f"{key}:*") if n.startswith(f"{key}:header:0".encode())}
        assert len(names) == 1
        # The reference cannot read the keys that it writes for nested names.
        for reader in (ours, theirs) if writer is ours else (ours,):
            by = params and reader.DecryptionParams.from_key(params.key)
            with reader.TensorDeserializer(
                base + key, device="cpu", verify_hash=True, num_readers=1, encryption=by
            ) as found:
                assert same(found.tree())
        with ours.stream_io.open_stream(base + key) as stream:
            assert same(
                ours.TensorDeserializer(
                    stream, device="cpu", encryption=params and ours.DecryptionParams.from_key(params.key)
                ).tree()
            )
        options = {"decryption_key": params.key} if params else None
        found = ow.load_file(base + key, framework="pt", storage_options=options)
        assert torch.equal(found["big"], STATE["big"])
        assert ow.verify(base + key, storage_options=options)["ok"]


def test_a_copy_to_redis_is_resumed(redis_at: tuple[Any, str], tmp_path: Path) -> None:
    """An interrupted copy is resumed. If the file differs from the stored one, it is refused or, with `force`, replaces
    it."""
    client, base = redis_at
    write(theirs, tmp_path / "a")
    one = ours.TensorDeserializer(tmp_path / "a", device="cpu", lazy_load=True)
    one.to_redis(client, "again")
    whole = {k: client.get(k) for k in client.scan_iter("again:*")}
    lost = next(k for k in whole if b":big:" in k)
    client.delete(lost)
    one.to_redis(client, "again")
    assert {k: client.get(k) for k in client.scan_iter("again:*")} == whole
    client.set("again:notes", "kept")
    ow.save_file({"other": torch.arange(5)}, tmp_path / "b.tensors")
    two = ours.TensorDeserializer(tmp_path / "b.tensors", device="cpu", lazy_load=True)
    with pytest.raises(ValueError, match="another file"):
        two.to_redis(client, "again")
    assert same(ours.TensorDeserializer(base + "again", device="cpu").tree())
    two.to_redis(client, "again", force=True)
    assert torch.equal(ours.TensorDeserializer(base + "again", device="cpu", verify_hash=True)["other"], torch.arange(5))
    assert client.get("again:notes") == b"kept"
    one.close()
    with pytest.raises(ValueError, match="closed"):
        one.to_redis(client, "again")


def test_redis_stream(redis_at: tuple[Any, str]) -> None:
    """RedisStreamFile reads like a file: ranges, seeks, the end, and errors of the server."""
    client, base = redis_at
    data = os.urandom(3_000_000)
    client.set("raw:a:0", data[:1000])
    client.set("raw:b:1000", data[1000:2_000_000])
    client.set("raw:c:2000000", data[2_000_000:])
    plain = io.BytesIO(data)
    with ours.stream_io.RedisStreamFile(base + "raw") as stream:
        assert stream.readable() and stream.seekable() and not stream.writable() and stream.fileno() == -1
        for at, n in ((0, 10), (990, 30), (5, 2_500_000), (2_999_990, 10), (1_999_999, 2), (3, 0)):
            stream.seek(at)
            plain.seek(at)
            buffer = bytearray(n)
            assert stream.readinto(buffer) == n and buffer == plain.read(n) and stream.tell() == at + n
        stream.seek(-3, io.SEEK_CUR)
        assert stream.tell() == 0 and stream.read() == data
        assert (
            stream.bytes_read > len(data)
            and stream.read_operations >= 7
            and stream.response_latencies
            and stream.setup_latency >= 0
        )
        with pytest.raises(ValueError):
            stream.seek(0, io.SEEK_END)
        with pytest.raises(io.UnsupportedOperation):
            stream.readline()
    with pytest.raises(OSError, match="closed"):
        stream.read(1)
    with ours.stream_io.open_stream(base + "raw", begin=500, end=2_000_500) as part:
        assert part.read() == data[500:2_000_500]
    with ours.stream_io.RedisStreamFile(base + "nothing") as none, pytest.raises(OSError, match="no such key"):
        none.read(1)
    with pytest.raises(ValueError, match="Invalid Redis URI"):
        ours.stream_io.RedisStreamFile("http://x/y")
    for module in (ours, theirs):
        with pytest.raises(ValueError, match='Only the mode "rb" is valid when opening redis://'):
            module.stream_io.open_stream(base + "raw", "wb")


def test_save_to_redis(redis_at: tuple[Any, str]) -> None:
    """save_file and `convert` write .tensors files to stores. The old file stays until the new one is complete."""
    _, base = redis_at
    tensors = {f"t{i}": torch.randn(n) for i, n in enumerate((5_000_000, 3, 4_200_000, 0, 1 << 20))}
    uri = base + "folder/model.tensors"
    key = os.urandom(32)
    for options in (None, {"encryption_key": key}):
        ow.save_file(tensors, uri, storage_options=options)
        back = {"decryption_key": key} if options else None
        found = ow.load_file(uri, framework="pt", storage_options=back)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert ow.verify(uri, storage_options=back)["ok"]
    ow.convert(uri, base + "plain.tensors", storage_options={"decryption_key": key})
    de = ours.TensorDeserializer(base + "plain.tensors", device="cpu", verify_hash=True)
    assert all(torch.equal(de[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(ow.NotSupportedError):
        ow.save_file(tensors, "https://example.invalid/x.tensors")


def test_pipes(tmp_path: Path) -> None:
    """A file can be read from a pipe, but not written to a pipe."""
    write(theirs, tmp_path / "x")
    begin, end = os.pipe()
    feeder = threading.Thread(target=lambda: (os.write(end, b""), _feed(end, (tmp_path / "x").read_bytes())))
    feeder.start()
    with os.fdopen(begin, "rb") as source:
        assert same(ours.TensorDeserializer(source, device="cpu", verify_hash=True).tree())
    feeder.join()
    begin, end = os.pipe()
    with os.fdopen(begin, "rb"), os.fdopen(end, "wb") as sink, pytest.raises(ValueError):
        ours.TensorSerializer(sink)


def _feed(end: int, data: bytes) -> None:
    with os.fdopen(end, "wb") as sink:
        sink.write(data)


@pytest.mark.parametrize("module", [ours, theirs])
def test_same_refusals(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong modes, ranges, certificates and endpoints give the same errors with the same messages."""
    io_ = module.stream_io
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(io_, "_s3_default_config_paths", (str(tmp_path / "none"),))
    for match, kind, call in [
        ('Only the mode "rb" is valid when opening http', ValueError, lambda: io_.open_stream("http://x/y", "wb")),
        (r'Only the modes "rb", "wb\[\+\]"', ValueError, lambda: io_.open_stream("s3://x/y", "xb")),
        ("Only binary modes", ValueError, lambda: io_.open_stream("x", "r")),
        ("Invalid begin", ValueError, lambda: io_.CURLStreamFile("http://x/y", -1)),
        ("End marker must come strictly after", ValueError, lambda: io_.CURLStreamFile("http://x/y", 5, 5)),
        ("certificate_handling must", TypeError, lambda: io_.CURLStreamFile("http://x/y", certificate_handling="x")),
        ("Exactly one of", ValueError, lambda: io_.CAInfo()),
        ("Exactly one of", ValueError, lambda: io_.CAInfo(cacert="x", allow_untrusted=True)),
        ("Invalid cacert", ValueError, lambda: io_.CAInfo(cacert=str(tmp_path / "none"))),
        ("Invalid capath", ValueError, lambda: io_.CAInfo(capath=str(tmp_path / "none"))),
        ("Non-HTTPS", ValueError, lambda: io_.open_stream("s3://b/k", "rb", "a", "b", "http://127.0.0.1:1")),
        ("Invalid S3 URI", ValueError, lambda: io_.s3_upload("x", "http://b/k", "a", "b")),
        ("no default .s3cfg file could be found", ValueError, lambda: io_._infer_credentials(None, None)),
        ("does not exist", FileNotFoundError, lambda: io_._infer_credentials(None, None, str(tmp_path / "none"))),
    ]:
        with pytest.raises(kind, match=match):
            call()
    (tmp_path / "cfg").write_text("[default]\naccess_key = K\nsecret_key = S%x\nhost_base = h.example\nuse_https = False\n")
    (tmp_path / "half").write_text("[default]\naccess_key = K\n")
    (tmp_path / "empty").write_text("[other]\n")
    if module is ours:  # the reference reads % as a placeholder
        assert io_._infer_credentials(None, None, str(tmp_path / "cfg"))[1:] == ("h.example", "K", "S%x", False)
    assert io_._infer_credentials("", "")[2:4] == ("", "")
    with pytest.raises(ValueError, match="s3_secret_access_key was not provided"):
        io_._infer_credentials(None, None, str(tmp_path / "half"))
    with pytest.raises(ValueError, match="could not be parsed"):
        io_._infer_credentials(None, None, str(tmp_path / "empty"))
    assert io_.CAInfo(allow_untrusted=True).curl_flags == ("--insecure",)
    assert io_.CAInfo(cacert=str(tmp_path / "cfg")).curl_flags == ("--cacert", str(tmp_path / "cfg"))


def test_endpoints_and_credentials_of_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints and credentials come from arguments, .s3cfg, the environment, AWS's files and CoreWeave's defaults."""
    s3 = ours._s3
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ours.stream_io, "_s3_default_config_paths", (str(tmp_path / "none"),))
    assert s3.options_for(False) == {"endpoint_url": "https://accel-object.ord1.coreweave.com"}
    assert s3.options_for(True)["endpoint_url"] == "https://object.ord1.coreweave.com"
    assert s3.options_for(False, "", "")["anon"] is True
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text("[default]\nendpoint_url = http://plain\n[profile p]\ns3 =\n  endpoint_url = http://nested\n")
    assert s3.options_for(False)["endpoint_url"] == "http://plain"
    monkeypatch.setenv("AWS_PROFILE", "p")
    assert s3.options_for(False)["endpoint_url"] == "http://nested"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://any")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert s3.options_for(False)["endpoint_url"] == "http://s3"
    cfg = tmp_path / "cfg"
    cfg.write_text("[default]\naccess_key = K\nsecret_key = S\nhost_base = host\nuse_https = False\n")
    assert s3.options_for(False, config_path=str(cfg)) == {"endpoint_url": "http://host", "key": "K", "secret": "S"}
    given = s3.options_for(False, "k", "s", "end.example", region="r")
    assert given == {"endpoint_url": "https://end.example", "key": "k", "secret": "s", "region": "r"}
    assert s3.url_of("s3://b/a b/ü", {"endpoint_url": "https://h", "anon": True}) == "https://h/b/a%20b/%C3%BC"
    assert s3.url_of("s3://b/k", {"endpoint_url": "https://cwobject.com", "anon": True}) == "https://b.cwobject.com/k"


# Tests with S3 on a real server.


@pytest.fixture(scope="module")
def s3_at() -> Iterator[tuple[dict[str, Any], Path]]:
    with stores.s3() as (options, folder):
        yield options, folder


@pytest.mark.slow
def test_exchanged_files_on_s3(
    s3_at: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each pair of libraries, one serialises to s3:// and the other deserialises from there, by stream and by
    URI."""
    options, folder = s3_at
    given = {"s3_access_key_id": options["key"], "s3_secret_access_key": options["secret"], "s3_endpoint": options["endpoint_url"]}
    given["force_http"] = True
    for writer in (ours, theirs):
        uri = f"s3://models/{writer.__name__}/x.tensors"
        write(writer, writer.stream_io.open_stream(uri, "wb+", **given))
        for reader in (ours, theirs):
            with reader.stream_io.open_stream(uri, **given) as stream:
                assert same(reader.TensorDeserializer(stream, device="cpu", verify_hash=True).tree())
        stream = ours.stream_io.open_stream(uri, begin=5, end=9, **given)
        assert stream.read() == (folder / writer.__name__ / "x.tensors").read_bytes()[5:9] and "X-Amz" not in repr(vars(stream)["_name"])
    # Only a URI is given. Credentials and endpoint are in the environment.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", str(options["endpoint_url"]))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(options["key"]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(options["secret"]))
    with ours.TensorSerializer("s3://models/env.tensors") as s:
        s.write_state_dict(STATE)
    for reader in (ours, theirs):
        assert same(reader.TensorDeserializer("s3://models/env.tensors", device="cpu").tree())
    with pytest.raises(OSError, match="Failed to open stream|not found") as caught:
        ours.stream_io.open_stream("s3://models/none")
    assert "X-Amz" not in str(caught.value)
    made = {"a": torch.randn(9_000_000), "b": torch.ones(3)}
    ow.save_file(made, "s3://models/ours.tensors", storage_options={"encryption_key": bytes(32)})
    params = theirs.DecryptionParams.from_key(bytes(32))
    with theirs.TensorDeserializer("s3://models/ours.tensors", device="cpu", verify_hash=True, encryption=params) as de:
        assert torch.equal(de["b"], torch.ones(3))
    # s3_upload, s3_download and .s3cfg
    (tmp_path / "file").write_bytes(b"bytes" * 1000)
    ours.stream_io.s3_upload(str(tmp_path / "file"), "s3://models/raw", options["key"], options["secret"], options["endpoint_url"])
    assert (folder / "raw").read_bytes() == b"bytes" * 1000
    gone = tmp_path / "gone.pem"
    gone.write_text("-----BEGIN CERTIFICATE-----")
    authorities = ours.stream_io.CAInfo(cacert=str(gone))
    gone.unlink()  # certificates are not needed without TLS
    url = ours.stream_io._s3_download_url("s3://models/raw", options["key"], options["secret"], options["endpoint_url"])
    with ours.stream_io.CURLStreamFile(url, certificate_handling=authorities) as got:
        assert len(got.read(1)) == 1
    with ours.stream_io.s3_download(
        "s3://models/raw", options["key"], options["secret"], options["endpoint_url"], certificate_handling=authorities
    ) as got:
        assert len(got.read(1)) == 1
    with ours.stream_io.s3_download("s3://models/raw", options["key"], options["secret"], options["endpoint_url"]) as got:
        assert got.read(7) == b"bytesby"
    host = str(options["endpoint_url"]).removeprefix("http://")
    cfg = tmp_path / "cfg"
    cfg.write_text(f"[default]\naccess_key={options['key']}\nsecret_key={options['secret']}\nhost_base={host}\nuse_https=False\n")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with ours.stream_io.open_stream("s3://models/raw", s3_config_path=str(cfg)) as got:
        assert got.read() == b"bytes" * 1000


@pytest.mark.slow
def test_s3_writers_finish_their_objects(s3_at: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """A writer that is dropped, or still open at exit, writes its object. If writing fails, the old object stays."""
    options, folder = s3_at
    program = f"""
import overwire.compat.tensorizer as t, torch, gc
given = dict(s3_access_key_id={options["key"]!r}, s3_secret_access_key={options["secret"]!r},
    s3_endpoint={options["endpoint_url"]!r}, force_http=True)
stream = t.stream_io.open_stream("s3://models/dropped", "wb", **given)
stream.write(b"dropped"); del stream; gc.collect()
kept = t.stream_io.open_stream("s3://models/exit", "wb", **given)
kept.write(b"at exit")
try:
    with t.stream_io.open_stream("s3://models/failed", "wb", **given) as stream:
        stream.write(b"half"); raise KeyError
except KeyError: pass
"""
    done = warm.fresh(["-c", program], timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (folder / "dropped").read_bytes() == b"dropped" and (folder / "exit").read_bytes() == b"at exit"
    assert not (folder / "failed").exists()
