"""Puts tensors to sleep: compresses them into host memory, frees their own memory, and restores them."""

from __future__ import annotations

import contextlib
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _verbs
from .._engine import HandleOwner, forked
from .._imports import skip_at_exit
from .._locks import new_lock
from .._undo import after_error
from ..errors import ArgumentError, DeadlineError, ForkedError, NotSupportedError, OutOfMemoryError
from ..frameworks.choose import check_device, frame_for, frame_of
from ..frameworks.frame import overlaps_itself
from ..jobs import Job, check_wait, heed, log, time_limit
from ..model.opened import Model
from ..model.options import check_values, parse_size
from ..model.storageoptions import StorageOptions
from ..paths import is_remote, local_file
from ..progress import ProgressLike, Watcher, watch
from .digest import _digests_of
from .into import ALL, place_of
from .save import refuse_other_format, save_bytes

if TYPE_CHECKING:
    import torch

    from .._requests import PrepareRequest, SleepRequest
    from ..model.options import DeviceLike


class _Sleeper(NamedTuple):
    # One tensor: a view that keeps its storage alive.
    name: str
    tensor: Any
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    dense: Any  # the tensor, or a dense copy of it, which is read


class Asleep(HandleOwner):
    """Tensors that sleep; see `sleep`. The object is a context manager that ends with `wake` and `close`.

    Threads may share it. Only one call runs at a time, and other calls wait for it.
    """

    __module__ = "overwire"

    def __init__(self) -> None:
        #: Bytes of the tensors. Shared memory is counted once.
        self.nbytes: int = 0
        #: Bytes of host memory that the sleeping tensors take, or 0 after this memory was freed.
        self.stored: int = 0
        #: Bytes of the host store that the sleeping tensors take, and other processes share, or 0 when they are not
        #: used.
        self.shared: int = 0
        #: The freed bytes of the tensors' own memory.
        self.released: int = 0
        self._models: dict[str, Model] = {}
        self._wakes: dict[str, list[_Sleeper]] = {}
        self._storages: list[tuple[Any, int]] = []  # freed storages, and their sizes
        self._lock = new_lock()
        self._busy = False

    def wake(self, *, progress: ProgressLike = None, timeout: float | None = None) -> None:
        """Restores every tensor in its own memory, bit for bit, compares every checksum, and frees the host memory.
        On a GPU, work that is queued on torch's current stream after this call may use the tensors.

        A second call does nothing. progress: as for `load_file`. timeout: seconds after which DeadlineError is raised.

        Raises OutOfMemoryError if the tensors' memory cannot be allocated, CorruptError if stored bytes have changed,
        ArgumentError after `close` and in a signal handler that interrupts another call, and the errors of `load_file`.
        After an error or Ctrl-C the tensors' values are undefined, but `wake` can be called again.
        """
        if not self._wakes:
            return
        if forked():
            raise ForkedError("overwire: wake: the engine cannot run in a forked child")
        end, watcher = time_limit(timeout), watch(progress, "load")
        with self._one_at_a_time("wake", end):
            if self._wakes:
                self._wake_tensors(watcher, end)

    def _wake_tensors(self, watcher: Watcher | None, end: float | None) -> None:
        if not self._models:
            raise ArgumentError("overwire: wake: close() has freed the stored bytes")
        import torch

        from ..frameworks.memory import check_memory

        frame_for("torch")  # refuses torch's fake tensors
        self._take_memory()
        for one in (one for sleepers in self._wakes.values() for one in sleepers):
            check_memory(one.tensor, f"overwire: wake: {one.name!r}", one.name)
        copies: list[tuple[Any, Any]] = []
        with contextlib.ExitStack() as stack:
            jobs = []
            for device, sleepers in self._wakes.items():
                model, requests = self._models[device], []
                for one in sleepers:
                    into = one.tensor
                    if one.dense is not one.tensor:
                        into = torch.empty(one.tensor.shape, dtype=one.tensor.dtype, device=device)
                        copies.append((one.tensor, into))
                    requests.append((model.places[one.name], into.data_ptr(), *ALL))
                jobs.append(stack.enter_context(model.start(requests, watcher, end=end)))
                watcher = None
            for job in jobs:
                job.take()
        with torch.no_grad():
            for tensor, dense in copies:
                _without_expansion(tensor).copy_(_without_expansion(dense, tensor))
        self._storages, self._wakes = [], {}
        self._give_up()

    def close(self) -> None:
        """Frees the host memory. Tensors that still sleep are lost: freed memory stays empty, and memory that was not
        freed keeps its values. A second call does nothing. Raises ArgumentError in a signal handler that interrupts
        `wake`."""
        if forked():  # a thread of the parent may have held the lock
            self._give_up()
            return
        with self._one_at_a_time("close", None):
            self._give_up()

    def _give_up(self) -> None:
        models, self._models, self.stored, self.shared = self._models, {}, 0, 0
        for model in models.values():
            model.close()

    @contextlib.contextmanager
    def _one_at_a_time(self, verb: str, end: float | None) -> Iterator[None]:
        # The lock does not stop a signal handler of the same thread.
        if not self._lock.acquire(timeout=-1 if end is None else max(0.0, end - time.monotonic())):
            raise DeadlineError(f"overwire: {verb}: another thread still uses the tensors after the timeout")
        try:
            if self._busy:
                raise ArgumentError(f"overwire: {verb}: a signal handler called it while it interrupted another call")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
        finally:
            self._lock.release()

    def _add_device(self, device: str, stored: list[_Sleeper], job: Job, again: Callable[[], Job]) -> None:
        try:
            result = job.result()
        except OutOfMemoryError as error:
            if error.device in (None, "host"):
                raise
            from ..frameworks.torch import give_back

            give_back(device)  # memory that torch only caches must not cause an error
            with again() as job:
                result = job.result()
        _, _, _, table, number = result
        assert table is not None
        self._models[device] = Model.held(f"sleeping tensors of {device}", table, number, device)
        report = job.report()
        self.nbytes += report["bytes"]
        self.stored += report["stored"]
        self.shared += report["shared"]
        self._wakes[device] = [one for one in _distinct_sleepers(stored) if one.nbytes]

    def _take_memory(self) -> None:
        # Allocates all storages. After an error, none is allocated.
        with contextlib.ExitStack() as undo:
            for storage, size in self._storages:
                if storage.nbytes() != size:
                    _resize_storage(storage, size)
                    undo.callback(_resize_storage, storage, 0)
            undo.pop_all()

    def _free_memory(self) -> None:
        # After an interrupt, the tensors are restored.
        with after_error(self.wake):
            for storage, size in self._storages:
                _resize_storage(storage, 0)
                self.released += size

    def __repr__(self) -> str:
        state = "closed" if self._wakes else "awake"
        if self._models:
            state = f"{self.stored} bytes stored, {self.shared} shared, {self.released} released"
        return f"Asleep({self.nbytes} bytes, {state})"

    def __enter__(self) -> Asleep:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.wake()
        finally:
            if not self._wakes:
                self.close()

    @skip_at_exit
    def __del__(self) -> None:
        if getattr(self, "_models", None):
            if self.released and not forked():
                warnings.warn(f"{self!r} is dropped: its tensors stay empty", ResourceWarning, stacklevel=2)
            self.close()


def sleep(
    tensors: Mapping[str, torch.Tensor] | torch.nn.Module,
    *,
    max_memory: int | str | None = None,
    to_file: str | PathLike[str] | None = None,
    host: bool = False,
    release: bool = True,
    progress: ProgressLike = None,
    timeout: float | None = None,
    storage_options: StorageOptions | None = None,
) -> Asleep:
    """Compresses torch tensors into host memory without loss and frees their own memory, until `Asleep.wake` restores
    them.

        asleep = ow.sleep(model)  # the GPU's memory is free
        ...
        asleep.wake()  # the same parameters, the same bytes

    A GPU encodes its tensors in its own memory, and copies only the result to pinned memory (for bf16 about two thirds
    of the size). The host encodes its own tensors. The pinned memory is kept for later sleeps, until `empty_cache`.

    tensors: a module, for all its parameters and buffers; or tensors by name, such as parts of a module or optimizer
        state. Tied tensors and views of other tensors are stored once. If the tensors are on several devices, each
        device has its own host memory.
    max_memory: the most host memory that the stored bytes may take ("12GB", int). Their size is estimated before the
        sleep.
    to_file: a path or URI where the tensors are also saved. If all tensors are on one device, a local file is made from
        the stored bytes. In other cases the file is written by `save_file`, and takes as long as such a save.
    host: whether to use the host store (`overwire host`). Tensors that this process has put there with
        `prepare_sleep(host=True)` are not compressed, and take no memory of this process. Tensors that have changed
        since then are compressed as usual. The store may end while the tensors sleep. If it fails before the sleep, a
        warning says so and all tensors are compressed. Cannot be combined with to_file.
    release: whether to free the tensors' memory. On a GPU, the memory returns to torch's allocator
        (`torch.cuda.empty_cache()` makes it available to other processes). Memory stays, with its values, if the
        tensors do not cover it completely or if it does not belong to torch (small loaded tensors, mapped files, shared
        memory). `Asleep.released` counts the freed bytes. False frees nothing. This is for callers that free or unmap
        the memory themselves, and map it at the same addresses before `wake`.
    progress: as for `load_file`.
    timeout: seconds after which the sleep is cancelled and raises DeadlineError.
    storage_options: as for `save_file`, if to_file is a URI.

    Do not use the tensors, or views of them, before `wake`. The addresses of the tensors may change, but captured CUDA
    graphs contain the old addresses: use release=False for these. Tensors that are not contiguous are first copied on
    their device.

    Returns an `Asleep`. Raises OutOfMemoryError for max_memory, for host memory, and for the GPU memory that encoding
    needs; ArgumentError; NotSupportedError for dtypes that files lack, and for tensor subclasses made of other tensors;
    IOFailure for to_file. After an error or Ctrl-C the tensors are unchanged.
    """
    frame_for("torch")
    tensors_by_name = _collect_tensors(tensors)
    groups: dict[str, list[_Sleeper]] = {}
    check_values(release=release, host=host, storage_options=storage_options)
    end = time_limit(timeout)
    if host and to_file is not None:
        raise ArgumentError("overwire: sleep: host and to_file cannot be combined")
    path = "" if to_file is None else local_file(to_file)
    refuse_other_format(path)
    places = {name: place_of(tensor) for name, tensor in tensors_by_name.items()}
    # The stored bytes of a single device make a local file. Other files are saved separately.
    uri, path = (path, "") if is_remote(path) or len(set(places.values())) != 1 else ("", path)
    if storage_options and not uri:
        raise ArgumentError("overwire: sleep: storage_options: only for a to_file that is a URI")
    for name, tensor in tensors_by_name.items():
        groups.setdefault(places[name], []).append(_describe_sleeper(name, tensor, bool(path)))
    asleep = Asleep()
    limit = most = parse_size(max_memory, "max_memory")
    watcher = watch(progress, "sleep")
    with contextlib.ExitStack() as stack:
        jobs: list[tuple[str, list[_Sleeper], Job, Callable[[], Job]]] = []
        for device, sleepers in groups.items():
            to_store = sleepers if path else _distinct_sleepers(sleepers)  # a file contains all names
            if host:
                to_store = [one for one in to_store if one.nbytes]
            digests = _digests_of([one.dense for one in to_store], end=end, keyed=True) if host else []
            again = partial(_start_sleep, device, to_store, limit, {"path": path, "digests": digests}, end)
            job = stack.enter_context(again(watcher))
            watcher = None
            if limit:  # one device after another, because they share the limit
                asleep._add_device(device, to_store, job, again)
                limit = max(1, most - asleep.stored)
            else:
                jobs.append((device, to_store, job, again))
        for each in jobs:
            asleep._add_device(*each)
    heed([], host)
    if uri:
        with after_error(asleep.close):
            descriptions = [(name, frame_of(tensor).describe(tensor)) for name, tensor in tensors_by_name.items()]
            save_bytes(descriptions, uri, {"format": "pt"}, storage_options=storage_options, end=end)
    if release:
        asleep._storages = _free_storages(groups)
        asleep._free_memory()
        words = "sleep: %d bytes released, %d bytes of host memory, %d bytes of the host store"
        log.info(words, asleep.released, asleep.stored, asleep.shared)
    return asleep


class SleepMemory(HandleOwner):
    """Host memory that is being allocated for sleeps; see `prepare_sleep`. Threads may share this object. If the object
    is dropped, the memory stays for the next sleep."""

    __module__ = "overwire"

    def __init__(self) -> None:
        #: Bytes that the tensors of all GPUs will probably take when they sleep. With host, the tensors' bytes.
        self.nbytes: int = 0
        self._jobs: dict[str, Job] = {}
        self._lock = new_lock()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds until the memory is ready, or a sleep has taken the part that was ready.
        Returns False after the timeout. Raises OutOfMemoryError and DeviceError; memory that is ready stays. With
        host, also raises ArgumentError if a tensor was changed meanwhile."""
        check_wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            jobs = list(self._jobs.values())
        return all(job.ended(None if end is None else max(0.0, end - time.monotonic())) for job in jobs)

    def close(self) -> None:
        """Ends the preparation and frees the host memory that is cached for sleeps of these GPUs, including memory from
        earlier sleeps. The memory of sleeping tensors is not freed. A second call does nothing."""
        with self._lock:
            jobs, self._jobs = self._jobs, {}
        if forked():
            return  # the jobs belong to the parent
        for device, job in jobs.items():
            _verbs.sleep_return(device)
            job.abandon()  # with host, the job reads the tensors until it ends

    def _add_device(self, device: str, request: PrepareRequest, numbers: bytes) -> None:
        job = Job(_verbs.sleep_prepare(request, numbers), "prepare")
        self._jobs[device] = job
        self.nbytes += job.report()["bytes"]

    def _keep_on_host(self, device: str, to_store: list[_Sleeper], limit: int) -> None:
        digests = _digests_of([one.dense for one in to_store], keyed=True)
        job = _start_sleep(device, to_store, limit, {"digests": digests, "keep": True}, None)
        job.keep_memory(to_store)
        self._jobs[device] = job
        self.nbytes += sum(one.nbytes for one in to_store)

    def __repr__(self) -> str:
        return f"SleepMemory({self.nbytes} bytes, {', '.join(self._jobs) or 'closed'})"

    def __enter__(self) -> SleepMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def prepare_sleep(
    tensors: Mapping[str, torch.Tensor] | torch.nn.Module | int | str,
    *,
    device: DeviceLike | None = None,
    max_memory: int | str | None = None,
    host: bool = False,
) -> SleepMemory:
    """Begins to allocate the pinned host memory that `sleep` will use for tensors on GPUs. The first sleep is then as
    fast as later ones. Pinning memory takes about a second for 10 GB.

        ow.prepare_sleep(model)  # returns immediately
        ...
        asleep = ow.sleep(model)

    tensors: as for `sleep`, or a number of bytes of host memory ("10GB", int), for `device`. The compressed size of
        tensors is estimated from samples, which are read before the call returns.
    device: the GPU, if `tensors` is a number of bytes. By default torch's current GPU.
    max_memory: as for `sleep`.
    host: whether to put the tensors into the host store instead, for `sleep(host=True)` in this process. Processes that
        put the same tensors there share them. The tensors are compressed in the background, so do not change them
        before `SleepMemory.wait` returns. They may also be on the host. `SleepMemory.close`, or dropping the object,
        ends this work.

    One thread works in the background, only while a core of the process is idle, and uses no GPU memory. A sleep that
    starts before the memory is complete uses the part that is ready, and allocates the rest at full speed. The memory
    stays until `SleepMemory.close` or `empty_cache`. Repeating the call allocates no further memory. Tensors on the
    host are ignored, because their sleeps use ordinary memory.

    Returns a `SleepMemory`, which you need not keep. Raises OutOfMemoryError, for max_memory or host memory, before it
    allocates anything, and the errors of `sleep`.
    """
    limit = parse_size(max_memory, "max_memory")
    memory = SleepMemory()
    check_values(host=host)
    if host and (device is not None or isinstance(tensors, (int, str))):
        raise ArgumentError("overwire: prepare_sleep: host: only for tensors")
    if isinstance(tensors, (int, str)):
        if (nbytes := parse_size(tensors, "tensors")) <= 0:
            raise ArgumentError(f"overwire: prepare_sleep: tensors {tensors!r}: expected 1 byte or more")
        where = check_device("cuda" if device is None else device, frame_for("torch"))
        if where == "cpu":
            return memory
        memory._add_device(where, {"device": where, "max_memory": limit, "bytes": nbytes}, b"")
        return memory
    if device is not None:
        raise ArgumentError("overwire: prepare_sleep: device: only for a number of bytes: leave it out for tensors")
    frame_for("torch")
    import torch

    groups: dict[str, list[_Sleeper]] = {}
    for name, tensor in _collect_tensors(tensors).items():
        place = place_of(tensor)
        if host or place != "cpu" and (tensor.layout != torch.strided or _fills_extent(tensor)):  # others are copied
            groups.setdefault(place, []).append(_describe_sleeper(name, tensor, False))
    for place, sleepers in groups.items():
        if not (to_store := [one for one in _distinct_sleepers(sleepers) if one.nbytes]):
            continue
        if host:
            memory._keep_on_host(place, to_store, max(1, limit - memory.nbytes) if limit else 0)
        else:
            request, numbers = _sleep_request(place, to_store, max(1, limit - memory.nbytes) if limit else 0)
            memory._add_device(place, {**request, "bytes": 0}, numbers)
    return memory


def _sleep_request(device: str, stored: list[_Sleeper], limit: int) -> tuple[SleepRequest, bytes]:
    request: SleepRequest = {
        "device": device, "max_memory": limit, "names": [one.name for one in stored],
        "dtypes": [one.dtype for one in stored], "shapes": [list(one.shape) for one in stored],
    }  # fmt: skip
    pairs = ((one.dense.data_ptr() if one.nbytes else 0, one.nbytes) for one in stored)
    numbers = array("q", chain.from_iterable(pairs)).tobytes()
    if device != "cpu":
        from ..frameworks.torch import await_writes

        await_writes(stored[0].dense)
    return request, numbers


def _start_sleep(
    device: str, stored: list[_Sleeper], limit: int, more: SleepRequest, end: float | None, watcher: Any = None
) -> Job:
    request, numbers = _sleep_request(device, stored, limit)
    request.update(more)
    return Job(_verbs.sleep(request, numbers), "sleep", watcher, end)


def _collect_tensors(tensors: Any) -> dict[str, Any]:
    import torch

    from ..frameworks.memory import check_shape

    if isinstance(tensors, torch.nn.Module):
        tensors_by_name: dict[str, Any] = dict(tensors.named_parameters(remove_duplicate=False))
        tensors_by_name.update(tensors.named_buffers(remove_duplicate=False))
    elif isinstance(tensors, Mapping):
        tensors_by_name = dict(tensors)
    else:
        raise ArgumentError(f"overwire: sleep: expected a module or a dict of tensors, got {type(tensors).__name__}")
    for name, tensor in tensors_by_name.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"overwire: sleep: expected tensors by name, got {name!r}: {type(tensor).__name__}")
        check_shape(tensor, f"overwire: sleep: {name!r}", name)
        if hasattr(tensor, "__tensor_flatten__"):
            text = f"is a {type(tensor).__name__}, which consists of other tensors: pass those"
            raise NotSupportedError(f"overwire: sleep: {name!r} {text}", tensor=name)
    return tensors_by_name


def _describe_sleeper(name: str, tensor: Any, whole: bool) -> _Sleeper:
    """Describes a tensor. whole: in its own shape and order, as for a file, instead of the order of its memory."""
    from ..frameworks.memory import check_memory
    from ..frameworks.torch import SAVED

    where = f"overwire: sleep: {name!r}"
    check_memory(tensor, where, name)
    view = tensor.detach()
    kind = SAVED.get(view.dtype)
    if kind is None or view.is_quantized:
        raise NotSupportedError(f"{where}: {view.dtype} is not supported: leave it out", tensor=name)
    if view.is_conj() or view.is_neg():
        raise NotSupportedError(f"{where}: a lazily conjugated or negated view: pass its base tensor", tensor=name)
    if view.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{where} is on {view.device}: expected the host or a CUDA GPU", tensor=name)
    dense = view
    if not view.is_contiguous():
        once = _without_expansion(view)
        if overlaps_itself(once.shape, once.stride()):
            raise NotSupportedError(f"{where}: its elements share memory in an irregular way", tensor=name)
        if not whole and _fills_extent(view):
            view = dense = view.as_strided((view.numel(),), (1,))
        else:
            dense = view.contiguous()
    shape = tuple(view.shape)
    if kind == "F4":
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    return _Sleeper(name, view, kind, shape, view.numel() * view.element_size(), dense)


def _distinct_sleepers(sleepers: list[_Sleeper]) -> list[_Sleeper]:
    # Leaves out tensors that are inside the memory of another tensor.
    low = [int(one.tensor.data_ptr()) if one.nbytes else 0 for one in sleepers]
    end, sleepers_once = 0, []
    for at in sorted(range(len(sleepers)), key=lambda at: (low[at], -sleepers[at].nbytes, at)):
        one = sleepers[at]
        if one.dense is not one.tensor:
            sleepers_once.append(at)
        elif low[at] + one.nbytes > end or not one.nbytes:
            sleepers_once.append(at)
            end = max(end, low[at] + one.nbytes)
    return [sleepers[at] for at in sorted(sleepers_once)]


def _free_storages(groups: Mapping[str, list[_Sleeper]]) -> list[tuple[Any, int]]:
    """Returns the storages that the tensors cover completely and that torch can free, with their sizes."""
    spans: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
    for sleepers in groups.values():
        for one in sleepers:
            storage = one.tensor.untyped_storage()
            if one.nbytes and _fills_extent(one.tensor):
                low = one.tensor.storage_offset() * one.tensor.element_size()
                spans.setdefault(storage.data_ptr(), (storage, []))[1].append((low, low + one.nbytes))
    out = []
    for storage, parts in spans.values():
        end = 0
        for low, high in sorted(parts):
            if low > end:
                break
            end = max(end, high)
        is_shared = storage.device.type == "cpu" and storage.is_shared()
        if end == storage.nbytes() and storage.resizable() and not is_shared:
            out.append((storage, end))
    return out


def _fills_extent(tensor: Any) -> bool:
    """Returns whether the elements lie in memory without gaps, in any order."""
    size = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1 and stride != size:
            return False
        size *= count
    return True


def _without_expansion(tensor: Any, like: Any = None) -> Any:
    """Returns a tensor with size 1 in the dimensions along which `like` (by default the tensor itself) was expanded."""
    like = tensor if like is None else like
    for dim, (stride, count) in enumerate(zip(like.stride(), like.shape, strict=True)):
        if not stride and count > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _resize_storage(storage: Any, size: int) -> None:
    from ..frameworks.torch import _errors_of

    if storage.device.type == "cpu":
        storage.resize_(size)
        return
    with _errors_of(str(storage.device), size):
        storage.resize_(size)
