"""Tests pushes of weights from a trainer to running models, by files, stores and a process group.

tests/engines/engines_live.py pushes to vLLM's real code. These tests cover the functions that vLLM's workers use, and
the engine's calls with stand-ins for vLLM's modules.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import overwire
import pytest
import test_sglang
import test_vllm
import torch
import warm
from overwire.integrations.load_plan.update_weights import Incomplete, Places
from overwire.integrations.pushes import Group, Publisher

log = logging.getLogger("test")

LIMIT = 60 * warm.SLOWER  # seconds for all ranks to join a group

# Modules that the test folders share are in the parent folder.
SHARED = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}


class Fused(torch.nn.Module):
    """One rank's part of a model. One parameter has rows of q, k and v, another has half of the columns of o."""

    whole_o = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(96, 32, dtype=torch.bfloat16), requires_grad=False)
        self.o = torch.nn.Parameter(torch.zeros(32, 16, dtype=torch.bfloat16), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.calls = 0
        self.reads = False

    def load_weights(self, tensors: Any) -> None:
        self.calls += 1
        for name, tensor in tensors:
            if name in "qkv":
                at = "qkv".index(name) * 32
                self.qkv.data[at : at + 32].copy_(tensor * 1 if self.reads else tensor)
            elif name == "o":
                self.o.data.copy_(tensor if self.whole_o else tensor[:, 16:])
            elif name == "scale":
                self.scale.data.copy_(tensor)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        fused = torch.cat([tensors[name] for name in "qkv"])
        return torch.equal(self.qkv, fused) and torch.equal(self.o, tensors["o"][:, 16:])


def tensors(seed: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {**{name: torch.randn(32, 32, generator=made).bfloat16() for name in "qkvo"}, **more}


def places(model: Fused) -> Places:
    return Places(model, model.load_weights, "cpu", 1 << 20)


def test_pushes_are_loaded_in_place(tmp_path: Path) -> None:
    """The model's loader runs once for all pushes of the same tensors. It runs again for other tensors, and after the
    memory of a parameter has moved. Parameters keep their memory."""
    model, publisher = Fused(), Publisher(tmp_path / "pushes")
    into = places(model)
    at = model.qkv.data_ptr()
    calls = []
    for seed in range(6):
        if seed == 3:
            model.o = torch.nn.Parameter(torch.zeros(32, 16, dtype=torch.bfloat16), requires_grad=False)
        more = {"ignored": torch.ones(4, 4)} if seed > 3 else {}
        with publisher.push(tensors(seed, **more)) as push:
            assert push.info["number"] == seed + 1 and push.info["kind"] == "whole"
            assert into.load_whole(push.info["path"], None, log)
            push.carry()
        assert model.holds(tensors(seed)) and model.qkv.data_ptr() == at
        calls.append(model.calls)
    assert calls == [1, 1, 1, 2, 3, 3]
    assert len(list((tmp_path / "pushes").iterdir())) == 2
    publisher.close()


def test_a_number_is_loaded_by_each_push(tmp_path: Path) -> None:
    """If the loader computes with a value, the value is read again for each push."""
    model, publisher = Fused(), Publisher(tmp_path)
    into = places(model)
    for seed in range(3):
        with publisher.push(tensors(seed, scale=torch.tensor([float(seed)]))) as push:
            assert into.load_whole(push.info["path"], None, log)
        assert model.holds(tensors(seed)) and model.scale.item() == seed


def test_a_model_with_a_loader_that_computes_is_not_changed(tmp_path: Path) -> None:
    """If a model cannot be loaded by slices, a push leaves it unchanged, and the caller loads it as usual."""
    model, publisher = Fused(), Publisher(tmp_path)
    model.reads = True
    with publisher.push(tensors(1)) as push:
        assert not places(model).load_whole(push.info["path"], None, log)
    assert not model.qkv.any() and not model.o.any()


def test_missing_weights_and_damaged_pushes(tmp_path: Path) -> None:
    """If weights are missing, the model's loader reports them. A damaged push raises an error, and no other loader is
    tried."""
    model, publisher = Fused(), Publisher(tmp_path)

    def strict(given: Any) -> None:
        names = [name for name, _ in given if model.load_weights([(name, _)]) is None]
        if missing := set("qkvo") - set(names):
            raise Incomplete(f"lacks {missing}")

    into = Places(model, strict, "cpu", 1 << 20)
    less = tensors(1)
    del less["k"]
    with publisher.push(less) as push, pytest.raises(Incomplete, match="'k'"):
        into.load_whole(push.info["path"], None, log)
    assert not model.qkv.any()
    with publisher.push(tensors(2)) as push:
        path = Path(push.info["path"])
        data = bytearray(path.read_bytes())
        data[8 + int.from_bytes(data[:8], "little") + 500] ^= 4
        path.write_bytes(data)
        with pytest.raises(overwire.CorruptError):
            into.load_whole(path, None, log)
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(overwire.OverwireError):
            into.load_whole(path, None, log)


def nudged(before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns copies of the tensors with some changed elements."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        tensor.view(-1)[::37] += 1
    return after


def test_deltas_are_applied_in_place(tmp_path: Path) -> None:
    """The first push has whole tensors. So do a push after an error, a push of other tensors, and a push with
    whole=True. A tensor that the model uses twice changes in both places."""
    model, publisher = Fused(), Publisher(tmp_path, deltas=True)
    model.whole_o = True
    model.twice = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16), requires_grad=False)
    own = model.load_weights

    def load(given: Any) -> None:
        for name, tensor in given:
            own([(name, tensor)])
            if name == "q":
                model.twice.data.copy_(tensor)

    model.o = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16), requires_grad=False)
    into = Places(model, load, "cpu", 1 << 20)
    held = tensors(1, ignored=torch.ones(40))
    at, kinds = model.qkv.data_ptr(), []
    for n in range(8):
        if n == 4:
            held["more"] = torch.ones(5)
        with contextlib.suppress(KeyError), publisher.push(held, whole=n == 6) as push:
            kinds.append(push.info["kind"])
            if push.info["kind"] == "whole":
                assert into.load_whole(push.info["path"], None, log)
            else:
                into.apply_delta(push.info["path"], None)
            if n == 2:
                raise KeyError
        assert torch.equal(model.qkv, torch.cat([held[name] for name in "qkv"])) and model.qkv.data_ptr() == at
        assert torch.equal(model.o, held["o"]) and torch.equal(model.twice, held["q"])
        held = nudged(held)
    assert kinds == ["whole", "delta", "delta", "whole", "whole", "delta", "whole", "delta"]
    model.qkv.data[3, 3] += 1
    before = model.qkv.clone()
    with publisher.push(held) as push, pytest.raises(overwire.OverwireError, match="[qkv]"):
        into.apply_delta(push.info["path"], None)
    assert torch.equal(model.qkv, before)


def test_a_delta_needs_a_loader_that_copies(tmp_path: Path) -> None:
    """If the model's loader computes, a delta is refused with a clear message, and nothing changes."""
    model = Fused()
    model.reads = True
    overwire.save_delta(nudged(tensors(1)), tensors(1), tmp_path / "d.safetensors")
    with pytest.raises(ValueError, match="push all weights"):
        places(model).apply_delta(tmp_path / "d.safetensors", None)
    assert not model.qkv.any()


@pytest.mark.imports_torch
def test_ranks_apply_deltas_to_their_shares(tmp_path: Path) -> None:
    """Two ranks share one tensor by columns and one by rows. For a delta, they gather each tensor, compare it with the
    delta's base, and take their shares. If one rank lacks the base or the delta, both ranks fail and nothing
    changes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [sys.executable, __file__, "shares", str(port)]
    with contextlib.ExitStack() as stack:
        commands = [[*words, str(rank), str(tmp_path)] for rank in range(2)]
        ranks = [subprocess.Popen(command, env=SHARED, stdout=subprocess.PIPE, text=True) for command in commands]
        for rank in ranks:
            stack.enter_context(ended(rank))
        said = [rank.communicate(timeout=120 * warm.SLOWER)[0].splitlines() for rank in ranks]
    assert [list(answers(lines)) for lines in said] == [["True True True True True True"]] * 2


def answers(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that a test process prints, without gloo's messages about connections (torch 2.10)."""
    return (line for line in lines if not line.startswith("[Gloo]"))


class Halves(torch.nn.Module):
    """One rank's columns of a, rows of b, and all of c."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        sizes = {"a": (32, 16), "b": (16, 32), "c": (32, 32)}
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False))

    def load_weights(self, given: Any) -> None:
        for name, tensor in given:
            low = self.rank * 16
            cut = {"a": tensor[:, low : low + 16], "b": tensor[low : low + 16], "c": tensor}[name]
            getattr(self, name).data.copy_(cut)


def shares(port: int, rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    made = torch.Generator().manual_seed(3)
    held = {name: torch.randn(32, 32, generator=made).bfloat16() for name in "abc"}
    model, wanted = Halves(rank), Halves(rank)
    into = Places(model, model.load_weights, "cpu", 1, group)
    path = folder / f"{rank}.safetensors"
    overwire.save_file(held, path)
    out = [into.load_whole(path, None, log)]
    for _ in range(2):
        after = nudged(held)
        overwire.save_delta(after, held, path)
        into.apply_delta(path, None)
        wanted.load_weights(after.items())
        out.append(all(torch.equal(getattr(model, name), getattr(wanted, name)) for name in "abc"))
        held = after
    overwire.save_delta(nudged(held), held, path)
    for name in ("a", "c"):  # a is divided, c is whole
        was = getattr(model, name).clone()
        if rank == 1:
            getattr(model, name).data[0, 0] += 1
        before = {each: getattr(model, each).clone() for each in "abc"}
        try:
            into.apply_delta(path, None)
        except overwire.DeltaBaseError:
            out.append(all(torch.equal(getattr(model, each), before[each]) for each in "abc"))
        getattr(model, name).data.copy_(was)
    try:
        into.apply_delta(folder / "absent" if rank == 1 else path, None)
    except overwire.NotFoundError as error:
        out.append(all(torch.equal(getattr(model, each), before[each]) for each in "ab") and (rank == 1 or "rank 1" in str(error)))
    print(*out, flush=True)
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.imports_torch
def test_pushes_through_a_process_group() -> None:
    """Two worker processes get every push of a trainer from memory. If the size or number of a push is wrong for a
    rank, or a rank exits without an answer, all ranks refuse the push before they allocate memory. Later pushes
    work."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in (1, 2):
            words = [sys.executable, __file__, str(port), str(rank)]
            worker = subprocess.Popen(words, env=SHARED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(ended(worker))
            workers.append(worker)

        def tell_workers(seed: int, *facts: tuple[object, object]) -> None:
            for worker, (size, number) in zip(workers, facts, strict=False):
                assert worker.stdin is not None
                worker.stdin.write(json.dumps([size, number, seed]) + "\n")
                worker.stdin.flush()

        def answers_of_workers(count: int = 2) -> list[str]:
            return [next(answers(worker.stdout)).strip() for worker in workers[:count] if worker.stdout is not None]

        group = Group("127.0.0.1", port, 0, 3, LIMIT)
        publisher = Publisher(group=group)

        @contextlib.contextmanager
        def pushing(seed: int) -> Iterator[tuple[Any, tuple[int, int]]]:
            with publisher.push(tensors(seed, big=torch.arange(1 << 12).repeat(1 << 5))) as push:
                assert push.info["path"] is None
                yield push, (push.info["size"], push.info["number"])

        sizes = [lambda size: size - 1, lambda size: size + 1, *(1 << 62, 1 << 70, 0, -5, True, "many", None, 1.5)]
        for seed, wrong in enumerate(sizes):
            with pushing(seed) as (push, (size, number)):
                one = wrong(size) if callable(wrong) else wrong
                tell_workers(seed, (size, number), (one, number))
                is_size = type(one) is int and 0 < one < 1 << 63
                words = "bytes sent, on ranks [2]" if is_size else "rank 2: size must"
                with pytest.raises(overwire.ArgumentError, match=re.escape(words)):
                    push.carry()
                assert answers_of_workers() == ["ArgumentError"] * 2
        for wrong in (+1, -1, -2):
            with pushing(1) as (push, (size, number)):
                tell_workers(1, (size, number), (size, number + wrong))
                answered = functools.partial(group._read_counter, f"{number}/answers")
                with pytest.raises(overwire.ArgumentError, match="rank 2: |not all of them have accepted"):
                    push.carry(lambda: answered() == 1 and wrong < 0)  # noqa: B023
                assert answers_of_workers() == ["ArgumentError"] * 2
        with pushing(1) as (push, facts):
            tell_workers(1, facts)  # the other worker has exited
            with pytest.raises(overwire.ArgumentError, match="not all of them have accepted"):
                push.carry(lambda: group._read_counter(f"{facts[1]}/answers") == 1)
            assert answers_of_workers(1) == ["ArgumentError"]
        for seed in (1, 2):
            with pushing(seed) as (push, facts):
                tell_workers(seed, facts, facts)
                push.carry()
                assert answers_of_workers() == ["True"] * 2
        publisher.close()


def worker(port: int, rank: int) -> None:
    group = Group("127.0.0.1", port, rank, 3, LIMIT)
    model = Fused()
    into = places(model)
    for line in sys.stdin:
        size, number, seed = json.loads(line)
        try:
            with group.received(size, number) as path:
                done = into.load_whole(path, None, log)
        except overwire.ArgumentError as error:
            print(type(error).__name__, flush=True)
        else:
            print(done and model.holds(tensors(seed)), flush=True)


# Stand-ins for vLLM's weight transfer, with the signatures of vLLM 0.32.
TRANSFER = {
    "distributed/__init__": "",
    "distributed/weight_transfer/__init__": "",
    "distributed/weight_transfer/factory": """
class WeightTransferEngineFactory:
    _registry = {}
    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None):
        assert name not in cls._registry
        cls._registry[name] = (module_path_or_cls, class_name)
class WeightTransferTrainerFactory(WeightTransferEngineFactory):
    _registry = {}
""",
    "distributed/weight_transfer/base": """
from dataclasses import dataclass, field
class WeightTransferInitInfo: ...
class WeightTransferUpdateInfo: ...
@dataclass
class TrainerInitInfo:
    rank: int = field(kw_only=True)
    @property
    def is_sender(self):
        return self.rank == 0
class WeightTransferEngine:
    def __init__(self, config, vllm_config, device, model):
        self.vllm_config, self.device, self.model = vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
    def parse_init_info(self, given):
        return self.init_info_cls(**given)
    def parse_update_info(self, given):
        return self.update_info_cls(**given)
class TrainerWeightTransferEngine:
    def __init__(self, *, client, source=None, is_sender=True):
        self.client, self.source, self.is_sender = client, source, is_sender
""",
    "distributed/parallel_state": "_TP = None\n",
    "model_executor/layers/__init__": "",
    "model_executor/layers/attention": "def is_deferred_attention_layer(layer):\n    return False\n",
    "model_executor/model_loader/mtp_validation": "import contextlib\ndisable_mtp_completeness_check = contextlib.nullcontext\n",
    "model_executor/model_loader/reload/__init__": """
said = []
def initialize_layerwise_reload(model):
    said.append("begin")
def finalize_layerwise_reload(model, model_config):
    said.append("end")
""",
    "model_executor/model_loader/reload/layerwise": "import weakref\nLAYERWISE_INFO = weakref.WeakKeyDictionary()\n",
}

WORKER = """
import overwire.integrations.pushes
from vllm.distributed.weight_transfer import factory
assert factory.WeightTransferEngineFactory._registry["overwire"] == ("overwire.integrations.vllm.transfer", "TransferEngine")
from overwire.integrations.vllm import transfer
assert factory.WeightTransferTrainerFactory._registry["overwire"][0] is transfer.TrainerEngine
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
parallel = types.SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
from vllm.config.load import LoadConfig
def engine(model, noted=True, quantization=None):
    if noted:
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            LAYERWISE_INFO[module] = types.SimpleNamespace(restore_metadata=(own, {}))
    config = types.SimpleNamespace(
        parallel_config=parallel, load_config=LoadConfig(), model_config=types.SimpleNamespace(quantization=quantization))
    return transfer.TransferEngine(None, config, torch.device("cpu"), model)
class Client:
    def __init__(self, engine):
        self.engine, self.calls = engine, []
    def init_weight_transfer_engine(self, info):
        self.engine.init_transfer_engine(self.engine.parse_init_info(json.loads(json.dumps(info))))
    def start_weight_update(self):
        self.calls.append("start")
        self.engine.start_weight_update()
    def update_weights(self, info):
        self.calls.append(info["number"])
        self.engine.update_weights(json.loads(json.dumps(info)))
    def finish_weight_update(self, version=None):
        self.calls.append("finish")
        self.engine.finish_weight_update()
class Source(dict):
    def __iter__(self):
        return iter(self.items())
def step(n):
    return {p + ".weight": torch.full((64, 64), n + i, dtype=torch.bfloat16) for i, p in enumerate(["q", "k", "v", "linear", "other"])}
def holds(model, n):
    s = step(n)
    fused = torch.cat([s[p + ".weight"] for p in "qkv"])
    return torch.equal(model.qkv.weight, fused) and torch.equal(model.linear.weight, s["linear.weight"])
def trainer(client, source, **more):
    info = transfer.TrainerInit(rank=0, where=sys.argv[2], **more)
    return transfer.TrainerEngine.trainer_init(info, client=client, source=source)
"""

ENGINE = """
model, source = Model(), Source(step(1))
client = Client(engine(model))
sends = trainer(client, source, host=True)
for n in (1, 2, 3):
    source.update(step(n))
    sends.send_weights()
    assert holds(model, n)
assert client.calls == ["start", 1, "finish", "start", 2, "finish", "start", 3, "finish"]
assert len(model.kept) == 5 and not reload.said  # the loader ran once
del source["k.weight"]
assert "'qkv.weight[k]'" in raised(ValueError, sends.send_weights)
assert holds(model, 3)
sends.shutdown()
raised(RuntimeError, sends.send_weights)
trainer(client, source, strict=False).send_weights()
for noted, quantization in ((False, None), (True, "fp8")):  # both cases use vLLM's own reload
    reload.said.clear()
    model = Model()
    trainer(Client(engine(model, noted, quantization)), Source(step(7))).send_weights()
    assert holds(model, 7) and reload.said == ["begin", "end"]
model, source = Model(), Source(step(1))
client = Client(engine(model))
sends = trainer(client, source, deltas=True, dtype="bfloat16")
for n in (1, 2, 3):
    source.update({name: tensor.float() for name, tensor in step(n).items()})
    sends.send_weights()
    assert holds(model, n)
model.qkv.weight.data[0, 0] += 1
source.update(step(4))
assert "q.weight" in raised(Exception, sends.send_weights)
sends.send_weights()  # whole
assert holds(model, 4)
quantized = Client(engine(Model(), True, "fp8"))
assert "not support deltas, because vLLM changes its weights: the model is quantized (fp8)" in raised(
    ValueError, lambda: trainer(quantized, source, deltas=True))
trainer(quantized, source).send_weights()
assert holds(quantized.engine.model, 4)
with overwire.integrations.pushes.Publisher(sys.argv[2], deltas=True).push(step(5)) as push:
    assert "not support deltas" in raised(ValueError, lambda: quantized.engine.update_weights(push.info | {"kind": "delta"}))
import socket
def over(**more):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return transfer.TrainerInit(rank=0, master_address="127.0.0.1", master_port=port, world_size=2, **more)
made = lambda: transfer.TrainerEngine.trainer_init(over(timeout=60, deltas=True), client=quantized, source=source)
assert "not support deltas" in raised(ValueError, made) and quantized.engine._group is None
unwilling = lambda: transfer.TrainerEngine.trainer_init(over(timeout=3600, max_memory="much"), client=Client(engine(Model())), source=source)
assert "max_memory" in raised(ValueError, unwilling)
fresh = engine(Model())  # otherwise, waiting for a rank that refuses would take an hour
class Refusing(Client):
    def update_weights(self, info):
        super().update_weights(change(info))
pushing = transfer.TrainerEngine.trainer_init(over(timeout=3600), client=Refusing(fresh), source=source)
for change, words in (
    (lambda info: info | {"kind": "none"}, "kind must be"), (lambda info: info | {"path": 0}, "path must be text"),
    (lambda info: info | {"size": "9"}, "size must be"), (lambda info: {"kind": "whole", "number": 1}, "size"),
    (lambda info: info | {"more": 1}, "more"), (lambda info: info | {"size": 9}, "size is not"),
):
    reason = raised((TypeError, ValueError), pushing.send_weights)
    assert words in reason, (words, reason)
Refusing.update_weights = Client.update_weights
pushing.send_weights()
assert holds(fresh.model, 4)
pushing.shutdown()
idle = transfer.TrainerEngine.trainer_init(transfer.TrainerInit(rank=1, where="x"), client=None, source=Source(step(1)))
idle.send_weights()
assert "where" in raised(ValueError, lambda: transfer.TrainerInit(rank=0))
assert "where" in raised(ValueError, lambda: transfer.TrainerInit(rank=0, master_address="a", master_port=1))
assert "WeightSource" in raised(ValueError, lambda: trainer(client, None))
fresh = engine(Model())
assert "no group" in raised(ValueError, lambda: fresh.update_weights({"kind": "whole", "number": 1, "size": 9}))
assert "kind" in raised(ValueError, lambda: fresh.update_weights({"kind": "none", "number": 1, "size": 9, "path": "x"}))
"""


def stand_ins(folder: Path, modules: dict[str, str]) -> None:
    for name, text in modules.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_vllm_transfers_weights(tmp_path: Path) -> None:
    """The trainer pushes weights, and the engine loads them in place. If vLLM has changed the weights after loading,
    the engine uses vLLM's own reload."""
    stand_ins(tmp_path / "vllm", {**test_vllm.VLLM, **TRANSFER})
    test_vllm.run(tmp_path, test_vllm.REGISTER + test_vllm.PRELUDE + WORKER + ENGINE, tmp_path, tmp_path / "pushes")


SGLANG = """
sys.modules["sglang.srt.distributed"] = types.ModuleType("sglang.srt.distributed")
sys.modules["sglang.srt.distributed"].parallel_state = types.SimpleNamespace(_TP=None)
import gc, pkgutil, weakref
from overwire.integrations.pushes import Publisher
from overwire.integrations.sglang import updates
assert pkgutil.resolve_name(updates.LOADER) is updates.load
publisher = Publisher(sys.argv[2], deltas=True)
for reads in (False, True):
    model = Model(keep=reads)
    for n in (1, 2, 3):
        tensors = {p + ".weight": torch.full((64, 64), n + i, dtype=torch.bfloat16) for i, p in enumerate(["q", "k", "v", "linear"])}
        with publisher.push(tensors, whole=n == 1 or reads) as push:
            assert push.info["kind"] == ("whole" if n == 1 or reads else "delta")
            updates.load(model, updates.message(push.info))
        assert torch.equal(model.qkv.weight, torch.cat([tensors[p + ".weight"] for p in "qkv"]))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    model = Model()
assert "message()" in raised(ValueError, lambda: updates.load(model, [("q.weight", torch.ones(1))]))
assert "group" in raised(ValueError, lambda: updates.message({"path": None}))
"""


def test_sglang_accepts_pushes(tmp_path: Path) -> None:
    """SGLang's entry point for custom loaders accepts whole pushes and deltas, by slices or by tensors."""
    stand_ins(tmp_path / "sglang", test_sglang.SGLANG)
    test_vllm.run(tmp_path, test_vllm.PRELUDE + SGLANG, tmp_path, tmp_path / "pushes")


def test_a_publisher_needs_a_folder_a_uri_or_a_group() -> None:
    with pytest.raises(ValueError, match="a folder, a URI or group="):
        Publisher()


if __name__ == "__main__":
    if sys.argv[1] == "shares":
        shares(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        worker(int(sys.argv[1]), int(sys.argv[2]))
