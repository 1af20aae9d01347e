"""Tests `patch_safetensors(offload=True)`, which streams weights that accelerate offloads to the CPU. All values must
be the same as with accelerate."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from overwire.offloading.hosted import Hosted
from test_offload import IDS, Layer, Model, outputs, slots_are_poisoned  # noqa: F401

accelerate = pytest.importorskip("accelerate")

from accelerate.hooks import remove_hook_from_submodules  # noqa: E402
from accelerate.utils import align_module_device  # noqa: E402
from accelerate.utils.modeling import get_state_dict_offloaded_model  # noqa: E402

# These tests run models on the CPU. For accelerate, this torch.device is a device to run on, while the string "cpu"
# means offloaded weights.
GPU = torch.device("cpu")
MAP = {"embed": GPU, "layers.0": GPU, "layers.1": "cpu", "layers.2": "cpu", "layers.3": GPU, "layers.4": "cpu", "head": GPU}


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Hosted]]:
    """Activates the patch, and lists the models that the patch takes over."""
    taken: list[Hosted] = []
    run = Hosted.run

    def noted(self: Hosted, slots: int = 2) -> None:
        taken.append(self)
        run(self, slots)

    monkeypatch.setattr(Hosted, "run", noted)
    with ow.patch_safetensors(offload=True):
        yield taken


def dispatched(model: Any, how: str) -> Any:
    if how == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device="cpu")
    return accelerate.dispatch_model(model, MAP)


@pytest.mark.parametrize("how", ["cpu_offload", "dispatch_model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outputs_and_states_equal_accelerates(hosted: list[Hosted], how: str, dtype: torch.dtype) -> None:
    """Outputs are right in every order of the blocks, and offloaded tensors are on meta between runs. State dicts have
    the same values as with accelerate, and removing the hooks restores every tensor."""
    reference = Model(dtype=dtype)
    model = dispatched(copy.deepcopy(reference), how)
    assert hosted[0].blocks == [f"layers.{at}" for at in (range(5) if how == "cpu_offload" else (1, 2, 4))]
    assert all(module._hf_hook.tied_params_map is None for name, module in model.named_modules() if name.endswith("2.up"))
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3, 1], [0, 1, 2, 3, 4]):
        model.order = reference.order = order
        assert torch.equal(outputs(model), outputs(reference))
        assert model.state_dict()["layers.2.up.weight"].is_meta and model.layers[4].down.bias.is_meta
    expected = reference.state_dict()
    for name, value in get_state_dict_offloaded_model(model).items():
        assert torch.equal(value, expected[name])
    with align_module_device(model.layers[1].up):
        assert torch.equal(model.layers[1].up.weight, expected["layers.1.up.weight"])
    with torch.inference_mode():
        assert torch.equal(model.layers[1].forward(reference.embed(IDS)), reference.layers[1](reference.embed(IDS)))
    remove_hook_from_submodules(model)
    assert torch.equal(outputs(model), outputs(reference))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


def test_gradients_equal_accelerates(hosted: list[Hosted]) -> None:
    """A forward with gradients runs through accelerate and warns. The next forward without gradients is streamed."""
    reference = Model(dtype=torch.float32)
    model = dispatched(copy.deepcopy(reference), "dispatch_model")
    x = torch.randn(2, 96, requires_grad=True)
    gradients = []
    for one in (model, reference):
        y = x
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for layer in one.layers:
                y = layer(y)
        assert any("a forward with gradients is not streamed" in str(w.message) for w in caught) == (one is model)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
        assert torch.equal(outputs(one), outputs(reference))
    assert torch.equal(*gradients)


def test_copies_and_errors_and_threads(hosted: list[Hosted]) -> None:
    """A deep copy loads its weights independently. After an error in a block, the next pass gives right outputs.
    Several threads can run one model."""
    reference = Model()
    model = dispatched(copy.deepcopy(reference), "dispatch_model")
    expected = outputs(reference)
    assert torch.equal(outputs(copy.deepcopy(model)), expected)
    for error in (ValueError, KeyboardInterrupt):

        def fail(*_: Any, error: type[BaseException] = error) -> None:
            raise error

        hook = model.layers[2].down.register_forward_hook(fail)
        with pytest.raises(error):
            outputs(model)
        hook.remove()
        assert torch.equal(outputs(model), expected)
        assert model.layers[2].up.weight.is_meta
    right: list[bool] = []
    threads = [
        threading.Thread(target=lambda: right.extend(torch.equal(outputs(model), expected) for _ in range(5)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 10


def test_accelerate_keeps_shared_and_unusual_weights(hosted: list[Hosted]) -> None:
    """Tied weights, a layer that belongs to two blocks, and strided weights are left to accelerate. Outputs are the
    same, even with empty weights and offloaded buffers."""

    def unusual() -> Model:
        model = Model(dtype=torch.float32)
        model.layers[3].up.weight = model.layers[1].up.weight
        model.layers[4].down = model.layers[0].down
        model.layers[2].norm.weight = torch.nn.Parameter(torch.arange(192.0)[::2])
        model.layers[2].none = torch.nn.Linear(3, 0)
        return model

    expected = outputs(unusual())
    for buffers in (False, True):
        streamed = accelerate.cpu_offload(unusual(), execution_device="cpu", offload_buffers=buffers)
        for _ in range(2):
            assert torch.equal(outputs(streamed), expected)
        names = set(hosted.pop()._places)
        assert "layers.2.up.weight" in names
        assert not names & {"layers.1.up.weight", "layers.3.up.weight", "layers.0.down.weight", "layers.2.norm.weight", "head.weight"}
    whole = accelerate.cpu_offload(unusual(), execution_device="cpu", preload_module_classes=["Layer"])
    assert torch.equal(outputs(whole), expected)


def test_without_the_option_accelerate_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option, the patch does not change how accelerate offloads. A model that the patch has taken over is
    still streamed after the patch has ended."""
    reference = Model()
    monkeypatch.setattr(Hosted, "add", None)
    with ow.patch_safetensors():
        assert torch.equal(outputs(dispatched(copy.deepcopy(reference), "dispatch_model")), outputs(reference))
    monkeypatch.undo()
    with ow.patch_safetensors(offload=True):
        model = dispatched(copy.deepcopy(reference), "dispatch_model")
    assert isinstance(model.layers[1], Layer) and type(model.layers[1].up._hf_hook).__name__ == "Streamed"
    assert torch.equal(outputs(model), outputs(reference))


def test_a_model_of_transformers(hosted: list[Hosted], tmp_path: Path) -> None:
    """A from_pretrained model with a device_map generates the same tokens, and save_pretrained writes every weight."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(4)
    reference = transformers.LlamaForCausalLM(config).bfloat16().eval()
    reference.save_pretrained(tmp_path / "model")
    where = {"model.embed_tokens": GPU, "model.rotary_emb": GPU, "model.norm": GPU, "lm_head": "cpu"}
    where |= {f"model.layers.{at}": "cpu" if at % 2 else GPU for at in range(4)}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=where, dtype="auto")
    assert hosted[0].blocks == ["model.layers.1", "model.layers.3", "lm_head"]
    ids = torch.arange(6)[None]
    for _ in range(2):
        tokens = [one.generate(ids, max_new_tokens=5, do_sample=False) for one in (model, reference)]
        assert torch.equal(*tokens)
    model.save_pretrained(tmp_path / "again")
    again = ow.load_file(tmp_path / "again" / "model.safetensors", framework="pt")
    for name, value in reference.state_dict().items():
        assert torch.equal(again[name], value)


class Keeps(Layer):
    """A layer that keeps part of its weights in its first run, or changes its weights."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__(width, dtype)
        self.act: Any = None
        self.kept: Any = None

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        if self.act is not None and not self.kept:
            self.kept = [one for one in [self.act(self)] if one is not None]
        return super().forward(x) + sum(torch.as_tensor(one).sum() for one in self.kept or ())


ACTS = {
    "a view": lambda layer: layer.up.weight[2],
    "the parameter": lambda layer: layer.up.weight,
    "numpy": lambda layer: layer.up.weight.detach().numpy(),
    "mul_": lambda layer: (layer.up.weight.mul_(1.5), None)[1],
    "data": lambda layer: (layer.up.weight.data.mul_(1.5), None)[1],
}


@pytest.mark.parametrize("how", ACTS)
def test_layers_that_keep_or_change_their_weights(hosted: list[Hosted], how: str) -> None:
    """Outputs and weights match the resident model's. A layer is offloaded again when the view that it kept is
    freed."""
    reference = Model(dtype=torch.float32)
    reference.layers = torch.nn.ModuleList(Keeps(96, torch.float32) for _ in range(5)).requires_grad_(False)
    model = dispatched(copy.deepcopy(reference), "dispatch_model")
    for one in (model, reference):
        for layer in one.layers:
            layer.act = ACTS[how]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3, 1], [0, 1, 2, 3, 4]):
        model.order = reference.order = order
        assert torch.equal(outputs(model), outputs(reference))
    with align_module_device(model.layers[2].up):
        assert torch.equal(model.layers[2].up.weight, reference.layers[2].up.weight)
    for layer in [*model.layers, *reference.layers]:
        layer.act = layer.kept = None
    for _ in range(2):
        assert torch.equal(outputs(model), outputs(reference))
    assert model.layers[2].up.weight.is_meta == (how not in ("mul_", "data"))
