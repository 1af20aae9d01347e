"""Tests that all readers of a file return the tensors that were written."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, cleaned

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import safetensors.torch  # noqa: E402

# The number of random files that are tried.
CASES = int(os.environ.get("OVERWIRE_TEST_CASES") or 4)

TYPES = "bfloat16 float16 float32 float64 int8 uint8 int64 bool complex64".split()
TYPES += "float8_e4m3fn float8_e5m2 float4_e2m1fn_x2".split()


def flat(tensor: Any) -> Any:
    """Returns a tensor's bytes. It uses as_strided, because a tensor of one element may have any stride."""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def shape_of(rng: random.Random, count: int) -> list[int]:
    """Returns a random shape with count elements."""
    if count == 0:
        return rng.choice([[0], [3, 0], [0, 5, 2]])
    shape = [count] if count > 1 or rng.random() < 0.5 else []
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(shape)) if shape else 0
        factor = rng.choice([1, 2, 2, 3, 4, 8])
        if shape and shape[at] % factor == 0:
            shape[at : at + 1] = [factor, shape[at] // factor]
    return shape


def tensors_of(rng: random.Random) -> dict[str, Any]:
    """Returns tensors of random types and sizes. Some have equal bytes under different names and shapes."""
    tensors: dict[str, Any] = {}
    for number in range(rng.randint(4, 9)):
        dtype = getattr(torch, rng.choice(TYPES))
        large = rng.randint(1, 9) << rng.randint(8, 14)
        count = rng.choice([0, 1, rng.randint(2, 999), large, rng.randint(1, 5) << 15])
        values = torch.randn(count * dtype.itemsize // 2 + 1).mul(0.02).bfloat16()
        values = values.view(torch.uint8)[: count * dtype.itemsize]
        if dtype == torch.bool:
            values = values & 1
        for name in range(rng.randint(1, 4)):
            # A copy, because the writer has to detect equal tensors.
            shape = shape_of(rng, count)
            if dtype == torch.float4_e2m1fn_x2 and not shape:  # a pair of F4 values needs a dimension
                shape = [1]
            tensor = values.clone().view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
            tensors[f"{rng.randrange(10)}_{number}_{name}"] = tensor
    return tensors


def changed(tensor: Any) -> Any:
    """Returns a tensor of the same dtype and shape in which every byte differs."""
    if tensor.dtype == torch.bool:
        return ~tensor
    return (flat(tensor) ^ 0x5A).view(tensor.dtype).reshape(tensor.shape)


def expect(reader: str, tensor: Any, want: Any, what: object) -> None:
    assert tensor.dtype == want.dtype and tensor.shape == want.shape, (reader, what)
    assert torch.equal(flat(tensor), flat(want)), (reader, what)


def all_of(reader: str, found: Any, want: dict[str, Any]) -> None:
    found = dict(found)
    assert found.keys() == want.keys(), reader
    for name, tensor in want.items():
        expect(reader, found[name], tensor, name)


def cut_of(rng: random.Random, shape: Any) -> tuple[slice, ...]:
    """Returns a random index of rows, columns, or both."""
    cut = []
    for size in shape[: rng.randint(1, 2)]:
        low = rng.randint(0, size)
        cut.append(slice(low, rng.randint(low, size)) if rng.random() < 0.7 else slice(0, size))
    return tuple(cut)


def read_whole(path: Path, want: dict[str, Any]) -> None:
    all_of("load_file", ow.load_file(path), want)
    all_of("load_file, not mapped", ow.load_file(path, mmap=False), want)
    all_of("stream", ow.stream(path), want)
    all_of("stream in order, in windows", ow.stream(path, in_order=True, max_memory="64MiB"), want)
    with ow.safe_open(path, "pt") as file:
        all_of("get_tensor", {name: file.get_tensor(name) for name in want}, want)
        all_of("get_tensors", file.get_tensors(), want)
    some = [name for name in want if "_1_" in name]
    all_of("keys=", ow.load_file(path, keys=some), {name: want[name] for name in some})
    with ow.pin(path) as pinned:
        all_of("pin", ow.load_file(pinned), want)
    ow.preload(path).result(60)
    all_of("preload", ow.load_file(path), want)


def read_without_torch(path: Path, want: dict[str, Any]) -> None:
    found, bare = ow.load_file(path, framework="np"), ow.load_file(path, framework="bytes")
    assert found.keys() == bare.keys() == want.keys()
    for name, tensor in want.items():
        stored = flat(tensor).numpy().tobytes()
        if tensor.dtype != torch.float4_e2m1fn_x2:  # numpy stores one element per byte
            assert found[name].shape == tensor.shape and found[name].tobytes() == stored, ("np", name)
        assert bytes(bare[name]) == stored, ("bytes", name)


def read_in_place(path: Path, want: dict[str, Any]) -> None:
    # The memory is first filled with bytes that differ from the file's, so that skipped bytes are noticed.
    memory = {name: changed(tensor) for name, tensor in want.items()}
    with ow.safe_open(path, "pt") as file:
        file.load_into([(name, None, tensor) for name, tensor in memory.items()])
    all_of("load_into", memory, want)
    module = torch.nn.Module()
    for name, tensor in want.items():
        module.register_buffer(name, changed(tensor))
    assert ow.load_model(module, path) == ([], [])
    all_of("load_model", module.named_buffers(), want)


def read_blocks(path: Path, want: dict[str, Any], rng: random.Random) -> None:
    blocks = []
    with ow.safe_open(path, "pt") as file:
        for name, tensor in want.items():
            for _ in range(3 if tensor.dim() and tensor.dtype != torch.float4_e2m1fn_x2 else 0):
                cut = cut_of(rng, tensor.shape)
                expect("get_slice", file.get_slice(name)[cut], tensor[cut], (name, cut))
                blocks.append((name, cut, torch.empty_like(tensor[cut], memory_format=torch.contiguous_format)))
        file.load_into([(name, [(part.start, part.stop) for part in cut], block) for name, cut, block in blocks])
    for name, cut, block in blocks:
        expect("load_into of blocks", block, want[name][cut], (name, cut))


def read_by_verbs(path: Path, want: dict[str, Any], folder: Path) -> None:
    """Checks that functions which verify, inspect or rewrite the file see the same tensors, and that safetensors reads
    the rewritten file."""
    assert ow.verify(path)["ok"]
    loaded = ow.load_file(path)
    assert ow.digest(loaded) == ow.digest(want)
    assert ow.verify(path, tensors=loaded)["ok"]
    ow.convert(path, folder / "back.safetensors", compress=False)
    all_of("safetensors, after decompress", safetensors.torch.load_file(folder / "back.safetensors"), want)


def files_of(rng: random.Random, tensors: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Yields files with the tensors: plain, saved compressed, and compressed from the plain file. Also checks that the
    last one decompresses to the plain file."""
    plain = folder / "plain.safetensors"
    ow.save_file(tensors, plain, compress=False)
    yield plain
    saved = folder / "saved.safetensors"
    level, shard, digests = rng.choice(["default", "smaller"]), rng.choice([None, "200KB"]), rng.random() < 0.5
    ow.save_file(tensors, saved, level=level, max_shard_size=shard, digests=digests)
    yield saved if saved.exists() else folder / "saved.safetensors.index.json"
    packed = folder / "packed.safetensors"
    words = ["--parts", rng.choice("1248"), "--level", rng.choice(["default", "smaller"])]
    print(level, shard, words)
    command = [sys.executable, "-m", "overwire", "compress", str(plain), "-o", str(packed), *words]
    subprocess.run(command, check=True, capture_output=True, env=cleaned())
    yield packed
    ow.convert(packed, folder / "again.safetensors", compress=False)
    assert (folder / "again.safetensors").read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("case", range(CASES))
def test_all_readers_of_a_file_agree(tmp_path: Path, case: int, seed: int) -> None:
    """Every reader returns the tensors that were written, for random tensors, aliases, column parts and levels."""
    rng = random.Random(seed + case)
    torch.manual_seed(seed + case)
    tensors = tensors_of(rng)
    for path in files_of(rng, tensors, tmp_path):
        agree(path, tensors, tmp_path, rng)


def agree(path: Path, tensors: dict[str, Any], folder: Path, rng: random.Random) -> None:
    readers: list[Callable[[], None]] = [
        lambda: read_whole(path, tensors),
        lambda: read_without_torch(path, tensors),
        lambda: read_in_place(path, tensors),
        lambda: read_blocks(path, tensors, rng),
        lambda: read_by_verbs(path, tensors, folder),
    ]
    rng.shuffle(readers)
    for read in readers:
        read()


def test_aliases_in_column_parts_of_early_writers(tmp_path: Path, seed: int) -> None:
    """In files of early writers, an alias may have other rows than the tensor in column parts that it refers to. Every
    reader returns its bytes in plain order."""
    path = ROOT / "tests" / "goldens" / "save" / "other-rows-1.0" / "parts.safetensors"
    ow.convert(path, tmp_path / "plain.safetensors", compress=False)
    tensors = safetensors.torch.load_file(tmp_path / "plain.safetensors")
    for name, tensor in tensors.items():
        holder = tensors[name.partition("_")[0]]
        assert math.prod(tensor.shape) == holder.numel() and torch.equal(flat(tensor), flat(holder))
    agree(path, tensors, tmp_path, random.Random(seed))
