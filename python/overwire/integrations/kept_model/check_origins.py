"""Checks where a model's code comes from. A prepared model is stored only if all of its code belongs to the engine as
it was installed. Out-of-tree models, plug-ins, editable installs and functions that replace the engine's own are
refused, because changes to them cannot be detected.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# Objects of these types are not inspected.
_LEAVES = (torch.nn.Module, torch.Tensor, ModuleType, BuiltinFunctionType)
_GROUPS = (tuple, list, set, frozenset)

# Types that wrap functions.
_BUILTIN_WRAPPERS = (staticmethod, classmethod, property, MethodType)
_WRAPPERS = (*_BUILTIN_WRAPPERS, functools.partial, functools.partialmethod, functools.cached_property)

# Packages from which engines import functions. The files may be in any folder, and their sizes and times are noted.
_BUILT_ON = frozenset("einops filelock huggingface_hub numpy regex requests safetensors tqdm transformers".split())

# Class attributes that do not change the behaviour of the code.
_ABOUT = frozenset(
    "__annotations__ __doc__ __orig_bases__ __parameters__ __abstractmethods__ _abc_impl __dict__ __weakref__".split()
)


class Foreign(Exception):
    """Raised if a model uses code that does not belong to the engine."""


def digest_of_code(model: torch.nn.Module, engine: str, loaders: Iterable[str]) -> str:
    """Returns a digest of the values that a model's code depends on in addition to its arguments: default values and
    the variables that functions close over.

    engine: the name of the engine's package. loaders: the engine's modules that move weights. Raises Foreign.
    """
    look = _CodeWalk(engine)
    kinds: dict[type, None] = {}  # in the order of discovery
    for one in (*model.modules(), *model.parameters(), *model.buffers()):
        kinds[type(one)] = None
        for value in vars(one).values():
            if callable(value) and not isinstance(value, torch.nn.Module | torch.Tensor):
                look.look_at_value(value)
        if (method := vars(one).get("quant_method")) is not None:
            kinds[type(method)] = None
    modules = set(loaders).union(*(look.look_at_class(kind) for kind in kinds))
    for name in sorted(modules):
        look.look_at_functions(name)
    return hashlib.sha256(json.dumps(look.facts, default=str).encode()).hexdigest()


def digest_of_file_times(engine: str) -> str:
    """Returns a digest of the sizes and modification times of a package's Python files and shared libraries."""
    folder = os.path.dirname(str(sys.modules[engine].__file__))
    facts, folders = [], [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.endswith((".py", ".so")):
                    facts.append((entry.path[len(folder) :], _state_of_file(entry.path)))
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()


class _CodeWalk:
    def __init__(self, engine: str) -> None:
        folder = os.path.dirname(str(sys.modules[engine].__file__))
        if not glob.glob(f"{glob.escape(os.path.dirname(folder))}{os.sep}{engine}*.dist-info"):
            raise Foreign(f"{engine} in {folder} was not installed from a wheel")
        self._engine = engine
        own = [os.path.dirname(str(sys.modules[name].__file__)) for name in (engine, "torch", "overwire")]
        self._own = tuple(one + os.sep for one in own)
        self._python = sysconfig.get_path("stdlib") + os.sep
        self._tops = {engine, "torch", "overwire", "builtins"} | sys.stdlib_module_names - {"__main__"}
        self._seen: dict[int, Any] = {}  # keyed by id; the values keep the objects alive, so that ids stay unique
        self._methods: set[tuple[int, type]] = set()  # a function's id, and a class; see `_seen`
        self.facts: list[Any] = []

    def look_at_class(self, kind: type) -> set[str]:
        """Inspects a class and its bases. Returns the engine's modules that define them."""
        modules: set[str] = set()
        for one in kind.__mro__:
            top = one.__module__.partition(".")[0]
            if top not in self._tops:
                raise Foreign(f"the class {one.__module__}.{one.__qualname__}")
            if top == self._engine:
                modules.add(one.__module__)
                if self._mark_seen(one):
                    for name, value in sorted(vars(one).items()):
                        if name not in _ABOUT:
                            self.facts.append(name)
                            self.look_at_value(value)
        return modules

    def look_at_functions(self, module: str) -> None:
        """Inspects the functions in an engine's module, including functions that it imports."""
        for name, value in sorted(vars(sys.modules.get(module, object)).items()):
            if not isinstance(value, FunctionType | functools.partial | MethodType):
                continue
            self.facts.append(name)
            file = value.__code__.co_filename if isinstance(value, FunctionType) and not value.__closure__ else None
            if file is None or not self._note_imported(value, file):
                self.look_at_value(value)

    def _note_imported(self, value: Any, file: str) -> bool:
        # Returns whether this value is an attribute of a module in `_BUILT_ON`. If so, notes the file.
        module, name = value.__module__ or "", value.__name__
        if module.partition(".")[0] not in _BUILT_ON or getattr(sys.modules.get(module), name, None) is not value:
            return False
        self.facts.append((value.__module__, name, _state_of_file(file)))
        return True

    def look_at_value(self, value: Any) -> None:
        """Inspects a value and everything that it depends on."""
        if isinstance(value, _PLAIN):
            self.facts.append(repr(value))
        elif isinstance(value, FunctionType):
            self._note_function(value)
        elif isinstance(value, _LEAVES) or not self._mark_seen(value):
            return
        elif isinstance(value, _GROUPS):
            for part in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
                self.look_at_value(part)
        elif isinstance(value, dict):
            for key, part in value.items():
                self.look_at_value(key)
                self.look_at_value(part)
        elif isinstance(value, type):
            self.facts.append((value.__module__, value.__qualname__))
            file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
            if value.__module__.partition(".")[0] not in self._tops and not self._note_imported(value, file):
                raise Foreign(f"the class {value.__module__}.{value.__qualname__}")
        else:
            self._note_object(value)

    def _note_object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, MethodType):
            owner = value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
            if (id(value.__func__), owner) in self._methods:
                return  # the same function, bound to another object
            self._methods.add((id(value.__func__), owner))
            self.look_at_class(owner)
        if isinstance(value, _WRAPPERS) or kind.__name__ == "_lru_cache_wrapper":
            for name in ("__func__", "__wrapped__", "func", "args", "keywords", "fget", "fset"):
                self.look_at_value(getattr(value, name, None))
        elif kind.__module__.partition(".")[0] not in self._tops and (callable(value) or hasattr(kind, "__get__")):
            raise Foreign(f"an object of {kind.__module__}.{kind.__qualname__}")
        else:
            self.facts.append(f"{kind.__module__}.{kind.__qualname__}")

    def _note_function(self, function: FunctionType) -> None:
        if not self._mark_seen(function):
            return
        file = function.__code__.co_filename
        is_generated = file.startswith("<") and (function.__module__ or "").partition(".")[0] in self._tops
        if not is_generated and not file.startswith(self._own) and not self._is_standard_library(file):
            raise Foreign(f"the function {function.__module__}.{function.__qualname__} of {file}")
        self.facts.append((function.__module__, function.__qualname__, function.__code__.co_firstlineno))
        self.look_at_value(function.__defaults__)
        self.look_at_value(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.look_at_value(cell.cell_contents)
            except ValueError:
                self.facts.append("empty")

    def _is_standard_library(self, file: str) -> bool:
        return file.startswith(self._python) and "-packages" not in file[len(self._python) :].partition(os.sep)[0]

    def _mark_seen(self, value: Any) -> bool:
        # Marks a value as inspected. Returns False if it was already marked.
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True


def _state_of_file(file: str) -> tuple[int, int] | None:
    try:
        state = os.stat(file)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns
