"""Tests level-2 sleep in vLLM's real code on the CPU: the worker, its allocator, the reload and the snapshot server.

    PYTHONPATH=python:build/engines python tests/engines/engines_level2.py [--measure]

Only the calls that map and unmap GPU memory, and the engine's start, are replaced. The calls of `vllm snapshot` put a
worker to sleep at level 2 and wake it. Every parameter and buffer must have the same bytes as after vLLM's own load.
vLLM's reload must begin only if the files or weights have changed. At level 1, all workers of a model must use one copy
of its weights in the host store.

--measure uses a model of 0.5 GB and prints the seconds of vLLM's reload, and of waking with overwire's file.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines_prepared as kept
import engines_vllm as base
import torch

Where = tuple[int, int, int]
NAMES = ("llama", "tied", "mixtral", "fp8")
GARBAGE = 0xA7


def make_allocator() -> Any:
    """Returns vLLM's allocator, with its GPU calls replaced. Unmapping fills the memory with garbage."""
    from overwire.integrations.vllm import sleeping
    from vllm import device_allocator
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator()
    memory: dict[int, torch.Tensor] = {}
    device_allocator.get_mem_allocator_instance = lambda: allocator
    cumem.unmap_and_release = cumem.create_and_map = lambda handle: memory[handle[2]].fill_(GARBAGE)
    sleeping.memory_of = lambda ptr, size, device: memory[ptr]
    accelerator: Any = torch.accelerator
    accelerator.synchronize = accelerator.empty_cache = lambda *_: None
    accelerator.get_memory_info = lambda *_: (1 << 30, 1 << 34)

    def add(tensors: list[torch.Tensor], tag: str) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in memory:
                ptr = storage.data_ptr()
                memory[ptr] = torch.empty(0, dtype=torch.uint8).set_(storage)
                handle = (0, storage.nbytes(), ptr, 0)
                allocator.pointer_to_data[ptr] = device_allocator.AllocationData(handle, tag)

    allocator.add = add
    return allocator


def make_worker(path: Path, where: Where, load_format: str, extra: dict[str, Any] | None = None) -> Any:
    """Returns a worker with a model that was loaded into the allocator's memory."""
    from overwire.integrations import vllm as plugin
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    _, config = base.load(path, *where, load_format, extra)
    config.compilation_config.static_forward_context.clear()  # the worker loads the model again
    getattr(config.compilation_config, "static_all_moe_layers", []).clear()
    config.model_config.enable_sleep_mode, config.model_config.sleep_mode_backend = True, "overwire"
    allocator = make_allocator()

    class Runner(GPUModelRunner):
        def __init__(self) -> None:
            self.vllm_config, self.lora_config, self.mm_budget = config, None, None
            self.encoder_cache: dict[str, Any] = {"stale": 1}
            self.late_interaction_runner = types.SimpleNamespace(clear=lambda: None)

        def load_model(self, load_dummy_weights: bool = False) -> None:
            with set_current_vllm_config(config):
                self.model = get_model(vllm_config=config)
            allocator.add([tensor for _, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]], "weights")
            self.cache = torch.ones(4096, dtype=torch.uint8)
            allocator.add([self.cache], "kv_cache")

    worker = Worker.__new__(Worker)
    worker.vllm_config, worker.model_config, worker.model_runner = config, config.model_config, Runner()
    worker.parallel_config, worker.weight_transfer_engine = config.parallel_config, None
    worker._sleep_mode_backend = None
    worker._sleep_saved_buffers = worker._sleep_saved_parameters = worker._sleep_saved_draft_buffers = {}
    worker.load_model()
    warm = plugin._write_after_warm_up(lambda self: None)
    warm(worker)
    return worker


class Engine:
    """Passes the calls of vLLM's servers to one worker."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    async def sleep(self, level: int) -> None:
        self.worker.sleep(level)

    async def wake_up(self, tags: list[str]) -> None:
        self.worker.wake_up(tags)

    async def collective_rpc(self, name: str) -> None:
        getattr(self.worker, name)()


class Watch:
    """Counts vLLM's reloads, and collects the messages of the sleep back end."""

    def __init__(self) -> None:
        from overwire.integrations.vllm import sleeping
        from vllm.model_executor.model_loader.reload import inplace

        self.reloads, self.lines = 0, list[str]()
        begin = inplace.initialize_layerwise_reload

        def initialize_layerwise_reload(*args: Any) -> Any:
            self.reloads += 1
            return begin(*args)

        inplace.initialize_layerwise_reload = initialize_layerwise_reload
        sleeping.log = self

    def info(self, words: str, *more: Any) -> None:
        self.lines.append(words % more)

    warning = info


def cycle(what: str, worker: Any, theirs: dict[str, Any], watch: Watch, reloads: int, said: str) -> float:
    """Runs the two calls of vLLM's snapshot server. Returns the seconds of the second call."""
    from vllm.snapshot import server

    engine, before = Engine(worker), watch.reloads
    watch.lines.clear()
    worker.model_runner.encoder_cache["stale"] = 1
    asyncio.run(server._release_reloadable_state(engine))
    if any(parameter.untyped_storage().nbytes() and bool((parameter.view(torch.uint8) != GARBAGE).any())
           for parameter in worker.model_runner.model.parameters() if parameter.is_contiguous()):  # fmt: skip
        raise SystemExit(f"{what}: the weights do not sleep")
    if held := open_things():
        raise SystemExit(f"{what}: a sleeping worker has open files: {held}")
    began = time.perf_counter()
    asyncio.run(server._restore_reloadable_state(engine))
    seconds = time.perf_counter() - began
    if wrong := base.differences(base.state(worker.model_runner.model), theirs):
        raise SystemExit(f"{what}: differs from vLLM's own load: {wrong}")
    if watch.reloads - before != reloads or worker.model_runner.encoder_cache:
        raise SystemExit(f"{what}: {watch.reloads - before} reloads, caches {worker.model_runner.encoder_cache}")
    if not any(said in line for line in watch.lines):
        raise SystemExit(f"{what}: the log has no {said!r}: {watch.lines}")
    worker.sleep_mode_backend.finish_storing()
    print(f"  {what}: {len(theirs)} tensors equal vLLM's own load, {reloads} reloads, {seconds:.2f} s", flush=True)
    return seconds


def open_things() -> list[str]:
    """Returns the model files and sleep files that this process has open or mapped."""
    ours = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    ours += [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({name for name in ours if name.endswith(".safetensors") or "mountinfo" in name})


def check(name: str, load_format: str, root: Path, where: Where, watch: Watch) -> None:
    """Tests one model with one load format."""
    path, images = root / name / "plain", Path(os.environ["OVERWIRE_SLEEP_IMAGES"])
    theirs = base.state(base.load(path, *where, "safetensors")[0])
    extra = {"prepared": str(root / "prepared")} if load_format == "overwire" else None
    what = f"{name}, {load_format}"
    worker = make_worker(path, where, load_format, extra)
    for step in ("first", "second"):
        cycle(f"{what}, {step}", worker, theirs, watch, 0, "restored")
    if name != "llama":
        return
    share(what, worker, theirs)
    worker.checkpoint_prepare()
    worker.checkpoint_restore()
    with torch.no_grad():
        next(worker.model_runner.model.parameters()).view(-1)[3] += 1  # as training or merging an adapter does
    cycle(f"{what}, weights changed", worker, theirs, watch, 1, "the weights have changed")
    cycle(f"{what}, after the reload", worker, theirs, watch, 0, "restored")
    for file in images.iterdir():
        os.truncate(file, 900)
    cycle(f"{what}, damaged", worker, theirs, watch, 1, "reload_weights must read the model")
    cycle(f"{what}, written again", worker, theirs, watch, 0, "restored")
    shard = sorted(path.glob("*.safetensors"))[0]
    os.utime(shard, (shard.stat().st_mtime - 1000,) * 2)
    cycle(f"{what}, changed files", worker, theirs, watch, 1, "restored")
    cycle(f"{what}, new files", worker, theirs, watch, 0, "restored")
    worker.reload_weights(weights_path=str(path))
    if wrong := base.differences(base.state(worker.model_runner.model), theirs):
        raise SystemExit(f"{what}, from a path: {wrong}")


def share(what: str, worker: Any, theirs: dict[str, Any]) -> None:
    """Tests level 1 with the host store: all workers of a model use the one copy of its weights in the store."""
    worker.sleep(1)
    asleep = worker.sleep_mode_backend._asleep
    if asleep.stored or not asleep.shared:
        raise SystemExit(f"{what}, level 1: {asleep}")
    names = [entry["name"] for entry in base.host_entries() if "sleeping" in entry["label"]]
    worker.wake_up()
    if wrong := base.differences(base.state(worker.model_runner.model), theirs):
        raise SystemExit(f"{what}, level 1: {wrong}")
    if len(names) != 1:
        raise SystemExit(f"{what}, level 1: the host store has {names}")
    print(f"  {what}, level 1: {asleep.nbytes} bytes sleep in the host store", flush=True)


def measure(root: Path, where: Where, watch: Watch) -> None:
    """Prints how many seconds vLLM's reload takes with several formats, and how many waking takes with overwire's
    file."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    for folder, load_format in (("plain", "safetensors"), ("plain", "overwire"), ("compressed", "overwire")):
        path = root / "large" / folder
        model, config = base.load(path, *where, load_format)
        took = []
        for _ in range(3):
            began = time.perf_counter()
            with set_current_vllm_config(config), torch.no_grad():
                reload_weights(config, model, None, None, True)
            took.append(time.perf_counter() - began)
        print(f"  vLLM's reload, {load_format}, {folder}: {' '.join(f'{one:.2f}' for one in took)} s", flush=True)
        theirs = base.state(model)
        worker = make_worker(path, where, load_format)
        for _ in range(3):
            cycle(f"wake and reload with overwire's file, {load_format}, {folder}", worker, theirs, watch, 0, "restored")


def rank_main(root: Path, world: int, rank: int, port: int, names: list[str]) -> None:
    base.without_kernels()
    kept.with_fp8()
    watch = Watch()
    where = world, rank, port
    if names == ["measure"]:
        measure(root, where, watch)
        return
    for name in names:
        for load_format in ("overwire", "safetensors"):
            check(name, load_format, root, where, watch)


def run(root: Path, env: dict[str, str], names: list[str], make: Callable[[Path], None]) -> None:
    make(root)
    settings = {"OVERWIRE_SLEEP_IMAGES": str(root / "images"), "OVERWIRE_HOST": str(root / "socket")}
    with base.host_store(env | settings):
        base.run_ranks(__file__, root, 1, names, env | settings)


def make_large(root: Path) -> None:
    base.HIDDEN, base.LAYERS = 1024, 16
    config = {**base.LLAMA, "hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 3072, "vocab_size": 8192}
    tensors = base.weights(config)
    for folder, compress in (("plain", False), ("compressed", True)):
        base.folder(root / "large" / folder, config, tensors, compress)


def main() -> None:
    if base.run_as_rank(rank_main):
        return
    with base.plugged_folder("overwire-level2-") as (root, env):
        if sys.argv[1:] == ["--measure"]:
            run(root, env, ["measure"], make_large)
            return
        run(root, env, sys.argv[1:] or list(NAMES), kept.make_folders)
        print("level-2 sleep restores vLLM's own loads")


if __name__ == "__main__":
    main()
