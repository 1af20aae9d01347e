"""JoinedTensor: tensors that are saved as one, without a copy that has them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError
from .choose import frame_of
from .frame import Bytes


class JoinedTensor:
    """Tensors of the host whose rows, one after the other, are those of the tensor that is saved.

    They have one dtype, and one shape but for the first dimension. Their memory stays
    unchanged until the save has ended."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def describe(self) -> Bytes:
        """The bytes as they are saved. Raises NotSupportedError for a dtype that safetensors lacks,
        ArgumentError for parts that are no rows of one tensor."""
        all = [frame_of(part).describe(part) for part in self.parts]
        if not all or any(not one.shape for one in all) or len({(one.dtype, one.shape[1:]) for one in all}) > 1:
            parts = ", ".join(f"{one.dtype} {list(one.shape)}" for one in all[:9]) or "none"
            raise ArgumentError(f"overwire: save: a joined tensor has parts of one dtype and row; these are {parts}")
        rows = sum(one.shape[0] for one in all)
        size = sum(one.nbytes for one in all)
        pieces = tuple(number for one in all if one.nbytes for number in (one.pointer, one.nbytes))
        return Bytes(all[0].dtype, (rows, *all[0].shape[1:]), 0, size, all, 0, pieces)
