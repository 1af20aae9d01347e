"""Tests deltas and pushes of weights through real S3 and Redis servers, and over HTTP."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import stores
import test_live
import test_sglang
import test_vllm
from overwire.integrations.load_plan.update_weights import reason_against
from overwire.integrations.pushes import reason_against_numbers

Store = tuple[dict[str, Any], str]


@pytest.fixture(scope="module", params=["s3", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "s3":
        with stores.s3() as (options, _):
            yield options, "s3://models/"
    else:
        with stores.redis() as (options, base):
            yield options, base


def states() -> list[dict[str, Any]]:
    """Returns three states of a model: at the start, and after each of two training steps."""
    rng = np.random.default_rng(7)
    made = [
        {
            name: rng.standard_normal(size).astype(np.float32)
            for name, size in {"a": (600, 700), "b": (500,), "c": (300, 900)}.items()
        }
    ]
    made[0]["none"], made[0]["one"] = np.zeros((0, 3), np.int8), np.array(3.0)
    for _ in range(2):
        after = {name: value.copy() for name, value in made[-1].items()}
        for value in after.values():
            value.reshape(-1)[::97] += 1
        made.append(after)
    return made


def same(got: dict[str, Any], want: dict[str, Any]) -> bool:
    return got.keys() == want.keys() and all(got[name].tobytes() == want[name].tobytes() for name in want)


def test_deltas_in_a_store(store: Store) -> None:
    """A delta in one file, a delta in shards, and a chain of both can be written to a store and applied from there. New
    shards replace old ones. A refused delta changes nothing."""
    options, base = store
    old, mid, new = states()
    reach: Any = {"storage_options": options}
    ow.save_file(old, base + "old.safetensors", **reach)
    one, two = base + "steps/one.safetensors", base + "two/"
    ow.save_delta(mid, base + "old.safetensors", one, **reach)
    report = ow.save_delta(new, mid, two, max_shard_size=2000, **reach)
    assert len(report.files) > 2 and report.files[-1] == two + "delta.safetensors.index.json"
    assert ow.open_delta(two, **reach).nbytes == report.stored
    got = ow.load_file([one, two], base=base + "old.safetensors", framework="np", **reach)
    assert same(got, new)
    live = {name: value.copy() for name, value in old.items()}
    with pytest.raises(ow.DeltaBaseError):
        ow.apply_delta(live, two, **reach)
    assert same(live, old)
    ow.apply_delta(live, [one, two + "delta.safetensors.index.json"], **reach)
    assert same(live, new)
    merged = base + "merged.safetensors"
    for limit in (1, 5000, None):  # fewer shards with each save, and finally one file
        if limit is None:
            with pytest.raises(ow.ArgumentError, match="index.json"):
                ow.merge_deltas([one, two], merged, **reach)
            limit = 1 << 40
        report = ow.merge_deltas([one, two], merged, max_shard_size=limit, **reach)
        assert same(ow.load_file(report.files[-1], base=old, framework="np", **reach), new)
    assert report.files == (merged,)
    with pytest.raises(ow.NotFoundError):
        ow.open_delta(merged + ".index.json", **reach)
    with pytest.raises(ow.NotFoundError):
        ow.open_delta(base + "nowhere.safetensors", **reach)


class Quiet(SimpleHTTPRequestHandler):
    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client does not wait for the body of an error
            super().handle_one_request()

    def log_message(self, *_: object) -> None:
        pass


def test_deltas_over_http(tmp_path: Path) -> None:
    """A delta can be read as a file, through its index, and from a folder that cannot be listed."""
    old, new, _ = states()
    ow.save_file(old, tmp_path / "old.safetensors")
    ow.save_delta(new, old, tmp_path / "one.safetensors")
    for name, limit in (("many", 1000), ("few", None)):
        (tmp_path / name).mkdir()
        ow.save_delta(new, old, tmp_path / name, max_shard_size=limit)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        for name in ("one.safetensors", "many/", "many/delta.safetensors.index.json", "few/"):
            assert same(ow.load_file(url + name, base=url + "old.safetensors", framework="np"), new)
            live = {name: value.copy() for name, value in old.items()}
            ow.apply_delta(live, ow.open_delta(url + name))
            assert same(live, new)
    finally:
        server.shutdown()
        server.server_close()


CARRIED = """
model, source = Model(), Source(step(1))
client = Client(engine(model))
options = json.loads(sys.argv[3])
kinds = []
update = client.update_weights
client.update_weights = lambda info: (kinds.append(info["kind"]), update(info))
sends = trainer(client, source, deltas=True, storage_options=options)
for n in (1, 2, 3, 4):
    source.update(step(n))
    sends.send_weights()
    assert holds(model, n)
assert kinds == ["whole", "delta", "delta", "delta"]
model.qkv.weight.data[0, 0] += 1
source.update(step(5))
assert "q.weight" in raised(Exception, sends.send_weights)
sends.send_weights()
sends.send_weights(whole=True)
assert holds(model, 5) and kinds[4:] == ["delta", "whole", "whole"]
sends.shutdown()
wrong = {name: "no" if name in ("secret", "password") else value for name, value in options.items()}
lost = trainer(client, source, storage_options=options, worker_options=wrong)
before = model.qkv.weight.clone()
said = raised(Exception, lost.send_weights)
assert options.get("secret", "x" * 9) not in said and options.get("password", "x" * 9) not in said
assert torch.equal(model.qkv.weight, before)
"""


def test_vllm_accepts_pushes_from_a_store(store: Store, tmp_path: Path) -> None:
    """The trainer pushes whole weights and deltas to the engine. A delta with another base is refused, and the next
    push has whole weights. The error of a worker that may not read contains no secrets."""
    options, base = store
    test_live.stand_ins(tmp_path / "vllm", {**test_vllm.VLLM, **test_live.TRANSFER})
    code = test_vllm.REGISTER + test_vllm.PRELUDE + test_live.WORKER + CARRIED
    test_vllm.run(tmp_path, code, tmp_path, base + "run 7/pushes", json.dumps(options))


SGLANG = """
sys.modules["sglang.srt.distributed"] = types.ModuleType("sglang.srt.distributed")
sys.modules["sglang.srt.distributed"].parallel_state = types.SimpleNamespace(_TP=None)
from overwire.integrations.pushes import Publisher
from overwire.integrations.sglang import updates
options = json.loads(sys.argv[3])
publisher = Publisher(sys.argv[2], deltas=True, storage_options=options)
model = Model()
for n in (1, 2, 3):
    tensors = {p + ".weight": torch.full((64, 64), n + i, dtype=torch.bfloat16) for i, p in enumerate(["q", "k", "v", "linear"])}
    with publisher.push(tensors) as push:
        assert push.info["kind"] == ("whole" if n == 1 else "delta")
        updates.load(model, updates.message(push.info, options))
    assert torch.equal(model.qkv.weight, torch.cat([tensors[p + ".weight"] for p in "qkv"]))
"""


def test_sglang_accepts_pushes_from_a_store(store: Store, tmp_path: Path) -> None:
    options, base = store
    test_live.stand_ins(tmp_path / "sglang", test_sglang.SGLANG)
    test_vllm.run(tmp_path, test_vllm.PRELUDE + SGLANG, tmp_path, base + "sglang", json.dumps(options))


def test_every_wrong_field_of_a_push_is_named() -> None:
    """Every wrong field of a push is named, in the order of the fields."""
    assert reason_against("delta", None) == reason_against_numbers(number=1, size=5) == ""
    reason = reason_against("half", 3)
    assert reason.index("kind must") < reason.index("path must")
    for wrong in (0, -1, True, "1", None, 1 << 63):
        reason = reason_against_numbers(number=wrong, size=wrong)
        assert reason.index("number must") < reason.index("size must"), wrong
