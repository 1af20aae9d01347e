"""Implements TensorSpec, serialize, serialize_file and deserialize. None of them needs a framework."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import overwire

from ._errors import SafetensorError, check, reading, writing


class TensorSpec(overwire.TensorSpec):
    """A dense tensor in host memory, given by its address; see `overwire.TensorSpec`.

    The caller owns the memory and must keep it valid until the call that receives the spec has
    returned. Raises SafetensorError for an unknown dtype.
    """

    __slots__ = ()

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        try:
            super().__init__(dtype=dtype, shape=shape, data_ptr=data_ptr, data_len=data_len)
        except overwire.NotSupportedError as error:
            raise SafetensorError(str(error)) from error


def _check(tensor_dict: Any, metadata: Any) -> None:
    check("tensor_dict", tensor_dict, dict)
    for name, spec in tensor_dict.items():
        check("tensor_dict", name, str)
        check("tensor_dict", spec, overwire.TensorSpec)
    if metadata is not None:
        check("metadata", metadata, dict)
        for text in (*metadata, *metadata.values()):
            check("metadata", text, str)


def serialize_file(tensor_dict: dict[str, TensorSpec], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes a plain safetensors file atomically.

    Raises SafetensorError, even for errors of the operating system.
    """
    write(tensor_dict, filename, metadata, compress=False)


def write(tensor_dict: dict[str, Any], filename: Any, metadata: dict[str, str] | None, *, compress: bool) -> None:
    """Writes a safetensors file from overwire's specs, like `serialize_file`."""
    from overwire._compat_api import save_bytes  # import it here, because reading does not need it

    _check(tensor_dict, metadata)
    path = os.fspath(filename)
    with writing():
        descriptions = [(name, spec.describe()) for name, spec in tensor_dict.items()]
        # `beside` allows an older index.json of the same name. transformers replaces it after writing the shards.
        save_bytes(descriptions, path, metadata, compress=compress, beside=True)


def serialize(tensor_dict: dict[str, TensorSpec], metadata: dict[str, str] | None = None) -> bytes:
    """Returns a plain safetensors file as bytes. Raises SafetensorError."""
    from overwire._compat_api import bytes_of_plain

    _check(tensor_dict, metadata)
    with writing():
        return bytes_of_plain([(name, spec.describe()) for name, spec in tensor_dict.items()], metadata)


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Returns the tensors in a file's bytes, plain or compressed, in file order, as (name, {"dtype", "shape", "data"}).
    data is a bytearray.

    Raises SafetensorError.
    """
    source = bytes_file(bytes)
    with reading("<bytes>", "Error while deserializing"), overwire.safe_open(source, "bytes") as file:
        entries = []
        for name, data in file.get_tensors().items():
            about = file.get_slice(name)
            entries.append((name, {"dtype": about.get_dtype(), "shape": about.get_shape(), "data": bytearray(data)}))
        return entries


class BytesFile:
    """A file over bytes, which can be read once. It returns views, whereas `io.BytesIO` would copy."""

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    def read(self, size: int = -1, /) -> Any:
        """Returns a view of the next bytes."""
        end = size if size >= 0 else len(self._rest)
        block, self._rest = self._rest[:end], self._rest[end:]
        return block


def bytes_file(data: Any) -> BytesFile:
    """Wraps bytes as a file. Raises TypeError for an object without the buffer protocol."""
    try:
        return BytesFile(memoryview(data).cast("B"))
    except TypeError:
        raise TypeError(f"argument 'bytes': {type(data).__name__!r} object is not an instance of 'bytes'") from None
