"""Tests that a model has the same outputs when it is offloaded from a GPU as when it is resident. Slots are poisoned
after use."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import overwire as ow
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch sees", allow_module_level=True)

from overwire import gpu  # noqa: E402
from overwire._compat_api import stream_blocks  # noqa: E402
from overwire.offloading import ring as rings  # noqa: E402
from test_offload import BYTES, Cast, Model  # noqa: E402

IDS = torch.arange(14, device="cuda").reshape(2, 7)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills each slot with 0xff after its block has run, so that a late read gives wrong outputs."""
    release = rings.Ring.release

    def poison(self: Any, at: int) -> bool:
        slot = self._slot_of(at)
        last = release(self, at)
        if last:
            slot.memory.fill_(255)
            slot.readers.append(torch.cuda.current_stream().record_event())
            slot.block = None
        return last

    monkeypatch.setattr(rings.Ring, "release", poison)


@torch.inference_mode()
def outputs(model: Any) -> Any:
    return model(IDS).clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_outputs_equal_the_resident_models(poisoned: None, dtype: Any, home: str, slots: int) -> None:
    """Outputs match the resident model's in every order of the blocks, for a model on the CPU or on the GPU. `close`
    restores every byte on the device that the model was on."""
    reference = Model(7, 512, dtype).cuda()
    model = copy.deepcopy(reference).to(home)
    with ow.offload(model, "cuda", slots=slots, keep=1 << 20):
        for order in (range(7), range(7), [6, 3, 0], [1, 1, 5, 1], range(7)):
            model.order = reference.order = list(order)
            assert torch.equal(outputs(model), outputs(reference))
    assert next(model.parameters()).device.type == home
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.cuda(), theirs)


@pytest.mark.parametrize("dtype", [*DTYPES, *BYTES], ids=str)
@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("where", ["device", "auto"])
def test_blocks_stay_compressed_on_the_device(poisoned: None, dtype: Any, home: str, where: Any) -> None:
    """Outputs match the resident model's, the offload reports the device memory that it uses, and `close` restores
    every byte."""
    reference = torch.nn.Module()
    reference.layers = torch.nn.ModuleList(Cast(dtype, rows) for rows in (900, 61, 3, 900, 900, 2000))
    reference.cuda()
    inputs = [torch.randn(2, len(layer.weight), device="cuda") for layer in reference.layers]
    model = copy.deepcopy(reference).to(home)
    room = 150_000 if where == "auto" else None
    with ow.offload(model, "cuda", where=where, room=room) as offloaded, torch.no_grad():
        on_device = [one.stored.memory for one in offloaded._away if one.stored.memory.is_on_device]
        assert offloaded.stored_on_device == sum(one.nbytes for one in on_device) and len(on_device) >= 2
        assert (offloaded.stored == 0) == (where == "device") and all(one.tensor.is_cuda for one in on_device)
        for at in [*range(6), *range(6), 5, 1, 1, 4, 0, 5]:
            assert torch.equal(model.layers[at](inputs[at]), reference.layers[at](inputs[at]))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.device.type == home and torch.equal(ours.cuda(), theirs)


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_device_that_is_full(home: str) -> None:
    """The error names the tier and the block, and every weight is restored. With the host tier, the model fits."""
    model = Model(12, 2048).to(home)
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    torch.cuda.empty_cache()
    # Leaves room to encode one block of 33.6 MB, but not to store twelve.
    limit = torch.cuda.memory_reserved() + (180 << 20 if home == "cpu" else 360 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        if home == "cpu":
            with pytest.raises(ow.OutOfMemoryError, match=r"block 'layers\.\d+' was compressed, with where='device'"):
                ow.offload(model, "cuda", where="device")
            assert all(map(torch.equal, model.parameters(), before))
        with ow.offload(model, "cuda", where="device" if home == "cuda" else "host") as offloaded:
            assert (offloaded.stored_on_device > 0) == (home == "cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_weights_of_a_byte(poisoned: None, dtype: Any) -> None:
    """Models with fp8 and int8 weights give the right outputs when the order of the blocks changes."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Cast(dtype) for _ in range(5))
    model.cuda()
    x = torch.randn(3, 61, device="cuda")
    expected = [layer(x) for layer in model.layers]
    with ow.offload(model, "cuda"), torch.no_grad():
        for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1, 1, 3]):
            assert all(torch.equal(model.layers[at](x), expected[at]) for at in order)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_in_the_middle_of_a_pass(poisoned: None, error: type[BaseException]) -> None:
    """After an error or Ctrl-C in any block, the next pass gives right outputs."""
    model = Model(6, 256).cuda()
    reference = outputs(model)
    with ow.offload(model, "cuda"):
        for at in range(6):

            def fail(*_: Any) -> None:
                raise error

            hook = model.layers[at].up.register_forward_hook(fail)
            with pytest.raises(error):
                outputs(model)
            hook.remove()
            assert torch.equal(outputs(model), reference)


@pytest.mark.parametrize("compress", [True, False])
def test_weights_come_from_a_file(poisoned: None, compress: bool, tmp_path: Any) -> None:
    """A model on the meta device gets its weights from a file. `close` puts the weights into CPU memory."""
    model = Model(5, 512)
    ow.save_model(model, tmp_path / "m.safetensors", compress=compress)
    with torch.device("meta"):
        empty = Model(5, 512)
    empty.head.weight = empty.embed.weight
    empty.order = list(range(5))
    reference = outputs(model.cuda())
    with ow.offload(empty, "cuda", source=tmp_path / "m.safetensors") as offloaded:
        for _ in range(3):
            assert torch.equal(outputs(empty), reference)
        assert offloaded.stored < offloaded.nbytes
    assert all(parameter.device.type == "cpu" for parameter in empty.parameters())
    assert torch.equal(outputs(empty.cuda()), reference)


def test_stream_blocks_moves_only_requested_tensors(poisoned: None) -> None:
    """`stream_blocks` streams layers from CPU memory, but only the requested tensors of each layer."""
    model = Model(5, 512)
    reference = outputs(copy.deepcopy(model).cuda())
    for part in (model.embed, model.head):
        part.cuda()
    model.layers.register_buffer("table", torch.ones(3), persistent=False)
    moved = [*model.layers.parameters(), *(layer.scale for layer in model.layers)]
    offloaded = stream_blocks(model, torch.device("cuda", 0), list(model.layers), moved, 1 << 20)
    assert 0 < len(offloaded.blocks) <= 5
    for _ in range(3):
        assert torch.equal(outputs(model), reference)
    assert model.layers.table.device.type == "cpu"
    offloaded.close()
    assert all(parameter.device.type == "cpu" for parameter in model.layers.parameters())


def test_a_block_can_return_a_part_of_its_weights(poisoned: None) -> None:
    """If a block returns part of its weights, this part moves to other memory with its values before the slot is
    reused."""

    class Row(torch.nn.Module):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((256, 1024), float(at), device="cuda"), requires_grad=False)

        def forward(self) -> Any:
            return {"row": self.weight[3]}

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Row(at) for at in range(5))
    with ow.offload(model, "cuda"), torch.no_grad():
        rows = [(at, layer()["row"]) for _ in range(4) for at, layer in enumerate(model.layers)]
        assert all(bool((row == at).all()) for at, row in rows)


class Keeps(torch.nn.Module):
    """A block that applies `act` to itself unless it already keeps something, and adds what it keeps to its output."""

    def __init__(self, at: int) -> None:
        super().__init__()
        values = torch.randn(256, 256, generator=torch.Generator().manual_seed(at))
        self.weight = torch.nn.Parameter(values.cuda(), requires_grad=False)
        self.act: Any = None
        self.kept: Any = None

    def forward(self, x: Any) -> Any:
        if self.kept is None and self.act is not None:
            self.kept = self.act(self)
        return torch.tanh(x @ self.weight) + (0 if self.kept is None else self.kept.sum())


ACTS = {
    "a view": lambda block: block.weight.t(),
    "data": lambda block: block.weight.data[3],
    "DLPack": lambda block: torch.from_dlpack(block.weight),
    "mul_": lambda block: (block.weight.mul_(1.5), None)[1],
    "data.mul_": lambda block: (block.weight.data.mul_(1.5), None)[1],
    "other data": lambda block: setattr(block.weight, "data", block.weight.data * 1.5),
}


@pytest.mark.parametrize("how", ACTS)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_blocks_that_keep_or_change_their_weights(poisoned: None, how: str, slots: int) -> None:
    """Outputs and weights match the resident model's. Memory that a block no longer keeps is freed."""
    x = torch.ones(3, 256, device="cuda")

    @torch.no_grad()
    def run(model: Any) -> list[Any]:
        out, y = [], x
        for act in (ACTS[how], ACTS[how], None, None):
            for block in model.layers:
                block.act, block.kept = act, block.kept if act is not None else None
                y = block(y)
            out.append(y)
        return out

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Keeps(at) for at in range(6))
    resident = copy.deepcopy(model)
    expected = run(resident)
    with ow.offload(model, "cuda", slots=slots):
        assert all(map(torch.equal, run(model), expected))
        assert ("offloaded" in repr(model.layers[0].weight)) == (how in ("a view", "data", "DLPack"))
    for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_runs_within_enable_grad(poisoned: None) -> None:
    """If autograd saved weights, they are right in a later backward pass."""

    def run(model: Any) -> list[Any]:
        inputs = []
        for block in model.layers:
            with torch.no_grad(), torch.enable_grad():
                inputs.append(torch.ones(3, 256, device="cuda", requires_grad=True))
            block.act = torch.enable_grad()(lambda block, one=inputs[-1]: torch.tanh(one @ block.weight).sum())
        with torch.no_grad():
            for block in model.layers:
                block(torch.ones(3, 256, device="cuda"))
        return [torch.autograd.grad(block.kept, one)[0] for block, one in zip(model.layers, inputs, strict=True)]

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Keeps(at) for at in range(5))
    expected = run(copy.deepcopy(model))
    with ow.offload(model, "cuda"):
        assert all(map(torch.equal, run(model), expected))


@pytest.mark.parametrize("how", ["cpu_offload", "dispatch_model"])
def test_weights_that_accelerate_offloads_are_streamed(poisoned: None, how: str) -> None:
    """With the patch, weights that accelerate offloads to the CPU are streamed. Outputs match the resident model's,
    tensors are on meta between runs, and accelerate's weights map has every weight."""
    accelerate = pytest.importorskip("accelerate")
    reference = Model(7, 512).cuda()
    model = copy.deepcopy(reference).cpu()
    where: dict[str, Any] = {"embed": 0, "head": 0} | {f"layers.{at}": "cpu" if at % 3 else 0 for at in range(7)}
    with ow.patch_safetensors(offload=True):
        model = accelerate.cpu_offload(model, 0) if how == "cpu_offload" else accelerate.dispatch_model(model, where)
    assert type(model.layers[1].up._hf_hook).__name__ == "Streamed"
    for order in (range(7), range(7), [6, 3, 0], [1, 1, 5, 1], range(7)):
        model.order = reference.order = list(order)
        assert torch.equal(outputs(model), outputs(reference))
        assert model.state_dict()["layers.1.up.weight"].is_meta
    with accelerate.utils.align_module_device(model.layers[1].up, "cpu"):
        assert torch.equal(model.layers[1].up.weight, reference.layers[1].up.weight.cpu())
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(outputs(model.cuda()), outputs(reference))


@pytest.mark.parametrize("where", ["host", "device"])
def test_threads_on_separate_streams(where: Any) -> None:
    """Four threads can run one model at the same time, each on its own stream."""
    model = Model(6, 256).cuda()
    reference = outputs(model)
    with ow.offload(model, "cuda", slots=2, where=where):
        right: list[bool] = []

        def run() -> None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                right.extend(torch.equal(outputs(model), reference) for _ in range(25))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert right == [True] * 100


def test_captures_are_refused_and_compiled_blocks_work() -> None:
    """A capture is refused, because a CUDA graph cannot contain streamed weights. Compiled blocks work."""
    model = Model(4, 256).cuda()
    reference = outputs(model)
    with ow.offload(model, "cuda"):
        outputs(model)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ow.NotSupportedError, match="CUDA graph"), torch.cuda.graph(graph):
            outputs(model)
        assert torch.equal(outputs(model), reference)
        for layer in model.layers:
            layer.compile(backend="aot_eager")  # starts no worker processes
        for _ in range(3):
            assert (outputs(model).float() - reference.float()).abs().max() <= 0.05 * reference.float().abs().max()


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_damaged_block_does_not_run(where: Any) -> None:
    """If stored bytes of a block are damaged, the first pass raises an error before the block runs. When the bytes are
    restored, passes are right again."""
    model, runs = Model(3, 256).cuda(), list[int]()
    expected = outputs(model)
    model.layers[1].up.register_forward_pre_hook(lambda *_: runs.append(1))
    with ow.offload(model, "cuda", where=where) as offloaded:
        part = offloaded._away[1].stored.memory.tensor[64:4096]
        before = part.clone()
        part.fill_(255)
        torch.cuda.synchronize()
        with pytest.raises(ow.CorruptError):
            outputs(model)
        assert not runs
        part.copy_(before)
        assert torch.equal(outputs(model), expected)


@pytest.mark.parametrize("where", ["host", "device", "auto"])
def test_chunks_of_a_file_are_stored_as_they_are(where: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights from a compressed file are not encoded again, in any tier. A damaged chunk is found before the model
    runs."""
    reference, path = Model(7, 512).cuda(), tmp_path / "m.safetensors"
    ow.save_model(reference, path, compress=True)
    model = copy.deepcopy(reference).cpu()
    for parameter in model.parameters():
        parameter.data.zero_()

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a weight is encoded")

    monkeypatch.setattr(gpu, "encode", refuse)
    room = {"room": 4 << 20} if where == "auto" else {}
    with ow.offload(model, "cuda", where=where, source=path, **room):
        for _ in range(3):
            assert torch.equal(outputs(model), outputs(reference))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ow.CorruptError, match="m.safetensors"):
        ow.offload(model, "cuda", where=where, source=path, **room)


@torch.no_grad()
def test_graphs_of_layers_in_fixed_slots() -> None:
    """CUDA graphs of the code between overwire's operators can be replayed with the weights of every layer. Capturing
    an operator itself raises an error that names the layer."""
    reference = Model(7, 512).cuda()
    model = copy.deepcopy(reference).cpu()
    moved = [*model.parameters(), *model.buffers()]
    with stream_blocks(model, torch.device("cuda", 0), model.layers, moved, static=True) as offloaded:
        for _ in range(2):
            assert torch.equal(outputs(model), outputs(reference))
        whole = torch.cuda.CUDAGraph()
        with pytest.raises(ow.NotSupportedError, match=r"layers\.0: a CUDA graph"), torch.cuda.graph(whole):
            outputs(model)
        x = first = model.embed(IDS).clone()
        graphs = []
        for name, layer in zip(offloaded.blocks, model.layers, strict=True):
            torch.ops.overwire.next_block([x], name)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x = type(layer).forward(layer, x)
            graphs.append(graph)
        for shift in range(4):
            ids = IDS + shift
            first.copy_(model.embed(ids))
            for name, graph in zip(offloaded.blocks, graphs, strict=True):
                torch.ops.overwire.next_block([first], name)
                graph.replay()
            assert torch.equal(model.head(x), reference(ids))
