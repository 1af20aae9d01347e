"""Connects overwire to other programs, one module or package each.

For libraries: replaces their functions while `overwire.patch_safetensors` is active. Each
module has `pair_replacements(found, lazy)`. `found` looks up a name in a loaded module of the
library, and `lazy` is what the patch offers (`Lazy`). It returns pairs: an object that the
library's modules have bound, or a class and the name of a member, and its replacement.
`MODULES` lists the modules that `found` may be asked for. If a version of the library lacks a
name, that hook is left out: its files are read as before, tensor by tensor.

For engines: plug-ins that the engines' registries find, `vllm` and `sglang`. Both read with
`iter_weights`. For both kinds: `AfterImport`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["AfterImport", "Lazy", "missing_names", "refuse_missing", "check_options", "uses_disk", "iter_weights"]


class AfterImport:
    """A finder for sys.meta_path. Python itself finds and runs these modules; then `then` is called with each.
    A module is left alone if its loader's attributes cannot be set."""

    def __init__(self, names: Container[str], then: Callable[[ModuleType], None]) -> None:
        self._names, self._then = names, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the spec of one of the modules; None for others."""
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
    """A patch's services for `pair_replacements`.

    slice: the class that `get_slice` returns while the patch is active: tensors of an open file that are not
    read yet. ahead: makes one load for many of them, or returns the load that was passed to this thread
    (`overwire.compat.safetensors._lazy` has both). passed: whether a load was passed to this thread. plan: a
    context manager for calls that open files themselves. Inside it, slices that this thread opens are loaded
    ahead if plan(name) returns their device. prepare: begins to prepare the engine for the devices of
    a device_map, or for one device. offloads: whether weights that a library keeps on the host for a GPU are
    streamed."""

    slice: type[Any]
    ahead: Callable[[], Any]
    passed: Callable[[], bool]
    plan: Callable[[Callable[[str], Any]], Any]
    compressed: Callable[[Any], bool | None]
    open: Callable[..., Any]
    prepare: Callable[[Any], None]
    offloads: Callable[[], bool]


def uses_disk(device_map: Any) -> bool:
    """Whether a library's device_map, if it has one, leaves weights on disk."""
    return device_map is not None and "disk" in device_map.values()


# Keys of --model-loader-extra-config that every engine's plug-in has: the types that each accepts,
# and how messages describe them.
_KEYS: dict[str, tuple[Any, str]] = {
    "source": (str, "a URL of the weights (http, https, s3, hf), or a path"),
    "storage_options": (dict, "a mapping, as for overwire.load_file"),
    "max_memory": ((str, int), "bytes, or a text as '1GiB'"),
}


def check_options(given: Any, more: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Checks an engine's extra configuration and returns it, with max_memory in bytes (default 1 GiB).

    Raises ValueError for an unknown key and for a value of the wrong kind.
    """
    from ..plumbing import parse_size

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
    """Yields name and tensor from safetensors files, plain or compressed, in file order.

    Each tensor is on the device, and the caller owns it. At most `max_memory` bytes, or the
    largest tensor, are loaded ahead.

    where: as for `overwire.load_file`. chosen: the result of `check_options`. wanted: whether
    to read a name. unused: whether the model ignores a name; if it ignores all, all are
    read. index: the index.json of the files.

    Raises ValueError if the index lists names in these files that they lack, and what
    `overwire.stream` raises.
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
        where,
        device,
        framework="pt",
        in_order=True,
        filter=names.__contains__,
        max_memory=max(chosen["max_memory"], max(names.values(), default=1), 1),
        progress=progress,
        storage_options=reach,
    )


def missing_names(index: str | None, files: Any, held: Container[str]) -> list[tuple[str, str]]:
    """The names that an index.json lists in these files (paths) and that are not in `held`, each
    with its file as the index has it."""
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
    """Raises ValueError if `missing_names` has a wanted name: its parameter would keep its initial
    value."""
    lacking = sorted(f"{name} (of {file})" for name, file in missing if wanted is None or wanted(name))
    if lacking:
        raise ValueError(
            f"Following weights were not initialized from checkpoint: {lacking}: {index} lists them, and the files "
            f"lack them"
        )
