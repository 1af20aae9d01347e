"""Which bytes of a checkpoint a model's own loader puts where, found out without them.

`load_weights` of a model runs once on stand-ins: tensors with a shape and a dtype and no
memory. Each `copy_` of a view of a stand-in into a parameter is noted instead of made, and
the engine then loads just those bytes, straight into the parameter. What needs the data of
a stand-in, or of a parameter that is still to be loaded, raises `Unplannable`.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Copy", "Opened", "Recorder", "Unplannable", "block_of", "elements", "fill", "opened", "stand_ins"]

_aten = torch.ops.aten
_COPY = _aten.copy_.default

# Stand-ins that may be alive when all were given: those in hand.
_KEPT = 16


class Unplannable(Exception):
    """The loader does what cannot be planned: `operation` on the tensor `name`."""

    def __init__(self, name: str, operation: str) -> None:
        super().__init__(f"{operation} needs the data of {name}")
        self.name, self.operation = name, operation


class Copy(NamedTuple):
    """A view of a stored tensor, and where it goes. The view is in elements of the
    contiguous tensor: offset, shape, stride."""

    file: Any
    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    target: torch.Tensor


class _StandIn(torch.Tensor):
    # Has the shape and the dtype of a tensor of a file, and no memory. `seen` is on the
    # meta device: it says which elements of the stored tensor this is.

    of: Any  # the file
    called: str
    seen: torch.Tensor

    @staticmethod
    def __new__(cls, file: Any, name: str, view: torch.Tensor, dtype: torch.dtype, device: torch.device) -> _StandIn:
        made: _StandIn = torch.Tensor._make_wrapper_subclass(
            cls, view.size(), strides=view.stride(), dtype=dtype, device=device
        )
        made.of, made.called, made.seen = file, name, view
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached when no recorder runs any more: a loader kept it.
        raise Unplannable(next((one.called for one in _tensors(args) if isinstance(one, cls)), "?"), str(func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"stand-in for {self.called}, {self.dtype}, {list(self.shape)}"


class Recorder(TorchDispatchMode):
    """While it is entered, records copies of stand-ins into real tensors.

    `load` loads what was recorded since the last call; it gets a list of `Copy`, and
    runs with the recorder off.
    """

    def __init__(self, load: Callable[[list[Copy]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._load = load
        self._noted: list[Copy] = []
        # By memory: the ranges of bytes that are recorded, and of which tensor.
        self._ranges: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        self._off = False
        self._seen: dict[Any, torch.Tensor] = {}  # by shape and dtype
        self._alive: weakref.WeakSet[_StandIn] = weakref.WeakSet()
        #: Whether something was loaded.
        self.began = False
        #: What the loader did beside copying, None for nothing.
        self.impure: str | None = None

    def finish(self) -> None:
        """Loads the rest. Raises Unplannable if a stand-in is still referenced."""
        self.load()
        if self._alive:
            self._refuse()

    def _refuse(self) -> None:
        gc.collect()
        for one in self._alive:
            raise Unplannable(one.called, "its loader, which keeps it,")

    def stand_in(self, file: Any, name: str, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor for the model's loader."""
        key = (tuple(shape), dtype)
        if key not in self._seen:
            with self.paused():
                self._seen[key] = torch.empty(key[0], dtype=dtype, device="meta")
        return self._made(file, name, self._seen[key], dtype, device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For work that is not the loader's."""
        off, self._off = self._off, True
        try:
            yield
        finally:
            self._off = off

    def load(self) -> None:
        """Loads what is noted."""
        if len(self._alive) > _KEPT:
            self._refuse()  # before anything is loaded in vain
        noted, self._noted = self._noted, []
        if noted:
            self.began = True
            with self.paused():
                self._load(noted)
        self._ranges.clear()

    def _on_stand_in(self, func: Any, args: Any, kwargs: Any, stands: list[_StandIn]) -> Any:
        one = stands[0]
        if func is _COPY and not isinstance(args[0], _StandIn) and args[1] is one:
            return self._note(args[0], one)
        if len(stands) == 1 and args and args[0] is one:
            if _is_view(func):
                return self._viewed(one, func(one.seen, *args[1:], **kwargs))
            if func is _aten.clone.default and one.seen.is_contiguous():
                return self._like(one, one.seen, one.dtype)  # nothing can write to a stand-in
            if func is _aten._to_copy.default and _only_casts(one, kwargs):
                return self._like(one, one.seen, kwargs.get("dtype") or one.dtype)
        raise Unplannable(one.called, str(func))

    def _viewed(self, one: _StandIn, found: Any) -> Any:
        if isinstance(found, (list, tuple)):
            return [self._like(one, view, one.dtype) for view in found]
        return self._like(one, found, one.dtype)

    def _like(self, one: _StandIn, view: torch.Tensor, dtype: torch.dtype) -> _StandIn:
        return self._made(one.of, one.called, view, dtype, one.device)

    def _made(self, *arguments: Any) -> _StandIn:
        made = _StandIn(*arguments)
        self._alive.add(made)
        return made

    def _note(self, target: torch.Tensor, one: _StandIn) -> torch.Tensor:
        view = one.seen
        # A tensor of the meta device is processed by what made it so, when it is complete;
        # a cast on the way must be the one that the copy makes anyway.
        if target.device.type == "meta" or target.shape != view.shape or one.dtype not in (view.dtype, target.dtype):
            what = f"{one.dtype} {list(view.shape)} to {target.dtype} {list(target.shape)} on {target.device}"
            raise Unplannable(one.called, f"copy_ of {what}")
        if target.numel():
            memory, low, high = _reach(target)
            other = self._held(memory, low, high)
            if other is not None:
                raise Unplannable(one.called, f"copy_ to where {other} goes")
            insort(self._ranges[memory], (low, high, one.called))
            offset, shape, stride = int(view.storage_offset()), tuple(view.shape), tuple(view.stride())
            self._noted.append(Copy(one.of, one.called, offset, shape, stride, view.dtype, target))
        return target

    def _on_others(self, func: Any, args: Any, kwargs: Any) -> None:
        # An operation on tensors with data: none of them may be one that is still to come.
        for tensor in _tensors((args, kwargs)):
            if tensor.device.type == "meta" or not tensor.numel():
                continue
            other = self._held(*_reach(tensor))
            if other is not None:
                raise Unplannable(other, f"{func} on where it goes")

    def _held(self, memory: int, low: int, high: int) -> str | None:
        # The name recorded for some of these bytes. Ranges do not overlap.
        ranges = self._ranges.get(memory)
        if not ranges:
            return None
        at = bisect_left(ranges, (low, high, ""))
        if at and ranges[at - 1][1] > low:
            return ranges[at - 1][2]
        return ranges[at][2] if at < len(ranges) and ranges[at][0] < high else None


def _dispatch(self: Recorder, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if self._off:
        return func(*args, **(kwargs or {}))
    if args and not kwargs:  # the most: views have one tensor, and come first
        one = args[0]
        if type(one) is _StandIn:
            if _VIEWS.get(func):
                return self._viewed(one, func(one.seen, *args[1:]))
        elif func is _COPY and type(args[1]) is _StandIn:
            return self._note(one, args[1])
        elif _VIEWS.get(func) and isinstance(one, torch.Tensor):
            return func(*args)
    kwargs = kwargs or {}
    stands = [found for found in _tensors((args, kwargs)) if isinstance(found, _StandIn)]
    if stands:
        return self._on_stand_in(func, args, kwargs, stands)
    if not _is_view(func):
        # vLLM fills what pads a vocabulary; mostly there is none.
        written = list(_tensors((args, kwargs)))
        if not written or any(tensor.numel() for tensor in written) or not str(func.overloadpacket).endswith("_"):
            self.impure = self.impure or str(func)
        if self._ranges:
            self._on_others(func, args, kwargs)
    return func(*args, **kwargs)


# Not in the class: what torch wraps around it there costs as much as itself, and imports
# torch.compile.
Recorder.__torch_dispatch__ = _dispatch  # type: ignore[method-assign,assignment]


def _tensors(tree: Any) -> Iterator[Any]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


_VIEWS: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    # Whether all that it returns are views, and it writes nothing.
    known = _VIEWS.get(func)
    if known is None:
        schema = func._schema
        aliases = [found.alias_info for found in (*schema.returns, *schema.arguments)]
        returns = [found.alias_info for found in schema.returns]
        known = bool(returns) and all(returns) and not any(alias is not None and alias.is_write for alias in aliases)
        _VIEWS[func] = known
    return known


def _only_casts(one: _StandIn, kwargs: Any) -> bool:
    device = kwargs.get("device")
    return set(kwargs) <= {"dtype", "device", "non_blocking"} and (device is None or torch.device(device) == one.device)


def _reach(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The memory that a tensor lies in, and its first byte and its end there."""
    size = tensor.element_size()
    low = tensor.storage_offset() * size
    last = sum((int(count) - 1) * int(step) for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().data_ptr(), int(low), int(low) + (last + 1) * size


class Opened(NamedTuple):
    """A source that a model's loader is to be run on. names: of the tensors that it is
    given, which `slices` has. small: those of at most one element, with their data."""

    file: Any
    names: list[str]
    slices: dict[str, Any]
    small: dict[str, torch.Tensor]
    device: torch.device


def opened(
    files: contextlib.ExitStack,
    where: Any,
    device: str,
    chosen: Mapping[str, Any],
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    unused: Callable[[str], bool] | None = None,
    index: str | None = None,
) -> Opened:
    """Opens what `weights` would read.

    files: closes the file when its tensors are no longer wanted. The other arguments,
    and what is raised, are those of `weights`.
    """
    import overwire

    from . import complete

    file = files.enter_context(overwire.safe_open(where, framework="pt", device=device, storage_options=chosen.get("storage_options")))
    slices = {name: file.get_slice(name) for name in file.offset_keys() if wanted(name)}
    if index is not None:
        complete(index, where, slices, wanted)
    names = [name for name in slices if unused is None or not unused(name)] or list(slices)
    small = file.get_tensors([name for name in names if elements(slices[name].get_shape()) <= 1])
    on = torch.device(device)
    if on.type == "cuda" and on.index is None:
        on = torch.device("cuda", torch.cuda.current_device())
    return Opened(file, names, slices, small, on)


def stand_ins(recorder: Recorder, source: Opened) -> Iterator[tuple[str, torch.Tensor]]:
    """What `weights` yields, with stand-ins for tensors of more than one element."""
    from ..plumbing import torch_dtype

    for name in source.names:
        if name in source.small:
            recorder.impure = recorder.impure or f"{name}, whose data it was given"
            yield name, source.small[name]
            continue
        dtype = torch_dtype(source.slices[name].get_dtype())
        if dtype is None:
            raise Unplannable(name, f"its dtype {source.slices[name].get_dtype()}, which torch lacks,")
        yield name, recorder.stand_in(source.file, name, source.slices[name].get_shape(), dtype, source.device)


def fill(copies: Iterable[Copy], most: int) -> None:
    """Loads copies into their targets, in one pass a file.

    A view that is a block of its tensor lands in the target. Another one, transposed or
    cut along the third dimension, is taken out of its rows, which are loaded beside, those of
    at most `most` bytes at once, or of one view.
    """
    into: dict[int, tuple[Any, list[Any]]] = {}
    others: list[tuple[Copy, tuple[int, int]]] = []
    for copy in copies:
        shape = copy.file.get_slice(copy.name).get_shape()
        block = block_of(copy, shape)
        target = None if block is None else _shaped(copy.target, [high - low for low, high in block] + shape[len(block) :])
        if target is not None:
            into.setdefault(id(copy.file), (copy.file, []))[1].append((copy.name, block, target))
        else:
            row = elements(shape[1:])
            last = copy.offset + sum((count - 1) * step for count, step in zip(copy.shape, copy.stride, strict=True))
            others.append((copy, (copy.offset // row, last // row + 1)))
    for file, targets in into.values():
        file.load_into(targets)
    while others:
        taken: list[tuple[Copy, int, torch.Tensor]] = []
        size = 0
        while others and (not taken or size < most):
            copy, (low, high) = others.pop()
            shape = copy.file.get_slice(copy.name).get_shape()
            rows = torch.empty((high - low, *shape[1:]), dtype=copy.dtype, device=copy.target.device)
            size += rows.numel() * rows.element_size()
            taken.append((copy, low, rows))
        for copy, low, rows in taken:
            copy.file.load_into([(copy.name, [(low, low + rows.shape[0])], rows)])
        for copy, low, rows in taken:
            found = rows.as_strided(copy.shape, copy.stride, copy.offset - low * elements(rows.shape[1:]))
            with torch.no_grad():
                copy.target.copy_(found)


def _shaped(target: torch.Tensor, shape: list[int]) -> torch.Tensor | None:
    try:
        return target.view(shape)
    except RuntimeError:  # its memory is not that of such a tensor
        return None


def elements(shape: Iterable[int]) -> int:
    """How many a tensor of a shape has."""
    count = 1
    for size in shape:
        count *= size
    return count


def block_of(copy: Copy, shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """The ranges of the first two dimensions whose elements, in their order, a view of a
    tensor of this shape is; None if there are none."""
    count = elements(copy.shape)
    if not shape:
        return []
    row = elements(shape[1:])
    last = copy.offset + sum((n - 1) * step for n, step in zip(copy.shape, copy.stride, strict=True))
    low, high = copy.offset // row, last // row + 1
    ranges = [(low, high)]
    if len(shape) == 2 == len(copy.shape) and copy.stride == (row, 1):  # by far the most
        left = copy.offset % row
        return ranges if copy.shape[1] == row else [*ranges, (left, left + copy.shape[1])]
    if count != (high - low) * row:
        if len(shape) < 2:
            return None
        cell = elements(shape[2:])
        left, right = copy.offset % row // cell, last % row // cell + 1
        ranges.append((left, right))
        if left >= right or count != (high - low) * (right - left) * cell:
            return None
    whole = torch.empty(shape, device="meta")[tuple(slice(*one) for one in ranges)]
    try:
        seen = whole.view(copy.shape)
    except RuntimeError:
        return None
    steps = [(n, step) for n, step in zip(copy.shape, copy.stride, strict=True) if n != 1]
    same = steps == [(n, step) for n, step in zip(seen.shape, seen.stride(), strict=True) if n != 1]
    return ranges if same and seen.storage_offset() == copy.offset else None
