"""Tests that save_file and load_file keep every bit, for every dtype, shape and kind of source."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from conftest import every_dtype, raw, same, ugly
from overwire.compat import safetensors as drop_in
from overwire.compat.safetensors import torch as drop_in_torch

MODES = pytest.mark.parametrize("compress", [True, False], ids=["compressed", "plain"])


@MODES
@pytest.mark.parametrize("make", [every_dtype, ugly])
def test_torch_round_trip(tmp_path: Path, compress: bool, make) -> None:
    """Every dtype and unusual shape loads bit for bit, contiguous, into storages of exactly the right size."""
    tensors = make()
    path = tmp_path / "m.safetensors"
    report = ow.save_file(tensors, path, {"format": "pt"}, compress=compress)
    assert report.tensors == len(tensors)
    assert report.bytes_in == sum(len(raw(t)) for t in tensors.values())
    assert report.bytes_out == path.stat().st_size
    loaded = ow.load_file(path, framework="pt")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        same(loaded[name], tensor)
        assert loaded[name].is_contiguous()
        if tensor.numel():
            assert loaded[name].untyped_storage().nbytes() == len(raw(tensor)), name


@pytest.mark.parametrize("make", [every_dtype, ugly])
def test_level_smaller_keeps_every_bit(tmp_path: Path, make) -> None:
    """At level "smaller", every tensor is unchanged, and the file is at most as large as at the default level.
    Converting between the levels gives the same files as saving."""
    tensors = make()
    tensors["weight"] = torch.randn(130, 333, generator=torch.Generator().manual_seed(3)).bfloat16()
    usual, small = tmp_path / "usual.safetensors", tmp_path / "small.safetensors"
    ow.save_file(tensors, usual)
    ow.save_file(tensors, small, level="smaller")
    assert small.stat().st_size < usual.stat().st_size
    loaded = ow.load_file(small)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        same(loaded[name], tensor)
    with ow.safe_open(small, "pt") as file:
        assert torch.equal(file.get_slice("weight")[7:90, 5:300], tensors["weight"][7:90, 5:300])
    assert "planes/" in json.dumps(ow.inspect(small))
    for level, source, want in (("smaller", usual, small), ("default", small, usual)):
        ow.convert(source, tmp_path / "again.safetensors", level=level)
        assert (tmp_path / "again.safetensors").read_bytes() == want.read_bytes()


@MODES
def test_numpy_round_trip(tmp_path: Path, compress: bool) -> None:
    """Arrays of every dtype, memory order and byte order load bit for bit and can be written to."""
    import ml_dtypes

    rng = np.random.default_rng(1)
    noise = rng.integers(0, 256, 384, dtype=np.uint8)
    names = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64"
    extra = "bfloat16 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz"
    kinds = [np.dtype(n) for n in names.split()[1:]] + [np.dtype(getattr(ml_dtypes, n)) for n in extra.split()]
    arrays = {k.name: noise.copy().view(k).reshape(3, -1) for k in kinds}
    arrays["bool"] = noise.reshape(3, -1) > 99
    arrays["float4_e2m1fn"] = (noise & 15).view(ml_dtypes.float4_e2m1fn).reshape(3, -1)
    arrays |= {"fortran": np.asfortranarray(rng.random((7, 5))), "back": np.arange(9)[::-1], "0d": np.array(2.5)}
    arrays |= {"swapped": np.arange(5, dtype=">i4"), "scalar": np.float32(1.5), "empty": np.empty((0, 3))}
    ow.save_file(arrays, tmp_path / "m", compress=compress)
    loaded = ow.load_file(tmp_path / "m", framework="np")
    for name, array in arrays.items():
        got = loaded[name]
        assert got.dtype == np.asarray(array).dtype.newbyteorder("=") and got.shape == array.shape, name
        assert got.tobytes() == np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).tobytes(), name
        assert got.flags.writeable and got.flags.c_contiguous
        got.reshape(-1)[:1] = 0  # must not crash


def test_plain_files_equal_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {k: v for k, v in every_dtype().items() if k not in ("F4", "F8_E8M0")} | {
        k: v.resolve_conj().contiguous() for k, v in ugly().items()
    }
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ow.save_file(tensors, ours, {"a": "b"}, compress=False)
    safetensors.torch.save_file(tensors, theirs, {"a": "b"})
    by_them = safetensors.torch.load_file(ours)
    by_us = ow.load_file(theirs, framework="pt")
    assert set(by_them) == set(by_us) == set(tensors)
    for name, tensor in tensors.items():
        same(by_them[name], tensor)
        same(by_us[name], tensor)
    with safetensors.safe_open(ours, "pt") as them, ow.safe_open(theirs, "pt") as us:
        assert them.metadata() == us.metadata() == {"a": "b"}
        assert list(them.keys()) == us.keys()


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_missing_and_empty_metadata_are_distinguished(tmp_path: Path, metadata) -> None:
    """A plain file has the same header as one written by safetensors, except for padding. Every reader reports the
    metadata that was saved, from plain, compressed and converted files."""

    def header(data: bytes) -> bytes:
        return data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip()

    tensors = {"t": torch.arange(500.0)}
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata)
    ow.save_file(tensors, tmp_path / "ours", metadata, compress=False)
    assert header((tmp_path / "ours").read_bytes()) == header((tmp_path / "theirs").read_bytes())
    assert header(drop_in_torch.save(tensors, metadata)) == header((tmp_path / "theirs").read_bytes())
    ow.save_file(tensors, tmp_path / "packed", metadata)
    ow.convert(tmp_path / "theirs", tmp_path / "made")
    ow.convert(tmp_path / "packed", tmp_path / "back", compress=False)
    for name in ("theirs", "ours", "packed", "made", "back"):
        with ow.safe_open(tmp_path / name) as file:
            assert file.metadata() == metadata, name
        with drop_in.safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == metadata, name
    with safetensors.safe_open(tmp_path / "back", "pt") as file:
        assert file.metadata() == metadata


def test_safetensors_reads_plain_files_of_arrays(tmp_path: Path) -> None:
    arrays = {"a": np.arange(12.0).reshape(3, 4), "b": np.array(True), "c": np.empty((0, 2), np.int16)}
    ow.save_file(arrays, tmp_path / "m", compress=False)
    for name, array in safetensors.numpy.load_file(tmp_path / "m").items():
        assert array.dtype == arrays[name].dtype and np.array_equal(array, arrays[name])


def test_the_two_frameworks_agree(tmp_path: Path) -> None:
    """A file gives the same bytes as torch tensors and as numpy arrays. numpy gets one F4 element per byte."""
    ow.save_file(every_dtype(), tmp_path / "m")
    pt, np_ = (ow.load_file(tmp_path / "m", framework=f) for f in ("pt", "np"))
    for name in pt:
        if name != "F4":
            assert raw(pt[name]) == raw(np_[name]) and tuple(pt[name].shape) == np_[name].shape
    two = raw(pt["F4"])
    assert np_["F4"].shape == (3, 512)
    assert bytes(b & 15 if i % 2 == 0 else b >> 4 for b in two for i in (0, 1)) == np_["F4"].view(np.uint8).tobytes()


def test_f6_tensors_load_as_bytes(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(6)))
    for framework in ("pt", "np"):
        got = ow.load_file(tmp_path / "m", framework=framework)["a"]
        assert tuple(got.shape) == (2, 3) and raw(got) == bytes(range(6))


@MODES
def test_keys_filter_and_dtype_select_and_cast_tensors(tmp_path: Path, compress: bool) -> None:
    """keys and filter select tensors, and dtype casts only floats. A missing key raises an error with its name."""
    tensors = {"w": torch.randn(8, 4).bfloat16(), "ids": torch.arange(5), "f8": torch.randn(6).to(torch.float8_e4m3fn)}
    path = tmp_path / "m"
    ow.save_file(tensors, path, compress=compress)
    assert list(ow.load_file(path, keys=["ids", "w", "ids"])) == ["ids", "w"]
    assert set(ow.load_file(path, filter=lambda name: name.startswith("w"))) == {"w"}
    assert ow.load_file(path, keys=[]) == {}
    for dtype in (torch.float32, "float32", "F32"):
        cast = ow.load_file(path, dtype=dtype, framework="pt")
        same(cast["w"], tensors["w"].float())
        same(cast["f8"], tensors["f8"].float())
        same(cast["ids"], tensors["ids"])
    down = ow.load_file(path, dtype="bfloat16", framework="np")
    assert down["w"].dtype.name == down["f8"].dtype.name == "bfloat16" and down["ids"].dtype == np.int64
    with pytest.raises(ow.TensorNotFoundError) as caught:
        ow.load_file(path, keys=["w", "nope"])
    assert caught.value.tensor == "nope" and isinstance(caught.value, KeyError)


def test_a_model_loads_from_every_kind_of_source(tmp_path: Path) -> None:
    """A model loads from a list, a folder, an index, an open file and BytesIO. A name in two files is refused."""
    a, b = {"a": torch.arange(4)}, {"b": torch.randn(3, 3)}
    folder = tmp_path / "repo"
    folder.mkdir()
    first, second = folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    ow.save_file(a, first)
    ow.save_file(b, second, compress=False)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": first.name, "b": second.name}}))
    for source in ([first, str(second)], (p for p in (first, second)), folder, str(folder), index):
        got = ow.load_file(source)
        assert set(got) == {"a", "b"}
        same(got["b"], b["b"])
    with open(first, "rb") as file:
        same(ow.load_file(file)["a"], a["a"])
    with warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always")
        same(ow.load_file(io.BytesIO(second.read_bytes()))["b"], b["b"])
    assert not unclosed
    with tempfile.TemporaryFile() as file:
        file.write(second.read_bytes())
        same(ow.load_file(file)["b"], b["b"])
    ow.save_file(a, tmp_path / "again")
    with pytest.raises(ow.OverwireError, match='"a"'):
        ow.load_file([first, tmp_path / "again"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A file object that is closed or only open for writing is refused."""
    with open(tmp_path / "m", "wb") as closed:
        pass
    with open(tmp_path / "m", "wb") as written:
        for file in (closed, written):
            with pytest.raises(ow.ArgumentError, match="closed, or not open for reading"):
                ow.load_file(file)


def test_a_working_folder_that_was_removed(torch_script: Callable[..., Any]) -> None:
    """A relative path in a removed working folder raises NotFoundError with this reason."""
    torch_script("""
import os, sys
import overwire as ow
os.mkdir("gone")
os.chdir("gone")
os.rmdir(os.getcwd())
for name in ("m.safetensors", "../m.safetensors"):
    for call in (ow.load_file, ow.plan, ow.preload, lambda path: ow.safe_open(path, "bytes")):
        try:
            call(name)
        except ow.NotFoundError as error:
            assert "the working folder was removed" in str(error), error
        else:
            sys.exit(name)
""")


def test_relative_paths_are_resolved_at_the_call(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ow.save_file({"a": torch.arange(4)}, "m.safetensors")
    file = ow.safe_open("m.safetensors")
    monkeypatch.chdir("/")
    same(file.get_tensor("a"), torch.arange(4))


def test_tied_tensors_load_as_separate_tensors(tmp_path: Path) -> None:
    tied = torch.randn(100, 50)
    report = ow.save_file({"a": tied, "b": tied, "c": tied.clone()}, tmp_path / "m")
    assert report.aliases == 2
    got = ow.load_file(tmp_path / "m")
    got["a"].zero_()
    same(got["b"], tied)
    same(got["c"], tied)


def test_a_model_in_shards_loads_from_its_folder(tmp_path: Path) -> None:
    """A model saved in shards of at most max_shard_size loads from its folder."""
    tensors = {f"t{i}": torch.randn(100, 25) for i in range(10)}
    report = ow.save_file(tensors, tmp_path / "model.safetensors", max_shard_size="35kB", compress=False)
    assert len(report.files) == 5 and report.files[-1].endswith("model.safetensors.index.json")
    got = ow.load_file(tmp_path)
    for name, tensor in tensors.items():
        same(got[name], tensor)


def test_decompression_gives_the_original_file(tmp_path: Path) -> None:
    """Decompressing gives back the safetensors file that was compressed. A model that was saved compressed has no
    original file."""
    save = pytest.importorskip("safetensors.torch").save_file
    plain, small, back = (tmp_path / f"{name}.safetensors" for name in ("plain", "small", "back"))
    tied = torch.randn(100, 50)
    save({"z": tied, "a": tied.clone(), "b.16": torch.randn(64, 64).bfloat16(), "no": torch.zeros(0, 3)}, plain, {"z": "1", "a": "é"})
    sum = hashlib.sha256(plain.read_bytes()).hexdigest()
    assert ow.convert(plain, small).originals == {str(small): sum}
    report = ow.convert(small, back, compress=False)
    assert back.read_bytes() == plain.read_bytes()
    assert report.originals == {str(back): sum} and report.anew == ()
    assert isinstance(hash(report), int)
    assert ow.convert(plain, small, sha256=False).originals == {str(small): ""}
    assert (
        ow.convert(small, back, compress=False).originals == {str(back): ""} and back.read_bytes() == plain.read_bytes()
    )
    assert back.read_bytes() == plain.read_bytes()
    assert ow.convert(small, back, compress=False, metadata={"z": "1"}).anew == (str(back),)
    ow.save_file({"z": tied}, small)
    report = ow.convert(small, back, compress=False)
    assert report.originals == {} and report.anew == (str(back),)


def test_saving_is_deterministic_and_leaves_the_input(tmp_path: Path) -> None:
    tensors = ugly()
    before = {k: (raw(v), v.stride()) for k, v in tensors.items()}
    ow.save_file(tensors, tmp_path / "a", {"x": "1", "y": "2"})
    ow.save_file(dict(reversed(tensors.items())), tmp_path / "b", {"y": "2", "x": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert before == {k: (raw(v), v.stride()) for k, v in tensors.items()}


WRONG = {
    "missing": (lambda p: ow.load_file(p / "nope"), FileNotFoundError, "nope"),
    "missing folder": (lambda p: ow.load_file(p / "no" / "nope"), FileNotFoundError, "no such folder"),
    "near file": (lambda p: ow.load_file(p / "texd"), FileNotFoundError, "did you mean"),
    "near verb": (lambda p: ow.load_fil, AttributeError, "did you mean 'load_file'"),
    "other verb": (lambda p: ow.load, AttributeError, "did you mean 'load_file'"),
    "other's pickle": (lambda p: ow.load_compressed_pickle(p / "text"), FileNotFoundError, "torch.load"),
    "not ours": (lambda p: ow.load_file(p / "text"), ow.FormatError, "text"),
    "device": (lambda p: ow.load_file(p / "m", device="cuda:1", framework="np"), ow.NotSupportedError, "GPU"),
    "device int": (lambda p: ow.load_file(p / "m", device=-1), ValueError, "device"),
    "device object": (lambda p: ow.load_file(p / "m", device=torch.device("cuda", 63)), ow.DeviceError, "cuda:63"),
    "device text": (lambda p: ow.load_file(p / "m", device="cuda:x"), ValueError, "cuda:x"),
    "framework": (lambda p: ow.load_file(p / "m", framework="jax"), ValueError, "jax"),
    "dtype": (lambda p: ow.load_file(p / "m", dtype="nope"), ValueError, "nope"),
    "keys": (lambda p: ow.load_file(p / "m", keys="a"), ValueError, "keys"),
    "progress": (lambda p: ow.load_file(p / "m", progress=3), ValueError, "progress"),
    "empty list": (lambda p: ow.load_file([]), ValueError, "empty"),
    "number": (lambda p: ow.load_file(3), ValueError, "int"),
    "text file": (lambda p: ow.load_file(io.StringIO("x")), ValueError, "binary"),
    "NUL": (lambda p: ow.load_file("a\0b"), ValueError, "NUL"),
    "scheme": (lambda p: ow.load_file("gopher://x/y"), ow.NotSupportedError, "gopher"),
    "save what": (lambda p: ow.save_file([1], p / "x"), ValueError, "dict"),
    "save bytes": (lambda p: ow.save_file({"a": b"1234"}, p / "x"), ValueError, "TensorSpec.of"),
    "save wrong bytes": (lambda p: ow.save_file({"a": ow.TensorSpec.of("F32", [2], b"1234")}, p / "x"), ValueError, "4 bytes"),
    "save turned": (lambda p: ow.save_file(p / "x", {}), ValueError, "the tensors come first"),
    "save onto a folder": (lambda p: ow.save_file({}, p), ValueError, "the path is a folder"),
    "save value": (lambda p: ow.save_file({"a": 1}, p / "x"), ValueError, "'a'"),
    "save name": (lambda p: ow.save_file({1: torch.ones(1)}, p / "x"), ValueError, "1"),
    "save reserved": (lambda p: ow.save_file({"overwire.index": torch.ones(1)}, p / "x"), ValueError, "overwire.index"),
    "save type": (lambda p: ow.save_file({"a": torch.ones(1, dtype=torch.complex128)}, p / "x"), ow.NotSupportedError, "c"),
    "save sparse": (lambda p: ow.save_file({"a": torch.ones(2).to_sparse()}, p / "x"), ow.NotSupportedError, "sparse"),
    "save meta": (lambda p: ow.save_file({"a": torch.ones(2, device="meta")}, p / "x"), ValueError, "meta"),
    "save objects": (lambda p: ow.save_file({"a": np.array([None])}, p / "x"), ow.NotSupportedError, "object"),
    "save metadata": (lambda p: ow.save_file({}, p / "x", {"a": 1}), ValueError, "metadata"),
    "save metadata of another kind": (lambda p: ow.save_file({}, p / "x", 5), ValueError, "metadata: expected a mapping"),
    "convert metadata": (lambda p: ow.convert(p / "m", p / "x", metadata={1: "a"}), ValueError, "metadata: keys and values"),
    "delta metadata": (lambda p: ow.save_delta({}, {}, p / "x", metadata=[1]), ValueError, "metadata: expected a mapping"),
    "names": (lambda p: ow.safe_open(p / "m").get_tensors("a"), ValueError, "got one str: put it into a list"),
    "a name as filter": (lambda p: ow.load_file(p / "m", filter="a"), ValueError, "got str: keys= takes names"),
    "save folder": (lambda p: ow.save_file({}, p / "no" / "x"), OSError, "does not exist"),
    "save level": (lambda p: ow.save_file({}, p / "x", level="best"), ValueError, "level"),
    "save size": (lambda p: ow.save_file({}, p / "x", max_shard_size="5 parsecs"), ValueError, "parsecs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(tmp_path: Path, case: str) -> None:
    """Each wrong argument raises a typed error that names the mistake, and writes nothing."""
    ow.save_file({"a": torch.ones(3)}, tmp_path / "m")
    (tmp_path / "text").write_text("this is a text, not a tensor file " * 9)
    call, kind, text = WRONG[case]
    with pytest.raises(kind) as caught:
        call(tmp_path)
    assert text in str(caught.value)
    if kind is not AttributeError:
        assert isinstance(caught.value, ow.OverwireError)
        assert str(caught.value).startswith("overwire: ")
    assert not (tmp_path / "x").exists()


NAMES = {
    torch.float16: "half fp16 f16 float16 torch.float16 F16",
    torch.bfloat16: "bf16 bfloat16 torch.bfloat16 BF16",
    torch.float32: "float fp32 f32 float32 single torch.float F32 np.float32",
    torch.float64: "double fp64 float64 F64",
    torch.float8_e4m3fn: "fp8_e4m3 float8_e4m3fn F8_E4M3",
    torch.float8_e5m2: "fp8_e5m2 float8_e5m2 F8_E5M2",
}


def test_names_of_dtypes(tmp_path: Path) -> None:
    """The name of a dtype means the same in both frameworks, except that "float" is float64 in numpy. Dtypes that are
    not floats are refused, however they are written."""
    ow.save_file({"a": torch.ones(3)}, tmp_path / "m")
    for dtype, names in NAMES.items():
        for name in names.split():
            assert ow.load_file(tmp_path / "m", dtype=name)["a"].dtype is dtype, name
            if name not in ("float", "torch.float"):
                assert str(dtype) == f"torch.{ow.load_file(tmp_path / 'm', framework='np', dtype=name)['a'].dtype.name}", name
    assert ow.load_file(tmp_path / "m", dtype=np.float16)["a"].dtype is torch.float16
    assert ow.load_file(tmp_path / "m", dtype=np.dtype("float64"))["a"].dtype is torch.float64
    assert ow.load_file(tmp_path / "m", framework="np", dtype=torch.float16)["a"].dtype == np.float16
    for wrong in (torch.int8, torch.bool, np.int32, "I64", "int8", "torch.int8", "bool", "F8_E8M0", "fp8", "C64", int, 3, b"F16"):
        for load in (
            lambda dtype: ow.load_file(tmp_path / "m", dtype=dtype),
            lambda dtype: ow.load_file(tmp_path / "m", framework="np", dtype=dtype),
            lambda dtype: list(ow.stream(tmp_path / "m", dtype=dtype)),
            lambda dtype: ow.safe_open(tmp_path / "m", dtype=dtype),
            lambda dtype: ow.plan(tmp_path / "m", dtype=dtype),
        ):
            with pytest.raises(ow.ArgumentError, match="dtype"):
                load(wrong)


def test_an_open_file_is_like_a_dict(tmp_path: Path) -> None:
    ow.save_file({"b": torch.ones(3, 2), "a": torch.zeros(1)}, tmp_path / "m")
    with ow.safe_open(tmp_path / "m") as file:
        assert list(file) == ["a", "b"] and len(file) == 2 and "a" in file
        assert torch.equal(file["b"], torch.ones(3, 2))
        assert file.get_slice("b").shape == (3, 2) and file.get_slice("b").dtype == "F32"
        with pytest.raises(KeyError, match="'c'"):
            file["c"]


def test_corruption_errors_name_tensor_and_chunk(tmp_path: Path) -> None:
    path = tmp_path / "m"
    ow.save_file({"good": torch.ones(5), "w": torch.randn(300, 300).bfloat16()}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(ow.CorruptError) as caught:
        ow.load_file(path)
    error = caught.value
    assert error.source == str(path) and error.tensor == "w" and error.chunk is not None and error.offset is not None
    assert "checksum" in str(error)
    assert set(ow.load_file(path, keys=["good"])) == {"good"}


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m"
    ow.save_file({"a": torch.arange(3)}, path)
    old = path.read_bytes()
    with pytest.raises(ow.OverwireError):
        ow.save_file({"a": torch.arange(3), "overwire.index": torch.ones(2)}, path)
    assert path.read_bytes() == old and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_numpy_without_ml_dtypes_names_it(tmp_path: Path, script) -> None:
    ow.save_file({"b": torch.ones(3).bfloat16(), "f": torch.ones(3)}, tmp_path / "m")
    script(
        """
import sys
sys.modules["ml_dtypes"] = None
import overwire as ow
assert ow.load_file("m", framework="np", keys=["f"])["f"].sum() == 3
try:
    ow.load_file("m", framework="np")
except ImportError as e:
    assert isinstance(e, ow.MissingPackageError) and "pip install ml_dtypes" in str(e)
else:
    raise AssertionError
assert ow.last_report()["tensors"] == 1  # the report of the first load, because the second never began
"""
    )


def test_without_any_framework_bytes_are_saved_and_loaded(tmp_path: Path, script) -> None:
    script(
        """
import array, sys
sys.modules["torch"] = sys.modules["numpy"] = None
import overwire as ow
floats = array.array("f", range(50000))
block = bytearray(b"abcdef")
report = ow.save_file({
    "floats": ow.TensorSpec.of("float32", (50, 1000), floats), "bytes": ow.TensorSpec.of("U8", [3, 2], b"123456"),
    "some": ow.TensorSpec.of("I16", [2], memoryview(block)[2:]), "none": ow.TensorSpec.of("F64", [0, 7], b""),
    "one": ow.TensorSpec.of("BOOL", [], bytes([1])),
}, "m")
assert report.compressed == 1
block[:] = b"ghijkl"  # save_file no longer uses it
block.append(1)
loaded = ow.load_file("m", framework="bytes")
assert bytes(loaded["floats"]) == floats.tobytes()
assert bytes(loaded["bytes"]) == b"123456" and bytes(loaded["some"]) == b"cdef"
assert bytes(loaded["one"]) == bytes([1]) and not bytes(loaded["none"])
for wrong in ("text", 5, memoryview(b"123456")[::2]):
    try:
        ow.TensorSpec.of("U8", [3], wrong)
    except (TypeError, BufferError):
        pass
    else:
        raise AssertionError(wrong)
"""
    )


def test_without_torch_numpy_is_used(tmp_path: Path, script) -> None:
    ow.save_file({"f": torch.ones(3)}, tmp_path / "m")
    script(
        """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch" and "numpy" not in name:
            raise ModuleNotFoundError(name)
import overwire
from overwire.frameworks import choose
choose.find_spec = lambda name: None
sys.modules.pop("torch", None)
a = overwire.load_file("m")["f"]
assert type(a).__module__ == "numpy" and "torch" not in sys.modules
o = overwire.compress_pickle({"a": a, "n": [1, 2]}, "x.pkl")
assert overwire.load_compressed_pickle("x.pkl")["a"].sum() == 3 and "torch" not in sys.modules
"""
    )
