"""Tests that no output is computed from a block with damaged stored bytes, although a GPU decodes a block only after
the CPU has queued the work that uses it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import overwire as ow
import pytest
import torch
from overwire._compat_api import stream_blocks
from test_offload import Model, outputs
from test_offload_groups import Buffers, buffers, group  # noqa: F401
from test_offload_streams import Device, device  # noqa: F401

TIERS: dict[str, dict[str, Any]] = {"host": {}, "device": {"where": "device"}}
TIERS["auto"] = {"where": "auto", "room": 150_000}


@contextmanager
def damaged(offloaded: Any, at: int) -> Iterator[None]:
    """Changes bytes of a stored block so that it cannot be decoded."""
    part = offloaded._away[at].stored.memory.tensor[64:4096]
    before = part.clone()
    part.fill_(255)
    yield
    part.copy_(before)


def runs_of(model: Model, at: int) -> list[int]:
    """Returns a list to which each run of a block's layers adds an item."""
    runs: list[int] = []
    model.layers[at].up.register_forward_pre_hook(lambda *_: runs.append(at))
    return runs


@pytest.mark.parametrize("tier", [*TIERS, "fixed host", "fixed device"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_damaged_block_does_not_run(device: Device, tier: str, at: int) -> None:  # noqa: F811
    """Each pass raises an error before the damaged block runs. Other blocks run. When the bytes are restored, passes
    are right again."""
    model = Model()
    expected, before, runs = outputs(model), copy.deepcopy(model), runs_of(model, at)
    if tier.startswith("fixed"):
        moved, where = list(model.parameters()), tier.removeprefix("fixed ")
        offloaded: Any = stream_blocks(model, torch.device("cpu"), model.layers, moved, static=True, where=where)
    else:
        offloaded = ow.offload(model, "cpu", **TIERS[tier])
    with offloaded:
        for _ in range(2):
            with damaged(offloaded, at):
                for _ in range(2):
                    with pytest.raises(ow.CorruptError):
                        outputs(model)
                assert not runs
                model.order = before.order = [one for one in (3, 1, 4, 0, 2) if one != at]
                assert torch.equal(outputs(model), outputs(before))
                model.order = list(range(5))
            assert torch.equal(outputs(model), expected) and runs
            runs.clear()
            model.order = [one for one in range(5) if one != at]  # runs until the block has left its slot
            outputs(model)
            model.order = list(range(5))
    assert all(map(torch.equal, model.parameters(), before.parameters()))


@pytest.mark.parametrize("tier", TIERS)
def test_close_with_a_damaged_block(device: Device, tier: str) -> None:  # noqa: F811
    """`close` raises an error even if the block did not run. It can be called again when the bytes are restored."""
    model = Model()
    before = [parameter.clone() for parameter in model.parameters()]
    offloaded = ow.offload(model, "cpu", **TIERS[tier])
    with damaged(offloaded, 3):
        model.order = [0, 1, 2]  # block 3 is decoded ahead
        outputs(model)
        with pytest.raises(ow.CorruptError):
            offloaded.close()
    offloaded.close()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("where", ["host", "auto"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_damaged_block_of_a_group_does_not_run(
    buffers: type[Buffers], group: Any, where: str, at: int  # noqa: F811
) -> None:
    """The pass raises an error before the block runs. So do later passes, because the ranks are out of step. `close`
    restores every byte."""
    model = Model()
    before, runs = copy.deepcopy(model), runs_of(model, at)
    room = 150_000 if where == "auto" else None
    with ow.offload(model, "cpu", group=group, where=where, room=room) as offloaded:  # type: ignore[arg-type]
        with damaged(offloaded, at), pytest.raises(ow.CorruptError):
            outputs(model)
        assert not runs
        with pytest.raises(ow.IOFailure, match="after an earlier error"):
            outputs(model)
    assert all(map(torch.equal, model.parameters(), before.parameters()))
