"""Kept slice plans, against small stand-ins of what vLLM's plug-in hooks into."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import test_vllm as base

engines, model = base.engines, base.model

# A module of the engine's.
SMALL = (
    "import types\nimport torch\n"
    + base.PRELUDE[base.PRELUDE.index("class Model") : base.PRELUDE.index("def config")]
    + """
ran = []
class Copies(Model):
    def __init__(self, wide=64):
        super().__init__()
        del self.kept
        self.middle = torch.nn.Parameter(torch.zeros(32, 64, dtype=torch.bfloat16), requires_grad=False)
        self.turned = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16), requires_grad=False)
        self.wide = torch.nn.Parameter(torch.zeros(64, wide), requires_grad=False)
        self.padded = torch.nn.Parameter(torch.ones(80, 64, dtype=torch.bfloat16), requires_grad=False)
        self.experts = types.SimpleNamespace(place=torch.tensor([-1, 0], dtype=torch.int32))
    def load_weights(self, weights):
        ran.append(1)
        done = {"middle", "turned", "wide", "padded"}
        for name, tensor in weights:
            part = name.removesuffix(".weight")
            done |= self.put(part, tensor)
            if part == "linear":
                self.middle.data.copy_(tensor.narrow(0, 16, 32))
                at = 8 * (self.experts.place[1].item() + 1)
                self.padded[at : at + 64].data.copy_(tensor)
                self.padded[at + 64 :].data.fill_(0)
                self.padded[:at].data.zero_()
            elif part == "mlp.experts.0":
                self.turned.data.copy_(tensor.t())
            elif part not in ("q", "k", "v"):
                self.wide.data[:, :64].copy_(tensor.to(torch.float32))
            self.more(name)
        return done
    def more(self, name): pass
class Counts(Copies):
    def more(self, name): self.seen = name
class Adds(Copies):
    def __init__(self):
        super().__init__()
        self.names = {"a": [set()]}
    def more(self, name): self.names["a"][0].add(name)
class Marks(Copies):
    def more(self, name): self.middle.marked = True
class Swaps(Copies):
    def more(self, name): self.qkv.other = torch.nn.Parameter(self.middle.data[:0], requires_grad=False)
class Late(Copies):
    def load_weights(self, weights):
        done = super().load_weights(weights)
        self.padded[72:].data.zero_()
        return done
class Floats(Copies):
    def more(self, name): self.padded[0, 0].item() if name == "k.weight" else None
class Loads(Copies):
    def __init__(self):
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.int16), requires_grad=False)
    def load_weights(self, weights):
        def each():
            for name, tensor in weights:
                if name == "q.weight":
                    assert self.number[0, 0].item() == 0
                    self.number.data.copy_(tensor)
                yield name, tensor
        return super().load_weights(each()) | {"number"}
class Works(Copies):
    def more(self, name): torch.zeros(1).add_(1)
class Elsewhere(Copies):
    def __init__(self):
        super().__init__()
        self.tensor = torch.zeros(64, 64, dtype=torch.bfloat16)
    def load_weights(self, weights):
        def each():
            for name, tensor in weights:
                if name == "q.weight":
                    self.tensor.copy_(tensor)
                yield name, tensor
        return super().load_weights(each())
"""
)


def installed(engines: Path, folder: Path, wheel: bool = True) -> Path:
    """vLLM's stand-in as pip installs it, with the models of SMALL."""
    shutil.copytree(engines / "vllm", folder / "vllm")
    (folder / "vllm/models").mkdir()
    (folder / "vllm/models/__init__.py").touch()
    (folder / "vllm/models/small.py").write_text(SMALL)
    if wheel:
        (folder / "vllm-0.33.0.dist-info").mkdir()
    return folder


def test_keeps_a_plan(engines: Path, model: Path, tmp_path: Path) -> None:
    """A second load needs no loader where the first one only copied; whatever changed, or is
    wrong with the file, the loader runs again, and the weights are right."""
    code = """
import hashlib, os, struct, subprocess, vllm.model_executor.model_loader
import overwire.integrations.keeping as keeping, overwire.integrations.plans as plans
folder = sys.argv[2]
os.environ["OVERWIRE_PLANS"] = folder
stored = [torch.arange(n, n + 4096, dtype=torch.bfloat16).view(64, 64) for n in range(6)]
from vllm.models.small import *
def load(runs, kind="plain", cls=Copies, extra={}, place=0, **made):
    ran.clear()
    one = cls(**made)
    one.experts.place[1] = place
    loader(extra).load_weights(one, config(base + "/" + kind))
    assert torch.equal(one.qkv.weight, torch.cat([stored[n] for n in (1, 0, 2)]))
    assert torch.equal(one.linear.weight, stored[3]) and torch.equal(one.middle, stored[3][16:48])
    assert torch.equal(one.turned, stored[4].t()) and torch.equal(one.wide[:, :64], stored[5].float())
    at = 8 * place + 8
    assert torch.equal(one.padded[at : at + 64], stored[3]) and not one.padded[:at].any() and not one.padded[at + 64 :].any()
    assert "load_weights" not in vars(one)
    assert bool(ran) == runs, (runs, ran)
def files():
    return sorted(name for name in os.listdir(folder))
import overwire.integrations.recording as recording
usual, recording.EARLY = recording.EARLY, 1
load(True)  # early
late, = files()
plan = open(os.path.join(folder, late), "rb").read()
os.remove(os.path.join(folder, late))
recording.EARLY = usual
load(True)
assert open(os.path.join(folder, late), "rb").read() == plan
assert len(files()) == 1 and os.stat(folder).st_mode & 0o777 == 0o700
name, = files()
path = os.path.join(folder, name)
assert os.stat(path).st_mode & 0o777 == 0o600
load(False)
load(False, "compressed")  # the same tensors
overwire = sys.modules["overwire"]
overwire.preload(base + "/plain").result(60)
load(False)  # out of a preload
load(True, extra={"strict": False})
load(False, extra={"strict": False})
load(True, wide=65)  # a parameter of another shape
assert len(files()) == 3
load(True, place=1)  # the same tensors, but for what the loader goes by: kept in the place of the other plan
load(False, place=1)
load(True)
assert len(files()) == 3
# What is wrong with a file.
good = open(path, "rb").read()
def sealed(head, rest):
    body = struct.pack("<Q", len(head)) + head + rest
    return plans._MAGIC + hashlib.sha256(body).digest() + body
size, = struct.unpack_from("<Q", good, 54)
head, rest = json.loads(good[62 : 62 + size]), good[62 + size :]
assert good == sealed(good[62 : 62 + size], rest)
def other(**change):
    return sealed(json.dumps({**head, **change}).encode(), rest)
def block(at, value, row=0):
    out = bytearray(rest)
    struct.pack_into("<q", out, 64 * row + 8 * at, value)
    return sealed(json.dumps(head).encode(), bytes(out))
places = head["places"]
def place(at, value):
    return other(places=[places[0][:at] + [value] + places[0][at + 1 :], *places[1:]])
def view(at, value):
    return other(views=[head["views"][0][:at] + [value] + head["views"][0][at + 1 :], *head["views"][1:]])
bad = [b"", good[:40], good[:-1], good[:-64], good + b"x", bytes([good[0] ^ 1]) + good[1:], good[:70] + b"~" + good[71:],
    sealed(b"[" * 100000, rest), sealed(b"{}", rest), sealed(b"[]", rest), sealed(b"9" * 9000, rest), other(key="0" * 64),
    other(loaded=[1]), other(loaded={}), other(places=[]), other(places=[[]]), other(places=places[:-1]), other(places=places[::-1]),
    other(views=[]), other(zeros=[[0, 0, [1 << 40], [1]]]), other(zeros=[[99, 0, [1], [1]]]), other(zeros=[[0, 0, [1], []]]),
    other(zeros=7), other(reads=[["", "experts", "place", "00"]]), other(reads=[["", "experts", "", "00"]]),
    other(reads=[["x", "y", "z", "00"]]),
    other(views=head["views"][:1] * 2), place(0, "nothing"), place(0, 7), place(1, "torch.float16"), place(2, [64]), place(2, [1 << 70]),
    place(3, [1]), place(4, 2), place(5, 1), place(6, 1), good[:62] + rest, sealed(json.dumps(head).encode(), rest[64:]),
    sealed(json.dumps(head).encode(), rest[:64] + rest), sealed(json.dumps(head).encode(), b"")]
numbers = (-1, 1, 33, 1 << 20, 1 << 62, -(1 << 63))
bad += [block(at, value, row) for row in (0, 2) for at in range(8) for value in numbers if (at, value) != (5, -1)]
bad += [view(at, value) for at in (0, 1, 2, 5, 6) for value in (-1, 1 << 20, 1 << 61, True, "0")]
bad += [view(at, value) for at in (3, 4, 7) for value in ([], [64], [65, 64], [1 << 61, 1 << 61], 1)]
same = 0
for data in bad:
    with open(path, "wb") as out:
        out.write(data)
    if data == good:
        continue
    ran.clear()
    one = Copies()
    loader().load_weights(one, config(base + "/plain"))
    if not ran:
        same += 1  # a block of another tensor of the same shape: nothing of the file says so
        continue
    assert torch.equal(one.qkv.weight, torch.cat([stored[n] for n in (1, 0, 2)])) and torch.equal(one.linear.weight, stored[3])
    assert open(path, "rb").read() == good, "it was not kept anew"
assert same <= 4, same
with open(path, "wb") as out:
    out.write(good)
load(False)
# Files and folders of others, links, and what others may write.
os.chmod(path, 0o620)
load(True)
os.rename(path, path + "x")
os.symlink(path + "x", path)
load(True)
assert not os.path.islink(path)
os.remove(path)
os.mkfifo(path)
load(True)
os.chmod(folder, 0o777)
load(True)
os.chmod(folder, 0o700)
os.remove(path + "x")
if not os.geteuid():
    os.chown(path, 12345, -1)
    load(True)
load(False)
# What a loader does beside copying.
before = files()
for cls in (Counts, Adds, Marks, Swaps, Late, Floats, Loads, Works, Elsewhere):
    load(True, cls=cls)
    assert files() == before, cls
os.environ["OVERWIRE_PLANS"] = "off"
load(True)
# Two at once, and too many.
os.environ["OVERWIRE_PLANS"] = folder
plan = plans.read(folder, name[:-5], None)
other = subprocess.Popen([sys.executable, "-c", '''
import sys
from overwire.integrations import plans
folder, name = sys.argv[1:]
plan = plans.read(folder, name[:-5], None)
for _ in range(50):
    plans.keep(folder, "f" * 64, plan)
''', folder, name])
for _ in range(50):
    plans.keep(folder, "f" * 64, plan)
    found = plans.read(folder, "f" * 64, sys.modules["overwire.integrations.vllm.loader"].log)
    assert found == plan
assert other.wait() == 0
for n in range(70):
    plans.keep(folder, f"{n:064}", plan)
assert len(files()) == 64 and not [name for name in files() if name.endswith("tmp")], files()
"""
    base.run(installed(engines, tmp_path / "site"), base.REGISTER + base.PRELUDE + code, model, tmp_path / "plans")


CHANGES = {
    "as it is": "",
    "a function of the module that the loader calls": "small.turn = lambda tensor: tensor.t()",
    "a method": "small.Copies.more = lambda self, name: None",
    "a method that closes over a setting": """
def patched(swap):
    def more(self, name): return swap
    return more
small.Copies.more = patched(False)
""",
    "a partial method": "import functools\nsmall.Copies.more = functools.partialmethod(lambda self, swap, name: swap, False)",
    "an object that is called": "class Calls:\n    def __call__(self, name): pass\nsmall.Copies.more = Calls()",
    "a model's own attribute": "made.more = lambda name: None",
    "a parameter's loader": "import functools\nold = made.linear.weight.weight_loader\n"
    "made.linear.weight.weight_loader = functools.partial(lambda swap, param, loaded: old(param, loaded), False)",
    "a class of its own": "class Mine(small.Copies): pass\nmade = Mine()",
    "a default": "def more(self, name, swap=False): pass\nsmall.Copies.more = more",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_for_the_engines_own_code(engines: Path, model: Path, tmp_path: Path, change: str) -> None:
    """No plan is kept, nor used, for a loader with code from anywhere else."""
    code = f"""
os.environ["OVERWIRE_PLANS"] = sys.argv[2]
import vllm.model_executor.model_loader, vllm.models.small as small
def load():
    small.ran.clear()
    loader().load_weights(made, config(base + "/plain"))
    return bool(small.ran)
made = small.Copies()
assert load() and not load() and len(os.listdir(sys.argv[2])) == 1
made = small.Copies()
{CHANGES[change]}
ran = load()
assert ran == {change != "as it is"}, ran
assert len(os.listdir(sys.argv[2])) == 1
"""
    base.run(installed(engines, tmp_path / "site"), base.REGISTER + base.PRELUDE + code, model, tmp_path / "plans")


def test_a_plan_goes_by_the_engines_files(engines: Path, model: Path, tmp_path: Path) -> None:
    """A file of the engine's that has changed makes another plan; an engine that is no installed wheel has none."""
    code = """
os.environ["OVERWIRE_PLANS"] = sys.argv[2]
import vllm.model_executor.model_loader, vllm.models.small as small
loader().load_weights(small.Copies(), config(base + "/plain"))
print(bool(small.ran), len(os.listdir(sys.argv[2])) if os.path.exists(sys.argv[2]) else 0)
"""
    code = base.REGISTER + base.PRELUDE + code
    site = installed(engines, tmp_path / "site")
    assert [base.run(site, code, model, tmp_path / "plans") for _ in range(2)] == ["True 1\n", "False 1\n"]
    helper = site / "vllm/model_executor/model_loader/ep_weight_filter.py"  # no class and no parameter names it
    helper.write_text(helper.read_text() + "# changed\n")
    assert base.run(site, code, model, tmp_path / "plans") == "True 2\n"
    edited = installed(engines, tmp_path / "edited", wheel=False)
    assert base.run(edited, code, model, tmp_path / "none") == "True 0\n"


def test_opens_while_the_model_is_made(engines: Path, model: Path, tmp_path: Path) -> None:
    """vLLM's `load_model` finds the files open, if they are those that the model wants; what
    fails before then is said when it is due, and nothing stays open."""
    code = """
import shutil, threading, overwire
import vllm.model_executor.model_loader as loaders
from overwire.integrations import sheets
os.environ["OVERWIRE_PLANS"] = sys.argv[2]
opened, closed = [], []
class Opens(overwire.safe_open):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        opened.append(threading.current_thread() is threading.main_thread())
    def close(self):
        closed.append(self._model is not None)
        super().close()
overwire.safe_open = Opens
vllm_config = types.SimpleNamespace(device_config=types.SimpleNamespace(device="cpu"))
stored = [torch.arange(n, n + 4096, dtype=torch.bfloat16).view(64, 64) for n in range(6)]
class Copies(Model):
    def load_weights(self, weights):
        done = super().load_weights(weights)
        self.kept.clear()
        return done
def load(kind, made, fails=None, extra=None, **attributes):
    opened.clear(); closed.clear()
    one = Copies()
    vars(one).update(attributes)
    def load_model(self, vllm_config, model_config):
        if self._reader._opening is not None:
            self._reader._opening._thread.join()
        if fails is not None:
            raise fails
        self.load_weights(one, model_config)
        return one
    loaders.BaseModelLoader.load_model = load_model
    try:
        assert loader(extra).load_model(vllm_config, config(kind)) is one
        assert torch.equal(one.qkv.weight, torch.cat([stored[n] for n in (1, 0, 2)])) and torch.equal(one.linear.weight, stored[3])
    finally:
        assert opened == made, opened
        assert sum(closed) == len(opened), closed
        assert not [one for one in threading.enumerate() if one.name == "overwire opening"]
for _ in range(2):
    for kind in ("plain", "compressed"):
        load(base + "/" + kind, [False])
load(base + "/plain", [False], extra={"source": base + "/compressed"})
load(base + "/plain", [False, True], allow_patterns_overrides=["*.safetensors"])  # its index does not count then
load(base + "/plain", [False], local_experts={0})
load(base + "/plain", [], extra={"plan": False})
raised(KeyError, lambda: load(base + "/plain", [False], fails=KeyError("the model")))
shutil.copytree(base + "/plain", sys.argv[3])
path = sys.argv[3] + "/model.safetensors.index.json"
index = json.load(open(path))
index["weight_map"]["mlp.experts.1.bias"] = "model-10.safetensors"
json.dump(index, open(path, "w"))
assert "mlp.experts.1.bias" in raised(ValueError, lambda: load(sys.argv[3], [False]))
load(sys.argv[3], [False], local_experts={0})  # an expert of another rank
open(path, "w").write("{")
raised(ValueError, lambda: load(sys.argv[3], [False, True]))
os.remove(sys.argv[3] + "/model-10.safetensors")
open(sys.argv[3] + "/model-1.safetensors", "r+b").truncate(100)
raised(overwire.OverwireError, lambda: load(sys.argv[3], []))
"""
    base.run(engines, base.REGISTER + base.PRELUDE + code, model, tmp_path / "plans", tmp_path / "changed")


def test_ranks_share_what_pays(engines: Path, model: Path) -> None:
    """They share the reading onto GPUs, and from a store also onto CPUs."""
    code = """
def pays(device, source=None):
    reader = loader({"source": source} if source else {})._reader
    reader.begin(config(base + "/plain"), torch.nn.Linear(1, 1))
    reader._device = device
    return reader.pays
assert pays("cuda:1") and pays("cuda:1", base) and pays("cpu", "https://host/model/")
assert not pays("cpu") and not pays("cpu", base)
"""
    base.run(engines, base.REGISTER + base.PRELUDE + code, model)
