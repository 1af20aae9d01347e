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

# Worker methods that change weights or their memory.
_CHANGES = (
    "sleep", "discard", "checkpoint_prepare", "reset_weights", "reload_weights", "start_weight_update",
    "start_draft_weight_update", "update_weights", "elastic_ep_execute", "shutdown",
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
        config = self.vllm_config.model_config
        if not getattr(config, "enable_sleep_mode", False) or getattr(config, "sleep_mode_backend", None) != FORMAT:
            return load(self, *args, **named)
        self.sleep_mode_backend.note_files(self.vllm_config, bool(named.get("load_dummy_weights")))
        model = load(self, *args, **named)
        self.sleep_mode_backend.prepare()
        return model

    load_model.without_overwire = load  # type: ignore[attr-defined]
    workers.Worker.load_model = load_model
    for name in _CHANGES:
        if hasattr(workers.Worker, name):
            setattr(workers.Worker, name, _finish_writing_before(getattr(workers.Worker, name)))
    warm = getattr(workers.Worker, "compile_or_warm_up_model", None)
    if warm is not None:  # no prepared models are stored without this method
        workers.Worker.compile_or_warm_up_model = _write_after_warm_up(warm)


def _wrap_cpu_worker(workers: Any) -> None:
    warm = workers.CPUWorker.compile_or_warm_up_model
    if not hasattr(warm, "__wrapped__"):
        workers.CPUWorker.compile_or_warm_up_model = _write_after_warm_up(warm)


def _write_after_warm_up(warm: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(warm)
    def compile_or_warm_up_model(self: Any, *args: Any, **named: Any) -> Any:
        result = warm(self, *args, **named)
        if preparation := sys.modules.get(f"{__name__}.prepared"):
            preparation.begin_writing()
        if backend := _sleep_backend():
            backend.store_weights(self.model_runner.get_model())
        return result

    return compile_or_warm_up_model


def _finish_writing_before(change: Callable[..., Any]) -> Callable[..., Any]:
    # Wraps a method so that background writing finishes before weights change. It refuses models with streamed layers,
    # because these must not change.
    @functools.wraps(change)
    def changed(*args: Any, **named: Any) -> Any:
        streaming = sys.modules.get(f"{__name__}.streaming")
        if streaming is not None and change.__name__ not in ("checkpoint_prepare", "shutdown"):
            streaming.refuse_changes(change.__name__)
        if written := sys.modules.get(f"{__name__}.prepared"):
            written.finish_writing()
        backend = _sleep_backend()
        if backend is not None:
            backend.finish_storing()
        result = change(*args, **named)
        if change.__name__ == "checkpoint_prepare" and backend is not None:
            backend.quiesce_engine()
        return result

    return changed


def _sleep_backend() -> Any:
    # Returns overwire's sleep back end of this process, or None.
    sleeping = sys.modules.get(f"{__name__}.sleeping")
    current = None if sleeping is None else sleeping.SleepBackend.current
    return None if current is None else current()


def _skip_needless_reloads(runners: Any) -> None:
    reload = runners.reload_weights
    if hasattr(reload, "__wrapped__"):
        return

    @functools.wraps(reload)
    def reload_weights(
        vllm_config: Any, model: Any, weights_iterator: Any = None, weights_path: Any = None,
        is_checkpoint_format: bool = True,
    ) -> None:  # fmt: skip
        backend = _sleep_backend()
        from_files = backend is not None and weights_iterator is None and weights_path is None and is_checkpoint_format
        if from_files and backend.has_loaded_weights(vllm_config):
            return
        if from_files:
            backend.note_files(vllm_config, False)
        reload(vllm_config, model, weights_iterator, weights_path, is_checkpoint_format)
        if from_files:
            backend.store_weights(model)

    runners.reload_weights = reload_weights


def _add_strategy(strategies: Any) -> None:
    from ..modelexpress import join

    join(strategies)


# Modules of vLLM and ModelExpress, each with the function that extends it after its import.
_ADDS: dict[str, Callable[[Any], None]] = {
    "vllm.model_executor.model_loader": _add_format,
    "vllm.distributed.weight_transfer.factory": _add_transfer,
    "vllm.device_allocator.sleep_mode_backend": _add_sleep,
    "vllm.v1.worker.gpu_worker": _wrap_gpu_worker,
    "vllm.v1.worker.cpu_worker": _wrap_cpu_worker,
    "vllm.v1.worker.gpu_model_runner": _skip_needless_reloads,
    "vllm.v1.worker.gpu.model_runner": _skip_needless_reloads,
    "modelexpress.load_strategy": _add_strategy,
}

_imports = AfterImport(_ADDS, lambda module: _ADDS[module.__name__](module))
