"""Converts objects to a small pickle and a list of blobs.

Tensors are pickled as torch pickles them, except that their storages become blobs. torch itself thus restores
ties, views of one storage, strides, parameters, requires_grad, subclasses, quantised and sparse tensors.
The memory of numpy arrays also becomes blobs.

Files contain these persistent ids, so they must not change:

    ("storage", blob, torch dtype or "", bytes)     "" is an untyped storage
    ("array", blob, spec, shape, strides, offset, writable, array number, bytes)

Blob -1 has no bytes. Two arrays with the same number are one object.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import rebuild
from .._imports import imported
from ..dtypes import nbytes
from ..errors import ArgumentError, NotSupportedError
from ..frameworks.choose import frame_for
from ..frameworks.views import Bytes


class Blob(NamedTuple):
    """The bytes of a torch storage or of the base of numpy arrays, with the dtype and shape to store them under."""

    name: str
    data: Any
    dtype: str
    shape: tuple[int, ...]


# The most frequent types without tensors.
_PLAIN = frozenset({str, int, float, bool, bytes, complex, type(None), dict, list, tuple, set, type})


# Names that a tensor in a container cannot have, and characters that such a name cannot contain. Line breaks would also
# break the list of blobs, which has one name per line.
_RESERVED = ("overwire.index", "__metadata__")
_UNFIT = re.compile("[\n\0\ud800-\udfff]")


class TensorPickler(pickle.Pickler):
    """Pickles with protocol 5, without the tensors' bytes.

    `blobs` contains these bytes in the order in which they were found. The memory belongs to the caller. It is kept
    alive and not changed.
    """

    def __init__(self, file: Any, names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self.blobs: list[Blob] = []
        self._torch = imported("torch")
        self._numpy = imported("numpy")
        self._names = names  # the name for a tensor's blob, by the tensor's id
        self._taken: set[str] = set()
        self._storages: dict[int, int] = {}
        self._hints: dict[int, tuple[Any, str, str, tuple[int, ...]]] = {}
        self._bases: dict[int, int] = {}
        self._arrays: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN:
            return None
        torch, numpy = self._torch, self._numpy
        if torch is not None:
            if isinstance(obj, torch.Tensor):
                self._hint_at(obj)
                return None
            if isinstance(obj, torch.storage.TypedStorage):
                dtype = str(obj.dtype).removeprefix("torch.")
                return self._save_storage(obj._untyped_storage, dtype)
            if isinstance(obj, torch.UntypedStorage):
                return self._save_storage(obj, "")
        if numpy is not None and kind is numpy.ndarray:
            return self._save_array(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        numpy = self._numpy
        if numpy is None:
            return NotImplemented
        if isinstance(obj, numpy.dtype):
            spec = rebuild.spec_of(obj)
            return NotImplemented if spec is None else (rebuild.dtype, (spec,))
        if isinstance(obj, numpy.generic):
            spec = rebuild.spec_of(obj.dtype)
            return NotImplemented if spec is None or obj.dtype.hasobject else (rebuild.scalar, (spec, obj.tobytes()))
        if type(obj) is numpy.ndarray and obj.dtype.hasobject and (spec := rebuild.spec_of(obj.dtype)) is not None:
            fortran = bool(obj.flags.f_contiguous and not obj.flags.c_contiguous)
            return rebuild.array, (spec, obj.shape, fortran, list(obj.reshape(-1)))
        return NotImplemented

    # -- blobs

    def _free_name(self, wanted: str) -> str:
        name = wanted if wanted and wanted not in _RESERVED and not _UNFIT.search(wanted) else f"blob.{len(self.blobs)}"
        while name in self._taken:
            name = f"{name}.{len(self.blobs)}"
        self._taken.add(name)
        return name

    def _hint_at(self, tensor: Any) -> None:
        # Notes the dtype and shape for a tensor's storage. The shape is used only if the tensor is dense and covers the
        # whole storage. A reference to the storage keeps its id unique.
        from ..frameworks.memory import fits_storage

        torch: Any = self._torch
        if tensor.layout is torch._mkldnn:
            raise NotSupportedError(
                "overwire: compress: the bytes of a torch._mkldnn tensor cannot be accessed: save its to_dense()"
            )
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized or tensor.is_nested:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError, ValueError):
            return  # the tensor has no storage: a wrapper subclass, or a parameter of a lazy module
        if not fits_storage(tensor):
            why = "its memory was freed, because it sleeps or its storage was resized to 0"
            if storage.nbytes():
                why = f"its storage was resized to {storage.nbytes()} bytes, fewer than it needs"
            text = f"overwire: compress: a tensor of shape {list(tensor.shape)}: {why}"
            raise ArgumentError(text, tensor=self._names.get(id(tensor), ""))
        number = storage._cdata
        if number in self._hints or number in self._storages:
            return
        dtype_name = frame_for("torch").name_of(tensor.dtype)
        shape = tuple(tensor.shape)
        size = tensor.numel() * tensor.element_size()
        if size != storage.nbytes() or not tensor.is_contiguous():
            shape = (storage.nbytes() // tensor.element_size(),)
        self._hints[number] = (storage, self._names.get(id(tensor), ""), dtype_name, shape)

    def _save_storage(self, storage: Any, dtype: str) -> Any:
        if storage.device.type == "meta":
            raise NotSupportedError("overwire: compress: a storage on the meta device has no bytes")
        size = storage.nbytes()
        if size == 0:
            return ("storage", -1, dtype, 0)
        number = storage._cdata
        blob = self._storages.get(number)
        if blob is None:
            _, name, dtype_name, shape = self._hints.get(number, (None, "", "", ()))
            if not dtype_name and dtype:
                torch: Any = self._torch
                dtype_name = frame_for("torch").name_of(getattr(torch, dtype))
                shape = (size // getattr(torch, dtype).itemsize,)
            dtype_name, shape = _fitting_layout(dtype_name, shape, size)
            blob = self._storages[number] = len(self.blobs)
            self.blobs.append(Blob(self._free_name(name), storage, dtype_name, shape))
        return ("storage", blob, dtype, size)

    def _save_array(self, array: Any) -> Any:
        if array.dtype.hasobject or (spec := rebuild.spec_of(array.dtype)) is None:
            return None
        number = self._arrays.get(id(array))
        if number is None:
            number = self._arrays[id(array)] = (len(self._arrays), array)
        blob, offset, size = -1, 0, 0
        strides = array.strides
        if array.nbytes:
            base = _base(array)
            blob, offset, size = self._base(base, array)
            if offset < 0:
                base = array.copy(order="C")
                blob, offset, size = self._base(base, base)
                strides = base.strides
        writable = bool(array.flags.writeable)
        return ("array", blob, spec, array.shape, strides, offset, writable, number[0], size)

    def _base(self, base: Any, array: Any) -> tuple[int, int, int]:
        start, end = _bounds_of(base)
        size = end - start
        lo, hi = _bounds_of(array)
        if base.nbytes != size or lo < start or hi > end:
            return -1, -1, 0  # the base has gaps, so its bytes are not contiguous
        first = array.__array_interface__["data"][0]
        blob = self._bases.get(start)
        if blob is None or self.blobs[blob].data.nbytes != size:
            blob = self._bases[start] = len(self.blobs)
            dtype_name = frame_for("np").name_of(base.dtype)
            if dtype_name == "F4":
                dtype_name = ""  # numpy uses one byte per element, so the container stores U8
            shape = base.shape if base.flags.c_contiguous else (base.size,)
            dtype_name, shape = _fitting_layout(dtype_name, shape, size)
            name = self._names.get(id(base)) or self._names.get(id(array)) or ""
            self.blobs.append(Blob(self._free_name(name), base, dtype_name, shape))
        return blob, first - start, size


def _bounds_of(array: Any) -> tuple[int, int]:
    """Returns the first address of a non-empty array, and the address after its end."""
    lo = hi = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        lo += min(0, (size - 1) * stride)
        hi += max(0, (size - 1) * stride)
    return lo, hi + array.itemsize


def _base(array: Any) -> Any:
    """Returns the array that owns the bytes of a view, if it is a plain array. A memory map is not used as a base,
    because its file may be much larger than its views."""
    base = array
    while type(base.base) is type(base) and not base.base.dtype.hasobject:
        base = base.base
    return base


def _fitting_layout(saved: str, shape: tuple[int, ...], size: int) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape under which to store bytes: `saved` and `shape` if they match the size exactly,
    otherwise U8 and one dimension."""
    if saved == "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    if saved and nbytes(saved, shape) == size:
        return saved, shape
    return "U8", (size,)


def dump(obj: Any, names: Mapping[int, str]) -> tuple[bytes, list[Blob]]:
    """Returns the pickle of an object and its blobs."""
    out = io.BytesIO()
    pickler = TensorPickler(out, names)
    pickler.dump(obj)
    return out.getvalue(), pickler.blobs


def described(blob: Blob) -> Bytes:
    """Returns a blob's bytes. They are copied to the host unless they are on the host or on a GPU."""
    data = blob.data
    if hasattr(data, "untyped"):  # a torch storage
        from ..frameworks.torch import await_writes, on_gpu

        if data.device.type != "cpu" and not on_gpu(data):
            data = data.cpu()
        return Bytes(blob.dtype, blob.shape, data.data_ptr(), data.nbytes(), data, await_writes(data))
    start, _ = _bounds_of(data)
    return Bytes(blob.dtype, blob.shape, start, data.nbytes, data)
