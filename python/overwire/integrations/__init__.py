"""Connects overwire to other programs, with one module or package for each.

The modules for libraries replace functions of a library while `overwire.patch_safetensors` is active. Each
defines `MODULES`, the library's modules that it uses, and `pair_replacements(found, lazy)`. `found` looks up a
name in one of these modules, and `lazy` provides the services of the patch (`Lazy`). The function returns pairs of an
object and its replacement. An object is given as an attribute of a module, or as a class and the name of a member. If a
version of the library lacks a name, its pair is omitted, and the library reads its files tensor by tensor.

The packages for inference engines, `vllm` and `sglang`, are plug-ins that the engines' registries find. Both
read with `iter_weights`. The modules for libraries and the plug-ins use `AfterImport`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["AfterImport", "Lazy", "missing_names", "refuse_missing", "check_options", "uses_disk", "iter_weights"]


class AfterImport:
    """A finder for sys.meta_path. Python finds and runs the named modules as usual. Afterwards `then` is called with
    each of these modules, unless the attributes of the module's loader cannot be set."""

    def __init__(self, names: Container[str], then: Callable[[ModuleType], None]) -> None:
        self._names, self._then = names, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the spec of a named module, or None for other modules."""
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._then(module)

        with contextlib.suppress(AttributeError):
            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


class Lazy(NamedTuple):
    """The services of a patch that `pair_replacements` can use.

    slice: the class of the unread tensors that `get_slice` returns while the patch is active.
    ahead: creates one load for many such tensors, or returns the load that was passed to this thread. The classes
    `Slice` and `Ahead` are in `overwire.compat.safetensors._lazy`.
    passed: returns whether a load was passed to this thread.
    plan: a context manager for calls that open files themselves. Inside it, slices that this thread opens are loaded in
    advance if plan(name) returns a device for them.
    compressed: returns whether a file is an overwire container. open: opens a file.
    prepare: starts to prepare the engine for one device, or for the devices of a device_map.
    offloads: returns whether weights that a library keeps on the host for a GPU are streamed."""

    slice: type[Any]
    ahead: Callable[[], Any]
    passed: Callable[[], bool]
    plan: Callable[[Callable[[str], Any]], Any]
    compressed: Callable[[Any], bool | None]
    open: Callable[..., Any]
    prepare: Callable[[Any], None]
    offloads: Callable[[], bool]


def uses_disk(device_map: Any) -> bool:
    """Returns whether a library's device_map leaves weights on disk."""
    return device_map is not None and "disk" in device_map.values()


# The keys of --model-loader-extra-config that all plug-ins accept: the types of their values, and how messages
# describe the values.
_KEYS: dict[str, tuple[Any, str]] = {
    "source": (str, "a URL of the weights (http, https, s3, hf), or a path"),
    "storage_options": (dict, "a mapping, as for overwire.load_file"),
    "ray": (bool, "true or false"),
    "host": (bool, "true or false"),
    "max_memory": ((str, int), "a number of bytes, or a text like '1GiB'"),
}


def check_options(given: Any, more: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Checks an engine's extra configuration and returns it, with max_memory in bytes (default 1 GiB), and with ray as
    one of the storage options.

    Raises ValueError for an unknown key or a value of the wrong type.
    """
    from .._compat_api import parse_size

    if not isinstance(given, dict):
        raise ValueError(f"overwire: model_loader_extra_config must be a mapping, got {type(given).__name__}")
    keys = {**_KEYS, **more}
    for key, value in given.items():
        if key not in keys:
            raise ValueError(f"overwire: model_loader_extra_config: unknown key {key!r}; expected {', '.join(keys)}")
        kind, words = keys[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"overwire: model_loader_extra_config: {key} must be {words}, got {value!r}")
    if "ray" in given:
        given = {**given, "storage_options": {**(given.get("storage_options") or {}), "ray": given["ray"]}}
        del given["ray"]
    return {**given, "max_memory": parse_size(given.get("max_memory", "1GiB"), "model_loader_extra_config: max_memory")}


def iter_weights(
    where: Any,
    device: str,
    chosen: Mapping[str, Any],
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    unused: Callable[[str], bool] | None = None,
    index: str | None = None,
    progress: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Yields names and tensors from plain or compressed safetensors files, in file order.

    Each tensor is on the device and owned by the caller. At most `max_memory` bytes are loaded
    ahead, or the largest tensor if that is larger.

    where: as for `overwire.load_file`. chosen: the result of `check_options`. wanted: returns whether to read a name.
    unused: returns whether the model ignores a name; if it ignores all names, all are read. index: the index.json of
    the files.

    Raises ValueError if a file lacks a name that the index lists for it, and the errors of
    `overwire.stream`.
    """
    import overwire

    reach: Any = chosen.get("storage_options")
    plan = overwire.plan(where, filter=wanted, framework="pt", storage_options=reach)
    names = {tensor.name: tensor.nbytes for tensor in plan.tensors}
    if index is not None:
        refuse_missing(index, missing_names(index, where, names), wanted)
    if unused is not None:
        names = {name: size for name, size in names.items() if not unused(name)} or names
    return overwire.stream(
        where, device, framework="pt", in_order=True, filter=names.__contains__,
        max_memory=max(chosen["max_memory"], max(names.values(), default=1), 1), progress=progress,
        storage_options=reach, host=chosen.get("host"),
    )  # fmt: skip


def missing_names(index: str | None, files: Any, held: Container[str]) -> list[tuple[str, str]]:
    """Returns the names that an index.json lists for these files (paths) but that are not in `held`, each with its file
    in the index."""
    import json
    import os

    if index is None or not os.path.isfile(index):
        return []
    with open(index, encoding="utf-8") as index_file:
        weight_map = json.load(index_file)["weight_map"]
    missing = [name for name in weight_map if name not in held]
    if not missing:
        return []
    here = {os.path.realpath(file) for file in files}
    folder = os.path.dirname(index)
    return [
        (name, weight_map[name]) for name in missing if os.path.realpath(os.path.join(folder, weight_map[name])) in here
    ]


def refuse_missing(index: str | None, missing: Iterable[tuple[str, str]], wanted: Callable[[str], bool] | None) -> None:
    """Raises ValueError if one of the `missing_names` is wanted, because its parameter would keep its initial value."""
    lacking = sorted(f"{name} (of {file})" for name, file in missing if wanted is None or wanted(name))
    if lacking:
        why = f"{index} lists them, but the files do not contain them"
        raise ValueError(f"Following weights were not initialized from checkpoint: {lacking}: {why}")
