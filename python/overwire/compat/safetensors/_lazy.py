"""Defines the objects that a patched `safe_open` returns. Slices can be loaded before they are indexed, so the engine
loads a whole model in one pass. Plain files are read by safetensors itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import overwire
from overwire._compat_api import KeptFile, new_lock, prepare_gpu
from overwire._undo import after_error, pass_error_to

from ._errors import reading
from ._files import safe_open

# Dtypes that the engine casts during a load, with the same bits as torch.
_CASTS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


class Slice:
    """A tensor of an open file. It is read when it is indexed.

    inner: safetensors' own slice for a plain file, otherwise overwire's. where: the device of the results. path: the
    file's absolute path or URI, for loads of several tensors. mapped: whether safetensors maps the tensor, which on the
    CPU is as fast as loading it.
    """

    __slots__ = ("_elsewhere", "_give", "_inner", "_mapped", "_where", "name", "path")

    def __init__(
        self, inner: Any, path: str, name: str, where: str, elsewhere: dict[str, safe_open], mapped: bool = False
    ) -> None:
        self._inner, self.path, self.name, self._where, self._mapped = inner, path, name, where, mapped
        self._elsewhere = elsewhere  # the same file, opened for other devices
        plan = getattr(_thread, "plan", None)
        self._give = None if plan is None else plan(self)

    def get_shape(self) -> list[int]:
        """Returns the whole tensor's shape, in elements."""
        shape: list[int] = self._inner.get_shape()
        return shape

    def get_dtype(self) -> str:
        """Returns the dtype's name in the file: "F32", "BF16" ..."""
        dtype: str = self._inner.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> Any:
        if self._give is not None and index is Ellipsis:
            give, self._give = self._give, None
            return give()
        return self._inner[index]

    def device(self, asked: Any) -> str | None:
        """Returns the engine's name for the device that a library asks for. Returns None if safetensors should load the
        tensor, because safetensors is as fast or the engine does not support the device."""
        where = _engines(asked)
        return None if where == "cpu" and self._mapped else where

    def cast(self, dtype: Any) -> str:
        """Returns the dtype to which the engine should cast the tensor during the load. Returns "" if torch must cast
        the tensor, or if no cast is needed."""
        return _cast(self.get_dtype(), dtype)

    def on(self, device: str) -> Any:
        """Returns a slice of the same tensor with results on a device."""
        if device == self._where:
            return self._inner
        file = self._elsewhere.get(device)
        if file is None:
            file = self._elsewhere[device] = object.__new__(safe_open)
            file._open(kept(self.path), self.path, "pt", device)
        return file.get_slice(self.name)


@functools.lru_cache(maxsize=64)
def _cast(dtype: str, asked: Any) -> str:
    source, target = _CASTS.get(dtype), str(asked).removeprefix("torch.")
    return target if source is not None and target in _CASTS.values() and target != source else ""


def _engines(asked: Any) -> str | None:
    # Returns the engine's name for a device, or None if the engine does not support it.
    if asked is None:
        return "cpu"
    if isinstance(asked, int):
        return f"cuda:{asked}"
    kind, _, number = str(asked).partition(":")
    if kind == "cuda":
        import torch

        return f"cuda:{number or torch.cuda.current_device()}"
    return "cpu" if kind == "cpu" else None


def ready(device_map: Any) -> None:
    """Begins to prepare the engine for the devices of a device_map, or for one device."""
    devices = device_map.values() if isinstance(device_map, Mapping) else (device_map,)
    for device in {_engines(device) for device in devices} - {None, "cpu"}:
        prepare_gpu(str(device))


class PlainFile:
    """A plain file that safetensors itself reads. `get_slice` returns a `Slice`."""

    def __init__(self, inner: Any, path: str) -> None:
        self._inner, self._path = inner, path
        self._elsewhere: dict[str, safe_open] = {}

    def __enter__(self) -> PlainFile:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._inner.__exit__(*exc)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._inner)})

    def get_slice(self, name: str) -> Slice:
        """Returns a slice object, which reads when it is indexed."""
        return Slice(self._inner.get_slice(name), self._path, name, "cpu", self._elsewhere, mapped=True)


class Ahead:
    """A load of all tensors that are requested before the first one is returned. Threads may share this object."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._passed = False
        self._open: dict[tuple[str, str], _Pass] = {}  # passes that still accept tensors, by device and cast
        self._passes: list[_Pass] = []

    def want(self, tensor: Slice, device: str, dtype: Any = None) -> Callable[[], Any]:
        """Requests a whole tensor. The engine casts the tensor to `dtype` if the result has the same bits as torch's.
        Returns a function that returns the tensor and can be called once. The first call of such a function starts the
        load of all tensors that were requested so far for the same device and cast."""
        cast = tensor.cast(dtype)
        with self._lock:
            current = self._open.get((device, cast))
            if current is None or not current.note(tensor.path, tensor.name):
                current = self._open[device, cast] = _Pass(device, cast)
                self._passes.append(current)
                current.note(tensor.path, tensor.name)
        return lambda: current.give(tensor.path, tensor.name)

    def begin(self) -> None:
        """Starts the load. Its errors are raised by the functions that `want` returned."""
        with self._lock:
            for current in self._open.values():
                current.begin()

    @contextlib.contextmanager
    def pass_on(self) -> Iterator[None]:
        """A context in which `ahead` returns this object in this thread, and `close` does nothing. Leaving the context
        closes this object."""
        before, _thread.passed, self._passed = getattr(_thread, "passed", None), self, True
        try:
            yield
        finally:
            _thread.passed, self._passed = before, False
            self.close()

    def close(self) -> None:
        """Ends the load and frees the tensors that were not returned. Does nothing inside `pass_on`."""
        if self._passed:
            return
        for current in self._passes:
            current.close()
        self._open, self._passes = {}, []


def ahead() -> Ahead:
    """Returns the object of this thread's `pass_on`, or a new one."""
    return getattr(_thread, "passed", None) or Ahead()


def passed() -> bool:
    """Returns whether this thread is inside a `pass_on`."""
    return getattr(_thread, "passed", None) is not None


class _Pass:
    # The tensors of one device and one cast. They are returned in the order of the requests; the
    # engine delivers them in file order.

    def __init__(self, device: str, cast: str) -> None:
        self._names: dict[str, dict[str, None]] = {}  # keyed by file, in the order of requests
        self._begun = False
        self._device, self._cast = device, cast
        self._lock = new_lock()
        self._arrivals: Iterator[tuple[tuple[str, str], Any]] = iter(())
        self._streams: list[Any] = []
        self._landed: dict[tuple[str, str], Any] = {}
        self._given: set[tuple[str, str]] = set()
        self._failed: BaseException | None = None

    def note(self, path: str, name: str) -> bool:
        """Adds a tensor. Returns False if the load has begun without the tensor, or has already returned it."""
        with self._lock:
            if not self._begun:
                self._names.setdefault(path, {})[name] = None
            return name in self._names.get(path, ()) and (path, name) not in self._given

    def begin(self) -> None:
        with self._lock:
            if self._begun:
                return
            self._begun = True
            try:
                self._arrivals = self._load()
            except Exception as error:
                self._failed = error

    def give(self, path: str, name: str) -> Any:
        with self._lock, reading(path, "Error while reading"):
            self.begin()
            if self._failed is not None:
                raise self._failed
            with pass_error_to(setattr, self, "_failed"), after_error(self._landed.clear):
                while (path, name) not in self._landed:
                    key, tensor = next(self._arrivals)
                    self._landed[key] = tensor
            self._given.add((path, name))
            if len(self._given) == sum(map(len, self._names.values())):
                for _ in self._arrivals:  # exhaust the stream, so that the load ends and is reported
                    pass
            return self._landed.pop((path, name))

    def close(self) -> None:
        with self._lock:
            self._failed = self._failed or overwire.CancelledError("overwire: the load of this model was closed")
            self._arrivals, self._landed = iter(()), {}
            for stream in self._streams:
                stream.close()
            self._streams = []

    def _load(self) -> Iterator[tuple[tuple[str, str], Any]]:
        # One stream for all files. If two files have a tensor of the same name, each file gets its own stream.
        owner = {name: path for path, names in self._names.items() for name in names}
        if len(owner) == sum(map(len, self._names.values())):
            with contextlib.suppress(overwire.ArgumentError):
                return (((owner[name], name), tensor) for name, tensor in self._stream(list(self._names), list(owner)))
        return (
            ((path, name), tensor)
            for path, names in self._names.items()
            for name, tensor in self._stream([path], list(names))
        )

    def _stream(self, paths: list[str], names: list[str]) -> Iterator[tuple[str, Any]]:
        source: Any = paths if len(paths) > 1 else kept(paths[0])
        stream = overwire.stream(source, keys=names, device=self._device, dtype=self._cast or None, framework="pt")
        self._streams.append(stream)
        return stream


_thread = threading.local()


def _plan_slices(device: Callable[[str], Any]) -> Iterator[None]:
    """A context that loads the slices that this thread opens ahead, if `device` returns a device for their names. The
    first read loads all these slices, in one pass per device."""
    load, before = ahead(), getattr(_thread, "plan", None)

    def note_slice(tensor: Slice) -> Callable[[], Any] | None:
        request = device(tensor.name)
        target = None if request is None else tensor.device(request)
        return None if target is None else load.want(tensor, target)

    _thread.plan = note_slice
    try:
        yield
    finally:
        _thread.plan = before
        load.close()


# Annotated here because `patching` uses this name, and type checkers would otherwise follow circular imports.
slice_plan: Callable[[Callable[[str], Any]], contextlib.AbstractContextManager[None]]
slice_plan = contextlib.contextmanager(_plan_slices)


def kept(filename: Any) -> Any:
    """Opens a file and keeps it open, or returns the file if it is already open. Returns the name unchanged if the file
    cannot be opened; opening it later reports the error."""
    try:
        return KeptFile.open_file(filename)
    except (overwire.OverwireError, OSError, TypeError, ValueError):
        return filename


def path_of(filename: Any) -> str:
    """Returns a name of the file that stays valid when the working folder changes."""
    name = os.fsdecode(filename)
    return name if "://" in name else os.path.abspath(name)
