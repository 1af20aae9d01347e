"""Compares the engine with the portable reader, which was written from docs/format.md without looking at the engine."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
from checksums import with_checksums
from conftest import ROOT
from overwire.portable import files, read, x16
from overwire.portable.sums import crc32c

sys.path[:0] = [str(ROOT / "wheels"), str(ROOT)]

import check  # noqa: E402

import setup  # noqa: E402

GOLDENS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests/goldens").rglob("*.safetensors"))
REFUSALS = (ow.CorruptError, ow.FormatError, ow.NotSupportedError, ow.ArgumentError)


def alike(path: Path) -> None:
    """Asserts that both readers give the same names, metadata, dtypes, shapes and bytes."""
    with read.safe_open(path, "bytes") as ours, ow.safe_open(path, framework="bytes") as engine:
        assert sorted(ours.keys()) == sorted(engine.keys()) and (ours.metadata() or None) == (
            engine.metadata() or None
        )
        for name in engine:
            tensor = ours._file.tensors[name]
            assert (tensor.dtype, list(tensor.shape)) == (
                engine.get_slice(name).get_dtype(),
                list(engine.get_slice(name).get_shape()),
            )
            assert bytes(ours.get_tensor(name)) == bytes(engine.get_tensor(name)), name
        for name, data in ours.tensors():
            assert bytes(data) == bytes(engine.get_tensor(name)) and not data.readonly, name


@pytest.mark.parametrize("path", GOLDENS, ids=str)
def test_goldens(path: Path) -> None:
    """Both readers read the golden files of every version and every writer."""
    pytest.importorskip("zstandard" if "level" in str(path) else "numpy")
    alike(ROOT / path)


def test_checksums() -> None:
    """CRC32C gives the values of RFC 3720, and for lengths around the size of the folded rows the same as a bitwise
    computation."""
    assert crc32c(np.zeros(32, np.uint8)) == 0x8A9136AA and crc32c(np.full(32, 255, np.uint8)) == 0x62A8AB43
    assert crc32c(np.arange(32, dtype=np.uint8)) == 0x46DD794E and crc32c(np.zeros(0, np.uint8)) == 0
    data = np.random.default_rng(5).integers(0, 256, 3 * 8192 + 77, dtype=np.uint8)
    for length in (1, 255, 256, 257, 8191, 8192, 8193, 16384, len(data)):
        register = 0xFFFFFFFF
        for byte in data[:length].tolist():
            register ^= byte
            for _ in range(8):
                register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
        assert crc32c(data[:length]) == register ^ 0xFFFFFFFF


def test_random_files(tmp_path: Path, seed: int) -> None:
    """Both readers agree on files of every dtype, with all kinds of values, column parts and aliases, without
    Zstandard."""
    torch = pytest.importorskip("torch")
    r = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(12):
        tensors = {}
        for number in range(r.randint(1, 6)):
            shape = [r.choice([0, 1, 2, 7, 64, 300, 1000]) for _ in range(r.randint(0, 2))]
            values = (
                torch.randn(shape) * 10.0 ** r.randint(-20, 20) if r.random() < 0.3 else torch.randn(shape) * 0.02
            )
            kind = r.choice(
                [
                    torch.bfloat16,
                    torch.float16,
                    torch.float32,
                    torch.float8_e4m3fn,
                    torch.float8_e5m2,
                    torch.int8,
                    torch.int32,
                    torch.bool,
                ]
            )
            tensors[f"t{number}"] = (values * 20).to(kind) if kind in (torch.int8, torch.int32) else values.to(kind)
        if len(tensors) > 2:
            tensors["alias"] = tensors["t0"].reshape(-1)
        path = tmp_path / f"{case}.safetensors"
        ow.save_file(tensors, path, metadata={"k": "v"} if case % 2 else None, compress=case % 4 != 3)
        if case % 3 == 0:
            plain, path = path, tmp_path / f"{case}.parts.safetensors"
            command = [sys.executable, "-m", "overwire", "convert", str(plain), "-o", str(path)]
            subprocess.run([*command, "--parts", str(r.choice([2, 4, 8]))], check=True, capture_output=True)
        alike(path)


@pytest.mark.parametrize("place", [0, 1, 3, 255, 256, 133119])
def test_lone_escapes(tmp_path: Path, place: int, seed: int) -> None:
    """Both readers find the only escape in a segment, at any position and with any value. The list of escapes begins
    after the words, even if later bytes look like a list."""
    r = np.random.default_rng(seed + place)
    path, count, escapes = tmp_path / "m.safetensors", 133120, set()
    for rare in (0, place & 0xFF, 3, 91, 200, 255):
        # 15 common exponents, and two rare ones in different segments that share one symbol.
        exponents = (100 + r.integers(0, 15, count)).astype(np.uint16)
        exponents[place], exponents[(place + count // 2) % count] = rare, 77
        data = (exponents << 7 | r.integers(0, 128, count).astype(np.uint16)).tobytes()
        ow.save_file({"w": ow.TensorSpec.of("BF16", (count,), data)}, path)
        with read.safe_open(path, "bytes") as file:
            (tensor,) = file.entries().values()
            for chunk in tensor.chunks:
                stored = np.fromfile(path, np.uint8)[chunk.offset : chunk.offset + chunk.stored]
                if chunk.codec == 1 and not stored[0]:
                    head = x16._read_head(x16.Chunk(stored, chunk.logical, chunk.transform, chunk.tiles))
                    escapes |= set(head.escapes.tolist())
        assert bytes(read.load_file(path, framework="bytes")["w"]) == data, rare
    assert 1 in escapes and len(head.offsets) == 5, (escapes, head.offsets)
    changed = bytearray(path.read_bytes())
    changed[chunk.offset + 96 + 8 * 5] = 1  # both readers refuse bits in the directory's padding
    path.write_bytes(with_checksums(changed))
    assert _fate(ow.load_file, path) is None and _fate(read.load_file, path) is None


def test_changed_bytes_are_refused(tmp_path: Path, seed: int) -> None:
    """A container with any changed byte outside padding is refused. The error names tensor and chunk if they are
    known."""
    r = random.Random(seed)
    for path in GOLDENS:
        golden = bytearray((ROOT / path).read_bytes())
        if "save/v1.0/" not in str(path) or path.name == "plain.safetensors":
            continue
        expected = {name: bytes(data) for name, data in read.load_file(ROOT / path, framework="bytes").items()}
        for _ in range(40):
            at, bit = r.randrange(len(golden)), 1 << r.randrange(8)
            golden[at] ^= bit
            (tmp_path / "m.safetensors").write_bytes(golden)
            golden[at] ^= bit
            try:
                got = read.load_file(tmp_path / "m.safetensors", framework="bytes")
            except REFUSALS as error:
                assert "m.safetensors" in str(error)
            else:
                assert {name: bytes(data) for name, data in got.items()} == expected, at
        for length in (0, 7, 8, 100, 4096, len(golden) - 1):
            (tmp_path / "m.safetensors").write_bytes(golden[:length])
            with pytest.raises(REFUSALS):
                read.safe_open(tmp_path / "m.safetensors")


def _fate(load: Any, path: Path) -> dict[str, bytes] | None:
    try:
        return {name: bytes(data) for name, data in load(path, framework="bytes").items()}
    except REFUSALS:
        return None


def test_both_readers_refuse_the_same_files(tmp_path: Path, seed: int) -> None:
    """If the index of a container is changed and its checksums are recomputed, both readers give the same tensors or
    both refuse the file. A false large count does not make them allocate memory."""
    r, path = random.Random(seed), tmp_path / "m.safetensors"
    values = np.random.default_rng(seed).standard_normal(3000).astype(np.float32)
    ow.save_file({"a": values, "b": values.copy(), "n": np.arange(900), "e": values[:0]}, path)
    whole = path.read_bytes()
    base = 8 + int.from_bytes(whole[:8], "little")
    tensors, chunks, dims = struct.unpack_from("<3I", whole, base + 16)
    records = base + 64 + 8 * dims
    special = [0, 1, 2, 3, 8, 0xFF, 4095, 4096, 1 << 24, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 50, (1 << 63) - 1, (1 << 64) - 1]
    alias = records + 64 * next(at for at in range(tensors) if whole[records + 64 * at + 2] == 2)
    changes = [(alias + 32, 1, 5), (base + 8, 8, 2), (alias + 24, 4, 0), (alias + 24, 4, 9)]
    for _ in range(150):
        width = r.choice((1, 2, 4, 8))
        at = r.randrange((records - base + 64 * tensors + 32 * chunks - 12) // 8)
        changes.append((base + 4 + 8 * at, width, r.choice(special)))
    for at, width, value in changes:
        data = bytearray(whole)
        data[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
        if struct.unpack_from("<3I", data, base + 16) == (tensors, chunks, dims):
            path.write_bytes(with_checksums(data))
            assert _fate(ow.load_file, path) == _fate(read.load_file, path), (at - base, width, value)
    data = bytearray(whole)  # one tensor of 2^50 bytes, in chunks of 4096
    holder = records + 64 * next(at for at in range(tensors) if whole[records + 64 * at + 2] == 0)
    struct.pack_into("<Q", data, holder + 8, 1 << 50)
    struct.pack_into("<Q", data, base + 64, 1 << 48)
    struct.pack_into("<I", data, holder + 4, 4096)
    path.write_bytes(with_checksums(data))
    with pytest.raises(ow.CorruptError):
        read.safe_open(path)


_ENTRY = '"dtype":"U8","shape":[2],"data_offsets":[0,2]'
_NOTED = '{"__metadata__":{"overwire":%s},"a":{' + _ENTRY + "}}"
# Headers of files with two bytes of data, and whether both readers accept them.
HEADERS = [
    ('{"a":{%s,"more":{"x":[1,null]}}}' % _ENTRY, True),
    ('{"a":{%s,"more":NaN}}' % _ENTRY, False),
    ('{"a":{%s,"more":1e400}}' % _ENTRY, False),
    ('{"__metadata__":null,"a":{%s}}' % _ENTRY, True),
    ('{"__metadata__":{"k":"\\ud800"},"a":{%s}}' % _ENTRY, False),
    ('{"\\ud800":{%s}}' % _ENTRY, False),
    ('{"\\ud83d\\ude00":{%s}}' % _ENTRY, True),
    ('{"a":{"dtype":["U8"],"shape":[2],"data_offsets":[0,2]}}', False),
    ('{"a":{"dtype":{"U8":1},"shape":[2],"data_offsets":[0,2]}}', False),
    ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[-0,2]}}', False),
    ('{"a":{"dtype":"U8","shape":[true,2],"data_offsets":[0,2]}}', False),
    ('{"a":{%s},"e":{"dtype":"U8","shape":[0,9223372036854775807],"data_offsets":[2,2]}}' % _ENTRY, True),
    ('{"a":{%s},"e":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[2,2]}}' % _ENTRY, False),
    ('{"a":{%s},"e":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[2,2]}}' % _ENTRY, False),
    (_NOTED % '"another program\'s"', True),
    (_NOTED % '"[1]"', True),
    (_NOTED % '"{\\"format\\":1}"', True),
    (_NOTED % '"{}"', False),
    (_NOTED % '"null"', True),
    (_NOTED % '"{\\"format\\":null}"', False),
    (_NOTED % '"{\\"format\\":\\"1.0\\",\\"index\\":\\"overwire.index\\"}"', False),
]


@pytest.mark.parametrize(("header", "is_taken"), HEADERS)
def test_both_readers_accept_the_same_headers(tmp_path: Path, header: str, is_taken: bool) -> None:
    """Both readers accept or refuse the same plain files with unknown keys, extreme numbers and strings, and entries of
    other programs."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + b"ab")
    fates = [_fate(load, path) for load in (ow.load_file, read.load_file)]
    assert fates[0] == fates[1] and (fates[0] is not None) == is_taken, fates


def test_both_readers_raise_the_same_errors_for_truncated_files(tmp_path: Path) -> None:
    """Both readers raise CorruptError for a truncated file, and FormatError for a file with extra bytes. Tensors
    without elements can be read as torch tensors."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "m.safetensors"
    ow.save_file({"a": np.arange(9), "e": np.empty((0, 3), np.float32), "n": np.empty(0, np.int16)}, path, compress=False)
    whole = path.read_bytes()
    loaded = read.load_file(path, framework="pt")
    assert loaded["e"].shape == (0, 3) and loaded["e"].dtype == torch.float32 and loaded["n"].dtype == torch.int16
    for data, error in ((whole[:-1], ow.CorruptError), (whole[:30], ow.CorruptError), (whole + b"x", ow.FormatError)):
        path.write_bytes(data)
        for load in (ow.load_file, read.load_file):
            with pytest.raises(error):
                load(path)


@pytest.mark.parametrize(
    ("version", "minor", "is_taken"),
    [
        ("1.4", 4, True), ("1.9", 9, True), ("01.04", 4, True), ("1.65535", 3, True), ("1.0", 3, False), ("1.3", 4, False),
        ("1.65536", 3, False), ("1_0.0", 3, False), (" 1.0", 3, False), ("+1.0", 3, False), ("1.0.0", 3, False),
        ('1.4","FORMAT":"2.0', 4, True), ('2.0","Format":"1.4', 4, False), ("1", 3, False), ("-1.0", 3, False),
        ("1.\u0661", 3, False), ("2.0", 3, False),
    ],
)  # fmt: skip
def test_both_readers_accept_the_same_versions(tmp_path: Path, version: str, minor: int, is_taken: bool) -> None:
    """Both readers accept the same versions, and in a newer minor version also reserved bytes that are not zero. A file
    of a version before 1.4 must not have the notice for other readers."""
    path = tmp_path / "m.safetensors"
    ow.save_file({"a": np.arange(3000, dtype=np.int64)}, path)
    data = path.read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    head = data[8:base]
    old = re.search(rb'format\\":\\"(1[.][0-9])', head)
    assert old is not None
    new = head[: old.start(1)] + version.replace('"', '\\"').encode() + head[old.end(1) :].rstrip(b" ")
    changed = bytearray(data[:8] + new.ljust(len(head)) + data[base:])
    struct.pack_into("<H", changed, base + 6, minor)
    if minor > 4:
        changed[base + 50] = changed[base + 64 + 8 + 60] = 1
    path.write_bytes(with_checksums(changed))
    fates = [_fate(load, path) for load in (ow.load_file, read.load_file)]
    assert fates[0] == fates[1] and (fates[0] is not None) == is_taken, fates


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b'"shape":[0],"data_offsets":[1,1]', b'"shape":[0],"data_offsets":[0,0]', ow.CorruptError),  # no notice
        (b'"shape":[0],"data_offsets":[1,1]', b'"shape":[0],"data_offsets":[2,2]', ow.FormatError),
        (b'"shape":[0],"data_offsets":[1,1]', b'"shape":[1],"data_offsets":[1,1]', ow.FormatError),
        (b'"shape":[0],"data_offsets":[1,1]', b'"shape":[false],"data_offsets":[1,1]', ow.FormatError),
        (b"decompress)", b"decompress]", None),  # the text does not matter
        (b"(to read", b"\xff\xff\xff\xff\xff\xff\xff\xff", ow.FormatError),
    ],
)
def test_both_readers_accept_the_same_notices(
    tmp_path: Path, old: bytes, new: bytes, error: type[Exception] | None
) -> None:
    """Both readers require the entry (the notice) that makes other readers refuse a compressed file. Only its name may
    differ."""
    path = tmp_path / "m.safetensors"
    ow.save_file({"a": np.arange(3000, dtype=np.int64)}, path)
    data = path.read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    head = data[8:base]
    assert head.count(old) == 1
    changed = head.replace(old, new).rstrip(b" ").ljust(len(head))
    path.write_bytes(with_checksums(bytearray(data[:8] + changed + data[base:])))
    for load in (ow.load_file, read.load_file):
        if error is None:
            assert load(path)["a"][-1] == 2999
        else:
            with pytest.raises(error):
                load(path)


def test_the_wheel_for_all_machines(tmp_path: Path) -> None:
    """The portable wheel is valid, and reads every golden file with no package except numpy. Functions that need the
    engine say so."""
    wheel = tmp_path / setup.build_portable_wheel(str(tmp_path))
    assert check.audit(wheel) == []
    for path, digests in check.read_goldens(wheel, check.goldens()).items():
        with ow.safe_open(path, framework="bytes") as engine:
            assert digests == {name: hashlib.sha256(engine.get_tensor(name)).hexdigest() for name in engine}


def test_the_wheel_is_installed_and_run(tmp_path: Path) -> None:
    """pip can install the portable wheel. Its command lists a compressed file, and writes a plain copy that other
    readers can read. If it fails, it writes no file."""
    stock = pytest.importorskip("safetensors.numpy")
    wheel = tmp_path / setup.build_portable_wheel(str(tmp_path))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", tmp_path / "site", wheel], check=True)
    r = np.random.default_rng(3)
    tensors = {"odd": r.integers(0, 3, 7, np.uint8), "wide": r.normal(size=(300, 40)), "half": r.normal(size=99).astype("f2")}
    tensors |= {"again": tensors["wide"].reshape(-1), "none": np.zeros((0, 3), "f4"), "one": np.float32(2.5).reshape(())}
    (tmp_path / "model").mkdir()
    ow.save_file(tensors, tmp_path / "model" / "m.safetensors", metadata={"k": "ä"})
    (tmp_path / "model" / "config.json").write_text("{}")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        run_there = "import sys, runpy; sys.path.insert(0, 'site'); runpy.run_module('overwire', run_name='__main__')"
        return subprocess.run(
            [sys.executable, "-c", run_there, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    assert [one["name"] for one in json.loads(run("inspect", "model").stdout)["sources"][0]["tensors"]]
    assert run("decompress", "model", "-o", "plain").returncode == 0
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {"m.safetensors", "config.json"}
    assert run("decompress", "model/m.safetensors", "-o", "plain/m.safetensors").returncode == 1
    assert run("decompress", "model/m.safetensors", "-o", "plain/m.safetensors", "-f").returncode == 0
    loaded = stock.load_file(tmp_path / "plain" / "m.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype and np.array_equal(loaded[name], value), name
    damaged = bytearray((tmp_path / "model/m.safetensors").read_bytes())
    damaged[-100] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    done = run("decompress", "damaged.safetensors", "-o", "no.safetensors")
    assert done.returncode == 1 and "checksum" in done.stderr and "Traceback" not in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".overwire", "no."))]
    (page,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/portable.md").read_text(encoding="utf-8"), re.M | re.S)
    shutil.rmtree(tmp_path / "plain")
    shutil.copy(tmp_path / "model/m.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "site" / "page.py").write_text(page)
    subprocess.run([sys.executable, "site/page.py"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "plain" / "config.json").exists()


def test_unknown_tile_sizes_and_transforms(tmp_path: Path) -> None:
    """Both readers refuse tile sizes that X16 does not use, even in chunks with a single symbol, and transforms that
    belong to another dtype. The error names tensor and chunk."""
    path = tmp_path / "m.safetensors"
    codes = {"BF16": 15, "F64": 20, "I32": 16, "U16": 13}
    half = np.full(512 * 512, 0x3F00, "<u2")
    count = np.random.default_rng(1).integers(0, 5, 90_000)
    for tensor, level, field, value, kind in (
        (ow.TensorSpec.of("BF16", half.shape, half), "default", 24, 300, ow.CorruptError),
        (ow.TensorSpec.of("BF16", half.shape, half), "default", 24, 0, ow.CorruptError),
        (ow.TensorSpec.of("BF16", half.shape, half), "default", 21, 2, ow.NotSupportedError),
        (count.astype("<i8"), "smaller", -64, codes["F64"], ow.NotSupportedError),
        (count.astype("<i4"), "smaller", 21, 6, ow.NotSupportedError),
        (count.astype("<u2"), "smaller", 21, 5, ow.NotSupportedError),
        (count.astype("<u2"), "smaller", 20, 9, ow.NotSupportedError),
    ):
        ow.save_file({"a": tensor}, path, level=level)
        data = bytearray(path.read_bytes())
        base = 8 + int.from_bytes(data[:8], "little")
        tensors, _, dims = struct.unpack_from("<3I", data, base + 16)
        chunk = base + 64 + 8 * dims + 64 * tensors
        data[chunk + field : chunk + field + (2 if field == 24 else 1)] = value.to_bytes(2 if field == 24 else 1, "little")
        path.write_bytes(with_checksums(data))
        assert _fate(ow.load_file, path) is None, (level, field, value)
        with pytest.raises(kind) as caught:
            read.load_file(path, framework="bytes")
        assert (caught.value.tensor, caught.value.chunk) == ("a", 0)


def test_malformed_zstandard_frames(tmp_path: Path) -> None:
    """Both readers accept a Zstandard frame that states the plane's size. They refuse a frame with another size or
    without a size, with a dictionary, a reserved bit, a window larger than a chunk, or data after it."""
    zstandard = pytest.importorskip("zstandard")
    path, plane = tmp_path / "m.safetensors", b"abcdefgh" * 8192
    values = np.random.default_rng(1).normal(128, 20, len(plane)).astype(np.uint8)
    ow.save_file({"a": values}, path, level="smaller")
    whole = path.read_bytes()
    base = 8 + int.from_bytes(whole[:8], "little")
    tensors, _, dims = struct.unpack_from("<3I", whole, base + 16)
    chunk = base + 64 + 8 * dims + 64 * tensors
    assert whole[chunk + 20] == 6

    def fates(frame: bytes) -> list[Any]:
        content = len(plane).to_bytes(4, "little") + b"\1" + len(frame).to_bytes(4, "little") + frame
        data = bytearray(whole)
        (offset,) = struct.unpack_from("<Q", data, chunk)
        data[offset : offset + len(content)] = content
        struct.pack_into("<I", data, chunk + 8, len(content))
        path.write_bytes(with_checksums(data))
        return [_fate(load, path) for load in (ow.load_file, read.load_file)]

    frame = zstandard.ZstdCompressor().compress(plane)
    assert fates(frame) == [{"a": plane}] * 2 and frame[4] >> 6 == 1 and not frame[4] & 15
    assert fates(zstandard.ZstdCompressor(write_checksum=True).compress(plane)) == [{"a": plane}] * 2
    single = frame[4] & 32
    at = 5 if single else 6  # offset of the size
    large = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=27))
    streamed = large.compressobj(size=len(plane))
    for changed in (
        zstandard.ZstdCompressor(write_content_size=False).compress(plane),
        frame[:4] + bytes([frame[4] | 8]) + frame[5:],
        frame[:4] + bytes([frame[4] | 1]) + frame[5:at] + b"\7" + frame[at:],
        frame[:at] + (len(plane) - 257).to_bytes(2, "little") + frame[at + 2 :],
        frame[:4] + bytes([frame[4] & ~32]) + b"\x88" + frame[at:],
        streamed.compress(plane) + streamed.flush(), frame + b"\0", frame[:-1], frame * 2, b"", frame[:6],
        b"\x50\x2a\x4d\x18" + bytes(4) + frame,
    ):  # fmt: skip
        assert fates(changed)[0] == fates(changed)[1], changed[:9].hex()
        assert fates(changed)[0] in (None, {"a": plane})


def test_torch_and_folders(tmp_path: Path) -> None:
    """The portable reader returns torch tensors and reads folders. It refuses URIs, and a tensor name that is in two
    files."""
    torch = pytest.importorskip("torch")
    tensors = {"a": torch.randn(70, 3).bfloat16(), "b": torch.randn(5).to(torch.float8_e4m3fn), "c": torch.tensor(True)}
    ow.save_file(tensors, tmp_path / "1.safetensors")
    ow.save_file({"d": torch.arange(4)}, tmp_path / "2.safetensors")
    loaded = read.load_file(tmp_path, framework="pt")
    assert list(loaded) and loaded.keys() == {*tensors, "d"}
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype and torch.equal(
            loaded[name].view(torch.uint8), value.view(torch.uint8)
        )
    loaded["a"].zero_()
    ow.save_file({"d": torch.arange(4)}, tmp_path / "3.safetensors")
    with pytest.raises(ow.ArgumentError, match="'d'"):
        read.load_file(tmp_path, framework="pt")
    for call in (read.load_file, read.safe_open, files.inspect, lambda uri: files.decompress(uri, tmp_path / "out")):
        with pytest.raises(ow.ArgumentError, match="s3://bucket/m: .*stores"):
            call("s3://bucket/m")
    assert not (tmp_path / "out").exists()


def test_decompress_accepts_the_same_sources_as_the_engine(tmp_path: Path) -> None:
    """The portable `decompress` accepts files, lists and file:// URIs, and gives the same tensors and report as the
    engine's. It replaces a file only with overwrite=True."""
    sources = [tmp_path / "a.safetensors", tmp_path / "b c.safetensors"]
    for number, path in enumerate(sources):
        ow.save_file({f"t{number}": np.full(9999, number, "f4")}, path)
    for at, source in enumerate([sources[0], sources[1].as_uri(), sources]):
        targets = [tmp_path / f"{name}{at}" for name in ("engine", "portable")]
        reports = ow.decompress(source, targets[0]), files.decompress(source, targets[1])
        assert len({(one.bytes_in, one.tensors, len(one.files)) for one in reports}) == 1
        assert ow.load_file(targets[0], framework="bytes") == ow.load_file(targets[1], framework="bytes")
        for call in (ow.decompress, files.decompress):
            with pytest.raises(ow.ArgumentError, match=r"exists[;:] pass|files in it|the folder is not empty"):
                call(source, targets[0])
    files.decompress(sources[0], tmp_path / "portable0", overwrite=True)
