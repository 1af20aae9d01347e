"""Tests that outputs do not change if blocks stay compressed in device memory, or in device and host memory."""

from __future__ import annotations

import copy
import functools
import logging
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import test_offload as base
import test_offload_escapes as escapes
import test_offload_streams as streams
import torch
from overwire.offloading import blocks as cutting
from overwire.offloading import offload as offloading
from overwire.offloading import ring as rings
from overwire.offloading import stored, tiers
from test_offload import BYTES, Cast, Model, outputs, slots_are_poisoned  # noqa: F401
from test_offload_streams import Device, device  # noqa: F401

# A block of Model has about 50,400 stored bytes, so two of five blocks fit into this limit.
TIERS: dict[str, dict[str, Any]] = {"device": {"where": "device"}, "auto": {"where": "auto", "room": 150_000}}


@pytest.fixture(params=TIERS)
def tier(request: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Makes `offload` use the tier of the parameter by default."""
    options = TIERS[request.param]
    monkeypatch.setattr(ow, "offload", functools.partial(ow.offload, **options))
    return options


def tiers_of(offloaded: Any) -> str:
    """Returns a letter for each streamed block: d for device memory, h for host memory."""
    return "".join("hd"[one.stored.memory.is_on_device] for one in offloaded._away)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_outputs_in_every_order(device: Device, tier: dict[str, Any], slots: int, seed: int) -> None:  # noqa: F811
    """Outputs are right in every order of the blocks, and only blocks in host memory are copied. `close` restores every
    byte."""
    model, dice = Model(), random.Random(seed)
    reference = copy.deepcopy(model)
    with ow.offload(model, "cpu", slots=slots) as offloaded:
        on_device = [one.stored.memory.address for one in offloaded._away if one.stored.memory.is_on_device]
        assert len(on_device) == (5 if tier["where"] == "device" else 2)
        for _ in range(8):
            model.order = reference.order = [dice.randrange(5) for _ in range(dice.randrange(1, 7))]
            assert torch.equal(outputs(model), outputs(reference))
        assert bool(device.staged) == (tier["where"] == "auto")
        assert not any(device.was_copied(address) for address in on_device)
        assert not set(device.decoded).isdisjoint(on_device)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_streams_threads_and_errors(device: Device, tier: dict[str, Any], seed: int) -> None:  # noqa: F811
    """The tests of dtypes, threads and errors (from a block, Ctrl-C or the driver) also pass in each tier."""
    tests: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        *((streams.test_every_dtype, (dtype, seed)) for dtype in (torch.float16, torch.float32, *BYTES)),
        *((streams.test_errors_in_the_middle_of_a_pass, (error,)) for error in (ValueError, KeyboardInterrupt)),
        (streams.test_threads_on_separate_streams, ()),
        (streams.test_a_block_can_return_a_part_of_its_weights, ()),
    ]
    for test, arguments in tests:
        device.read.clear()  # this test may get memory at the same addresses as the previous one
        device.staged.clear()
        test(device, *arguments)


def test_using_an_offloaded_parameter_raises_an_error_with_its_name(tier: dict[str, Any]) -> None:
    """The tests of offloaded parameters, pickles, copies and compiled blocks also pass in each tier."""
    base.test_using_an_offloaded_parameter_raises_an_error_with_its_name()
    base.test_offloaded_models_are_not_pickled_or_copied()
    base.test_compiled_blocks_work()
    base.test_a_model_stays_trainable_after_offload_in_inference_mode()


@pytest.mark.parametrize("how", [*escapes.HOLDING, *escapes.CHANGES])
def test_blocks_that_keep_or_change_their_weights(tier: dict[str, Any], how: str) -> None:
    """Outputs and weights match the resident model's if a block keeps or changes its weights."""
    if how in escapes.HOLDING:
        escapes.assert_as_resident(escapes.HOLDING[how], 2)
    if how in escapes.CHANGES:
        escapes.assert_as_resident(lambda block: (escapes.CHANGES[how](block), None)[1], 2)


@pytest.mark.parametrize("compress", [True, False])
def test_weights_come_from_a_file(tier: dict[str, Any], tmp_path: Path, compress: bool) -> None:
    """A model on meta gets its weights from a file, in each tier."""
    base.test_weights_come_from_a_file(tmp_path, compress)


def test_each_tier_is_reported() -> None:
    """Stored bytes are counted by tier, even with `keep`, and are 0 after `close`."""
    model = Model()
    with ow.offload(model, "cpu") as host:
        stored, nbytes = host.stored, host.nbytes
        assert host.stored_on_device == 0 and f"bytes in {stored} of host memory)" in repr(host)
    for room, letters in ((10**9, "ddddd"), (stored * 3 // 5 + 1000, "dhdhd"), (stored // 5 + 500, "hhdhh"), (9, "hhhhh")):
        with ow.offload(model, "cpu", where="auto", room=room) as both:
            assert tiers_of(both) == letters and both.stored + both.stored_on_device == stored
            assert both.stored_on_device <= room and both.nbytes == nbytes
        assert both.stored_on_device == both.stored == 0
    with ow.offload(model, "cpu", where="device", keep=150_000, max_memory=1) as kept:
        assert kept.kept and kept.stored == 0 and 0 < kept.stored_on_device < stored
        assert repr(kept) == f"Offloaded(3 blocks, {kept.nbytes} bytes in {kept.stored_on_device} of device memory)"
    with ow.offload(model, "cpu", where="auto", room=stored // 2) as both:
        assert f"{both.stored} of host memory and {both.stored_on_device} of device memory" in repr(both)


@pytest.mark.parametrize("rows", [[600, 61, 61, 61, 61], [61, 61, 600, 61, 61], [61, 9, 200, 33, 600]])
def test_a_block_that_is_larger_than_room(rows: list[int]) -> None:
    """Blocks that do not fit into `room` go to host memory, while smaller ones still go to the device."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Cast(torch.bfloat16, one) for one in rows)
    room = 3 * 61 * 53 * 2
    inputs = [torch.linspace(-1, 1, 2 * one).reshape(2, -1) for one in rows]
    expected = [layer(x) for layer, x in zip(model.layers, inputs, strict=True)]
    with ow.offload(model, "cpu", where="auto", room=room) as offloaded, torch.no_grad():
        assert tiers_of(offloaded)[rows.index(600)] == "h" and tiers_of(offloaded).count("d") >= 2
        assert 0 < offloaded.stored_on_device <= room
        for layer, x, y in zip(model.layers, inputs, expected, strict=True):
            assert torch.equal(layer(x), y)
    with pytest.raises(ow.OutOfMemoryError, match=r"more than room, 900 bytes .* block 'layers\.\d'.* where='device'"):
        ow.offload(model, "cpu", where="device", room=900)
    assert all(torch.equal(layer(x), y) for layer, x, y in zip(model.layers, inputs, expected, strict=True))


def device_with(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes device memory full after `count` blocks, so that the next block raises an out-of-memory error."""
    left = iter(range(count))
    empty = torch.empty

    class Full(stored.DeviceMemory):
        def __init__(self, nbytes: int, cpu: torch.device) -> None:
            def fail(*args: Any, **options: Any) -> torch.Tensor:
                if next(left, None) is None:
                    raise torch.OutOfMemoryError("the fake device is full")
                return empty(*args, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "empty", fail)
                super().__init__(nbytes, cpu)

    monkeypatch.setattr(tiers, "DeviceMemory", Full)
    monkeypatch.setattr("overwire.frameworks.torch._free_memory", lambda name: (7, 9))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_device_that_is_full(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int  # noqa: F811
) -> None:
    """With where="device", the error names the tier and the block, and the model does not change. With where="auto",
    the offload logs one line and continues."""
    model = Model()
    expected = outputs(model)
    device_with(monkeypatch, count)
    with pytest.raises(ow.OutOfMemoryError, match=rf"full.* block 'layers\.{count}'.* where='device'") as caught:
        ow.offload(model, "cpu", where="device")
    assert caught.value.asked and caught.value.free == 7 and torch.equal(outputs(model), expected)
    device_with(monkeypatch, count)
    with caplog.at_level(logging.WARNING), ow.offload(model, "cpu", where="auto", room="1GB") as offloaded:
        assert tiers_of(offloaded) == "d" * count + "h" * (5 - count)
        assert torch.equal(outputs(model), expected)
    assert [f"of layers.{count}:" in record.getMessage() for record in caplog.records] == [True]


def test_close_on_a_full_device(tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` decodes on the CPU if the device has no memory for a slot. If `close` fails, it can be repeated."""
    model = Model()
    expected, before = outputs(model), [parameter.clone() for parameter in model.parameters()]
    offloaded = ow.offload(model, "cpu")
    assert torch.equal(outputs(model), expected)
    make, left = rings.Ring._make_slot, iter([False, False, True, False, True, False])

    def fail(ring: Any) -> Any:
        if next(left, True):
            return make(ring)
        raise ow.OutOfMemoryError("the device is full")

    monkeypatch.setattr(rings.Ring, "_make_slot", fail)
    with pytest.raises(ow.OutOfMemoryError):
        offloaded.close()
    offloaded.close()
    assert next(left, None) is None and all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("step", ["acquire", "_copy_to"])
def test_close_without_memory_for_a_decoded_block(
    tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """`close` decodes on the CPU if the device has no memory to decode a block or to copy its weights."""
    model = Model()
    before = [parameter.clone() for parameter in model.parameters()]
    offloaded = ow.offload(model, "cpu")
    place = rings.Ring if step == "acquire" else offloading
    work, left = getattr(place, step), iter([False])

    def fail(*args: Any) -> Any:
        if next(left, True):
            return work(*args)
        raise ow.OutOfMemoryError("the device is full")

    monkeypatch.setattr(place, step, fail)
    offloaded.close()
    assert next(left, None) is None and all(map(torch.equal, model.parameters(), before))


def test_an_error_without_restored_weights_has_the_handle(
    tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If weights cannot be restored after an error, the error carries the handle, which can restore them later."""
    model = Model()
    expected, before = outputs(model), [parameter.clone() for parameter in model.parameters()]

    def fail(*args: Any) -> Any:
        raise ow.OutOfMemoryError("there is no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="first") as caught:
        patch.setattr(offloading, "_decode_block", fail)
        patch.setattr(offloading.Offloaded, "_run_by", lambda *_: exec("raise RuntimeError('first')"))
        ow.offload(model, "cpu")
    assert "there is no memory" in caught.value.__dict__["__notes__"][0]
    with pytest.raises(ow.ArgumentError, match="already offloaded"):
        ow.offload(model, "cpu")
    caught.value.__dict__["offloaded"].close()
    assert torch.equal(outputs(model), expected) and all(map(torch.equal, model.parameters(), before))


def test_the_default_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default `room` is the memory that will be free, minus the slots, two more blocks and a fifth of the GPU's
    memory. A larger `room` is reduced to this."""
    gpu, blocks = torch.device("cuda", 0), base.Model(3)
    found = tiers.Block("a", blocks, [cutting.Weight("w", torch.nn.Parameter(torch.empty(250)), torch.device("cpu"))])
    free: list[Any] = [20_000, 40_000]
    monkeypatch.setattr(tiers, "_free_memory", lambda name: tuple(free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: 500)
    assert tiers._room_on(gpu, [found], 2, 0) == 20_200 - 4 * 1000 - 8000
    assert tiers._room_on(gpu, [found], 2, 99_999) == 20_200 - 4 * 1000
    assert tiers._room_on(gpu, [found], 3, 77) == 77
    at_home = found._replace(weights=[found.weights[0]._replace(device=gpu)])
    assert tiers._room_on(gpu, [at_home], 2, 0) == 20_200 + 1000 - 4 * 1000 - 8000
    free[:] = [3_000, 40_000]
    assert tiers._room_on(gpu, [found], 2, 0) == tiers._room_on(gpu, [found], 2, 500) == 0
    assert tiers._room_on(torch.device("cpu"), [found], 2, 0) == 0
    with ow.offload(blocks, "cpu", where="auto") as offloaded:
        assert tiers_of(offloaded) == "hhh"


WRONG: list[Callable[[], dict[str, Any]]] = [
    lambda: {"where": "disk"}, lambda: {"where": None}, lambda: {"where": "auto", "room": 0},
    lambda: {"where": "device", "room": "much"}, lambda: {"where": "auto", "room": -1},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(wrong: Callable[[], dict[str, Any]]) -> None:
    """The error for a wrong argument says which values are allowed, and the model does not change."""
    model = Model(2)
    with pytest.raises(ow.ArgumentError, match=r"expected ('host', 'device' or 'auto'|a number of bytes)"):
        ow.offload(model, "cpu", **wrong())
    for room in ("1GB", 5):
        with pytest.raises(ow.ArgumentError, match="room .*needs where='device' or where='auto'"):
            ow.offload(model, "cpu", room=room)
    assert outputs(model).shape


def test_close_frees_each_block_that_it_restores(tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """When `close` has restored the weights of a block, it has already freed the block's stored bytes."""
    offloaded = ow.offload(Model(), "cpu")
    stored_bytes = [weakref.ref(one.stored.memory.tensor) for one in offloaded._away]
    decode, left = offloading._decode_block, []

    def decode_block(*args: Any) -> Any:
        left.append(sum(one() is not None for one in stored_bytes))
        return decode(*args)

    monkeypatch.setattr(offloading, "_decode_block", decode_block)
    offloaded.close()
    assert left == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("compress", [True, False])
def test_a_plan_gives_the_bytes_and_the_cost_of_each_tier(tmp_path: Path, compress: bool) -> None:
    """For each tier, a plan gives at least as many bytes as an offload uses. `tier_for` returns the fastest tier that
    fits."""
    model = Model(8, 256)
    ow.save_model(model, tmp_path / "m.safetensors", compress=compress)
    plan = ow.plan(tmp_path / "m.safetensors")
    assert plan.offload is None and [tier.where for tier in plan.tiers] == ["resident", "device", "host"]
    resident, there, host = plan.tiers
    assert resident.device == plan.nbytes and "2 to 3 times" in there.cost and "copies" in host.cost
    assert "group=" in host.group and not resident.group and not there.group
    assert (there.device < resident.device) == compress and host.device < resident.device
    with ow.offload(model, "cpu", where="device", source=tmp_path / "m.safetensors") as offloaded:
        rest = resident.device - offloaded.nbytes
        assert not compress or offloaded.stored_on_device <= (there.device - rest - offloaded.ring)
    for tier in plan.tiers if compress else (resident, host):
        assert plan.tier_for(tier.device) == tier and plan.tier_for(tier.device - 1) != tier
    assert plan.tier_for(1) is None and plan.tier_for("1TB") == resident
    ow.save_file({"a": torch.zeros(9)}, tmp_path / "flat.safetensors")
    assert [tier.where for tier in ow.plan(tmp_path / "flat.safetensors").tiers] == ["resident"]
    with pytest.raises(ow.ArgumentError, match="room"):
        plan.tier_for("much")
