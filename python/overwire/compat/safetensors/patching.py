"""patch_safetensors: libraries that read with safetensors read through overwire."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any

import overwire
from overwire.plumbing import forked, refuse_compressed

from . import _bytes, _files

__all__ = ["SafetensorsPatch", "patch_safetensors"]

# What reads, by the original's modules. Each framework's module is there when
# its framework is.
_READERS = {
    "safetensors": ("safe_open", "_safe_open_handle", "deserialize"),
    "safetensors.torch": ("load_file", "load", "load_model"),
    "safetensors.numpy": ("load_file", "load"),
    "safetensors.flax": ("load_file", "load"),
    "safetensors.mlx": ("load_file", "load"),
    "safetensors.tensorflow": ("load_file", "load"),
    "safetensors.paddle": ("load_file", "load"),
}

_lock = threading.RLock()
_depth = 0
_swapped: dict[int, tuple[Any, Any]] = {}  # by id: what to replace, and by what


def _stand_in(module: str, name: str, original: Any) -> Any:
    """What stands for one of the original's names while patched: an object of
    its own, so that undoing finds it and nothing else."""
    if module == "safetensors":
        ours = {"safe_open": _files.safe_open, "_safe_open_handle": _files._safe_open_handle, "deserialize": _bytes.deserialize}[name]
        if isinstance(ours, type):

            def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
                return _original(original, args, kwargs) if forked() else object.__new__(cls)

            return type(name, (ours,), {"__slots__": (), "__doc__": ours.__doc__, "__module__": ours.__module__, "__new__": made})
        return _calls(lambda: ours, original)
    return _calls(lambda: getattr(import_module(f"overwire.compat.{module}"), name), original)


def _calls(ours: Callable[[], Any], original: Any) -> Any:
    @functools.wraps(original)
    def through_overwire(*args: Any, **kwargs: Any) -> Any:
        return _original(original, args, kwargs) if forked() else ours()(*args, **kwargs)

    through_overwire.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return through_overwire


# What the originals call the file, or its bytes.
_SUBJECTS = ("filename", "f", "data", "bytes")


def _original(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The original's answer, in a child of fork. ForkedError for compressed files,
    which it cannot read."""
    with contextlib.suppress(TypeError, ValueError):  # it says itself what is wrong with its arguments
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        subject = next((given[name] for name in _SUBJECTS if name in given), None)
        if subject is not None:
            refuse_compressed(subject)
    return original(*args, **kwargs)


def behind(found: Any) -> Any:
    """What a stand-in stands for; anything else is what it is."""
    return next((original for original, ours in _swapped.values() if ours is found), found)


def _rebind(swap: dict[int, tuple[Any, Any]]) -> None:
    # Whoever wrote `from safetensors.torch import load_file` has the name in
    # its own module. Modules may be added meanwhile, hence the copies.
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or names is globals():
            continue
        for name, value in names.copy().items():
            found = swap.get(id(value))
            if found is not None and found[0] is value:
                names[name] = found[1]


def _patch() -> None:
    try:
        import safetensors
    except ImportError as error:
        raise overwire.MissingPackageError("overwire: patch_safetensors: the package safetensors is not installed") from error
    swap = {}
    for module in _READERS:
        held = safetensors if module == "safetensors" else _module(module)
        if held is None:
            continue
        for name in _READERS[module]:
            original = getattr(held, name, None)
            if original is not None:  # an older version lacks some
                swap[id(original)] = (original, _stand_in(module, name, original))
    _swapped.update(swap)
    _rebind(swap)


def _module(name: str) -> Any:
    # torch's and numpy's are what libraries import later; the others only
    # matter where their framework is at work already.
    if name in sys.modules or name.rpartition(".")[2] in sys.modules:
        try:
            return import_module(name)
        except ImportError:
            return None
    return None


def _undo() -> None:
    swap = {id(ours): (ours, original) for original, ours in _swapped.values()}
    _rebind(swap)
    _swapped.clear()


class SafetensorsPatch:
    """What `patch_safetensors` returns: in force until `undo`, or until the end
    of its `with`."""

    __slots__ = ("_on",)

    def __init__(self) -> None:
        global _depth
        self._on = False
        with _lock:
            if _depth == 0:
                _patch()
            _depth += 1
            self._on = True

    def undo(self) -> None:
        """Ends it. The last patch to end restores everything; again, it does
        nothing."""
        global _depth
        with _lock:
            if not self._on:
                return
            self._on = False
            _depth -= 1
            if _depth == 0:
                _undo()

    def __enter__(self) -> SafetensorsPatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def patch_safetensors() -> SafetensorsPatch:
    """Makes every library in this process that reads with the package
    safetensors read through overwire, compressed files included.

        with overwire.patch_safetensors():
            model = AutoModel.from_pretrained(folder)

    In force from the call on, for all threads: `safe_open`, `deserialize`, and
    `load_file`, `load`, `load_model` of safetensors' modules, wherever a loaded
    module has bound them, and in modules that are imported meanwhile. Writing
    stays safetensors' own. transformers, diffusers and accelerate need nothing
    else; names of files stay what they were.

    Children of fork, such as workers of a DataLoader, cannot use the engine: in
    them safetensors' own functions read plain files, what was opened before the
    fork included, and compressed ones are ForkedError.

    Returns a context manager with `undo`. Patches may be nested and may
    overlap; what was bound is restored when the last one ends.

    Raises MissingPackageError where safetensors is not installed.
    """
    return SafetensorsPatch()
