"""Tensors that a delta changes: where each lies, or the copy by way of which it is changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import ArgumentError, DeviceError, NotSupportedError
from ..frameworks.choose import frame_of
from ..frameworks.frame import Bytes, overlaps_itself
from .states import described


def settle_devices(devices: Iterable[int]) -> None:
    """Waits for what is queued on the current stream of each GPU."""
    for cuda in set(devices) - {0}:
        from ..frameworks.torch import settle

        settle(f"cuda:{cuda - 1}")


def place_tensor(name: str, tensor: Any) -> tuple[Bytes, bool]:
    """Where a tensor is changed, and whether that is a copy. Raises for one that cannot be
    written."""
    at = described(name, tensor)
    frame = frame_of(tensor).name
    if frame == "numpy":
        if not tensor.flags.writeable:
            raise ArgumentError(f"overwire: apply_delta: the array {name!r} is read-only", tensor=name)
        if at.dtype == "F4":
            raise NotSupportedError(
                f"overwire: apply_delta: {name!r}: numpy has F4 unpacked; apply it to torch tensors", tensor=name
            )
        here = tensor.__array_interface__["data"][0]
    elif frame == "torch":
        here = tensor.data_ptr() if tensor.layout is not None and at.nbytes else 0
        if tensor.is_conj() or tensor.is_neg():
            here = -1
    else:
        raise NotSupportedError(
            f"overwire: apply_delta: {name!r}: a {type(tensor).__name__} cannot be changed in place", tensor=name
        )
    is_copy = at.nbytes > 0 and at.pointer != here
    if is_copy:
        _try_write(name, tensor, at.keep)
    return at, is_copy


def _try_write(name: str, tensor: Any, copy: Any) -> None:
    """Raises ArgumentError where a changed copy could not be written back."""
    strides = tensor.stride() if hasattr(tensor, "stride") else [step // tensor.itemsize for step in tensor.strides]
    if overlaps_itself(tensor.shape, strides):
        text = f"overwire: apply_delta: {name!r}: its elements share memory with one another, as those of `expand` do"
        raise ArgumentError(text, tensor=name)
    first = (..., *(slice(0, 1) for _ in tensor.shape))
    try:
        _write_copy(tensor[first], copy[first])
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(f"overwire: apply_delta: {name!r} cannot be written to: {error}", tensor=name) from error


def _write_copy(tensor: Any, copy: Any) -> None:
    if hasattr(tensor, "copy_"):
        from ..frameworks.memory import write

        write(tensor, copy)
    else:
        tensor[...] = copy


def write_back(copies: list[tuple[str, Any, Any]]) -> None:
    """Gives all tensors what their copies have become; Ctrl-C is raised when that is done."""
    interrupt: KeyboardInterrupt | None = None
    devices: set[int] = set()  # GPUs
    for at, (name, tensor, copy) in enumerate(copies):
        while True:
            try:
                _write_copy(tensor, copy)
                if getattr(tensor, "is_cuda", False):
                    devices.add(tensor.get_device() + 1)
                break
            except KeyboardInterrupt as error:
                interrupt = error
            except Exception as error:
                old = ", ".join(repr(other) for other, _, _ in copies[at:])
                text = f"{name!r}: {error}; old values, or parts of both: {old}; the new ones: all others"
                raise DeviceError(f"overwire: apply_delta: {text}") from error
    settle_devices(devices)
    if interrupt is not None:
        raise interrupt
