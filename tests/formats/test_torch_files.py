"""Tests that models which torch.save wrote are compressed and converted without running any code in them."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import resource
import struct
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import overwire as ow
import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from overwire.bundles import torchfiles, torchfolders  # noqa: E402
from overwire.bundles.torchfiles import opened  # noqa: E402
from test_cli import must, run  # noqa: E402


class Arguments:
    """A class that a trainer defines itself."""

    lr = 1e-3


class Other(torch.Tensor):  # type: ignore[misc]
    """A tensor class that overwire does not know."""


def state() -> dict[str, Any]:
    """Returns tensors of every dtype that safetensors has, with views, ties, parameters, empty tensors and scalars."""
    w = torch.randn(64, 48)
    every = {
        str(dtype): torch.arange(24, dtype=torch.uint8).view(dtype)
        for dtype in (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
                      torch.uint16, torch.int16, torch.int32, torch.float32, torch.int64, torch.float64,
                      torch.complex64)
    }  # fmt: skip
    return {
        "w": w,
        "tied": w,
        "transposed": w.t(),
        "inner": w[3:9, 5:7],
        "parameter": torch.nn.Parameter(w.bfloat16()),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bools": torch.tensor([True, False]),
        "last": w[63:],
    } | every


def equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Asserts that names, dtypes, shapes and bytes are the same."""
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        whole = tensor.detach().contiguous().reshape(-1)
        assert got[name].reshape(-1).view(torch.uint8).tolist() == whole.view(torch.uint8).tolist(), name


def test_tensors_with_attributes_are_converted(tmp_path: Path) -> None:
    """Tensors of torch's own classes are converted, even with attributes. A file is refused if some of its bytes belong
    to no tensor or to a tensor of another class."""
    path, target = tmp_path / "a.bin", tmp_path / "a.safetensors"
    marked = torch.arange(3.0)
    marked.note = 1
    own = {"a": marked, "b": torch.nn.Buffer(torch.ones(2)), "c": torch.zeros(2)}
    torch.save(own, path)
    assert ow.convert(path, target).left == ()
    equal(ow.load_file(target), own)
    inner = torch.arange(3.0)
    inner.note = torch.ones(2)
    for lost in (torch.ones(2).untyped_storage(), inner, torch.arange(3.0).as_subclass(Other), torch.nn.Linear(2, 2)):
        torch.save({"a": lost, "c": torch.zeros(2)}, path)
        with pytest.raises(ow.NotSupportedError, match=r"a\.bin: \d tensors are inside"):
            ow.convert(path, tmp_path / "none.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.safetensors"]


@pytest.mark.parametrize("bit", ["conj", "neg", "neg of uint16"])
def test_lazy_conjugates_and_negatives_are_refused(tmp_path: Path, bit: str) -> None:
    """Lazy conjugates and negatives are refused, because their storage contains other values. Resolved tensors are
    converted."""
    number = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    lazy = number.conj() if bit == "conj" else torch._neg_view(number.real.clone())
    path, target = tmp_path / "a.bin", tmp_path / "a.safetensors"
    if bit == "neg of uint16":  # torch saves dtypes that have no typed storage through another function
        lazy = torch._neg_view(torch.ones(2, dtype=torch.uint16))
    assert lazy.is_conj() or lazy.is_neg()
    torch.save({"a": lazy}, path)
    with pytest.raises(ow.NotSupportedError, match=r"a\.bin: .*resolve_neg"):
        ow.convert(path, target)
    assert not target.exists()
    if bit != "neg of uint16":
        whole = lazy.resolve_conj().resolve_neg()
        torch.save({"a": whole}, path)
        ow.convert(path, target)
        equal(ow.load_file(target), {"a": whole})


@pytest.mark.parametrize("compress", [True, False])
def test_every_tensor_is_converted(tmp_path: Path, compress: bool) -> None:
    """A state dict becomes a file of the same tensors bit for bit, including strided ones and new dtypes."""
    want = state()
    torch.save(OrderedDict(want), tmp_path / "pytorch_model.bin")
    report = ow.convert(tmp_path / "pytorch_model.bin", tmp_path / "m.safetensors", compress=compress)
    equal(ow.load_file(tmp_path / "m.safetensors"), want)
    assert report.left == () and sorted(os.listdir(tmp_path)) == ["m.safetensors", "pytorch_model.bin"]


def test_a_training_checkpoint(tmp_path: Path) -> None:
    """The tensors of a checkpoint are named after their paths, and its numbers become metadata. Objects of other
    classes are reported but not created."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    checkpoint = {"state_dict": model.state_dict(), "epoch": 3, "optimizer_states": [optimizer.state_dict()]}
    checkpoint["hyper_parameters"] = Arguments()
    torch.save(checkpoint, tmp_path / "last.ckpt")
    report = ow.convert(tmp_path / "last.ckpt", tmp_path / "m.safetensors")
    loaded = ow.load_file(tmp_path / "m.safetensors")
    assert torch.equal(loaded["state_dict.weight"], model.weight)
    assert torch.equal(loaded["optimizer_states.0.state.0.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    with ow.safe_open(tmp_path / "m.safetensors", "np") as file:
        values = json.loads(file.metadata()["torch.values"])
    assert values["epoch"] == 3 and values["optimizer_states.0.param_groups.0.betas"] == [0.9, 0.999]
    assert len(report.left) == 1 and report.left[0].endswith("hyper_parameters: test_torch_files.Arguments")


def folder(path: Path) -> dict[str, Any]:
    """Makes a folder in the form that transformers wrote before safetensors: shards, an index and auxiliary files."""
    weights = {f"layer.{n}.w": torch.randn(64, 64).bfloat16() for n in range(4)}
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    path.mkdir()
    for at, name in enumerate(names):
        torch.save({key: weights[key] for key in list(weights)[2 * at : 2 * at + 2]}, path / name)
    index = {"metadata": {"total_size": 32768}, "weight_map": {key: names[at // 2] for at, key in enumerate(weights)}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    torch.save(Arguments(), path / "training_args.bin")
    (path / ".hidden").write_text("x")
    (path / "outside").symlink_to("/etc/hostname")
    return weights


def test_a_folder_from_the_command_line(tmp_path: Path) -> None:
    """compress turns a folder of shards with an index into a safetensors folder with the auxiliary files, and leaves no
    temporary files."""
    weights = folder(tmp_path / "model")
    must("compress", str(tmp_path / "model"), "-o", str(tmp_path / "packed"))
    kept = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(os.listdir(tmp_path / "packed")) == [*kept, "training_args.bin"]
    equal(ow.load_file(tmp_path / "packed"), weights)
    assert json.loads((tmp_path / "packed" / kept[3]).read_text())["weight_map"]["layer.3.w"] == kept[2]
    assert sorted(os.listdir(tmp_path)) == ["model", "packed"]
    done = run("compress", str(tmp_path / "model"), "-o", str(tmp_path / "packed"))
    assert done.returncode == 2 and "--force" in done.stderr and sorted(os.listdir(tmp_path)) == ["model", "packed"]
    left = ow.convert(tmp_path / "model", tmp_path / "again").left
    assert sorted(os.path.basename(path) for path in left) == [".hidden", "outside"]


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    """A pickle that would run a command is read without running it, and the report lists the call."""
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(ran),)

    torch.save({"w": torch.ones(3), "evil": Evil()}, tmp_path / "x.pt")
    report = ow.convert(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert not ran.exists() and len(report.left) == 1 and report.left[0].endswith("evil: posix.mkdir")


def rewritten(path: Path, change: Any) -> None:
    """Rewrites an archive with the entries that `change(name, data)` returns."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in entries.items():
            new.writestr(name, change(name, data))


def test_damage_and_false_sizes_raise_typed_errors(tmp_path: Path) -> None:
    """Truncated files, files of another kind, and tensors outside the stored data raise errors that name the file."""
    path = tmp_path / "x.pt"
    cases: list[tuple[type[Exception], str]] = []

    def refused(kind: type[Exception], match: str) -> None:
        cases.append((kind, match))
        with pytest.raises(kind, match=match) as caught, opened(str(path)):
            pass
        assert str(path) in str(caught.value)

    torch.save({"w": torch.ones(300)}, path)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(ow.FormatError if size < 2 else ow.CorruptError, "torch.save")
    path.write_bytes(whole)
    rewritten(path, lambda name, data: data[:1000] if "/data/" in name else data)
    refused(ow.FormatError, "data/0 has 1000 bytes: expected 300 of F32")
    path.write_bytes(whole)
    rewritten(path, lambda name, data: b"big" if name.endswith("byteorder") else data)
    refused(ow.NotSupportedError, "big-endian")
    path.write_bytes(whole)
    rewritten(path, lambda name, data: data[: len(data) // 2] if name.endswith("data.pkl") else data)
    refused(ow.FormatError, "unpickle")
    many: Any = []
    for _ in range(40):
        many = [many, many]
    path.write_bytes(whole)
    rewritten(path, lambda name, data: pickle.dumps(many, 2) if name.endswith("data.pkl") else data)
    refused(ow.UntrustedPickleError, "Nothing in it was run. If it is your own file")
    torch.save(torch.nn.Linear(3, 4), path)
    refused(ow.NotSupportedError, r"2 tensors are inside objects of torch\.nn\.modules\.linear\.Linear")
    for odd in (torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex128)):
        torch.save({"w": odd}, path)
        refused(ow.NotSupportedError, "safetensors")
    path.write_bytes(struct.pack("<I", 7) * 20)
    refused(ow.FormatError, "torch.save")
    assert len(cases) == 13 and os.listdir(tmp_path) == ["x.pt"]


def test_changed_bytes_are_refused(tmp_path: Path) -> None:
    """A changed byte in the pickle or in a storage is refused although torch.load accepts it, because the new file
    would get checksums that match the changed bytes. Files without checksums are read."""
    path = tmp_path / "m.pt"
    torch.save({"weight": torch.arange(3000), "other": torch.ones(700).bfloat16()}, path)
    whole = path.read_bytes()
    with opened(str(path)) as content:
        assert [name for name, _ in content.tensors] == ["weight", "other"]
    for info in zipfile.ZipFile(path).infolist():
        if not info.filename.endswith(("data.pkl", "data/0", "data/1")):
            continue
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", whole, info.header_offset + 26))
        for at in (start, start + info.file_size // 2, start + info.file_size - 1):
            changed = bytearray(whole)
            changed[at] ^= 1
            path.write_bytes(changed)
            with pytest.raises(ow.CorruptError, match=info.filename.partition("/")[2]) as caught, opened(str(path)):
                pass
            assert caught.value.source == str(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.arange(30)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert not any(info.CRC for info in zipfile.ZipFile(path).infolist())
    with opened(str(path)) as content:
        assert [name for name, _ in content.tensors] == ["weight"]


def test_entries_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """Storages that overlap are refused before their checksums are computed, because a directory of 16 MiB could list
    the same bytes a hundred thousand times."""
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(300), "b": torch.ones(300)}, path)
    infos = {info.filename.rpartition("/")[2]: info for info in zipfile.ZipFile(path).infolist()}
    first, second = (struct.pack("<I", infos[key].header_offset) for key in "01")
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\1\2")
    entry = data.index(b"/data/1", directory) - len("m") - 46
    assert data[entry : entry + 4] == b"PK\1\2" and data[entry + 42 : entry + 46] == second
    data[entry + 42 : entry + 46] = first
    path.write_bytes(data)
    with pytest.raises(ow.FormatError, match="overlap") as caught, opened(str(path)):
        pass
    assert caught.value.source == str(path)


def test_the_first_wrong_checksum_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wrong checksum, the other threads stop at the next block instead of reading their storages to the end."""
    path, reads, starts = tmp_path / "m.pt", os.preadv, list[int]()
    torch.save({"a": torch.ones(300), "b": torch.zeros(10 << 20)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<f", 1) * 300)] ^= 1
    path.write_bytes(data)

    def read_slowly(number: int, buffers: Any, start: int) -> int:
        if len(buffers[0]) == torchfiles._BLOCK:
            starts.append(start)
            time.sleep(0.05)
        return reads(number, buffers, start)

    monkeypatch.setattr(os, "preadv", read_slowly)
    with pytest.raises(ow.CorruptError, match="data/0"), opened(str(path)):
        pass
    assert len(starts) < (40 << 20) // torchfiles._BLOCK


def test_functions_that_read_models_accept_torch_files(tmp_path: Path) -> None:
    """load_file, safe_open, inspect, verify, diff and the commands accept a torch.save file, or a folder with the
    shards that its index lists."""
    weights = folder(tmp_path / "model")
    torch.save({"stale": torch.ones(9)}, tmp_path / "model/pytorch_model-00003-of-00003.bin")
    equal(ow.load_file(tmp_path / "model"), weights)
    path = tmp_path / "m.pt"
    torch.save({"w": torch.arange(300.0), "n": 1}, path)
    ow.save_file({"w": torch.arange(300.0)}, tmp_path / "m.safetensors")
    [file] = ow.inspect(path)["sources"]
    assert (file["uri"], file["format"], [t["name"] for t in file["tensors"]]) == (str(path), "torch", ["w"])
    assert ow.verify(path)["files"][0]["uri"] == str(path)
    assert not any(row.changed for row in ow.diff(path, tmp_path / "m.safetensors").rows)
    with ow.safe_open(path, "pt") as opened_file:
        assert torch.equal(opened_file.get_slice("w")[5:7], torch.tensor([5.0, 6.0]))
    with pytest.raises(ow.TensorNotFoundError, match=r"m\.pt"):
        ow.load_file(path, keys=["x"])
    for words in (["inspect"], ["inspect", "--estimate"], ["verify"], ["load"], ["load", "--plan"]):
        output = must(*words, str(path))
        assert words[0] == "load" or (f"{path}: torch," in output and "safetensors" not in output), words
    assert json.loads(must("inspect", "--json", str(path)))["sources"][0]["format"] == "torch"
    assert "1 is equal" in must("diff", str(path), str(tmp_path / "m.safetensors"))
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(torch.arange(300.0).numpy().tobytes()) + 9] ^= 1
    path.write_bytes(damaged)
    for call in (ow.load_file, ow.verify):
        with pytest.raises(ow.CorruptError, match="checksum mismatch"):
            call(path)
    assert run("load", str(path)).returncode == 1


def test_numpy_arrays_that_are_left_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """load_file does not load the numpy arrays of a torch.save file, and logs a warning, because they may be weights.
    Numbers, settings and other plain values cause no warning."""
    path = tmp_path / "m.pt"
    values = {"epoch": 3, "best": np.float64(0.5), "args": argparse.Namespace(lr=0.1), "dtype": torch.float16}
    for weights in ({}, {"b": np.arange(5.0)}, {f"b\n{n}": np.arange(5) for n in range(9)}):
        torch.save({"model": {"w": torch.ones(3), **weights}, **values}, path, pickle_protocol=5 if "b" in weights else 2)
        caplog.clear()
        assert list(ow.load_file(path)) == ["model.w"]
        messages = [record.getMessage() for record in caplog.records if "numpy" in record.getMessage()]
        if not weights:
            assert not messages
            continue
        names = ", ".join(repr(f"model.{name}") for name in list(weights)[:3]) + ", ..." * (len(weights) > 3)
        assert messages == [
            f"overwire: open {path}: {len(weights)} numpy arrays are left out, because only tensors are loaded: {names}"
        ]


def test_verify_reports_the_checksums_and_the_size_of_the_file(tmp_path: Path) -> None:
    """If an archive has checksums, `verify` compares them and reports that it checked "contents", and otherwise
    "structure". `verify` and `inspect` give the size of the file itself."""
    numpy = pytest.importorskip("numpy")
    tensors = {"a": torch.ones(5000), "empty": torch.empty(0)}
    torch.save(tensors, tmp_path / "a.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors, tmp_path / "no_sums.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    numpy.savez(tmp_path / "a.npz", a=numpy.ones(5000))
    numpy.save(tmp_path / "a.npy", numpy.ones(5000))
    for name, checked in (("a.pt", "contents"), ("no_sums.pt", "structure"), ("a.npz", "contents"), ("a.npy", "structure")):
        path = tmp_path / name
        size, report = path.stat().st_size, ow.verify(path)
        (file,) = report["files"]
        assert (file["checked"], file["stored"], report["stored"]) == (checked, size, size), name
        assert (report["bytes"] == file["bytes"] > 0) is (checked == "contents") is ("note" not in report), report
        assert ow.inspect(path)["sources"][0]["size"] == size
        assert f", {checked} verified" in must("verify", path)
    many = ow.verify([tmp_path / "a.pt", tmp_path / "a.npy"])
    assert [one["checked"] for one in many["files"]] == ["contents", "structure"] and "plain files" in many["note"]
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(b"\0\0\x80\x3f" * 9)] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(ow.CorruptError, match="checksum mismatch of data/0"):
        ow.verify(tmp_path / "a.pt")


def test_the_format_before_torch_1_6(tmp_path: Path) -> None:
    """A file in the format before torch 1.6 is refused, and the error says how to convert it."""
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for call in (lambda path: ow.convert(path, tmp_path / "m.safetensors"), ow.load_bundle):
        with pytest.raises(ow.FormatError, match=r"`torch.save\(torch.load\(f\), f\)` makes a newer one"):
            call(tmp_path / "old.pt")


def test_conversion_does_not_change_the_source(tmp_path: Path) -> None:
    """Converting a folder does not change it. An index of safetensors files that do not exist is reported and not
    copied."""
    source = tmp_path / "model"
    source.mkdir()
    torch.save({"w": torch.ones(3)}, source / "pytorch_model-00001-of-00001.bin")
    index = {"metadata": {}, "weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (source / "model.safetensors.index.json").write_text("of other files")
    report = ow.convert(source, tmp_path / "out")
    assert (source / "model.safetensors.index.json").read_text() == "of other files"
    assert any(name.endswith("model.safetensors.index.json") for name in report.left)
    equal(ow.load_file(tmp_path / "out"), {"w": torch.ones(3)})


def test_files_that_would_get_one_name(tmp_path: Path) -> None:
    """Two weight files that differ only in their extension are refused, because one would overwrite the other."""
    (tmp_path / "model").mkdir()
    for ending in ("pt", "pth"):
        torch.save({ending: torch.ones(3)}, tmp_path / f"model/model.{ending}")
    with pytest.raises(ow.ArgumentError, match=r"model\.pt and model\.pth"):
        ow.convert(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_expanded_tensors(tmp_path: Path) -> None:
    """An expanded tensor is converted, unless it would take far more memory than its file."""
    torch.save({"row": torch.arange(3).expand(5, 3)}, tmp_path / "small.pt")
    ow.convert(tmp_path / "small.pt", tmp_path / "small.safetensors")
    equal(ow.load_file(tmp_path / "small.safetensors"), {"row": torch.arange(3).expand(5, 3)})
    torch.save({"row": torch.zeros(1).expand(1 << 50)}, tmp_path / "large.pt")
    with pytest.raises(ow.NotSupportedError, match="more than the size of the file"):
        ow.convert(tmp_path / "large.pt", tmp_path / "large.safetensors")


def test_a_temporary_folder_that_another_conversion_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another conversion removes a temporary folder before it is locked, the folder is created again."""
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    made: list[str] = []
    original = torchfolders.tempfile.mkdtemp

    def mkdtemp(**how: Any) -> str:
        made.append(original(**how))
        if len(made) == 1:
            torchfolders._sweep_leftovers(str(tmp_path))
        return made[-1]

    monkeypatch.setattr(torchfolders.tempfile, "mkdtemp", mkdtemp)
    ow.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert len(made) == 2 and sorted(path.name for path in tmp_path.iterdir()) == ["m.pt", "m.safetensors"]


def _archive(path: Path, pickled: bytes, entries: tuple[tuple[str, bytes], ...] = ()) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", b"\x80\x02" + pickled), *entries):
            archive.writestr(f"a/{name}", data)
    return path


def _text(text: bytes) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text


def _tensor(nbytes: int) -> bytes:
    """Returns the pickle of a U8 tensor in storage `data/0`."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((" + _text(b"storage") + b"ctorch\nByteStorage\n" + _text(b"0")
        + _text(b"cpu") + b"J" + nbytes.to_bytes(4, "little") + b"tQK\0J" + nbytes.to_bytes(4, "little") + b"\x85K\1\x85\x89NtR"
    )  # fmt: skip


def _dict(count: int, value: bytes) -> bytes:
    return b"}(" + b"".join(b"J" + at.to_bytes(4, "little") + value for at in range(count)) + b"u"


@pytest.mark.parametrize(
    ("pickled", "error"),
    [
        (b"}" + _text(b"k" * 20_000) + _dict(3000, b"K\1") + b"s", ow.UntrustedPickleError),
        (_text(b"v" * 20_000) + b"q\x000" + _dict(3000, b"h\0"), ow.UntrustedPickleError),
        (b"](" + b"K\1" * 2000 + b"eq\x000" + _dict(3000, b"h\0"), ow.UntrustedPickleError),
        (b"c" + b"m" * 20_000 + b"\nname\nq\x000" + _dict(3000, b"h\0)R"), ow.UntrustedPickleError),
        (_tensor(1 << 20) + b"q\x000" + _dict(1000, b"h\0"), ow.NotSupportedError),
    ],
    ids=["names", "texts", "lists", "classes", "tensors"],
)
def test_pickles_that_expand_are_refused(tmp_path: Path, pickled: bytes, error: type[Exception]) -> None:
    """A pickle that refers to one key, value, class or tensor very often is refused before it is expanded."""
    path = _archive(tmp_path / "small.pt", pickled + b".", (("data/0", bytes(1 << 20)),))
    with pytest.raises(error, match=re.escape(str(path))):
        ow.convert(path, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == ["small.pt"]


def test_values_and_names_that_no_file_can_have(tmp_path: Path) -> None:
    """Integers with thousands of digits, and lone surrogates, are reported if they are values and refused if they are
    names. The error for a tensor with such a name names the file."""
    digits = b"\x8b" + (4000).to_bytes(4, "little") + b"\1" * 4000
    half = _text(b"\xed\xa0\x80")
    entry = (("data/0", b"abcd"),)
    path = _archive(tmp_path / "m.pt", b"}(" + b"K\1" + digits + b"K\2" + half + b"K\3" + _tensor(4) + b"u.", entry)
    report = ow.convert(path, tmp_path / "m.safetensors", compress=False)
    assert sorted(ow.load_file(tmp_path / "m.safetensors")) == ["3"] and len(report.left) == 2
    for key in (digits, half, _text(b"a\0b"), _text(b"__metadata__"), b"\x8f" + b"\x85"):
        _archive(path, b"}" + key + _tensor(4) + b"s.", entry)
        with pytest.raises((ow.FormatError, ow.NotSupportedError, ow.UntrustedPickleError), match=re.escape(str(path))):
            ow.convert(path, tmp_path / "n.safetensors")
    _archive(path, b"}(" + _text(b"a.b") + _tensor(4) + _text(b"a") + b"}" + _text(b"b") + _tensor(4) + b"su.", entry)
    with pytest.raises(ow.FormatError, match=re.escape(str(path))):
        ow.convert(path, tmp_path / "n.safetensors")


def test_archives_with_false_directories(tmp_path: Path) -> None:
    """The directory of an archive is not read if it claims to be huge, as a sparse file makes possible. A duplicate
    entry and a deeply nested shard index are refused."""
    size, path = 1 << 40, tmp_path / "holes.pt"
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, 0))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, size, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", *[0xFFFF] * 4, *[0xFFFFFFFF] * 2, 0))
    with pytest.raises(ow.FormatError, match="its directory has 1099511627776 bytes"), opened(str(path)):
        pass
    assert not torchfolders.is_torch_model(str(path))
    with pytest.warns(UserWarning, match="Duplicate"):
        _archive(path, b"}" + _text(b"w") + _tensor(4) + b"s.", (("data/0", b"abcd"), ("data/0", b"efgh")))
    with pytest.raises(ow.FormatError, match="two entries with the same name"):
        ow.convert(path, tmp_path / "x.safetensors")
    (tmp_path / "model").mkdir()
    _archive(tmp_path / "model/pytorch_model.bin", b"}" + _text(b"w") + _tensor(4) + b"s.", (("data/0", b"abcd"),))
    (tmp_path / "model/pytorch_model.bin.index.json").write_text("[" * 200_000)
    with pytest.raises(ow.FormatError, match="not an index of shards"):
        ow.convert(tmp_path / "model", tmp_path / "out/")


def test_a_dict_or_list_that_contains_itself(tmp_path: Path) -> None:
    """A dict or list that contains itself is refused, because its names would be endless. A dict that occurs twice is
    read."""
    twice = {"w": torch.ones(3)}
    loop: dict[str, Any] = {"w": torch.ones(3)}
    loop["part"] = [loop]
    torch.save({"a": twice, "b": [twice, torch.zeros(2)]}, tmp_path / "twice.pt")
    assert set(ow.load_file(tmp_path / "twice.pt")) == {"a.w", "b.0.w", "b.1"}
    torch.save({"a": loop}, tmp_path / "loop.pt")
    for work in (ow.load_file, lambda path: ow.convert(path, tmp_path / "out.safetensors")):
        with pytest.raises(ow.FormatError, match=r"loop.pt.*a\.part\.0 "):
            work(tmp_path / "loop.pt")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_file_that_is_truncated_while_it_is_read(torch_script: Any, tmp_path: Path) -> None:
    """If a file is truncated after its directory was read, reading the pickle, a strided tensor or a contiguous tensor
    raises CorruptError instead of crashing."""
    torch_script("""
import os, torch, overwire as ow
from overwire.bundles import torchfiles, torchfolders
w = torch.randint(0, 255, (600, 700), dtype=torch.uint8)
for state, where, name in (({"w": w}, torchfiles._Reader, "read_content"),
                           ({"w": w.t()}, torchfiles._Reader, "_bytes_of"), ({"w": w}, torchfolders, "write_plain")):
    torch.save(state, "m.bin")
    original = getattr(where, name)
    def cut_off(*args, **kwargs):
        os.truncate("m.bin", 100)
        return original(*args, **kwargs)
    setattr(where, name, cut_off)
    try:
        ow.convert("m.bin", "x.safetensors")
        raise SystemExit(f"{name}: no error")
    except ow.CorruptError as error:
        assert "changed while it was read" in str(error), error
    setattr(where, name, original)
assert os.listdir(".") == ["m.bin"], os.listdir(".")
""")


def test_strided_tensors_in_small_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strided tensor has the same bytes with any read size."""
    w = torch.arange(7 * 11 * 13, dtype=torch.int32).reshape(7, 11, 13)
    want = {"a": w.permute(2, 0, 1), "b": w[::3, 1::2, ::5], "c": w[2].t(), "d": w[:, 4], "e": w[0, 0].expand(5, 13)}
    torch.save(want, tmp_path / "m.bin")
    for step in (4, 50, 1000):
        monkeypatch.setattr(torchfiles, "_STEP", step)
        ow.convert(tmp_path / "m.bin", tmp_path / "m.safetensors", compress=False)
        equal(ow.load_file(tmp_path / "m.safetensors"), {name: tensor.contiguous() for name, tensor in want.items()})


def test_a_file_that_cannot_be_opened_is_not_left_out(tmp_path: Path) -> None:
    """If no descriptor is left to open a file of a folder, an error is raised, because the file may belong to the
    model."""
    torch.save({"a": torch.arange(9)}, tmp_path / "pytorch_model.bin")
    assert torchfolders.is_torch_model(str(tmp_path / "pytorch_model.bin"))
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(ow.IOFailure, match="pytorch_model"):
            torchfolders.is_torch_model(str(tmp_path / "pytorch_model.bin"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
