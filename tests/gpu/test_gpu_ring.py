"""Tests offload's ring of slots with the engine's asynchronous decoding, on the fake driver. The driver's device memory
is host memory, so torch can make CPU tensors of it."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import overwire as ow
import pytest
from overwire import gpu

torch: Any = pytest.importorskip("torch")
if gpu.count() == 0 or gpu.torch_of() is not None:
    pytest.skip("needs the fake driver", allow_module_level=True)

from overwire._compat_api import stream_blocks  # noqa: E402
from overwire.offloading import ring as rings  # noqa: E402
from overwire.offloading import tiers  # noqa: E402
from overwire.offloading.stored import DeviceMemory  # noqa: E402
from test_offload import Model, outputs  # noqa: E402

CPU = torch.device("cpu")


class Stream:
    """A stream of the fake driver. Waiting for one of its events waits for everything that is queued on the stream at
    that moment."""

    def __init__(self, device: object) -> None:
        self.cuda_stream = gpu.stream_new(0)

    def wait_stream(self, other: Any) -> None:
        if isinstance(other, Stream):
            gpu.follow(self.cuda_stream, other.cuda_stream, device=0)

    wait_event = wait_stream

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        gpu.stream_sync(self.cuda_stream, 0)


class Computing:
    """Replaces torch's current stream. The CPU computes immediately, so waiting does nothing."""

    def record_event(self) -> None: ...

    def synchronize(self) -> None: ...


def empty(nbytes: int, **_: Any) -> Any:
    """Returns a tensor in the fake GPU's memory."""
    memory = gpu.alloc(max(nbytes, 1), 0)
    octets = (ctypes.c_uint8 * nbytes).from_address(memory.address)
    octets.memory = memory  # type: ignore[attr-defined]
    return torch.frombuffer(octets, dtype=torch.uint8) if nbytes else torch.zeros(0, dtype=torch.uint8)


class Torch:
    """torch, with tensors in the fake GPU's memory."""

    empty = staticmethod(empty)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class FakeMemory(DeviceMemory):
    def __init__(self, nbytes: int, device: Any) -> None:
        self.tensor = empty(nbytes)
        self.nbytes, self.address, self.part = nbytes, self.tensor.data_ptr(), (0, nbytes)


@pytest.fixture(autouse=True)
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the ring believe that it works on a GPU."""
    monkeypatch.setattr(rings, "torch", Torch())
    monkeypatch.setattr(tiers, "DeviceMemory", FakeMemory)
    decode, copy = gpu.decode, gpu.copy
    monkeypatch.setattr(gpu, "decode", lambda _, *more: decode(0, *more))
    monkeypatch.setattr(gpu, "copy", lambda *given, **named: copy(*given, **{**named, "device": 0}))
    monkeypatch.setattr(rings, "_carrier_for", lambda _, *more: rings._GPUCarrier(CPU, *more))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Computing())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_damaged_block_does_not_run(where: Any, static: bool, at: int) -> None:
    """The first pass raises an error before the damaged block runs, although its decoding fails asynchronously. Passes
    before the damage and after its repair are right."""
    model, runs = Model(), list[int]()
    expected = outputs(model)
    model.layers[at].up.register_forward_pre_hook(lambda *_: runs.append(at))
    moved = list(model.parameters())
    with stream_blocks(model, CPU, model.layers, moved, static=static, where=where) as offloaded:
        part = offloaded._away[at].stored.memory.tensor[64:4096]
        before = part.clone()
        part.fill_(255)
        for _ in range(2):
            with pytest.raises(ow.CorruptError):
                outputs(model)
        assert not runs
        part.copy_(before)
        for _ in range(3):
            assert torch.equal(outputs(model), expected)
    assert torch.equal(outputs(model), expected)
