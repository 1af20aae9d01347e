"""Tests that the ranks of a group stream the blocks of a model together, on the CPU and on a GPU whose calls are
replaced. tests/gpu/test_gpu_gather.py tests the exchange between GPUs on the fake driver."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
import torch.distributed as dist
import warm
from conftest import ROOT, cleaned
from overwire import gpu
from overwire.offloading import ring as rings
from overwire.offloading import sharing
from test_offload import Model, outputs
from test_offload_streams import Device, device  # noqa: F401

RELEASE = rings.Ring.release
MEETING = ("same", "reads", "damaged", "arguments", "beginning", "order", "escapes", "differs")
CASES = [(2, MEETING), (4, ("same", "reads", "order")), (8, ("same", "reads")), (2, ("late",))]
CASES += [(3, (case,)) for case in ("killed", "closed", "interrupted", "dies_beginning")]


@pytest.mark.parametrize(("ranks", "cases"), CASES)
def test_ranks_stream_together(tmp_path: Path, ranks: int, cases: tuple[str, ...]) -> None:
    """Each rank gets the same outputs as with the resident model, or an error that names the block and the rank.
    Afterwards, each rank has all weights."""
    command = [ROOT / "tests" / "offload" / "group_ranks.py", tmp_path, str(ranks), *cases]
    done = warm.run(command, env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """Yields a group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield dist.group.WORLD
    dist.destroy_process_group()


class Buffers(sharing.BlockGroup):
    """A group that copies blocks on a stream of the replaced device, into buffers that are used in turn."""

    calls: Device
    announced: list[int]  # the numbers of blocks

    def open_ring(self, nbytes: int, buffers: int, memories: Any) -> int:
        self.copying: Any = torch.cuda.Stream("cpu")  # type: ignore[no-untyped-call]
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(buffers)]
        self.coming: list[tuple[int, int]] = []  # block and buffer of each copy that take_block has not returned
        self.copies = 0
        return nbytes * buffers

    def fetch_part(self, memory: Any, after: int | None = None) -> None:
        super().fetch_part(memory)
        self.announced.append(memory.number)
        assert after is not None and len(self.coming) < len(self.buffers), "no buffer is free"
        at, self.copies = self.copies % len(self.buffers), self.copies + 1
        self.copying.wait_stream(self.calls.streams[after])
        to = self.buffers[at].data_ptr()
        self.calls.copy(to, memory.address, memory.nbytes, device=0, stream=self.copying.cuda_stream, wait=False)
        self.coming.append((memory.number, at))

    def take_block(self, memory: Any, stream: int) -> int:
        with self._going_on(self._names[memory.number]):
            number, at = self.coming.pop(0)
            assert number == memory.number, "another block is older"
            self.calls.streams[stream].wait_stream(self.copying)
            return self.buffers[at].data_ptr()


@pytest.fixture
def buffers(device: Device, monkeypatch: pytest.MonkeyPatch) -> type[Buffers]:  # noqa: F811
    monkeypatch.setattr(Buffers, "calls", device, raising=False)
    monkeypatch.setattr(Buffers, "announced", [], raising=False)
    monkeypatch.setattr(sharing, "BlockGroup", Buffers)
    return Buffers


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("where", ["host", "auto"])
def test_blocks_arrive_in_buffers(
    buffers: type[Buffers], group: Any, slots: int, where: Any, seed: int
) -> None:
    """Outputs are right in every order of the blocks, even if the block that was copied ahead is not the next to
    run."""
    model, dice = Model(), random.Random(seed)
    reference = copy.deepcopy(model)
    room = 150_000 if where == "auto" else None
    with ow.offload(model, "cpu", slots=slots, group=group, where=where, room=room) as offloaded:
        assert (offloaded.stored_on_device > 0) == (where == "auto")
        orders = [[dice.randrange(5) for _ in range(dice.randrange(1, 7))] for _ in range(8)]
        for order in (range(5), range(5), *orders):
            model.order = reference.order = list(order)
            assert torch.equal(outputs(model), outputs(reference))
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("poisoned", [True, False])
def test_a_rank_that_keeps_weights_announces_the_same_blocks(
    buffers: type[Buffers], group: Any, monkeypatch: pytest.MonkeyPatch, slots: int, poisoned: bool, seed: int
) -> None:
    """Outputs are right if a rank keeps and drops views at any time. The rank loads the same blocks as one that keeps
    nothing."""
    if not poisoned:  # a poisoned slot is not loaded again if its block stays
        monkeypatch.setattr(rings.Ring, "release", RELEASE)

    def blocks_loaded(share: float) -> list[int]:
        # runs a model in which layers keep a view of a weight in this share of their runs
        buffers.announced.clear()
        model, dice, kept = Model(), random.Random(seed), random.Random(seed + 1)
        reference, views = copy.deepcopy(model), dict[int, Any]()

        def keep(at: int, module: Any) -> None:
            views.pop(at, None)
            if kept.random() < share:
                views[at] = module.up.weight.detach()[:2]

        for at, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(lambda module, args, at=at: keep(at, module))
        with ow.offload(model, "cpu", slots=slots, group=group):
            for order in ([dice.randrange(5) for _ in range(dice.randrange(1, 7))] for _ in range(15)):
                model.order = reference.order = list(order)
                assert torch.equal(outputs(model), outputs(reference))
                for at, view in views.items():
                    assert torch.equal(view, reference.layers[at].up.weight[:2])
                if kept.random() < 0.3:
                    views.clear()
        return buffers.announced.copy()

    plain = blocks_loaded(0)
    assert blocks_loaded(0.5) == plain or poisoned


@pytest.mark.parametrize("error", [ow.DeviceError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["decode", "take_block", "fetch_part"])
def test_errors_while_a_block_arrives(
    buffers: type[Buffers], group: Any, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    """After an error or Ctrl-C at any step of loading a block, each later run raises an error that names a block,
    because the ranks are out of step. close restores every byte."""
    model = Model()
    before, owner = copy.deepcopy(model), gpu if step == "decode" else buffers
    with ow.offload(model, "cpu", group=group):
        outputs(model)
        done = getattr(owner, step)

        def fail(*given: Any, **more: Any) -> Any:
            if step != "decode":  # the error occurs between this call and the next line
                done(*given, **more)
            raise error("stopped")

        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(owner, step, fail)
            outputs(model)
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4]):
            model.order = order
            with pytest.raises(ow.IOFailure, match=r"block 'layers\.\d'.*after an earlier error: stopped"):
                outputs(model)
    assert all(map(torch.equal, model.parameters(), before.parameters()))
