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
    worker.vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(enable_sleep_mode=enabled, sleep_mode_backend=name))
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
    backend.suspend(1)  # still asleep
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


def test_vllm_sleeps(tmp_path: Path) -> None:
    """Waking restores the memory of any weights bit for bit. vLLM handles all other memory."""
    test_live.stand_ins(tmp_path / "vllm", {**test_vllm.VLLM, **SLEEP})
    test_vllm.run(tmp_path, test_vllm.REGISTER + test_vllm.PRELUDE + SLEEPS, tmp_path)
