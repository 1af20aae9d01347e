"""The unpicklers of bundles: they ask for blobs while these are still landing."""

from __future__ import annotations

import io
import pickle
from typing import Any, Protocol

from .allowlist import AllowList, tensor_v3
from .errors import FormatError, NotSupportedError, OverwireError
from .rebuild import np_dtype

__all__ = ["Blobs", "load"]


class Blobs(Protocol):
    """The bytes beside a pickle, by blob number."""

    def storage(self, blob: int, size: int) -> Any:
        """A torch UntypedStorage; the same one each time. Waits for it."""

    def base(self, blob: int, size: int) -> Any:
        """A flat uint8 numpy array; the same one each time. Waits for it."""


class _References:
    """Turns persistent ids into storages and arrays, trusting none of them."""

    def __init__(self, blobs: Blobs, source: str) -> None:
        self._blobs = blobs
        self._source = source
        self._arrays: dict[int, Any] = {}

    def get(self, pid: Any) -> Any:
        """What a persistent id stands for; FormatError if it is malformed."""
        if type(pid) is int or type(pid) is str and pid.isdigit():
            raise NotSupportedError(
                f"overwire: unpickle {self._source}: it was written by nyacomp itself; load it there and compress it again with overwire",
                source=self._source,
            )
        if type(pid) is tuple and pid[:1] == ("storage",) and len(pid) == 4:
            return self._storage(*pid[1:])
        if type(pid) is tuple and pid[:1] == ("array",) and len(pid) == 9:
            return self._array(*pid[1:])
        raise self._malformed()

    def _malformed(self) -> FormatError:
        return FormatError(
            f"overwire: unpickle {self._source}: a reference to a tensor is malformed",
            source=self._source,
        )

    def _storage(self, blob: Any, dtype: Any, size: Any) -> Any:
        import torch

        make_untyped: Any = torch.UntypedStorage
        make_typed: Any = torch.storage.TypedStorage

        if type(blob) is not int or type(dtype) is not str or type(size) is not int:
            raise self._malformed()
        kind = getattr(torch, dtype, None) if dtype else torch.uint8
        if not isinstance(kind, torch.dtype) or size < 0 or (blob < 0) != (size == 0):
            raise self._malformed()
        storage = make_untyped(0) if size == 0 else self._blobs.storage(blob, size)
        if not dtype:
            return storage
        return make_typed(wrap_storage=storage, dtype=kind, _internal=True)

    def _array(self, blob: Any, spec: Any, shape: Any, strides: Any, offset: Any, writable: Any,
               number: Any, size: Any) -> Any:  # fmt: skip
        import numpy as np

        whole = [blob, offset, number, size]
        if any(type(n) is not int for n in whole) or type(writable) is not bool:
            raise self._malformed()
        for dims in (shape, strides):
            if type(dims) is not tuple or any(type(d) is not int for d in dims):
                raise self._malformed()
        found = self._arrays.get(number)
        if found is not None:
            return found
        kind = np_dtype(spec)
        if kind.hasobject or len(shape) != len(strides) or (blob < 0 and 0 not in shape):
            raise self._malformed()
        try:
            if blob < 0:
                array = np.empty(shape, kind)
            else:
                base = self._blobs.base(blob, size)
                array = np.ndarray(shape, kind, base, offset, strides)
        except (ValueError, TypeError) as error:
            raise self._malformed() from error
        array.flags.writeable = writable
        self._arrays[number] = array
        return array


class _Trusting(pickle.Unpickler):
    """Imports and calls whatever the pickle says."""

    def __init__(self, data: bytes, references: _References) -> None:
        super().__init__(io.BytesIO(data))
        self._references = references

    def persistent_load(self, pid: Any) -> Any:
        return self._references.get(pid)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return tensor_v3  # takes the untyped storages that we hand out
        return super().find_class(module, name)


class _Careful(pickle._Unpickler):
    """Asks the allow-list at each step. Python's own unpickler, because the one
    in C asks for globals only."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def __init__(self, data: bytes, references: _References, allow: AllowList) -> None:
        super().__init__(io.BytesIO(data))
        self._references = references
        self._allow = allow

    def persistent_load(self, pid: Any) -> Any:
        return self._references.get(pid)

    def find_class(self, module: str, name: str) -> Any:
        return self._allow.find(module, name)

    def load_reduce(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        args = stack.pop()
        function = stack[-1]
        self._allow.check_call(function)
        stack[-1] = function(*args)

    def load_newobj(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        args = stack.pop()
        kind = stack[-1]
        self._allow.check_new(kind)
        stack[-1] = kind.__new__(kind, *args)

    def load_build(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        self._allow.check_state(stack[-2])
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    def load_refused(self) -> None:
        raise self._allow.refuse("it uses an opcode that honest bundles do not have")

    dispatch[pickle.REDUCE[0]] = load_reduce  # type: ignore[assignment]
    dispatch[pickle.NEWOBJ[0]] = load_newobj  # type: ignore[assignment]
    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]
    for _code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[_code[0]] = load_refused  # type: ignore[assignment]


def load(data: bytes, blobs: Blobs, source: str, trust: bool) -> Any:
    """Unpickles `data`; UntrustedPickleError as `load_compressed_pickle` says."""
    references = _References(blobs, source)
    if trust:
        return _Trusting(data, references).load()
    try:
        return _Careful(data, references, AllowList(source)).load()
    except (OverwireError, MemoryError):
        raise
    except Exception as error:
        # A hostile or broken pickle fails in any way it likes; to the caller
        # that is one thing.
        raise FormatError(f"overwire: unpickle {source}: {type(error).__name__}: {error}", source=source) from error
