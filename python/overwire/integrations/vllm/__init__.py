"""vLLM's plug-in: `vllm serve MODEL --load-format overwire`.

vLLM calls `register` in each of its processes. The load format is added when vLLM
itself imports its loaders, so a process that loads nothing pays for nothing.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["FORMAT", "register"]

#: The name of the load format.
FORMAT = "overwire"

_LOADERS = "vllm.model_executor.model_loader"


def register() -> None:
    """Adds the load format to vLLM; as often as vLLM likes. Imports neither torch nor
    vLLM, and starts no engine."""
    if "overwire._core" in sys.modules:  # the engine may run, and it does not survive a fork
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    loaders = sys.modules.get(_LOADERS)
    if loaders is None:
        if not any(isinstance(finder, _Once) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Once())
    elif hasattr(loaders, "register_model_loader"):
        _add(loaders)


def _add(loaders: Any) -> None:
    from .loader import OverwireModelLoader

    if loaders._LOAD_FORMAT_TO_MODEL_LOADER.get(FORMAT) is not OverwireModelLoader:
        loaders.register_model_loader(FORMAT)(OverwireModelLoader)


class _Once:
    """Finds vLLM's loaders as the other finders do, and adds the format after them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _LOADERS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)  # type: ignore[assignment]
        return spec


class _Then:
    # The loader of a module, and the format after it.

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _add(module)
