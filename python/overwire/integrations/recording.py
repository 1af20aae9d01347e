"""Which bytes of a checkpoint a model's own loader puts where, found out without them.

`load_weights` of a model runs once on stand-ins: tensors with a shape and a dtype and no
memory. Each `copy_` of a view of a stand-in into a parameter is noted instead of made, and
the engine loads just those bytes, straight into the parameter. What needs the data of
a stand-in, or of a parameter that is still to be loaded, raises `Unplannable`.

What is noted is loaded while the loader goes on, as long as it only copies: a loader that
has to be run again, on tensors, does up to where it failed what it did on stand-ins, and
so writes all that was loaded before it can read any of it.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .copies import Copy, Stored, reach
from .sheets import Opening, Sheet

__all__ = ["EARLY", "Opened", "Recorder", "Unplannable", "opened", "stand_ins"]

_aten = torch.ops.aten
_COPY = _aten.copy_.default
_ITEM = _aten._local_scalar_dense.default
_ZEROES = frozenset((_aten.fill_.Scalar, _aten.zero_.default))

# Stand-ins that may be alive when all were given: those in hand.
_KEPT = 16

#: The bytes of copies that are worth a load while the loader goes on.
EARLY = 64 << 20


class Unplannable(Exception):
    """The loader does what cannot be planned: `operation` on the tensor `name`."""

    def __init__(self, name: str, operation: str) -> None:
        super().__init__(f"{operation} needs the data of {name}")
        self.name, self.operation = name, operation


class _StandIn(torch.Tensor):
    # Has the shape and the dtype of a tensor of a file, and no memory. `seen` is on the
    # meta device: it says which elements of the stored tensor this is.

    of: Stored
    seen: torch.Tensor

    @staticmethod
    def __new__(cls, of: Stored, view: torch.Tensor, dtype: torch.dtype, device: torch.device) -> _StandIn:
        made: _StandIn = torch.Tensor._make_wrapper_subclass(
            cls, view.size(), strides=view.stride(), dtype=dtype, device=device
        )
        made.of, made.seen = of, view
        return made

    @property
    def called(self) -> str:
        return self.of.name

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
    runs with the recorder off. `early` begins to load some of them and returns the
    others; it may return all.
    """

    def __init__(self, load: Callable[[list[Copy]], None], early: Callable[[list[Copy]], list[Copy]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._load, self._early = load, early
        self._noted: list[Copy] = []
        self._size = 0  # bytes noted since `early` was asked
        # By memory: the ranges of bytes that are recorded, and of which tensor.
        self._ranges: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        self._off = False
        self._seen: dict[Any, torch.Tensor] = {}  # by shape and dtype
        self._made: list[weakref.ref[_StandIn]] = []
        self._offered = False
        #: Whether all was recorded, and the rest of it was begun to be loaded.
        self.began = False
        #: Why the load failed that `offer` began.
        self.failed: BaseException | None = None
        #: What the loader did beside copying, None for nothing.
        self.impure: str | None = None
        # Memories of integers of which it read elements.
        self._reads: set[int] = set()
        # Memories that it set to zero, before any copy to there.
        self._zeros: set[int] = set()
        # Whether it worked on tensors with data, of which some may be loaded later.
        self._works = False

    def finish(self) -> None:
        """Loads the rest. Raises Unplannable if a stand-in is still referenced."""
        self.load()
        if self._alive():
            self._refuse()

    def _alive(self) -> int:
        self._made = [one for one in self._made if one() is not None]
        return len(self._made)

    def _refuse(self) -> None:
        gc.collect()
        for one in self._made:
            kept = one()
            if kept is not None:
                raise Unplannable(kept.called, "its loader, which keeps it,")

    def stand_in(self, of: Stored, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor for the model's loader."""
        key = (of.shape, dtype)
        if key not in self._seen:
            with self.paused():
                self._seen[key] = torch.empty(of.shape, dtype=dtype, device="meta")
        return self._make(of, self._seen[key], dtype, device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For work that is not the loader's."""
        off, self._off = self._off, True
        try:
            with torch._C.DisableTorchFunctionSubclass():  # parameters of vLLM's have one, in Python
                yield
        finally:
            self._off = off

    def offer(self) -> None:
        """Has what is noted loaded early, if it is enough and nothing speaks against it."""
        if self._size < EARLY or self._early is None:
            return
        self._size = 0
        if self._works or self._alive() > _KEPT:
            return
        try:
            with self.paused():
                self._noted = self._early(self._noted)
            self._offered = True
        except BaseException as error:
            self.failed = error
            raise

    def load(self) -> None:
        """Loads what is noted."""
        if self._alive() > _KEPT:
            self._refuse()  # before anything is loaded in vain
        noted, self._noted = self._noted, []
        if noted or self._offered:
            self.began, self._offered = True, False
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
        if view.dtype is not one.seen.dtype:  # other numbers of the same bytes
            raise Unplannable(one.called, f"a view of it as {view.dtype}")
        return self._make(one.of, view, dtype, one.device)

    def _make(self, *arguments: Any) -> _StandIn:
        made = _StandIn(*arguments)
        self._made.append(weakref.ref(made))
        return made

    def _note(self, target: torch.Tensor, one: _StandIn) -> torch.Tensor:
        view = one.seen
        # A tensor of the meta device is processed by what made it so, when it is complete;
        # a cast on the way must be the one that the copy makes anyway.
        if target.device.type == "meta" or target.shape != view.shape or one.dtype not in (view.dtype, target.dtype):
            what = f"{one.dtype} {list(view.shape)} to {target.dtype} {list(target.shape)} on {target.device}"
            raise Unplannable(one.called, f"copy_ of {what}")
        if target.numel():
            memory, low, high = reach(target)
            if not memory:
                raise Unplannable(one.called, f"copy_ to a {type(target).__name__} without memory of its own")
            other = self._held(memory, low, high)
            if other is not None:
                raise Unplannable(one.called, f"copy_ to where {other} goes")
            if memory in self._reads:
                self._other("a copy to where it read")
            insort(self._ranges[memory], (low, high, one.called))
            self._noted.append(Copy(one.of, int(view.storage_offset()), tuple(view.shape), view.stride(), view.dtype, target))
            self._size += high - low
        return target

    def _other(self, what: str) -> None:
        # What may come out otherwise when it runs again.
        self.impure = self.impure or what
        self._works = True

    def _worked(self, func: Any, args: Any, kwargs: Any) -> None:
        # An operation that is no view, on tensors with data.
        one = args[0] if args and not kwargs and isinstance(args[0], torch.Tensor) else None
        if one is not None and func in _ZEROES and (len(args) == 1 or (len(args) == 2 and type(args[1]) in (int, float) and args[1] == 0)):
            if one.numel() and (self.began or one.untyped_storage().data_ptr() in self._reads):
                self._other(str(func))  # before that vLLM sets to zero what pads a vocabulary
            elif one.numel():
                self._zeros.add(one.untyped_storage().data_ptr())
        elif one is not None and func is _ITEM and self._constant(one):
            pass  # vLLM looks up by expert where an expert is
        else:
            written = list(_tensors((args, kwargs)))
            if not written or any(tensor.numel() for tensor in written) or not str(func.overloadpacket).endswith("_"):
                self._other(str(func))
        if self._ranges:
            self._on_others(func, args, kwargs)

    def _constant(self, tensor: torch.Tensor) -> bool:
        # Whether an element that it reads was there before it ran.
        memory = tensor.untyped_storage().data_ptr()
        if tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta" or memory in self._zeros:
            return False
        self._reads.add(memory)
        return True

    def _on_others(self, func: Any, args: Any, kwargs: Any) -> None:
        # An operation on tensors with data: none of them may be one that is still to come.
        for tensor in _tensors((args, kwargs)):
            if tensor.device.type == "meta" or not tensor.numel():
                continue
            other = self._held(*reach(tensor))
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
            if _VIEWS.get(id(func)):
                return self._viewed(one, func(one.seen, *args[1:]))
        elif func is _COPY and type(args[1]) is _StandIn:
            return self._note(one, args[1])
        elif _VIEWS.get(id(func)) and isinstance(one, torch.Tensor):
            return func(*args)
    kwargs = kwargs or {}
    stands = [found for found in _tensors((args, kwargs)) if isinstance(found, _StandIn)]
    if stands:
        return self._on_stand_in(func, args, kwargs, stands)
    if not _is_view(func):
        self._worked(func, args, kwargs)
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


# By the identity of an operation, whose hash is a call of Python's. They are kept, so that
# no other one gets the identity.
# Those that give other numbers of the same bytes are none here.
_VIEWS: dict[int, bool] = {id(_aten._conj.default): False, id(_aten._neg_view.default): False}
_OPERATIONS: list[Any] = []


def _is_view(func: Any) -> bool:
    # Whether all that it returns are views, and it writes nothing.
    known = _VIEWS.get(id(func))
    if known is None:
        schema = func._schema
        aliases = [found.alias_info for found in (*schema.returns, *schema.arguments)]
        returns = [found.alias_info for found in schema.returns]
        known = bool(returns) and all(returns) and not any(alias is not None and alias.is_write for alias in aliases)
        _VIEWS[id(func)] = known
        _OPERATIONS.append(func)
    return known


def _only_casts(one: _StandIn, kwargs: Any) -> bool:
    device = kwargs.get("device")
    return set(kwargs) <= {"dtype", "device", "non_blocking"} and (device is None or torch.device(device) == one.device)


class Opened:
    """A source that a model's loader is to be run on.

    file: None for a delta. sheet: the table of the file. at: the positions of the tensors
    that the loader is given, None for all. small: those of at most one element, with
    their data. device: where they land.
    """

    def __init__(self, file: Any, device: torch.device, tensors: list[Stored] | None = None) -> None:
        self.file, self.device = file, device
        self.at: list[int] | None = None
        self.small: dict[str, torch.Tensor] = {}
        self.sheet: Any = None
        self._tensors = tensors

    @property
    def tensors(self) -> list[Stored]:
        """What the loader is given."""
        if self._tensors is None:
            rows = self.sheet.rows
            self._tensors = [Stored(self.file, at, *rows[at]) for at in (range(len(rows)) if self.at is None else self.at)]
        return self._tensors


def opened(
    files: contextlib.ExitStack,
    where: Any,
    device: str,
    chosen: Mapping[str, Any],
    *,
    wanted: Callable[[str], bool] | None = None,
    unused: Callable[[str], bool] | None = None,
    index: str | None = None,
    opening: Opening | None = None,
) -> Opened:
    """Opens what `weights` would read.

    files: closes the file when its tensors are no longer wanted. wanted: None for all.
    opening: may have opened it already. The other arguments, and what is raised, are those
    of `weights`.
    """
    import overwire

    from . import absent, complete

    there = None if opening is None else opening.take(where, index, device)
    if there is not None:
        sheet, missing = there
        files.enter_context(sheet.file)
    else:
        file = files.enter_context(overwire.safe_open(where, framework="pt", device=device, storage_options=chosen.get("storage_options")))
        sheet = Sheet(file)
        missing = absent(index, where, {row[0] for row in sheet.rows})
    complete(index, missing, wanted)
    on = torch.device(device)
    if on.type == "cuda" and on.index is None:
        on = torch.device("cuda", torch.cuda.current_device())
    source = Opened(sheet.file, on)
    source.sheet = sheet
    if wanted is not None or unused is not None:
        every = [at for at, row in enumerate(sheet.rows) if wanted is None or wanted(row[0])]
        source.at = every if unused is None else [at for at in every if not unused(sheet.rows[at][0])] or every
    given = None if source.at is None else set(source.at)
    source.small = sheet.file.get_tensors([sheet.rows[at][0] for at in sheet.small() if given is None or at in given])
    return source


def stand_ins(recorder: Recorder, source: Opened) -> Iterator[tuple[str, torch.Tensor]]:
    """What `weights` yields, with stand-ins for tensors of more than one element."""
    from ..plumbing import torch_dtype

    dtypes = {dtype: torch_dtype(dtype) for dtype in {one.dtype for one in source.tensors}}
    for one in source.tensors:
        recorder.offer()
        if one.name in source.small:
            recorder.impure = recorder.impure or f"{one.name}, whose data it was given"
            yield one.name, source.small[one.name]
            continue
        dtype = dtypes[one.dtype]
        if dtype is None:
            raise Unplannable(one.name, f"its dtype {one.dtype}, which torch lacks,")
        yield one.name, recorder.stand_in(one, dtype, source.device)
