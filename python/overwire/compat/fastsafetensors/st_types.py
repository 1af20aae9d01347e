"""Defines devices, dtypes, and tensor positions in a file, with fastsafetensors' names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class DeviceType(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"  # paddle's word for CUDA


@dataclass
class Device:
    """A device, with its type and number. The number None means the current device."""

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self) -> str:
        """Returns "cpu" or, for instance, "cuda:1"."""
        return self.type.value if self.index is None else f"{self.type.value}:{self.index}"

    @classmethod
    def from_str(cls, s: str) -> Device:
        """Parses "cpu", "cuda", "cuda:1" or "gpu:0". Raises ValueError for any other string."""
        kind, colon, number = s.partition(":")
        try:
            kind_of_device = DeviceType(kind.lower())
        except ValueError:
            raise ValueError(f"Unknown device type: {kind}") from None
        if colon and not number.isdecimal():
            raise ValueError(f"Invalid index: {number}")
        return cls(kind_of_device, int(number) if colon else None)

    @classmethod
    def of(cls, device: Any) -> Device:
        """Returns a Device unchanged. Converts any other object, such as a torch.device, if `from_str` can
        parse its `str`."""
        return device if isinstance(device, Device) else cls.from_str(str(device))


class DType(Enum):
    """The dtypes of safetensors. AUTO means the dtype in the file."""

    BOOL = "BOOL"
    I8 = "I8"
    I16 = "I16"
    I32 = "I32"
    I64 = "I64"
    U8 = "U8"
    U16 = "U16"
    U32 = "U32"
    U64 = "U64"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    BF16 = "BF16"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F4 = "F4"
    # The original lacks these dtypes, and refuses files with them.
    C64 = "C64"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    AUTO = "AUTO"

    #: Bits of one element; 0 for AUTO.
    bits: int

    def __init__(self, name: str) -> None:
        digits = name.lstrip("BFIUC").partition("_")[0]
        self.bits = 8 if name == "BOOL" else int(digits) if digits.isdecimal() else 0


#: Bytes of one element; F4 has half a byte.
DTYPE_SIZES = {
    dtype: dtype.bits // 8 if dtype.bits % 8 == 0 else dtype.bits / 8 for dtype in DType if dtype is not DType.AUTO
}


def stand_in(dtype: DType) -> DType:
    """Returns the integer dtype that replaces a dtype which older DLPack versions lack. Returns other dtypes
    unchanged."""
    if dtype in (DType.F8_E5M2, DType.F8_E4M3):
        return DType.I8
    return DType.U8 if dtype.bits <= 8 and dtype.value.startswith("F") else dtype


def converts(own: DType, wanted: DType) -> bool:
    """Returns whether dtype= converts a tensor of dtype `own`. It does not convert packed dtypes or bare exponents,
    which are part of a quantisation scheme. It does not convert complex numbers either, because they would lose their
    imaginary part."""
    if wanted is DType.AUTO or wanted is own:
        return False
    return own.bits >= 8 and own not in (DType.F8_E8M0, DType.C64)


def dense_strides(shape: list[int]) -> list[int]:
    """Returns the strides of a tensor in C order, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


@dataclass
class TensorFrame:
    """The position of a tensor, or of a slice of a tensor, in a file.

    shape, strides and offsets count elements, and have one entry per dimension. data_offsets: the range [begin, end) of
    the whole tensor in the file's data.
    """

    dtype: DType
    shape: list[int]
    data_offsets: list[int]
    strides: list[int]
    offsets: list[int]
    sliced: bool

    @classmethod
    def from_buffer(cls, entry: Any) -> TensorFrame:
        """Makes a frame from a tensor's entry in a header."""
        shape = [int(size) for size in entry["shape"]]
        return cls(
            DType(entry["dtype"]), shape, list(entry["data_offsets"]), dense_strides(shape), [0] * len(shape), False
        )

    def __getitem__(self, index: Any) -> TensorFrame:
        """Returns the frame of a slice. An int keeps its dimension with size 1, and an empty slice has
        shape []. Raises IndexError for an index out of range, and ValueError for other types of index."""
        entries = index if isinstance(index, tuple) else (index,)
        if not entries:
            return self
        if len(entries) > len(self.shape):
            raise ValueError(f"[BUG] tried to get too large slice {entries} from {self.shape}")
        shape, strides, offsets = list(self.shape), list(self.strides), list(self.offsets)
        for dim, entry in enumerate(entries):
            size = self.shape[dim]
            if isinstance(entry, slice):
                steps = range(size)[entry]
            elif isinstance(entry, int) and not isinstance(entry, bool):
                if not -size <= entry < size:
                    raise IndexError(f"[BUG] tried to access index {entry} at dim={dim} for shape={self.shape}")
                steps = range(entry % size, entry % size + 1)
            else:
                raise ValueError(f"[BUG] Unsupported index type for DiskTensor: {entry}")
            if len(steps) == 0:
                return TensorFrame(self.dtype, [], list(self.data_offsets), [], [], False)
            shape[dim] = len(steps)
            strides[dim] = self.strides[dim] * steps.step
            offsets[dim] = self.offsets[dim] + steps.start
        return TensorFrame(self.dtype, shape, list(self.data_offsets), strides, offsets, True)
