"""Tests that offload uses the stored chunks of compressed files without encoding them again."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checksums
import overwire as ow
import pytest
import torch
from overwire import codecs
from test_offload import Cast, Model, outputs, slots_are_poisoned  # noqa: F401
from test_offload_tiers import TIERS, device_with, tiers_of


@pytest.fixture(params=["host", *TIERS])
def tier(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes `offload` use the tier of the parameter by default."""
    monkeypatch.setattr(ow, "offload", functools.partial(ow.offload, **TIERS.get(request.param, {})))
    return str(request.param)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each call that encodes adds its number of buffers."""
    counts: list[int] = []
    run = codecs.run

    def count(op: Any, sources: Any, **options: Any) -> Any:
        counts.extend([len(sources)] if op == "encode" else [])
        return run(op, sources, **options)

    monkeypatch.setattr(codecs, "run", count)
    return counts


def saved(folder: Path, model: torch.nn.Module, **options: Any) -> Path:
    ow.save_model(model, folder / "m.safetensors", **{"compress": True, **options})
    return folder / ("m.safetensors" if (folder / "m.safetensors").exists() else "m.safetensors.index.json")


def on_meta(make: Callable[[], torch.nn.Module] = Model) -> Any:
    with torch.device("meta"):
        model = make()
    if isinstance(model, Model):
        model.head.weight = model.embed.weight
        for layer in model.layers:
            layer.scale = torch.full((1,), 0.5, dtype=torch.bfloat16)
    return model


@pytest.mark.parametrize("how", ["file", "shards", "pinned", "open chunks"])
def test_stored_chunks_are_not_encoded_again(tier: str, encoded: list[int], tmp_path: Path, how: str) -> None:
    """Outputs match the resident model's, each stored stream has the bytes of the file's chunks, and `close` restores
    all weights."""
    model = Model()
    reference = outputs(model)
    path = saved(tmp_path, model, **({"max_shard_size": 100_000} if how == "shards" else {}))
    assert (path.suffix == ".json") == (how == "shards")
    source = ow.pin(path) if how == "pinned" else path
    encoded.clear()
    empty = on_meta()
    with ow.offload(empty, "cpu", source=source) as offloaded:
        assert encoded == [] and tiers_of(offloaded) == {"host": "hhhhh", "device": "ddddd"}.get(tier, tiers_of(offloaded))
        assert torch.equal(outputs(empty), reference)
        if how == "file":
            data, streams = path.read_bytes(), [one.stored for one in offloaded._away]
            for block in streams:
                for offset, length, _ in block.streams:
                    stream = bytes(block.memory.tensor[offset : offset + length].numpy())
                    assert stream[:4] == b"OWBS" and stream[96:-16] in data  # a header, one chunk, and padding
    assert encoded == []
    for ours, theirs in zip(empty.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Odd(torch.nn.Module):
    """A block with weights of every kind. All blocks of a model are the same, so the file stores each weight once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = torch.nn.Linear(300, 700, dtype=torch.bfloat16)  # one chunk
        self.large = torch.nn.Parameter(torch.randn(1200, 1000).bfloat16())  # several chunks
        self.same = torch.nn.Parameter(self.large.detach().clone())  # the file stores these two only once
        self.scalar = torch.nn.Parameter(torch.tensor(0.75))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.noise = torch.nn.Parameter(torch.randint(0, 256, (5000,), dtype=torch.uint8), requires_grad=False)  # plain
        self.short = torch.nn.Parameter(torch.randn(3, 5, 7).half())
        self.turned = torch.nn.Parameter(torch.randn(64, 48).bfloat16().t())

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        firsts = [x + one.flatten()[:1].float() for one in self.parameters() if one.numel()]
        return [*firsts, self.up(x[:, :300].bfloat16())]


class Odds(torch.nn.Module):
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Odd() for _ in range(3))
        self.layers[1].up.weight = self.layers[0].up.weight  # tied: it stays on the device
        if dtype is not None:
            for layer in self.layers:
                layer.large.data = layer.large.data.to(dtype)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [y for layer in self.layers for y in layer(x)]


def test_odd_weights(tier: str, encoded: list[int], tmp_path: Path) -> None:
    """Equal, plain, tied, 0-dim and empty weights work. Only weights that are not in row-major order are encoded."""
    model, x = Odds(), torch.randn(2, 300)
    expected = model(x)
    path = saved(tmp_path, model)
    for other in (Odds(), on_meta(Odds)):
        if other.layers[0].up.weight.is_meta:
            other.layers[1].up.weight = other.layers[0].up.weight
        encoded.clear()
        with ow.offload(other, "cpu", source=path):
            assert encoded == [1] * 3  # only `turned`
            assert all(map(torch.equal, other(x), expected))
        assert all(map(torch.equal, other.parameters(), model.parameters()))
        assert [one.stride() for one in other.parameters()] == [one.stride() for one in model.parameters()]


def test_weights_that_are_cast(tier: str, encoded: list[int], tmp_path: Path) -> None:
    """A weight with another dtype than in the file is cast and encoded. Other weights are not."""
    model, x = Odds(), torch.randn(2, 300)
    path = saved(tmp_path, model)
    cast, reference = Odds(torch.float32), Odds(torch.float32)
    encoded.clear()
    with ow.offload(cast, "cpu", source=path):
        assert encoded == [1] * 6  # `large` and `turned` of each layer
        assert all(map(torch.equal, cast(x), reference(x)))


def test_other_files_are_encoded(tier: str, encoded: list[int], tmp_path: Path) -> None:
    """Weights of plain files, of files at level "smaller", and of preloaded files are encoded."""
    model = Model()
    reference = outputs(model)
    for options, preload in (({"compress": False}, False), ({"level": "smaller"}, False), ({}, True)):
        path = saved(tmp_path, model, **options)
        held = ow.preload(path) if preload else None
        encoded.clear()
        empty = on_meta()
        with ow.offload(empty, "cpu", source=path):
            assert len(encoded) == 30 or options == {"level": "smaller"} and 0 < len(encoded) < 30
            assert torch.equal(outputs(empty), reference)
        assert held is None or held.wait()


def chunk_at(path: Path, name: str) -> int:
    """Returns the offset of a tensor's first stored byte."""
    data = path.read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    offset: int = json.loads(data[8:base])[name]["data_offsets"][0]
    return base + offset


@pytest.mark.parametrize("sums", [False, True])
def test_a_wrong_chunk(tier: str, tmp_path: Path, sums: bool) -> None:
    """The error names the file, tensor and chunk, even if the checksum matches the wrong bytes of the chunk. A model on
    meta does not change."""
    path = saved(tmp_path, Odds())
    name = "layers.0.large"
    data = bytearray(path.read_bytes())
    at = chunk_at(path, name)
    if sums:
        data[at + 32 : at + 48] = data[at + 32 : at + 48][::-1]  # the frequencies of the chunk's symbols
        data = bytearray(checksums.with_checksums(data))
    else:
        data[at + 1000] ^= 1
    path.write_bytes(data)
    model = on_meta(Odds)
    model.layers[1].up.weight = model.layers[0].up.weight
    with pytest.raises(ow.CorruptError, match=r"m\.safetensors.*layers\.0\.large") as caught:
        ow.offload(model, "cpu", source=path)
    assert (caught.value.tensor, caught.value.chunk) == (name, 0) and str(caught.value.source).endswith("m.safetensors")
    assert all(one.is_meta for one in model.parameters())


def test_a_file_that_changes_while_it_is_read(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes while its chunks are loaded is refused."""
    from overwire.offloading.source import Source

    path = saved(tmp_path, Model())
    load = Source.load_streams

    def change(*args: Any) -> Any:
        with open(path, "r+b") as file:
            os.utime(file.fileno(), ns=(1, 1))
        return load(*args)

    monkeypatch.setattr(Source, "load_streams", change)
    model = on_meta()
    with pytest.raises(ow.OverwireError, match="chang"):
        ow.offload(model, "cpu", source=path)
    assert all(one.is_meta for one in model.parameters())


def test_the_next_block_is_loaded_during_a_check(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is checked once, in order, after the load of the next block has begun. If a check fails, the error is
    raised only when no load is running."""
    from overwire.offloading import tiers
    from overwire.offloading.source import Source

    path, events, sources = saved(tmp_path, Model()), [], []
    load, check = Source.load_streams, tiers.check_streams

    def begin(self: Any, *given: Any) -> Any:
        events.append("load")
        sources.append(self)
        return load(self, *given)

    def note_check(*given: Any) -> Any:
        events.append("check")
        return check(*given)

    def fail(*given: Any) -> Any:
        if events.count("check") == 2:
            assert sources[0]._loads
            raise ow.CorruptError("damaged")
        return note_check(*given)

    monkeypatch.setattr(Source, "load_streams", begin)
    monkeypatch.setattr(tiers, "check_streams", note_check)
    ow.offload(on_meta(), "cpu", source=path).close()
    assert events == ["load", *["load", "check"] * 4, "check"]
    events.clear()
    sources.clear()
    monkeypatch.setattr(tiers, "check_streams", fail)
    model = on_meta()
    with pytest.raises(ow.CorruptError, match="damaged"):
        ow.offload(model, "cpu", source=path)
    assert not sources[0]._loads and all(one.is_meta for one in model.parameters())


def test_unchanged_weights_do_not_count_as_changed(tier: str, tmp_path: Path) -> None:
    """Weights that still have the file's bytes after a run do not count as changed."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Cast(torch.bfloat16, 61) for _ in range(3))
    path = saved(tmp_path, model)
    with ow.offload(model, "cpu", source=path) as offloaded, torch.no_grad():
        for layer in model.layers:
            for parameter in layer.parameters():
                assert parameter.shape
            layer(torch.zeros(2, 61))
        assert not any(one.is_changed for one in offloaded._away)


@pytest.mark.parametrize("count", [0, 3])
def test_a_device_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """With where="device", the error names the tier and the block, and the model stays on meta. With where="auto",
    blocks that do not fit go to the host."""
    model = Model()
    path = saved(tmp_path, model)
    device_with(monkeypatch, count)
    empty = on_meta()
    with pytest.raises(ow.OutOfMemoryError, match=rf"full.* block 'layers\.{count}'.* where='device'"):
        ow.offload(empty, "cpu", where="device", source=path)
    assert all(one.is_meta for one in empty.parameters())
    device_with(monkeypatch, count)
    with ow.offload(empty, "cpu", where="auto", room="1GB", source=path) as offloaded:
        assert tiers_of(offloaded) == "d" * count + "h" * (5 - count)
        assert torch.equal(outputs(empty), outputs(model))
