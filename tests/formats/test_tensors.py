"""Tests tensorizer's .tensors files in overwire's functions. Each library reads the other's files, and `verify` reports
damage with the name of the file."""

from __future__ import annotations

import gzip
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import tensorizer
import torch
from tensorizer.serialization import TensorType

GOLDENS = Path(__file__).parents[1] / "goldens/tensorizer/2.12.1"

try:  # the reference encrypts only if the system has libsodium
    tensorizer.EncryptionParams.random()
    SODIUM = True
except Exception:
    SODIUM = False

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether dtype, shape and bytes are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bytes(a.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
        b.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    )


def model(seed: int) -> dict[str, torch.Tensor]:
    """Returns tensors of every dtype and of odd sizes, a scalar, and a tensor that is larger than an encryption
    chunk."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for i, dtype in enumerate(DTYPES):
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (5 + i, 7 * size), dtype=torch.uint8, generator=gen)
        out[f"t.{i}"] = raw.view(dtype)
    out["scalar"] = torch.tensor(3.5)
    out["big"] = torch.randint(0, 256, (5 << 20,), dtype=torch.uint8, generator=gen)
    return out


def write(path: Path, tensors: object, encryption: object = None) -> None:
    s = tensorizer.TensorSerializer(path, encryption=encryption)
    s.write_state_dict(tensors)
    s.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_overwire_reads_the_references_files(tmp_path: Path, encrypted: bool) -> None:
    """Every function reads plain and encrypted tensors of every dtype bit for bit."""
    if encrypted and not SODIUM:
        pytest.skip("the reference has no libsodium; the golden files are still read")
    seed = time.time_ns() & 0xFFFFFFFF
    print("seed", seed)
    tensors = model(seed)
    path = tmp_path / "x.tensors"
    params = tensorizer.EncryptionParams.from_string("päss", opslimit=1, memlimit=8192) if encrypted else None
    write(path, tensors, params)
    options = {"decryption_password": "päss"} if encrypted else None
    found = ow.load_file(path, framework="pt", storage_options=options)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    assert ow.verify(path, storage_options=options)["tensors"] == len(tensors)
    with ow.safe_open(path, framework="pt", storage_options=options) as f:
        assert same(f.get_slice("big")[70:3_000_000], tensors["big"][70:3_000_000])
        assert same(f.get_tensor("t.7"), tensors["t.7"])
    assert {name for name, _ in ow.stream(path, framework="np", storage_options=options, keys=["big", "scalar"])} == {"big", "scalar"}
    source = ow.inspect(path)["sources"][0]
    assert source["format"] == "tensors" and {t["coding"] for t in source["tensors"]} == {"encrypted" if encrypted else "plain"}
    if encrypted:
        assert params is not None
        assert same(ow.load_file(path, framework="pt", storage_options={"decryption_key": params.key})["big"], tensors["big"])
        for bad in ({"decryption_key": bytes(32)}, {"decryption_password": "pass"}, None):
            with pytest.raises(ow.CryptographyError, match=r"x\.tensors"):
                ow.load_file(path, framework="pt", storage_options=bad)
    else:
        with ow.pin(path) as pinned:
            assert all(same(tensor, tensors[name]) for name, tensor in pinned.load_file(framework="pt").items())
        with pytest.raises(ow.CryptographyError, match="not encrypted"):
            ow.load_file(path, storage_options={"decryption_key": "00" * 32})


@pytest.mark.parametrize("options", [{"decryption_key": bytes(range(32))}, {"decryption_password": "the secret one"}])
def test_a_key_for_a_file_that_is_not_encrypted(tmp_path: Path, options: dict[str, Any]) -> None:
    """Every function raises an error if it gets a key for a file that is not encrypted, because the caller believes
    that it is. The error names the file and shows no secret."""
    tensors = {"a": torch.ones(3)}
    plain, packed, open_ = (str(tmp_path / name) for name in ("plain.safetensors", "packed.safetensors", "open.tensors"))
    ow.save_file(tensors, plain, compress=False)
    ow.save_file(tensors, packed)
    ow.save_file(tensors, open_)
    for path in (plain, packed, open_):
        for call in (
            lambda path=path: ow.load_file(path, storage_options=options),
            lambda path=path: ow.load_file([path], storage_options=options, framework="np"),
            lambda path=path: list(ow.stream(path, storage_options=options)),
            lambda path=path: ow.safe_open(path, storage_options=options),
            lambda path=path: ow.plan(path, storage_options=options),
            lambda path=path: ow.load_model(torch.nn.Linear(1, 1), path, storage_options=options),
            lambda path=path: ow.preload(path, storage_options=options).wait(),
            lambda path=path: ow.verify(path, storage_options=options),
            lambda path=path: ow.inspect(path, storage_options=options),
            lambda path=path: ow.convert(path, tmp_path / "out.safetensors", storage_options=options),
        ):
            ow.load_file(path)  # also when the index is cached
            with pytest.raises(ow.CryptographyError, match="not encrypted") as caught:
                call()
            assert path in str(caught.value) and "secret one" not in str(caught.value) and "000102" not in str(caught.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_encrypted_golden_files(tmp_path: Path) -> None:
    """Files that tensorizer 2.12.1 encrypted are read without libsodium."""
    for name, options in {"key": {"decryption_key": bytes(range(32))}, "password": {"decryption_password": b"test"}}.items():
        path = tmp_path / f"{name}.tensors"
        path.write_bytes(gzip.decompress((GOLDENS / f"{name}.tensors.gz").read_bytes()))
        found = ow.load_file(path, framework="np", storage_options=options)
        assert np.array_equal(found["x.a"], [[0, 1, 2], [3, 4, 5]])
        assert np.array_equal(found["x.big"], np.arange(100))
        assert found["x.m"].shape == (4, 5) and not found["x.m"].any()
        assert ow.verify(path, storage_options=options)["ok"]


def test_format_versions_of_the_reference(tmp_path: Path) -> None:
    """Format versions 1, 2, 4 and 5, nested names and meta tensors are read."""
    a = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    path = tmp_path / "x.tensors"

    def save(*more: tuple[str, TensorType, torch.Tensor]) -> int:
        s = tensorizer.TensorSerializer(path)
        s.write_tensor(0, "x.a", TensorType.PARAM, a)
        for i, (name, kind, tensor) in enumerate(more):
            s.write_tensor(i + 1, name, kind, tensor)
        s.close()
        return int.from_bytes(path.read_bytes()[5:9], "little")

    assert save() == 1
    assert same(ow.load_file(path, framework="pt")["x.a"], a)
    assert save(("x.b", TensorType.BUFFER, a.bfloat16())) == 2
    assert same(ow.load_file(path, framework="pt")["x.b"], a.bfloat16())
    assert save(("x.m", TensorType.PARAM, torch.empty(4, 5, device="meta")), ("x.n", TensorType.PARAM, a + 1)) == 4
    found = ow.load_file(path, framework="pt")
    assert same(found["x.m"], torch.zeros(4, 5)) and same(found["x.n"], a + 1)
    assert ow.verify(path)["tensors"] == 3
    assert save(("x.l", TensorType.PARAM, torch.empty(2**32 + 5, dtype=torch.int8, device="meta"))) == 5
    with ow.safe_open(path, framework="pt") as f:
        assert same(f.get_tensor("x.a"), a)
        assert f.get_slice("x.l").get_shape() == [2**32 + 5]
        assert not f.get_slice("x.l")[2**32 :].any()
    write(path, {"m": [a, {"w": a + 1}], "h": a})
    found = ow.load_file(path, framework="pt")
    assert list(found) == ['\x1e["m",0]', '\x1e["m",1,"w"]', "h"] and same(found['\x1e["m",1,"w"]'], a + 1)


def test_the_reference_reads_overwires_files(tmp_path: Path) -> None:
    """tensorizer verifies a file with 3,000 tensors that save_file wrote. The file's data is page-aligned."""
    tensors = model(1) | {f"many.{i}": torch.full((3,), i) for i in range(3000)} | {"none": torch.zeros(0, 4)}
    path = tmp_path / "x.tensors"
    report = ow.save_file(tensors, path)
    assert report.tensors == len(tensors) and report.compressed == 0
    with tensorizer.TensorDeserializer(path, device="cpu", verify_hash=True, num_readers=2) as de:
        assert de.keys() == tensors.keys()
        assert all(same(de[name], tensor) for name, tensor in tensors.items())
        for entry in de._metadata.values():
            assert entry.data_offset % 4096 == 0 or entry.data_length == 0
    assert all(same(found, tensors[name]) for name, found in ow.load_file(path, framework="pt").items())
    assert ow.verify(path)["tensors"] == len(tensors)
    before = path.read_bytes()
    with pytest.raises(ow.ArgumentError, match="metadata"):
        ow.save_file(tensors, path, metadata={"a": "b"})
    assert path.read_bytes() == before


def test_convert_both_ways(tmp_path: Path) -> None:
    """Conversions between .tensors files and plain and compressed safetensors files do not change a byte."""
    tensors = model(2)
    first = tmp_path / "a.tensors"
    write(first, tensors)
    chain = [first, tmp_path / "b.safetensors", tmp_path / "c.tensors", tmp_path / "d.safetensors", tmp_path / "e.tensors"]
    for i, (src, dst) in enumerate(zip(chain, chain[1:], strict=False)):
        ow.convert(src, dst, compress=i == 0)
        found = ow.load_file(dst, framework="pt")
        assert found.keys() == tensors.keys() and all(same(found[name], tensor) for name, tensor in tensors.items())
        ow.verify(dst)
    de = tensorizer.TensorDeserializer(chain[-1], device="cpu", verify_hash=True)
    assert all(same(de[name], tensor) for name, tensor in tensors.items())


def test_damage_is_named(tmp_path: Path) -> None:
    """`verify` reports every flipped bit in records and data, and names the file. Truncated files are refused."""
    tensors = {"a": torch.arange(10), "b": torch.arange(6).bfloat16()}
    path = tmp_path / "x.tensors"
    ow.save_file(tensors, path)
    whole = path.read_bytes()
    rng = random.Random(seed := time.time_ns())
    print("seed", seed)
    from overwire.records import read_records

    ends = [(r.record, r.data + r.nbytes) for r in read_records(path).records]
    for begin, end in ends:
        for _ in range(40):
            at = rng.randrange(begin, end)
            bad = bytearray(whole)
            bad[at] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            with pytest.raises((ow.CorruptError, ow.FormatError, ow.NotSupportedError), match=r"x\.tensors"):
                ow.verify(path)
    for cut in (3, 50, 80, len(whole) - 20):
        path.write_bytes(whole[:cut])
        with pytest.raises(ow.OverwireError):
            ow.load_file(path)


def test_commands_accept_tensors_files(tmp_path: Path) -> None:
    """The command line accepts .tensors files like other files."""
    from overwire._engine import cli

    path = tmp_path / "x.tensors"
    write(path, {"a": torch.arange(5)})
    assert cli(["inspect", str(path)]) == 0
    assert cli(["verify", str(path)]) == 0
    assert cli(["decompress", str(path), "-o", str(tmp_path / "y.safetensors")]) == 0
    assert same(ow.load_file(tmp_path / "y.safetensors", framework="pt")["a"], torch.arange(5))
