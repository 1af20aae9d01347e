"""Compares overwire.compat.tensorizer with tensorizer itself ("the reference"). Each library reads the other's files.
Files without random parts, and the results of calls, are the same."""

from __future__ import annotations

import io
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import overwire
import overwire.compat.tensorizer as ours
import pytest
import tensorizer as theirs
import torch

try:  # the reference encrypts only if the system has libsodium
    theirs.EncryptionParams.random()
    SODIUM = True
except Exception:
    SODIUM = False

FAST = {"opslimit": 1, "memlimit": 8192}
NESTED = {"m": {"l": [{"w": torch.arange(6.0)}, {"w": torch.ones(2, 3).bfloat16()}]}, "h": torch.tensor(7)}


def same(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.detach().contiguous().reshape(-1).view(torch.uint8), b.detach().contiguous().reshape(-1).view(torch.uint8)
    )


class Net(torch.nn.Module):
    """A module with parameters and buffers at several levels, a tied weight and a buffer that is not persistent."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(5, 7)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(7, 7, bias=False) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight
        self.brain = torch.nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("seen", torch.arange(4))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.norm = torch.nn.BatchNorm1d(7)


def fill(module: Any, path: Any, what: Any, encryption: Any = None) -> None:
    s = module.TensorSerializer(path, encryption=encryption)
    if isinstance(what, torch.nn.Module):
        s.write_module(what)
    else:
        s.write_state_dict(what)
    s.close()


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("writer,reader", [(ours, theirs), (theirs, ours), (ours, ours)])
def test_each_library_reads_the_others_files(tmp_path: Path, writer: Any, reader: Any, encrypted: bool) -> None:
    """Each library reads modules and nested structures that the other wrote: with a key or a password, eagerly or
    lazily, with verification."""
    if encrypted and not SODIUM and theirs in (writer, reader):
        pytest.skip("the reference has no libsodium; the golden files are still read")
    meta = {"plain": torch.randn(1 << 20), "meta": torch.empty(4, device="meta")}  # 4 MiB are two encrypted chunks
    params = [None]
    if encrypted:
        params = [writer.EncryptionParams.random(), writer.EncryptionParams.from_string(b"secret", **FAST)]
    for p, what in itertools.product(params, (Net(), NESTED, meta)):
        path = tmp_path / "x.tensors"
        fill(writer, path, what, p)
        keys = [None]
        if p is not None:
            keys = [reader.DecryptionParams.from_key(p.key)]
            if p is params[1]:
                keys.append(reader.DecryptionParams.from_string("secret"))
        for key, lazy in itertools.product(keys, (False, True)):
            with reader.TensorDeserializer(path, device="cpu", lazy_load=lazy, verify_hash=True, encryption=key) as de:
                if isinstance(what, Net):
                    twin = Net(1)
                    # Two tensors of the first layer, three of the others (the tied tensor is written twice), the
                    # module's own parameter and two buffers, and five of the norm.
                    assert de.load_into_module(twin) == 2 + 3 + 3 + 5
                    assert all(same(a, twin.state_dict()[name]) for name, a in what.state_dict().items())
                elif what is NESTED:
                    tree = de.tree()
                    assert list(tree) == ["m", "h"] and isinstance(tree["m"]["l"], list)
                    assert same(tree["m"]["l"][1]["w"], NESTED["m"]["l"][1]["w"]) and same(de["m"]["l"][0]["w"], torch.arange(6.0))
                else:
                    assert same(de["plain"], meta["plain"]) and same(de["meta"], torch.zeros(4))
        if p is not None:
            with pytest.raises(reader.CryptographyError):
                reader.TensorDeserializer(path, device="cpu")
            with pytest.raises(reader.CryptographyError):
                reader.TensorDeserializer(path, device="cpu", encryption=reader.DecryptionParams.from_key(bytes(range(32))))


@pytest.mark.parametrize("kind", ["path", "file", "raw", "bytesio", "temporary", "fd"])
def test_files_equal_the_references(tmp_path: Path, kind: str) -> None:
    """An unencrypted file is the same as the reference's byte for byte, for every kind of target."""

    def write(module: Any) -> bytes:
        path = tmp_path / f"{module.__name__}.tensors"
        target: Any = path
        if kind in ("file", "raw"):
            target = open(path, "wb+", buffering=0 if kind == "raw" else -1)  # noqa: SIM115
        elif kind == "fd":
            target = os.open(path, os.O_RDWR | os.O_CREAT) if module is ours else path
        elif kind == "bytesio":
            target = io.BytesIO()
            target.close = lambda: None  # type: ignore[method-assign]
        elif kind == "temporary":
            target = tempfile.NamedTemporaryFile("wb+", delete=False, dir=tmp_path)  # noqa: SIM115
            path = Path(target.name)
        s = module.TensorSerializer(target)
        s.write_tensor(3, "é.a", module.TensorType.PARAM, torch.arange(6).reshape(2, 3).t())
        s.write_tensor(4, "b", module.TensorType.BUFFER, np.arange(5, dtype=np.int16))
        s.write_tensor(0, "meta", module.TensorType.PARAM, torch.empty(2, 2, device="meta", dtype=torch.float16))
        s.write_state_dict(NESTED)
        s.write_tensor(0, "e", module.TensorType.PARAM, torch.empty(0, 3))
        s.write_tensor(0, "c", module.TensorType.PARAM, torch.ones(3, dtype=torch.complex128))
        assert s.total_tensor_bytes == 48 + 10 + 24 + 12 + 8 + 48
        s.close()
        return target.getvalue() if kind == "bytesio" else path.read_bytes()

    assert write(ours) == write(theirs)


def test_files_of_many_tensors_equal_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of many tensors, which are hashed sixteen at a time and written in several batches with copies among them,
    is the same as the reference's."""
    from overwire.compat.tensorizer import _writer

    monkeypatch.setattr(_writer, "_TURN", 300_000)
    monkeypatch.setattr(_writer, "_COPIED", 20_000)
    torch.manual_seed(1)
    tensors = {f"{i}": torch.randint(-128, 127, (40 * i % 1100 + 1, 37), dtype=torch.int8) for i in range(100)}
    tensors |= {f"{i}.t": torch.randn(50, 2 + i % 3).t() for i in range(60)}
    for module in (ours, theirs):
        fill(module, tmp_path / module.__name__, tensors)
    assert (tmp_path / ours.__name__).read_bytes() == (tmp_path / theirs.__name__).read_bytes()
    memory = io.BytesIO()
    memory.close = lambda: None  # type: ignore[method-assign]
    fill(ours, memory, tensors)
    assert memory.getvalue() == (tmp_path / theirs.__name__).read_bytes()
    net, s = Net(), ours.TensorSerializer(tmp_path / "net")
    s.write_module(net, remove_tensors=True)
    s.close()
    assert not list(net.parameters()) and ours.TensorDeserializer(tmp_path / "net", device="cpu", verify_hash=True).keys()


def test_full_disk(tmp_path: Path) -> None:
    """If the disk is full, the error names the file and the tensor. Tensors that write_module was to remove from the
    module stay in it."""
    net = torch.nn.Linear(1000, 1000, bias=False)
    s = ours.TensorSerializer(tmp_path / "x.tensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))  # Python ignores the signal
    try:
        with pytest.raises(overwire.IOFailure, match=r"x\.tensors.*weight"):
            s.write_module(net, remove_tensors=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert net.weight is not None
    s.close()


def test_files_of_modules_equal_the_references(tmp_path: Path) -> None:
    """write_module with its options, and a dimension above 2^32, gives the same bytes as the reference."""
    for options in ({}, {"remove_tensors": True}):
        written = []
        for module in (ours, theirs):
            net = Net()
            s = module.TensorSerializer(tmp_path / "x.tensors")
            s.write_module(net, **options)
            s.write_tensor(0, "long", module.TensorType.PARAM, torch.empty(2**32 + 1, device="meta", dtype=torch.int8))
            s.close()
            written.append((tmp_path / "x.tensors").read_bytes())
            assert (net.first.weight is None) == ("remove_tensors" in options)
        assert written[0] == written[1]
    s = ours.TensorSerializer(tmp_path / "x.tensors")
    s.write_module(Net(), include_non_persistent_buffers=False)
    s.close()
    # the reference would omit all buffers of the outermost module
    names = theirs.TensorDeserializer(tmp_path / "x.tensors", device="cpu", lazy_load=True).keys()
    assert ".seen" in names and "norm.running_mean" in names and ".hidden" not in names


def test_an_index_that_is_too_large_for_the_reference(tmp_path: Path) -> None:
    """A file of 5,000 tensors can be written. The reference cannot write an index of this size, but can read it."""
    many = {f"some.long.name.of.a.tensor.{i}": torch.full((2,), i) for i in range(5000)}
    with pytest.raises(RuntimeError, match="Metadata overflow"):
        fill(theirs, tmp_path / "x.tensors", many)
    fill(ours, tmp_path / "x.tensors", many)
    de = theirs.TensorDeserializer(tmp_path / "x.tensors", device="cpu", verify_hash=True)
    assert all(same(de[name], tensor) for name, tensor in many.items())


def test_read_in_order(tmp_path: Path) -> None:
    """read_tensors and read_numpy_arrays continue where the last call ended, as in the reference."""
    path = tmp_path / "x.tensors"
    fill(theirs, path, Net())

    def walk(module: Any) -> list[Any]:
        out: list[Any] = []
        de = module.TensorDeserializer(path, device="cpu", lazy_load=True)
        out.append([(i, int(t), n, p.sum().item(), p.requires_grad) for i, t, n, p in de.read_tensors(num_tensors=2)])
        out.append([n for _, _, n, _ in de.read_tensors(lambda n: "layers" in n, num_tensors=2, verify_hash=True)])
        arrays = list(de.read_numpy_arrays(allow_raw_data=True))
        out.append([(i, int(t), n, a.dtype.str, a.tolist(), o, d) for i, t, n, a, o, d in arrays])
        out.append(list(de.read_tensors()))
        with pytest.raises(ValueError, match="num_tensors"):
            list(de.read_tensors(num_tensors=-2))
        de = module.TensorDeserializer(path, device="cpu", lazy_load=True)
        with pytest.raises(ValueError, match="opaque datatype"):
            list(de.read_numpy_arrays())
        de = module.TensorDeserializer(path, device="cpu")
        out.append(sorted(de.keys()))
        out.append(len(de))
        out.append([".brain" in de, "brain" in de])
        out.append(de.total_tensor_bytes)
        out.append(de.total_file_bytes)
        return out

    assert walk(ours) == walk(theirs)


def test_filters_trees_and_dtypes(tmp_path: Path) -> None:
    """filter_func, prefixes, default values and casts have the same effect as in the reference."""
    path = tmp_path / "x.tensors"
    fill(theirs, path, NESTED)

    def look(module: Any) -> list[Any]:
        de = module.TensorDeserializer(path, device="cpu", filter_func=lambda n: n != ("m", "l", 0, "w"), lazy_load=True)
        out: list[Any] = [list(de.keys()), type(de["m"]) is MappingProxyType, list(de["m"]["l"]), de.tree(("m", "q"), default=5)]
        out.append(len(de.tree(("m", "l"))))
        out.append(
            [
                str(v.dtype)
                for v in module.TensorDeserializer(path, device="cpu", dtype=torch.float16).tree()["m"]["l"][1].values()
            ]
        )
        with pytest.raises(TypeError, match="Invalid prefix"):
            de.tree("m")
        with pytest.raises(KeyError, match="not found"):
            de["nothing"]
        out.append(de.get("nothing", 3))
        with pytest.raises(NotImplementedError, match="write_state_dict"):
            de.load_into_module(Net())
        return out

    assert look(ours) == look(theirs)


def test_dtypes_that_safetensors_lacks(tmp_path: Path) -> None:
    """Both libraries exchange complex128 and complex32. overwire's own functions refuse these dtypes by name."""
    tensors = {
        "z": torch.randn(3, 2, dtype=torch.complex128),
        "h": torch.randn(5, dtype=torch.complex64).to(torch.complex32),
        "s": torch.tensor(1j, dtype=torch.complex128),
        "b": torch.ones(2, dtype=torch.uint8),
    }
    for writer, reader in ((ours, theirs), (theirs, ours)):
        path = tmp_path / f"{writer.__name__}.tensors"
        fill(writer, path, tensors)
        for lazy in (False, True):
            de = reader.TensorDeserializer(path, device="cpu", verify_hash=True, lazy_load=lazy)
            assert all(same(de[name], t) for name, t in tensors.items())
        with pytest.raises(overwire.NotSupportedError, match="c16"):
            overwire.load_file(path, framework="pt")


def test_damage(tmp_path: Path) -> None:
    """verify_hash detects a changed bit, and verify_module tells which tensor differs."""
    path = tmp_path / "x.tensors"
    net = Net()
    fill(theirs, path, net)
    de = ours.TensorDeserializer(path, device="cpu")
    assert de.verify_module(net)[0]
    with torch.no_grad():
        net.first.bias[0] += 1
    passed, results = de.verify_module(net)
    assert not passed and [n for n, ok in results if not ok] == ["first.bias"]
    whole = bytearray(path.read_bytes())
    whole[-12] ^= 4  # the bit is in the last tensor, which has 8 bytes and is followed by 8 zeros
    path.write_bytes(whole)
    ours.TensorDeserializer(path, device="cpu").close()
    with pytest.raises(ours.serialization.HashMismatchError):
        ours.TensorDeserializer(path, device="cpu", verify_hash=True)


@pytest.mark.parametrize("module", [ours, theirs])
def test_refusals(tmp_path: Path, module: Any) -> None:
    """Both libraries refuse the same arguments with the same errors."""
    path = tmp_path / "x.tensors"
    fill(theirs, path, {"a": torch.ones(2)})
    new = module.TensorDeserializer
    empty = tmp_path / "empty.tensors"
    module.TensorSerializer(empty).close()
    (tmp_path / "text").write_bytes(b"something else, long enough to be a header" * 9)
    version = bytearray(path.read_bytes())
    version[5] = 77
    (tmp_path / "version").write_bytes(version)
    key = module.DecryptionParams.from_key(bytes(32)) if module is ours or SODIUM else None
    for match, kind, call in [
        ("Not a tensorizer file", ValueError, lambda: new(tmp_path / "text", device="cpu")),
        ("empty", ValueError, lambda: new(empty, device="cpu")),
        ("77", ValueError, lambda: new(tmp_path / "version", device="cpu")),
        ("num_readers", ValueError, lambda: new(path, device="cpu", num_readers=0)),
        ("num_readers", TypeError, lambda: new(path, device="cpu", num_readers="2")),
        ("num_readers > 1", ValueError, lambda: new(io.BytesIO(path.read_bytes() + fill_two(tmp_path)), device="cpu", num_readers=2)),
        ("DecryptionParams", TypeError, lambda: new(path, device="cpu", encryption=b"x")),
        ("binary mode", ValueError, lambda: new(open(path), device="cpu")),  # noqa: SIM115
        ("", FileNotFoundError, lambda: new(tmp_path / "nothing", device="cpu")),
        ("binary mode", ValueError, lambda: module.TensorSerializer(open(path, "rb"))),  # noqa: SIM115
        ("limit_cpu", ValueError, lambda: module.TensorSerializer(tmp_path / "y", limit_cpu_concurrency=0)),
        ("Conflicting", ValueError, lambda: fill_twice(module, tmp_path / "y")),
        ("key type", TypeError, lambda: fill(module, tmp_path / "y", {1: torch.ones(1)})),
        ("Cannot serialize", TypeError, lambda: fill(module, tmp_path / "y", {"a": 3})),
    ] + ([] if key is None else [("not be encrypted", module.CryptographyError, lambda: new(path, device="cpu", encryption=key))]):
        if "num_readers > 1" in match and module is theirs:
            continue  # the reference first limits this to the number of tensors
        with pytest.raises(kind, match=match):
            call()


def fill_two(_: Path) -> bytes:
    return b""


def fill_twice(module: Any, path: Path) -> None:
    s = module.TensorSerializer(path)
    s.write_tensor(0, "a", module.TensorType.PARAM, torch.ones(1))
    s.write_tensor(0, "a", module.TensorType.PARAM, torch.ones(1))


@pytest.mark.parametrize("module", [ours] + ([theirs] if SODIUM else []))
def test_keys_and_salts_equal_the_references(module: Any) -> None:
    """Keys, salts and limits are the same as in the reference."""
    params = module.EncryptionParams
    known = params.from_string("test", salt=bytes(16), **FAST).key.hex()
    assert known == "185d9543e6945bb30c6ecb2d1ac58a388ddfe954c34cf395a4fa12f986897662"
    assert params.from_string("x", salt=b"0123456789abcdef", **FAST).salt == b"0123456789abcdef"
    assert params.random().key != params.random().key and len(params.random().key) == 32
    assert (params.OpsLimit.MODERATE, params.MemLimit.MODERATE) == (3, 256 << 20)
    with pytest.raises(ValueError):
        _ = params.random().salt
    for bad in (
        lambda: params(b""), lambda: params(b"x"), lambda: params.from_string(""),
        lambda: module.DecryptionParams.from_key(b""),
    ):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(TypeError):
        params.from_string("x", opslimit=params.MemLimit.MIN)


def test_open_files_and_http(tmp_path: Path) -> None:
    """BytesIO, open files, descriptors, streams and URIs can all be read."""
    path = tmp_path / "x.tensors"
    tensors = {"a": torch.arange(100_000), "b": torch.ones(3)}
    fill(theirs, path, tensors)

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    uri = f"http://127.0.0.1:{server.server_port}/x.tensors"
    try:
        with open(path, "rb") as plain, open(path, "rb") as raw:
            for source in (
                str(path), os.fsencode(path), plain, raw.fileno(), io.BytesIO(path.read_bytes()), uri,
                ours.stream_io.open_stream(uri), ours.stream_io.open_stream(path),
            ):  # fmt: skip
                de = ours.TensorDeserializer(source, device="cpu", verify_hash=True)
                assert all(same(de[name], tensor) for name, tensor in tensors.items()), source
        whole = path.read_bytes()
        with ours.stream_io.CURLStreamFile(uri) as stream:
            assert stream.read(10) == whole[:10] and stream.tell() == 10
            stream.seek(100)
            assert stream.read(5) == whole[100:105] and stream.bytes_skipped == 90
            assert stream.read() == whole[105:] and stream.response_headers["content-length"] == str(len(whole))
        with pytest.raises(OSError, match="Failed to open stream"):
            ours.stream_io.open_stream(uri + ".nothing")
        with pytest.raises(ValueError):
            ours.stream_io.CURLStreamFile(uri, 5, 5)
    finally:
        server.shutdown()
        server.server_close()


def test_torch_compat(tmp_path: Path) -> None:
    """torch.save and torch.load work with tensors in separate files, which both libraries exchange, including ties."""
    base = torch.arange(12.0).reshape(3, 4)
    obj = {"net": Net().state_dict(), "base": base, "view": base.t()[1:], "f8": torch.ones(3).to(torch.float8_e4m3fn), "n": 3}
    save, load = torch.save, torch.load
    for writer, reader in itertools.product((ours, theirs), (ours, theirs)):
        path = tmp_path / "x.pt"
        with writer.torch_compat.tensorizer_saving():
            assert torch.save is not save
            torch.save(obj, path)
        assert (tmp_path / "x.pt.tensors").exists()
        with reader.torch_compat.tensorizer_loading(device="cpu"):
            found = torch.load(path, weights_only=False)
        assert torch.save is save and torch.load is load
        assert found["n"] == 3 and all(same(found["net"][k], v) for k, v in obj["net"].items())
        assert found["view"].stride() == obj["view"].stride() and torch.equal(found["view"], obj["view"]) and same(found["f8"], obj["f8"])
        assert found["view"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()
        (tmp_path / "x.pt.tensors").unlink()
        with reader.torch_compat.tensorizer_loading(device="cpu"), pytest.raises(OSError):
            torch.load(path, weights_only=False)
    plain = io.BytesIO()
    with ours.torch_compat.tensorizer_saving():
        torch.save(obj, plain)
    plain.seek(0)
    with ours.torch_compat.tensorizer_loading(device="cpu"):
        assert torch.equal(torch.load(plain, weights_only=False)["base"], base)
        with pytest.raises(ValueError, match="pickle_module"):
            torch.load(plain, pickle_module=json)


def test_texts_equal_the_references() -> None:
    """Texts are the same as the reference's. no_init_or_tensor affects only the calling thread."""
    for n, decimal in itertools.product((0, 999, 1000, 1024, 123456789, 5e16), (True, False)):
        assert ours.utils.convert_bytes(n, decimal) == theirs.utils.convert_bytes(n, decimal)
    assert ours.utils.get_mem_usage().split("(")[0] == theirs.utils.get_mem_usage().split("(")[0]
    empty, reset = torch.empty, torch.nn.Linear.reset_parameters
    seen = []
    with ours.utils.no_init_or_tensor():
        assert torch.nn.Linear(3, 3).weight.is_meta
        t = threading.Thread(target=lambda: seen.append(torch.nn.Linear(3, 3).weight.is_meta))
        t.start()
        t.join()
    assert seen == [False] and torch.empty is empty and torch.nn.Linear.reset_parameters is reset
    assert ours.utils.no_init_or_tensor(lambda: torch.nn.Embedding(2, 2)).weight.is_meta


def test_calls_of_vllms_loader(tmp_path: Path) -> None:
    """The calls of vLLM's tensorizer loader work: a marker, a module without weights, a stream around the serializer,
    keys, and totals at the end."""
    path = tmp_path / "folder" / "model.tensors"
    net = Net()
    net.register_parameter("vllm_tensorized_marker", torch.nn.Parameter(torch.tensor((1,), device="meta"), requires_grad=False))
    key = ours.EncryptionParams.random()
    with ours.stream_io.open_stream(str(path), mode="wb+") as stream:
        serializer = ours.TensorSerializer(stream, encryption=key, limit_cpu_concurrency=2)
        serializer.write_module(net)
        serializer.close()
    options = {"num_readers": None, "verify_hash": None, "dtype": None, "encryption": ours.DecryptionParams.from_key(key.key)}
    with ours.stream_io.open_stream(str(path), mode="rb") as stream:
        assert ".vllm_tensorized_marker" in ours.TensorDeserializer(stream, lazy_load=True, device="cpu", encryption=options["encryption"])
    with ours.utils.no_init_or_tensor():
        twin = Net()
    with (
        ours.stream_io.open_stream(str(path), mode="rb") as stream,
        ours.TensorDeserializer(stream, device="cpu", **options) as de,
    ):
        de.load_into_module(twin)
    assert ours.utils.convert_bytes(de.total_tensor_bytes).endswith("KB") or de.total_tensor_bytes > 0
    assert not any(p.is_meta for p in twin.parameters())
    assert all(same(a, twin.state_dict()[name]) for name, a in net.state_dict().items() if "marker" not in name)
    with ours.TensorDeserializer(str(path), device="cpu", **options) as de:
        assert dict(de.items())[".brain"].dtype == torch.bfloat16


def test_names_of_a_modules_own_parameters(tmp_path: Path) -> None:
    """A parameter that a file calls ".brain" is "brain" for load_file and `convert`, as in state_dict(). The drop-in
    and converted .tensors files keep the dot. Names from a state dict do not change."""
    net, path = Net(), tmp_path / "m.tensors"
    theirs_serializer = theirs.TensorSerializer(str(path))
    theirs_serializer.write_module(net)
    theirs_serializer.close()
    overwire.convert(path, tmp_path / "m.safetensors")
    overwire.convert(path, tmp_path / "again.tensors")
    for source in ("m.tensors", "m.safetensors", "again.tensors"):
        twin = Net(1)
        result = twin.load_state_dict(overwire.load_file(tmp_path / source), strict=False)
        assert (result.missing_keys, result.unexpected_keys) == ([], ["hidden"])
        assert all(same(one, twin.state_dict()[name]) for name, one in net.state_dict().items()), source
    overwire.verify(path)
    for source in (path, tmp_path / "again.tensors"):
        for library in (ours, theirs):
            with library.TensorDeserializer(str(source), device="cpu") as file:
                assert ".brain" in file and "first.weight" in file and "brain" not in file
                assert same(file[".brain"], net.brain)
    serializer = ours.TensorSerializer(str(path))
    serializer.write_state_dict({".x": torch.ones(2), "y": torch.zeros(1)})
    serializer.close()
    assert sorted(overwire.load_file(path)) == [".x", "y"]


def test_import_and_install() -> None:
    """The import loads no large package and does not start the engine. With the compat folder on PYTHONPATH, programs
    import the drop-in."""
    program = (
        "import sys, tensorizer, tensorizer.serialization as s, tensorizer.stream_io\n"
        "assert tensorizer._crypt.available  # there without an import of its own, as in tensorizer\n"
        "assert 'overwire' in tensorizer.TensorSerializer.__module__, tensorizer.__file__\n"
        "assert not {'torch', 'numpy', 'boto3', 'redis', 'overwire._core'} & set(sys.modules)\n"
        "print(s.TensorDeserializer.__name__, tensorizer.__version__)\n"
    )
    home = str(Path(overwire.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([overwire.compat.path("tensorizer"), home])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["TensorDeserializer", "2.12.1"]
