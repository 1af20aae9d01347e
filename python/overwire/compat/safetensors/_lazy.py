"""What `safe_open` gives while patched: slices that may be loaded ahead, all of a
model in one pass of the engine, and plain files that safetensors itself reads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import overwire
from overwire.plumbing import keep, new_lock, prepare

from ._errors import reading
from ._files import safe_open

# What the engine casts as it lands, bit for bit as torch does.
_CASTS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


class Slice:
    """A tensor of an open file, read as it is indexed.

    inner: safetensors' own slice of a plain file, or ours, whose results are on
    the device where. path: the file, for loads of more than this tensor. mapped:
    whether safetensors maps it, which on the CPU is as good as a load.
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
        """The whole tensor's shape, in elements."""
        shape: list[int] = self._inner.get_shape()
        return shape

    def get_dtype(self) -> str:
        """The dtype's name in the file: "F32", "BF16" ..."""
        dtype: str = self._inner.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> Any:
        if self._give is not None and index is Ellipsis:
            give, self._give = self._give, None
            return give()
        return self._inner[index]

    def device(self, asked: Any) -> str | None:
        """Where the engine is to land it for a library that wants it on a device; None: safetensors' way is as good, or
        the engine does not support the device."""
        where = _engines(asked)
        return None if where == "cpu" and self._mapped else where

    def cast(self, dtype: Any) -> str:
        """The dtype that the engine casts it to as it lands, for a library that wants
        one; "" if it leaves that to torch, or there is nothing to cast."""
        return _cast(self.get_dtype(), dtype)

    def on(self, device: str) -> Any:
        """The same tensor, to index, with results on a device."""
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
    # A device as the engine names it; None if it has no such device.
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
    """Begins to make the engine ready for the devices of a device_map, or for one device."""
    devices = device_map.values() if isinstance(device_map, Mapping) else (device_map,)
    for device in {_engines(device) for device in devices} - {None, "cpu"}:
        prepare(str(device))


class PlainFile:
    """A plain file, which safetensors itself reads; its slices are `Slice`s."""

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
        """The tensor as something to index; nothing is read yet."""
        return Slice(self._inner.get_slice(name), self._path, name, "cpu", self._elsewhere, mapped=True)


class Ahead:
    """One load, of all tensors that it was asked for before it gives the first. Threads may share it."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._passed = False
        self._open: dict[tuple[str, str], _Pass] = {}  # by device and cast: what is still being noted
        self._passes: list[_Pass] = []

    def want(self, tensor: Slice, device: str, dtype: Any = None) -> Callable[[], Any]:
        """Notes a whole tensor, to be cast to dtype as it lands where that is exact for the engine. Returns what
        gives it, once: the first call begins the load of all that were noted till then."""
        cast = tensor.cast(dtype)
        with self._lock:
            current = self._open.get((device, cast))
            if current is None or not current.note(tensor.path, tensor.name):
                current = self._open[device, cast] = _Pass(device, cast)
                self._passes.append(current)
                current.note(tensor.path, tensor.name)
        return lambda: current.give(tensor.path, tensor.name)

    def begin(self) -> None:
        """Begins the load; what it raises, the tensors raise."""
        with self._lock:
            for current in self._open.values():
                current.begin()

    @contextlib.contextmanager
    def pass_on(self) -> Iterator[None]:
        """While it lasts, `ahead` gives this one to this thread, and `close` frees nothing; closes it at the end."""
        before, _thread.passed, self._passed = getattr(_thread, "passed", None), self, True
        try:
            yield
        finally:
            _thread.passed, self._passed = before, False
            self.close()

    def close(self) -> None:
        """Ends it; what landed and was not given is freed. Of one that is passed nothing is."""
        if self._passed:
            return
        for current in self._passes:
            current.close()
        self._open, self._passes = {}, []


def ahead() -> Ahead:
    """The one that is passed to this thread, or a new one."""
    return getattr(_thread, "passed", None) or Ahead()


def passed() -> bool:
    """Whether one is passed to this thread."""
    return getattr(_thread, "passed", None) is not None


class _Pass:
    # The tensors of one device and one cast. Given in the order in which they are
    # asked for; that of the engine's arrival is the files'.

    def __init__(self, device: str, cast: str) -> None:
        self._names: dict[str, dict[str, None]] = {}  # by file, in the order of asking
        self._begun = False
        self._device, self._cast = device, cast
        self._lock = new_lock()
        self._arrivals: Iterator[tuple[tuple[str, str], Any]] = iter(())
        self._streams: list[Any] = []
        self._landed: dict[tuple[str, str], Any] = {}
        self._given: set[tuple[str, str]] = set()
        self._failed: BaseException | None = None

    def note(self, path: str, name: str) -> bool:
        """False if it is too late for this tensor."""
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
            try:
                while (path, name) not in self._landed:
                    key, tensor = next(self._arrivals)
                    self._landed[key] = tensor
            except BaseException as error:
                self._failed = error
                self._landed = {}
                raise
            self._given.add((path, name))
            if len(self._given) == sum(map(len, self._names.values())):
                for _ in self._arrivals:  # there is no more: the load ends and is reported
                    pass
            return self._landed.pop((path, name))

    def close(self) -> None:
        with self._lock:
            self._failed = self._failed or overwire.CancelledError("overwire: the load of a model ahead has ended")
            self._arrivals, self._landed = iter(()), {}
            for stream in self._streams:
                stream.close()
            self._streams = []

    def _load(self) -> Iterator[tuple[tuple[str, str], Any]]:
        # One stream over all files; of files with a name in common, one each.
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
    """While it lasts, slices that this thread opens and that `device` gives a device to are loaded ahead, one pass a
    device, when the first is read."""
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


# It has its type here, since patching reads it while type checkers go in a circle.
slice_plan: Callable[[Callable[[str], Any]], contextlib.AbstractContextManager[None]]
slice_plan = contextlib.contextmanager(_plan_slices)


def kept(filename: Any) -> Any:
    """The file as it is open already, or from now on; what cannot be opened is what it
    was: who opens it raises why."""
    try:
        return keep(filename)
    except (overwire.OverwireError, OSError, TypeError, ValueError):
        return filename


def path_of(filename: Any) -> str:
    """A file's name as it will still be right when the folder has changed."""
    name = os.fsdecode(filename)
    return name if "://" in name else os.path.abspath(name)
