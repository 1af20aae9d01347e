"""Records which bytes of a checkpoint a model's own loader copies to which parameters, without reading the bytes.

A model's `load_weights` runs once on stand-ins: tensors on the meta device, with shape and dtype but without memory.
Each `copy_` of a view of a stand-in into a parameter is noted instead of executed. Then the engine loads exactly those
bytes directly into the parameter. An operation that needs the data of a stand-in, or of a parameter that is not loaded
yet, raises `Unplannable`.

torch's dispatcher has an unused key for test modes, `TESTING_ONLY_GenericMode`, which precedes all other keys. A
recording thread enables it for itself. torch then passes each operation to the recorder first. Views and composite
operations skip the recorder and are not slower than usual. Real tensors behave as usual. While a thread records,
stand-ins report the device of the tensors that they represent.

Noted copies are loaded while the loader still runs, as long as it only copies. If the loader must run again on real
tensors, it first repeats the steps that it took on stand-ins. So it overwrites all loaded data before it can read them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..._compat_api import new_lock
from ..._undo import pass_error_to
from .copies import Copy, Destinations, Stored, memory_range
from .open_files import Opening, Sheet

_aten = torch.ops.aten
_COPY = _aten.copy_.default
_ITEM = _aten._local_scalar_dense.default

# The options that a copy of a stand-in may request, other than dtype and device.
_USUAL = {"layout": (None, torch.strided), "pin_memory": (None, False), "memory_format": (None, torch.preserve_format)}
_ZEROES = frozenset((_aten.fill_.Scalar, _aten.zero_.default))

_KEY = "TESTING_ONLY_GenericMode"

_weak_reference: Any = StorageWeakRef

# Views that skip the recorder. A view of a stand-in shares the stand-in's memory, and a view of a real tensor
# neither reads nor writes.
_UNSEEN = (
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select.int", "slice.Tensor", "split.Tensor",
    "split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "t", "transpose.int", "unbind.int", "unfold",
    "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
)  # fmt: skip

# Composite operations that torch runs before it reads data for other libraries.
_READS = (_aten.resolve_conj.default, _aten.resolve_neg.default)

# The number of stand-ins that may be in use at the same time.
_KEPT = 16

#: Copies of at least this many bytes are loaded while the loader still runs.
EARLY = 64 << 20


class Unplannable(Exception):
    """Raised if a model cannot be loaded by slices, because its loader runs `operation` on the tensor `name`."""

    def __init__(self, name: str, operation: str) -> None:
        super().__init__(f"{operation} needs the data of {name}")
        self.name, self.operation = name, operation


class _Stored(NamedTuple):
    # The tensor that a stand-in represents. dtype: the torch dtype of the stored tensor. device: the device that the
    # stand-in reports. memory: a weak reference to the stand-in's storage. It shows whether a view still exists, and
    # keeps the identity of the storage unique.

    stored: Stored
    dtype: torch.dtype
    device: torch.device
    memory: Any


class Recorder:
    """A context that records copies of stand-ins into real tensors, on this thread only.

    load: a function that loads the copies that were recorded since its last call. It gets a list of `Copy` and runs
    with the recorder off. early: a function that starts to load some copies, and returns the copies that it does not
    load.
    """

    def __init__(
        self, load: Callable[[list[Copy]], None], early: Callable[[list[Copy]], list[Copy]] | None = None
    ) -> None:
        self._load, self._early = load, early
        self._noted: list[Copy] = []
        self._size = 0  # bytes noted since `early` was last called
        self._destinations = Destinations()  # the destinations of the recorded copies
        self._entered = contextlib.ExitStack()
        self._of: dict[int, _Stored] = {}  # keyed by the identity of the stand-in's storage
        self._living: list[_Stored] = []  # the stand-ins that existed at the last check, and those made since then
        self._offered = False
        #: Whether all copies were recorded and the load of the remaining ones has begun.
        self.began = False
        #: The error of a load that `offer_early` began.
        self.failed: BaseException | None = None
        #: The first operation of the loader other than copying, or None.
        self.impure: str | None = None
        # Addresses of storages of integer tensors from which the loader read elements.
        self._reads: set[int] = set()
        # Addresses of storages that the loader first set to zero or to the data of a small tensor.
        self._zeros: set[int] = set()
        self._given: set[int] = set()  # addresses of the storages of these small tensors
        # Whether the loader ran operations other than copies. Their results may depend on tensors that are loaded
        # early.
        self._works = False

    def __enter__(self) -> Recorder:
        try:
            key, guard = _recorder_keys()[0], torch._C._IncludeDispatchKeyGuard
        except Exception as error:  # nothing has changed yet
            raise Unplannable("its tensors", f"this torch, which cannot record operations ({error}),") from error
        outer = getattr(_here, "recorder", None)
        self._entered.callback(setattr, _here, "recorder", outer)
        _here.recorder = self
        self._entered.enter_context(_places)
        self._entered.enter_context(guard(key))
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.close()

    def load_rest(self) -> None:
        """Loads the remaining copies. Raises Unplannable if a stand-in is still referenced."""
        self.load_noted()
        if self._count_stand_ins():
            self._refuse_kept_stand_ins()

    def _count_stand_ins(self) -> int:
        self._living = [one for one in self._living if not one.memory.expired()]
        return len(self._living)

    def _refuse_kept_stand_ins(self) -> None:
        gc.collect()
        for one in self._living:
            if not one.memory.expired():
                raise Unplannable(one.stored.name, "its loader, which keeps a reference to it,")

    def make_stand_in(self, of: Stored, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a stand-in for the model's loader."""
        with torch._C._ExcludeDispatchKeyGuard(_recorder_keys()[1]):
            return self._make_stand_in(of, dtype, dtype, device)

    def _make_stand_in(
        self, stored: Stored, stored_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        tensor = torch.empty(stored.shape, dtype=dtype, device="meta")
        of = _Stored(stored, stored_dtype, device, _weak_reference(tensor.untyped_storage()))
        self._of[of.memory.cdata] = of
        self._living.append(of)
        return tensor

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Returns a context for operations that do not belong to the loader."""
        # vLLM's parameters have a __torch_function__ in Python, which is slow.
        with torch._C._ExcludeDispatchKeyGuard(_recorder_keys()[1]), torch._C.DisableTorchFunctionSubclass():
            yield

    def offer_early(self) -> None:
        """Starts to load the noted copies if they are large enough and the loader has only copied."""
        if self._size < EARLY or self._early is None:
            return
        self._size = 0
        if self._works or self._count_stand_ins() > _KEPT:
            return
        with pass_error_to(setattr, self, "failed"):
            with self.pause():
                self._noted = self._early(self._noted)
            self._offered = True

    def load_noted(self) -> None:
        """Loads the noted copies."""
        if self._count_stand_ins() > _KEPT:
            self._refuse_kept_stand_ins()  # raises before it loads anything
        notes, self._noted = self._noted, []
        if notes or self._offered:
            self.began, self._offered = True, False
            with self.pause():
                self._load(notes)
        self._destinations.forget_all()

    def run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation of the loader with the recorder off. Returns its result."""
        stands = [(tensor, of) for tensor in _tensors_in((args, kwargs)) if (of := self._stored_of(tensor)) is not None]
        if stands:
            return self._run_on_stand_in(func, args, kwargs, stands)
        if not _is_view(func):
            self._follow_operation(func, args, kwargs)
        return func(*args, **kwargs)

    def _stored_of(self, tensor: Any) -> _Stored | None:
        # Returns the tensor that a stand-in represents, or None for a real tensor.
        return self._of.get(tensor.untyped_storage()._cdata) if _is_meta(tensor) else None

    def _run_on_stand_in(self, func: Any, args: Any, kwargs: Any, stands: list[tuple[torch.Tensor, _Stored]]) -> Any:
        one, of = stands[0]
        if len(stands) == 1 and func is _COPY and args[1] is one:
            return self._note_copy(args[0], one, of)
        if len(stands) == 1 and args and args[0] is one:
            if _is_view(func):
                views = func(*args, **kwargs)
                if any(view.dtype is not one.dtype for view in _tensors_in(views)):
                    raise Unplannable(of.stored.name, f"{func} to another dtype")
                return views
            if func is _aten.clone.default and one.is_contiguous():
                return one.view(one.shape)  # nothing can write to a stand-in, so a view replaces a copy
            usual = all(value in _USUAL.get(key, (value,)) for key, value in kwargs.items())
            if func is _aten._to_copy.default and usual:
                device = torch.device(kwargs.get("device") or of.device)
                return self._cast_stand_in(one, of, kwargs.get("dtype") or one.dtype, device)
        raise Unplannable(of.stored.name, str(func))

    def _cast_stand_in(self, one: torch.Tensor, of: _Stored, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if dtype is not one.dtype is not of.dtype:
            raise Unplannable(of.stored.name, f"a cast of it to {one.dtype} and then {dtype}")
        other = self._make_stand_in(of.stored, of.dtype, dtype, device)
        return other.as_strided(one.shape, one.stride(), one.storage_offset())

    def _note_copy(self, target: torch.Tensor, one: torch.Tensor, of: _Stored) -> torch.Tensor:
        # Refuses copies to a meta tensor, because an engine would process that tensor as soon as it is complete. If the
        # stand-in was cast, it must have been cast to the target's dtype.
        name = of.stored.name
        if _is_meta(target) or target.shape != one.shape or one.dtype not in (of.dtype, target.dtype):
            what = f"{one.dtype} {list(one.shape)} to {target.dtype} {list(target.shape)} on {target.device}"
            raise Unplannable(name, f"copy_ of {what}")
        if target.numel():
            memory, low, high = memory_range(target)
            if not memory:
                raise Unplannable(name, f"copy_ to a {type(target).__name__} without memory")
            other = self._destinations.note_copy(target, (memory, low, high), name)
            if other is not None:
                raise Unplannable(name, f"copy_ to the destination of {other}")
            if memory in self._reads:
                self._note_impure("a copy to memory that it has read")
            offset, shape = int(one.storage_offset()), tuple(one.shape)
            self._noted.append(Copy(of.stored, offset, shape, one.stride(), of.dtype, target))
            self._size += high - low
        return target

    def _note_impure(self, what: str) -> None:
        # Notes an operation that may have a different result when it runs again.
        self.impure = self.impure or what
        self._works = True

    def _follow_operation(self, func: Any, args: Any, kwargs: Any) -> None:
        # Checks an operation on real tensors that is not a view.
        one = args[0] if args and not kwargs and isinstance(args[0], torch.Tensor) else None
        is_zero = len(args) == 1 or (len(args) == 2 and type(args[1]) in (int, float) and args[1] == 0)
        if one is not None and func in _ZEROES and is_zero:
            if one.numel() and (self.began or one.untyped_storage().data_ptr() in self._reads):
                self._note_impure(str(func))
            elif one.numel():  # before the load, vLLM zeroes the padding of a vocabulary
                self._zeros.add(one.untyped_storage().data_ptr())
        elif one is not None and func is _ITEM and self._note_read(one):
            pass  # vLLM reads the position of each expert
        elif one is not None and func is _COPY and self._is_small_given(args[1]):
            memory = one.untyped_storage().data_ptr()
            if memory in self._reads:
                self._note_impure("a copy to memory that it has read")
            self._zeros.add(memory)
        else:
            operands = list(_tensors_in((args, kwargs)))
            if not operands or any(tensor.numel() for tensor in operands) or not str(func.overloadpacket).endswith("_"):
                self._note_impure(str(func))
        if self._destinations:
            self._refuse_pending(func, args, kwargs)

    def _note_read(self, tensor: torch.Tensor) -> bool:
        # Returns whether a read of this tensor may return a value from before the loader ran. If so, notes the tensor's
        # storage.
        memory = tensor.untyped_storage().data_ptr()
        if tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta" or memory in self._zeros:
            return False
        self._reads.add(memory)
        return True

    def _is_small_given(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self._given

    def give_small(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Notes that the model's loader gets a small tensor with its data, and returns the tensor."""
        self.impure = self.impure or f"the data of {name}, which it was given"
        self._given.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _refuse_pending(self, func: Any, args: Any, kwargs: Any) -> None:
        # Raises Unplannable if an operation uses a real tensor that is not loaded yet.
        for tensor in _tensors_in((args, kwargs)):
            if tensor.device.type == "meta" or not tensor.numel():
                continue
            other = self._destinations.name_at(*memory_range(tensor))
            if other is not None:
                raise Unplannable(other, f"{func} on its destination")


# The recorder that this thread has entered.
_here = threading.local()

_is_meta = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]


class _DeviceAnswers:
    # A context that several threads may enter at the same time. Inside it, stand-ins report the device of the tensors
    # that they represent, because loaders may depend on the device.

    def __init__(self) -> None:
        self._lock, self._count = new_lock(), 0
        self._before: dict[str, Any] = {}  # attributes of torch.Tensor that are replaced
        types = {"is_meta": "meta", "is_cpu": "cpu", "is_cuda": "cuda"}
        answers = {
            name: functools.partial(lambda kind, device: device.type == kind, kind) for name, kind in types.items()
        }
        self._answers: dict[str, Any] = {"device": lambda device: device, **answers}

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._before = {name: vars(torch.Tensor)[name] for name in self._answers if name in vars(torch.Tensor)}
                for name, answer in self._answers.items():
                    setattr(torch.Tensor, name, _property_that_answers(getattr(torch.Tensor, name), answer))

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                for name in self._answers:
                    delattr(torch.Tensor, name)
                for name, value in self._before.items():
                    setattr(torch.Tensor, name, value)


_places = _DeviceAnswers()


def _property_that_answers(own: Any, answer: Callable[[torch.device], Any]) -> property:
    def look_up(tensor: torch.Tensor) -> Any:
        recorder = getattr(_here, "recorder", None) if _is_meta(tensor) else None
        of = None if recorder is None else recorder._stored_of(tensor)
        return own.__get__(tensor) if of is None else answer(of.device)

    return property(look_up)


def _intercept_operation(func: Any, *args: Any, **kwargs: Any) -> Any:
    # torch calls this function for the operations of a recording thread.
    recorder: Recorder = _here.recorder
    if func is _COPY and not kwargs:  # the most frequent case
        target, one = args[:2]
        if (of := recorder._stored_of(one)) is not None and recorder._stored_of(target) is None:
            return recorder._note_copy(target, one, of)
    with torch._C._ExcludeDispatchKeyGuard(_recorder_keys()[1]):
        return recorder.run_operation(func, args, kwargs)


@functools.cache
def _recorder_keys() -> tuple[Any, Any, Any]:
    """Returns the recorder's dispatch key and a set with only this key. The first call registers the recorder with
    torch."""
    with _registering:
        return _register_keys()


_registering = new_lock()


@functools.cache
def _register_keys() -> tuple[Any, Any, Any]:
    library: Any = torch.library.Library
    every, aten = library("_", "IMPL"), library("aten", "IMPL")
    every.fallback(_intercept_operation, _KEY)
    whole = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    parts = {name.removeprefix("aten::") for name in whole if name.startswith("aten::")}
    for name in sorted(parts.union(_UNSEEN).difference(func._schema.name.removeprefix("aten::") for func in _READS)):
        aten.m.impl(name, _KEY, torch.library.fallthrough_kernel)
    key = torch._C._dispatch_key_parse(_KEY)
    return key, torch._C.DispatchKeySet(key), (every, aten)


def _tensors_in(tree: Any) -> Iterator[Any]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors_in(value)


# Maps the id of an operation to whether it is a view. The keys are ids because hashing an operation is a slow Python
# call. `_OPERATIONS` keeps the operations alive, so that ids stay unique. Operations that interpret the same bytes as
# other numbers do not count as views.
_VIEWS: dict[int, bool] = {id(func): False for func in (_aten._conj.default, _aten._neg_view.default, *_READS)}
_OPERATIONS: list[Any] = []


def _is_view(func: Any) -> bool:
    # Returns whether an operation only returns views and writes nothing.
    is_view = _VIEWS.get(id(func))
    if is_view is None:
        schema = func._schema
        aliases = [argument.alias_info for argument in (*schema.returns, *schema.arguments)]
        returns = [argument.alias_info for argument in schema.returns]
        is_view = bool(returns) and all(returns) and not any(alias is not None and alias.is_write for alias in aliases)
        _VIEWS[id(func)] = is_view
        _OPERATIONS.append(func)
    return is_view


class Opened:
    """A source for a run of a model's loader.

    file: the open file, or None for a delta. sheet: the file's table. at: the positions of the tensors that the loader
    gets, or None for all. small: the tensors of at most `SMALL` elements among them, with their data.
    device: the device to which tensors are loaded.
    """

    def __init__(self, file: Any, device: torch.device, tensors: list[Stored] | None = None) -> None:
        self.file, self.device = file, device
        self.at: list[int] | None = None
        self.small: dict[str, torch.Tensor] = {}
        self.sheet: Any = None
        self._tensors = tensors

    @property
    def tensors(self) -> list[Stored]:
        """The tensors that the loader gets."""
        if self._tensors is None:
            rows = self.sheet.rows
            positions = range(len(rows)) if self.at is None else self.at
            self._tensors = [Stored(self.file, at, *rows[at]) for at in positions]
        return self._tensors


def open_source(
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
    """Opens the files that `iter_weights` would read.

    files: the stack that closes the file. wanted: as for `iter_weights`, or None for all names. opening: an `Opening`
    that may already have opened the file. The other arguments and the exceptions are those of `iter_weights`.
    """
    import overwire

    from .. import missing_names, refuse_missing

    there = None if opening is None else opening.take(where, index, device)
    if there is not None:
        sheet, missing = there
        files.enter_context(sheet.file)
    else:
        options: Any = {key: chosen.get(key) for key in ("storage_options", "host")}
        sheet = Sheet(files.enter_context(overwire.safe_open(where, framework="pt", device=device, **options)))
        missing = missing_names(index, where, {row[0] for row in sheet.rows})
    refuse_missing(index, missing, wanted)
    on = torch.device(device)
    if on.type == "cuda" and on.index is None:
        on = torch.device("cuda", torch.cuda.current_device())
    source = Opened(sheet.file, on)
    source.sheet = sheet
    if wanted is not None or unused is not None:
        every = [at for at, row in enumerate(sheet.rows) if wanted is None or wanted(row[0])]
        source.at = every if unused is None else [at for at in every if not unused(sheet.rows[at][0])] or every
    small = sheet.small_positions()
    positions = set(small if source.at is None else source.at)
    source.small = sheet.file.get_tensors([sheet.rows[at][0] for at in small if at in positions])
    return source


def iter_stand_ins(recorder: Recorder, source: Opened) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and tensors like `iter_weights`, but with stand-ins for all tensors except small ones."""
    from ..._compat_api import torch_dtype

    dtypes = {dtype: torch_dtype(dtype) for dtype in {one.dtype for one in source.tensors}}
    for one in source.tensors:
        recorder.offer_early()
        if one.name in source.small:
            yield one.name, recorder.give_small(one.name, source.small[one.name])
            continue
        dtype = dtypes[one.dtype]
        if dtype is None:
            raise Unplannable(one.name, f"its dtype {one.dtype}, which torch lacks,")
        yield one.name, recorder.make_stand_in(one, dtype, source.device)
