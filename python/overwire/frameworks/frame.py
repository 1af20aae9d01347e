"""What the package needs of a framework: tensors made of landed memory, and described.

A frame turns what the engine landed (a DLPack capsule and its address) into a
tensor that owns the memory, and describes a tensor's bytes for saving. torch
and numpy are both optional; neither is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._engine import buffer_of
from .._tables import FLOATS
from ..dtypes import nbytes
from ..errors import NotSupportedError


class Bytes(NamedTuple):
    """A tensor's bytes as they are saved: contiguous, on the host, or on the
    CUDA device `cuda` - 1, where all work on them has ended.

    `keep` holds the memory at `pointer` and must outlive its use. `pieces`: address and
    bytes of each place, one after the other, if they lie in several of the host.
    """

    dtype: str
    shape: tuple[int, ...]
    pointer: int
    nbytes: int
    keep: Any
    cuda: int = 0
    pieces: tuple[int, ...] = ()


class View(NamedTuple):
    """A tensor's bytes where they lie, strided or not: on the host, or on the CUDA
    device `cuda` - 1.

    dtype, shape: as in `Bytes`; "" for a dtype that safetensors lacks.
    item, dims, strides: bytes of an element, the dimensions in elements, and the bytes
    from one to the next; a contiguous tensor may be a row of bytes. `keep` holds the
    memory and must outlive its use.
    """

    dtype: str
    shape: tuple[int, ...]
    pointer: int
    item: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    keep: Any
    cuda: int = 0


#: The kind of a tensor that has to be looked at by itself, with its frame.
ODD = -1


class Columns:
    """Tensors by position, described at once, without an object for each. Those of torch
    that are dense, contiguous and of a dtype that files have are described; the others are
    ODD, and have zeros.

    kinds: values of `types`; ODD. types: dtype and shape as `Bytes` has them, by the
    order in which they came. pointers, sizes: address (0 without bytes) and bytes. cuda:
    1 + the GPU, 0 for the host; what is queued there has not been waited for. The tensors
    must outlive the use of their addresses.
    """

    __slots__ = ("cuda", "kinds", "pointers", "sizes", "types")

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.pointers: list[int] = []
        self.sizes: list[int] = []
        self.cuda: list[int] = []
        self.types: dict[tuple[str, tuple[int, ...]], int] = {}

    def set(self, at: int, one: Bytes) -> None:
        """Describes an odd tensor."""
        self.kinds[at] = self.types.setdefault((one.dtype, one.shape), len(self.types))
        self.pointers[at], self.sizes[at], self.cuda[at] = one.pointer, one.nbytes, one.cuda


class Frame:
    """What the rest of this package needs of a framework: one subclass for each.

    Dtypes are safetensors' names, shapes count elements as the file's header
    does. Every returned tensor is writable and owns its memory. Only torch's
    tensors are made on a GPU.
    """

    name: str

    #: Makes a tensor of a capsule, taken over, that is exported as it is and has
    #: bytes, where one C call does.
    make: Callable[[Any], Any] | None = None

    def refuse_mode(self) -> None:
        """Raises NotSupportedError where the framework is in a mode in which no bytes move."""

    def raw(self, dtypes: Iterable[str]) -> bool:
        """Whether the engine must export these dtypes as plain integers. Raises for a dtype
        that the framework lacks."""
        return False

    def adopt(self, capsule: Any, pointer: int, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        """The tensor of one landed request. Takes over the capsule."""
        raise NotImplementedError

    def of_bytes(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """The tensor whose bytes a writable buffer has, which it keeps alive."""
        address, _, holder = buffer_of(data, True)
        return self.adopt(holder, address, dtype, shape)

    def empty(self, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        """A new tensor with undefined contents."""
        raise NotImplementedError

    def empty_on(self, device: str, rows: Sequence[Any]) -> list[Any]:
        """New tensors for rows of the table, on a GPU. If its memory is full, what the engine
        keeps there is freed first."""
        raise NotImplementedError

    def empty_in_batches(self, device: str, rows: Sequence[Any], first: int, most: int) -> Iterator[dict[int, Any]]:
        """The same by position, in batches: `first` of them, then twice as many each time up to `most`; all at once
        where the framework keeps enough memory."""
        raise NotImplementedError

    def dtype(self, wanted: Any) -> Any:
        """The framework's own dtype for a `dtype=` argument."""
        raise NotImplementedError

    def name_of(self, wanted: Any) -> str:
        """safetensors' name of a dtype of the framework's, "" where it has none."""
        raise NotImplementedError

    def floating(self, wanted: Any) -> bool:
        """Whether a dtype of the framework's is one that tensors are cast to."""
        return self.name_of(wanted) in FLOATS

    def cast(self, tensor: Any, dtype: str, wanted: Any) -> Any:
        """The tensor in another dtype, if `dtype` is one that is cast."""
        raise NotImplementedError

    def index(self, tensor: Any, index: tuple[Any, ...], dtype: str) -> Any:
        """`tensor[index]`, negative steps included, owning only its result."""
        raise NotImplementedError

    def describe(self, tensor: Any) -> Bytes:
        """A tensor's logical bytes; copies what is not dense or not on the host."""
        raise NotImplementedError

    def view(self, tensor: Any) -> View:
        """A tensor's bytes where they lie. Copies only what holds no such bytes: lazy
        conjugates, another byte order, F4 that is not packed."""
        raise NotImplementedError


def check_empty(dtype: str, shape: tuple[int, ...], name: str | None = None) -> None:
    """Raise NotSupportedError for an empty tensor whose other dimensions overflow.

    safetensors allows that; torch and numpy count the bytes of its strides in 63 bits.
    """
    if nbytes(dtype, tuple(d for d in shape if d)) >= 1 << 63:
        what = "" if name is None else f"tensor {name!r}: "
        raise NotSupportedError(
            f"overwire: {what}shape {list(shape)} of {dtype}: beside the zero its dimensions overflow; only "
            f"framework='bytes' takes it",
            tensor=name,
        )


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of such a tensor share memory, or lie in one another's reach in an
    irregular way. Strides count elements."""
    end = 0
    for stride, count in sorted(zip(map(abs, strides), shape, strict=True)):
        if count > 1:
            if stride <= end:
                return True
            end += stride * (count - 1)
    return False
