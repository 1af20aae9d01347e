"""Loads into existing tensors, in place if the engine can write to them."""

from __future__ import annotations

import contextlib
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import _engine
from .._verbs import states
from ..dtypes import PACKED, torch_shape
from ..errors import ArgumentError, ForkedError, NotSupportedError
from ..frameworks.choose import frame_for
from ..frameworks.frame import Frame
from ..jobs import Job
from ..model.budget import fit
from ..model.opened import WHOLE, Model, Request
from ..model.rows import Row
from ..progress import Watcher

#: Rows and columns of a tensor: [lo, hi) of dimension 0 and of dimension 1.
Block = tuple[int, int, int, int]

ALL: Block = (0, WHOLE, 0, WHOLE)


class Destination(NamedTuple):
    """A destination for one tensor of the model, or for a block of it.

    at: the tensor's position in the model's table. block: the block of the tensor. shape: the block's shape. tensor:
    the tensor to load into. It has this shape, unless there is a `cut`: the ranges of dimensions 2 and up that it gets.
    put: a function that stores a loaded tensor if `tensor` cannot be written to; by default it is copied, with a cast.
    """

    at: int
    block: Block
    shape: tuple[int, ...]
    tensor: Any
    put: Callable[[Any], None] | None = None
    cut: tuple[slice, ...] = ()


def fill(
    model: Model,
    frame: Frame,
    targets: Sequence[Destination],
    fixed: str | None = None,
    max_memory: int | str | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Loads all targets together, on several devices at once.

    The engine writes directly to a tensor that is dense, on its device and has the file's dtype, without a second
    copy. For other targets, and for a target that overlaps an earlier one, it loads a separate tensor. These are copied
    afterwards in the order of the targets, so the last one wins.

    fixed: the device to load to, by default each tensor's own device. max_memory: the most bytes for separate tensors.

    Raises OutOfMemoryError for max_memory before anything is allocated, and the errors of
    `load_file`. If the load fails, the tensors have a mixture of old and new values.
    """
    frame_for(frame.name)  # refuses torch's fake tensors
    devices = [fixed or place_of(target.tensor) for target in targets]
    views = {device: model.on(device) for device in devices}
    for view in views.values():
        view.join()
    lands = _can_land(targets, model, devices)
    for number, (target, device) in enumerate(zip(targets, devices, strict=True)):
        # Preloaded tensors are whole. On a GPU they are always copied from the preload's memory. On the host they are
        # copied only if a block is needed.
        if views[device].joined and (device != "cpu" or target.block != ALL):
            lands[number] = False
    _take_turns(targets, lands)
    groups: dict[str, list[_Landing]] = {device: [] for device in views}
    landings: dict[tuple[str, int], _Landing] = {}  # the loads of preloaded tensors
    indirect: list[tuple[int, int]] = []
    for number, (target, device, here) in enumerate(zip(targets, devices, lands, strict=True)):
        if here:
            groups[device].append(_Landing(target.at, target.tensor.data_ptr(), target.block, []))
        elif views[device].joined and (device != "cpu" or target.block != ALL):
            one = landings.get((device, target.at))
            if one is None:
                one = landings[device, target.at] = _Landing(target.at, 0, ALL, [])
                groups[device].append(one)
                indirect.append((target.at, WHOLE))
            one.users.append((number, target))
        else:
            groups[device].append(_Landing(target.at, 0, target.block, [(number, target)]))
            indirect.append((target.at, WHOLE if target.block == ALL else _count_elements(target, model)))
    fit(model, frame, None, max_memory, indirect)
    with contextlib.ExitStack() as stack:
        jobs = []
        for device, group in groups.items():
            requests = [(one.at, one.pointer, *one.block) for one in group]
            jobs.append(stack.enter_context(views[device].start(requests, watcher)))
            watcher = None
        for job, (device, group) in zip(jobs, groups.items(), strict=True):
            pairs = job.take(frame.raw({model.table[one.at][1] for one in group})).pairs()
            steps = sorted((number, order, target) for order, one in enumerate(group) for number, target in one.users)
            last = {order: number for number, order, _ in steps}
            tensors: dict[int, Any] = {}
            for number, order, target in steps:
                one = group[order]
                if order not in tensors:
                    row = model.row(one.at)
                    shape = row.shape if one.block == ALL else target.shape
                    tensors[order] = frame.adopt(*pairs[order], row.dtype, shape, views[device].join())
                    pairs[order] = (None, 0)
                is_whole = target.block == one.block
                _store_tensor(target, tensors[order] if is_whole else _cut_block(tensors[order], target))
                if last[order] == number:
                    del tensors[order]


class _Landing(NamedTuple):
    # A tensor, or a block of it, that lands in place or in a separate tensor. users: the targets to which the separate
    # tensor is then copied, with their numbers.
    at: int
    pointer: int
    block: Block
    users: list[tuple[int, Destination]]


def in_place(model: Model, targets: Sequence[Destination], device: str) -> tuple[dict[int, Any], list[int]]:
    """Returns the tensors, by position, that the engine can write to completely and that overlap no earlier target.
    Also returns the positions of the targets that overlap an earlier target. The caller must call `store_part` for
    these, in order, after all others.
    """
    lands = _can_land(targets, model, [device] * len(targets))
    lands = [here and target.block == ALL for target, here in zip(targets, lands, strict=True)]
    late = _take_turns(targets, lands)
    places = {target.at: target.tensor for target, here in zip(targets, lands, strict=True) if here}
    return places, [targets[number].at for number in late]


def states_of(file: Any, samples: bool = False) -> list[dict[str, Any]]:
    """Returns the identities of the files of a `safe_open`; see `overwire._verbs.states`."""
    return [dict(state) for state in states(file._live_model().handle, samples)]


def table_of(file: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns name, dtype and torch's shape of each tensor of a `safe_open`, in the order of the files."""
    return [(row[0], row[1], torch_shape(row[1], tuple(row[2]))) for row in file._live_model().table]


def landing(file: Any, device: str, requests: bytes | Sequence[Request]) -> Job | None:
    """Begins to load blocks of tensors of a `safe_open` to addresses on a device, in one pass.

    requests: each has the tensor's position in `table_of`, an address, and [lo, hi) of its first two dimensions (hi -1
        for all). All requests may also be packed as 64-bit integers. The caller must have checked that each dense block
        fits at its address in the file's dtype, and that no requests overlap. The memory must stay valid until the job
        has ended.

    Returns None if the files were preloaded, because only `load_into` uses preloads. Raises the errors of `load_file`.
    """
    model = file._live_model()
    if _engine.forked():
        raise ForkedError("overwire: the engine cannot run in a forked child", source=model.uris[0])
    view = model.on(device)
    view.join()
    return None if view.joined else view.start(requests)


def place_of(tensor: Any) -> str:
    """Returns the default device for loading into a tensor."""
    return str(tensor.device) if getattr(tensor, "is_cuda", False) else "cpu"


def common_device(tensors: Sequence[Any]) -> str:
    """Returns the common device of tensors, so that a preload can be joined, or the host if there is none."""
    places = {place_of(tensor) for tensor in tensors}
    return places.pop() if len(places) == 1 else "cpu"


def _take_turns(targets: Sequence[Destination], lands: list[bool]) -> list[int]:
    """Returns the numbers of the targets that overlap an earlier target in memory, and sets their `lands` to False, so
    that they get separate tensors. All others land in place, before any copies are made."""
    reach: list[tuple[int, int, int]] = []
    for number, target in enumerate(targets):
        tensor = target.tensor
        if not lands[number] and tensor.is_meta or not (size := tensor.nbytes):
            continue
        if not lands[number] and not tensor.is_contiguous():
            count = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            size = count * tensor.element_size()
        address = tensor.data_ptr()
        reach.append((address, address + size, number))
    ends = sorted(reach)
    if all(one[1] <= two[0] for one, two in zip(ends, ends[1:], strict=False)):
        return []
    late: list[int] = []
    spans: list[tuple[int, int]] = []  # the earlier targets' memory, in order and without overlaps
    for low, high, number in reach:
        first = bisect_left(spans, (low, low))
        first -= first > 0 and spans[first - 1][1] > low
        end = first
        while end < len(spans) and spans[end][0] < high:
            end += 1
        if end > first:
            late.append(number)
            lands[number] = False
            low, high = min(low, spans[first][0]), max(high, spans[end - 1][1])
        spans[first:end] = [(low, high)]
    return late


def _can_land(targets: Sequence[Destination], model: Model, devices: Sequence[str]) -> list[bool]:
    # Returns whether the engine can write to each tensor's own bytes.
    import torch

    from ..frameworks.torch import SAVED

    torch_devices = {name: torch.device(name) for name in set(devices)}
    table = model.table
    return [
        (tensor := target.tensor).device == torch_devices[name]
        and SAVED.get(tensor.dtype) == table[target.at][1]
        and tensor.is_contiguous()
        and not target.cut
        and not (tensor.is_conj() or tensor.is_neg())
        for target, name in zip(targets, devices, strict=True)
    ]


def _count_elements(target: Destination, model: Model) -> int:
    # Counts elements of the file, because torch counts two F4 elements as one.
    return math.prod(target.shape) * (2 if model.table[target.at][1] == "F4" and target.shape else 1)


def _cut_block(loaded: Any, target: Destination) -> Any:
    lo0, hi0, lo1, hi1 = target.block
    rows = loaded[lo0 : loaded.shape[0] if hi0 == WHOLE else hi0]
    return rows if rows.dim() < 2 else rows[:, lo1 : loaded.shape[1] if hi1 == WHOLE else hi1]


def store_part(target: Destination, whole: Any) -> None:
    """Stores the target's part of a tensor that was loaded separately."""
    _store_tensor(target, whole if target.block == ALL else _cut_block(whole, target))


def _store_tensor(target: Destination, loaded: Any) -> None:
    if target.put is not None:
        target.put(loaded)
    else:
        from ..frameworks.memory import write

        cut = (slice(None), slice(None), *target.cut)
        write(target.tensor, loaded[cut] if target.cut else loaded)


def local_destination(target: Destination, row: Row, prefix: str) -> Destination | None:
    """Returns the target, or this process's part of a DTensor, or None if this process has no part. Raises
    ArgumentError and NotSupportedError, with a prefix, if the tensor cannot be written to."""
    from ..frameworks.memory import check_writable, local_part

    part = local_part(target.tensor, prefix, row.name)
    tensor, ranges = part or (target.tensor, ())
    check_writable(tensor, prefix, row.name)
    if part is None:
        return target
    if ranges == tuple((0, size) for size in target.tensor.shape):
        return target._replace(tensor=tensor, put=None)
    if not tensor.numel():
        return None
    if row.dtype in PACKED:
        text = f"{prefix}: this DTensor of {row.dtype} is cut where elements share bytes"
        raise NotSupportedError(text, tensor=row.name)
    lo0, _, lo1, _ = target.block
    rows, columns = (*ranges, (0, 0))[:2]
    block = (lo0 + rows[0], lo0 + rows[1], lo1 + columns[0], lo1 + columns[1] if len(ranges) > 1 else WHOLE)
    shape = tuple(high - low for low, high in ranges[:2]) + target.shape[2:]
    cut = tuple(slice(*one) for one in ranges[2:]) if shape != tuple(tensor.shape) else ()
    return Destination(target.at, block, shape, tensor, None, cut)


def parse_targets(targets: Any) -> list[tuple[str, Any, Any]]:
    """Returns the argument of `safe_open.load_into` as a list. Raises ArgumentError if an item is not a triple."""
    triples = list(targets) if isinstance(targets, Iterable) and not isinstance(targets, (str, Mapping)) else [targets]
    for triple in triples:
        if not isinstance(triple, (tuple, list)) or len(triple) != 3:
            text = "overwire: load_into: expected a list of triples, each the name, the block or None,"
            raise ArgumentError(f"{text} and the tensor to load into; got {type(triple).__name__}")
    return [tuple(triple) for triple in triples]


def destination_of(model: Model, name: str, block: Any, tensor: Any) -> Destination | None:
    """Returns a checked target, or None if this rank has no part of the tensor. Raises TensorNotFoundError,
    ArgumentError for a block outside of the tensor or a tensor with another shape, and the errors of
    `local_destination`."""
    import torch

    from ..frameworks.memory import check_shape, is_ready

    at = model.place(name)
    row = model.row(at)
    prefix = f"overwire: load_into {model.uris[0]} tensor {name!r}"

    def block_error(text: str) -> ArgumentError:
        return ArgumentError(f"{prefix}: {text}", tensor=name)

    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        kind = "one on the meta device" if hasattr(tensor, "device") else type(tensor).__name__
        raise block_error(f"expected a torch.Tensor with memory to load into, got {kind}")
    if not (ready := is_ready(tensor)):
        check_shape(tensor, prefix, name)
    shape = torch_shape(row.dtype, row.shape)
    part = ALL
    if block is not None:
        try:
            ranges = [(operator.index(lo), operator.index(hi)) for lo, hi in block]
        except (TypeError, ValueError):
            raise block_error(f"block: expected pairs (lo, hi), or None, got {block!r}") from None
        inside = all(0 <= lo <= hi <= size for (lo, hi), size in zip(ranges, row.shape, strict=False))
        if len(ranges) > min(2, len(row.shape)) or not inside:
            raise block_error(f"block {ranges} of shape {list(row.shape)}: expected ranges of its first two dimensions")
        if row.dtype in PACKED and len(ranges) == len(row.shape):
            raise block_error(f"the last dimension of {row.dtype} cannot be cut, because its elements share bytes")
        full = all((lo, hi) == (0, size) for (lo, hi), size in zip(ranges, row.shape, strict=False))
        if not full:
            (lo0, hi0), (lo1, hi1) = (*ranges, (0, WHOLE))[:2] if len(ranges) == 1 else ranges
            part = (lo0, hi0, lo1, hi1)
            shape = (hi0 - lo0, *shape[1:]) if len(ranges) == 1 else (hi0 - lo0, hi1 - lo1, *shape[2:])
    if tuple(tensor.shape) != shape:
        raise block_error(f"the tensor has shape {tuple(tensor.shape)}: expected {shape}")
    target = Destination(at, part, shape, tensor)
    return target if ready else local_destination(target, row, prefix)
