"""Tests that a model gives the same outputs while the blocks that are not running are offloaded."""

from __future__ import annotations

import copy
import io
import pickle
import sys
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
    """A model of identical blocks that run in a given order."""

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
    """Fills a slot with 0xff after its block has run and before it gets other weights, so that reading it then gives
    wrong outputs."""
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


BYTES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


class Cast(torch.nn.Module):
    """A block that casts its weights before it uses them, because matrix products do not support their dtype."""

    def __init__(self, dtype: torch.dtype, rows: int = 61) -> None:
        super().__init__()
        values = torch.randn(rows, 53, generator=torch.Generator().manual_seed(rows)).mul(9)
        self.weight = torch.nn.Parameter(values.clamp(-127, 127).to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ self.weight.float()).sum(1, keepdim=True) * x


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("source", [None, "plain", "compressed"])
def test_weights_of_a_byte(dtype: torch.dtype, source: str | None, tmp_path: Path) -> None:
    """fp8 and int8 weights of odd sizes, from the model or a file, work in every order of the blocks. `close` restores
    every byte."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Cast(dtype) for _ in range(5))
    x = torch.linspace(-1, 1, 3 * 61).reshape(3, 61)
    before = [layer.weight.view(torch.uint8).clone() for layer in model.layers]
    expected = [layer(x) for layer in model.layers]
    if source is not None:
        ow.save_model(model, tmp_path / "m.safetensors", compress=source == "compressed")
        for layer in model.layers:
            layer.weight.data = torch.zeros_like(layer.weight)
    with ow.offload(model, "cpu", source=source and tmp_path / "m.safetensors"), torch.no_grad():
        for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3]):
            assert all(torch.equal(model.layers[at](x), expected[at]) for at in order)
    after = [layer.weight.view(torch.uint8) for layer in model.layers]
    assert all(map(torch.equal, after, before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("keep", [None, 150_000, "1GB"])
def test_outputs_equal_the_resident_models(dtype: torch.dtype, keep: int | str | None) -> None:
    """Outputs are the same bit for bit in any order of the blocks, even if blocks are skipped or repeated. `close`
    restores all bytes."""
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


def test_using_an_offloaded_parameter_raises_an_error_with_its_name() -> None:
    """An offloaded parameter keeps its metadata. Reading, writing or saving it raises an error that names it."""
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


def test_offloaded_models_are_not_pickled_or_copied() -> None:
    """An offloaded model and its handle cannot be pickled or copied, even if all blocks stay on the device."""
    model = Model()
    with ow.offload(model, "cpu") as offloaded:
        for use in (pickle.dumps, copy.deepcopy, lambda one: torch.save(one, io.BytesIO())):
            for one in (model, model.layers[2], offloaded):
                with pytest.raises(ow.NotSupportedError, match=r"offload: .* offloaded"):
                    use(one)
    with ow.offload(model, "cpu", keep="1GB") as offloaded, pytest.raises(ow.NotSupportedError, match="cannot be pickled"):
        pickle.dumps(offloaded)
    assert torch.equal(outputs(pickle.loads(pickle.dumps(model))), outputs(model))


def test_compiled_blocks_work() -> None:
    """Blocks work if they are compiled before or after offloading, and so do their hooks."""
    model = Model(3)
    reference = outputs(model)
    model.layers[0].compile(backend="eager")
    with ow.offload(model, "cpu"):
        model.layers[1].compile(backend="eager")
        for _ in range(3):
            assert torch.equal(outputs(model), reference)


def test_only_programs_that_compile_import_the_compiler(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiled blocks, torch._dynamo is not imported. If it is imported later, hooks are still not compiled."""
    model = Model(3)
    reference = outputs(model)
    with ow.offload(model, "cpu"):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch._dynamo", raising=False)
            outputs(model)
        graphs: list[Any] = []
        model.layers[1].compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
        for _ in range(3):
            assert torch.equal(outputs(model), reference)
    assert graphs and not any("_before_run" in graph.code for graph in graphs)
    script("""import overwire, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
with torch.inference_mode(), overwire.offload(model, "cpu", blocks=model):
    model(torch.ones(3))
assert "torch._dynamo" not in sys.modules
""")


def test_gradients_and_wrong_arguments_are_refused_before_any_change() -> None:
    """A model that needs gradients and wrong arguments are refused before the model changes."""
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
    """After an error or Ctrl-C in a block, the next pass gives right outputs and `close` works."""
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
            assert "offloaded" in repr(model.layers[at].up.weight)  # the failed run has released its slot
    offloaded.close()
    offloaded.close()
    assert torch.equal(outputs(model), reference)


def test_three_threads_run_the_model() -> None:
    """Three threads run the model at the same time with one to three slots."""
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
    """A model that is on the meta device or has other values gets its weights from a file. A file that lacks weights is
    refused."""
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
    """All models of a pipeline are streamed through one ring of slots. A model without module lists stays on the
    device."""

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
    with pytest.raises(ow.ArgumentError, match="a single model"):
        ow.offload(pipeline, "cpu", blocks=["text"])


def test_large_blocks_are_divided_into_their_lists() -> None:
    """A block with more than a sixteenth of the model is divided if nearly all of it is in module lists. Otherwise it
    stays one block."""
    stage = torch.nn.Module()
    stage.blocks = torch.nn.ModuleList(Layer(96, torch.float32) for _ in range(3))
    mixed = torch.nn.Module()
    mixed.main, mixed.net = Layer(96, torch.float32), torch.nn.ModuleList([torch.nn.Linear(96, 96)])
    model = torch.nn.Module()
    model.stages = torch.nn.ModuleList([stage, mixed])
    with ow.offload(model, "cpu") as offloaded:
        assert offloaded.blocks == ["stages.0.blocks.0", "stages.0.blocks.1", "stages.0.blocks.2", "stages.1"]


@pytest.mark.parametrize("keep", [0, 150_000, "1GB"])
@pytest.mark.parametrize("compress", [True, False])
def test_a_plan_lists_kept_and_streamed_blocks(tmp_path: Path, keep: int | str, compress: bool) -> None:
    """From tensor names, a plan finds the same blocks and bytes as `offload` does, even for nested lists and tied
    weights."""
    nested = torch.nn.Module()
    nested.stages = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for stage in nested.stages:
        stage.blocks = torch.nn.ModuleList(Layer(64, torch.float32) for _ in range(3))
        stage.norm = torch.nn.LayerNorm(64)
    for number, model in enumerate((Model(7), nested)):
        path = tmp_path / f"{number}.safetensors"
        ow.save_model(model, path, compress=compress)
        plan = ow.plan(path, keep=keep).offload
        with ow.offload(model, "cpu", keep=keep or None) as offloaded:
            assert plan.blocks == tuple(offloaded.blocks)
            # The file also contains the buffers of the blocks, which are not offloaded.
            buffers = (
                sum(buffer.nbytes for name, buffer in model.named_buffers() if name.startswith(plan.blocks))
                if plan.blocks
                else 0
            )
            assert plan.streamed - buffers == offloaded.nbytes
            assert plan.rest + plan.kept + plan.streamed == ow.plan(path).nbytes
            assert plan.device == plan.rest + plan.kept + plan.ring and (plan.stored <= plan.streamed)
    assert ow.plan(path).offload is None and "blocks of" in repr(ow.plan(path, keep=keep))
    with pytest.raises(ow.ArgumentError, match="keep"):
        ow.plan(path, keep="many")


def test_a_plan_counts_equal_blocks_separately(tmp_path: Path) -> None:
    """A file stores equal tensors once, but `offload` keeps each copy. The host memory in a plan includes all
    copies."""
    layer = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(copy.deepcopy(layer) for _ in range(5))
    ow.save_model(model, tmp_path / "m.safetensors")
    plan = ow.plan(tmp_path / "m.safetensors", keep=0)
    with ow.offload(model, "cpu") as offloaded:
        assert plan.offload.stored >= offloaded.stored > 2 * plan.stored


class Plain(torch.nn.Module):
    """A model with layers, a buffer that is not in the file, and tied first and last weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.arange(8.0) + 1, persistent=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.last = torch.nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


X = torch.linspace(-1, 1, 24).reshape(3, 8)


def to_meta(model: torch.nn.Module, buffers: bool) -> torch.nn.Module:
    meta = {}
    for part in model.modules():
        for name, value in part._parameters.items():
            part._parameters[name] = meta.setdefault(id(value), torch.nn.Parameter(value.to("meta")))
        if buffers:
            part._buffers.update({name: value.to("meta") for name, value in part._buffers.items()})
    return model


@pytest.mark.parametrize("compress", [True, False])
def test_a_model_on_meta_keeps_its_buffers_and_ties(tmp_path: Path, compress: bool) -> None:
    """In a model on the meta device, buffers that are not in the file keep their values, and tied weights stay tied."""
    model = Plain()
    ow.save_model(model, tmp_path / "m.safetensors", compress=compress)
    empty = to_meta(Plain(), buffers=False)
    with ow.offload(empty, "cpu", source=tmp_path / "m.safetensors"), torch.no_grad():
        assert torch.equal(empty(X), model(X))
        assert empty.last.weight is empty.first.weight


def test_a_source_without_values_for_meta_buffers_is_refused(tmp_path: Path) -> None:
    """A file is refused if it has no values for buffers that are on meta, or is larger than max_memory. The model stays
    on meta."""
    ow.save_model(Plain(), tmp_path / "m.safetensors")
    empty = to_meta(Plain(), buffers=True)
    with pytest.raises(ow.ModelMismatchError, match="lacks 1 weights of the model: scale"):
        ow.offload(empty, "cpu", source=tmp_path / "m.safetensors")
    empty = to_meta(Plain(), buffers=False)
    before = list(empty.parameters())
    with pytest.raises(ow.OutOfMemoryError):
        ow.offload(empty, "cpu", source=tmp_path / "m.safetensors", max_memory=100)
    assert all(now is then and now.is_meta for now, then in zip(empty.parameters(), before, strict=True))


def test_blocks_that_share_modules() -> None:
    """A layer that is in a list twice counts as one block. Weights that several blocks share stay on the device."""
    model = Plain()
    layer = torch.nn.Sequential(model.layers[0], torch.nn.ReLU(), model.layers[1])
    other = torch.nn.Sequential(model.layers[2], layer[1], model.layers[1])
    model.layers = torch.nn.ModuleList([layer, other, layer])
    with torch.no_grad():
        expected = model(X)
        with ow.offload(model, "cpu", blocks=["layers"]) as offloaded:
            assert torch.equal(model(X), expected)
            assert offloaded.blocks == ["layers.0", "layers.1"]
            assert layer[2].weight.sum() == other[2].weight.sum()
    with pytest.raises(ow.ArgumentError, match=r"'layers.0.0' is part of block 'layers.0'"):
        ow.offload(model, "cpu", blocks=["layers.0", "layers.0.0"])
    with pytest.raises(ow.ArgumentError, match="expected modules or their names"):
        ow.offload(model, "cpu", blocks="layers")


def test_memory_that_was_freed_is_refused() -> None:
    """A sleeping model cannot be offloaded."""
    model = Plain()
    with ow.sleep(model), pytest.raises(ow.ArgumentError, match="its memory was freed"):
        ow.offload(model, "cpu")


class Shows(torch.nn.Module):
    """Returns a dict with a list of results and part of its weight, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(8), requires_grad=False)

    def forward(self, x: list[torch.Tensor]) -> dict[str, Any]:
        return {"x": [x[0] * self.weight[0]], "weight": self.weight[0]}


def test_nested_outputs_with_parts_of_weights() -> None:
    """Part of the weights in a nested output keeps its values later. A forward with gradients is refused."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Shows() for _ in range(3))
    with ow.offload(model, "cpu"):
        with torch.no_grad():
            rows = [layer([X])["weight"] for _ in range(3) for layer in model.layers]
            assert all(torch.equal(row, torch.eye(8)[0]) for row in rows)
        with pytest.raises(ow.NotSupportedError, match="a forward with gradients"):
            model.layers[0]([X.clone().requires_grad_()])


def test_a_model_stays_trainable_after_offload_in_inference_mode() -> None:
    """A model that was offloaded within inference mode is trainable afterwards."""
    model = Plain()
    with torch.inference_mode(), ow.offload(model, "cpu"):
        model(X)
    model(X).sum().backward()
    with torch.inference_mode():
        made_there = Plain()
    with torch.no_grad(), pytest.raises(ow.NotSupportedError, match="created in inference mode"):
        ow.offload(made_there, "cpu")
    with torch.inference_mode(), ow.offload(made_there, "cpu"):
        assert torch.equal(made_there(X), model(X))
    assert all(parameter.is_inference() for parameter in made_there.parameters())


def test_threads_that_wait_for_each_others_slots_end() -> None:
    """If each of two threads occupies one of two slots and calls another block, one thread gets an error instead of
    waiting forever."""
    barrier = threading.Barrier(2)

    class Caller(torch.nn.Linear):
        inner: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.inner:
                barrier.wait(10)
                return self.inner[0](super().forward(x))
            return super().forward(x)

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Caller(8, 8) for _ in range(4))
    model.layers[0].inner, model.layers[1].inner = [model.layers[2]], [model.layers[3]]
    results: list[Any] = []

    def run(at: int) -> None:
        try:
            with torch.no_grad():
                results.append(model.layers[at](X).shape)
        except ow.NotSupportedError as error:
            results.append(str(error))

    with ow.offload(model, "cpu"):
        threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(isinstance(one, str) for one in results) == [False, True]


def test_an_interrupt_at_any_step_leaves_a_parameter_whole() -> None:
    """At whichever bytecode Ctrl-C arrives while a parameter is offloaded or restored, the next try completes the
    work."""
    import sys

    from overwire.offloading import away

    memory = torch.arange(4.0)

    def interrupted(at: int, work: Any, *args: Any) -> None:
        steps = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal steps
            if frame.f_code in (away.bring.__code__, away.send_away.__code__):
                frame.f_trace_opcodes = True
                if event == "opcode":
                    steps += 1
                    if steps == at:
                        raise KeyboardInterrupt
                return trace
            return None

        sys.settrace(trace)
        try:
            work(*args)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)

    for at in range(1, 60):
        parameter = torch.nn.Parameter(memory.clone())
        record = away.record_of(parameter, "p", torch.device("cpu"))
        interrupted(at, away.send_away, parameter, record)
        away.send_away(parameter, record)
        assert away.is_away(parameter) and isinstance(parameter, torch.nn.Parameter)
        interrupted(at, away.bring, parameter, memory)
        if away.is_away(parameter):
            away.bring(parameter, memory)
        assert type(parameter) is torch.nn.Parameter and torch.equal(parameter, memory)


def test_a_frame_shows_whether_its_run_has_ended() -> None:
    """`_has_ended` returns whether the run of a frame has ended, on any thread."""
    import sys

    frames: list[Any] = []
    waiting, go_on = threading.Event(), threading.Event()

    def run() -> None:
        frames.append(sys._getframe())
        waiting.set()
        go_on.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    waiting.wait(20)
    assert not rings._has_ended(frames[0]) and not rings._has_ended(sys._getframe())
    go_on.set()
    thread.join()
    assert rings._has_ended(frames[0])


def test_unsupported_models_are_refused_and_repr_shows_the_state() -> None:
    """Offloading is refused for a model that is already offloaded or was compiled as a whole, and for a missing device.
    `repr` shows whether a handle is open."""
    model = Model()
    with ow.offload(model, "cpu", keep="1GB") as whole:
        assert "0 blocks" in repr(whole)
    assert repr(whole) == "Offloaded(closed)" and whole.blocks == []
    with ow.offload(model, "cpu"), pytest.raises(ow.ArgumentError, match="already"):
        ow.offload(model, "cpu")
    if not torch.cuda.is_available():
        with pytest.raises((ow.DeviceError, ow.NotFoundError, ow.NotSupportedError)):
            ow.offload(model, "cuda")
    model._compiled_call_impl = lambda *_: None  # Module.compile leaves such an attribute
    with pytest.raises(ow.NotSupportedError, match="compiled"):
        ow.offload(model, "cpu")
