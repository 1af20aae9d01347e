"""Tests that overwire.compat.tensorizer and the tensorizer package ("the reference") read each other's files, in every
combination of version, encryption, verification, nesting and source. Also tests that overwire does not repeat known
mistakes of the reference."""

from __future__ import annotations

import inspect
import io
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import overwire as ow
import overwire.compat.tensorizer as ours
import pytest
import stores
import tensorizer as theirs
import torch
import warm

try:  # the reference encrypts only if the system has libsodium
    theirs.EncryptionParams.random()
    SODIUM = True
except Exception:
    SODIUM = False

META = torch.empty(3, 2, device="meta")
LONG = torch.empty(2**32 + 5, dtype=torch.int8, device="meta")

# The version of a file depends on its contents. An encrypted file has at least version 3.
VERSIONS = {
    1: {"a": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(7), "n": torch.zeros(0, 3, dtype=torch.int16)},
    2: {
        "a": torch.randn(700, 500).bfloat16(), "f8": torch.ones(5).to(torch.float8_e4m3fn),
        "c": torch.ones(3, dtype=torch.complex64),
    },
    4: {"a": torch.randn(5), "meta": META, "h": torch.ones(3, dtype=torch.float16)},
    5: {"a": torch.arange(9), "long": LONG, "b": torch.tensor([True, False])},
}


class Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Callable[[Path], Any]]]]:
    """Serves a folder, and yields functions that open its files in several ways."""
    folder = tmp_path_factory.mktemp("matrix")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client_of = pytest.importorskip("redis")
    with stores.redis(password=None) as (_, base):
        client = client_of.Redis(host=stores.HOST, port=int(base.rstrip("/").rpartition(":")[2]))

        def in_redis(path: Path) -> str:
            client.flushall()
            client.set("x:file:0", path.read_bytes())
            return base + "x"

        yield (
            folder,
            {
                "path": str,
                "file": lambda path: open(path, "rb"),  # noqa: SIM115 - the deserialiser reads from the file later
                "memory": lambda path: io.BytesIO(path.read_bytes()),
                "http": lambda path: f"http://127.0.0.1:{server.server_port}/{path.name}",
                "redis": in_redis,
            },
        )
        client.close()
    server.shutdown()
    server.server_close()


def same(a: Any, b: Any) -> bool:
    if b.is_meta:
        b = torch.zeros(b.shape, dtype=b.dtype)
    return a.dtype == b.dtype and a.shape == b.shape and ours._reader._alike(a.detach(), b)


@pytest.mark.parametrize("encrypted", ["plain", "password", pytest.param("key", marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_combination(
    version: int, encrypted: str, sources: tuple[Path, dict[str, Callable[[Path], Any]]]
) -> None:
    """Both libraries read the files that both wrote: flat and nested, verified and not, from every source."""
    if encrypted != "plain" and not SODIUM:
        pytest.skip("the reference has no libsodium; the golden files are still read")
    folder, ways = sources
    names = itertools.cycle(ways)
    for writer, nested in itertools.product((ours, theirs), (False, True)):
        params = None
        if encrypted == "key":
            params = writer.EncryptionParams.random()
        elif encrypted == "password":
            params = writer.EncryptionParams.from_string("päss", opslimit=1, memlimit=8192)
        path = folder / "x.tensors"
        s = writer.TensorSerializer(path, encryption=params)
        # The reference cannot encrypt empty tensors.
        flat = {n: t for n, t in VERSIONS[version].items() if t.numel() or not params}
        s.write_state_dict({"l": [flat, {"deep": dict(flat)}]} if nested else flat)
        s.close()
        assert int.from_bytes(path.read_bytes()[5:9], "little") == max(version, 3 if params else 1)
        for reader, verify in itertools.product((ours, theirs), (False, True)):
            # overwire reads from every source. The reference starts curl for each, so it only reads from one, in
            # rotation.
            for name in ways if reader is ours else [next(names)]:
                key = None
                if params is not None:
                    key = reader.DecryptionParams.from_key(params.key)
                    if encrypted == "password":
                        key = reader.DecryptionParams.from_string("päss")
                readers = {} if reader is ours else {"num_readers": 1}
                de = reader.TensorDeserializer(
                    ways[name](path), device="cpu", verify_hash=verify, encryption=key,
                    filter_func=lambda n: (n if isinstance(n, str) else n[-1]) != "long", **readers,
                )  # fmt: skip
                tree = de.tree()
                for found in [tree["l"][0], tree["l"][1]["deep"]] if nested else [tree]:
                    want = {n: t for n, t in flat.items() if n != "long"}
                    assert found.keys() == want.keys() and all(same(found[n], t) for n, t in want.items()), (
                        name, reader,
                    )


def test_protobuf() -> None:
    """Both libraries read each other's protobuf messages. overwire restores bfloat16 exactly."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    twin = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    import tensorizer.protobuf as reference

    for writer, reader in ((ours.protobuf, ours.protobuf), (ours.protobuf, reference), (reference, ours.protobuf)):
        stream = io.BytesIO()
        writer.serialize_model(net, stream)
        stream.seek(0)
        if reader is reference:  # the reference replaces parameters with tensors
            reader.deserialize_model(twin, stream)
            assert all(torch.equal(twin[0]._parameters[n], p) for n, p in net[0]._parameters.items())
            twin = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
            continue
        reader.deserialize_model(twin, stream)
        assert all(torch.equal(t, twin.state_dict()[n]) for n, t in net.state_dict().items())
        assert isinstance(twin[0].weight, torch.nn.Parameter)
    pb = ours.tensors_pb2
    for tensor in (
        torch.ones(2, 3).bfloat16(), torch.tensor(3 + 1j), torch.zeros(0, 2), torch.tensor([True, False]),
        torch.arange(5)[::2],
    ):
        message = ours.protobuf.serialize_tensor(tensor)
        again = ours.protobuf.deserialize_tensor(pb.Tensor.FromString(message.SerializeToString()))
        assert same(again, tensor.contiguous())
        assert ours.protobuf.deserialize_tensor(ours.protobuf.serialize_tensor(tensor, pb.AT_BUFFER))[1] == pb.AT_BUFFER
    plain = torch.arange(6.0).reshape(2, 3)
    assert (
        ours.protobuf.serialize_tensor(plain).SerializeToString()
        == reference.serialize_tensor(plain).SerializeToString()
    )
    assert pb.DESCRIPTOR.serialized_pb == theirs.tensors_pb2.DESCRIPTOR.serialized_pb
    with pytest.raises(ValueError, match="bytes do not fit shape"):
        ours.protobuf.deserialize_tensor(pb.Tensor(dtype=pb.DT_FLOAT32, shape=[2], data=b"x"))
    with pytest.raises(NotImplementedError):
        ours.protobuf.serialize_tensor(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_every_name() -> None:
    """Every public name, class member and parameter of the reference exists, in the same order."""
    import importlib

    def parameters(found: Any) -> list[str]:
        return [p.lstrip("_") for p in inspect.signature(found).parameters]

    other = {"readinto", "Model"}  # the positional parameters of file methods, and a type variable
    checked = 0
    for module in (".protobuf", ".tensors_pb2", "", ".serialization", ".stream_io", ".torch_compat", ".utils"):
        a, b = importlib.import_module("tensorizer" + module), importlib.import_module("overwire.compat.tensorizer" + module)
        names = {n for n, v in vars(a).items() if getattr(v, "__module__", None) == a.__name__ and n[0] != "_"}
        names |= set(getattr(a, "__all__", ()))
        for name in names - other:
            theirs_, ours_ = getattr(a, name), getattr(b, name)
            if inspect.isfunction(theirs_):
                assert parameters(theirs_) == parameters(ours_), name
            elif inspect.isclass(theirs_) and not module.endswith("pb2"):
                for member, value in vars(theirs_).items():
                    if member not in other and (member == "__init__" or member[0] != "_") and not inspect.isdatadescriptor(value):
                        if inspect.isfunction(value):
                            assert parameters(value) == parameters(getattr(ours_, member)), (name, member)
                        else:
                            assert hasattr(ours_, member), (name, member)
            checked += 1
    assert checked >= 40


# Names of the reference that overwire lacks, with reasons.
WITHOUT = {
    "_crypt.ChunkedEncryption": "calls libsodium chunk by chunk; the engine encrypts whole files instead",
    "_crypt.Const": "same reason as ChunkedEncryption",
    "_crypt.CryptographyError": "is in serialization",
    "_crypt.PWHash": "same reason as ChunkedEncryption",
    "_crypt.SequentialEncryption": "same reason as ChunkedEncryption",
    "_crypt.random_bytes": "same reason as ChunkedEncryption",
    "serialization.lz4": "compress_tensors has no effect",
    "utils.Model": "a type variable",
    "utils.pynvml": "may be missing, so torch is asked for the memory",
}


def test_every_path() -> None:
    """Every public module of the reference, and `_crypt`, can be imported under both names. Each module has all public
    names of the reference's module, except those in WITHOUT."""
    import importlib
    import pkgutil

    found = {}
    for name in ["", *(m.name.removeprefix("tensorizer") for m in pkgutil.walk_packages(theirs.__path__, "tensorizer."))]:
        if "._" in name and name != "._crypt":
            continue
        module = importlib.import_module("tensorizer" + name)
        found[name] = {
            public
            for public, value in vars(module).items()
            if not public.startswith("_")
            and not inspect.ismodule(value)
            and getattr(value, "__module__", module.__name__).partition(".")[0] in ("tensorizer", "tensors_pb2")
        }
    missing = set()
    for name, names in found.items():
        try:
            module = importlib.import_module("overwire.compat.tensorizer" + name)
        except ModuleNotFoundError:
            missing.add(name[1:])
            continue
        missing |= {f"{name}.{public}"[1:] for public in names if not hasattr(module, public)}
    assert missing == set(WITHOUT) if SODIUM else missing <= set(WITHOUT)
    assert sum(map(len, found.values())) > 85
    program = "import overwire.compat, importlib, sys, types; sys.modules['tensorizer.utils'] = types.ModuleType('an earlier import')\n"
    program += "overwire.compat.install('tensorizer')\n" + "".join(
        f"assert importlib.import_module({'tensorizer' + name!r}).__name__ == {'overwire.compat.tensorizer' + name!r}\n"
        for name in found
        if name[1:] not in missing
    )
    program += "from tensorizer._crypt import available; assert available and 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_private_names_that_clients_read(tmp_path: Path) -> None:
    """Before a lazy load, _device, _file_flags, _file_header and _metadata have the reference's values."""
    s = theirs.TensorSerializer(tmp_path / "x")
    s.write_state_dict({"a": torch.ones(3).bfloat16(), "m": [META]})
    s.close()
    seen = []
    for module in (ours, theirs):
        de = module.TensorDeserializer(tmp_path / "x", device="cpu", lazy_load=True)
        entry = next(iter(de._metadata.values()))
        sums = sorted(
            (int(h.type), h.hash if isinstance(h.hash, bytes) else h.hash.to_bytes(4, "little"))
            for h in entry.hashes or []
        )
        seen.append(
            (
                str(de._device), int(de._file_flags), len(de._metadata), entry.shape, entry.offset, entry.data_offset,
                entry.data_length,
            )
            + (int(entry.type), entry.deserialized_length, entry.is_long_tensor)
            + tuple(
                map(
                    int,
                    (
                        getattr(de._file_header, name)
                        for name in ("version_number", "feature_flags", "tensor_size", "tensor_count")
                    ),
                )
            )
        )
        assert module is theirs or [kind for kind, _ in sums] == [0, 1]
    assert seen[0] == seen[1]
    assert ours.torch_compat._FileLike == theirs.torch_compat._FileLike


def test_names_that_programs_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing names in the module has an effect: with another TensorHash, checksums do not match, and with another
    _enforce_scheme, the endpoints that it accepts work."""
    for writer in (ours, theirs):
        s = writer.TensorSerializer(tmp_path / "x")
        s.write_state_dict({"a": torch.ones(3)})
        s.close()
        for module in (ours, theirs):
            plain = module.serialization.TensorHash

            def other(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
                wrong = plain(*args, **kwargs)
                wrong.hash = bytes(len(wrong.hash))
                return wrong

            module.TensorDeserializer(tmp_path / "x", device="cpu", verify_hash=True).close()
            with monkeypatch.context() as patch:
                patch.setattr(module.serialization, "TensorHash", other)
                with pytest.raises(module.serialization.HashMismatchError):
                    module.TensorDeserializer(tmp_path / "x", device="cpu", verify_hash=True)
    for kwargs in ({}, {"force_http": False}):
        with pytest.raises(ValueError, match="Non-HTTPS"):
            ours.stream_io.open_stream(
                "s3://bucket/x", s3_endpoint="http://127.0.0.1:1", s3_access_key_id="", s3_secret_access_key="", **kwargs
            )
    monkeypatch.setattr(ours.stream_io, "_enforce_scheme", lambda endpoint, *_: endpoint)
    with pytest.raises(OSError, match="127.0.0.1:1"):
        ours.stream_io.open_stream("s3://bucket/x", s3_endpoint="http://127.0.0.1:1", s3_access_key_id="", s3_secret_access_key="")


# The next tests are about problems that users of the reference have had.


def test_casts_convert_only_floats(tmp_path: Path) -> None:
    """dtype= does not convert integer, bool, complex or fp8 tensors."""
    kept = {
        "i": torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),
        "q": torch.randint(0, 256, (9,), dtype=torch.uint8),
        "c": torch.polar(torch.ones(4), torch.arange(4.0)),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "b": torch.tensor([True]),
    }
    cast = {"w": torch.randn(4), "d": torch.randn(4).double(), "h": torch.ones(2).half()}
    s = ours.TensorSerializer(tmp_path / "x")
    s.write_state_dict(kept | cast)
    s.close()
    de = ours.TensorDeserializer(tmp_path / "x", device="cpu", dtype=torch.bfloat16)
    assert all(same(de[n], t) for n, t in kept.items()) and all(same(de[n], t.bfloat16()) for n, t in cast.items())
    assert ours.TensorDeserializer(tmp_path / "x", device="cpu", dtype=torch.int64, lazy_load=True)["w"].dtype == torch.int64


def test_tensors_without_data(tmp_path: Path) -> None:
    """Tensors on meta, which have no data, can have dtypes that only torch has. Empty tensors can be in encrypted
    files."""
    tensors = {
        "e": torch.zeros(0, 4).bfloat16(),
        "m": torch.empty(3, device="meta", dtype=torch.bfloat16),
        "f": torch.empty(2, device="meta", dtype=torch.float8_e5m2),
        "z": torch.zeros(0),
        "w": torch.randn(3),
    }
    for params in (None, ours.EncryptionParams.random()):
        s = ours.TensorSerializer(tmp_path / "x", encryption=params)
        s.write_state_dict(tensors)
        s.close()
        key = params and ours.DecryptionParams.from_key(params.key)
        for lazy in (False, True):
            de = ours.TensorDeserializer(tmp_path / "x", device="cpu", verify_hash=True, encryption=key, lazy_load=lazy)
            assert all(same(de[n], t) for n, t in tensors.items())
    if SODIUM:
        with pytest.raises(IndexError):  # the reference's own writer fails
            s = theirs.TensorSerializer(tmp_path / "y", encryption=theirs.EncryptionParams.random())
            s.write_state_dict({"z": torch.zeros(0)})


def test_modules_are_restored(tmp_path: Path) -> None:
    """Ties, non-persistent buffers and existing attributes are restored as in the saved module."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(8, 4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.wte.weight
            self.register_buffer("hidden", torch.randn(2), persistent=False)
            self.register_buffer("scales", torch.randn(2))

    net, twin = Tied(), Tied()
    s = ours.TensorSerializer(tmp_path / "x")
    s.write_module(net)
    s.close()
    del twin.scales
    twin.scales = "a plain attribute"  # as in GPTQ modules, where the reference raises KeyError
    with pytest.raises(KeyError):
        theirs.TensorDeserializer(tmp_path / "x", device="cpu").load_into_module(twin)
    twin = Tied()
    del twin.scales
    twin.scales = "a plain attribute"
    with ours.TensorDeserializer(tmp_path / "x", device="cpu") as de:
        assert de.load_into_module(twin) == 4
    assert (
        twin.head.weight is twin.wte.weight
        and torch.equal(twin.scales, net.scales)
        and torch.equal(twin.hidden, net.hidden)
    )
    assert twin.state_dict().keys() == net.state_dict().keys()
    net.head.weight = torch.nn.Parameter(net.head.weight + 1)  # the weights are no longer tied, not even after loading
    with ours.TensorSerializer(tmp_path / "y") as s:
        s.write_module(net)
    with ours.TensorDeserializer(tmp_path / "y", device="cpu") as de:
        de.load_into_module(twin := Tied())
    assert torch.equal(twin.head.weight, net.head.weight) and torch.equal(twin.wte.weight, net.wte.weight)


def test_host_memory_is_bounded(tmp_path: Path) -> None:
    """A load needs memory for its tensors and for a ring of fixed size, whatever the number of readers and the size of
    tensors."""
    import numpy as np

    key = bytes(range(32))
    tensors = {"a": np.zeros(96 << 20, np.uint8), "b": np.ones(1000, np.uint8)}
    ow.save_file(tensors, tmp_path / "x.tensors", storage_options={"encryption_key": key})
    program = f"""
import overwire as ow
def high(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) << 10
ow.load_file({str(tmp_path / "x.tensors")!r}, framework="np", keys=["b"], storage_options={{"decryption_key": {key!r}}})
before = high("VmRSS")
tensors = ow.load_file({str(tmp_path / "x.tensors")!r}, framework="np", storage_options={{"decryption_key": {key!r}}})
print(high("VmHWM") - before - (96 << 20))
"""
    done = warm.fresh(["-c", program], timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 << 20


def test_crc32_of_files_without_checksums(tmp_path: Path) -> None:
    """verify_crc32 is refused for a file without checksums. In a container, the checksums of chunks are always
    checked."""
    plain, packed, options = tmp_path / "p.safetensors", tmp_path / "c.safetensors", {"verify_crc32": True}
    tensors = {"a": torch.arange(100_000)}
    ow.save_file(tensors, plain, compress=False)
    ow.save_file(tensors, packed)
    with pytest.raises(ow.ArgumentError, match="p.safetensors.*no checksums"):
        ow.load_file(plain, storage_options=options)
    assert same(ow.load_file(packed, storage_options=options)["a"], tensors["a"])


def test_crc32_while_reading(tmp_path: Path) -> None:
    """verify_hash="crc32" and verify_crc32 find every flipped bit of the data during the load and report its
    location."""
    tensors = {"a": torch.arange(100_000), "m": META, "b": torch.randn(3).bfloat16()}
    path = tmp_path / "x.tensors"
    s = theirs.TensorSerializer(path)
    s.write_state_dict(tensors)
    s.close()
    options = {"verify_crc32": True}
    for _ in range(2):
        found = ow.load_file(path, framework="pt", storage_options=options)
        assert all(same(found[n], t) for n, t in tensors.items())
    assert same(ours.TensorDeserializer(path, device="cpu", verify_hash="crc32", lazy_load=True)["a"], tensors["a"])
    with ow.safe_open(path, framework="pt", storage_options=options) as f:
        assert same(f.get_slice("a")[5:500], tensors["a"][5:500])  # there is only a checksum for the whole tensor
    from overwire.records import read_records

    whole = path.read_bytes()
    for record in read_records(path).records:
        for at in range(record.data, record.data + record.nbytes, max(1, record.nbytes // 5)):
            bad = bytearray(whole)
            bad[at] ^= 1 << (at % 8)
            path.write_bytes(bad)
            with pytest.raises(ow.CorruptError, match=f'"{record.name}".*CRC32'):
                ow.load_file(path, framework="np", keys=["a"] if record.name == "a" else None, storage_options=options)
            with pytest.raises(ours.serialization.HashMismatchError):
                ours.TensorDeserializer(path, device="cpu", verify_hash="crc32")


def test_preloaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The deserialiser uses a preload of its path, even with a key."""
    tensors = {f"t{i}": torch.randn(1000) for i in range(5)}
    caplog.set_level("DEBUG", "overwire")
    for options in ({}, {"encryption_key": bytes(32)}):
        path = tmp_path / "x.tensors"
        ow.save_file(tensors, path, storage_options=options or None)
        back = {"decryption_key": bytes(32)} if options else None
        job = ow.preload(path, storage_options=back)
        assert job.wait(30)
        key = ours.DecryptionParams.from_key(bytes(32)) if options else None
        de = ours.TensorDeserializer(path, device="cpu", encryption=key)
        assert all(same(de[n], t) for n, t in tensors.items())
        assert "joins its preload" in caplog.text
        caplog.clear()


def test_hostile_names(tmp_path: Path) -> None:
    """Deep, conflicting and unprintable paths are read or refused, without a crash or a hang."""
    from overwire.records import NewRecord, make_front, write_records

    def build(names: list[str]) -> Path:
        path = tmp_path / "x.tensors"
        with open(path, "wb") as file:
            records = write_records(file.fileno(), [NewRecord(name, 2, 0, "<f4", (0,), 0, 0) for name in names], 73 + 65536)
            file.write(make_front(records, 65536, encrypted=False))
            file.seek(0, 2)
            file.write(bytes(8))
        return path

    deep = '\x1e["' + '","'.join(["a"] * 200) + '"]'
    level: Any = ours.TensorDeserializer(build([deep]), device="cpu").tree()
    for _ in range(200):
        level = level["a"]
    assert level.shape == (0,)
    with pytest.raises(ValueError, match="200 levels"):
        ours.TensorDeserializer(build(['\x1e["' + '","'.join(["a"] * 8000) + '"]']), device="cpu")
    endless: dict[str, Any] = {}
    endless["a"] = [endless]
    with pytest.raises(ValueError, match="contain themselves"):
        ours.TensorSerializer(tmp_path / "y").write_state_dict(endless)
    for names, match in [
        (['\x1e["a"]', "a"], "used multiple times|twice|a leaf|Duplicate"),
        (['\x1e["a","b"]', "a"], "leaf and a prefix|Conflicting"),
        (['\x1e["a","b"]', '\x1e["a",0]'], "different key type"),
    ]:
        with pytest.raises((ValueError, ow.FormatError), match=match):
            ours.TensorDeserializer(build(names), device="cpu")
    for name in ['\x1e["a"', "\x1e{}", "\x1e[1.5]", "\x1e[-1]", '\x1e["a",\n"b"]', "\x1e[]", "\x1e[true]", "\x1e[[1]]", "\x1e"]:
        with pytest.raises(ow.ArgumentError):
            build([name])
    odd = ["\x00\x1b[31m", "../../x", "a/b", ""]
    assert list(ours.TensorDeserializer(build(odd), device="cpu")) == odd
