"""Tests overwire's sleep back end for vLLM with stand-ins for vLLM's modules. bench/gpu/device_vllm.py tests it in real
vLLM."""

from __future__ import annotations

from pathlib import Path

import test_live
import test_vllm

SLEEP = {
    "device_allocator/__init__": """
import types
ALLOCATOR = types.SimpleNamespace(pointer_to_data={}, calls=[])
def get_mem_allocator_instance():
    return ALLOCATOR
""",
    "device_allocator/cumem": """
def unmap_and_release(handle):
    handle[2].zero_()
""",
    "device_allocator/sleep_mode_backend": """
from . import ALLOCATOR
class CuMemBackend:
    def __init__(self):
        self._state = "RUNNING"
    def suspend(self, level=1):
        ALLOCATOR.calls.append(("sleep", level))
        for data in ALLOCATOR.pointer_to_data.values():
            if not data.is_asleep:
                data.handle[2].zero_()
            data.is_asleep = True
    def resume(self, tags=None):
        ALLOCATOR.calls.append(("wake", tags))
        for data in ALLOCATOR.pointer_to_data.values():
            if tags is None or data.tag in tags:
                data.is_asleep = False
    def discard(self, tags):
        ALLOCATOR.calls.append(("discard", tags))
class SleepModeBackendFactory:
    _registry = {}
    @classmethod
    def register_backend(cls, name, module_path, class_name):
        assert name not in cls._registry
        cls._registry[name] = (module_path, class_name)
""",
    "v1/__init__": "",
    "v1/worker/__init__": "",
    "v1/worker/gpu_worker": """
class Worker:
    loads = 0
    def load_model(self, *, load_dummy_weights=False):
        Worker.loads += 1
        return load_dummy_weights
    @property
    def sleep_mode_backend(self):
        return self.backend
    def compile_or_warm_up_model(self):
        return "warm"
    def sleep(self, level=1):
        self.backend.suspend(level)
    def wake_up(self, tags=None):
        self.backend.resume(tags)
    def reload_weights(self, **named):
        self.model_runner.reload_weights(**named)
    def checkpoint_prepare(self):
        ALLOCATOR.calls.append("checkpoint_prepare")
""".replace("class", "from vllm.device_allocator import ALLOCATOR\nclass", 1),
    "v1/worker/gpu_model_runner": """
from vllm.device_allocator import ALLOCATOR
def reload_weights(vllm_config, model, weights_iterator, weights_path, is_checkpoint_format):
    ALLOCATOR.calls.append("reload")
    model.fill()
class Runner:
    def get_model(self):
        return self.model
    def reload_weights(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True):
        reload_weights(self.config, self.model, weights_iterator=weights_iterator, weights_path=weights_path,
            is_checkpoint_format=is_checkpoint_format)
        ALLOCATOR.calls.append("reset")
""",
}

SLEEPS = """
def raise_(error):
    raise error
from vllm.device_allocator import ALLOCATOR, sleep_mode_backend
assert sleep_mode_backend.SleepModeBackendFactory._registry == {"overwire": ("overwire.integrations.vllm.sleeping", "SleepBackend")}
from overwire.integrations.vllm import sleeping
made = torch.Generator().manual_seed(5)
kinds = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]
memory = [torch.randn(1 << 15, generator=made).mul(8).to(kind).view(torch.uint8) for kind in kinds[:4]]
memory += [torch.randint(0, 256, (1 << 14,), generator=made, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)]
cache = torch.ones(64, dtype=torch.uint8)
for n, held in enumerate([*memory, cache]):
    data = types.SimpleNamespace(handle=(0, held.numel(), held), tag="weights" if n < 6 else "kv_cache", is_asleep=False)
    ALLOCATOR.pointer_to_data[1000 + n] = data
sleeping.memory_of = lambda ptr, size, device: ALLOCATOR.pointer_to_data[ptr].handle[2]
torch.accelerator.synchronize = lambda device: None
before = [held.clone() for held in memory]
assert [sleeping._dtype_for(held) for held in memory[:5]] == kinds
backend = sleeping.SleepBackend()
register()
from vllm.v1.worker import gpu_worker
register(); register()
worker = gpu_worker.Worker()
worker.backend = backend
asked = []
ready, backend.prepare = backend.prepare, lambda: asked.append(1)
for enabled, name in ((True, "overwire"), (True, "cumem"), (False, "overwire")):
    worker.vllm_config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(enable_sleep_mode=enabled, sleep_mode_backend=name),
        load_config=types.SimpleNamespace(load_format="auto"))
    assert worker.load_model(load_dummy_weights=name) == name
assert asked == [1] and worker.loads == 3
ready()
assert backend._memory.wait(60) and backend._memory.nbytes == 0  # host memory needs no preparation
import overwire
real, overwire.prepare_sleep = overwire.prepare_sleep, lambda tensors: raise_(overwire.OutOfMemoryError("none"))
ready()
overwire.prepare_sleep = real
for tags in (None, ["weights"], None):
    backend.suspend(1)
    assert not any(held.any() for held in memory) and ALLOCATOR.calls[-1] == ("sleep", 2)
    backend.suspend(1)  # the weights still sleep
    if tags:
        backend.resume(["kv_cache"])
        assert not any(held.any() for held in memory)
    backend.resume(tags)
    assert all(torch.equal(held, was) for held, was in zip(memory, before)) and backend._asleep is None
backend.suspend(2)
assert backend._asleep is None
backend.discard(("kv_cache",))
assert ALLOCATOR.calls[-1] == ("discard", ("kv_cache",))
assert backend.preserves_compiled_artifacts()
"""

WORKER = """
folder, images = os.path.join(base, "model"), os.path.join(base, "images")
os.environ["OVERWIRE_SLEEP_IMAGES"] = images  # before the engine starts
import logging, overwire, shutil
from vllm.config.load import LoadConfig
from vllm.device_allocator import ALLOCATOR
from overwire.integrations.vllm import sleeping
from vllm.v1.worker import gpu_model_runner, gpu_worker
register()
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
sleeping.log.addHandler(handler)
sleeping.log.setLevel(logging.INFO)
os.mkdir(folder)
overwire.save_file({"w": torch.arange(9000).bfloat16()}, folder + "/m.safetensors")
sleeping.memory_of = lambda ptr, size, device: ALLOCATOR.pointer_to_data[ptr].handle[2]
torch.accelerator.synchronize = lambda device: None
class Model:
    def __init__(self):
        self.memory = [torch.zeros(size, dtype=torch.uint8) for size in (1 << 16, 1 << 15, 9)]
        self.cache = torch.ones(64, dtype=torch.uint8)
        self.shift = 0
    def parameters(self):
        return []
    def fill(self):
        made = torch.Generator().manual_seed(5 + self.shift)
        for held in self.memory:
            held.random_(0, 256, generator=made)
class Worker(gpu_worker.Worker):
    def __init__(self):
        ALLOCATOR.pointer_to_data.clear()
        model = Model()
        for n, held in enumerate([*model.memory, model.cache]):
            data = types.SimpleNamespace(handle=(0, held.numel(), held), tag="weights" if n < 3 else "kv_cache", is_asleep=False)
            ALLOCATOR.pointer_to_data[1000 + n] = data
        self.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="overwire", model=folder, revision=None),
            load_config=LoadConfig())
        self.backend = sleeping.SleepBackend()
        self.model_runner = gpu_model_runner.Runner()
        self.model_runner.config, self.model_runner.model, self.model = self.vllm_config, model, model
        model.fill()
        self.want = [held.clone() for held in model.memory]
    def start(self, **named):
        self.load_model(**named)
        assert self.compile_or_warm_up_model() == "warm"
        return self
    def is_right(self):
        return all(map(torch.equal, self.model.memory, self.want))
    def cycle(self, reloads, level=2, said=""):
        # Runs the calls of vLLM's snapshot server.
        del lines[:]
        self.sleep(level=level)
        assert not any(held.any() for held in self.model.memory)
        self.wake_up(tags=["kv_cache"])
        assert not any(held.any() for held in self.model.memory)
        self.wake_up(tags=["weights"])
        assert self.is_right() != reloads, lines
        del ALLOCATOR.calls[:]
        self.reload_weights()
        assert ALLOCATOR.calls == (["reload", "reset"] if reloads else ["reset"]), ALLOCATOR.calls
        assert self.is_right() and (said in " ".join(lines)), lines
        self.backend.finish_storing()
"""

LEVEL2 = """
one = Worker().start()
for _ in range(3):
    one.cycle(False)
assert len(os.listdir(images)) == 1 and "in 0." in lines[-1]
one.cycle(False, said="restored")
one.cycle(False, level=1)

# Another engine with equal weights uses the same file.
Worker().start().cycle(False)
assert len(os.listdir(images)) == 1

# Changed weights are never restored from the file. After a reload from the model's files, level 2 works again.
one = Worker().start()
one.backend.finish_storing()
one.model.memory[1][5] += 1
one.cycle(True, said="the weights have changed")
one.cycle(False)

# If the files have changed, or the reload is from other files, vLLM's own reload runs.
del ALLOCATOR.calls[:]
for named in ({"weights_path": folder}, {"weights_iterator": iter(())}, {"is_checkpoint_format": False}):
    one.reload_weights(**named)
assert ALLOCATOR.calls == ["reload", "reset"] * 3
overwire.save_file({"w": torch.arange(9001).bfloat16()}, folder + "/m.safetensors")
one.model.shift = 1
one.sleep(level=2)
one.wake_up()
assert one.is_right()
del ALLOCATOR.calls[:]
one.reload_weights()
assert ALLOCATOR.calls == ["reload", "reset"] and not one.is_right()  # these are the new weights of the files
one.want = [held.clone() for held in one.model.memory]
one.cycle(False)

# If the files are missing or damaged, vLLM's own reload runs. The files are then written again.
for damage in (shutil.rmtree, lambda path: [os.truncate(os.path.join(path, name), 700) for name in os.listdir(path)]):
    one = Worker().start()
    one.backend.finish_storing()
    one.want = [held.clone() for held in one.model.memory]
    one.sleep(level=2)
    damage(images)
    os.makedirs(images, mode=0o700, exist_ok=True)
    del lines[:]
    one.wake_up()
    assert not one.is_right() and len(lines) == 1 and "cannot restore the weights" in lines[0], lines
    one.reload_weights()
    assert one.is_right()
    one.cycle(False)

# Before the weights are stored, and for random weights or other formats, level 2 is vLLM's own.
one = Worker()
one.load_model()
one.cycle(True, said="the file with the weights is not written yet")
one.cycle(False)
del lines[:]
Worker().start(load_dummy_weights=True).cycle(True)
one = Worker()
one.vllm_config.load_config.load_format = "dummy"
del lines[:]
one.start()
assert "--load-format dummy is not supported" in lines[0]
one = Worker()
one.model.secondary_weights = ["more"]
one.start().cycle(True)

# An open object prevents a snapshot, and the error names it. Everything else is closed.
with overwire.safe_open(folder + "/m.safetensors", "pt") as file:
    del lines[:], ALLOCATOR.calls[:]
    one.checkpoint_prepare()
    assert ALLOCATOR.calls == ["checkpoint_prepare"] and folder in lines[0], lines
del lines[:]
one.checkpoint_prepare()
assert not lines

# Without the setting, nothing is stored and nothing is logged.
sleeping.setting = lambda name: ""
before = os.listdir(images)
del lines[:]
one = Worker().start()
one.cycle(True)
assert not lines and os.listdir(images) == before
"""

HOST = """
import json, subprocess, sys
os.environ["OVERWIRE_HOST"] = os.path.join(base, "socket")
command = [sys.executable, "-m", "overwire", "host"]
server = subprocess.Popen([*command, "--budget", "1GB"], stdout=subprocess.PIPE, text=True)
assert "socket" in server.stdout.readline()
WORKER
sleeping.setting = lambda name: "auto" if name == "OVERWIRE_HOST" else ""
def nap(worker, stored, shared, end=None):
    worker.sleep(1)
    assert not any(held.any() for held in worker.model.memory)
    asleep = worker.backend._asleep
    assert bool(asleep.stored) == stored and bool(asleep.shared) == shared, asleep
    if end:
        end()
    worker.wake_up()
    assert worker.is_right()
one = Worker().start()
nap(one, False, True)
two = Worker().start()
nap(two, False, True)
entries = json.loads(subprocess.check_output([*command, "list", "--json"]))["entries"]
assert len(entries) == 1 and entries[0]["users"] == 0, entries
two.model.memory[1][5] += 1  # only the changed allocation is encoded
two.want = [held.clone() for held in two.model.memory]
nap(two, True, True)

def end():
    server.kill()
    server.wait()
nap(two, True, True, end)
nap(two, True, False)
del lines[:]
one = Worker().start()
one.backend.finish_storing()
assert len(lines) == 1 and "own memory" in lines[0], lines
nap(one, True, False)
two = Worker()
two.vllm_config.load_config.load_format = "overwire"
two.vllm_config.load_config.model_loader_extra_config = {"host": False}
del lines[:]
two.start()
nap(two, True, False)
assert len(lines) == 1 and "sleep in" in lines[0], lines
"""


def test_vllm_sleeps(tmp_path: Path) -> None:
    """Waking restores the memory of any weights bit for bit. vLLM itself handles all other memory."""
    test_live.stand_ins(tmp_path / "vllm", {**test_vllm.VLLM, **SLEEP})
    test_vllm.run(tmp_path, test_vllm.REGISTER + test_vllm.PRELUDE + SLEEPS, tmp_path)


def test_level_2_restores_the_weights(tmp_path: Path) -> None:
    """Waking from a level-2 sleep restores the weights from overwire's file, so `reload_weights` does not read the
    model's files. If overwire's file, the weights or the model's files have changed, vLLM's own reload runs."""
    test_live.stand_ins(tmp_path / "vllm", {**test_vllm.VLLM, **SLEEP})
    test_vllm.run(tmp_path, test_vllm.REGISTER + test_vllm.PRELUDE + WORKER + LEVEL2, tmp_path)


def test_engines_share_the_host_store(tmp_path: Path) -> None:
    """If engines have equal weights, the host store has one copy for all of them while they sleep. They also wake
    without the store."""
    test_live.stand_ins(tmp_path / "vllm", {**test_vllm.VLLM, **SLEEP})
    program = test_vllm.REGISTER + test_vllm.PRELUDE + HOST.replace("WORKER", WORKER)
    test_vllm.run(tmp_path, program, tmp_path)
