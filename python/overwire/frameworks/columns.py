"""Many tensors described at once, in columns: what most of a model's tensors need said of
them, without an object for each."""

from __future__ import annotations

from .frame import Bytes

__all__ = ["ODD", "Columns"]

#: The kind of a tensor that has to be looked at by itself, with its frame.
ODD = -1


class Columns:
    """Tensors by position. Those of torch that are dense, contiguous and of a dtype that
    files have are described; the others are ODD, and have zeros.

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
