"""Tests how the ring of slots uses GPU streams, on a simulated device.

Each stream runs as early or as late as its waits allow. Slots and staging buffers that must not be read are poisoned.
Writing to a slot before its readers have ended is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Callable
from typing import Any

import overwire as ow
import pytest
import torch
from overwire import codecs, gpu
from overwire.offloading import ring as rings
from test_offload import BYTES, Cast, Model, outputs


class Event:
    """A position in a stream, and the number of computing steps before it on each thread."""

    def __init__(self, stream: Any, position: int, after: dict[int, int]) -> None:
        self.stream, self.position, self.after = stream, position, after


class Computing:
    """A thread's current stream, which runs its work immediately."""

    def __init__(self) -> None:
        self.thread, self.steps = threading.get_ident(), 0

    def wait_event(self, event: Event) -> None:
        event.stream.advance(event.position)

    def record_event(self) -> Event:
        self.steps += 1
        return Event(self, 0, {self.thread: self.steps})

    def advance(self, position: int) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    """A stream of the device. Its work runs when something waits for it, or immediately if `eager` returns true."""

    device: Device

    def __init__(self, device: object) -> None:
        self.todo: list[Callable[[], None]] = []
        self.done = 0
        self.after: dict[int, int] = {}  # by thread: the computing steps before this work
        self.cuda_stream = len(self.device.streams)
        self.device.streams.append(self)

    def advance(self, position: int) -> None:
        while self.done < position:
            self.done += 1
            self.todo[self.done - 1]()

    def add(self, work: Callable[[], None]) -> None:
        self.todo.append(work)
        if self.device.eager(self.cuda_stream):
            self.advance(len(self.todo))

    def wait_event(self, event: Event) -> None:
        def wait() -> None:
            event.stream.advance(event.position)
            for thread, steps in event.after.items():
                self.after[thread] = max(self.after.get(thread, 0), steps)

        self.add(wait)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> Event:
        return Event(self, len(self.todo), {})

    def synchronize(self) -> None:
        self.advance(len(self.todo))


class Decoding:
    """The result of the replaced `gpu.decode`, which is known after the work has run."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.position, self.results = stream, len(stream.todo) + 1, list[Any]()

    def wait(self) -> list[Any]:
        self.stream.advance(self.position)
        return self.results


class Device:
    """Replaces the GPU calls of torch and of the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, eager: Callable[[int], bool]) -> None:
        self.eager = eager
        self.streams: list[Stream] = []
        self.read: dict[int, dict[int, int]] = {}  # by slot address and thread: the step of the last read
        self.current = threading.local()
        self.breaks: int | None = None  # how many driver calls succeed before one fails
        self.staged: dict[int, int] = {}  # by address: size of the largest copy to it
        self.decoded: list[int] = []  # addresses of decoded streams
        cpu = torch.device("cpu")
        monkeypatch.setattr(Stream, "device", self, raising=False)
        monkeypatch.setattr(rings, "_carrier_for", lambda device, *more: rings._GPUCarrier(cpu, *more))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.computing())
        recorded: list[torch.Tensor] = []  # kept alive, because queued work may still write to them
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
        monkeypatch.setattr(gpu, "copy", self.copy)
        monkeypatch.setattr(gpu, "pack_streams", list)
        monkeypatch.setattr(gpu, "decode", self.decode)
        release = rings.Ring.release

        def poison(ring: Any, at: int) -> bool:
            slot = ring._slot_of(at)
            last = release(ring, at)
            if slot is not None:
                address = slot.memory.data_ptr()
                self.read.setdefault(address, {})[threading.get_ident()] = self.computing().steps
                if last:
                    slot.memory.fill_(255)
                    slot.block = None
            return last

        monkeypatch.setattr(rings.Ring, "release", poison)

    def computing(self) -> Computing:
        if not hasattr(self.current, "stream"):
            self.current.stream = Computing()
        stream: Computing = self.current.stream
        return stream

    def call_driver(self) -> None:
        if self.breaks is not None:
            self.breaks -= 1
            if self.breaks < 0:
                raise ow.DeviceError("the driver fails")

    def copy(self, to: int, of: int, nbytes: int, *, device: int, stream: int, wait: bool) -> None:
        self.call_driver()
        self.staged[to] = max(nbytes, self.staged.get(to, 0))
        self.streams[stream].add(lambda: ctypes.memmove(to, of, nbytes) and None)

    def decode(self, number: int, stream: int, packed: list[tuple[int, ...]], algorithm: str) -> Decoding:
        self.call_driver()
        batch, own = Decoding(self.streams[stream]), self.streams[stream]
        self.decoded += [source for source, _, _, _, _ in packed]

        def work() -> None:
            slot = min(out for _, _, out, _, _ in packed)
            for thread, steps in self.read.get(slot, {}).items():
                assert own.after.get(thread, 0) >= steps, "a slot is written before its readers have ended"
            sources = [codecs.Span(source, length, None) for source, length, _, _, _ in packed]
            outs = [codecs.Span(out, nbytes, None) for _, _, out, nbytes, _ in packed]
            batch.results = [coded.error for coded in codecs.run("decode", sources, algorithm=algorithm, out=outs)]
            for source, length, _, _, _ in packed:
                if self.was_copied(source):
                    ctypes.memset(source, 255, length)

        own.add(work)
        return batch


    def was_copied(self, source: int) -> bool:
        """Returns whether a stored stream is in a staging buffer."""
        return any(start <= source < start + nbytes for start, nbytes in self.staged.items())


@pytest.fixture(params=["early", "late", "copies early", "random"])
def device(request: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> Device:
    dice = random.Random(seed)
    early: dict[str, Callable[[int], bool]] = {
        "early": lambda stream: True,
        "late": lambda stream: False,
        "copies early": lambda stream: stream % 2 == 0,
        "random": lambda stream: dice.random() < 0.5,
    }
    return Device(monkeypatch, early[request.param])


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_outputs_in_every_order(device: Device, slots: int, seed: int) -> None:
    """Outputs are right if blocks are skipped, run twice or change their order. `close` restores every byte."""
    model, dice = Model(), random.Random(seed)
    with ow.offload(model, "cpu", slots=slots):
        orders = [
            list(range(5)), list(range(5)),
            *([dice.randrange(5) for _ in range(dice.randrange(1, 7))] for _ in range(8)),
        ]
        seen = []
        for order in orders:
            model.order = order
            seen.append(outputs(model))
    for order, output in zip(orders, seen, strict=True):
        model.order = order
        assert torch.equal(output, outputs(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, *BYTES], ids=str)
def test_every_dtype(device: Device, dtype: torch.dtype, seed: int) -> None:
    """Blocks of dtypes other than bf16 arrive unchanged in any order."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Cast(dtype, rows) for rows in (61, 61, 3, 61, 200))
    inputs = [torch.linspace(-1, 1, 2 * len(layer.weight)).reshape(2, -1) for layer in model.layers]
    expected = [layer(x) for layer, x in zip(model.layers, inputs, strict=True)]
    dice = random.Random(seed)
    with ow.offload(model, "cpu"), torch.no_grad():
        for at in [*range(5), *(dice.randrange(5) for _ in range(20))]:
            assert torch.equal(model.layers[at](inputs[at]), expected[at])


def test_threads_on_separate_streams(device: Device) -> None:
    """Three threads can run the model on separate streams. No run loses its slot to another run."""
    model = Model()
    reference = outputs(model)
    with ow.offload(model, "cpu", slots=2):
        right: list[bool] = []

        def run() -> None:
            right.extend(torch.equal(outputs(model), reference) for _ in range(6))

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert right == [True] * 18


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_in_the_middle_of_a_pass(device: Device, error: type[BaseException]) -> None:
    """After an error in a block, Ctrl-C or a driver error, the next pass gives right outputs."""
    model = Model()
    reference = outputs(model)
    with ow.offload(model, "cpu"):
        for at in range(5):

            def fail(*_: Any) -> None:
                raise error

            hook = model.layers[at].up.register_forward_hook(fail)
            with pytest.raises(error):
                outputs(model)
            hook.remove()
            assert torch.equal(outputs(model), reference)
            device.breaks = at
            with pytest.raises(ow.DeviceError):
                outputs(model), outputs(model)
            device.breaks = None
            assert torch.equal(outputs(model), reference)


def test_a_block_can_return_a_part_of_its_weights(device: Device) -> None:
    """If a block returns part of its weights, this part keeps its values after the slot is reused."""

    class Row(torch.nn.Module):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((16, 64), float(at)), requires_grad=False)

        def forward(self) -> Any:
            return {"row": self.weight[3]}

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Row(at) for at in range(5))
    with ow.offload(model, "cpu"), torch.no_grad():
        rows = [(at, layer()["row"]) for _ in range(3) for at, layer in enumerate(model.layers)]
        assert all(bool((row == at).all()) for at, row in rows)
