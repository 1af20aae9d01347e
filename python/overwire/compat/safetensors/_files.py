"""Implements safe_open and its slices."""

from __future__ import annotations

import operator
import os
from typing import Any

import overwire
from overwire import safe_open as open_tensors  # import it now, not at the first call
from overwire._compat_api import state_of_file

from ._errors import SafetensorError, check, reading
from ._frameworks import Framework, framework_of
from ._prefetch import Internal, PrefetchLoader, TensorMeta, rows_of_plan

_DEVICES = ("cuda", "npu", "xpu", "xla", "mlu", "musa", "hpu")


def _device(device: Any) -> str:
    """Converts a device to the name that the original uses: "cpu", "mps", "cuda:0" ..."""
    if device is None:
        return "cpu"
    if isinstance(device, int) and device >= 0:
        return f"cuda:{int(device)}"
    text = str(device) if isinstance(device, str) or type(device).__module__ == "torch" else ""
    if text in ("cpu", "mps"):
        return text
    kind, colon, number = text.partition(":")
    if kind in _DEVICES:
        if not colon:
            return f"{kind}:0"
        if number.isdecimal():
            return text
        raise ValueError("invalid digit found in string" if number else "cannot parse integer from empty string")
    raise SafetensorError(f"device {device if isinstance(device, str) else repr(device)} is invalid")


class safe_open:
    """Opens a file and returns tensors on request.

    filename: a path. framework: "pt", "np", "tf", "flax", "mlx" or "paddle", or the long name
    of one of these. device: the device for tensors; only "pt" and "paddle" support devices other than "cpu". backend:
    "mmap" or "pread".

    The object is a context manager. Raises FileNotFoundError, SafetensorError.
    """

    __slots__ = ("_device", "_entries", "_file", "_framework", "_name", "_source", "_state")

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> None:
        self._open(os.fspath(filename), filename, framework, device, backend)

    def _open(self, source: Any, name: Any, framework: str, device: Any = "cpu", backend: str = "mmap") -> None:
        for what, value in (("framework", framework), ("backend", backend)):
            if not isinstance(value, str):
                raise TypeError(f"argument '{what}': {value!r} is not an instance of 'str'")
        self._framework: Framework = framework_of(framework)
        self._device = _device(device)
        if backend not in ("mmap", "pread"):
            raise SafetensorError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
        lands = self._device if self._framework.native == "pt" and self._device.startswith("cuda") else "cpu"
        self._name, self._source, self._state = name, source, state_of_file(source)
        self._entries: dict[str, tuple[str, list[int], tuple[int, int]]] = {}
        self._file: overwire.safe_open | None
        with reading(name):
            self._file = open_tensors(source, self._framework.native, lands, mmap=None if backend == "mmap" else False)

    def _live(self) -> overwire.safe_open:
        if self._file is None:
            raise SafetensorError("File is closed")
        return self._file

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, _exc_type: Any, _exc_value: Any, _traceback: Any) -> None:
        # Slices stay usable. Dropping the last slice closes the file.
        self._file = None

    def keys(self) -> list[str]:
        """Returns the names of the tensors, sorted."""
        return self._live().keys()

    def offset_keys(self) -> list[str]:
        """Returns the names of the tensors, in the order of their data."""
        return self._live().offset_keys()

    def metadata(self) -> dict[str, str] | None:
        """Returns the entries of `__metadata__`, or None if the header has none."""
        return self._live().metadata()

    def get_tensor(self, name: str) -> Any:
        """Returns one whole tensor."""
        file = self._live()
        check("name", name, str)
        with reading(self._name, "Error while reading"):
            tensor = file.get_tensor(name)
        return self._framework.make(tensor, self._device, name)

    def get_tensors(self) -> dict[str, Any]:
        """Returns every tensor by name, in the order of `offset_keys`."""
        file = self._live()
        with reading(self._name, "Error while reading"):
            tensors = file.get_tensors()
        return {name: self._framework.make(tensor, self._device, name) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> PySafeSlice:
        """Returns a slice object, which reads when it is indexed."""
        file = self._live()
        check("name", name, str)
        with reading(self._name):
            inner = file.get_slice(name)
        part: PySafeSlice = object.__new__(PySafeSlice)
        part._file, part._inner, part._name = file, inner, name
        part._framework, part._device = self._framework, self._device
        return part

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Returns the tensor's entry in the header, without reading the tensor."""
        file = self._live()
        check("name", name, str)
        if not self._entries:
            entries, end = {}, 0
            for each in file.offset_keys():  # tensors follow each other without gaps
                inner = overwire.TensorSlice(file, each)
                dtype, shape, begin = inner.get_dtype(), inner.get_shape(), end
                end += inner.nbytes
                entries[each] = dtype, shape, (begin, end)
            self._entries = entries  # assigned when it is complete, because other threads may read it
        if name not in self._entries:
            raise SafetensorError(f"File does not contain tensor {name}")
        meta: TensorMeta = object.__new__(TensorMeta)
        meta._entry = self._entries[name]
        return meta

    def prefetch(
        self, plan: dict[str, slice | None] | None = None, *, device: Any = None, threads: int = 8
    ) -> PrefetchLoader:
        """Starts to load tensors in the background, to a GPU or the host. Works only with framework="pt".

        plan: maps names to None for the whole tensor, or to a slice of its rows with step 1. By default every tensor is
        loaded.
        device: the device for the tensors, by default the device of this file object. threads: ignored, because the
        engine has its own threads.

        Raises SafetensorError for tensors that it cannot load, and if the file has changed since it was opened.
        """
        file = self._live()
        if operator.index(threads) < 0:
            raise OverflowError("can't convert negative int to unsigned")
        where = self._device if device is None else _device(device)
        if self._framework.native != "pt":
            raise SafetensorError('prefetch is only compatible with framework="pt"')
        if where != "cpu" and not where.startswith("cuda"):
            raise SafetensorError(f"prefetch loads to cuda devices, not {where}")
        parts = rows_of_plan(file, plan)
        if state_of_file(self._source) != self._state:
            raise SafetensorError(f"{self._name} has changed since it was opened")
        loader: PrefetchLoader = object.__new__(PrefetchLoader)
        try:
            with reading(self._name, "Error while reading"):
                loader._begin_load(file, self._source, self._name, parts, where)
        except overwire.DeviceError as error:
            raise SafetensorError(str(error)) from error
        return loader


class _safe_open_handle(safe_open):
    """`safe_open` for a binary file that is already open for reading."""

    __slots__ = ()

    def __init__(self, f: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> None:
        self._open(f, f.name, framework, device, backend)


class PySafeSlice(Internal):
    """A tensor of an open file. It is read when it is indexed.

    For "pt", any index of a torch tensor can be used, including lists and masks, with torch's errors. For ints, slices,
    `...` and None only the needed block is read. For other frameworks an index has ints, slices with a positive step,
    and at most one `...`; anything else raises SafetensorError.
    """

    __slots__ = ("_device", "_file", "_framework", "_inner", "_name")

    _file: overwire.safe_open
    _inner: overwire.TensorSlice
    _name: str
    _framework: Framework
    _device: str

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor, in elements, from the file's header."""
        return self._inner.get_shape()

    def get_dtype(self) -> str:
        """Returns the dtype's name in the file: "F32", "BF16" ..."""
        return self._inner.get_dtype()

    def __getitem__(self, index: Any) -> Any:
        torch = self._framework.native == "pt"
        if not torch:
            index = _checked(index, self.get_shape())
        with reading(self._name, "Error while reading"):
            if not torch or (_basic(index) and self.get_shape()):
                try:
                    tensor = self._inner[index]
                except (overwire.SliceError, overwire.NotSupportedError):
                    if not torch:
                        raise
                    tensor = self._file.get_tensor(self._name)[index]  # torch indexes the tensor, or raises its error
            else:
                tensor = self._file.get_tensor(self._name)[index]
        return self._framework.make(tensor, self._device, self._name)


def _basic(index: Any) -> bool:
    """Returns whether an index has the same effect in overwire and in torch."""
    for entry in index if isinstance(index, tuple) else (index,):
        if entry is None or entry is Ellipsis or type(entry) is int:
            continue
        if not isinstance(entry, slice):
            return False
        bounds = [bound for bound in (entry.start, entry.stop, entry.step) if bound is not None]
        if any(type(bound) is not int for bound in bounds) or entry.step is not None and entry.step <= 0:
            return False
    return True


def _checked(index: Any, shape: list[int]) -> Any:
    """Converts the index for overwire, or raises the original's error."""
    if isinstance(index, list):
        if index:
            raise SafetensorError("Non empty lists are not implemented")
        index = slice(0, 0)
    entries = []
    for at, entry in enumerate(index if isinstance(index, tuple) else (index,)):
        if isinstance(entry, slice):
            step = 1 if entry.step is None else operator.index(entry.step)
            if step <= 0:
                raise SafetensorError(f"Slice step must be a positive integer, got {step}")
            for bound in (entry.start, entry.stop):
                if bound is not None:
                    operator.index(bound)
        elif entry is not Ellipsis:
            try:
                entry = int(operator.index(entry))
            except TypeError:
                text = f"Unsupported slice index at position {at}: expected slice, int, or ellipsis"
                raise SafetensorError(text) from None
        entries.append(entry)
    if entries.count(Ellipsis) > 1:
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        entries[at : at + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    for dim, entry in enumerate(entries):
        size = shape[dim] if dim < len(shape) else 0
        if isinstance(entry, int) and entry < 0:
            if entry < -size:
                raise SafetensorError(f"Invalid index {entry} for dimension {dim} of size {size}")
            entries[dim] = entry + size
    if len(entries) > len(shape):
        where = f"Error during slicing {_text(entries)} with shape {shape}"
        raise SafetensorError(f"{where}: more slicing indexes than dimensions in tensor")
    for dim, entry in enumerate(entries):
        if isinstance(entry, int) and entry >= shape[dim]:
            where = f"Error during slicing {_text(entries)} with shape {shape}"
            why = f"index {entry} out of bounds for tensor dimension #{dim} of size {shape[dim]}"
            raise SafetensorError(f"{where}: {why}")
    return tuple(entries)


def _text(entries: list[Any]) -> str:
    parts = []
    for entry in entries:
        if isinstance(entry, slice):
            bounds = (entry.start, entry.stop, *(() if entry.step is None else (entry.step,)))
            parts.append(":".join("" if p is None else str(p) for p in bounds))
        else:
            parts.append(str(entry))
    return f"[{', '.join(parts)}]"
