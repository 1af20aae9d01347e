"""Implements tensorizer.torch_compat: torch.save and torch.load with the tensors in another file.

Inside `tensorizer_saving`, torch.save writes each storage once to a .tensors file next to the .pt file, however many
tensors share it. Inside `tensorizer_loading`, torch.load reads the storages from that file. A context applies only to
the thread or task that entered it. Other threads and tasks use torch's own functions.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pickle
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import IO, Any

from ._reader import TensorDeserializer
from ._swap import Swap
from ._writer import TensorSerializer

__all__ = ["tensorizer_loading", "tensorizer_saving"]

logger = logging.getLogger(__name__)

_MARK = "TensorizerPickler"

#: The types of files that torch.save and torch.load accept.
_FileLike = str | os.PathLike[str] | IO[bytes]


class _Scope:
    """The arguments of one context: the file for the tensors, the function that saves or loads them, and its
    arguments."""

    def __init__(self, file_obj: Any, function: Any, kwargs: dict[str, Any], suppress: bool = False) -> None:
        self.file_obj, self.function, self.kwargs, self.suppress = file_obj, function, kwargs, suppress

    def place(self, f: Any) -> Any:
        """Returns the file for a .pt file's tensors, or None if they are in the .pt file itself."""
        if self.file_obj is not None:
            return self.file_obj(f) if callable(self.file_obj) else self.file_obj
        if isinstance(f, io.BytesIO):
            logger.warning(
                "Cannot infer .tensors location from io.BytesIO; not using tensorizer backend"
                " (set the file_obj parameter to choose a location instead)"
            )
            return None
        try:
            return os.fsdecode(f) + ".tensors"
        except TypeError:
            return os.fsdecode(f.name) + ".tensors"


_saving: ContextVar[_Scope | None] = ContextVar("overwire_tensorizer_saving", default=None)
_loading: ContextVar[_Scope | None] = ContextVar("overwire_tensorizer_loading", default=None)

# The file for the tensors of the running call.
_save_place: ContextVar[Any] = ContextVar("overwire_tensorizer_save_place", default=None)
_load_place: ContextVar[Any] = ContextVar("overwire_tensorizer_load_place", default=None)


class _TensorizerPickler(pickle.Pickler):
    """The base of a class that torch makes. That class's persistent_id is called after the one here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tensors: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        overridden = cls.__dict__.get("persistent_id")
        if overridden is not None:

            def persistent_id(self: _TensorizerPickler, obj: Any) -> Any:
                storage_id = self._storage_id(obj)
                return storage_id if storage_id is not None else overridden(self, obj)

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    def _storage_id(self, obj: Any) -> Any:
        import torch

        if _save_place.get() is None or not torch.is_storage(obj):
            return None
        storage = getattr(obj, "_untyped_storage", obj)
        if storage.device.type == "meta" or storage.data_ptr() == 0:
            return None
        key = (storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(torch.empty((0,), dtype=torch.uint8, device=storage.device).set_(storage))
        return _MARK, 0, "storage", self._numbers[key], getattr(obj, "dtype", None)

    def persistent_id(self, obj: Any) -> Any:
        """Returns the id of a saved storage, or None for other objects. pickle calls this."""
        return self._storage_id(obj)

    def dump(self, obj: Any) -> None:
        """Pickles the object, then writes the tensors."""
        super().dump(obj)
        scope, place, tensors = _saving.get(), _save_place.get(), self._tensors
        if scope is None or place is None or not tensors:
            return
        self._tensors, self._numbers = [], {}
        if scope.function is not None:
            scope.function(place, tensors, scope.kwargs)
            return
        serializer = TensorSerializer(place, **scope.kwargs)
        serializer.write_state_dict(tensors)
        serializer.close()


class _TensorizerUnpickler(pickle.Unpickler):
    """The base of a class that torch makes. The persistent_load that torch sets is called for ids that were not made
    here."""

    _tensors: Any = None

    def __setattr__(self, key: str, value: Any) -> None:
        if key == "persistent_load":
            value = functools.partial(self._storage, value)
        super().__setattr__(key, value)

    def _storage(self, theirs: Callable[[Any], Any], pid: Any) -> Any:
        import torch

        place, scope = _load_place.get(), _loading.get()
        if place is None or scope is None or not (isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == _MARK):
            return theirs(pid)
        if pid[1] > 0:
            raise pickle.UnpicklingError(f"Unsupported TensorizerPickler data version ({pid[1]:d})")
        if pid[2] != "storage":
            raise pickle.UnpicklingError(f"Unsupported TensorizerPickler object type ({pid[2]})")
        if self._tensors is None:  # reads the .tensors file only when it is needed
            if scope.function is not None:
                self._tensors = list(scope.function(place, scope.kwargs))
            else:
                with TensorDeserializer(place, **scope.kwargs) as deserializer:
                    self._tensors = deserializer.tree()
        tensor, dtype = self._tensors[pid[3]], pid[4]
        return torch.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=tensor.untyped_storage(), dtype=torch.uint8 if dtype is None else dtype, _internal=True
        )

    def load(self) -> Any:
        """Unpickles, then releases tensors that are not used."""
        try:
            return super().load()
        finally:
            self._tensors = None


_pickle_module: Any = types.ModuleType("tensorizer_pickle")
_pickle_module.__getattr__ = lambda name: getattr(pickle, name)
_pickle_module.Pickler = _TensorizerPickler
_pickle_module.Unpickler = _TensorizerUnpickler

_LOAD_WRAPPER_DEFAULT_MODULE: Any = None


def _refuse(pickle_module: Any) -> None:
    if pickle_module is not None and pickle_module is not pickle:
        text = "Tensorizer-based torch serialization is incompatible with using a pickle_module other than the default"
        raise ValueError(text)


def _wrapped_save(original: Any) -> Any:
    @functools.wraps(original)
    def save(obj: object, f: Any, pickle_module: Any = pickle, *args: Any, **kwargs: Any) -> Any:
        scope = _saving.get()
        if scope is None:
            return original(obj, f, pickle_module, *args, **kwargs)
        _refuse(pickle_module)
        token = _save_place.set(scope.place(f))
        try:
            return original(obj, f, _pickle_module, *args, **kwargs)
        finally:
            _save_place.reset(token)

    return save


def _wrapped_load(original: Any) -> Any:
    @functools.wraps(original)
    def load(
        f: Any,
        map_location: Any = None,
        pickle_module: Any = _LOAD_WRAPPER_DEFAULT_MODULE,
        *,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        scope = _loading.get()
        if scope is None:
            return original(f, map_location, pickle_module, weights_only=weights_only, **kwargs)
        _refuse(pickle_module)
        token = _load_place.set(scope.place(f))
        try:
            return original(
                f, map_location, _pickle_module, weights_only=False if scope.suppress else weights_only, **kwargs
            )
        finally:
            _load_place.reset(token)

    return load


def _swapped(name: str, wrap: Callable[[Any], Any]) -> Swap:
    def stand_ins() -> list[tuple[Any, str, Any]]:
        import torch

        return [(torch, name, wrap(getattr(torch, name)))]

    return Swap(stand_ins)


_save, _load = _swapped("save", _wrapped_save), _swapped("load", _wrapped_load)


def tensorizer_saving(
    file_obj: Any = None, *, save_func: Any = None, **kwargs: Any
) -> contextlib.AbstractContextManager[None]:
    """A context in which torch.save(obj, f) writes storages to f + ".tensors".

    file_obj: the file to use instead: any file that a TensorSerializer accepts, or a function that takes f and returns
        such a file, or None for a plain save.
    save_func: a function that is called with (file, tensors, kwargs) instead of a serializer.
    kwargs: arguments for the TensorSerializer.

    If f is an io.BytesIO, which has no name, torch.save writes the tensors to it as usual, and a warning is logged.
    torch.save raises ValueError for any pickle_module other than the default.
    """
    return _save.on(_saving, _Scope(file_obj, save_func, kwargs))


def tensorizer_loading(
    file_obj: Any = None, *, load_func: Any = None, suppress_weights_only: bool = False, **kwargs: Any
) -> contextlib.AbstractContextManager[None]:
    """A context in which torch.load(f) reads storages from f + ".tensors" if f was saved that way. Other files load as
    usual.

    file_obj, kwargs: as for `tensorizer_saving`, for a TensorDeserializer.
    load_func: a function that is called with (file, kwargs) instead of a deserializer, and returns the tensors.
    suppress_weights_only: whether to replace weights_only=True, which torch refuses here, with False.
    """
    return _load.on(_loading, _Scope(file_obj, load_func, kwargs, suppress_weights_only))
