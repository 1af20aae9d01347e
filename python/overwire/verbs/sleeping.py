"""Tensors that sleep: compressed in host memory while their own memory is free."""

from __future__ import annotations

import contextlib
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _verbs
from .._engine import HandleOwner, forked
from .._imports import skip_at_exit
from .._locks import new_lock
from ..errors import ArgumentError, DeadlineError, ForkedError, NotSupportedError, OutOfMemoryError
from ..frameworks.choose import check_device, frame_for, frame_of
from ..frameworks.frame import overlaps_itself
from ..jobs import Job, check_wait, log, time_limit
from ..model.opened import Model
from ..model.options import StorageOptions, check_values, parse_size
from ..paths import is_remote, local_file
from ..progress import ProgressLike, Watcher, watch
from .into import ALL, place_of
from .save import save_bytes

if TYPE_CHECKING:
    import torch

    from .._requests import PrepareRequest, SleepRequest
    from ..model.options import DeviceLike


class _Sleeper(NamedTuple):
    # One tensor: a view that keeps its storage, and where it is on the device.
    name: str
    tensor: Any
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    dense: Any  # what is read: the tensor, or a dense copy of it


class Asleep(HandleOwner):
    """Tensors that sleep: see `sleep`. A context manager that ends with `wake` and `close`.

    Threads may share it: one of them wakes the tensors, and calls of the others wait for it.
    """

    __module__ = "overwire"

    def __init__(self) -> None:
        #: Bytes of the tensors, each memory counted once.
        self.nbytes: int = 0
        #: Bytes of host memory that they take, 0 once it was given back.
        self.stored: int = 0
        #: Bytes of the tensors' own memory that were freed.
        self.released: int = 0
        self._models: dict[str, Model] = {}
        self._wakes: dict[str, list[_Sleeper]] = {}
        self._storages: list[tuple[Any, int]] = []  # what was freed, with its size
        self._lock = new_lock()
        self._busy = False

    def wake(self, *, progress: ProgressLike = None, timeout: float | None = None) -> None:
        """Puts every tensor back into its own memory, bit for bit, and gives the host
        memory back. Every checksum is compared. On a GPU the tensors may be used at once
        by what is queued on torch's current stream from now on.

        A second call does nothing; one beside another waits for it. progress: as for
        `load_file`. timeout: seconds after which DeadlineError is raised.

        Raises OutOfMemoryError where the tensors' memory is not to be had, CorruptError
        for stored bytes that have changed, ArgumentError after `close` and where a signal
        handler interrupts another call, and what `load_file` raises. After an error, or Ctrl-C,
        the tensors' values are undefined, the stored bytes stay, and `wake` can be called again.
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
            raise ArgumentError("overwire: wake: the stored bytes were given up by close()")
        import torch

        from ..frameworks.memory import check_memory

        frame_for("torch")  # which refuses torch's fakes
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
        """Gives the host memory back. Tensors that still sleep are lost: what was freed of
        them stays empty, and the rest keeps its values. A second call does nothing; one beside
        `wake` waits for it. ArgumentError where a signal handler interrupts `wake`."""
        if forked():  # perhaps while another thread of the parent had the lock
            self._give_up()
            return
        with self._one_at_a_time("close", None):
            self._give_up()

    def _give_up(self) -> None:
        models, self._models, self.stored = self._models, {}, 0
        for model in models.values():
            model.close()

    @contextlib.contextmanager
    def _one_at_a_time(self, verb: str, end: float | None) -> Iterator[None]:
        # One call at a time. The lock lets a signal handler of the same thread in.
        if not self._lock.acquire(timeout=-1 if end is None else max(0.0, end - time.monotonic())):
            raise DeadlineError(f"overwire: {verb}: another thread was not done with the tensors within the timeout")
        try:
            if self._busy:
                raise ArgumentError(f"overwire: {verb}: a signal handler interrupts another call of the same object")
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

            give_back(device)  # memory that torch only keeps is no reason to fail
            with again() as job:
                result = job.result()
        _, _, _, table, number = result
        assert table is not None
        self._models[device] = Model.held(f"sleeping tensors of {device}", table, number, device)
        report = job.report()
        self.nbytes += report["bytes"]
        self.stored += report["stored"]
        self._wakes[device] = [one for one in _distinct_sleepers(stored) if one.nbytes]

    def _take_memory(self) -> None:
        # All storages have their size, or none has.
        views: list[Any] = []
        try:
            for storage, size in self._storages:
                if storage.nbytes() != size:
                    _resize_storage(storage, size)
                    views.append(storage)
        except BaseException:
            for storage in views:
                _resize_storage(storage, 0)
            raise

    def _free_memory(self) -> None:
        # Whatever interrupts this, the tensors are as they were.
        try:
            for storage, size in self._storages:
                _resize_storage(storage, 0)
                self.released += size
        except BaseException:
            self.wake()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._wakes else "awake"
        if self._models:
            state = f"{self.stored} bytes stored, {self.released} released"
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
    release: bool = True,
    progress: ProgressLike = None,
    timeout: float | None = None,
    storage_options: StorageOptions | None = None,
) -> Asleep:
    """Compresses torch tensors into host memory without loss and frees their own memory,
    until `Asleep.wake` puts them back.

        asleep = ow.sleep(model)  # the GPU's memory is free
        ...
        asleep.wake()  # the same parameters, the same bytes

    A GPU encodes in its own memory and copies only what came of it, about two thirds of
    bf16 weights, to pinned memory; tensors of the host are encoded there. The pinned
    memory is kept for the next sleep, until `empty_cache`.

    tensors: a module, for all its parameters and buffers, or tensors by name: parts of a
        module, optimizer state. Tied tensors and views of one another are stored once.
        They may lie on several devices; each has its own memory on the host.
    max_memory: the most host memory that the stored bytes may take ("12GB", int). It is
        estimated from samples first.
    to_file: a path, or a URI that `save_file` writes: there appears a file of the tensors,
        too, for every load of overwire. A local file of tensors of one device is made of
        the stored bytes; any other as `save_file` makes it, which takes as long as there.
    release: free the tensors' memory, on a GPU to torch's allocator
        (`torch.cuda.empty_cache()` passes it on to other processes). What cannot be freed stays, and keeps its values:
        memory that the given tensors do not cover whole, or that is not torch's own
        (loaded small tensors, mapped files, shared memory). `Asleep.released` counts what
        was freed. False: nothing is; for callers that free or unmap it by other means and
        have it back at the same addresses before `wake`.
    progress: as for `load_file`.
    timeout: seconds after which the sleep is given up, DeadlineError. It ends soon after.
    storage_options: as for `save_file`, if to_file is a URI.

    Do not use the tensors before `wake`, nor views of them. Their addresses may be others
    afterwards: captured CUDA graphs hold the old ones, so use release=False for these.
    Tensors that are not contiguous are copied on their device first.

    Returns an `Asleep`. Raises, with the tensors as they were, OutOfMemoryError for
    max_memory or what the host has left, and for the GPU's memory to encode in; ArgumentError;
    NotSupportedError for dtypes that files lack and for tensor subclasses that are made of
    other tensors; IOFailure for to_file. Ctrl-C and DeadlineError leave them as they were, too.
    """
    frame_for("torch")
    tensors_by_name = _collect_tensors(tensors)
    groups: dict[str, list[_Sleeper]] = {}
    check_values(release=release, storage_options=storage_options)
    end = time_limit(timeout)
    path = "" if to_file is None else local_file(to_file)
    places = {name: place_of(tensor) for name, tensor in tensors_by_name.items()}
    # The stored bytes of one device are the file; else it is saved as others are.
    uri, path = (path, "") if is_remote(path) or len(set(places.values())) != 1 else ("", path)
    if storage_options and not uri:
        raise ArgumentError("overwire: sleep: storage_options go with a to_file that is a URI")
    for name, tensor in tensors_by_name.items():
        groups.setdefault(places[name], []).append(_describe_sleeper(name, tensor, bool(path)))
    asleep = Asleep()
    limit = most = parse_size(max_memory, "max_memory")
    watcher = watch(progress, "sleep")
    with contextlib.ExitStack() as stack:
        jobs: list[tuple[str, list[_Sleeper], Job, Callable[[], Job]]] = []
        for device, sleepers in groups.items():
            to_store = sleepers if path else _distinct_sleepers(sleepers)  # a file has all of them
            again = partial(_start_sleep, device, to_store, limit, path, end)
            job = stack.enter_context(again(watcher))
            watcher = None
            if limit:  # one after the other: each has what the others left
                asleep._add_device(device, to_store, job, again)
                limit = max(1, most - asleep.stored)
            else:
                jobs.append((device, to_store, job, again))
        for each in jobs:
            asleep._add_device(*each)
    if uri:
        _save_sleepers(tensors_by_name, uri, storage_options, end, asleep)
    if release:
        asleep._storages = _free_storages(groups)
        asleep._free_memory()
        log.info("sleep: %d bytes released, %d bytes of host memory", asleep.released, asleep.stored)
    return asleep


class SleepMemory(HandleOwner):
    """Host memory that is being made ready for sleeps: see `prepare_sleep`. Threads may
    share it. Dropping it changes nothing: the memory stays for the next sleep."""

    __module__ = "overwire"

    def __init__(self) -> None:
        #: Bytes that sleeps of the tensors are expected to take, on all GPUs.
        self.nbytes: int = 0
        self._jobs: dict[str, Job] = {}
        self._lock = new_lock()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds until the memory is ready, or a sleep has taken
        what there was of it. Returns False after the timeout.

        Raises OutOfMemoryError and DeviceError; what was made ready stays.
        """
        check_wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            jobs = list(self._jobs.values())
        return all(job.ended(None if end is None else max(0.0, end - time.monotonic())) for job in jobs)

    def close(self) -> None:
        """Ends the preparation and gives the GPUs' memory for sleeps back to the system,
        also what earlier sleeps have left there. Sleeping tensors keep theirs. A second
        call does nothing."""
        with self._lock:
            jobs, self._jobs = self._jobs, {}
        if forked():
            return  # the parent's
        for device, job in jobs.items():
            _verbs.sleep_return(device)
            job.free()

    def _add_device(self, device: str, request: PrepareRequest, numbers: bytes) -> None:
        job = Job(_verbs.sleep_prepare(request, numbers), "prepare")
        self._jobs[device] = job
        self.nbytes += job.report()["bytes"]

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
) -> SleepMemory:
    """Begins to make the host memory ready that `sleep` will take for tensors on GPUs, so
    that the first sleep is as fast as later ones: new pinned memory costs a second for
    10 GB and more.

        ow.prepare_sleep(model)  # returns at once
        ...
        asleep = ow.sleep(model)

    tensors: as for `sleep`; how much they will take is estimated from samples, which are
        read before this returns. Or the bytes of host memory ("10GB", int), for `device`.
    device: the GPU of these bytes; "cuda" if there is one.
    max_memory: as for `sleep`.

    One thread works in the background, only while a core of the process is unused, and
    takes no memory of a GPU. A sleep that comes before the end uses what is there, and
    has the rest made ready at full speed. The memory is kept until `SleepMemory.close` or
    `empty_cache`; the same call again takes no more. Tensors of the host need none: their
    sleeps use ordinary memory.

    Returns a `SleepMemory`, which need not be kept. Raises, before anything is taken,
    OutOfMemoryError for max_memory or what the host has available; else what `sleep` raises.
    """
    limit = parse_size(max_memory, "max_memory")
    memory = SleepMemory()
    if isinstance(tensors, (int, str)):
        if (nbytes := parse_size(tensors, "tensors")) <= 0:
            raise ArgumentError(f"overwire: prepare_sleep: {tensors!r} bytes")
        where = check_device("cuda" if device is None else device, frame_for("torch"))
        if where == "cpu":
            return memory
        memory._add_device(
            where, {"device": where, "max_memory": limit, "bytes": nbytes, "names": [], "dtypes": [], "shapes": []}, b""
        )
        return memory
    if device is not None:
        raise ArgumentError("overwire: prepare_sleep: device= goes with a number of bytes; tensors say where they are")
    frame_for("torch")
    import torch

    groups: dict[str, list[_Sleeper]] = {}
    for name, tensor in _collect_tensors(tensors).items():
        place = place_of(tensor)
        # a sleep copies the others first
        if place != "cpu" and (tensor.layout != torch.strided or _fills_extent(tensor)):
            groups.setdefault(place, []).append(_describe_sleeper(name, tensor, False))
    for place, sleepers in groups.items():
        if to_store := [one for one in _distinct_sleepers(sleepers) if one.nbytes]:
            request, numbers = _sleep_request(place, to_store, max(1, limit - memory.nbytes) if limit else 0)
            memory._add_device(place, {**request, "bytes": 0}, numbers)
    return memory


def _save_sleepers(
    named: Mapping[str, Any], path: str, options: StorageOptions | None, end: float | None, asleep: Asleep
) -> None:
    """Saves tensors whose stored bytes are not a file. If that fails they do not sleep."""
    try:
        descriptions = [(name, frame_of(tensor).describe(tensor)) for name, tensor in named.items()]
        save_bytes(descriptions, path, {"format": "pt"}, storage_options=options, end=end)
    except BaseException:
        asleep.close()
        raise


def _sleep_request(device: str, stored: list[_Sleeper], limit: int) -> tuple[SleepRequest, bytes]:
    request: SleepRequest = {"device": device, "max_memory": limit}
    request["names"] = [one.name for one in stored]
    request["dtypes"] = [one.dtype for one in stored]
    request["shapes"] = [list(one.shape) for one in stored]
    numbers = array(
        "q", [n for one in stored for n in (one.dense.data_ptr() if one.nbytes else 0, one.nbytes)]
    ).tobytes()
    if device != "cpu":
        from ..frameworks.torch import await_writes

        await_writes(stored[0].dense)  # what writes the tensors has ended then
    return request, numbers


def _start_sleep(
    device: str, stored: list[_Sleeper], limit: int, path: str, end: float | None, watcher: Any = None
) -> Job:
    request, numbers = _sleep_request(device, stored, limit)
    request["path"] = path
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
            kind = type(tensor).__name__
            raise NotSupportedError(
                f"overwire: sleep: {name!r} is a {kind}, which is made of other tensors: give these", tensor=name
            )
    return tensors_by_name


def _describe_sleeper(name: str, tensor: Any, whole: bool) -> _Sleeper:
    """whole: in its own shape and order, as a file has it; else as it lies in memory."""
    from ..frameworks.memory import check_memory
    from ..frameworks.torch import SAVED

    where = f"overwire: sleep: {name!r}"
    check_memory(tensor, where, name)
    view = tensor.detach()
    kind = SAVED.get(view.dtype)
    if kind is None or view.is_quantized:
        raise NotSupportedError(f"{where}: {view.dtype} cannot sleep: leave it out", tensor=name)
    if view.is_conj() or view.is_neg():
        raise NotSupportedError(f"{where}: a lazily conjugated or negated view: give the tensor behind it", tensor=name)
    if view.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{where} is on {view.device}", tensor=name)
    dense = view
    if not view.is_contiguous():
        once = _without_expansion(view)
        if overlaps_itself(once.shape, once.stride()):
            raise NotSupportedError(
                f"overwire: sleep: {name!r}: its elements share memory in an irregular way", tensor=name
            )
        if not whole and _fills_extent(view):
            view = dense = view.as_strided((view.numel(),), (1,))
        else:
            dense = view.contiguous()
    shape = tuple(view.shape)
    if kind == "F4":
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    return _Sleeper(name, view, kind, shape, view.numel() * view.element_size(), dense)


def _distinct_sleepers(sleepers: list[_Sleeper]) -> list[_Sleeper]:
    # Without those that lie inside another.
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
    """The storages that the tensors cover whole and torch can free, with their sizes."""
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
    """Whether the elements fill their extent, in whatever order."""
    size = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1 and stride != size:
            return False
        size *= count
    return True


def _without_expansion(tensor: Any, like: Any = None) -> Any:
    """A tensor without the dimensions along which `like`, or itself, was expanded."""
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
