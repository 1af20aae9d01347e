"""Finds the memory of torch tensors in this process, and checks that it can be read or written.

Of a DTensor, this process has one block, in a separate tensor. Other subclasses that consist of several tensors,
FakeTensors, nested tensors and sparse tensors do not have a single block of memory. A storage that was resized to 0 (by
`sleep` or FSDP) has no memory, and its `data_ptr()` is 0.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._locks import is_fork
from ..errors import ArgumentError, NotSupportedError, OverwireError
from .frame import overlaps_itself

#: Types of tensors that have memory if their address is not 0. Subclasses may consist of more than that memory.
PLAIN = (torch.Tensor, torch.nn.Parameter)

#: Parameters and buffers of lazy modules, which may not have memory yet.
LAZY = (UninitializedParameter, UninitializedBuffer)
_count_users: Any = getattr(torch._C, "_storage_Use_Count", None)
_UNWRITTEN = (torch.quint4x2, torch.quint2x4)


def address_of(tensor: Any) -> int:
    """Returns the address of a tensor's first element, or 0 if the tensor has no memory or no shape."""
    if type(tensor) not in PLAIN and (_is_fake(tensor) or isinstance(tensor, LAZY)):
        return 0
    try:
        return 0 if tensor.is_nested else int(tensor.data_ptr())
    except RuntimeError:  # "doesn't have storage"
        return 0


def is_ready(tensor: Any) -> bool:
    """Returns whether a tensor is dense and has its own memory. Such a tensor can be written to without further
    checks."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return address_of(tensor) != 0 and tensor.is_contiguous() and fits_storage(tensor)


def fits_storage(tensor: Any) -> bool:
    """Returns whether all elements of a dense tensor are inside its storage, which may have been shortened
    (`untyped_storage().resize_`). Memory after the storage must not be read or written."""
    if not tensor.numel():
        return True
    item = tensor.element_size()
    if tensor.is_contiguous():
        extent = tensor.numel() * item
    else:
        extent = (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) * item
    return bool(tensor.untyped_storage().nbytes() >= tensor.storage_offset() * item + extent)


def storage_of(tensor: Any) -> int:
    """Returns the address of the storage of a tensor, or of a DTensor's local part. Returns 0 without memory."""
    if is_distributed(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    return int(tensor.untyped_storage().data_ptr()) if address_of(tensor) else 0


def identity_of(tensor: Any) -> Any:
    """Returns a key that is equal for tensors with the same elements in the same memory. Each tensor without
    memory or elements has its own key."""
    if tensor.device.type == "meta" or not (address := address_of(tensor)) or not tensor.numel():
        return id(tensor)
    return address, tuple(tensor.shape), tensor.stride(), tensor.dtype


def check_memory(tensor: Any, where: str, name: str | None = None) -> None:
    """Raises ArgumentError for a tensor with memory that was freed or not allocated yet, NotSupportedError for a tensor
    without a single block of memory, and the errors of `check_shape`. Accepts tensors without elements.
    where: the start of the message."""
    kind: type[OverwireError] = NotSupportedError
    if tensor.layout is torch.strided and address_of(tensor):
        if fits_storage(tensor):
            return
        size = _storage_size(tensor)
        text = f"{where}: its storage was cut to {size} bytes, less than it needs: resize it back, or use a new tensor"
        raise ArgumentError(text, tensor=name)
    check_shape(tensor, where, name)
    if tensor.layout is not torch.strided:
        why = f"a {tensor.layout} tensor does not have a single block of memory: pass the tensors that it consists of"
    elif tensor.device.type == "meta":
        kind = ArgumentError
        why = "a tensor is on the meta device: allocate its memory first, for instance by module.to_empty(device=)"
    elif not tensor.numel():
        return
    elif is_distributed(tensor):
        why = "a DTensor is spread over several ranks: pass its to_local() or full_tensor()"
    elif _is_fake(tensor):
        why = "a FakeTensor has no memory"
    elif _storage_size(tensor) == 0:
        kind, why = ArgumentError, "its memory was freed because it sleeps, or because its storage was resized to 0"
    else:
        why = f"a {type(tensor).__name__} does not have its own memory: pass the tensors that it consists of"
        if type(tensor) in PLAIN:
            why = "it has no memory while torch transforms a function (vmap, grad): call this outside of the function"
    raise kind(f"{where}: {why}", tensor=name)


def users_of(tensor: Any) -> int:
    """Counts the tensors and other objects that use a tensor's storage. Only differences between counts matter."""
    if _count_users is None:
        text = f"torch {torch.__version__} cannot count the users of a storage: install another version"
        raise NotSupportedError(f"overwire: {text}")
    storage = tensor.untyped_storage()
    return int(_count_users(storage._cdata)) + sys.getrefcount(storage)  # Python's storage object counts once


def _storage_size(tensor: Any) -> int | None:
    # Returns None for a tensor without a storage, for instance inside torch's function transforms.
    try:
        return int(tensor.untyped_storage().nbytes())
    except RuntimeError:
        return None


def check_shape(tensor: Any, where: str, name: str | None = None) -> None:
    """Raises ArgumentError for an uninitialized parameter of a lazy module, and NotSupportedError for a nested
    tensor. where: the start of the message."""
    if isinstance(tensor, LAZY):
        raise ArgumentError(f"{where}: it is not initialized: run its module once, or materialize it", tensor=name)
    if tensor.is_nested:
        raise NotSupportedError(f"{where}: a nested tensor has no single shape: pass its parts", tensor=name)


def check_writable(tensor: Any, where: str, name: str | None = None) -> None:
    """Raises the errors of `check_memory`, ArgumentError for a tensor with elements that share memory,
    and NotSupportedError for a dtype that torch cannot copy."""
    check_memory(tensor, where, name)
    if tensor.dtype in _UNWRITTEN:
        raise NotSupportedError(f"{where}: torch cannot copy into a {tensor.dtype} tensor", tensor=name)
    if not tensor.is_contiguous() and overlaps_itself(tensor.shape, tensor.stride()):
        text = f"{where}: its elements share memory, as after `expand`: pass a contiguous copy"
        raise ArgumentError(text, tensor=name)


def write(tensor: Any, values: Any) -> None:
    """Casts values and copies them into a tensor. The tensor may have been made in inference mode."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        if is_fork():
            _copy_in_steps(tensor, values.expand(tensor.shape), ())
        else:
            tensor.copy_(values)


def cast_tensor(tensor: Any, dtype: torch.dtype) -> Any:
    """Casts a tensor. Returns it unchanged if it already has the dtype."""
    return tensor.to(dtype) if tensor.dtype == dtype or not is_fork() else copy_of(tensor, dtype)


def copy_of(tensor: Any, dtype: torch.dtype | None = None, flips: Sequence[int] = ()) -> Any:
    """Returns a contiguous copy, cast to `dtype`, with the dimensions `flips` reversed."""
    kind = dtype or tensor.dtype
    if not is_fork():
        plain = tensor.flip(flips) if flips else tensor.clone(memory_format=torch.contiguous_format)
        return plain.to(kind).contiguous()
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=kind)
    # torch.empty would fill the memory in torch's deterministic mode.
    into = torch.frombuffer(bytearray(tensor.numel() * kind.itemsize), dtype=torch.uint8).view(kind).view(tensor.shape)
    if kind == tensor.dtype and tensor.is_contiguous() and not flips:
        ctypes.memmove(into.data_ptr(), tensor.data_ptr(), into.nbytes)
    else:
        with torch.no_grad():
            _copy_in_steps(into, tensor, flips)
    return into


# A step copies fewer elements than this, so torch does not use OpenMP's threads. A forked child would wait for them
# forever, because they exist only in the parent.
_STEP = 32768


def _copy_in_steps(into: Any, values: Any, flips: Sequence[int]) -> None:
    count = values.numel()
    if count < _STEP or into.device.type != "cpu":
        into.copy_(values.flip(flips) if flips else values)
        return
    dim = max(range(values.dim()), key=values.shape.__getitem__)
    size = values.shape[dim]
    half = size // 2
    first, second = (size - half, 0) if dim in flips else (0, half)
    _copy_in_steps(into.narrow(dim, first, half), values.narrow(dim, 0, half), flips)
    _copy_in_steps(into.narrow(dim, second, size - half), values.narrow(dim, half, size - half), flips)


def local_part(tensor: Any, where: str, name: str | None = None) -> tuple[Any, tuple[tuple[int, int], ...]] | None:
    """Returns this rank's part of a DTensor, and the range [low, high) that the part covers in each dimension of the
    whole tensor. Returns None for other tensors.

    Raises the errors of `check_memory`, and NotSupportedError if the part is not a block of the tensor: a
    partial sum, shards in an unknown order, a rank outside of its mesh.
    """
    if type(tensor) in PLAIN or not is_distributed(tensor):
        return None
    mesh, ranges = tensor.device_mesh, None
    if (coordinate := mesh.get_coordinate()) is not None:
        ranges = _ranges_of_rank(tuple(tensor.shape), mesh.shape, coordinate, tensor.placements)
    with torch.no_grad():
        local = tensor.to_local()
    if ranges is None or tuple(high - low for low, high in ranges) != tuple(local.shape):
        placements = ", ".join(map(str, tensor.placements))
        text = f"{where}: a DTensor placed as ({placements}) on a mesh of {list(mesh.shape)} has no block on this rank"
        raise NotSupportedError(text, tensor=name)
    check_memory(local, where, name)
    return local, ranges


def _ranges_of_rank(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: list[int], placements: tuple[Any, ...]
) -> tuple[tuple[int, int], ...] | None:
    # As in torch, blocks have ceil(size / ranks) rows, and the last ones may be shorter or empty. A strided shard (FSDP
    # of a dimension that tensor parallelism also slices) divides the slices of the mesh's later axes.
    kinds = [type(placement).__name__ for placement in placements]
    ranges = [(0, size) for size in shape]
    axes = [axis for axis, kind in enumerate(kinds) if kind == "_StridedShard"]
    for axis in [axis for axis in range(len(kinds)) if axis not in axes] + axes[::-1]:
        placement = placements[axis]
        if kinds[axis] == "Replicate":
            continue
        if kinds[axis] not in ("Shard", "_StridedShard"):
            return None
        same = [getattr(one, "dim", None) == placement.dim for one in placements]
        later = [mesh[at] for at in range(axis + 1, len(kinds)) if same[at]]
        if axis in axes and placement.split_factor != math.prod(later):
            return None
        low, high = ranges[placement.dim]
        step = -(-(high - low) // mesh[axis])
        first = min(low + step * coordinate[axis], high)
        ranges[placement.dim] = first, min(first + step, high)
    return tuple(ranges)


def is_distributed(tensor: Any) -> bool:
    """Returns whether a tensor is a DTensor."""
    # Looks in sys.modules, because an import takes a second, and no DTensor can exist before the module is imported.
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def refuse_fakes() -> None:
    """Raises NotSupportedError inside a FakeTensorMode, because torch's copies and casts move no data there."""
    mode = getattr(torch._C, "_get_dispatch_mode", None)
    if mode is not None and mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise NotSupportedError("overwire: torch's FakeTensorMode is active, and tensors have no data: leave this mode")


def _is_fake(tensor: Any) -> bool:
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, getattr(module, "FakeTensor", ()))
