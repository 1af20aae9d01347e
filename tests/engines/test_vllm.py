"""Tests the vLLM plug-in with small stand-ins for vLLM's modules.

The stand-ins have the signatures of vLLM 0.32 and 0.33. tests/engines/engines_vllm.py runs the real code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import warm
from engines_quantised import CASES, PREPARED
from overwire.integrations.vllm.methods import COPIED

ROOT = Path(__file__).resolve().parents[2]

VLLM = {
    "__init__": '__version__ = "0.33.0"\n',
    "logger": """
import logging
def init_logger(name):
    log = logging.getLogger(name)
    log.warning_once = log.info_once = log.info
    return log
""",
    "config/__init__": "def get_current_vllm_config_or_none():\n    return None\n",
    "distributed/__init__": "",
    "distributed/parallel_state": "_TP = None\n",
    "config/load": """
from dataclasses import dataclass, field
@dataclass
class LoadConfig:
    load_format: str = "auto"
    safetensors_load_strategy: str | None = None
    model_loader_extra_config: dict = field(default_factory=dict)
    device: str | None = None
    use_tqdm_on_load: bool = True
""",
    "model_executor/__init__": "",
    "model_executor/model_loader/__init__": """
from .base_loader import BaseModelLoader
from .default_loader import DefaultModelLoader
_LOAD_FORMAT_TO_MODEL_LOADER = {"auto": DefaultModelLoader}
def register_model_loader(load_format):
    def _wrapper(model_loader_cls):
        assert load_format not in _LOAD_FORMAT_TO_MODEL_LOADER
        assert issubclass(model_loader_cls, BaseModelLoader)
        _LOAD_FORMAT_TO_MODEL_LOADER[load_format] = model_loader_cls
        return model_loader_cls
    return _wrapper
def get_model_loader(load_config):
    return _LOAD_FORMAT_TO_MODEL_LOADER[load_config.load_format](load_config)
""",
    "model_executor/model_loader/base_loader": """
from abc import ABC, abstractmethod
class BaseModelLoader(ABC):
    def __init__(self, load_config):
        self.load_config = load_config
    @abstractmethod
    def download_model(self, model_config): ...
    @abstractmethod
    def load_weights(self, model, model_config): ...
""",
    "model_executor/model_loader/ep_weight_filter": """
import re
def should_skip_weight(weight_name, local_expert_ids):
    found = re.search(r"\\.experts\\.(\\d+)\\.", weight_name)
    return local_expert_ids is not None and found is not None and int(found[1]) not in local_expert_ids
""",
    "model_executor/model_loader/weight_utils": "def enable_tqdm(use_tqdm_on_load):\n    return False\n",
    "model_executor/model_loader/default_loader": """
import dataclasses, glob, os
from .base_loader import BaseModelLoader
class DefaultModelLoader(BaseModelLoader):
    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: str | None
        subfolder: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list | None = None
        is_unused_weight: object = None
    counter_before_loading_weights: float = 0.0
    def __init__(self, load_config):
        super().__init__(load_config)
        assert load_config.load_format == "safetensors" and not set(load_config.model_loader_extra_config) - {"enable_weights_track"}
        self.local_expert_ids = None
        self._encoder_only_lm_prefixes = self._encoder_only_weights_mapper = None
    def _prepare_weights(self, model_name_or_path, subfolder, revision, fall_back_to_pt, allow_patterns_overrides):
        folder = os.path.join(model_name_or_path, subfolder) if subfolder else model_name_or_path
        files = [f for p in allow_patterns_overrides or ["*.safetensors"] for f in glob.glob(os.path.join(folder, p))]
        return folder, files[::-1], all(f.endswith(".safetensors") for f in files), "model.safetensors.index.json"
    def get_all_weights(self, model_config, model):
        yield from self._get_weights_iterator(DefaultModelLoader.Source(
            model_config.model, model_config.revision, is_unused_weight=getattr(model, "is_unused_checkpoint_weight", None),
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None)))
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)
    def download_model(self, model_config):
        self._prepare_weights(model_config.model, None, model_config.revision, True, None)
    def load_weights(self, model, model_config):
        self.local_expert_ids = getattr(model, "local_experts", None)
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        if loaded is not None:
            self.track_weights_loading(model, loaded, quantized=False)
    def track_weights_loading(self, model, loaded_weights, quantized=False):
        loaded_weights.update(name for name, _ in model.named_parameters() if "linear" in name)
""",
}

@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with the stand-ins as a package."""
    base = tmp_path_factory.mktemp("engines")
    for name, text in VLLM.items():
        path = base / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return base


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model in two shards with an index.json, compressed and plain, in two folders."""
    import overwire
    import torch

    base = tmp_path_factory.mktemp("model")
    tensors = {f"{part}.weight": torch.arange(n, n + 4096, dtype=torch.bfloat16).view(64, 64) for n, part in enumerate(PARTS)}
    for kind in ("plain", "compressed"):
        (base / kind).mkdir()
        for at, file in enumerate(("model-1.safetensors", "model-10.safetensors")):
            overwire.save_file(dict(list(tensors.items())[at * 3 : at * 3 + 3]), base / kind / file, compress=kind == "compressed")
        index = {name: f"model-{1 if n < 3 else 10}.safetensors" for n, name in enumerate(tensors)}
        (base / kind / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return base


PARTS = ["k", "q", "v", "linear", "mlp.experts.0", "mlp.experts.1"]

PRELUDE = """
import os
import json, sys, types, importlib.metadata
import torch
base = sys.argv[1]
class Model(torch.nn.Module):
    def __init__(self, keep=False):
        super().__init__()
        self.keep = keep
        self.qkv, self.linear = torch.nn.Module(), torch.nn.Module()
        self.qkv.weight = torch.nn.Parameter(torch.zeros(192, 64, dtype=torch.bfloat16), requires_grad=False)
        self.linear.weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16), requires_grad=False)
        def fused(param, loaded, shard=None):
            at = "qkv".index(shard) * 64
            param.data[at : at + 64].copy_(loaded)
        self.qkv.weight.weight_loader = fused
        self.linear.weight.weight_loader = lambda param, loaded: param.data.copy_(loaded)
        self.kept = []
    def load_weights(self, weights):
        done = set()
        for name, tensor in weights:
            self.kept.append((name, tensor if self.keep else None))
            done |= self.put(name.removesuffix(".weight"), tensor)
        return done
    def put(self, part, tensor):
        if part in ("q", "k", "v"):
            self.qkv.weight.weight_loader(self.qkv.weight, tensor, part)
            return {"qkv.weight"}
        if part == "linear":
            self.linear.weight.weight_loader(self.linear.weight, tensor)
            return {"linear.weight"}
        return set()
def config(path):
    return types.SimpleNamespace(model=str(path), revision=None, quantization=None)
def loader(extra=None):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    return get_model_loader(LoadConfig(load_format="overwire", model_loader_extra_config=extra or {}))
def raised(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")
"""

REGISTER = "from overwire.integrations.vllm import register\nregister()\n"


def run(engines: Path, code: str, *arguments: object, fresh: bool = False) -> str:
    """Runs a program with the stand-ins for vLLM. fresh: in a process that has not imported torch."""
    words = ["-c", f"import sys\nsys.path.insert(0, {str(engines)!r})\n{code}", *map(str, arguments)]
    done = (warm.fresh if fresh else warm.run)(words, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.imports_torch
def test_registration_runs_nothing(engines: Path) -> None:
    """Registration imports neither torch, nor vLLM's loaders, nor the engine, even if it is repeated. It adds the
    format to vLLM's loaders, whether vLLM imports them before or after it."""
    code = """
from overwire.integrations.vllm import register
register(); register()
import vllm.config
assert not {"torch", "overwire._core", "overwire._engine", "vllm.model_executor"} & set(sys.modules), sorted(sys.modules)
import vllm.model_executor.model_loader as loaders
assert list(loaders._LOAD_FORMAT_TO_MODEL_LOADER) == ["auto", "overwire"]
register()
assert len([finder for finder in sys.meta_path if "overwire" in type(finder).__module__]) == 1
assert "overwire._core" not in sys.modules
"""
    run(engines, code, fresh=True)
    late = "import vllm.model_executor.model_loader as loaders\n" + REGISTER + "assert 'overwire' in loaders._LOAD_FORMAT_TO_MODEL_LOADER\n"
    run(engines, late)


def test_loads_in_the_order_of_the_files(engines: Path, model: Path) -> None:
    """Plain and compressed files are loaded in file order with little memory. A tensor stays valid after the next one
    was taken, and after the loader is gone."""
    code = """
for kind in ("plain", "compressed"):
    made = Model(keep=True)
    loader({"max_memory": 10000, "plan": False}).load_weights(made, config(base + "/" + kind))
    assert [name for name, _ in made.kept] == [p + ".weight" for p in json.loads(sys.argv[2])], made.kept
    for n, (name, tensor) in enumerate(made.kept):
        assert torch.equal(tensor, torch.arange(n, n + 4096, dtype=torch.bfloat16).view(64, 64)), name
    assert torch.equal(made.qkv.weight, torch.cat([made.kept[n][1] for n in (1, 0, 2)]))
    again = [name for name, _ in loader().get_all_weights(config(base + "/" + kind), made)]
    assert again == [name for name, _ in made.kept]
"""
    run(engines, REGISTER + PRELUDE + code, model, json.dumps(PARTS))


def test_slices_are_loaded_in_place(engines: Path, model: Path) -> None:
    """Slices are loaded to where the model's loader would copy them. A loader that does more than copy gets tensors."""
    code = """
import vllm.model_executor.model_loader
import overwire.integrations.load_plan.copies as copies
loads = []
fill = copies.load_copies
copies.load_copies = lambda noted, most: (loads.append([copy.of.name for copy in noted]), fill(noted, most))
stored = [torch.arange(n, n + 4096, dtype=torch.bfloat16).view(64, 64) for n in range(6)]
k, q, v, linear = stored[:4]
class Other(Model):
    def load_weights(self, weights):
        done = set()
        for name, tensor in weights:
            done |= super().load_weights([(name, tensor)])
            self.more(name, tensor)
        self.kept.clear()
        return done
    def after(self): ...
def check(kind, more, wanted, planned, extra={}):
    class This(Other):
        pass
    This.more = more
    made = This()
    loads.clear()
    loader({"strict": False, **extra}).load_weights(made, config(base + "/" + kind))
    assert torch.equal(made.qkv.weight, torch.cat([q, k, v])), more
    assert torch.equal(made.linear.weight, wanted), more
    assert bool(loads) == planned, (loads, more)
    return made
def name_is(name):
    return lambda call: lambda self, called, tensor: call(self, tensor) if called == name else None
@name_is("linear.weight")
def nothing(self, t): pass
@name_is("linear.weight")
def transposed(self, t):
    self.linear.weight.data.zero_() if type(t) is torch.Tensor else None
    self.other = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16), requires_grad=False)
    self.other.data.copy_(t.t())
@name_is("mlp.experts.0.weight")
def twice(self, t): self.linear.weight.data.copy_(t)
@name_is("mlp.experts.0.weight")
def sums(self, t): self.linear.weight.data.copy_(t + 1)
@name_is("mlp.experts.0.weight")
def reads(self, t): self.linear.weight.data.mul_(2)
@name_is("mlp.experts.0.weight")
def keeps(self, t): self.linear.kept = t
@name_is("mlp.experts.0.weight")
def numbers(self, t): self.linear.first = t[0].tolist()
@name_is("mlp.experts.0.weight")
def writes(self, t):
    t.data.view(-1)[:8].zero_()
    self.linear.weight.data[:32].copy_(t[:32])
@name_is("mlp.experts.0.weight")
def rounds(self, t):
    self.other = torch.zeros(64, 64, dtype=torch.bfloat16)
    self.other.copy_(t.to(torch.float8_e5m2).to(torch.bfloat16))
@name_is("mlp.experts.0.weight")
def asks(self, t):
    part = t.narrow(0, 0, 8)
    assert t.is_cpu and part.device.type == "cpu" and not (part.is_meta or part.is_cuda)
    assert t.to(self.linear.weight.device).device.type == "cpu"
    self.other = torch.zeros(8, 64, dtype=torch.bfloat16)
    self.other.copy_(part)
@name_is("mlp.experts.0.weight")
def lists(self, t): self.linear.first = self.qkv.weight.data.view(torch.int16).tolist()
import overwire.integrations.load_plan.record_copies as record_copies
usual = record_copies.EARLY
for kind, record_copies.EARLY in (("plain", usual), ("compressed", usual), ("plain", 1), ("compressed", 1)):
    check(kind, nothing, linear, True)
    check(kind, nothing, linear, False, {"plan": False})
    check(kind, twice, stored[4], False)
    check(kind, sums, stored[4] + 1, False)
    check(kind, reads, linear * 2, False)
    check(kind, keeps, linear, True)  # this is found at the end
    check(kind, numbers, linear, False)
    check(kind, lists, linear, False)
    assert torch.equal(check(kind, asks, linear, True).other, stored[4][:8]) and "device" not in vars(torch.Tensor)
    made = check(kind, rounds, linear, False)
    assert torch.equal(made.other, stored[4].to(torch.float8_e5m2).to(torch.bfloat16))
    written = stored[4][:32].clone()
    written.view(-1)[:8] = 0
    check(kind, writes, torch.cat([written, linear[32:]]), False)
record_copies.EARLY = usual
class Turns(Model):
    def load_weights(self, weights):
        self.turned = torch.zeros(64, 64, dtype=torch.bfloat16)
        self.wide = torch.zeros(64, 64)
        self.third = torch.zeros(4, 16, 8, dtype=torch.bfloat16)
        self.one = torch.zeros(5, dtype=torch.bfloat16)
        for name, tensor in weights:
            if name == "q.weight":
                self.turned.copy_(tensor.t())
                self.wide.copy_(tensor.to(torch.float32))
                self.third.copy_(tensor.view(4, 16, 64)[..., 3:11])
                self.one.copy_(tensor[7, 2:7])
loads.clear()
made = Turns()
loader({"strict": False, "max_memory": 100}).load_weights(made, config(base + "/compressed"))
assert len(loads) == 1 and len(loads[0]) == 4
assert torch.equal(made.turned, q.t()) and torch.equal(made.wide, q.float())
assert torch.equal(made.third, q.view(4, 16, 64)[..., 3:11]) and torch.equal(made.one, q[7, 2:7])
"""
    run(engines, REGISTER + PRELUDE + code, model)


def test_loads_while_the_loader_runs(engines: Path, model: Path, tmp_path: Path) -> None:
    """As long as the model's loader only copies, data is loaded while the loader still runs. Whatever it does later,
    the model is the same as one that vLLM loads without overwire. Missing tensors raise an error."""
    code = """
import shutil, vllm.model_executor.model_loader
import overwire.integrations.load_plan.copies as copies, overwire.integrations.load_plan.record_copies as record_copies
record_copies.EARLY = 1
begun = []
begin, end = copies.Early.begin, copies.Early.end
def noted(self, every):
    self.end()  # so that each tensor has its own load, even on a slow machine
    left = begin(self, every)
    begun.append(len(every) - len(left))
    return left
copies.Early.begin = noted
stored = [torch.arange(n, n + 4096, dtype=torch.bfloat16).view(64, 64) for n in range(6)]
k, q, v, linear = stored[:4]
class Other(Model):
    reads = False
    def load_weights(self, weights):
        if self.reads:
            self.sum = self.qkv.weight.sum()
        for name, tensor in weights:
            self.put(name.removesuffix(".weight"), tensor)
            if name == "linear.weight":
                self.then(tensor)
        self.kept.clear()
    def then(self, tensor): pass
class Doubles(Other):
    def then(self, tensor): self.linear.weight.data.mul_(2)
class Adds(Other):
    def then(self, tensor): self.qkv.weight.data[:64].add_(tensor)
class Keeps(Other):
    def then(self, tensor): self.linear.kept = tensor
class Again(Other):
    def then(self, tensor): self.qkv.weight.data[:64].copy_(tensor)
class Reads(Other):
    reads = True
class Fails(Other):
    def then(self, tensor): raise KeyError("surplus")
for kind in ("plain", "compressed"):
    for cls, first, last, some in ((Other, q, linear, True), (Doubles, q, linear * 2, True), (Adds, q + linear, linear, True),
            (Keeps, q, linear, True), (Again, linear, linear, True), (Reads, q, linear, False)):
        begun.clear()
        made = cls()
        loader({"strict": False}).load_weights(made, config(base + "/" + kind))
        assert torch.equal(made.qkv.weight, torch.cat([first, k, v])), cls
        assert torch.equal(made.linear.weight, last), cls
        assert (sum(begun) > 1) == some, (cls, begun)
    assert made.sum == 0
    begun.clear()
    assert raised(KeyError, lambda: loader({"strict": False}).load_weights(Fails(), config(base + "/" + kind))) == "'surplus'"
    assert sum(begun) > 1
# Damage is found early or late.
shutil.copytree(base + "/compressed", sys.argv[2])
path = sys.argv[2] + "/model-1.safetensors"
data = bytearray(open(path, "rb").read())
data[-100] ^= 1
open(path, "wb").write(data)
overwire = sys.modules["overwire"]
for record_copies.EARLY in (1, 1 << 40):
    text = raised(overwire.CorruptError, lambda: loader({"strict": False}).load_weights(Other(), config(sys.argv[2])))
    assert "model-1.safetensors" in text, text
"""
    run(engines, REGISTER + PRELUDE + code, model, tmp_path / "damaged")


def test_the_loader_chooses_the_same_tensors_as_vllm(engines: Path, model: Path) -> None:
    """overwire's loader chooses the same tensors as vLLM's, even with experts of other ranks, unused weights, other
    patterns, secondary weights or a `source`."""
    code = """
from vllm.model_executor.model_loader import DefaultModelLoader
def names(extra=None, path=base + "/compressed", **settings):
    made = Model()
    made.__dict__.update(settings)
    chosen = loader({"strict": False, **(extra or {})})
    chosen.load_weights(made, config(path))
    return [name.removesuffix(".weight") for name, _ in made.kept]
assert names(local_experts={1}) == ["k", "q", "v", "linear", "mlp.experts.1"]
assert names(is_unused_checkpoint_weight=lambda name: "experts" in name) == ["k", "q", "v", "linear"]
assert len(names(is_unused_checkpoint_weight=lambda name: True)) == 6
assert names(allow_patterns_overrides=["model-1.safetensors"]) == ["k", "q", "v"]
second = DefaultModelLoader.Source(base + "/plain", None, prefix="two.", allow_patterns_overrides=["model-10*"])
assert names(secondary_weights=[second])[6:] == ["two.linear", "two.mlp.experts.0", "two.mlp.experts.1"]
assert len(names({"source": base + "/plain"}, path="/nowhere")) == 6
made = Model()
there = loader({"source": base + "/plain"})
list(there.get_all_weights(config("/nowhere"), made))
assert len(list(there.get_all_weights(config(base + "/compressed"), made))) == 6
import os, shutil
shutil.copytree(base + "/plain", base + "/few")
os.remove(base + "/few/model-10.safetensors")
assert len(list(there.get_all_weights(config(base + "/few"), made))) == 3  # a reload reads the given files
there.download_model(config("/nowhere"))
"""
    run(engines, REGISTER + PRELUDE + code, model)


def test_garbage_collections_during_a_load(engines: Path, model: Path) -> None:
    """During a load, vLLM's garbage collections examine only new objects. After the load, even after an error, earlier
    objects are examined again. Objects that the program has frozen stay frozen, but not the few that Python itself
    freezes."""
    code = """
import gc, weakref
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
class Ring: pass
def ring():
    one = Ring()
    one.me = one
    return weakref.ref(one)
def load_model(self, vllm_config, model_config, prefix=""):
    new = ring()
    gc.collect()
    alive.append((old() is not None, new() is not None))
    if vllm_config is None:
        raise ValueError("no configuration")
BaseModelLoader.load_model = load_model
gc.unfreeze()  # objects frozen at the start of the process
gc.disable()
old, alive, there = ring(), [], loader({"plan": False})
there.load_model(object(), config(base))
assert "no configuration" in raised(ValueError, lambda: there.load_model(None, config(base)))
assert alive == [(True, False)] * 2 and gc.get_freeze_count() == 0
gc.collect()
assert old() is None
gc.freeze()
count, old = gc.get_freeze_count(), ring()
there.load_model(object(), config(base))
assert alive[-1] == (False, False) and gc.get_freeze_count() > count // 2 > 0
sys.modules[type(there).__module__]._FROZEN_BY_PYTHON, old = 2 * count, ring()
there.load_model(object(), config(base))
assert alive[-1] == (True, False) and gc.get_freeze_count() == 0
"""
    run(engines, REGISTER + PRELUDE + code, model)


def test_errors_say_what_is_wrong(engines: Path, model: Path, tmp_path: Path) -> None:
    """Errors name wrong settings, missing weights and parts, names that the index lacks, and damage."""
    code = """
import os, shutil, overwire
def without(name, index=False):
    path = sys.argv[2] + "/" + name.replace(".", "_") + str(index)
    os.mkdir(path)
    tensors = overwire.load_file(base + "/compressed")
    del tensors[name]
    overwire.save_file(tensors, path + "/model-1.safetensors")
    if index:
        weight_map = dict.fromkeys([*tensors, name], "model-1.safetensors")
        open(path + "/model.safetensors.index.json", "w").write(json.dumps({"weight_map": weight_map}))
    return path
def load(path, extra=None):
    loader(extra).load_weights(Model(), config(path))
assert "unknown key 'speed'; expected " + ", ".join(sys.argv[3:]) in raised(ValueError, lambda: loader({"speed": 1}))
for wrong in (
    {"source": 1}, {"max_memory": True}, {"max_memory": "much"}, {"strict": "no"}, {"storage_options": []},
    {"prepared": 1},
    {"offload": 5}, {"offload": "many"}, {"offload": "8GB", "prepared": True},
):
    assert next(iter(wrong)) in raised(ValueError, lambda: loader(wrong))
for right in ({"prepared": True}, {"prepared": "folder"}, {"offload": True}, {"offload": "8GB"}, {"offload": False}):
    loader(right)
said = raised(ValueError, lambda: load(without("linear.weight")))
assert "not initialized from checkpoint: {'linear.weight'}" in said, said
said = raised(ValueError, lambda: load(without("k.weight")))
assert "{'qkv.weight[k]'}" in said and "strict" in said, said
load(without("v.weight"), {"strict": False})
said = raised(ValueError, lambda: load(without("mlp.experts.0.weight", True)))
assert "mlp.experts.0.weight (of model-1.safetensors)" in said, said
bad = shutil.copytree(base + "/compressed", sys.argv[2] + "/bad")
file = bad + "/model-10.safetensors"
data = bytearray(open(file, "rb").read())
data[8 + int.from_bytes(data[:8], "little") + 500] ^= 1  # in linear.weight
open(file, "wb").write(data)
said = raised(overwire.CorruptError, lambda: load(bad))
assert "model-10.safetensors" in said and "tensor" in said and "chunk" in said, said
"""
    page = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| [^|]+ \|", page.partition("## Extra configuration")[2].partition("\n## ")[0], re.M)
    run(engines, REGISTER + PRELUDE + code, model, tmp_path, *documented)


def test_the_table_of_quantised_models_equals_the_loaders() -> None:
    """docs/vllm-internals.md lists each quantisation method once, or once for each kind of checkpoint. The methods that
    it lists as loaded by slices are those of the loader. Prepared state is for the methods of engines_quantised.py."""
    lines = (ROOT / "docs/vllm-internals.md").read_text(encoding="utf-8").splitlines()
    rows = [row for row in (line.split("|") for line in lines) if len(row) == 7 and "`" in row[2]]
    slices = {name for row in rows if "by slices" in row[3] for name in re.findall(r"`([\w-]+)`", row[2])}
    assert slices == COPIED and len(rows) > 12
    for row in rows:  # rows with models of engines_quantised.py
        names = re.findall(r"`([\w-]+)`", row[2])
        kept = {f"{kind}, {case}" in PREPARED for case, (name, _, kinds) in CASES.items() if name in names for kind in kinds}
        assert not kept or {"yes": {True}, "no": {False}}.get(row[4].strip(), {True, False}) >= kept, row


def test_joins_a_preload(engines: Path, model: Path) -> None:
    """With OVERWIRE_PRELOAD in the environment, a load uses the preloaded data."""
    code = """
import os
os.environ["OVERWIRE_PRELOAD"] = sys.argv[1] + "/compressed"
""" + PRELUDE + """
from overwire.integrations.vllm import register
register()
assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
import overwire
assert "overwire._core" in sys.modules  # started by the import
assert overwire.preload(base + "/compressed").wait(60)
size = sum(os.path.getsize(base + "/compressed/" + f) for f in os.listdir(base + "/compressed") if f.endswith("rs"))
chosen, made = loader(), Model()
chosen.load_weights(made, config(base + "/compressed"))
joined = overwire.last_report()["stages"]["read_bytes"]
loader().load_weights(Model(), config(base + "/compressed"))
alone = overwire.last_report()["stages"]["read_bytes"]
assert joined == 0 and alone > size * 0.5, (alone, joined, size)  # two of six tensors are not loaded
"""
    run(engines, code, model)


def test_the_parent_process_of_vllm_does_not_preload(engines: Path, model: Path) -> None:
    """vLLM's parent process does not preload: a child loads the model, and no engine survives a fork."""
    code = """
import os, types
os.environ["OVERWIRE_PRELOAD"] = sys.argv[1] + "/compressed"
sys.modules["vllm.plugins"] = types.ModuleType("vllm.plugins")
from overwire.integrations.vllm import register
register()
assert "overwire._core" not in sys.modules and "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
"""
    run(engines, code, model)


def test_prepared_state_is_written_when_the_engine_is_ready(engines: Path, model: Path) -> None:
    """A worker starts to write prepared state when it has warmed up. Calls that change the weights or their memory wait
    until the state is written. Workers without prepared state are not affected."""
    code = """
import overwire.integrations.vllm as plug
done = []
class Worker:
    vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(enable_sleep_mode=False))
    def load_model(self): done.append("load")
    def compile_or_warm_up_model(self): done.append("warm"); return 7
    def sleep(self, level=1): done.append(("sleep", level))
    def shutdown(self): done.append("shutdown")
workers = types.SimpleNamespace(Worker=Worker)
class CPUWorker(Worker):
    def compile_or_warm_up_model(self): done.append("cpu"); return super().compile_or_warm_up_model()
plug._wrap_gpu_worker(workers); plug._wrap_gpu_worker(workers)
cpu = types.SimpleNamespace(CPUWorker=CPUWorker)
plug._wrap_cpu_worker(cpu); plug._wrap_cpu_worker(cpu)
assert Worker().compile_or_warm_up_model() == 7 and done == ["warm"], done
sys.modules["overwire.integrations.vllm.prepared"] = types.SimpleNamespace(
    begin_writing=lambda: done.append("begin"), finish_writing=lambda: done.append("finish"))
done.clear()
one = CPUWorker()
one.load_model(); one.compile_or_warm_up_model(); one.sleep(2); one.shutdown()
assert done == ["load", "cpu", "warm", "begin", "begin", "finish", ("sleep", 2), "finish", "shutdown"], done
"""
    run(engines, PRELUDE + code, model)
