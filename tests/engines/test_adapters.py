"""TensorRT-LLM, ModelExpress and ComfyUI, against small stand-ins of what overwire hooks
into. None of them can run here; the stand-ins follow their sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_vllm as base

engines, model = base.engines, base.model

TENSORRT = {
    "tensorrt_llm/__init__": "",
    "tensorrt_llm/_torch/__init__": "",
    "tensorrt_llm/_torch/models/__init__": "",
    "tensorrt_llm/_torch/models/modeling_utils": """
LOADERS, WEIGHTS, CONFIGS = {}, {}, {}
def register_checkpoint_loader(name): return lambda cls: LOADERS.setdefault(name, cls)
def register_checkpoint_weight_loader(name): return lambda cls: WEIGHTS.setdefault(name, cls)
def register_config_loader(name): return lambda cls: CONFIGS.setdefault(name, cls)
""",
    "tensorrt_llm/_torch/models/checkpoints/__init__": "",
    "tensorrt_llm/_torch/models/checkpoints/base_weight_loader": """
class ConsumableWeightsDict:
    def __init__(self, weights):
        self._weights = weights
    def items(self):
        return list(self._weights.items())
    def mark_consumed(self, prefix):
        gone = [key for key in self._weights if key.startswith(prefix + ".")]
        for key in gone:
            del self._weights[key]
        return len(gone)
""",
    "tensorrt_llm/_torch/models/checkpoints/hf/__init__": "",
    "tensorrt_llm/_torch/models/checkpoints/hf/config_loader": "class HfConfigLoader: pass",
    "tensorrt_llm/_torch/models/checkpoints/hf/weight_loader": """
class HfWeightLoader:
    def load_weights(self, checkpoint_dir, mapping, **more):
        return "its own", checkpoint_dir, mapping, more
""",
    "tensorrt_llm/_torch/models/checkpoints/hf/checkpoint_loader": """
from .weight_loader import HfWeightLoader
class HfCheckpointLoader:
    def __init__(self, *, weight_loader=None, weight_mapper=None, config_loader=None):
        self.weight_loader = self.get_default_weight_loader() if weight_loader is None else weight_loader
        self.config_loader, self.checkpoint_format = config_loader, "HF"
    def get_default_weight_loader(self):
        return HfWeightLoader()
    def load_weights(self, checkpoint_dir, mapping, **more):
        return self.weight_loader.load_weights(checkpoint_dir, mapping=mapping, **more)
""",
}

EXPRESS = {
    "modelexpress/__init__": "",
    "modelexpress/adapter": """
class StrategyFailed(Exception):
    def __init__(self, message, mutated):
        super().__init__(message)
        self.mutated = mutated
""",
    "modelexpress/load_strategy/__init__": """
from ..adapter import StrategyFailed
from .base import LoadStrategy
from .context import LoadResult
tried = []
class Other(LoadStrategy):
    def __init__(self, name):
        self.name = name
    def load(self, result, ctx):
        raise StrategyFailed(self.name, mutated=False)
class LoadStrategyChain:
    @staticmethod
    def run(model, ctx):
        return execute_load_strategies(model, ctx, [Other(name) for name in ("rdma", "server_cache", "instant_tensor", "default")])
def execute_load_strategies(model, ctx, strategies):
    tried.clear()
    result = LoadResult(value=model, model=model)
    for strategy in strategies:
        if strategy.is_available(ctx):
            try:
                done = strategy.load(result, ctx)
                tried.append(strategy.name)
                return done.value
            except StrategyFailed as error:
                tried.append((strategy.name, error.mutated, str(error)))
    raise RuntimeError(f"no strategy: {tried}")
""",
    "modelexpress/load_strategy/base": """
class LoadStrategy:
    requires = ()
    def is_available(self, ctx):
        return not self.requires or ctx.adapter is not None
def register_tensors(result, ctx):
    ctx.registered = result.model
""",
    "modelexpress/load_strategy/context": """
from dataclasses import dataclass
@dataclass
class LoadResult:
    value: object
    model: object = None
""",
}

# What version 0.8 has instead.
EXPRESS_PHASED = {
    "modelexpress/load_strategy/base": """
class LoadStrategy:
    requires = ()
    def is_available(self, ctx):
        return not self.requires or ctx.adapter is not None
    def prepare(self, result, ctx):
        if ctx.is_reload:
            ctx.adapter.begin_streaming_reload(result)
    def finalize(self, result, ctx):
        if ctx.is_reload:
            ctx.adapter.end_streaming_reload(result)
        else:
            self.post_process(result, ctx)
        register_tensors(result, ctx)
    def abort(self, result, ctx):
        if ctx.is_reload:
            ctx.adapter.end_streaming_reload(result)
    def post_process(self, result, ctx): pass
class NativeLoadStrategy(LoadStrategy):
    requires = ("load_via_native",)
    def post_process(self, result, ctx):
        ctx.adapter.after_native_load(result)
def register_tensors(result, ctx):
    ctx.did.append("register")
""",
    "modelexpress/load_strategy/__init__": """
from ..adapter import StrategyFailed
from .base import LoadStrategy
from .context import LoadResult
tried = []
def execute_load_strategies(model, ctx, strategies):
    tried.clear()
    result = LoadResult(value=model, model=model)
    for strategy in strategies:
        if strategy.is_available(ctx):
            try:
                strategy.prepare(result, ctx)
                try:
                    result = strategy.load(result, ctx)
                except BaseException:
                    strategy.abort(result, ctx)
                    raise
                strategy.finalize(result, ctx)
                tried.append(strategy.name)
                return result.value
            except StrategyFailed as error:
                tried.append((strategy.name, error.mutated, str(error)))
    raise RuntimeError(f"no strategy: {tried}")
""",
}

COMFY = {
    "comfy/__init__": "",
    "comfy/storage": """
def annotate_state_dict(state_dict, path):
    for value in state_dict.values():
        value.untyped_storage()._comfy_source_path = path
""",
    "comfy/utils": """
import comfy.storage
def load_torch_file(ckpt, safe_load=False, device=None, return_metadata=False):
    return "its own", ckpt, safe_load, device, return_metadata
""",
}


@pytest.fixture(scope="module")
def programs(engines: Path) -> Path:
    """The folder of vLLM's stand-in, with theirs."""
    for files in (TENSORRT, EXPRESS, COMFY):
        for name, text in files.items():
            path = engines / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return engines


def test_tensorrt_llm(programs: Path, model: Path) -> None:
    """Its registries lead to a loader that reads both kinds of files, and leaves others to it."""
    code = """
from tensorrt_llm._torch.models import modeling_utils as registries
import overwire.integrations.tensorrt_llm as ours
weights = registries.WEIGHTS["overwire"]()
made = registries.LOADERS["overwire"](weight_loader=weights, config_loader=registries.CONFIGS["overwire"]())
assert made.weight_loader is weights and made.checkpoint_format == "HF"
assert type(registries.LOADERS["overwire"]().weight_loader) is ours.OverwireWeightLoader
for kind in ("plain", "compressed"):
    found = made.load_weights(base + "/" + kind, mapping="ranks", model=None)
    tensors = dict(found.items())
    assert len(tensors) == 6
    for n, part in enumerate(json.loads(sys.argv[3])):
        assert torch.equal(tensors[part + ".weight"], torch.arange(n, n + 4096, dtype=torch.bfloat16).view(64, 64))
    assert found.mark_consumed("mlp") == 2
other = sys.argv[2]
assert made.load_weights(other, mapping="ranks", a=1) == ("its own", other, "ranks", {"a": 1})
os.symlink(base + "/plain/model-1.safetensors", other + "/model-[1].safetensors")
os.symlink(base + "/plain/model-10.safetensors", other + "/consolidated.safetensors")
names = lambda **more: [name.removesuffix(".weight") for name, _ in made.load_weights(other, mapping=0, **more).items()]
assert names() == ["k", "q", "v"] and names(use_consolidated=True) == ["linear", "mlp.experts.0", "mlp.experts.1"]
os.remove(other + "/model-[1].safetensors")
assert len(names()) == 3  # there is nothing else
"""
    other = model / "other [x]"
    other.mkdir()
    import json

    base.run(programs, base.PRELUDE + code, model, other, json.dumps(base.PARTS))


def test_modelexpress(programs: Path, model: Path) -> None:
    """The chain has one more strategy where a model is compressed, before those that read files."""
    code = """
import modelexpress.load_strategy as strategies
register()  # late and again
from vllm.config.load import LoadConfig
class Context: pass
def context(path, **more):
    ctx = Context()
    adapter = types.SimpleNamespace(after_native_load=lambda result: (setattr(result.model, "processed", True), result)[1])
    load = LoadConfig(load_format="modelexpress", model_loader_extra_config={"distributed": True})
    ctx.__dict__.update(load_config=load, model_config=config(path), adapter=adapter, **more)
    return ctx
ctx, made = context(base + "/compressed"), Model()
assert strategies.LoadStrategyChain.run(made, ctx) is made
assert [one[0] for one in strategies.tried[:2]] == ["rdma", "server_cache"] and strategies.tried[2:] == ["overwire"], strategies.tried
assert ctx.registered is made and made.processed
assert torch.equal(made.linear.weight, torch.arange(3, 4099, dtype=torch.bfloat16).view(64, 64))
assert ctx.load_config.load_format == "modelexpress"
raised(RuntimeError, lambda: strategies.LoadStrategyChain.run(Model(), context(base + "/plain")))
assert [one[0] for one in strategies.tried] == ["rdma", "server_cache", "instant_tensor", "default"]
class Fails(Model):
    def load_weights(self, weights): raise KeyError("x")
raised(RuntimeError, lambda: strategies.LoadStrategyChain.run(Fails(), context(base + "/compressed")))
assert [one[1] for one in strategies.tried if one[0] == "overwire"] == [True], strategies.tried
ctx = context(base + "/compressed")
ctx.load_config = types.SimpleNamespace()  # another engine's
raised(RuntimeError, lambda: strategies.LoadStrategyChain.run(Model(), ctx))
assert "overwire" not in [one[0] for one in strategies.tried]
"""
    base.run(programs, base.REGISTER + base.PRELUDE + code, model)


def test_modelexpress_in_phases(programs: Path, model: Path, tmp_path: Path) -> None:
    """Where the chain prepares, processes and registers, the strategy only loads, a reload too; as a plug-in's file, it
    is in the chain once."""
    for name, text in {**EXPRESS, **EXPRESS_PHASED}.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = """
sys.path.insert(0, sys.argv[2])
import runpy
import modelexpress.load_strategy as strategies
register()
from vllm.config.load import LoadConfig
did = []
class Adapter:
    def load_via_native(self, result): raise AssertionError
    def after_native_load(self, result): did.append("process")
    def begin_streaming_reload(self, result): did.append("begin")
    def end_streaming_reload(self, result): did.append("end")
class Context: pass
def run(made, path, reload=False, chain=()):
    did.clear()
    ctx = Context()
    ctx.__dict__.update(load_config=LoadConfig(load_format="modelexpress"), model_config=config(path), adapter=Adapter(), did=did,
        is_reload=reload, target_device=torch.device("cpu"))
    return strategies.execute_load_strategies(made, ctx, list(chain))
def right(made):
    return torch.equal(made.linear.weight, torch.arange(3, 4099, dtype=torch.bfloat16).view(64, 64))
made = Model()
assert run(made, base + "/compressed") is made and right(made)
assert did == ["process", "register"], did
made.linear.weight.data.zero_()
made.kept.clear()
run(made, base + "/compressed", reload=True)
assert right(made) and did == ["begin", "end", "register"], did
assert len(made.kept) == 6  # tensor by tensor, and once
class Fails(Model):
    def load_weights(self, weights): raise KeyError("x")
for reload in (False, True):
    raised(RuntimeError, lambda: run(Fails(), base + "/compressed", reload))
    assert strategies.tried[0][:2] == ("overwire", True) and did == ["begin", "end"] * reload, did
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as out:
    runpy.run_module("overwire.integrations.modelexpress", run_name="__main__")
file = {}
exec(compile(out.getvalue(), "mx_plugin_overwire.py", "exec"), file)
kind = file["register_plugin"]()
from modelexpress.load_strategy.base import LoadStrategy
assert isinstance(kind, type) and issubclass(kind, LoadStrategy) and kind.name == "overwire"
made = Model()
run(made, base + "/compressed", chain=[kind()])
assert right(made) and strategies.tried == ["overwire"]
raised(RuntimeError, lambda: run(Model(), base + "/plain", chain=[kind()]))
"""
    base.run(programs, base.REGISTER + base.PRELUDE + code, model, tmp_path)


def test_comfyui(programs: Path, model: Path) -> None:
    """Its own reader is used but for compressed files."""
    code = """
import comfy.utils
from overwire.integrations.comfyui import NODE_CLASS_MAPPINGS, install
install(); install()
load = comfy.utils.load_torch_file
assert NODE_CLASS_MAPPINGS == {} and not hasattr(load.__wrapped__, "__wrapped__")
plain, packed = (base + f"/{kind}/model-1.safetensors" for kind in ("plain", "compressed"))
assert load(plain, device="cpu") == ("its own", plain, False, "cpu", False)
assert load("nothing.ckpt", True)[:3] == ("its own", "nothing.ckpt", True)
tensors, metadata = load(packed, safe_load=True, device=torch.device("cpu"), return_metadata=True)
assert metadata is None and list(tensors) == ["k.weight", "q.weight", "v.weight"]
assert torch.equal(tensors["q.weight"], torch.arange(1, 4097, dtype=torch.bfloat16).view(64, 64))
assert tensors["q.weight"].untyped_storage()._comfy_source_path == packed
assert load(packed).keys() == tensors.keys()
"""
    base.run(programs, base.PRELUDE + code, model)
