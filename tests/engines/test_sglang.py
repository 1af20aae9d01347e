"""Tests the SGLang plug-in with small stand-ins for SGLang's modules.

The stand-ins have the signatures of SGLang 0.5.23. tests/engines/engines_sglang.py runs the real code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_vllm as base

engines, model = base.engines, base.model

SGLANG = {
    "__init__": "",
    "srt/__init__": "",
    "srt/arg_groups/__init__": "",
    "srt/arg_groups/choices": 'LOAD_FORMAT_CHOICES = ["auto", "safetensors"]\nadd_load_format_choices = LOAD_FORMAT_CHOICES.extend\n',
    "srt/plugins/__init__": "",
    "srt/plugins/hook_registry": """
import enum, functools, pkgutil
class HookType(enum.Enum):
    AROUND = "around"
class HookRegistry:
    _hooks = []
    @classmethod
    def register(cls, target, hook, hook_type=None, *, source=None):
        assert hook_type is HookType.AROUND
        cls._hooks.append((target, hook))
    @classmethod
    def apply_hooks(cls):
        for target, hook in cls._hooks:
            path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, functools.partialmethod(lambda self, hook, old: hook(old, self), hook, getattr(owner, name)))
""",
    "srt/configs/__init__": "",
    "srt/configs/load_config": """
import enum
from dataclasses import dataclass, field
class LoadFormat(str, enum.Enum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"
@dataclass
class LoadConfig:
    load_format: object = LoadFormat.AUTO
    model_loader_extra_config: object = field(default_factory=dict)
    draft_model_idx: int | None = None
    def __post_init__(self):
        self._verify_load_format()
    def _verify_load_format(self):
        if isinstance(self.load_format, str):
            self.load_format = LoadFormat(self.load_format.lower())
""",
    "srt/model_loader/__init__": "",
    "srt/model_loader/loader": """
import dataclasses, glob, os
def maybe_add_mtp_safetensors(hf_weights_files, hf_folder, index_file, hf_config):
    return hf_weights_files
class DefaultModelLoader:
    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: str | None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list | None = None
        model_config: object = None
        @classmethod
        def init_new(cls, model_config, model):
            return cls(model_config.model_path, model_config.revision, model_config=model_config)
    def __init__(self, load_config):
        self.load_config = load_config
        assert load_config.load_format == "safetensors" and load_config.model_loader_extra_config == {}
    def _get_all_weights(self, model_config, model):
        yield from self._get_weights_iterator(DefaultModelLoader.Source.init_new(model_config, model))
    def load_model(self, model, model_config):
        self.load_weights_and_postprocess(model, self._get_all_weights(model_config, model), "cpu")
    def commit_model_weights(self, model, model_config, resolved):
        weights = (one for each in resolved for one in self._get_weights_iterator(each.source, resolved_source=each))
        self.load_weights_and_postprocess(model, weights, "cpu")
    @staticmethod
    def load_weights_only(model, weights, target_device):
        model.load_weights(weights)
    @staticmethod
    def postprocess_weights(model, target_device):
        model.processed = getattr(model, "processed", 0) + 1
    def _prepare_weights(self, model_name_or_path, revision, fall_back_to_pt, allow_patterns_overrides=None):
        return model_name_or_path, sorted(glob.glob(os.path.join(model_name_or_path, "*.safetensors"))), True
def get_model_loader(load_config, model_config=None):
    assert isinstance(load_config.load_format, type)
    return load_config.load_format(load_config)
""",
}


@pytest.fixture(scope="module")
def sglang(engines: Path) -> Path:
    """Makes a folder with the stand-ins for vLLM and SGLang."""
    for name, text in SGLANG.items():
        path = engines / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return engines


def test_sglang(sglang: Path, model: Path) -> None:
    """SGLang accepts overwire's load format, and a loader with its configuration loads a model."""
    code = base.PRELUDE + """
from overwire.integrations.sglang import register
register(); register()
assert "overwire._core" not in sys.modules
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
assert LOAD_FORMAT_CHOICES.count("overwire") == 1
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
assert LoadConfig(load_format="SAFETENSORS").load_format is LoadFormat.SAFETENSORS
raised(ValueError, lambda: LoadConfig(load_format="other"))
for kind in ("plain", "compressed"):
    made = get_model_loader(LoadConfig(load_format="overwire", model_loader_extra_config={"max_memory": "9KB"}))
    assert isinstance(made, DefaultModelLoader)
    found = list(made._get_weights_iterator(DefaultModelLoader.Source(base + "/" + kind, None, prefix="x.")))
    assert [name for name, _ in found] == ["x." + p + ".weight" for p in json.loads(sys.argv[2])]
    assert all(torch.equal(t, torch.arange(n, n + 4096, dtype=torch.bfloat16).view(64, 64)) for n, (_, t) in enumerate(found))
made = get_model_loader(LoadConfig(load_format="overwire", model_loader_extra_config={"source": base + "/plain"}))
first = DefaultModelLoader.Source("/nowhere", None, model_config=types.SimpleNamespace(hf_config=None))
assert len(list(made._get_weights_iterator(first))) == 6
assert "unknown key 'speed'" in raised(ValueError, lambda: get_model_loader(LoadConfig("overwire", {"speed": 1})))
"""
    base.run(sglang, code, model, json.dumps(base.PARTS))


SGLANG_PRELUDE = """
from overwire.integrations.sglang import register
register()
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
def loader(extra=None):
    return get_model_loader(LoadConfig(load_format="overwire", model_loader_extra_config=extra or {}))
def served(path, draft=False):
    return types.SimpleNamespace(model_path=str(path), revision=None, hf_config=None, is_draft_model=draft)
def new(path, made):
    return DefaultModelLoader.Source.init_new(served(path), made)
"""


def test_sglang_loads_in_every_order(sglang: Path, model: Path, tmp_path: Path) -> None:
    """Each load returns the requested weights: at the start, at a start during a graph capture, in updates of all or
    some weights, in a rollback, and for two models at the same time."""
    code = """
import overwire
from sglang.srt.model_loader.loader import DefaultModelLoader
def tensors(factor):
    return {name: tensor * factor for name, tensor in overwire.load_file(base + "/plain").items()}
other = sys.argv[2] + "/other"
os.mkdir(other)
overwire.save_file(tensors(2), other + "/model-1.safetensors")
def right(made, factor, parts=("q", "k", "v", "linear")):
    for part in parts:
        at = "qkv".find(part) * 64
        found = made.linear.weight if part == "linear" else made.qkv.weight[at : at + 64]
        assert torch.equal(found, tensors(factor)[part + ".weight"]), part
def update(loads, made, path, names=None):
    weights = loads._get_weights_iterator(new(path, made))
    if names is not None:
        weights = ((name, tensor) for name, tensor in weights if name in names)
    loads.load_weights_and_postprocess(made, weights, "cpu")
made, loads = Model(), loader()
loads.load_model(made, served(base + "/compressed"))
right(made, 1)
update(loads, made, other, {"linear.weight"})  # first with the same loader, then with new loaders
right(made, 2, ["linear"])
right(made, 1, "qkv")
update(loader(), made, other)
right(made, 2)
bad = sys.argv[2] + "/bad"
os.mkdir(bad)
open(bad + "/model.safetensors", "wb").write(b"nonsense")
again = loader()
raised(overwire.FormatError, lambda: update(again, made, bad))
update(again, made, base + "/compressed")  # rolls back
right(made, 1)
assert made.processed == 4
made = Model()
source = new(other, made)
resolved = types.SimpleNamespace(source=source, hf_folder=other, weight_files=(other + "/model-1.safetensors",), use_safetensors=True)
loader().commit_model_weights(made, served(other), [resolved])
right(made, 2)
one, two, loads = Model(), Model(), loader()
first, second = (loads._get_all_weights(served(path), made) for path, made in ((base + "/plain", one), (other, two)))
loads.load_weights_and_postprocess(one, first, "cpu")
loads.load_weights_and_postprocess(two, second, "cpu")
right(one, 1)
right(two, 2)
"""
    base.run(sglang, base.PRELUDE + SGLANG_PRELUDE + code, model, tmp_path)


def test_a_draft_has_its_own_weights(sglang: Path, model: Path, tmp_path: Path) -> None:
    """The option `source` is for the served model. A draft that is loaded with the same options reads its own files,
    unless it is part of the model."""
    code = """
import overwire
store, target, draft = (sys.argv[2] + "/" + name for name in ("store", "target", "draft"))
for value, path in enumerate((store, target, draft), start=1):
    os.mkdir(path)
    full = torch.full((64, 64), float(value)).bfloat16()
    overwire.save_file({part + ".weight": full.clone() for part in "q k v linear".split()}, path + "/m.safetensors")
extra = {"source": store}
def first(made):
    return float(made.linear.weight[0, 0])
""" + base.REGISTER + """
import vllm.config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
def load(path):
    made = Model()
    get_model_loader(LoadConfig(load_format="overwire", model_loader_extra_config=extra)).load_weights(made, config(path))
    return first(made)
assert [load(path) for path in (target, draft, target)] == [1, 3, 1]  # without a configuration, the first model is served
whole = types.SimpleNamespace(model_config=config(draft), speculative_config=types.SimpleNamespace(target_model_config=config(target)),
                              device_config=types.SimpleNamespace(device="cpu"))
vllm.config.get_current_vllm_config_or_none = lambda: whole
assert [load(path) for path in (draft, target)] == [3, 1]
whole = types.SimpleNamespace(model_config=config(draft), device_config=types.SimpleNamespace(device="cpu"))
assert [load(path) for path in (draft, target)] == [1, 2]
""" + SGLANG_PRELUDE + """
import sglang.srt
context = sys.modules["sglang.srt.runtime_context"] = types.ModuleType("sglang.srt.runtime_context")
context.get_server_args = lambda: types.SimpleNamespace(model_path=target)
def load(path, draft):
    made = Model()
    loader(extra).load_model(made, served(path, draft))
    return first(made)
assert [load(target, False), load(draft, True), load(target, True)] == [1, 3, 1]
"""
    base.run(sglang, base.PRELUDE + code, model, tmp_path)
