"""Provides other libraries' APIs on top of overwire, one module per library.

The modules only translate names. Import one in place of the library:

    import overwire.compat.nyacomp as nyacomp

or under its own name, for the rest of the process:

    overwire.compat.install("nyacomp")
    import nyacomp

or, for a program that you cannot change, with a folder on PYTHONPATH:

    PYTHONPATH=$(python -m overwire.compat path nyacomp) python program.py
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ..errors import ArgumentError

__all__ = ["install", "names", "path"]

# Maps each original module to ours. Parents come first. `_Alias` finds submodules when they are imported.
_MODULES: dict[str, dict[str, str]] = {
    "fastsafetensors": {"fastsafetensors": "fastsafetensors"},
    "nvcomp": {
        "nvidia.nvcomp": "nvcomp",
        "nvidia.nvcomp.nvcomp_impl": "nvcomp",
        "nvidia.nvcomp.external_memory": "nvcomp.external_memory",
    },
    "nyacomp": {"_nyacomp": "nyacomp._nyacomp", "nyacomp": "nyacomp"},
    "nyacomp_core": {"_nyacomp": "nyacomp._nyacomp"},
    "safetensors": {},  # the installed package stays, and is patched; see `_patch`
    "tensorizer": {"tensorizer": "tensorizer"},
}


def names() -> list[str]:
    """Returns the library names that `install` and `path` accept."""
    return sorted(_MODULES)


def install(name: str) -> None:
    """Puts a library's modules into sys.modules under their original names: "fastsafetensors", "nvcomp" (as
    nvidia.nvcomp), "tensorizer", "nyacomp", or "nyacomp_core", which is only nyacomp's extension `_nyacomp`.

    "safetensors" remains the installed package, but reads through overwire for the
    rest of the process, as after `overwire.patch_safetensors()`.

    Modules that have already imported the original library keep using it. Raises ArgumentError for other names.
    """
    if name == "safetensors":
        _patch()
        return
    for original, replacement in _table(name).items():
        for stale in [one for one in tuple(sys.modules) if one.startswith(f"{original}.")]:  # other threads may import
            sys.modules.pop(stale, None)
        module = sys.modules[original] = import_module(f"{__name__}.{replacement}")
        parent, _, child = original.rpartition(".")
        if parent == "nvidia":
            setattr(_namespace(parent), child, module)
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())


def _patch() -> None:
    # If the folder of `path` is on PYTHONPATH, the placeholder in it is being imported now.
    # Replace it with the real package.
    folder = path("safetensors")
    if str(getattr(sys.modules.get("safetensors"), "__file__", "")).startswith(folder):
        del sys.modules["safetensors"]
        paths = sys.path[:]
        sys.path[:] = [entry for entry in paths if Path(entry).resolve() != Path(folder)]
        try:
            import_module("safetensors")
        finally:
            sys.path[:] = paths
    import_module("overwire.compat.safetensors.patching").patch_safetensors()


class _Alias(MetaPathFinder):
    # Finds submodules of a library that `install` has replaced. They map to our modules, so no file is loaded twice.

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        module_name = getattr(sys.modules.get(top), "__name__", top)
        if not rest or module_name == top or not module_name.startswith(f"{__name__}."):
            return None
        try:
            return ModuleSpec(fullname, _Ours(f"{module_name}.{rest}")) if find_spec(f"{module_name}.{rest}") else None
        except ModuleNotFoundError:
            return None


class _Ours(Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just replaced it


def _namespace(name: str) -> ModuleType:
    """Returns the namespace package of this name, or a new one if no part of it is installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        return module


def path(name: str) -> str:
    """Returns a folder for PYTHONPATH. With it, unmodified programs import overwire's version of
    a library under the original name. Raises ArgumentError like `install`."""
    _table(name)
    return str(Path(__file__).resolve().parent / "_path" / name)


def _table(name: str) -> dict[str, str]:
    try:
        return _MODULES[name]
    except KeyError:
        raise ArgumentError(f"overwire: compat {name!r}: expected one of {', '.join(names())}") from None
