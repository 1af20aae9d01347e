"""Unpickles bundles while their blobs are loaded.

Python unpickles trusted pickles, and `machine` interprets all others.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Protocol

from ..errors import FormatError, NotSupportedError, OutOfMemoryError, OverwireError
from ..rebuild import np_dtype
from .allowlist import AllowList
from .budget import Budget
from .machine import Machine
from .tensors import tensor_v3


class Blobs(Protocol):
    """The bytes that belong to a pickle, by blob number."""

    def storage(self, blob: int, size: int) -> Any:
        """Waits for a blob and returns its torch UntypedStorage. Later calls return the same object."""

    def base(self, blob: int, size: int) -> Any:
        """Waits for a blob and returns it as a flat uint8 numpy array. Later calls return the same object."""


class _References:
    """Converts persistent ids to storages and arrays. The ids are not trusted."""

    def __init__(self, blobs: Blobs, source: str, budget: Budget | None) -> None:
        self._blobs = blobs
        self._source = source
        self._budget = budget
        self._arrays: dict[int, Any] = {}
        self._known: set[int] = set()

    def get(self, pid: Any) -> Any:
        """Returns the object for a persistent id. Raises FormatError for a malformed id."""
        if type(pid) is int or type(pid) is str and pid.isdigit():
            text = "nyacomp itself wrote this file: load it with nyacomp and compress it again with overwire"
            raise NotSupportedError(f"overwire: unpickle {self._source}: {text}", source=self._source)
        if type(pid) is tuple and pid and type(pid[0]) is str:
            if pid[0] == "storage" and len(pid) == 4:
                return self._load_storage(*pid[1:])
            if pid[0] == "array" and len(pid) == 9:
                return self._load_array(*pid[1:])
        raise self._refuse_reference()

    def _refuse_reference(self) -> FormatError:
        text = f"overwire: unpickle {self._source}: a reference to a tensor is malformed"
        return FormatError(text, source=self._source)

    def _count_memory(self, blob: int, size: int) -> None:
        if self._budget is not None and blob not in self._known:
            self._known.add(blob)
            self._budget.add_blob(size)

    def _load_storage(self, blob: Any, dtype: Any, size: Any) -> Any:
        import torch

        make_untyped: Any = torch.UntypedStorage
        make_typed: Any = torch.storage.TypedStorage

        if type(blob) is not int or type(dtype) is not str or type(size) is not int:
            raise self._refuse_reference()
        kind = vars(torch).get(dtype) if dtype else torch.uint8
        if not isinstance(kind, torch.dtype) or size < 0 or (blob < 0) != (size == 0):
            raise self._refuse_reference()
        storage = make_untyped(0) if size == 0 else self._blobs.storage(blob, size)
        self._count_memory(blob, size)
        if not dtype:
            return storage
        return make_typed(wrap_storage=storage, dtype=kind, _internal=True)

    def _load_array(self, blob: Any, spec: Any, shape: Any, strides: Any, offset: Any, writable: Any,
               number: Any, size: Any) -> Any:  # fmt: skip
        import numpy as np

        whole = [blob, offset, number, size]
        if any(type(n) is not int for n in whole) or type(writable) is not bool:
            raise self._refuse_reference()
        known_array = self._arrays.get(number)
        if known_array is not None:
            return known_array
        kind = np_dtype(spec, budget=self._budget)
        if kind.hasobject or not inside(shape, strides, offset, kind.itemsize, size):
            raise self._refuse_reference()
        if blob >= 0:
            base = self._blobs.base(blob, size)
            self._count_memory(blob, size)
            array = np.ndarray(shape, kind, base, offset, strides)
        elif 0 in shape or not kind.itemsize:
            if self._budget is not None:
                self._budget.charge_memory(kind.itemsize)  # numpy allocates one element for an empty array
            array = np.empty(shape, kind)
        else:
            raise self._refuse_reference()
        array.flags.writeable = writable
        self._arrays[number] = array
        return array


# The most dimensions, and the limit for sizes in bytes. Within these limits, numpy's arithmetic does not overflow.
_DIMS, _LIMIT = 64, 1 << 62


def inside(shape: Any, strides: Any, offset: int, item: int, size: int) -> bool:
    """Returns whether an array is within `size` bytes. Computes in Python integers, because numpy's own check can
    overflow."""
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides) or len(shape) > _DIMS:
        return False
    low = high = offset
    count = item
    for d, s in zip(shape, strides, strict=True):
        if type(d) is not int or type(s) is not int or not 0 <= d < _LIMIT or abs(s) >= _LIMIT:
            return False
        reach = max(d - 1, 0) * s
        low += min(reach, 0)
        high += max(reach, 0)
        count *= max(d, 1)
        if max(-low, high, count) >= _LIMIT:
            return False
    if 0 in shape:
        return 0 <= offset <= size
    return low >= 0 and high + item <= size


class _Trusting(pickle.Unpickler):
    """Imports and calls everything that the pickle names."""

    def __init__(self, data: bytes, references: _References) -> None:
        super().__init__(io.BytesIO(data))
        self._references = references

    def persistent_load(self, pid: Any) -> Any:
        return self._references.get(pid)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return tensor_v3  # accepts the untyped storages that `persistent_load` returns
        return super().find_class(module, name)


def load(data: bytes, blobs: Blobs, source: str, trust: bool) -> Any:
    """Unpickles `data`. If `trust` is false, raises UntrustedPickleError for globals that are not on the allow-list."""
    if trust:
        return _Trusting(data, _References(blobs, source, None)).load()
    budget = Budget(source, len(data))
    references = _References(blobs, source, budget)
    return run_machine(Machine(data, AllowList(budget), references.get), source)


class _NoNames(AllowList):
    def find(self, module: str, name: str) -> Any:
        raise self.unlisted(module, name)


def load_plain(data: bytes, source: str) -> Any:
    """Unpickles numbers, strings and containers of these. Raises UntrustedPickleError for pickles that
    name globals or refer to blobs, and FormatError for malformed ones."""
    budget = Budget(source, len(data), "Nothing in it was run")

    def refuse_reference(pid: Any) -> Any:
        raise budget.refuse("it refers to data outside of the pickle")

    return run_machine(Machine(data, _NoNames(budget), refuse_reference), source)


def run_machine(machine: Machine, source: str) -> Any:
    try:
        return machine.run()
    except Exception as error:
        if isinstance(error, OverwireError):
            if type(error) is not FormatError or error.source is not None:
                raise
            reason = str(error).removeprefix("overwire: unpickle: ")
        else:
            # A hostile or broken pickle can raise any exception, but the caller gets a FormatError. The message shows
            # only str arguments, because converting other objects of the pickle to text could run code.
            reason = type(error).__name__ + "".join(f": {part[:200]}" for part in error.args[:1] if type(part) is str)
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                raise OutOfMemoryError(f"overwire: unpickle {source}: {reason}", source=source) from error
        text = f"overwire: unpickle {source}: {reason} (at byte {machine.at})"
        raise FormatError(text, source=source, offset=machine.at) from error
