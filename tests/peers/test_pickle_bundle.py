"""Tests the files of a bundle: names, meta.csv, replacements, preloads, and nyacomp's names."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import torch
from conftest import same
from overwire.bundles import bundle as bundles
from overwire.bundles import containers, manifest, opening, turns
from overwire.compat import nyacomp
from overwire.jobs import log
from torch import nn


class Pipeline:
    """An object that looks like a diffusers pipeline."""

    def __init__(self) -> None:
        self.config = {"_class_name": "P", "unet": ("x", "y"), "vae": ("x", "y"), "scheduler": ("x", "y"), "safety": None}
        self.unet, self.vae, self.scheduler, self.safety = nn.Linear(300, 30), nn.Linear(4, 4), {"steps": 5}, None


def test_files_and_meta_csv(tmp_path: Path) -> None:
    """A bundle consists of a small pickle, a container and a meta.csv that lists the container's size."""
    ratio = ow.compress_pickle({"w": torch.randn(400, 300).bfloat16()}, tmp_path / "boneless_bundle.pkl")
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == ["boneless_bundle.pkl", "nya/boneless_bundle.safetensors", "nya/meta.csv"]
    container = tmp_path / "nya/boneless_bundle.safetensors"
    size = container.stat().st_size
    assert ratio == size / (400 * 300 * 2)
    first, line = (tmp_path / "nya/meta.csv").read_text().split("\n")
    name, shape, dtype, plain, stored = line.split(" ")
    assert first == "0" and os.path.samefile(name, container)
    assert (shape, dtype, plain, stored) == (str(size), "uint8", str(size), str(size))
    assert (tmp_path / "boneless_bundle.pkl").stat().st_size < 2000


def test_compress_names_the_tensors(tmp_path: Path) -> None:
    pipeline = Pipeline()
    ratio = ow.compress(pipeline, tmp_path / "boneless_model.pth")
    assert ratio > 0
    with ow.safe_open(tmp_path / "nya/boneless_model.safetensors") as file:
        assert file.keys() == ["unet.bias", "unet.weight", "vae.bias", "vae.weight"]
        same(file.get_tensor("unet.weight"), pipeline.unet.weight.detach())
        assert file.get_slice("unet.weight")[3:5].shape == (2, 300)
    got = ow.load_compressed(tmp_path / "boneless_model.pth", trust=True)
    assert type(got) is Pipeline and torch.equal(got.unet.weight, pipeline.unet.weight) and got.scheduler == {"steps": 5}


def test_compress_refuses_a_path_as_a_model(tmp_path: Path) -> None:
    """nyacomp's `compress` refuses a path in place of a model. The error names the function that compresses files, and
    nothing is written. Objects in a bundle may contain paths."""
    for path in ("a.safetensors", tmp_path / "a.safetensors", b"a.safetensors"):
        with pytest.raises(ow.ArgumentError, match=r"overwire\.compress\('.*a\.safetensors', '.*b\.safetensors'\)"):
            nyacomp.compress(path, tmp_path / "b.safetensors")
    assert not list(tmp_path.iterdir())
    state = {"model": {"w": torch.arange(6.0)}, "epoch": 3, "name": "a path/of it"}
    ow.save_bundle(state, tmp_path / "x.pkl")
    loaded = ow.load_bundle(tmp_path / "x.pkl")
    same(loaded["model"].pop("w"), torch.arange(6.0))
    assert loaded == {"model": {}, "epoch": 3, "name": "a path/of it"}
    with ow.safe_open(tmp_path / "tensors" / "x.safetensors", "np") as file:
        assert list(file.keys()) == ["model.w"]


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _save_by(verb: Any, folder: Path, number: int) -> None:
    verb({"w": torch.full((300,), float(number)), "n": number}, folder / "x.pkl")


def test_a_bundle_cannot_have_the_name_of_a_container(tmp_path: Path) -> None:
    """A pickle cannot be saved under the name of a container, such as D/tensors/x.safetensors for D/x.pkl, because this
    would replace another bundle's tensors. It is refused before anything is written."""
    ow.save_bundle({"w": torch.arange(6.0)}, tmp_path / "x.pkl")
    before = (tmp_path / "tensors" / "x.safetensors").read_bytes()
    for save in (ow.save_bundle, ow.compress_pickle, ow.compress):
        for path in (tmp_path / "tensors" / "x.safetensors", tmp_path / "y.safetensors"):
            with pytest.raises(ow.ArgumentError, match=r"name it \.pkl.*overwire\.save_file"):
                save({"w": torch.zeros(6)}, path)
    assert (tmp_path / "tensors" / "x.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tensors", "x.pkl"]
    same(ow.load_bundle(tmp_path / "x.pkl")["w"], torch.arange(6.0))


def test_the_folder_of_the_container(tmp_path: Path) -> None:
    """save_bundle writes the container into `tensors`. nyacomp's functions write it into `nya`, with their csv. Each
    reader and a preload of the pickle find it, even after the folder was moved."""
    for verb, files in (
        (ow.save_bundle, ["tensors/x.safetensors", "x.pkl"]),
        (ow.compress_pickle, ["nya/meta.csv", "nya/x.safetensors", "x.pkl"]),
        (ow.compress, ["nya/meta.csv", "nya/x.safetensors", "x.pkl"]),
    ):
        folder = tmp_path / verb.__name__
        folder.mkdir()
        _save_by(verb, folder, 1)
        assert _files(folder) == files
        shutil.move(folder, folder := tmp_path / f"{verb.__name__} moved")
        for load in (ow.load_bundle, ow.load_compressed, ow.load_compressed_pickle):
            loaded = load(folder / "x.pkl")
            same(loaded["w"], torch.full((300,), 1.0))
        (uri,) = ow.preload(folder / "x.pkl").uris
        assert uri == str(folder / next(name for name in files if name.endswith(".safetensors")))
        assert len(ow.inspect(folder / "x.pkl")["sources"][0]["tensors"]) == 1


@pytest.mark.parametrize("verbs", [(ow.compress_pickle, ow.save_bundle), (ow.save_bundle, ow.compress_pickle)])
def test_a_bundle_replaces_one_with_another_folder(tmp_path: Path, monkeypatch: Any, verbs: Any) -> None:
    """The old object can be loaded until the new pickle is complete, also if the save fails. Files that only the old
    object used are removed afterwards. Another bundle in the folder stays."""
    old, new = verbs
    _save_by(old, tmp_path, 1)
    old({"w": torch.ones(9)}, tmp_path / "y.pkl")
    before = _files(tmp_path)

    def fail(*args: object, **kwargs: object) -> None:
        raise ow.IOFailure("full")

    with monkeypatch.context() as patch:
        patch.setattr("overwire.bundles.bundle.write_bytes", fail)
        with pytest.raises(ow.IOFailure):
            _save_by(new, tmp_path, 2)
    assert ow.load_bundle(tmp_path / "x.pkl")["n"] == 1 and set(before) <= set(_files(tmp_path))
    _save_by(new, tmp_path, 3)
    loaded = ow.load_bundle(tmp_path / "x.pkl")
    assert loaded["n"] == 3 and loaded["w"].tolist() == [3.0] * 300
    same(ow.load_bundle(tmp_path / "y.pkl")["w"], torch.ones(9))
    places = [name for name in _files(tmp_path) if name.endswith("x.safetensors")]
    assert places == ["tensors/x.safetensors" if new is ow.save_bundle else "nya/x.safetensors"]


def test_a_lost_container_is_named(tmp_path: Path) -> None:
    """The error for a missing container names the folder in which it should be."""
    for verb, name in ((ow.save_bundle, "tensors"), (ow.compress_pickle, "nya")):
        folder = tmp_path / name
        folder.mkdir()
        _save_by(verb, folder, 1)
        (folder / name / "x.safetensors").unlink()
        with pytest.raises(ow.NotFoundError, match=f"{name}/x.safetensors"):
            ow.load_bundle(folder / "x.pkl")


@pytest.mark.parametrize("what", ["module", "state dict", "nested"])
def test_compress_accepts_modules_and_state_dicts(tmp_path: Path, what: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Embedding(5, 8))
    obj = {"module": module, "state dict": module.state_dict(), "nested": {"a": [module, {"b": module.state_dict()}]}}[what]
    ow.compress(obj, tmp_path / "m.pth")
    got = ow.load_compressed(tmp_path / "m.pth")
    if what == "module":
        got = got.state_dict()
    elif what == "nested":
        assert got["a"][0][0].weight.data_ptr() == got["a"][1]["b"]["0.weight"].data_ptr()
        got = got["a"][1]["b"]
    for name, tensor in module.state_dict().items():
        assert torch.equal(got[name], tensor)
    with ow.safe_open(tmp_path / "nya/m.safetensors") as file:
        assert any(key.endswith("0.weight") for key in file.keys())  # noqa: SIM118


def test_a_bundle_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ow.compress_pickle({"w": torch.arange(9)}, tmp_path / "a/x.pkl")
    shutil.move(tmp_path / "a", tmp_path / "b")
    same(ow.load_compressed_pickle(tmp_path / "b/x.pkl")["w"], torch.arange(9))
    assert manifest.local_uris_of(str(tmp_path / "b/nya/meta.csv")) == [str(tmp_path / "b/nya/x.safetensors")]
    assert manifest.local_uris_of(str(tmp_path / "b/meta.csv")) == [str(tmp_path / "b/nya/x.safetensors")]
    assert manifest.local_uris_of(str(tmp_path / "b/x.pkl")) == [str(tmp_path / "b/nya/x.safetensors")]
    for verb in (ow.inspect, ow.verify):
        verb(tmp_path / "b/x.pkl")
        verb(tmp_path / "b/nya/meta.csv")


def test_two_bundles_share_a_folder(tmp_path: Path) -> None:
    for name in ("x", "y"):
        ow.compress_pickle({name: torch.arange(9)}, tmp_path / f"{name}.pkl")
    for name in ("x", "y"):
        assert list(ow.load_compressed_pickle(tmp_path / f"{name}.pkl")) == [name]


def test_names_that_differ_only_in_their_extension(tmp_path: Path) -> None:
    """Bundles with names that differ only in their extension have separate containers, even after a second save."""
    for round_ in range(2):
        for name in ("x.pkl", "x.pth", "x", "x.bin"):
            ow.compress_pickle({name: torch.full((9,), round_)}, tmp_path / name)
    for name in ("x.pkl", "x.pth", "x", "x.bin"):
        same(ow.load_compressed_pickle(tmp_path / name)[name], torch.full((9,), 1))
        ow.preload(tmp_path / name).wait()
        assert list(ow.load_compressed_pickle(tmp_path / name)) == [name]
    assert (tmp_path / "nya/x.safetensors").exists()


def refuse_link(*args: object, **kwargs: object) -> None:
    raise PermissionError(errno.EPERM, "a file system without links")


@pytest.mark.parametrize("links", [True, False])
def test_a_killed_save_leaves_the_old_or_the_new_object(tmp_path: Path, monkeypatch, links: bool) -> None:
    """At whatever point a save is killed, the old or the new object can be loaded, even without hard links."""
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    old, new = {"v": "old", "w": torch.zeros(999)}, {"v": "new", "w": torch.ones(999)}
    path = tmp_path / "x.pkl"

    class Killed(Exception):
        pass

    for stop in range(5):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        ow.compress_pickle(old, path)
        for again in range(2):  # killed twice at the same point
            steps = iter(range(99))

            def step(name: str, real=None, steps=steps, stop=stop):
                def call(*args, **kw):
                    if next(steps) == stop:
                        raise Killed
                    return real(*args, **kw)

                return call

            with monkeypatch.context() as patch:
                for name in ("save_bytes", "write_bytes", "_keep_previous"):
                    patch.setattr(bundles, name, step(name, getattr(bundles, name)))
                try:
                    ow.compress_pickle(new, path)
                    complete = True
                except Killed:
                    complete = False
            got = ow.load_compressed_pickle(path)
            assert got["v"] == ("new" if complete else "old"), (stop, again)
            same(got["w"], (new if complete else old)["w"])
        ow.compress_pickle(new, path)
        assert ow.load_compressed_pickle(path)["v"] == "new"
        assert not (tmp_path / "nya/x.safetensors.old").exists()


def test_a_save_within_a_save_of_the_same_bundle_is_refused(tmp_path: Path) -> None:
    """A callback or a signal handler cannot save the bundle that is just being saved, because it would wait for
    itself."""
    lock, errors = str(tmp_path / ".x.lock"), []

    def both() -> None:
        with turns.turn_of(lock):
            try:
                with turns.turn_of(lock):
                    pass
            except ow.ArgumentError as error:
                errors.append(str(error))
        with turns.turn_of(lock):
            pass

    thread = threading.Thread(target=both, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and "interrupts a save of this bundle" in errors[0] and not list(tmp_path.iterdir())


def test_two_writers_of_one_bundle_take_turns(tmp_path: Path, monkeypatch) -> None:
    """After two simultaneous saves to one path, one of the two objects is there, and no other file."""
    path = tmp_path / "x.pkl"
    real, waiting = bundles.write_bytes, []

    def write_bytes(target: str, data: bytes, options: object) -> None:
        if target == str(path) and not waiting:  # between the container and the pickle of the first save
            waiting.append(threading.Thread(target=ow.compress_pickle, args=({"second": torch.ones(999)}, path)))
            waiting[0].start()
            waiting[0].join(0.3)  # long enough for a save that does not wait
            assert waiting[0].is_alive()
        real(target, data, options)

    monkeypatch.setattr(bundles, "write_bytes", write_bytes)
    ow.compress_pickle({"first": torch.zeros(999)}, path)
    waiting[0].join()
    same(ow.load_compressed_pickle(path)["second"], torch.ones(999))
    assert sorted(os.listdir(tmp_path / "nya")) == ["meta.csv", "x.safetensors"]


def test_the_lock_of_a_killed_writer_stops_no_save(tmp_path: Path, monkeypatch) -> None:
    """The lock file of a killed writer does not stop a save. A save also works without locks, with a warning."""
    path = tmp_path / "x.pkl"
    (tmp_path / "nya").mkdir()
    (tmp_path / "nya/.x.lock").touch()
    ow.compress_pickle({"a": torch.ones(9)}, path)
    assert not (tmp_path / "nya/.x.lock").exists()

    def no_locks(number: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(turns.fcntl, "flock", no_locks)
    warned: list[tuple[object, ...]] = []
    monkeypatch.setattr(log, "warning", lambda *args: warned.append(args))
    ow.compress_pickle({"b": torch.ones(9)}, path)
    assert list(ow.load_compressed_pickle(path)) == ["b"] and len(warned) == 1


def test_a_load_during_saves_returns_the_newest_object(tmp_path: Path, monkeypatch) -> None:
    """If a pickle is replaced twice before a load opens its container, the load returns the newest object."""
    path = tmp_path / "x.pkl"
    ow.compress_pickle({"v": torch.zeros(999)}, path)
    real, news = opening.read_file, [{"w": torch.ones(999)}, {"v": torch.zeros(999), "x": 3}]

    def read_file(target: str) -> bytes:
        data = real(target)
        if news:
            ow.compress_pickle(news.pop(0), path)
        return data

    monkeypatch.setattr(opening, "read_file", read_file)
    assert ow.load_compressed_pickle(path)["x"] == 3


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "\ud800", "__metadata__", "overwire.index", ""])
def test_keys_that_cannot_be_names_of_tensors(tmp_path: Path, name: str) -> None:
    """A state dict is restored with any keys, even with keys that cannot be names in a container."""
    state = {name: torch.arange(999), "blob.0": torch.ones(3), "plain": torch.zeros(3)}
    ow.compress(state, tmp_path / "x.pkl")
    loaded = ow.load_compressed(tmp_path / "x.pkl")
    assert list(loaded) == list(state)
    for key in state:
        same(loaded[key], state[key])


def test_files_of_different_saves_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ow.compress_pickle({name: torch.ones(9)}, tmp_path / f"{name}.pkl")
    shutil.copy(tmp_path / "nya/a.safetensors", tmp_path / "nya/b.safetensors")
    with pytest.raises(ow.CorruptError, match="are from different saves"):
        ow.load_compressed_pickle(tmp_path / "b.pkl")
    (tmp_path / "nya/a.safetensors").unlink()
    with pytest.raises(ow.NotFoundError, match="nya/a.safetensors"):
        ow.load_compressed_pickle(tmp_path / "a.pkl")
    with pytest.raises(FileNotFoundError):
        ow.load_compressed_pickle(tmp_path / "none.pkl")
    with pytest.raises(ow.OverwireError):
        ow.load_compressed_pickle(tmp_path)
    with pytest.raises((ow.ArgumentError, ow.OverwireError)):
        ow.compress_pickle({}, tmp_path / "no/such/folder\0/x.pkl")


def test_an_unpicklable_object_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        ow.compress_pickle({"w": torch.ones(3), "f": lambda: 0}, tmp_path / "x.pkl")
    assert list(tmp_path.iterdir()) == []


def test_the_container_may_be_elsewhere(tmp_path: Path) -> None:
    """tensors= names a container in another place. A missing one, and one of another save, are refused."""
    obj = {"w": torch.randn(99, 99)}
    ow.compress_pickle(obj, tmp_path / "x.pkl")
    (tmp_path / "nya/x.safetensors").rename(tmp_path / "far.ow")
    for place in (tmp_path / "far.ow", f"file://{tmp_path}/far.ow"):
        same(ow.load_compressed_pickle(tmp_path / "x.pkl", tensors=place)["w"], obj["w"])
    ow.compress_pickle({"other": torch.randn(99, 99)}, tmp_path / "x.pkl")
    with pytest.raises(ow.CorruptError, match="are from different saves"):
        ow.load_compressed_pickle(tmp_path / "x.pkl", tensors=tmp_path / "far.ow")
    with pytest.raises(ow.NotFoundError, match="nope"):
        ow.load_compressed_pickle(tmp_path / "x.pkl", tensors=tmp_path / "nope")


def test_plain_containers(tmp_path: Path) -> None:
    """With compress=False, safetensors can read the container."""
    from safetensors.torch import load_file

    module = nn.Linear(300, 40).half()
    for verb, load in ((ow.compress, ow.load_compressed), (ow.compress_pickle, ow.load_compressed_pickle)):
        assert verb(module, tmp_path / "m.pth", compress=False) > 1
        assert torch.equal(load(tmp_path / "m.pth").weight, module.weight)
        assert any(torch.equal(tensor, module.weight) for tensor in load_file(tmp_path / "nya/m.safetensors").values())


def test_a_pickle_that_cannot_be_inspected_keeps_its_container(tmp_path: Path, monkeypatch: Any) -> None:
    """If a pickle that differs only in the extension cannot be inspected, a save fails, because it could replace that
    pickle's container."""
    ow.save_bundle({"a": torch.ones(9)}, tmp_path / "m.pkl")
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "the disk")

    monkeypatch.setattr(containers, "regular", fail)
    with pytest.raises(ow.IOFailure, match=r"m\.pkl"):
        ow.save_bundle({"a": torch.zeros(9)}, tmp_path / "m.pth")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == kept


def test_a_header_that_begins_like_a_pickle_is_a_container(tmp_path: Path) -> None:
    # Headers of 128 and 640 bytes begin with the bytes 0x80 and 0x80 0x02, as pickles do.
    path = tmp_path / "c.gz"
    for length in (128, 640):
        header = b'{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'.ljust(length)
        path.write_bytes(length.to_bytes(8, "little") + header + b"abc")
        assert containers.is_container(str(path)) and not containers.is_pickle(str(path))
        assert ow.inspect(path)["sources"][0]["tensors"][0]["name"] == "w"
    path.write_bytes(pickle.dumps({}))
    assert containers.is_pickle(str(path)) and not containers.is_container(str(path))


def test_read_bytes(tmp_path: Path) -> None:
    """read_bytes reads a path or a URI up to a limit, and raises a typed error for anything else."""
    path = tmp_path / "a file%.csv"
    path.write_bytes(b"abc")
    assert ow.read_bytes(path) == ow.read_bytes(str(path), 3) == ow.read_bytes(f"file://{tmp_path}/a%20file%25.csv") == b"abc"
    wrong = [
        (tmp_path / "nope", ow.NotFoundError),
        (tmp_path, ow.FormatError),
        ("", ow.ArgumentError),
        (f"file://elsewhere{path}", ow.ArgumentError),
        ("gopher://host/x", ow.NotSupportedError),
    ]
    for place, kind in wrong:
        with pytest.raises(kind):
            ow.read_bytes(place)
    with pytest.raises(ow.FormatError, match="larger than the limit of 2 bytes"):
        ow.read_bytes(path, 2)


def test_a_bundle_joins_a_preload(tmp_path: Path) -> None:
    obj = {"w": torch.randn(500, 300), "n": np.arange(10)}
    ow.compress_pickle(obj, tmp_path / "x.pkl")
    for what in ("x.pkl", "nya/meta.csv", "meta.csv", "nya/x.safetensors"):
        job = ow.preload(tmp_path / what)
        assert job.uris == [str(tmp_path / "nya/x.safetensors")]
        same(ow.load_compressed_pickle(tmp_path / "x.pkl")["w"], obj["w"])


def test_nyacomps_names(tmp_path: Path, monkeypatch) -> None:
    """nyacomp's functions accept its arguments, return a ratio, and refuse an unknown algorithm."""
    monkeypatch.chdir(tmp_path)
    pipeline = Pipeline()
    assert 0 < nyacomp.compress(pipeline) < 2
    assert torch.equal(nyacomp.load_compressed().unet.weight, pipeline.unet.weight)
    for algo in (0, 1, 2):
        assert nyacomp.compress_pickle({"p": pipeline}, "x.pkl", algo) > 0
    assert type(nyacomp.load_compressed_pickle("x.pkl")["p"]) is Pipeline
    with pytest.raises(ValueError):
        nyacomp.compress_pickle({}, "x.pkl", 3)


def test_nyacomps_own_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "nya").mkdir()
    (tmp_path / "nya/meta.csv").write_text("0,1\n/model/nya/0.gz 4;4 float16 32 20\n/model/nya/1.raw 2 uint8 2 2")
    (tmp_path / "nya/0.gz").write_bytes(bytes(20))
    with pytest.raises(ow.NotSupportedError, match="nyacomp itself"):
        ow.preload(tmp_path / "nya/meta.csv")
    rows = manifest.Manifest.read_csv(str(tmp_path / "nya/meta.csv")).rows
    assert rows[0] == ("/model/nya/0.gz", (4, 4), "float16", 32, 20)


def test_meta_csv_with_spaces_and_nonsense(tmp_path: Path) -> None:
    """A meta.csv may name paths with spaces. A malformed one raises FormatError."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    ow.compress_pickle({"w": torch.arange(3)}, folder / "my x.pkl")
    assert manifest.local_uris_of(str(folder / "nya/meta.csv")) == [str(folder / "nya/my x.safetensors")]
    for text in ("", "0", "0\nfile", "0\nf x uint8 1 1", "0\nf 1 uint8 a 1"):
        (tmp_path / "meta.csv").write_text(text)
        with pytest.raises(ow.FormatError):
            manifest.local_uris_of(str(tmp_path / "meta.csv"))


def test_tensors_of_a_missing_device(tmp_path: Path, monkeypatch) -> None:
    """If a bundle was saved from a missing GPU, the error suggests device=. A malformed list of devices is refused."""
    obj = {"w": torch.randn(50, 30), "n": np.arange(10), "e": torch.empty(0)}
    path = tmp_path / "x.pkl"
    ow.compress_pickle(obj, path)
    with ow.safe_open(tmp_path / "nya/x.safetensors", "np") as f:
        assert f.metadata()["overwire.devices"] == "cpu\nnumpy"
    # The bundle looks as if it had been written on a machine with more GPUs.
    monkeypatch.setattr("overwire.bundles.bundle.devices_of", lambda blobs: "cuda:99\nnumpy")
    ow.compress_pickle(obj, path)
    for _ in range(2):
        with pytest.raises(ow.DeviceError, match="cuda:99.*device=") as caught:
            ow.load_compressed_pickle(path)
        assert caught.value.source == str(path)
    got = ow.load_compressed_pickle(path, device="cpu")
    same(got["w"], obj["w"])
    assert got["n"].tolist() == obj["n"].tolist()
    for note in ("cpu", "", "cpu\ncpu"):  # as in old files, for which the note is not used
        monkeypatch.setattr("overwire.bundles.bundle.devices_of", lambda blobs, note=note: note)
        ow.compress_pickle(obj, path)
        same(ow.load_compressed_pickle(path)["w"], obj["w"])
    for note in ("cpu\ncpu\ncpu", "nonsense", "hpu\nnumpy", "privateuseone", "meta", "meta:0\nnumpy"):
        monkeypatch.setattr("overwire.bundles.bundle.devices_of", lambda blobs, note=note: note)
        ow.compress_pickle(obj, path)
        with pytest.raises((ow.FormatError, ow.DeviceError)):
            print(ow.load_compressed_pickle(path))


def test_packed_elements_and_records_are_restored(tmp_path: Path) -> None:
    """quint4x2 tensors, which have two elements per byte, need no trust. A dtype of np.record keeps its scalar type."""
    path = tmp_path / "x.pkl"
    for size in (4, 5):
        scales, zeros = torch.ones(size), torch.zeros(size)
        tensor = torch.quantize_per_channel(
            torch.arange(3.0 * size).reshape(3, size).t(), scales, zeros, 0, torch.quint4x2
        )
        ow.compress_pickle(tensor, path)
        got = ow.load_compressed_pickle(path)
        assert got.dtype is torch.quint4x2 and torch.equal(got.dequantize(), tensor.dequantize())
    array = np.zeros(3, dtype=(np.record, [("a", "i4")]))
    ow.compress_pickle(array, path)
    got = ow.load_compressed_pickle(path, trust=True)
    assert got.dtype.type is np.record and got[0].a == 0


def test_a_file_that_belongs_to_no_bundle_stays(tmp_path: Path) -> None:
    """A file at the path of a container that belongs to no bundle is not replaced. The container gets another name."""
    (tmp_path / "tensors").mkdir()
    for at, text in (("a", b"no safetensors"), ("b", b"")):
        (tmp_path / "tensors" / f"{at}.safetensors").write_bytes(text)
    ow.save_file({"v": torch.ones(3)}, tmp_path / "tensors" / "c.safetensors")
    before = {path.name: path.read_bytes() for path in (tmp_path / "tensors").iterdir()}
    for name in "abc":
        ow.compress_pickle({"v": torch.zeros(9)}, tmp_path / f"{name}.pkl")
        same(ow.load_bundle(tmp_path / f"{name}.pkl")["v"], torch.zeros(9))
        ow.save_bundle({"v": torch.ones(9)}, tmp_path / f"{name}.pkl")
        same(ow.load_compressed_pickle(tmp_path / f"{name}.pkl")["v"], torch.ones(9))
        assert (tmp_path / "tensors" / f"{name}.safetensors").read_bytes() == before[f"{name}.safetensors"]


def test_the_pickle_reader_is_imported_during_the_load(torch_script) -> None:
    """The pickle reader is imported only when the first bundle is loaded, while its tensors are being loaded."""
    torch_script(
        """
import sys
import torch
import overwire as ow
ow.compress_pickle({"a": torch.arange(9)}, "b.pkl")
assert "overwire.bundles.unpickling" not in sys.modules  # a save does not import it either
from overwire.bundles.landing import Landing
begin, present = Landing._start_load, []
def spied(self, *args):
    begin(self, *args)
    present.append("overwire.bundles.unpickling" in sys.modules)
Landing._start_load = spied
for trust in (True, False):
    assert ow.load_compressed_pickle("b.pkl", trust=trust)["a"].tolist() == list(range(9))
assert present == [False, True], present
"""
    )


def test_a_container_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    """A container that cannot be read is not treated as missing, because it may belong to another bundle. The save
    raises an error and changes nothing."""
    ow.save_bundle({"a": torch.arange(9)}, tmp_path / "x.pkl")
    container = tmp_path / "tensors" / "x.safetensors"
    container.rename(tmp_path / "kept")
    container.symlink_to("/proc/self/mem")  # reading it fails with EIO
    with pytest.raises(ow.IOFailure):
        bundles._has_digest(str(container), "")
    with pytest.raises(ow.IOFailure):
        ow.save_bundle({"a": torch.zeros(9)}, tmp_path / "x.pth")
    assert sorted(os.listdir(tmp_path / "tensors")) == ["x.safetensors"] and not (tmp_path / "x.pth").exists()


def test_a_second_container_of_a_killed_save(tmp_path: Path) -> None:
    """A second container, left by a killed save, does not affect later saves."""
    ow.save_bundle({"a": torch.arange(9)}, tmp_path / "x.pkl")
    container = tmp_path / "tensors" / "x.safetensors"
    os.link(container, containers.previous_of(str(container)))
    (tmp_path / "x.pkl").unlink()
    ow.save_bundle({"a": torch.zeros(9)}, tmp_path / "x.pkl")
    assert torch.equal(ow.load_bundle(tmp_path / "x.pkl")["a"], torch.zeros(9))
    assert os.listdir(tmp_path / "tensors") == ["x.safetensors"]
