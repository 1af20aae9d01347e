"""Tests safe_open.load_into, which loads blocks of tensors into existing tensors."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import overwire
import pytest
import torch
from overwire.errors import ArgumentError, CorruptError, OutOfMemoryError, TensorNotFoundError

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool,
    torch.float8_e4m3fn,
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def make(path: Path, compress: bool, tensors: dict[str, torch.Tensor]) -> Path:
    overwire.save_file(tensors, path, compress=compress)
    return path


@pytest.fixture(params=[True, False], ids=["compressed", "plain"])
def compress(request: Any) -> bool:
    return bool(request.param)


def test_blocks_of_every_dtype(tmp_path: Path, compress: bool) -> None:
    """Random blocks of every dtype and number of dimensions match torch's slices, and the memory around them does not
    change."""
    seed = time.time_ns() & 0xFFFFFFFF
    print(f"seed {seed}")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        for shape in ((), (0,), (7,), (300, 257), (5, 0), (6, 9, 4), (3, 2, 5, 2)):
            made = torch.randn(shape, dtype=torch.float32) * 3
            tensors[f"{dtype}.{list(shape)}"] = made.to(dtype)
    path = make(tmp_path / "m.safetensors", compress, tensors)
    targets, wanted = [], []
    for name, tensor in tensors.items():
        for _ in range(3):
            ranges = []
            for size in tensor.shape[: rng.randrange(3)]:
                low = rng.randint(0, size)
                ranges.append((low, rng.randint(low, size)))
            cut = tensor[tuple(slice(*one) for one in ranges)] if ranges else tensor
            # One row on each side must stay unchanged.
            around = (
                torch.full((cut.shape[0] + 2, *cut.shape[1:]), 1).to(cut.dtype)
                if cut.dim()
                else torch.zeros((), dtype=cut.dtype)
            )
            inner = around[1:-1] if cut.dim() else around
            targets.append((name, ranges or None, inner))
            wanted.append((around, cut))
    with overwire.safe_open(path, "pt") as file:
        file.load_into(targets)
    for (name, ranges, _), (around, cut) in zip(targets, wanted, strict=True):
        inner = around[1:-1] if cut.dim() else around
        assert torch.equal(bits(inner), bits(cut)), (name, ranges)
        if cut.dim():
            one = torch.full((1, *cut.shape[1:]), 1).to(cut.dtype)
            assert torch.equal(bits(around[:1]), bits(one)) and torch.equal(bits(around[-1:]), bits(one)), (
                name, ranges,
            )


def test_a_fused_parameter(tmp_path: Path, compress: bool) -> None:
    """A rank's rows of q, k and v are loaded into parts of one fused parameter, and a block of columns into another
    parameter."""
    q, k, v, o = (torch.randn(n, 64).bfloat16() for n in (128, 64, 64, 32))
    path = make(tmp_path / "m.safetensors", compress, {"q": q, "k": k, "v": v, "o": o})
    fused, down = torch.zeros(128, 64, dtype=torch.bfloat16), torch.zeros(32, 32, dtype=torch.bfloat16)
    with overwire.safe_open(path, "pt") as file:
        file.load_into(
            [
                ("q", [(64, 128)], fused[:64]),
                ("k", [(32, 64)], fused[64:96]),
                ("v", [(32, 64)], fused[96:]),
                ("o", [(0, 32), (32, 64)], down),
            ]
        )
    assert torch.equal(fused, torch.cat([q[64:], k[32:], v[32:]]))
    assert torch.equal(down, o[:, 32:])


def test_destinations_that_need_a_copy(tmp_path: Path, compress: bool) -> None:
    """A destination with another dtype or strides, or one that overlaps an earlier destination, is filled through a
    copy."""
    tensor = torch.randn(64, 48).bfloat16()
    path = make(tmp_path / "m.safetensors", compress, {"a": tensor, "b": tensor + 1})
    cast, strided, both = (
        torch.zeros(64, 48), torch.zeros(48, 64, dtype=torch.bfloat16).t(), torch.zeros(64, 48, dtype=torch.bfloat16),
    )
    with overwire.safe_open(path, "pt") as file:
        file.load_into([("a", None, cast), ("a", [(3, 9)], strided[3:9]), ("a", None, both), ("b", [(10, 20)], both[10:20])])
        assert torch.equal(cast, tensor.float())
        assert torch.equal(strided[3:9], tensor[3:9]) and not strided[:3].any() and not strided[9:].any()
        assert torch.equal(both[10:20], (tensor + 1)[10:20]) and torch.equal(both[:10], tensor[:10])
        with pytest.raises(OutOfMemoryError):
            file.load_into([("a", None, cast)], max_memory=64 * 48 * 2 - 1)
        file.load_into([("a", [(0, 32)], cast[:32])], max_memory=32 * 48 * 2)


def test_the_last_of_overlapping_targets_wins(tmp_path: Path, seed: int) -> None:
    """Random targets that overlap (dense, strided or cast) end up as if they were filled one after another, with and
    without a preload."""
    rng, side = random.Random(seed), 12
    tensors = {
        f"t{n}": torch.full((side, side), n + 1.0, dtype=torch.float16 if n % 4 == 3 else torch.float32)
        for n in range(8)
    }
    path = make(tmp_path / "m.safetensors", True, tensors)
    for turn in range(60):
        memory, want = torch.zeros(2 * side, side), torch.zeros(2 * side, side)
        targets: list[Any] = []
        for _ in range(rng.randint(2, 6)):
            name, low, rows = rng.choice(list(tensors)), rng.randint(0, side), rng.randint(1, side)
            flip = rng.random() < 0.3
            here, there = ((one[low : low + side].t() if flip else one[low : low + rows]) for one in (memory, want))
            targets.append((name, None if flip or rows == side else [(0, rows)], here))
            there.copy_(tensors[name] if flip else tensors[name][:rows])
        if turn % 3 == 2:
            overwire.preload(path).result(60)
        with overwire.safe_open(path, "pt") as file:
            file.load_into(targets)
        assert torch.equal(memory, want), [
            (name, block, tensor.shape, tensor.stride()) for name, block, tensor in targets
        ]


def test_tied_transposes_get_the_same_values_as_with_torch(tmp_path: Path) -> None:
    """If two names are views of one parameter, the later name in the state dict wins, as with load_state_dict."""
    path = make(tmp_path / "m.safetensors", True, {"v": torch.full((50, 50), 1.0), "w": torch.full((50, 50), 2.0)})
    for first, second in (("w", "v"), ("v", "w")):
        module = torch.nn.Module()
        memory = torch.nn.Parameter(torch.zeros(50, 50))
        for name, strided in ((first, second == "w"), (second, first == "w")):
            module.register_parameter(name, torch.nn.Parameter(memory.detach().t() if strided else memory.detach()))
        overwire.load_model(module, path)
        got = memory.detach().clone()
        module.load_state_dict(overwire.load_file(path))
        assert torch.equal(got, memory.detach()), (first, second)


def test_elements_that_share_memory_are_refused(tmp_path: Path) -> None:
    """An expanded destination is refused before anything is written. A destination that was made in inference mode is
    filled."""
    path = make(tmp_path / "m.safetensors", True, {"a": torch.ones(8, 4), "b": torch.ones(8, 4)})
    good = torch.zeros(8, 4)
    with torch.inference_mode():
        frozen = [torch.zeros(8, 4), torch.zeros(4, 8).t(), torch.zeros(8, 4, dtype=torch.float64)]
    with overwire.safe_open(path, "pt") as file:
        with pytest.raises(ArgumentError, match="'b'.*share memory"):
            file.load_into([("a", None, good), ("b", None, torch.zeros(8, 1).expand(8, 4))])
        assert not good.any()
        file.load_into([("a", None, one) for one in frozen])
    assert all(bool((one == 1).all()) for one in frozen)


def test_load_into_uses_a_preload(tmp_path: Path, compress: bool) -> None:
    """Whole tensors and blocks are taken from a preload of the same file."""
    tensors = {f"t{n}": torch.randn(64, 32).bfloat16() for n in range(6)}
    path = make(tmp_path / "m.safetensors", compress, tensors)
    overwire.preload(path).result(60)
    whole, rows, columns = torch.zeros(64, 32).bfloat16(), torch.zeros(10, 32).bfloat16(), torch.zeros(64, 8).bfloat16()
    with overwire.safe_open(path, "pt") as file:
        file.load_into([("t0", None, whole), ("t1", [(5, 15)], rows), ("t1", [(0, 64), (8, 16)], columns)])
    assert (
        torch.equal(whole, tensors["t0"])
        and torch.equal(rows, tensors["t1"][5:15])
        and torch.equal(columns, tensors["t1"][:, 8:16])
    )


def test_a_wrong_target_changes_nothing(tmp_path: Path) -> None:
    """Each wrong target is refused by name, before any other target changes."""
    path = make(tmp_path / "m.safetensors", True, {"a": torch.ones(8, 4), "s": torch.tensor(2.0)})
    good = torch.zeros(8, 4)
    wrong: list[tuple[Any, Any, Any, type[Exception]]] = [
        ("b", None, good, TensorNotFoundError),
        ("a", None, torch.zeros(4, 8), ArgumentError),
        ("a", [(0, 9)], torch.zeros(9, 4), ArgumentError),
        ("a", [(-1, 4)], torch.zeros(5, 4), ArgumentError),
        ("a", [(4, 2)], torch.zeros(0, 4), ArgumentError),
        ("a", [(0, 1), (0, 1), (0, 1)], torch.zeros(1, 1), ArgumentError),
        ("a", 7, good, ArgumentError),
        ("a", [(0.5, 5)], torch.zeros(5, 4), ArgumentError),
        ("a", [("0", 5)], torch.zeros(5, 4), ArgumentError),
        ("a", None, [1.0], ArgumentError),
        ("a", None, torch.zeros(8, 4, device="meta"), ArgumentError),
        ("s", [(0, 1)], torch.zeros(1), ArgumentError),
    ]
    with overwire.safe_open(path, "pt") as file:
        for name, block, tensor, error in wrong:
            with pytest.raises(error, match=str(name)):
                file.load_into([("a", None, good), (name, block, tensor)])
        assert not good.any()
        file.load_into([])
    with pytest.raises(ArgumentError, match="closed"):
        file.load_into([("a", None, good)])
    with overwire.safe_open(path, "np") as file, pytest.raises(ArgumentError, match="framework"):
        file.load_into([])


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    """Loading a block of a damaged tensor raises an error that names the chunk. An intact tensor of the same file
    loads."""
    path = make(tmp_path / "m.safetensors", True, {"bad": torch.randn(4096, 64).bfloat16(), "good": torch.randn(64).bfloat16()})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with overwire.safe_open(path, "pt") as file:
        with pytest.raises(CorruptError, match="bad.*chunk"):
            file.load_into([("bad", None, torch.zeros(4096, 64).bfloat16())])
        file.load_into([("good", None, torch.zeros(64).bfloat16())])
