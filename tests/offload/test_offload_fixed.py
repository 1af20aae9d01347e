"""Tests that compiled models run with blocks that are streamed to fixed slots, and that a capture is refused."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any

import overwire as ow
import pytest
import torch
from overwire._compat_api import stream_blocks
from overwire.offloading import fixed
from test_offload import IDS, Model, outputs
from test_offload_streams import Device, device  # noqa: F401

CPU = torch.device("cpu")


def streamed(model: Model, keep: int = 0, where: Any = "host") -> Any:
    return stream_blocks(model, CPU, model.layers, list(model.parameters()), keep, static=True, where=where)


@pytest.mark.parametrize("where", ["host", "device"])
@torch.no_grad()
def test_any_order_of_blocks(device: Device, where: str, seed: int) -> None:  # noqa: F811
    """Outputs are right in every order of blocks, and addresses never change. `close` restores every byte."""
    model, dice = Model(), random.Random(seed)
    reference = copy.deepcopy(model)
    with streamed(model, where=where) as offloaded:
        assert "5 blocks" in repr(offloaded) and bool(offloaded.stored) == (where == "host")
        assert bool(offloaded.stored_on_device) == (where == "device")
        addresses = [parameter.data_ptr() for layer in model.layers for parameter in layer.parameters()]
        shared = {parameter.data_ptr() for layer in model.layers[1::2] for parameter in layer.parameters()}
        assert len(shared) == 6  # three weights and biases in one slot
        for order in (list(range(5)), *([dice.randrange(5) for _ in range(dice.randrange(1, 7))] for _ in range(12))):
            model.order = reference.order = order
            assert torch.equal(model(IDS), reference(IDS))
        assert addresses == [parameter.data_ptr() for layer in model.layers for parameter in layer.parameters()]
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert torch.equal(outputs(model), outputs(reference)) and not fixed._places
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def split_at(operator: str, counts: list[int]) -> Any:
    """Returns a compiler that runs the parts of a graph between the operators separately, as if each were captured."""

    def compile_parts(graph: Any, inputs: Any) -> Any:
        number, numbers = 0, {}
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            is_operator = node.op == "call_function" and str(node.target).startswith(operator.replace("::", "."))
            number += is_operator
            numbers[node] = number
            number += is_operator
        parts = torch.fx.passes.split_module.split_module(graph, None, numbers.__getitem__, keep_original_order=True)
        counts.append(sum(1 for name, _ in parts.named_children() if name.startswith("submod_")))
        for name, part in list(parts.named_children()):
            operators = [node for node in part.graph.nodes if "next_block" in str(node.target)]
            assert not operators or len(operators) == 1 == len([n for n in part.graph.nodes if n.op == "call_function"])
            if not operators:
                setattr(parts, name, torch.compile(part, backend="aot_eager"))
        return parts

    return compile_parts


@pytest.mark.parametrize("backend", ["aot_eager", "parts"])
@pytest.mark.parametrize("keep", [0, 150_000])
@torch.no_grad()
def test_compiled_models(device: Device, backend: str, keep: int) -> None:  # noqa: F811
    """A model that is compiled as one graph gives the same outputs whichever blocks stay on the device, also after
    `close`."""
    torch._dynamo.reset()
    model, counts = Model(), []
    reference = copy.deepcopy(model)
    how: Any = split_at(fixed.OPERATOR, counts) if backend == "parts" else backend
    compiled = torch.compile(model, backend=how, fullgraph=True)
    with streamed(model, keep) as offloaded:
        assert bool(offloaded.kept) == bool(keep) and len(offloaded.blocks) == (3 if keep else 5)
        for _ in range(3):
            assert torch.equal(compiled(IDS), reference(IDS))
    assert counts == ([] if backend == "aot_eager" else [11])
    assert torch.equal(compiled(IDS), reference(IDS))


class Packed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randint(0, 256, (4096, 40), dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight & 15).float() @ (self.weight >> 4).float().t()


@torch.no_grad()
def test_packed_weights_are_plain_copies(device: Device) -> None:  # noqa: F811
    """Weights that do not compress are stored as they are, and outputs are right."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Packed() for _ in range(4))
    x = torch.randn(2, 4096)
    expected = [layer(x) for layer in model.layers]
    with stream_blocks(model, CPU, model.layers, [], static=True) as offloaded:
        assert offloaded.nbytes <= offloaded.stored <= offloaded.nbytes + 4 * 512
        for _ in range(2):
            assert all(map(torch.equal, (layer(x) for layer in model.layers), expected))


@pytest.mark.parametrize("static", [True, False])
def test_a_capture_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch, static: bool) -> None:  # noqa: F811
    """Capturing raises an error that names the block, and the model runs afterwards."""
    model = Model()
    expected = outputs(model)
    with stream_blocks(model, CPU, model.layers, [], static=static) as offloaded:
        assert torch.equal(outputs(model), expected)
        with monkeypatch.context() as patch:
            for one in (offloaded, offloaded._ring):
                patch.setattr(one, "_device", torch.device("cuda"))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(ow.NotSupportedError, match=r"layers\.0: a CUDA graph cannot capture streamed weights"):
                outputs(model)
        assert torch.equal(outputs(model), expected)


def test_a_block_that_changes_its_weights(device: Device) -> None:  # noqa: F811
    """If a block changes its weights, the first pass raises an error that names it. `close` restores the stored
    weights."""
    model = Model()
    before = copy.deepcopy(model)
    forward = type(model.layers[2]).forward

    def change(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.up.weight.data.add_(1)
        return forward(layer, x)

    model.layers[2].forward = change.__get__(model.layers[2])
    with streamed(model), pytest.raises(ow.NotSupportedError, match=r"layers\.2 changes its weights"):
        outputs(model)
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert model.layers[2].forward.__func__ is change


def test_a_second_model_with_the_same_names() -> None:
    """A second model with the same block names is refused while the first one is streamed, because compiled code finds
    blocks by name."""
    model, other = Model(), Model()
    with streamed(model):
        with pytest.raises(ow.ArgumentError, match=r"layers\.0: a block of this name is streamed already"):
            streamed(other)
        expected = outputs(other)
        assert torch.equal(outputs(model), expected)
    with streamed(other):
        assert torch.equal(outputs(other), expected)


def test_a_model_that_is_deleted_without_close() -> None:
    """A model still runs when its handle was dropped. When the model is deleted, its memory is freed, and its names can
    be used again."""
    model = Model()
    expected = outputs(model)
    stored = [weakref.ref(one.stored.memory) for one in streamed(model)._away]
    gc.collect()
    assert len(stored) == 5 and all(memory() is not None for memory in stored)
    assert torch.equal(outputs(model), expected)
    del model
    gc.collect()
    assert all(memory() is None for memory in stored)
    with pytest.raises(ow.NotSupportedError, match=r"layers\.0: its model was deleted"):
        torch.ops.overwire.next_block([], "layers.0")
    for _ in range(2):  # in the second round, the first model is deleted but not yet collected
        other = Model()
        streamed(other)
        assert torch.equal(outputs(other), expected)


def test_a_close_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """If `close` fails, the model cannot run until a later `close` has restored its weights."""
    from overwire.offloading import offload as offloading

    model = Model()
    expected, offloaded = outputs(model), streamed(model)

    def fail(*args: Any) -> Any:
        raise ow.CorruptError("a chunk is wrong")

    with monkeypatch.context() as patch, pytest.raises(ow.CorruptError):
        patch.setattr(offloading, "_decode_block", fail)
        offloaded.close()
    with pytest.raises(ow.NotSupportedError, match=r"layers\.0: its weights were not restored"):
        outputs(model)
    offloaded.close()
    assert torch.equal(outputs(model), expected)


def test_a_driver_error_in_a_pass(device: Device) -> None:  # noqa: F811
    """After a driver error in a pass, the next pass gives right outputs."""
    model = Model()
    expected = outputs(model)
    with streamed(model):
        for calls in range(5):
            device.breaks = calls
            try:
                with pytest.raises(ow.DeviceError):
                    outputs(model), outputs(model)
            finally:
                device.breaks = None
            assert torch.equal(outputs(model), expected)
