"""Defines values that saves accept besides tensors: TensorSpec (bytes by address or in a buffer) and JoinedTensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from .._engine import buffer_of
from .._tables import BITS
from ..dtypes import CALLED, nbytes
from ..errors import ArgumentError, NotSupportedError
from .choose import frame_of
from .views import Bytes

_NAMES = {called: name for name, called in CALLED.items()}


class TensorSpec:
    """A dense tensor in host memory. `save_file` accepts it in place of a tensor.

    dtype: a safetensors name ("BF16"), or a name in torch and numpy ("bfloat16", "float4_e2m1fn_x2").
    shape: counts elements. For "float4_e2m1fn_x2", which has two elements per byte, the last dimension counts bytes, as
        in torch. The property `shape` then doubles it.
    data_ptr: address of the first byte. data_len: the tensor's exact number of bytes.

    The caller owns the memory. It must stay valid and unchanged until the call that receives the spec has returned.

    Raises NotSupportedError for a dtype that safetensors lacks, and OverflowError for a negative number. The save
    checks whether length and shape agree.
    """

    __module__ = "overwire"

    __slots__ = ("_data_len", "_data_ptr", "_dtype", "_holder", "_shape")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        name = _NAMES.get(dtype, dtype)
        if name not in BITS:
            raise NotSupportedError(f'Unknown dtype "{dtype}". Supported dtypes: {", ".join(_NAMES)}')
        dims = [_check_unsigned(d) for d in shape]
        if dtype == "float4_e2m1fn_x2" and dims:
            dims[-1] *= 2
        self._dtype, self._shape = name, dims
        self._data_ptr, self._data_len = _check_unsigned(data_ptr), _check_unsigned(data_len)
        self._holder: Any = None

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int], data: Any) -> TensorSpec:
        """Makes a spec for the bytes of an object with a C-contiguous buffer: bytes, a bytearray,
        memoryview, array or mmap. The spec keeps the object alive.

        Raises TypeError for an object without a buffer, BufferError if the buffer is not contiguous, and the errors of
        the constructor.
        """
        address, size, holder = buffer_of(data)
        spec = cls(dtype=dtype, shape=shape, data_ptr=address, data_len=size)
        spec._holder = holder
        return spec

    @property
    def dtype(self) -> str:
        """The name in the file: "F32", "BF16" ..."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape in elements, as in the file's header."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """The address of the first byte."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """The length in bytes."""
        return self._data_len

    def __repr__(self) -> str:
        memory = f"data_ptr={self._data_ptr}, data_len={self._data_len}"
        return f"TensorSpec(dtype={self._dtype!r}, shape={self._shape}, {memory})"

    def describe(self) -> Bytes:
        """Returns the bytes to be saved. Raises ArgumentError if length and shape disagree."""
        shape = tuple(self._shape)
        size = nbytes(self._dtype, shape)
        if self._data_len != size:
            text = f"got {self._data_len} bytes for shape {self._shape} of {self._dtype}, expected {size}"
            raise ArgumentError(f"overwire: {text}")
        if size and not self._data_ptr:
            raise ArgumentError(f"overwire: {size} bytes of {self._dtype} at address 0: pass the address of the data")
        return Bytes(self._dtype, shape, self._data_ptr if size else 0, size, self)


def _check_unsigned(value: int) -> int:
    number = operator.index(value)
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= 1 << 63:
        raise OverflowError("int too big to convert")
    return number


class JoinedTensor:
    """Host tensors to be saved as one tensor, joined along the first dimension.

    The parts have the same dtype, and the same shape except for the first dimension. Their memory must not
    change until the save has ended."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def describe(self) -> Bytes:
        """Returns the bytes to be saved. Raises NotSupportedError for a dtype that safetensors lacks, and ArgumentError
        if the parts do not fit together."""
        all = [frame_of(part).describe(part) for part in self.parts]
        if not all or any(not one.shape for one in all) or len({(one.dtype, one.shape[1:]) for one in all}) > 1:
            parts = ", ".join(f"{one.dtype} {list(one.shape)}" for one in all[:9]) or "none"
            raise ArgumentError(f"overwire: save: the parts of a joined tensor need equal dtypes and rows, got {parts}")
        rows = sum(one.shape[0] for one in all)
        size = sum(one.nbytes for one in all)
        pieces = tuple(number for one in all if one.nbytes for number in (one.pointer, one.nbytes))
        return Bytes(all[0].dtype, (rows, *all[0].shape[1:]), 0, size, all, 0, pieces)
