"""Tests save_model and load_model, which fills a module's own tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import safetensors.torch
import torch
from conftest import raw, same
from torch import nn

MODES = pytest.mark.parametrize("compress", [True, False], ids=["compressed", "plain"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight


def fill(module: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.randn(tensor.shape) * 9)
    return module


def equal(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert raw(x) == raw(y) and x.dtype == y.dtype, name


@MODES
def test_load_model_fills_the_modules_own_memory(tmp_path: Path, compress: bool) -> None:
    source, target = fill(Tied(), 1), fill(Tied(), 2)
    ow.save_model(source, tmp_path / "m", compress=compress)
    before = {n: (p, p.data_ptr()) for n, p in target.named_parameters()}
    assert ow.load_model(target, tmp_path / "m") == ([], [])
    equal(source, target)
    for name, parameter in target.named_parameters():
        assert (parameter, parameter.data_ptr()) == before[name] or torch.equal(parameter, before[name][0])
        assert parameter.data_ptr() == before[name][1] and parameter.requires_grad
    assert target.head.weight is target.embed.weight


def test_plain_model_files_equal_those_of_safetensors(tmp_path: Path) -> None:
    source = fill(Tied(), 1)
    ow.save_model(source, tmp_path / "ours", {"who": "me"}, compress=False)
    safetensors.torch.save_model(source, str(tmp_path / "theirs"))
    target = fill(Tied(), 2)
    assert safetensors.torch.load_model(target, tmp_path / "ours") == (set(), [])
    equal(source, target)
    target = fill(Tied(), 3)
    ow.load_model(target, tmp_path / "theirs")
    equal(source, target)
    with safetensors.safe_open(tmp_path / "ours", "pt") as ours, safetensors.safe_open(tmp_path / "theirs", "pt") as theirs:
        assert list(ours.keys()) == list(theirs.keys())
        assert ours.metadata()["head.weight"] == theirs.metadata()["head.weight"] == "embed.weight"
        assert ours.metadata()["who"] == "me" and ours.metadata()["format"] == "pt"


def test_other_dtypes_and_layouts_are_cast_into_place(tmp_path: Path) -> None:
    source = fill(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(4, 4)), 1)
    ow.save_model(source, tmp_path / "m")
    target = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(4, 4)).to(memory_format=torch.channels_last)
    target[1].bfloat16()
    ow.load_model(target, tmp_path / "m")
    assert target[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[1].weight, source[1].weight.bfloat16())


def test_meta_modules_get_the_loaded_tensors(tmp_path: Path) -> None:
    source = fill(Tied(), 1)
    ow.save_model(source, tmp_path / "m")
    with torch.device("meta"):
        target = Tied()
    ow.load_model(target, tmp_path / "m")
    equal(source, target)
    assert isinstance(target.embed.weight, nn.Parameter) and target.head.weight is target.embed.weight
    assert target.embed.weight.requires_grad


def test_max_memory_counts_only_copies(tmp_path: Path) -> None:
    one, two = fill(nn.Linear(30, 40), 1), fill(nn.Linear(30, 40), 2)
    ow.save_model(one, tmp_path / "m")
    ow.load_model(two, tmp_path / "m", max_memory=1)  # all tensors are loaded in place
    equal(one, two)
    half, kept = nn.Linear(30, 40).bfloat16(), fill(nn.Linear(30, 40), 3).bfloat16().weight.detach()
    half.weight.data.copy_(kept)
    ow.load_model(half, tmp_path / "m", max_memory=(30 * 40 + 40) * 4)
    half.weight.data.copy_(kept)
    with pytest.raises(ow.OutOfMemoryError, match="2 tensors take 4960 bytes on cpu, 1 over max_memory of 4959"):
        ow.load_model(half, tmp_path / "m", max_memory=4959)
    assert torch.equal(half.weight, kept)
    with torch.device("meta"):
        empty = nn.Linear(30, 40)
    with pytest.raises(ow.OutOfMemoryError):
        ow.load_model(empty, tmp_path / "m", max_memory=4959)
    assert empty.weight.is_meta
    ow.load_model(empty, tmp_path / "m", max_memory=4960)
    equal(one, empty)


def test_an_error_names_all_mismatches_and_nothing_changes(tmp_path: Path) -> None:
    ow.save_file({"weight": torch.ones(4, 3), "bias": torch.ones(4), "extra": torch.ones(1)}, tmp_path / "m")
    module = fill(nn.Linear(3, 4), 5)
    before = raw(module.weight)
    with pytest.raises(ow.ModelMismatchError, match="unexpected in the file: 'extra'") as caught:
        ow.load_model(module, tmp_path / "m")
    assert isinstance(caught.value, RuntimeError) and raw(module.weight) == before
    assert ow.load_model(module, tmp_path / "m", strict=False) == ([], ["extra"])
    same(module.weight.detach(), torch.ones(4, 3))
    wide = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(ow.ModelMismatchError, match="missing in the file: '0.bias', '0.weight'"):
        ow.load_model(wide, tmp_path / "m")
    with pytest.raises(ow.ModelMismatchError, match=r"shape \(5,\) in the module, \(4,\) in the file"):
        ow.load_model(nn.Linear(3, 5), tmp_path / "m", strict=False)
    with pytest.raises(ow.ArgumentError):
        ow.load_model({}, tmp_path / "m")
    with pytest.raises(ow.ArgumentError):
        ow.save_model({}, tmp_path / "n")


def test_a_mismatch_lists_few_names(tmp_path: Path) -> None:
    """The error lists eight names of each kind and counts the others, because a large model has thousands."""
    model = torch.nn.ModuleDict({f"l{n}": torch.nn.Linear(2, 2) for n in range(1000)})
    ow.save_file({f"x{n}": torch.ones(1) for n in range(20)} | {f"l{n}.bias": torch.ones(1) for n in range(9)},
                 tmp_path / "m.safetensors")  # fmt: skip
    with pytest.raises(ow.ModelMismatchError) as caught:
        ow.load_model(model, tmp_path / "m.safetensors")
    text = str(caught.value)
    assert all(part in text for part in (" and 1,983 more; unexpected", " and 12 more; 'l0.bias' has", " and 1 more"))
    assert len(text) < 2000
    missing, surplus = ow.load_model(torch.nn.Linear(2, 2), tmp_path / "m.safetensors", strict=False)
    assert len(missing) == 2 and len(surplus) == 29


def test_load_model_joins_a_preload(tmp_path: Path) -> None:
    source, target = fill(Tied(), 1), fill(Tied(), 2)
    ow.save_model(source, tmp_path / "m")
    ow.preload(tmp_path / "m").wait()
    ow.load_model(target, tmp_path / "m")
    equal(source, target)


def test_inside_compiled_functions(torch_script: Callable[..., Any]) -> None:
    """torch.compile does not trace into overwire's functions, not even if a compiled function calls one directly."""
    torch_script("""
import overwire as ow, torch

weights = {"w": torch.randn(8, 8), "b": torch.randn(8, 8).bfloat16(), "f": torch.randn(8, 8).to(torch.float8_e4m3fn)}
module = torch.nn.Linear(8, 8)
ow.save_file(weights, "m.safetensors")
ow.save_model(module, "l.safetensors")

def load(x):
    tensors = ow.load_file("m.safetensors")
    return x @ tensors["w"] @ tensors["b"].float()

def read(x):
    with ow.safe_open("m.safetensors", "pt") as file:
        return x @ file.get_slice("w")[:, ::-1] @ file.get_slice("f")[::-1].float() @ file["b"].float()

def stream(x):
    for _, tensor in ow.stream("m.safetensors", in_order=True):
        x = x @ tensor.float()
    return x

def fill(x):
    ow.load_model(module, "l.safetensors")
    return module(x)

def save(x):
    ow.save_file({"x": x}, "x.safetensors")
    return x + ow.load_file("x.safetensors")["x"]

x = torch.ones(8)
for function in (load, read, stream, fill, save):
    assert torch.allclose(torch.compile(function, backend="eager")(x), function(x)), function.__name__
""")


def test_loads_trigger_no_garbage_collection(tmp_path: Path) -> None:
    """Loading many tensors into a dict or a module, in one process or a group, triggers no garbage collection."""
    distributed = pytest.importorskip("torch.distributed")
    module = fill(Tied(), 1)
    ow.save_model(module, tmp_path / "m")
    enabled: list[bool] = []
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for group in (None, distributed.group.WORLD):
            for load in (partial(ow.load_file, tmp_path / "m"), partial(ow.load_model, module, tmp_path / "m")):
                enabled.clear()
                load(group=group, progress=lambda _: enabled.append(gc.isenabled()))
                assert enabled and not any(enabled) and gc.isenabled(), (group, load)
    finally:
        distributed.destroy_process_group()
