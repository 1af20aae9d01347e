"""Tests that no part of a torch.save file or folder is left out silently, and that all readers agree."""

from __future__ import annotations

import argparse
import datetime
import decimal
import errno
import functools
import json
import os
import pickle
import tarfile
import zipfile
import zoneinfo
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire as ow
import pytest

torch = pytest.importorskip("torch")

from overwire.bundles import torcharchive  # noqa: E402
from overwire.foreign import zips  # noqa: E402
from test_cli import run  # noqa: E402
from test_torch_files import _archive, _tensor, _text, equal, folder, state  # noqa: E402


def _old(path: Path) -> None:
    torch.save({"v": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


def _cut_off(path: Path) -> None:
    torch.save({"v": torch.ones(300)}, path)
    os.truncate(path, path.stat().st_size - 1)


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))


def _numbers(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w.npy", b"")


_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (_cut_off, "truncated or damaged"),
    "old": (_old, r"before torch 1\.6: `torch\.save"),
    "tar": (_tar, "a tar archive"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps([1], 4)), "a pickle"),
    "another zip": (_numbers, r"has no data\.pkl"),
    "pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
    "page": (lambda path: path.write_text("<!DOCTYPE html>"), "a web page"),
    "empty": (lambda path: path.touch(), "an empty file"),
    "zeros": (lambda path: path.write_bytes(bytes(9999)), "begins with zeros"),
    "unknown": (lambda path: path.write_bytes(bytes(range(1, 99))), "an unknown kind"),
    "lost link": (lambda path: path.symlink_to("blobs/none"), "a missing file"),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_an_unreadable_weight_file_in_a_folder(tmp_path: Path, damage: str) -> None:
    """If a weight file in a folder cannot be read, an error names the file and its kind before anything is written or
    loaded. This holds for usual and unusual names, next to good files and in a subfolder."""
    make, text = _DAMAGES[damage]
    for number, (good, bad) in enumerate([
        ("pytorch_model.bin", "pytorch_model_1.bin"), ("consolidated.00.pth", "consolidated.01.pth"),
        ("pytorch_model.bin", "value_head.pt"), ("unet/model.ckpt", "vae/model.ckpt"), ("", "model.pt"),
    ]):  # fmt: skip
        source = tmp_path / f"model{number}"
        for name in (good, bad):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
        if good:
            torch.save({"w": torch.ones(3)}, source / good)
        make(source / bad)
        to_convert = functools.partial(ow.convert, source, tmp_path / "out")
        for call in (to_convert, functools.partial(ow.load_file, (source / bad).parent)):
            with pytest.raises(ow.OverwireError, match=text) as caught:
                call()
            assert caught.value.source == str(source / bad) and os.path.basename(bad) in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == [f"model{number}" for number in range(5)]
    if damage == "cut off":
        done = run("compress", str(source), "-o", str(tmp_path / "out"))
        assert done.returncode == 1 and "model.pt" in done.stderr and "Traceback" not in done.stderr


def test_a_directory_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive with too many entries raises an error. It is not simply left out of the folder's model."""
    monkeypatch.setattr(zips, "_DIRECTORY", 100)
    (tmp_path / "model").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "model/pytorch_model.bin")
    with pytest.raises(ow.NotSupportedError, match=r"pytorch_model\.bin: .* its directory has"):
        ow.convert(tmp_path / "model", tmp_path / "out")


def test_every_other_file_is_copied_or_reported(tmp_path: Path) -> None:
    """Weights of other libraries and hidden folders are copied or reported. Files that are nested too deeply, or that
    an index lists but do not exist, cause an error."""
    source = tmp_path / "model"
    folder(source)
    (source / "flax_model.msgpack").write_bytes(b"flax")
    (source / "small.bin").write_bytes(b"GGUF" + bytes(99))
    (source / "openvino").mkdir()
    (source / "openvino/openvino_model.bin").write_bytes(bytes(range(1, 99)))
    (source / "openvino/openvino_model.xml").write_text("<net/>")
    (source / "x.mlpackage/weights").mkdir(parents=True)
    (source / "x.mlpackage/weights/weight.bin").write_bytes(bytes(range(1, 99)))
    (source / ".cache").mkdir()
    (source / ".cache/notes").write_text("x")
    with open(source / "tf_model.h5", "wb") as file:
        file.truncate((64 << 20) + 1)
    report = ow.convert(source, tmp_path / "out")
    left = {os.path.relpath(path, source) for path in report.left}
    assert left == {".cache", ".hidden", "outside", "tf_model.h5"}
    kept = [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sorted(name for name in kept if not name.endswith(".safetensors")) == [
        "config.json", "flax_model.msgpack", "model.safetensors.index.json", "openvino/openvino_model.bin",
        "openvino/openvino_model.xml", "small.bin", "training_args.bin", "x.mlpackage/weights/weight.bin",
    ]  # fmt: skip
    (source / "pytorch_model-00002-of-00002.bin").rename(source / "elsewhere")
    for call in (ow.load_file, lambda path: ow.convert(path, tmp_path / "again")):
        with pytest.raises(ow.NotFoundError, match=r"pytorch_model-00002-of-00002\.bin is missing, and .*json lists"):
            call(source)
    (source / "elsewhere").rename(source / "pytorch_model-00002-of-00002.bin")
    deep = source.joinpath(*"abcdefghi")
    deep.mkdir(parents=True)
    torch.save({"w": torch.ones(3)}, deep / "model.pt")
    with pytest.raises(ow.NotSupportedError, match="9 levels below"):
        ow.convert(source, tmp_path / "again")


def test_models_have_the_names_that_their_libraries_look_for(tmp_path: Path) -> None:
    """accelerate numbers its models, and peft saves an adapter next to the shards of its model."""
    names = {"pytorch_model.bin": "model", "pytorch_model_1.bin": "model_1", "pytorch_model_12.bin": "model_12"}
    (tmp_path / "state").mkdir()
    for name in names:
        torch.save({"w": torch.tensor([len(name)])}, tmp_path / "state" / name)
    assert ow.convert(tmp_path / "state", tmp_path / "out").left == ()
    for name, stem in names.items():
        assert ow.load_file(tmp_path / "out" / f"{stem}.safetensors")["w"].item() == len(name)
    shards = _shards(tmp_path / "tuned", a="1", b="2")
    torch.save({"lora": torch.tensor([7])}, shards / "adapter_model.bin")
    assert ow.convert(shards, tmp_path / "new").left == ()
    assert ow.load_file(tmp_path / "new/adapter_model.safetensors")["lora"].item() == 7
    assert sorted(ow.load_file(tmp_path / "new")) == ["a", "b"]


class _Loud:
    """A class that fails when an object of it is created."""

    def __init__(self) -> None:
        raise AssertionError("the pickle was run")


_OBJECTS: dict[str, Any] = {
    "datetime": datetime.datetime(2024, 1, 2, 3, 4, 5, 6, fold=1),
    "aware": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    "elsewhere": datetime.datetime(2024, 1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "date": datetime.date(2024, 1, 2),
    "time": datetime.time(1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "x")),
    "delta": datetime.timedelta(1, 2, 3),
    "bytes": b"\x00\xff",
    "mutable": bytearray(b"abc"),
    "lists": defaultdict(list, loss=[0.5]),
    "counts": defaultdict(int, a=1),
    "of dicts": defaultdict(dict, a={"b": 2}),
    "of objects": defaultdict(_Loud, a=3),
    "of functions": defaultdict(folder, a=4),
    "of partials": defaultdict(functools.partial(defaultdict, list), a=defaultdict(list, b=[5])),
    "counter": Counter("aab"),
    "decimal": decimal.Decimal("1.5"),
    "set": {1, 2},
    "deque": deque([1, 2], 3),
    "complex": 1 + 2j,
    "slice": slice(1, 2),
    "range": range(3),
    "path": Path("/x"),
    "namespace": argparse.Namespace(at=datetime.date(2024, 1, 2)),
    "dates": {datetime.date(2024, 1, 2): 1, (1, "a"): 2},
}


def _shards(folder: Path, **weights: str) -> Path:
    """Writes two shards. If weights are given, also writes an index that lists them."""
    folder.mkdir(parents=True)
    for number, name in enumerate("ab", 1):
        torch.save({name: torch.full((9,), float(number))}, folder / f"pytorch_model-0000{number}-of-00002.bin")
    if weights:
        listed = {name: f"pytorch_model-0000{number}-of-00002.bin" for name, number in weights.items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    """`load_file`, `verify` and `convert` refuse a set of shards or numbered parts with a gap, and an index that does
    not match its files, and name the files. If there is an index, it decides what belongs to the model."""
    lacking = _shards(tmp_path / "lacking")
    os.remove(lacking / "pytorch_model-00002-of-00002.bin")
    (lacking / "pytorch_model-00002-of-00002.bin.part").touch()
    swapped, more = _shards(tmp_path / "swapped", a="2", b="1"), _shards(tmp_path / "more", a="1", b="2", c="2")
    twice, foreign = _shards(tmp_path / "twice", a="1"), _shards(tmp_path / "foreign", a="1")
    (twice / "pytorch_model.bin.index.json").write_text('{"weight_map": {}, "weight_map": {"a": "x.bin"}}')
    (foreign / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    gap = tmp_path / "gap"
    gap.mkdir()
    for number in (0, 2):
        torch.save({str(number): torch.ones(3)}, gap / f"consolidated.0{number}.pth")
    for source, text in (
        (lacking, r"pytorch_model-00001-of-00002\.bin has no index.json, and 1 of 2 shards"),
        (swapped, r"pytorch_model-0000\d-of-00002.bin.*index(.json)? lists"),
        (more, "00002-of-00002.bin.*index(.json)? lists"), (twice, "a key appears twice"),
        (foreign, "model.safetensors, which is not the name"), (gap, "consolidated.01.pth is missing"),
    ):  # fmt: skip
        for call in (ow.load_file, ow.verify, lambda path: ow.convert(path, tmp_path / "out/")):
            with pytest.raises((ow.FormatError, ow.NotFoundError), match=text) as caught:
                call(source)
            assert "/proc/" not in str(caught.value) and ".overwire-torch" not in str(caught.value)
    assert not (tmp_path / "out").exists()

    less = _shards(tmp_path / "less", a="1")
    assert set(ow.load_file(less)) == {"a"} and ow.verify(less)["tensors"] == 1
    assert ow.convert(less, tmp_path / "out/").left == (str(less / "pytorch_model-00002-of-00002.bin"),)
    done = run("compress", str(less), "-o", str(tmp_path / "other"))
    assert f"not copied: {less}/pytorch_model-00002-of-00002.bin" in done.stdout + done.stderr
    torch.save({"a": torch.ones(3)}, gap / "consolidated.01.pth")
    torch.save({"0": torch.zeros(3)}, gap / "consolidated.03.pth")
    with pytest.raises(ow.ArgumentError, match="consolidated.03.pth tensor \"0\": .*consolidated.00.pth also contains it"):
        ow.load_file(gap)


def test_pipelines_with_both_kinds_of_files(tmp_path: Path) -> None:
    """A pipeline that has one component in torch.save files and one in safetensors files is converted as a whole. A
    damaged component raises an error. Hidden files are ignored."""
    source = tmp_path / "pipeline"
    for name in ("unet", "vae"):
        (source / name).mkdir(parents=True)
    ow.save_file({"v": torch.ones(3)}, source / "vae/diffusion_pytorch_model.safetensors", compress=False)
    torch.save({"u": torch.ones(3)}, source / "unet/diffusion_pytorch_model.bin")
    (source / "unet/._model.safetensors").write_bytes(b"\0\5\x16\7")
    (source / "unet/words.bin").write_bytes(b"words")
    ow.convert(source, tmp_path / "out")
    assert set(ow.load_file(tmp_path / "out/unet")) == {"u"} and set(ow.load_file(tmp_path / "out/vae")) == {"v"}
    assert (tmp_path / "out/unet/words.bin").read_bytes() == b"words"
    verified = [file["uri"] for file in ow.verify(source)["files"]]
    assert verified == [str(source / name) for name in (
        "vae/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.bin")]  # fmt: skip
    done = run("verify", "--json", str(source))
    assert done.returncode == 0 and sorted(file["uri"] for file in json.loads(done.stdout)["files"]) == sorted(verified)
    os.truncate(source / "unet/diffusion_pytorch_model.bin", 100)
    for call in (ow.verify, lambda path: ow.convert(path, tmp_path / "again")):
        with pytest.raises(ow.CorruptError, match="unet/diffusion_pytorch_model.bin"):
            call(source)
    assert run("verify", str(source)).returncode == 1
    os.remove(source / "vae/diffusion_pytorch_model.safetensors")
    os.remove(source / "unet/words.bin")
    torch.save({"u": torch.ones(3)}, source / "unet/diffusion_pytorch_model.bin")
    assert ow.verify(source)["tensors"] == 1 and run("verify", str(source)).returncode == 0


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a disk error occurs while a folder is listed, it is raised. The folder does not count as one without
    weights."""
    torch.save({"u": torch.ones(3)}, tmp_path / "model.pt")

    def fail(path: object) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(tmp_path))

    monkeypatch.setattr(os, "listdir", fail)
    for call in (ow.load_file, ow.verify, lambda path: ow.convert(path, tmp_path / "out")):
        with pytest.raises(ow.IOFailure):
            call(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_next_to_the_weights(tmp_path: Path, protocol: int) -> None:
    """In every pickle protocol, tensors are converted even if dates, time zones, bytes, default dicts and other objects
    are next to them. Plain data becomes metadata, other objects are reported, and nothing is created or called."""
    tensors = defaultdict(folder, w=torch.ones(3))
    torch.save({"model": tensors, "saved": _OBJECTS}, tmp_path / "m.ckpt", pickle_protocol=protocol)
    report = ow.convert(tmp_path / "m.ckpt", tmp_path / "m.safetensors")
    equal(ow.load_file(tmp_path / "m.safetensors"), {"model.w": torch.ones(3)})
    with ow.safe_open(tmp_path / "m.safetensors", "np") as file:
        values = json.loads(file.metadata()["torch.values"])
    assert values == {
        "saved.lists.loss": [0.5], "saved.counts.a": 1, "saved.of dicts.a.b": 2, "saved.of objects.a": 3,
        "saved.of functions.a": 4, "saved.of partials.a.b": [5], "saved.dates.(1, 'a')": 2,
    }  # fmt: skip
    data = {"lists", "counts", "of dicts", "of objects", "of functions", "of partials"}
    lines = {line.removeprefix(f"{tmp_path}/m.ckpt: saved.").partition(":")[0] for line in report.left}
    assert lines == set(_OBJECTS) - data and len(report.left) == len(lines)


def test_tensors_under_keys_that_are_not_names(tmp_path: Path) -> None:
    """A tensor with a key that cannot be a name is refused instead of being left out."""
    torch.save({datetime.date(2024, 1, 2): torch.ones(3), "w": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(ow.NotSupportedError, match=r"m\.pt: 1 tensors are inside objects"):
        ow.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")


class _Kind(torch.Tensor):
    pass


def test_tensors_of_other_classes_are_not_left_out(tmp_path: Path) -> None:
    """A tensor of a custom class is refused, even if another tensor shares its storage."""
    shared = torch.arange(6.0)
    for kept in ({"a": shared.as_subclass(_Kind), "b": shared}, {"a": shared.as_subclass(_Kind), "b": torch.ones(2)}):
        torch.save(kept, tmp_path / "m.pt")
        for call in (ow.load_file, lambda path: ow.convert(path, tmp_path / "out.safetensors")):
            with pytest.raises(ow.NotSupportedError, match="1 tensors are inside objects of .*_Kind"):
                call(tmp_path / "m.pt")


def test_several_values_with_one_name(tmp_path: Path) -> None:
    """If several keys lead to one name, the first value is kept and the others are reported."""
    torch.save({"w": torch.ones(2), "a.b": 1, "a": {"b": 2}, 7: "x", "7": "y"}, tmp_path / "m.pt")
    report = ow.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    with ow.safe_open(tmp_path / "m.safetensors", "np") as file:
        assert json.loads(file.metadata()["torch.values"]) == {"a.b": 1, "7": "x"}
    assert [line.rpartition("m.pt: ")[2] for line in report.left] == [
        "a.b: another value with this name (int)", "7: another value with this name (str)"
    ]  # fmt: skip


def test_a_storage_with_two_dtypes_or_lengths_is_refused(tmp_path: Path) -> None:
    """A storage that is used with two dtypes is refused, because torch uses the first dtype for both. So is a storage
    with more or fewer elements than its entry."""
    integer = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((" + _text(b"storage") + b"ctorch\nIntStorage\n" + _text(b"0")
        + _text(b"cpu") + b"K\1tQK\0K\1\x85K\1\x85\x89NtR"
    )  # fmt: skip
    for pickled, data, match in (
        (_text(b"a") + _tensor(4) + _text(b"b") + integer, b"abcd", "data/0 is used with two dtypes or lengths"),
        (_text(b"a") + _tensor(4) + _text(b"b") + _tensor(3), b"abcd", "data/0 is used with two dtypes or lengths"),
        (_text(b"a") + integer, bytes(8), "data/0 has 8 bytes: expected 1 of I32"),
        (_text(b"a") + integer, bytes(3), "data/0 has 3 bytes: expected 1 of I32"),
    ):
        path = _archive(tmp_path / "m.pt", b"}(" + pickled + b"u.", (("data/0", data),))
        with pytest.raises(ow.FormatError, match=match):
            ow.convert(path, tmp_path / "m.safetensors")
    w = torch.arange(8, dtype=torch.uint8)
    odd = torch.arange(10, dtype=torch.uint8)[:8].view(torch.float32)
    want = {"a": w, "b": w.view(torch.uint16), "c": w[:6].view(torch.uint16), "odd": odd}
    torch.save(want, tmp_path / "m.pt")
    ow.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    equal(ow.load_file(tmp_path / "m.safetensors"), want)


def test_views_without_elements(tmp_path: Path) -> None:
    """Views without elements are converted, whatever their offset."""
    want = {"rows": torch.empty(3, 0)[1::2], "end": torch.ones(4)[4:], "w": torch.ones(2)}
    torch.save(want, tmp_path / "m.pt")
    ow.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    equal(ow.load_file(tmp_path / "m.safetensors"), want)


def test_float4_tensors(tmp_path: Path) -> None:
    """A float4 tensor without dimensions is refused by name, because safetensors cannot store it. Transposed float4
    tensors of any size are converted, from a file and from memory."""
    target = tmp_path / "m.safetensors"
    pairs = torch.arange(257 * 257).to(torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"x": pairs[:1].reshape(())}, tmp_path / "m.pt")
    with pytest.raises(ow.NotSupportedError, match=r"m\.pt: x is a float4 tensor without dimensions"):
        ow.convert(tmp_path / "m.pt", target)
    square = pairs.reshape(257, 257)
    want = square.view(torch.uint8).t()
    torch.save({"t": square.t()}, tmp_path / "m.pt")
    for write in (ow.convert, lambda _, path: ow.save_file({"t": square.t()}, path)):
        write(tmp_path / "m.pt", target)
        got = ow.load_file(target)["t"]
        assert got.dtype == square.dtype and torch.equal(got.view(torch.uint8), want)
    with pytest.raises(ow.ArgumentError, match="9 bytes for shape .* of F32, expected 12 "):
        ow.save_file({"x": ow.TensorSpec.of("float32", (3,), bytes(9))}, target)


def test_archives_that_were_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deflated entries, which torch.load can read, are converted for contiguous and strided tensors. Damaged entries,
    entries that inflate to too many bytes, and other compression methods are refused, and no file is left."""
    want = state()
    path, target = tmp_path / "m.pt", tmp_path / "m.safetensors"

    def pack(entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
        with zipfile.ZipFile(path, "w", method) as new:
            for name, data in entries.items():
                new.writestr(name, data)

    torch.save(want, path)
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    pack(entries)
    equal(torch.load(path), want)
    with tarfile.open(tmp_path / "m.nemo", "w") as archive:
        archive.add(path, "model_weights.ckpt")
    for source in (path, tmp_path / "m.nemo"):
        ow.convert(source, target)
        equal(ow.load_file(target), want)
        target.unlink()
        equal(ow.load_file(source), want)
    os.unlink(tmp_path / "m.nemo")
    data = bytearray(path.read_bytes())
    info = next(info for info in zipfile.ZipFile(path).infolist() if info.filename.endswith("data/0"))
    data[info.header_offset + 400] ^= 255
    path.write_bytes(data)
    for call in (ow.load_file, lambda path: ow.convert(path, target)):
        with pytest.raises(ow.CorruptError, match=r"m\.pt: .*data/0 is damaged"):
            call(path)
    pack(entries, zipfile.ZIP_BZIP2)
    with pytest.raises(ow.NotSupportedError, match="a method that torch.load cannot read"):
        ow.convert(path, target)
    monkeypatch.setattr(torcharchive, "_SPARE", 0)
    pack({**entries, "m/data/99": bytes(8 << 20)})
    with pytest.raises(ow.NotSupportedError, match="more than 64 times the size of the file"):
        ow.convert(path, target)
    assert os.listdir(tmp_path) == ["m.pt"]
