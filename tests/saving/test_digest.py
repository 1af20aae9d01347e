"""Tests digests of tensors in memory and in files, and comparisons between them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import torch
from conftest import every_dtype

M = (1 << 64) - 1


def definition(data: bytes) -> str:
    """Computes the digest as docs/format.md section 6 defines it."""

    def mix(x: int) -> int:
        x = (x ^ x >> 32) * 0xA54FF53A5F1D36F1 & M
        x = (x ^ x >> 32) * 0xBB67AE8584CAA73B & M
        return x ^ x >> 32

    a = b = 0
    for i in range(-(-len(data) // 8)):
        t = mix(int.from_bytes(data[8 * i : 8 * i + 8], "little") + (i + 1) * 0x9E3779B97F4A7C15 & M)
        a, b = a + t & M, b + t * (t >> 32 | 1) & M
    high = mix(a + (len(data) + 1) * 0x3C6EF372FE94F82B & M)
    return f"{high:016x}{mix(b + high & M):016x}"


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_every_dtype() -> None:
    """Digests match the definition for every dtype, whether the tensors are given together or one by one."""
    tensors = every_dtype()
    tensors |= {"none": torch.empty(0, 5), "one": torch.tensor(3.5), "complex128": torch.randn(9, dtype=torch.complex128)}
    got = ow.digest(tensors)
    assert got == {name: definition(raw(tensor)) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert ow.digest(tensor) == got[name]


def test_a_view_has_the_digest_of_its_copy(seed: int) -> None:
    """The digest of a view equals that of its contiguous copy."""
    rng = random.Random(seed)
    base = torch.randint(0, 256, (40, 30, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        whole = base.view(dtype) if dtype is not torch.int64 else base[:, :, :16].contiguous().view(dtype)
        views = [
            whole.transpose(0, 2), whole.permute(1, 2, 0), whole[:, 3:9], whole[rng.randrange(30) :: 3, :, 1:],
            whole[:, ::2, :1],
        ]
        views += [
            whole[5:5], whole[0, 0, 0], whole[:1].expand(7, *whole.shape[1:]), whole.flatten()[rng.randrange(100) :],
        ]
        for view in views:  # some of these views start at odd addresses
            assert ow.digest(view) == definition(raw(view)), (dtype, view.shape, view.stride())
    array = base.numpy()
    for part in (
        array[::-1], array[:, ::-2, 3], array.T, array[..., ::-1].astype(">u4"),
        np.asfortranarray(array.astype(np.float16)),
    ):
        native = part.astype(part.dtype.newbyteorder("="))
        assert ow.digest(part) == definition(native.tobytes())
    assert ow.digest(np.float32(1.5)) == definition(np.float32(1.5).tobytes())
    odd = np.frombuffer(bytes(range(100)), np.uint8)[1:65].view(np.float64)  # unaligned
    assert ow.digest(odd) == definition(odd.tobytes())
    assert ow.digest(
        torch.view_as_complex(torch.randn(3, 2, generator=torch.Generator().manual_seed(1))).conj()
    ) == definition(
        raw(torch.view_as_complex(torch.randn(3, 2, generator=torch.Generator().manual_seed(1))).conj().resolve_conj())
    )


def test_sub_byte_and_specs() -> None:
    """F4 is digested packed, so its digest is the same in torch, numpy and the file."""
    packed = torch.arange(48, dtype=torch.uint8).reshape(4, 12)
    spec = ow.TensorSpec.of("F4", (4, 24), packed.numpy())
    want = definition(raw(packed))
    assert ow.digest(spec) == want
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert ow.digest(packed.view(torch.float4_e2m1fn_x2)) == want
    types: Any = pytest.importorskip("ml_dtypes")
    if hasattr(types, "float4_e2m1fn"):
        each = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(4, 24).view(types.float4_e2m1fn)
        assert ow.digest(each) == want
    assert ow.digest(np.ones(5, types.bfloat16)) == ow.digest(torch.ones(5, dtype=torch.bfloat16))


def test_objects_without_a_digest_are_refused() -> None:
    for bad, error in [
        (torch.empty(3, device="meta"), ow.ArgumentError),
        (torch.eye(3).to_sparse(), ow.NotSupportedError),
        (torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), ow.NotSupportedError),
        (np.array(["a"]), ow.NotSupportedError),
        (np.array([object()]), ow.NotSupportedError),
        (b"abc", ow.ArgumentError),
        (None, ow.ArgumentError),
    ]:
        with pytest.raises(error):
            ow.digest(bad)
        with pytest.raises(error, match="'weight'"):
            ow.digest({"weight": bad})
    with pytest.raises(ow.ArgumentError, match="is not a str"):
        ow.digest({3: torch.ones(3)})


def printing(*argv: str) -> str:
    command = [sys.executable, "-m", "overwire", "inspect", "--digests", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.a = torch.nn.Parameter(torch.randn(300, 200, generator=generator).bfloat16())
        self.b = torch.nn.Parameter(torch.randn(100, generator=generator))
        self.tied = self.a
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("left_out", torch.ones(4), persistent=False)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("shard", [None, 100_000])
def test_a_model_against_its_file(tmp_path: Path, compress: bool, shard: int | None) -> None:
    """A model is compared with its file by tensor name. Tensors that differ, are missing or are surplus are named."""
    model = Small()
    path = tmp_path / "model.safetensors"
    ow.save_model(model, path, compress=compress, max_shard_size=shard)
    source = path if shard is None else tmp_path
    found = ow.verify(source, tensors=model)
    assert found["ok"] and not (found["differ"] or found["missing"] or found["surplus"])
    assert found["tensors"] == (4 if compress else 3) and found["bytes"] == 300 * 200 * 2 + 400 + 8

    digests = ow.digest(model)
    assert set(digests) == {"a", "b", "tied", "steps"} and digests["a"] == digests["tied"]
    said = printing(str(source))
    printed = {name: hexed for hexed, name in (line.split("  ") for line in said.splitlines())}
    assert printed == {name: digests[name] for name in printed} and len(printed) == found["tensors"]
    assert {row["name"]: row["digest"] for row in json.loads(printing("--json", str(source)))["tensors"]} == printed

    with torch.no_grad():
        model.b[37] += 1
    model.register_buffer("more", torch.ones(1))
    del model.steps
    found = ow.verify(source, tensors=model)
    assert found == found | {"ok": False, "differ": ["b"], "missing": ["steps"], "surplus": ["more"]}
    # The same bytes with another shape or dtype are a different tensor.
    state = ow.load_file(source)
    state["b"] = state["b"].reshape(10, 10)
    state["a"] = state["a"].view(torch.float16)
    assert sorted(ow.verify(source, tensors=state)["differ"]) == ["a", "b"]
    with pytest.raises(ow.ArgumentError, match="expected a dict"):
        ow.verify(source, tensors=torch.ones(3))  # type: ignore[call-overload]


def test_column_parts_keep_the_digest(tmp_path: Path) -> None:
    """Column parts do not change a digest. For a damaged chunk, `verify` raises an error instead of reporting a
    difference."""
    tensors = {"w": torch.randn(512, 256, generator=torch.Generator().manual_seed(3)).bfloat16(), "n": torch.empty(0, 3)}
    ow.save_file(tensors, tmp_path / "plain.safetensors", compress=False)
    packed = tmp_path / "parts.safetensors"
    command = [sys.executable, "-m", "overwire", "convert", str(tmp_path / "plain.safetensors"), "-o", str(packed), "--parts", "4"]
    subprocess.run(command, check=True, capture_output=True)
    assert ow.verify(packed, tensors=tensors)["ok"]
    data = bytearray(packed.read_bytes())
    data[-5000] ^= 1
    packed.write_bytes(data)
    with pytest.raises(ow.CorruptError):
        ow.verify(packed, tensors=tensors)


def test_many_tensors_once() -> None:
    """Tied tensors are read once, and thousands of tensors are digested in one call."""
    base = torch.arange(100_000, dtype=torch.int32)
    tensors = {f"t{i}": base[i : i + 40] for i in range(5000)} | {f"u{i}": base for i in range(300)}
    got = ow.digest(tensors)
    assert got["t4999"] == definition(raw(base[4999:5039])) and len(set(got.values())) == 5001
    for i in (0, 17, 4000):
        assert got[f"t{i}"] == definition(raw(base[i : i + 40]))
    assert len({got[f"u{i}"] for i in range(300)}) == 1


@pytest.mark.parametrize("shard", [None, 100_000])
def test_stored_digests(tmp_path: Path, shard: int | None) -> None:
    """A comparison with stored digests reads no tensor. `verify` checks the stored digests, while loading and
    converting ignore them."""
    model = Small()
    kept, without = tmp_path / "kept", tmp_path / "without"
    for folder in (kept, without):
        folder.mkdir()
        ow.save_model(model, folder / "model.safetensors", max_shard_size=shard, digests=folder == kept)
    found = ow.verify(kept, tensors=model)
    assert found["ok"] and found["kept"] == found["tensors"] == 4 and found["bytes"] == 0
    found = ow.verify(without, tensors=model)
    assert found["ok"] and found["kept"] == 0 and found["bytes"] > 0
    assert ow.verify(kept)["ok"]
    assert printing(str(kept)) == printing(str(without))
    loaded, plain = ow.load_file(kept), ow.load_file(without)
    assert set(loaded) == set(plain) and all(torch.equal(loaded[name], plain[name]) for name in plain)
    with torch.no_grad():
        model.a[3, 4] += 1
    assert sorted(ow.verify(kept, tensors=model)["differ"]) == ["a", "tied"]
    ow.convert(kept, tmp_path / "again.safetensors")
    assert ow.verify(tmp_path / "again.safetensors", tensors=Small())["kept"] == 0


def test_digests_of_odd_sizes_are_kept(tmp_path: Path) -> None:
    """Digests are stored for empty tensors, odd sizes and tensors of several chunks."""
    tensors = {"none": torch.empty(0, 3), "odd": torch.arange(13, dtype=torch.uint8), "big": torch.arange(3_000_001, dtype=torch.int32)}
    ow.save_file(tensors, tmp_path / "m.safetensors", digests=True)
    assert ow.verify(tmp_path / "m.safetensors")["ok"]
    found = ow.verify(tmp_path / "m.safetensors", tensors=tensors)
    assert found["ok"] and found["kept"] == 3 and found["bytes"] == 0


def test_all_kinds_at_once() -> None:
    """Tensors of all kinds in one call get the right digests, even if the memory or shape of one has changed since the
    last call."""
    dense = torch.randn(30, 20)
    lazy = torch.view_as_complex(torch.randn(5, 2)).conj()
    tensors: dict[str, Any] = {
        "dense": dense,
        "strided": dense[:, 1:7],
        "numpy": np.arange(77, dtype=np.int16),
        "none": torch.empty(3, 0, 2),
        "spec": ow.TensorSpec.of("F4", (2, 6), np.arange(6, dtype=np.uint8)),
        "conj": lazy,
        "neg": lazy.imag,
        "tied": dense,
        "parameter": torch.nn.Parameter(dense.clone()),
        "turned": dense.t(),
        "complex128": torch.randn(3, dtype=torch.complex128),
        "no dimension": torch.tensor(2.5, dtype=torch.float64),
    }
    got = ow.digest(tensors)
    assert got == {name: ow.digest(tensor) for name, tensor in tensors.items()}
    assert got["tied"] == got["dense"] == got["parameter"] == definition(raw(dense.detach()))
    assert got["neg"] == definition(raw(lazy.imag.resolve_neg())) and got["conj"] == definition(raw(lazy.resolve_conj()))
    dense.t_()
    other = torch.randn(7)
    tensors["parameter"].data = other
    again = ow.digest(tensors)
    assert again["dense"] == got["turned"] and again["parameter"] == definition(raw(other))
    assert ow.digest({}) == {}
