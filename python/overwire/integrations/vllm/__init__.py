"""Adds `--load-format overwire`, weight transfer and sleep mode to vLLM.

vLLM calls `register` in each of its processes. A vLLM module is extended when vLLM imports it, so a process that loads
no model has no overhead.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from .. import AfterImport

__all__ = ["FORMAT", "register"]

#: The name of the load format, the weight transfer and the sleep back end.
FORMAT = "overwire"

_LOADERS = "vllm.model_executor.model_loader"
_TRANSFERS = "vllm.distributed.weight_transfer.factory"
_SLEEPS = "vllm.device_allocator.sleep_mode_backend"
_WORKERS = "vllm.v1.worker.gpu_worker"
_CPU_WORKERS = "vllm.v1.worker.cpu_worker"
_STRATEGIES = "modelexpress.load_strategy"

# Worker methods that change weights or their memory.
_CHANGES = (
    "sleep", "discard", "checkpoint_prepare", "reset_weights", "reload_weights", "start_weight_update",
    "start_draft_weight_update",
    "update_weights", "elastic_ep_execute", "shutdown",
)  # fmt: skip


def register() -> None:
    """Adds the load format, the weight transfer and the sleep back end to vLLM, and a loading strategy to ModelExpress.
    May be called repeatedly. Imports neither torch nor vLLM, and does not start overwire's engine."""
    if "overwire._core" in sys.modules:  # the engine may be running, and it does not survive a fork
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if _imports not in sys.meta_path:
        sys.meta_path.insert(0, _imports)
    for name, add in _ADDS.items():
        there = sys.modules.get(name)
        if there is not None and getattr(getattr(there, "__spec__", None), "_initializing", False) is False:
            add(there)


def _add_format(loaders: Any) -> None:
    from .loader import OverwireModelLoader

    if loaders._LOAD_FORMAT_TO_MODEL_LOADER.get(FORMAT) is not OverwireModelLoader:
        loaders.register_model_loader(FORMAT)(OverwireModelLoader)


def _add_transfer(factory: Any) -> None:
    engines = factory.WeightTransferEngineFactory
    if FORMAT not in engines._registry:
        engines.register_engine(FORMAT, f"{__name__}.transfer", "TransferEngine")


def _add_sleep(backends: Any) -> None:
    factory = backends.SleepModeBackendFactory
    if FORMAT not in factory._registry:
        factory.register_backend(FORMAT, f"{__name__}.sleeping", "SleepBackend")


def _wrap_gpu_worker(workers: Any) -> None:
    load = workers.Worker.load_model
    if hasattr(load, "without_overwire"):
        return

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **named: Any) -> Any:
        model = load(self, *args, **named)
        config = self.vllm_config.model_config
        if getattr(config, "enable_sleep_mode", False) and getattr(config, "sleep_mode_backend", None) == FORMAT:
            self.sleep_mode_backend.prepare()
        return model

    load_model.without_overwire = load  # type: ignore[attr-defined]
    workers.Worker.load_model = load_model
    for name in _CHANGES:
        if hasattr(workers.Worker, name):
            setattr(workers.Worker, name, _finish_writing_before(getattr(workers.Worker, name)))
    warm = getattr(workers.Worker, "compile_or_warm_up_model", None)
    if warm is not None:  # without this method, no prepared models are stored
        workers.Worker.compile_or_warm_up_model = _write_after_warm_up(warm)


def _wrap_cpu_worker(workers: Any) -> None:
    warm = workers.CPUWorker.compile_or_warm_up_model
    if not hasattr(warm, "__wrapped__"):
        workers.CPUWorker.compile_or_warm_up_model = _write_after_warm_up(warm)


def _write_after_warm_up(warm: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(warm)
    def compile_or_warm_up_model(*args: Any, **named: Any) -> Any:
        result = warm(*args, **named)
        if preparation := sys.modules.get(f"{__name__}.prepared"):
            preparation.begin_writing()
        return result

    return compile_or_warm_up_model


def _finish_writing_before(change: Callable[..., Any]) -> Callable[..., Any]:
    # Finishes background writing before weights change. Models with streamed layers must not change at all.
    @functools.wraps(change)
    def changed(*args: Any, **named: Any) -> Any:
        streaming = sys.modules.get(f"{__name__}.streaming")
        if streaming is not None and change.__name__ not in ("checkpoint_prepare", "shutdown"):
            streaming.refuse_changes(change.__name__)
        if written := sys.modules.get(f"{__name__}.prepared"):
            written.finish_writing()
        return change(*args, **named)

    return changed


def _add_strategy(strategies: Any) -> None:
    from ..modelexpress import join

    join(strategies)


# Modules of vLLM and ModelExpress, each with the function that extends it after its import.
_ADDS: dict[str, Callable[[Any], None]] = {
    _LOADERS: _add_format,
    _TRANSFERS: _add_transfer,
    _SLEEPS: _add_sleep,
    _WORKERS: _wrap_gpu_worker,
    _CPU_WORKERS: _wrap_cpu_worker,
    _STRATEGIES: _add_strategy,
}

_imports = AfterImport(_ADDS, lambda module: _ADDS[module.__name__](module))
