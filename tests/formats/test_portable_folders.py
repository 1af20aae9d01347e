"""Compares how the engine and the portable reader read folders, and which files their `decompress` writes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
from overwire.portable import files, read


def _put(folder: Path, name: str, *tensors: str) -> None:
    ow.save_file({key: np.full(9, len(name) + at, "f4") for at, key in enumerate(tensors)}, folder / name)


def _index(folder: Path, **files: str) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(text)


_SHARD = "model-0000{}-of-00002.safetensors"
_ONE, _TWO = _SHARD.format(1), _SHARD.format(2)
# Folders by their contents: (file, names of its tensors), an index, or the name and text of another file.
FOLDERS: dict[str, list[Any]] = {
    "a file": [("model.safetensors", "a", "b")],
    "shards without an index": [(_ONE, "a"), (_TWO, "b")],
    "shards from 0": [("m-0-of-2.safetensors", "a"), ("m-1-of-2.safetensors", "b")],
    "one of two shards": [(_ONE, "a")],
    "one of two shards, and another file": [(_ONE, "a"), ("other.safetensors", "o")],
    "one of many shards": [("m-1-of-999999999.safetensors", "a")],
    "one shard under two numbers": [("m-1-of-2.safetensors", "a"), ("m-01-of-2.safetensors", "b")],
    "shards of two sets": [(_ONE, "a"), (_TWO, "b"), ("x-1-of-1.safetensors", "c")],
    "an index": [(_ONE, "a"), (_TWO, "b"), {"a": _ONE, "b": _TWO}],
    "an index in another order": [(_ONE, "a"), (_TWO, "b", "c"), {"c": "./" + _TWO, "b": _TWO, "a": _ONE}],
    "a listed shard is missing": [(_ONE, "a"), {"a": _ONE, "b": _TWO}],
    "a listed tensor is missing": [(_ONE, "a"), {"a": _ONE, "b": _ONE}],
    "a stale tensor": [(_ONE, "a", "stale"), (_TWO, "b", "a"), {"a": _ONE, "b": _TWO}],
    "a stale alias": [(_ONE, "a"), ("x.safetensors", "b"), {"a": _ONE}],
    "an index that lists nothing": [("model.safetensors", "a"), {}],
    "an index that leads out": [("model.safetensors", "a"), {"a": "../model/model.safetensors"}],
    "an index of numbers": [("model.safetensors", "a"), "model.safetensors.index.json", '{"weight_map":{"a":1}}'],
    "an index that is a list": [("model.safetensors", "a"), "model.safetensors.index.json", "[]"],
    "an index with a name twice": [
        ("model.safetensors", "a"), "model.safetensors.index.json",
        '{"weight_map":{"a":"model.safetensors","a":"model.safetensors"}}',
    ],
    "an index that is cut off": [("model.safetensors", "a"), "model.safetensors.index.json", '{"weight_map":{"a"'],
    "two indexes": [("model.safetensors", "a"), {"a": "model.safetensors"}, "x.safetensors.index.json",
                    '{"weight_map":{"a":"model.safetensors"}}'],
    "a variant": [("model.safetensors", "a"), ("model.fp16.safetensors", "a")],
    "a variant only": [("model.fp16.safetensors", "a")],
    "two variants": [("model.fp16.safetensors", "a"), ("model.bf16.safetensors", "a")],
    "shards of a variant": [("model-00001-of-00001.fp16.safetensors", "a"), ("model.fp16-00001-of-00001.safetensors", "a")],
    "an index of a variant": [("model.fp16-00001-of-00001.safetensors", "a"), "model.safetensors.index.fp16.json",
                              '{"weight_map":{"a":"model.fp16-00001-of-00001.safetensors"}}'],
    "names with other dots": [("my.model.safetensors", "a"), ("my.other.safetensors", "b")],
    "a file and shards": [("model.safetensors", "a"), (_ONE, "b")],
    "consolidated": [("consolidated.safetensors", "c"), ("model.safetensors", "a")],
    "consolidated only": [("consolidated.safetensors", "c")],
    "a marked shard": [("model-ow0123abcd-00001-of-00001.safetensors", "a")],
    "a marked shard and another": [("model-ow0123abcd-00001-of-00001.safetensors", "a"), ("model.safetensors", "b")],
    "a marked shard that is listed": [("model-ow0123abcd-00001-of-00001.safetensors", "a"),
                                      {"a": "model-ow0123abcd-00001-of-00001.safetensors"}],
    "hidden": [(".model.safetensors", "h"), ("model.safetensors", "a")],
    "twins": [("x.safetensors", "a"), ("y.safetensors", "a")],
    "other files": [("x.safetensors", "a"), ("y.safetensors", "b")],
    "nothing": ["config.json", "{}"],
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_both_readers_read_the_same_files_of_a_folder(tmp_path: Path, case: str) -> None:
    """Both readers load the files that a folder's index names or, without an index, all its files. `load_file` and
    `decompress` of both readers refuse part of a model, or several models, with the same error class. `inspect` lists
    the loaded files."""
    folder, parts = tmp_path / "model", iter(FOLDERS[case])
    folder.mkdir()
    for part in parts:
        if isinstance(part, tuple):
            _put(folder, *part)
        elif isinstance(part, dict):
            _index(folder, **part)
        else:
            (folder / part).write_text(next(parts))
    fates: list[Any] = []
    for load in (ow.load_file, read.load_file):
        try:
            fates.append({name: bytes(data) for name, data in load(folder, framework="bytes").items()})
        except ow.OverwireError as error:
            fates.append(type(error))
    assert fates[0] == fates[1]
    if isinstance(fates[0], dict):
        listed = [tensor["name"] for source in files.inspect(folder)["sources"] for tensor in source["tensors"]]
        assert sorted(listed) == sorted(fates[0])
        files.decompress(folder, tmp_path / "plain")
        assert {path.name for path in (tmp_path / "plain").iterdir()} == {path.name for path in folder.iterdir()}
        plain = ow.load_file(tmp_path / "plain", framework="bytes")
        assert {name: bytes(data) for name, data in plain.items()} == fates[0]
        index = folder / "model.safetensors.index.json"
        if index.exists():
            assert {name: bytes(data) for name, data in read.load_file(index, framework="bytes").items()} == fates[0]
    elif case != "twins":
        for call in (files.inspect, lambda source: files.decompress(source, tmp_path / "plain")):
            with pytest.raises(fates[0]):
                call(folder)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a new index appears while a folder is being read, the files are opened again. A second change raises an
    error."""
    tensors = {f"t{n}": np.full(999, 10.0**n, "f4") for n in range(3)}
    ow.save_file(tensors, tmp_path / "model.safetensors", max_shard_size=4000)
    opened, turns = read.safe_open, []

    def replacing(*args: Any) -> Any:
        if len(turns) < most:
            turns.append(len(turns) + 2.0)
            ow.save_file({name: t * turns[-1] for name, t in tensors.items()}, tmp_path / "model.safetensors",
                         max_shard_size=4000)  # fmt: skip
        return opened(*args)

    monkeypatch.setattr(read, "safe_open", replacing)
    most = 1
    assert [float(t[0]) for t in read.load_file(tmp_path, framework="np").values()] == [2.0, 20.0, 200.0]
    assert turns == [2.0]
    most = 99
    with pytest.raises((ow.CorruptError, ow.NotFoundError, FileNotFoundError)):
        read.load_file(tmp_path, framework="np")


def test_files_are_synced_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`decompress` syncs each file before it renames it, and the folder afterwards. If it writes a folder, it syncs all
    files and subfolders first. If a sync fails, the old file stays."""
    ow.save_file({"a": np.arange(999.0)}, tmp_path / "a.safetensors")
    (tmp_path / "m/below").mkdir(parents=True)
    for name in ("m/a.safetensors", "m/below/b.safetensors"):
        shutil.copy(tmp_path / "a.safetensors", tmp_path / name)
    (tmp_path / "m/config.json").write_text("{}")
    calls: list[str] = []
    real, move = os.fsync, os.replace

    def fsync(number: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), move(a, b)))
    files.decompress(tmp_path / "a.safetensors", tmp_path / "b.safetensors", overwrite=True)
    assert calls == ["made", "replace", tmp_path.name]
    calls.clear()
    files.decompress(tmp_path / "m", tmp_path / "n")
    assert calls == ["a.safetensors", "b.safetensors", "below", "config.json", "made", "replace", tmp_path.name]
    ow.load_file(tmp_path / "n/below")
    kept = (tmp_path / "b.safetensors").read_bytes()

    def fail(number: int) -> None:
        raise OSError(errno.EIO, "the disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk"):
        files.decompress(tmp_path / "m/a.safetensors", tmp_path / "b.safetensors", overwrite=True)
    assert (tmp_path / "b.safetensors").read_bytes() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "m", "n"]


def test_subfolders_are_decompressed(tmp_path: Path) -> None:
    """`decompress` also writes plain files for subfolders, even if the top folder has no model. It refuses part of a
    model in a subfolder, and a link to a folder."""
    for name in ("unet", "vae"):
        (tmp_path / "model" / name).mkdir(parents=True)
        _put(tmp_path / "model" / name, "model.safetensors", name)
    (tmp_path / "model/.git").mkdir()
    (tmp_path / "model/.git/x-1-of-2.safetensors").write_text("hidden")
    files.decompress(tmp_path / "model", tmp_path / "plain")
    for name in ("unet", "vae"):
        assert ow.inspect(tmp_path / "plain" / name)["sources"][0]["format"] == "safetensors"
    assert (tmp_path / "plain/.git/x-1-of-2.safetensors").read_text() == "hidden"
    (tmp_path / "model/link").symlink_to(tmp_path / "plain")
    with pytest.raises(ow.ArgumentError, match="a link to a folder"):
        files.decompress(tmp_path / "model", tmp_path / "again")
    (tmp_path / "model/link").unlink()
    _put(tmp_path / "model/vae", "x-1-of-2.safetensors", "x")
    with pytest.raises(ow.FormatError, match=r"vae: x-1-of-2\.safetensors has no index\.json, and 1 of 2 shards"):
        files.decompress(tmp_path / "model", tmp_path / "again")
    assert not (tmp_path / "again").exists()
