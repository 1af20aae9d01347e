"""Tests files in S3 and Redis on real servers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import stores
import warm
from conftest import soon
from overwire.stores import presign

Store = tuple[dict[str, Any], str]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Store]]:
    with stores.s3() as (s3, _), stores.redis() as (red, base):
        yield {"s3": (s3, "s3://models/"), "redis": (red, base)}


@pytest.fixture(params=["s3", "redis"])
def store(servers: dict[str, Store], request: pytest.FixtureRequest) -> Store:
    return servers[request.param]


def weights(seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "a": (rng.standard_normal((300, 512)) * 0.02).astype(np.float16),
        "b": rng.standard_normal(7).astype(np.float32),
        "none": np.zeros((0, 3), np.int8),
    }


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape
        assert got[name].tobytes() == value.tobytes()


def test_every_function(store: Store, tmp_path: Path) -> None:
    """Every reader returns what was saved to the store."""
    options, base = store
    uri, want = base + "dir/m.safetensors", weights()
    report = ow.save_file(want, uri, {"made": "here"}, storage_options=options)
    assert report.files == (uri,) and report.ratio < 1
    same(ow.load_file(uri, framework="np", storage_options=options), want)
    same(dict(ow.stream(uri, framework="np", storage_options=options)), want)
    with ow.safe_open(uri, framework="np", storage_options=options) as f:
        assert f.metadata() == {"made": "here"}
        assert f.get_slice("a")[10:20].tobytes() == want["a"][10:20].tobytes()
    assert ow.verify(uri, storage_options=options)["ok"]
    assert ow.inspect(uri, storage_options=options)["sources"][0]["uri"] == uri
    plain = tmp_path / "plain.safetensors"
    ow.convert(uri, plain, compress=False, storage_options=options)
    same(ow.load_file(plain, framework="np"), want)
    ow.convert(plain, base + "back.safetensors", storage_options=options)
    same(ow.load_file(base + "back.safetensors", framework="np", storage_options=options), want)
    job = ow.preload(uri, storage_options=options)
    assert job.wait(30)
    same(ow.load_file(uri, framework="np", storage_options=options), want)


def test_bundle(store: Store, tmp_path: Path) -> None:
    """A bundle saved to a store loads from there. The old object stays until the new one is complete."""
    options, base = store
    uri = base + "run/checkpoint.pkl"
    for step in range(4):
        obj = {"step": step, "weights": weights(step), "again": [1, 2]}
        assert 0 < ow.compress_pickle(obj, uri, storage_options=options) < 1.5
        back = ow.load_compressed_pickle(uri, storage_options=options)
        assert back["step"] == step and back["again"] == [1, 2]
        same(back["weights"], obj["weights"])
    with pytest.raises(ow.NotFoundError):
        ow.load_compressed_pickle(base + "run/none.pkl", storage_options=options)


def test_folder(servers: dict[str, Store]) -> None:
    """A folder in S3 loads like a folder on disk."""
    options, base = servers["s3"]
    want = weights()
    ow.save_file(want, base + "sharded/w.safetensors", max_shard_size=300_000, storage_options=options)
    ow.save_file(want, base + "sharded/w.safetensors", max_shard_size=200, storage_options=options)
    for name in ("sharded/", "sharded/w.safetensors.index.json"):
        same(ow.load_file(base + name, framework="np", storage_options=options), want)
    with pytest.raises(ow.NotFoundError):
        ow.load_file(base + "empty/", framework="np", storage_options=options)


def test_cache(servers: dict[str, Store], tmp_path: Path) -> None:
    """With cache=, an object in S3 is fetched once, and again only after it has changed."""
    options, base = servers["s3"]
    options = options | {"cache": tmp_path / "cache"}
    for seed in (1, 2):
        ow.save_file(weights(seed), base + "cached", storage_options=options)
        for _ in range(2):
            same(ow.load_file(base + "cached", framework="np", storage_options=options), weights(seed))
        assert len([p for p in (tmp_path / "cache").iterdir() if p.suffix not in (".lock", ".note")]) == seed


def test_uploads_in_parts_and_reads_by_ranges(servers: dict[str, Store]) -> None:
    """A large object is uploaded in parts while it is being encoded, and appears after the last part. A slice of it
    requests only its range, with the ETag. If a part is refused, the upload is aborted, the store keeps no part of it,
    and the earlier object stays."""
    options, base = servers["s3"]
    rng = np.random.default_rng(5)
    # 32 MiB of noise, which does not compress.
    old, big = weights(), {f"w{at}": rng.integers(0, 256, (512, 16384), np.uint8) for at in range(4)}
    ow.save_file(old, base + "parts", storage_options=options)
    with stores.front(str(options["endpoint_url"])) as (url, front):
        through = {**options, "endpoint_url": url}
        front.refuse = "partNumber=2"
        with pytest.raises(ow.AccessError, match="403"):
            ow.save_file(big, base + "parts", storage_options=through)
        # Waits until the store has forgotten the aborted upload, because a part may still be in flight.
        ended = [(method, status) for method, path, _, status, _ in front.asked if "uploadId=" in path and method in ("DELETE", "GET")]
        assert ended[0] == ("DELETE", 204) and ended[-1] == ("GET", 404), ended
        same(ow.load_file(base + "parts", framework="np", storage_options=options), old)
    # This needs a new proxy, because aborted parts may still pass through the first.
    with stores.front(str(options["endpoint_url"])) as (url, front):
        through = {**options, "endpoint_url": url}
        ow.save_file(big, base + "parts", storage_options=through)
        sent = [(method, path.partition("?")[2]) for method, path, *_ in front.asked]
        numbers = [query for method, query in sent if method == "PUT" and "partNumber=" in query]
        assert len(numbers) >= 3 and sent[0][0] == "POST" and "uploads" in sent[0][1]
        assert sent[-1][0] == "POST" and "uploadId=" in sent[-1][1]  # the last request completes the upload
        front.asked[:] = []
        with ow.safe_open(base + "parts", framework="np", storage_options=through) as f:
            assert f.get_slice("w2")[100:110].tobytes() == big["w2"][100:110].tobytes()
        gets = [(headers, status, size) for method, _, headers, status, size in front.asked if method == "GET"]
        assert gets and all(status == 206 and headers["Range"].startswith("bytes=") for headers, status, _ in gets)
        assert all(headers["If-Match"] for headers, *_ in gets[1:]) and sum(size for *_, size in gets) < 4 << 20
        same(ow.load_file(base + "parts", framework="np", storage_options=through), big)


def test_customer_key(servers: dict[str, Store]) -> None:
    """sse_customer_key is never sent over plain HTTP, not even within this machine. Go tests cover a store with TLS."""
    options, base = servers["s3"]
    with stores.front(str(options["endpoint_url"])) as (url, front):
        through = {**options, "endpoint_url": url, "sse_customer_key": "0123456789abcdef0123456789abcdef"}
        for call in (
            lambda: ow.save_file(weights(), base + "sse", storage_options=through),
            lambda: ow.load_file(base + "sse", framework="np", storage_options=through),
            lambda: ow.inspect(base + "sse", storage_options=through),
        ):
            with pytest.raises(ow.ArgumentError, match="sse_customer_key: the key would be sent unencrypted"):
                call()
        assert not front.asked


def test_presigned(servers: dict[str, Store]) -> None:
    """A presigned URL can be read without credentials. A changed or expired one is refused."""
    options, base = servers["s3"]
    ow.save_file(weights(), base + "pre signed", storage_options=options)
    url = presign(base + "pre signed", 3600, storage_options=options)
    same(ow.load_file(url, framework="np"), weights())
    at = url.index("X-Amz-Signature=") + 16
    short = presign(base + "pre signed", 1, storage_options=options)
    with pytest.raises(ow.AccessError):
        ow.load_file(url[:at] + ("b" if url[at] == "a" else "a") + url[at + 1 :], framework="np")
    time.sleep(2.1)
    with pytest.raises(ow.AccessError):
        ow.load_file(short, framework="np")
    assert str(options["secret"]) not in url


def test_environment(servers: dict[str, Store], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials in os.environ and in AWS's files are read at each call."""
    options, base = servers["s3"]
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", str(options["endpoint_url"]))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", stores.S3_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", stores.S3_SECRET)
    want = weights()
    ow.save_file(want, base + "env.safetensors")
    same(ow.load_file(base + "env.safetensors", framework="np"), want)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-wrong")
    with pytest.raises(ow.AccessError, match="SignatureDoesNotMatch"):
        ow.load_file(base + "env.safetensors", framework="np")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[team]\naws_access_key_id={stores.S3_KEY}\naws_secret_access_key={stores.S3_SECRET}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    same(ow.load_file(base + "env.safetensors", framework="np", storage_options={"profile": "team"}), want)
    redis_options, redis_base = servers["redis"]
    ow.save_file(want, redis_base + "env", storage_options=redis_options)
    monkeypatch.setenv("REDISCLI_AUTH", str(redis_options["password"]))
    same(ow.load_file(redis_base + "env", framework="np"), want)


def test_refusals_keep_secrets(
    servers: dict[str, Store], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every request that a store refuses raises an error of the right class that shows no secret."""
    caplog.set_level(logging.DEBUG)
    s3, base = servers["s3"]
    red, redis_base = servers["redis"]
    ow.save_file(weights(), base + "r", storage_options=s3)
    ow.save_file(weights(), redis_base + "r", storage_options=red)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ow.AccessError, base + "r", s3 | {"secret": "planted-wrong"}),
        (ow.AccessError, base + "r", s3 | {"key": "AKIAPLANTEDUNKNOWN00"}),
        (ow.AccessError, base + "r", {"endpoint_url": s3["endpoint_url"], "anon": True}),
        (ow.NotFoundError, base + "none", s3),
        (ow.NotFoundError, "s3://nobucket/r", s3),
        (ow.ArgumentError, base + "r", s3 | {"planted": "planted"}),
        (ow.ArgumentError, "s3://planted:planted@models/r", s3),
        (ow.AccessError, redis_base + "r", {"password": "planted-wrong"}),
        (ow.AccessError, redis_base + "r", {"username": "planted", "password": "planted"}),
        (ow.NotFoundError, redis_base + "none", red),
        (ow.AccessError, redis_base.replace("//", "//:planted@") + "r", {}),
        (ow.ArgumentError, redis_base.replace("//", "//:planted%zz@") + "r", red),
    ]
    calls: list[Callable[[str, dict[str, Any]], object]] = [
        lambda uri, options: ow.load_file(uri, framework="np", storage_options=options),
        lambda uri, options: ow.inspect(uri, storage_options=options),
        lambda uri, options: ow.verify(uri, storage_options=options),
        lambda uri, options: ow.preload(uri, storage_options=options).result(30),
    ]
    shown = []
    for kind, uri, options in cases:
        for call in calls:
            with pytest.raises(kind) as caught:
                call(uri, options)
            shown += [str(caught.value), repr(caught.value), str(getattr(caught.value, "source", ""))]
        if kind is not ow.NotFoundError:
            with pytest.raises(kind) as caught:
                ow.save_file(weights(), uri, storage_options=options)
            shown.append(str(caught.value))
    with pytest.raises(ow.NotSupportedError):
        ow.save_file(weights(), "https://example.invalid/x")
    out, err = capfd.readouterr()
    everything = "\n".join([*shown, out, err, caplog.text])
    # The name of an unknown option may be shown, but not its value.
    for secret in stores.SECRETS:
        hits = [line for line in everything.splitlines() if secret in line.replace('no option "planted"', "")]
        assert not hits, (secret, hits[:3])


def test_example(servers: dict[str, Store], tmp_path: Path) -> None:
    """examples/stores.py runs unchanged with both stores."""
    s3, base = servers["s3"]
    env = {
        "S3": base + "example/",
        "AWS_ENDPOINT_URL_S3": str(s3["endpoint_url"]),
        "AWS_ACCESS_KEY_ID": stores.S3_KEY,
        "AWS_SECRET_ACCESS_KEY": stores.S3_SECRET,
        "REDIS": servers["redis"][1] + "example/",
        "REDISCLI_AUTH": stores.REDIS_PASSWORD,
    }
    example = stores.ROOT / "examples" / "stores.py"
    done = warm.fresh([example], cwd=tmp_path, env=os.environ | env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("model.safetensors: ") == 2 and not list(tmp_path.iterdir())


def test_nothing_leaks(store: Store) -> None:
    """After a load, successful or not, its connections and their descriptors are closed."""
    options, base = store
    ow.save_file(weights(), base + "leak", storage_options=options)

    def use() -> None:
        for _ in range(10):
            ow.load_file(base + "leak", framework="np", storage_options=options)
            with pytest.raises(ow.NotFoundError):
                ow.load_file(base + "gone", framework="np", storage_options=options)
            ow.save_file(weights(), base + "leak", storage_options=options)

    use()
    before = len(os.listdir("/proc/self/fd"))
    use()
    use()
    assert soon(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the last connections close in the background


def test_tensors_sleep_into_a_store(store: Store) -> None:
    """sleep(to_file=) can write the tensors to a store. If the file cannot be written, the tensors stay awake."""
    torch: Any = pytest.importorskip("torch")
    options, base = store
    want = {**weights(), "turned": weights()["a"].T.copy()}
    tensors = {name: torch.from_numpy(value).clone() for name, value in want.items()}
    tensors["turned"] = tensors["a"].t()
    uri = base + "asleep.safetensors"
    with ow.sleep(tensors, to_file=uri, storage_options=options):
        assert not tensors["a"].untyped_storage().nbytes()
        same(ow.load_file(uri, framework="np", storage_options=options), want)
    assert all(bool((tensors[name].numpy() == value).all()) for name, value in want.items())
    held = {"a": torch.ones(3000)}
    with pytest.raises(ow.OverwireError):
        ow.sleep(held, to_file=base + "x.unknown/\0", storage_options=options)
    with pytest.raises(ow.ArgumentError, match="storage_options"):
        ow.sleep(held, to_file="here.safetensors", storage_options=options)
    assert held["a"].sum() == 3000
