"""load_file and stream: whole tensors, in a dict or as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from . import _engine
from .errors import ArgumentError, OverwireError
from .frames import Frame, check_device, frame_for
from .jobs import Job
from .models import Model, many_objects, prepare
from .planning import fit, held
from .progress import ProgressLike, Watcher, watch
from .saving import parse_size
from .sources import SourceLike
from .storage import StorageOptions
from .windows import Windows, windows_of

if TYPE_CHECKING:
    from .distributed import ShardLike

__all__ = ["load_file", "stream"]


def load_file(
    source: SourceLike,
    *,
    device: Any = "cpu",
    dtype: Any = None,
    keys: Iterable[str] | None = None,
    filter: Callable[[str], bool] | None = None,
    framework: str | None = None,
    progress: ProgressLike = None,
    mmap: bool | None = None,
    read: str | None = None,
    storage_options: StorageOptions | None = None,
    lenient: bool = False,
    max_memory: int | str | None = None,
    group: Any = None,
    shard: ShardLike = None,
) -> dict[str, Any]:
    """Loads tensors from plain or compressed safetensors files.

    source: a path of a file, a folder or an index.json; a list of paths; a file
        open for reading in binary mode; or a `Pinned` model. A name that stands in two files
        is an error.
    device: where the tensors shall be: "cpu", "cuda", "cuda:1", a torch.device.
        On a GPU they are torch tensors out of torch's own allocator, and
        compressed ones are decoded there.
    dtype: casts every floating tensor (F16, BF16, F32, F64 and the fp8 kinds):
        on a GPU as it lands, where source and target are of the usual kinds,
        else after it; a torch or numpy dtype, or a name ("bfloat16",
        "BF16"). Integers, BOOL and packed types stay as they are.
    keys, filter: read only these names; only names for which filter is true
        (see `experts`). Of a model with an index.json only the shards that hold
        some of them are opened, and filter chooses among the names of the index.
    framework: "pt", "np", or "bytes" for writable memoryviews of the bytes;
        None: torch if it is installed, else numpy.
    progress: True for a bar, or a callable that gets a `Progress`.
    mmap: whether plain tensors of local files are mapped copy-on-write instead
        of read; None: yes. Compressed tensors are never mapped. A file that is
        mapped must not be truncated while its tensors live.
    read: how local files are read, as OVERWIRE_READ says it, which None means:
        "auto", "buffered" (through the page cache), "direct" (past it), "gds":
        plain tensors to a GPU by GPUDirect Storage. Where that is not real
        (`doctor()["gpudirect_storage"]`), or does not reach a file, a warning
        says so once, and reading is "auto". Not with group.
    storage_options: how to reach URIs that are no local files, by names of the
        scheme. Values are texts, numbers or bools; None is as if not given.
        http, https, hf: headers (a mapping), token (bearer), cacert, capath,
        insecure; timeout (seconds without progress, 30), connections (at most,
        64: as many are open as bring more than fewer did), retries (8; a server
        that has not answered once is asked 3 times in all). Headers, token, and a
        URL's user and password go to the scheme, host and port that they were
        given for, and over no redirect to others. A server with neither an ETag
        nor a date is read by one request, in order. Files of hf:// are those of
        one commit. `cache`, a folder, keeps whole files: they are
        fetched once, and compared with their hash on every use; nothing is evicted.
        s3 (s3://bucket/key, s3://bucket/folder/): key, secret, token; profile;
        anon (unsigned); region, endpoint_url, path_style, sse_customer_key (32
        bytes or their base64), cacert, timeout, connections, retries. Without
        them credentials, region and endpoint are found as AWS's own tools find
        them: AWS_* of os.environ, shared files, web identity, SSO, processes,
        containers, machines; where there are none, requests are unsigned. redis, rediss (redis://host:port/key): username,
        password (else REDISCLI_AUTH), db, cacert, timeout, connections, retries;
        one value, or tensorizer's keys `key:...:offset`. What is replaced in a
        store while it is read is a CorruptError, never a mixture.
    lenient: accepts plain files that other readers let pass: bytes after the
        last tensor, a name or key twice (the last one counts), metadata that is
        not strings (kept as its JSON text). False holds the format's rules.
    max_memory: the most bytes that tensors may take on the device (int,
        "20GB", "512MiB"); a load that would take more is refused with the
        numbers before anything is allocated. `plan` tells them in advance.
    group: a torch.distributed process group whose ranks all make this call:
        they share the reading, and what fails on one raises on all. None: no
        collective.
    shard: with group: name -> dimension to cut a tensor along; this rank gets
        its block of ceil(size / ranks). See `distributed`.

    Returns name -> tensor, in the order of the files (with keys: of keys).
    The tensors are the caller's: writable, each in a storage of its own, valid
    after the file is closed or deleted; freeing one frees its memory. F4 comes
    as torch.float4_e2m1fn_x2 with the last dimension halved, or unpacked in
    numpy; F6 comes as its bytes, U8.

    Raises NotFoundError, FormatError, CorruptError (which tensor, chunk and
    offset), TensorNotFoundError for keys, OutOfMemoryError, NotSupportedError,
    ArgumentError. Ctrl-C cancels the load and frees what had landed. In a child of
    fork, where the engine cannot run, plain local files are read through the package
    safetensors, and all else is ForkedError.
    """
    if group is not None or shard is not None:
        if read is not None:
            raise ArgumentError("overwire: read: a group's way of reading is set by OVERWIRE_READ, for all its ranks alike")
        from .distributed import load

        return load(
            source, group, shard, device=device, dtype=dtype, keys=keys, filter=filter, framework=framework, progress=progress,
            mmap=mmap, storage_options=storage_options, lenient=lenient, max_memory=max_memory,
        )  # fmt: skip
    frame = frame_for(framework)
    where = check_device(device, frame)
    wanted = None if dtype is None else frame.dtype(dtype)  # a wrong one is refused before anything is read
    if _engine.forked():
        from .forking import ForkedModel

        alone = ForkedModel(source, where, keys, filter, storage_options)
        fit(alone, frame, wanted, max_memory)
        return alone.load(alone.chosen, frame, dtype, None)
    prepare(where)
    with ExitStack() as stack:
        stack.enter_context(many_objects())  # the table has as many as the tensors, and is gone before the collector looks
        model = stack.enter_context(
            Model(source, mmap, where, lenient=lenient, keys=keys, filter=filter, storage_options=storage_options, read=read)
        )
        fit(model, frame, wanted, max_memory)
        return model.load(model.chosen, frame, dtype, watch(progress, "load"))


def stream(
    source: SourceLike,
    *,
    device: Any = "cpu",
    dtype: Any = None,
    keys: Iterable[str] | None = None,
    filter: Callable[[str], bool] | None = None,
    framework: str | None = None,
    progress: ProgressLike = None,
    mmap: bool | None = None,
    read: str | None = None,
    storage_options: StorageOptions | None = None,
    lenient: bool = False,
    max_memory: int | str | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) in the order of arrival; arguments and tensors as
    for `load_file`, but for

    max_memory: the most bytes of tensors that are loaded, or being loaded, and
        not yet yielded: those that were are the caller's to let go. It goes in
        windows of half of that. A single tensor that takes more is refused.

    The file is opened, and the load begins, with this call; each tensor is
    complete when it is yielded. Closing the iterator early (`break`, `close`,
    an exception in the loop) cancels the rest and frees it.
    An error of the load is raised after the tensors that had landed before it.
    """
    frame = frame_for(framework)
    where = check_device(device, frame)
    prepare(where)
    wanted = None if dtype is None else frame.dtype(dtype)
    with ExitStack() as stack:
        model = stack.enter_context(
            Model(source, mmap, where, lenient=lenient, keys=keys, filter=filter, storage_options=storage_options, read=read)
        )
        model.join()
        if max_memory is None or model.joined:
            fit(model, frame, wanted, max_memory)  # a preload has all of it already
            return _begin(model, model.chosen, frame, wanted, watch(progress, "stream"))
        budget = parse_size(max_memory, "max_memory")
        chosen = list(range(len(model.table))) if model.chosen is None else model.chosen
        windows = windows_of(model, chosen, held(model, chosen, frame, wanted), budget)
        watcher = watch(progress, "stream")
        stack.pop_all()  # the model is the stream's
        return Windows(model, windows, budget, lambda window, part: _begin(model, window, frame, wanted, part), watcher)


def _begin(model: Model, chosen: list[int] | None, frame: Frame, wanted: Any, watcher: Watcher | None) -> _Stream:
    rows: Sequence[Any] = model.table if chosen is None else [model.table[at] for at in chosen]
    rows, cast = model.casting(rows, wanted)
    raw = frame.raw({row[1] for row in rows})
    job, places = model.begin(chosen, rows, frame, watcher, cast)
    return _Stream(job, rows, frame, wanted, raw, places, model.device, model.lands != model.device)


class _Stream(Iterator[tuple[str, Any]]):
    # A class and not a generator: a generator that was never started would not
    # run its `finally`, and the load has begun.

    def __init__(
        self,
        job: Job,
        rows: Any,
        frame: Any,
        wanted: Any,
        raw: bool,
        places: dict[int, Any],
        device: str,
        moved: bool = False,
    ) -> None:
        self._device = device
        self._moved = moved  # what lands may be elsewhere: a preload's on the host
        self._places = places  # tensors that were made before the load, and not yet yielded
        self._job: Job | None = job
        self._rows = rows
        self._frame, self._wanted, self._raw = frame, wanted, raw
        self._landed: list[tuple[int, Any, int]] = []

    def __next__(self) -> tuple[str, Any]:
        if not self._landed:
            if self._job is None:
                raise StopIteration
            try:
                self._landed = self._job.next(None, self._raw)
                if not self._landed:
                    self._job.wait()  # an error of the load
            except BaseException:
                self.close()
                raise
            if not self._landed:
                job, self._job = self._job, None
                job.done()
                raise StopIteration
            self._landed.reverse()
        at, capsule, pointer = self._landed.pop()
        row = self._rows[at]
        tensor = self._places.pop(at, None)
        if tensor is None:
            tensor = self._frame.adopt(capsule, pointer, row[1], row[2], self._device)
            if self._moved:
                tensor = tensor.to(self._device)
        if self._wanted is not None:
            tensor = self._frame.cast(tensor, row[1], self._wanted)
        return row[0], tensor

    def landed(self) -> bool:
        """Whether all of it has; an error is raised where it comes in turn."""
        if self._job is None:
            return True
        try:
            return _engine.job_wait(self._job.number, 0.0)
        except OverwireError:
            return False

    def close(self) -> None:
        """Ends the stream; the rest is cancelled and freed."""
        job, self._job = self._job, None
        self._landed = []
        if job is not None:
            if self._places:
                job.cancel()  # the engine writes to them until it has stopped
            job.free()
        self._places = {}

    def __del__(self) -> None:
        self.close()
