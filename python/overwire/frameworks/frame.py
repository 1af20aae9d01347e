"""Defines the interface of a framework.

A frame makes a tensor that owns loaded memory (a DLPack capsule and its address), and describes
the bytes of tensors for saving. torch and numpy are optional, and only imported when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._engine import buffer_of
from .._tables import FLOATS
from ..dtypes import nbytes
from ..errors import NotSupportedError

if TYPE_CHECKING:
    from .views import Bytes, View

#: The kind of a tensor that its frame must describe separately.
ODD = -1


class Columns:
    """Describes many tensors by position, without an object per tensor. This is possible for torch tensors that are
    dense, contiguous and of a dtype that safetensors has. The kind of any other tensor is ODD, and its other columns
    are 0.

    kinds: indices into `types`, or ODD. types: dtype and shape as in `Bytes`, in the order of
    their first use. pointers, sizes: address (0 without bytes) and number of bytes. cuda: 1 + the GPU's number, or 0
    for the host; work queued on the GPU may still be running. The tensors must outlive the use of their addresses.
    """

    __slots__ = ("cuda", "kinds", "pointers", "sizes", "types")

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.pointers: list[int] = []
        self.sizes: list[int] = []
        self.cuda: list[int] = []
        self.types: dict[tuple[str, tuple[int, ...]], int] = {}

    def set(self, at: int, one: Bytes) -> None:
        """Fills in the description of an ODD tensor."""
        self.kinds[at] = self.types.setdefault((one.dtype, one.shape), len(self.types))
        self.pointers[at], self.sizes[at], self.cuda[at] = one.pointer, one.nbytes, one.cuda


class Frame:
    """The interface of a framework. Each framework has a subclass.

    Dtypes are safetensors names, and shapes count elements, as in the file's header. Every
    returned tensor is writable and owns its memory. Only torch tensors can be on a GPU.
    """

    name: str

    #: A function that makes a tensor from a capsule and takes ownership of the capsule, or None if no single C call can
    #: do this. The tensor must have bytes, and a dtype that is exported unchanged.
    make: Callable[[Any], Any] | None = None

    def refuse_mode(self) -> None:
        """Raises NotSupportedError if the framework is in a mode in which tensors have no data."""

    def raw(self, dtypes: Iterable[str]) -> bool:
        """Returns whether the engine must export these dtypes as plain integers. Raises an error for a dtype that the
        framework lacks."""
        return False

    def adopt(self, capsule: Any, pointer: int, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        """Makes the tensor of a request that has landed, and takes ownership of the capsule."""
        raise NotImplementedError

    def of_bytes(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """Makes a tensor over the bytes of a writable buffer, and keeps the buffer alive."""
        address, _, holder = buffer_of(data, True)
        return self.adopt(holder, address, dtype, shape)

    def empty(self, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        """Makes a tensor with undefined contents."""
        raise NotImplementedError

    def empty_on(self, device: str, rows: Sequence[Any]) -> list[Any]:
        """Makes tensors on a GPU for rows of a model's table. If the GPU's memory is full, frees the memory that
        the engine caches there, and tries again."""
        raise NotImplementedError

    def empty_in_batches(self, device: str, rows: Sequence[Any], first: int, most: int) -> Iterator[dict[int, Any]]:
        """Makes tensors like `empty_on`, but yields them by position, in batches: `first` tensors, then twice as many
        each time, up to `most`. There is only one batch if the framework has enough cached memory."""
        raise NotImplementedError

    def dtype(self, wanted: Any) -> Any:
        """Converts a `dtype=` argument to the framework's dtype."""
        raise NotImplementedError

    def name_of(self, wanted: Any) -> str:
        """Returns the safetensors name of one of the framework's dtypes, or "" if there is none."""
        raise NotImplementedError

    def floating(self, wanted: Any) -> bool:
        """Returns whether tensors can be cast to one of the framework's dtypes."""
        return self.name_of(wanted) in FLOATS

    def cast(self, tensor: Any, dtype: str, wanted: Any) -> Any:
        """Casts a tensor to `wanted` if its dtype, `dtype`, is a floating-point type. Returns other tensors
        unchanged."""
        raise NotImplementedError

    def index(self, tensor: Any, index: tuple[Any, ...], dtype: str) -> Any:
        """Returns `tensor[index]`. Steps may be negative. The result's memory contains only the elements of the
        result."""
        raise NotImplementedError

    def describe(self, tensor: Any) -> Bytes:
        """Describes a tensor's logical bytes. Copies tensors that are not dense or not on the host."""
        raise NotImplementedError

    def view(self, tensor: Any) -> View:
        """Describes a tensor's own memory. Copies only tensors without usable memory: lazy conjugates, arrays in a
        foreign byte order, unpacked F4."""
        raise NotImplementedError


def check_empty(dtype: str, shape: tuple[int, ...], name: str | None = None) -> None:
    """Raises NotSupportedError for an empty tensor if the product of its other dimensions overflows.

    safetensors allows such shapes, but torch and numpy count the bytes of strides in 63 bits.
    """
    if nbytes(dtype, tuple(d for d in shape if d)) >= 1 << 63:
        what = "" if name is None else f"tensor {name!r}: "
        why = "the product of its other dimensions overflows; only framework='bytes' supports it"
        raise NotSupportedError(f"overwire: {what}shape {list(shape)} of {dtype}: {why}", tensor=name)


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether elements of a strided tensor may share memory. With irregular strides, the result may be True
    although no elements share memory. Strides count elements."""
    end = 0
    for stride, count in sorted(zip(map(abs, strides), shape, strict=True)):
        if count > 1:
            if stride <= end:
                return True
            end += stride * (count - 1)
    return False
