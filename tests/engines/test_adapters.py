"""Tests the ModelExpress integration with small stand-ins that are modelled on its sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_vllm as base

engines, model = base.engines, base.model

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

# Version 0.8 differs in these modules.
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


@pytest.fixture(scope="module")
def programs(engines: Path) -> Path:
    """Makes a folder with the stand-ins for vLLM and ModelExpress."""
    for name, text in EXPRESS.items():
        path = engines / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return engines


def test_modelexpress(programs: Path, model: Path) -> None:
    """For a compressed model, overwire's strategy comes before the strategies of the chain that read files."""
    code = """
import modelexpress.load_strategy as strategies
register()  # after the import, a second time
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
ctx.load_config = types.SimpleNamespace()  # another engine's configuration
raised(RuntimeError, lambda: strategies.LoadStrategyChain.run(Model(), ctx))
assert "overwire" not in [one[0] for one in strategies.tried]
"""
    base.run(programs, base.REGISTER + base.PRELUDE + code, model)


def test_modelexpress_in_phases(programs: Path, model: Path, tmp_path: Path) -> None:
    """If the chain itself prepares, processes and registers the model, overwire's strategy only loads it, even in a
    reload. A plug-in file adds the strategy only once."""
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
assert len(made.kept) == 6  # tensor by tensor, once each
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
