"""Streams blocks for libraries, also of compiled models, in which the weights of a block are always at one address.

Compiled code and CUDA graphs keep the addresses of weights, and kernels of quantised layers may keep references. Here
each block has a fixed slot, which it shares with other blocks, and its parameters always have the slot's memory. The
operator `overwire::next_block` loads the weights before the block runs. Its tensors keep compilers from moving it.

A CUDA graph cannot capture the operator, because a later run would not load anything. It has to run between the graphs
of a model, as in vLLM's piecewise graphs. In a capture it raises an error.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._undo import pass_error_to
from ..errors import ArgumentError, NotSupportedError
from .away import bring
from .blocks import find_blocks
from .offload import Offloaded
from .ring import Ring, Slot
from .stored import StoredBlock

if TYPE_CHECKING:
    from .blocks import Block
    from .source import Source
    from .tiers import Tiers

#: The operator's name, for lists of operators at which a compiler divides a model.
OPERATOR = "overwire::next_block"

# The owner and the number of each streamed block, by name. Compiled code is stored on disk with the names. Only the
# model and its user keep the owner alive.
_places: dict[str, tuple[weakref.ref[FixedBlocks], int]] = {}


def _load_next_block(tensors: list[torch.Tensor], name: str) -> None:
    if (place := _places.get(name)) is None:
        return
    if (owner := place[0]()) is None:
        raise NotSupportedError(f"overwire: offload: {name}: its model was deleted, so its weights no longer exist")
    if (ring := owner._ring) is None or not ring._blocks:
        text = "its weights were not restored: call Offloaded.close() again"
        raise NotSupportedError(f"overwire: offload: {name}: {text}")
    ring.load_next(place[1])


def _is_streamed(name: str) -> bool:
    # Forgets a block if its model was deleted without `close`.
    if name in _places and _places[name][0]() is None:
        del _places[name]
    return name in _places


_library: Any = torch.library.Library("overwire", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("next_block(Tensor(a!)[] tensors, str name) -> ()")
_library.impl("next_block", _load_next_block, "CompositeExplicitAutograd")
torch.library.register_fake(OPERATOR, lambda tensors, name: None, lib=_library)


class FixedRing(Ring):
    """Slots for blocks that run one after another, on one thread. Block i is always in slot i modulo the number of
    slots."""

    def __init__(self, blocks: Sequence[StoredBlock], names: list[str], device: torch.device, count: int) -> None:
        super().__init__(blocks, device, count)
        self._names = names
        self._running: tuple[int, Any] | None = None  # the block that runs, and its stream
        self._equal: set[int] = set()  # blocks that did not change their weights in their first run
        with torch.inference_mode(self._inference), torch.no_grad():
            #: The weights of each block, as views of its slot.
            self.views = [[p.view(self._slot_for(at).memory) for p in one.places] for at, one in enumerate(blocks)]

    def load_next(self, at: int) -> None:
        """Ends the run of the last block, and loads block `at` and the following ones. Work that is queued on the
        current stream afterwards may use the weights of block `at`.

        Raises NotSupportedError during the capture of a CUDA graph, and if the last block has changed its weights.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            text = f"a CUDA graph cannot capture streamed weights: it has to begin after the operator {OPERATOR}"
            raise NotSupportedError(f"overwire: offload: {self._names[at]}: {text}")
        with self.lock:
            self._end_run()
            slot = self._slot_for(at)
            self._load_block(at, slot)
            for ahead in range(1, self._count if self._carrier.ahead else 1):
                number = (at + ahead) % len(self._blocks)
                if self._slot_for(number) is not slot:
                    self._load_block(number, self._slot_for(number))
            self._await_decoded(slot)
            self._running = at, self._carrier.stream()

    def _slot_for(self, at: int) -> Slot:
        return self._slots[at % self._count]

    def _load_block(self, at: int, slot: Slot) -> None:
        if slot.block != at:
            slot.block = None  # the slot counts as empty if the next step fails
            self._carrier.fetch(self._blocks[at], slot)
            slot.block = at

    def _end_run(self) -> None:
        if self._running is None:
            return
        (at, stream), self._running = self._running, None
        self._carrier.mark_read(self._slot_for(at), stream)
        if at not in self._equal and not self.is_as_stored(at):  # only once, because the host waits for it
            self._slot_for(at).block = None
            text = "changes its weights when it runs, so it cannot be streamed in a compiled or quantised model"
            raise NotSupportedError(f"overwire: offload: {self._names[at]} {text}")
        self._equal.add(at)


class FixedBlocks(Offloaded):
    """A model with streamed blocks in fixed slots. Between runs, parameters have the bytes of any block in their
    slot."""

    _ring: FixedRing | None

    def __init__(self, device: torch.device, inference: bool) -> None:
        super().__init__(device, inference)
        self._forwards: list[tuple[Block, Any]] = []  # each block, with the forward that was in its __dict__

    def _encode_blocks(
        self, blocks: list[Block], staying: set[int], limit: int, source: Source | None, tiers: Tiers
    ) -> None:
        if any(_is_streamed(block.name) for block in blocks):
            gc.collect()  # a deleted model and its blocks refer to each other
        for block in blocks:
            if _is_streamed(block.name):
                raise ArgumentError(f"overwire: offload: {block.name}: a block of this name is streamed already")
        super()._encode_blocks(blocks, staying, limit, source, tiers)
        for block in blocks:  # also for those that stay, so that compiled code does not depend on which ones do
            self._forwards.append((block, block.module.__dict__.get("forward")))
            block.module.__dict__["forward"] = _forward_of(block, self)

    def _run_by(self, slots: int) -> None:
        if not self._away:
            return
        ring = FixedRing([one.stored for one in self._away], self.blocks, self._device, slots)
        self._ring, self.ring = ring, ring.nbytes
        for at, one in enumerate(self._away):
            for weight, view in zip(one.block.weights, ring.views[at], strict=True):
                bring(weight.parameter, view)
            _places[one.block.name] = weakref.ref(self), at

    def _put_back(self) -> None:
        super()._put_back()
        while self._forwards:
            block, forward = self._forwards.pop()
            block.module.__dict__.pop("forward", None)
            if forward is not None:
                block.module.__dict__["forward"] = forward
            _places.pop(block.name, None)


def stream_blocks(
    model: torch.nn.Module,
    device: torch.device,
    blocks: Iterable[torch.nn.Module],
    moved: Iterable[torch.Tensor],
    keep: int = 0,
    static: bool = False,
    where: Literal["host", "device"] = "host",
) -> Offloaded:
    """Streams blocks that the caller has chosen. In addition to the blocks, only the tensors in `moved` are moved to
    the device. keep: the bytes of blocks that stay on the device. static: whether the weights of a block always have
    the same addresses, for compiled and quantised models that run on one thread. where: the memory for compressed
    weights.

    Raises ArgumentError, NotSupportedError, OutOfMemoryError and DeviceError. After an error the model is unchanged.
    """
    inference = any(tensor.is_inference() for tensor in model.parameters())
    offloaded = (FixedBlocks if static else Offloaded)(device, inference)
    with pass_error_to(offloaded._close_after), torch.inference_mode(inference), torch.no_grad():
        offloaded._begin_streaming(find_blocks(model, blocks), list(moved), keep, 2, where=where)
    return offloaded


def _forward_of(block: Block, owner: FixedBlocks) -> Any:
    # Returns a forward with the operator, which compilers trace. It keeps the offloaded weights as long as the model.
    forward, name = block.module.forward, block.name

    def run_block(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        tensors = [one for one in values if isinstance(one, torch.Tensor) and one.is_floating_point()]
        torch.ops.overwire.next_block(tensors, name)
        return forward(*args, **kwargs)

    run_block.__dict__["owner"] = owner
    return run_block
