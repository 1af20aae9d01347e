"""offload: a model's blocks are away while they do not run, and outputs are those of the resident model."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from overwire.offloading import ring as rings


class Layer(torch.nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width, dtype=dtype)
        self.down = torch.nn.Linear(2 * width, width, dtype=dtype)
        self.norm = torch.nn.LayerNorm(width, dtype=dtype)
        self.register_buffer("scale", torch.full((1,), 0.5, dtype=dtype))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Blocks that run once each, in an order that can be changed."""

    def __init__(self, count: int = 5, width: int = 96, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(50, width, dtype=dtype)
        self.layers = torch.nn.ModuleList(Layer(width, dtype) for _ in range(count))
        self.head = torch.nn.Linear(width, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.order = list(range(count))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for at in self.order:
            x = self.layers[at](x)
        return self.head(x)


IDS = torch.arange(14).reshape(2, 7)


@pytest.fixture(autouse=True)
def slots_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads a slot after its block, or before its bytes are there, reads 0xff."""
    release, fetch = rings.Ring.release, rings._HostCarrier.fetch

    def poison(self: Any, at: int) -> bool:
        slot = self._slot_of(at)
        last = release(self, at)
        if last:
            slot.memory.fill_(255)
            slot.block = None
        return last

    def poisoned_fetch(self: Any, block: Any, slot: Any) -> None:
        slot.memory.fill_(255)
        fetch(self, block, slot)

    monkeypatch.setattr(rings.Ring, "release", poison)
    monkeypatch.setattr(rings._HostCarrier, "fetch", poisoned_fetch)


@torch.inference_mode()
def outputs(model: torch.nn.Module) -> torch.Tensor:
    return model(IDS).clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("keep", [None, 150_000, "1GB"])
def test_outputs_are_those_of_the_resident_model(dtype: torch.dtype, keep: int | str | None) -> None:
    """Bit for bit, in every order of the blocks, skipped and run twice; close puts every byte back."""
    model = Model(dtype=dtype)
    reference = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    with ow.offload(model, "cpu", keep=keep) as offloaded:
        assert (offloaded.nbytes == 0) == (keep == "1GB")
        for order in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3, 1], [0, 1, 2, 3, 4]):
            model.order = reference.order = order
            assert torch.equal(outputs(model), outputs(reference))
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert ours is parameters[name] and torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert torch.equal(outputs(model), outputs(reference)) and model.head.weight is model.embed.weight


def test_a_parameter_that_is_away_says_so() -> None:
    """Metadata is answered; reading and writing names the parameter; nothing is saved of it."""
    model = Model()
    with ow.offload(model, "cpu"):
        weight = model.layers[1].up.weight
        assert weight.shape == (192, 96) and weight.dtype == torch.bfloat16 and weight.numel() == 192 * 96
        assert (
            isinstance(weight, torch.nn.Parameter)
            and "layers.1.up.weight" in repr(weight)
            and weight.device.type == "cpu"
        )
        for use in (
            lambda: weight + 1,
            lambda: weight.cpu(),
            model.state_dict,
            model.half,
            lambda: copy.deepcopy(model),
            weight.tolist,
            weight.data_ptr,
        ):
            with pytest.raises(ow.NotSupportedError, match=r"layers\.\d\.\w+\.\w+"):
                use()
        model.requires_grad_(False)
    assert not model.layers[1].up.weight.requires_grad


def test_gradients_and_what_is_wrong_are_refused_before_anything_changes() -> None:
    """Wrong arguments leave the model as it was."""
    model = Model()
    with ow.offload(model, "cpu"), pytest.raises(ow.NotSupportedError, match="gradients"):
        model(IDS)
    reference = outputs(model)
    for arguments in (
        {"blocks": [model]},
        {"blocks": ["no.such"]},
        {"blocks": [model.layers[0], model.layers[0].up]},
        {"slots": 0},
        {"keep": "many"},
    ):
        with pytest.raises(ow.ArgumentError):
            ow.offload(model, "cpu", **arguments)
    with pytest.raises(ow.ArgumentError, match="ModuleList"):
        ow.offload(torch.nn.Linear(3, 3), "cpu")
    with pytest.raises(ow.OutOfMemoryError):
        ow.offload(model, "cpu", max_memory=100_000)
    assert torch.equal(outputs(model), reference)


def test_an_error_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error, or Ctrl-C, in a block the next pass is right, and all can be closed."""
    model = Model()
    reference = outputs(model)
    offloaded = ow.offload(model, "cpu")
    for error in (ValueError, KeyboardInterrupt):
        for at in (0, 3):

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            hook = model.layers[at].up.register_forward_hook(fail)
            with pytest.raises(error):
                outputs(model)
            hook.remove()
            assert torch.equal(outputs(model), reference)
    offloaded.close()
    offloaded.close()
    assert torch.equal(outputs(model), reference)


def test_two_threads_run_the_model() -> None:
    """At the same time, with as many slots as threads, and with fewer."""
    model = Model()
    reference = outputs(model)
    for slots in (1, 2, 3):
        with ow.offload(model, "cpu", slots=slots):
            results: list[bool] = []

            def run() -> None:
                results.extend(torch.equal(outputs(model), reference) for _ in range(10))  # noqa: B023

            threads = [threading.Thread(target=run) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert results == [True] * 30


@pytest.mark.parametrize("compress", [True, False])
def test_weights_come_from_a_file(tmp_path: Path, compress: bool) -> None:
    """Of a model with other values, or on the meta device; a file that lacks weights is refused."""
    model = Model()
    reference = outputs(model)
    ow.save_model(model, tmp_path / "m.safetensors", compress=compress)
    with torch.device("meta"):
        empty = Model()
    empty.head.weight = empty.embed.weight
    other = Model()
    torch.nn.init.normal_(other.layers[2].up.weight)
    empty.tie_weights = lambda: setattr(empty.head, "weight", empty.embed.weight)
    for each in (other, empty):
        with ow.offload(each, "cpu", source=tmp_path / "m.safetensors"):
            for layer in each.layers:
                layer.scale.fill_(0.5)
            assert torch.equal(outputs(each), reference)
    bigger = Model(count=6)
    with pytest.raises(ow.ModelMismatchError, match=r"layers\.5"):
        ow.offload(bigger, "cpu", source=tmp_path / "m.safetensors")


def test_a_pipeline_of_models() -> None:
    """Each model of it is streamed, through one ring; one without lists of modules stays on the device."""

    class Pipeline:
        def __init__(self) -> None:
            self.components = {"text": Model(3), "vae": torch.nn.Linear(96, 96), "scheduler": object()}

    pipeline = Pipeline()
    text, vae = pipeline.components["text"], pipeline.components["vae"]
    reference = outputs(text)
    with ow.offload(pipeline, "cpu") as offloaded:
        assert offloaded.blocks == [f"text.layers.{at}" for at in range(3)]
        assert torch.equal(outputs(text), reference) and vae(torch.zeros(96)).shape == (96,)
    for wrong in (object(), Pipeline):
        with pytest.raises(ow.ArgumentError, match="pipeline"):
            ow.offload(wrong, "cpu")
    with pytest.raises(ow.ArgumentError, match="one model"):
        ow.offload(pipeline, "cpu", blocks=["text"])


def test_blocks_are_cut_where_lists_cover_them() -> None:
    """A block with more than a sixteenth of the model is cut where nearly all of it is in lists; others stay whole."""
    stage = torch.nn.Module()
    stage.blocks = torch.nn.ModuleList(Layer(96, torch.float32) for _ in range(3))
    mixed = torch.nn.Module()
    mixed.main, mixed.net = Layer(96, torch.float32), torch.nn.ModuleList([torch.nn.Linear(96, 96)])
    model = torch.nn.Module()
    model.stages = torch.nn.ModuleList([stage, mixed])
    with ow.offload(model, "cpu") as offloaded:
        assert offloaded.blocks == ["stages.0.blocks.0", "stages.0.blocks.1", "stages.0.blocks.2", "stages.1"]
