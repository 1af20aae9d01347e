"""Reads files without the engine: `load_file` and `safe_open`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, CorruptError, FormatError, MissingPackageError, TensorNotFoundError
from . import planes, x16
from .container import Container, Tensor, parse
from .folders import model_of, refuse_mixture, select_names, was_replaced
from .sums import crc32c

Bytes = NDArray[np.uint8]

# About this many bytes of chunks are decoded together, which gives numpy enough lanes, in memory that the allocator
# keeps between calls.
_TOGETHER = 24 << 20

_NUMPY = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_TORCH = {name: np.dtype(kind).name for name, kind in _NUMPY.items()} | _ML_DTYPES


class safe_open:
    """Opens a plain or compressed file to read tensors by name. The object is a context manager.

    framework: "np" for numpy arrays, which need ml_dtypes for bf16 and fp8; "pt" for torch tensors on the CPU;
        "bytes" for memoryviews.

    Raises FormatError, CorruptError and NotSupportedError, before any tensor is read.
    """

    def __init__(self, filename: str | os.PathLike[str], framework: str = "np", device: str = "cpu") -> None:
        if framework not in ("np", "numpy", "pt", "bytes") or str(device) != "cpu":
            why = "expected 'np', 'pt' or 'bytes' on 'cpu', because this machine lacks the engine"
            raise ArgumentError(f"overwire: {framework!r} on {device!r}: {why}")
        self._path = local_path(filename)
        self._framework = framework
        has_bytes = os.path.getsize(self._path) > 0
        self._data: Bytes = np.memmap(self._path, np.uint8, "r") if has_bytes else np.zeros(0, np.uint8)
        self._file: Container = parse(self._data, self._path)

    def keys(self) -> list[str]:
        """Returns the names, in the order of the file."""
        return list(self._file.tensors)

    def metadata(self) -> dict[str, str] | None:
        """Returns the metadata, without overwire's own entries."""
        return self._file.metadata

    def get_tensor(self, name: str) -> Any:
        """Returns a tensor after verifying its checksums. Raises TensorNotFoundError, and CorruptError with tensor,
        chunk and offset."""
        if (tensor := self._file.tensors.get(name)) is None:
            raise TensorNotFoundError(f"overwire: {self._path} has no tensor {name!r}", source=self._path, tensor=name)
        holder = tensor.alias or name
        return self._as_array(tensor, dict(self._read_tensors([holder]))[holder])

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._path

    @property
    def compressed(self) -> bool:
        """Whether the file is an overwire container."""
        return self._file.compressed

    def entries(self) -> dict[str, Tensor]:
        """Returns the file's entry for each tensor."""
        return self._file.tensors

    def holders(self) -> dict[str, list[str]]:
        """Maps each tensor with stored bytes to all names that share these bytes."""
        names: dict[str, list[str]] = {}
        for name, tensor in self._file.tensors.items():
            names.setdefault(tensor.alias or name, []).append(name)
        return names

    def tensors(self, holders: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
        """Yields names and tensors, for all tensors or only for some `holders`. Checks them like `get_tensor`, but
        decodes several together."""
        names = self.holders()
        for holder, data in self._read_tensors(list(names if holders is None else holders)):
            for number, name in enumerate(names[holder]):
                yield name, self._as_array(self._file.tensors[name], data.copy() if number else data)

    def _read_tensors(self, names: list[str]) -> Iterator[tuple[str, Bytes]]:
        # Yields the bytes of tensors that are not aliases, in order.
        waiting: list[tuple[str, list[Bytes]]] = []
        batch: list[tuple[str, int]] = []
        size = 0
        for name in names:
            tensor = self._file.tensors[name]
            if not self._file.compressed or not tensor.nbytes:
                waiting.append((name, [np.array(self._data[tensor.offset : tensor.offset + tensor.nbytes])]))
                continue
            waiting.append((name, []))
            for number, chunk in enumerate(tensor.chunks):
                batch.append((name, number))
                size += chunk.logical
                if size >= _TOGETHER:
                    _append_results(waiting, batch, self._decode_batch(batch))
                    batch, size = [], 0
            if not batch:
                yield from ((name, self._join_parts(name, parts)) for name, parts in waiting)
                waiting = []
        _append_results(waiting, batch, self._decode_batch(batch))
        yield from ((name, self._join_parts(name, parts)) for name, parts in waiting)

    def _join_parts(self, name: str, parts: list[Bytes]) -> Bytes:
        tensor, whole = self._file.tensors[name], parts[0] if len(parts) == 1 else np.concatenate(parts)
        if tensor.parts > 1:
            rows = tensor.shape[0]
            whole = np.ascontiguousarray(whole.reshape(tensor.parts, rows, -1).transpose(1, 0, 2)).reshape(-1)
        return np.require(whole, requirements="W")

    def _decode_batch(self, batch: list[tuple[str, int]]) -> list[Bytes]:
        # Returns the logical bytes of chunks, given by tensor and number.
        chunks = [self._file.tensors[name].chunks[number] for name, number in batch]
        results: dict[int, Bytes] = {}
        positions: list[int] = []
        at = 0
        try:
            for at, chunk in enumerate(chunks):
                content = np.asarray(self._data[chunk.offset : chunk.offset + chunk.stored])
                if crc32c(content) != chunk.sum:
                    raise CorruptError("overwire: corrupt data: checksum mismatch")
                if chunk.codec == 0:
                    results[at] = content.copy()
                elif chunk.codec == 6:
                    results[at] = planes.decode(content, chunk.logical, chunk.transform)
                else:
                    positions.append(at)
            inputs = [
                x16.Chunk(np.asarray(self._data[c.offset : c.offset + c.stored]), c.logical, c.transform, c.tiles)
                for c in (chunks[at] for at in positions)
            ]
            results |= zip(positions, x16.decode(inputs), strict=True)
        except CorruptError as error:
            at = positions[error.chunk] if error.chunk is not None else at
            (name, number), offset = batch[at], chunks[at].offset
            text = f"tensor {name!r} chunk {number} @{offset}: {str(error).removeprefix('overwire: ')}"
            place: dict[str, Any] = {"source": self._path, "tensor": name, "chunk": number, "offset": offset}
            raise CorruptError(f"overwire: {self._path} {text}", **place) from None
        return [results[at] for at in range(len(batch))]

    def _as_array(self, tensor: Tensor, data: Bytes) -> Any:
        if self._framework == "bytes":
            return data.data
        if self._framework == "pt":
            return _as_torch(tensor, data)
        if tensor.dtype in _NUMPY:
            return data.view(_NUMPY[tensor.dtype]).reshape(tensor.shape)
        if tensor.dtype not in _ML_DTYPES:
            raise ArgumentError(f"overwire: numpy lacks {tensor.dtype}: use framework='bytes'")
        try:
            import ml_dtypes
        except ImportError:
            why = "needs the package ml_dtypes: install it, or use framework='bytes'"
            raise MissingPackageError(f"overwire: {tensor.dtype} in numpy {why}") from None
        return data.view(getattr(ml_dtypes, _ML_DTYPES[tensor.dtype])).reshape(tensor.shape)


def load_file(source: str | os.PathLike[str], device: str = "cpu", *, framework: str | None = None) -> dict[str, Any]:
    """Loads all tensors of a file, or of the model in a folder.

    source: a file, an index.json, or a folder. The model in a folder is chosen by the engine's rules: an index.json
        lists the files, and shards without an index.json must be complete.
    framework: as for `safe_open`. By default "pt" if torch is imported, otherwise "np".

    Raises the errors of `safe_open`. For a folder, raises NotFoundError without a model, FormatError for an incomplete
    model, and ArgumentError for several models. Raises CorruptError if the model is replaced while it is read.
    """
    framework = framework or ("pt" if "torch" in sys.modules else "np")
    result: dict[str, Any] = {}
    for file, names in open_model(source, framework, device):
        own = set(names)
        holders = [holder for holder, aliases in file.holders().items() if not own.isdisjoint(aliases)]
        tensors = {name: tensor for name, tensor in file.tensors(holders) if name in own}
        for name in names:
            if name in result:
                text = f"{file.path}: another file in the folder also has a tensor {name!r}: open only one of the files"
                raise ArgumentError(f"overwire: {text}", source=file.path, tensor=name)
            result[name] = tensors[name]
    return result


def open_model(
    source: str | os.PathLike[str], framework: str, device: str = "cpu"
) -> list[tuple[safe_open, list[str]]]:
    """Opens the files of a model, each with the names of its tensors that belong to the model. If a saver replaces the
    model at the same time, tries again, and raises CorruptError if this also fails."""
    place = local_path(source)
    for is_last in (False, True):
        model = model_of(place)
        try:
            files = [safe_open(path, framework, device) for path in model.files]
            parts = [(file, select_names(model, file.path, file.keys())) for file in files]
            refuse_mixture((file.path, file.metadata()) for file in files)
        except CorruptError:
            if is_last:
                raise
            continue
        except (FormatError, FileNotFoundError):
            if is_last or not was_replaced(model):
                raise
            continue
        if not was_replaced(model):
            return parts
    raise CorruptError(f"overwire: {place}: the model was replaced while it was read", source=place)


def local_path(place: str | os.PathLike[str]) -> str:
    path = os.fspath(place)
    uri = urlsplit(path)
    if uri.scheme == "file" and uri.netloc in ("", "localhost") and not uri.query and not uri.fragment:
        local = unquote(uri.path)
        return local[1:] if os.name == "nt" and local[2:3] == ":" else local  # /C:/model
    if "://" in path:
        raise ArgumentError(f"overwire: {path}: stores need the engine, which this machine lacks: download the file")
    return path


def _as_torch(tensor: Tensor, data: Bytes) -> Any:
    try:
        import torch
    except ImportError:
        raise MissingPackageError("overwire: framework='pt' needs the package torch: pip install torch") from None
    kind = getattr(torch, _TORCH.get(tensor.dtype, ""), None)
    if kind is None:
        raise ArgumentError(f"overwire: torch lacks {tensor.dtype}: use framework='bytes'")
    if not tensor.nbytes:  # torch cannot view an empty numpy array, which has strides of 0
        return torch.empty(tensor.shape, dtype=kind)
    return torch.from_numpy(data).view(kind).reshape(tensor.shape)


def _append_results(waiting: list[tuple[str, list[Bytes]]], batch: list[tuple[str, int]], results: list[Bytes]) -> None:
    # Appends the decoded chunks of `batch` to the parts of their tensors in `waiting`.
    parts = dict(waiting)
    for (name, _), result in zip(batch, results, strict=True):
        parts[name].append(result)
