"""An opened model on the Python side: its table of tensors, and loads of it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _verbs
from .._engine import open_library, release
from .._imports import imported
from .._tables import CAST_FROM, CAST_TO
from ..dtypes import nbytes
from ..errors import (
    ArgumentError,
    CorruptError,
    FormatError,
    NotFoundError,
    OutOfMemoryError,
    TensorNotFoundError,
    did_you_mean,
)
from ..foreign.kinds import named_errors
from ..frameworks.choose import check_device, check_dtype, check_framework, frame_for
from ..frameworks.frame import Frame, check_empty
from ..jobs import Job, heed, log, shown
from ..metering import note
from ..model.joining import join, written
from ..progress import Watcher
from .loads import Load, many_objects
from .options import check_values
from .selection import Experts
from .sources import check_source, resolve_plain
from .storage import storage

if TYPE_CHECKING:
    from .._engine import ModelNumber
    from .._requests import LoadRequest, OpenRequest

#: What is wanted: (tensor, destination, lo0, hi0, lo1, hi1); a destination of 0
#: lets the engine allocate.
Request = tuple[int, int, int, int, int, int]

#: The end of a range that means "all of it".
WHOLE = -1

# Bytes from which a tensor on a GPU comes from torch's own allocator, how many of them are
# made before the load has the first, and how many at a time at most.
_LARGE = 1 << 20
_FIRST_BATCH, _BATCH = 4, 32

# The destination of a request whose address is set while the load runs.
_LATER = 1

# How many names a missing one is compared with, to guess what was meant.
_NEAR = 500


class Row(NamedTuple):
    """One tensor of the table, as the engine gives it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored: int
    source: int
    alias: int


#: Keywords of `Model` among the options of the verbs.
_OPENS = ("mmap", "lenient", "keys", "filter", "storage_options", "read")


def opening(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a verb that `Model` takes."""
    return {name: options[name] for name in _OPENS if name in options}


class Model:
    """An open model. Not more than a handle and its table; `close` ends it,
    tensors and running loads live on."""

    read: str | None = None
    chosen: list[int] | None = None  # what keys and filter leave, None for all
    #: Where `start` lands tensors: `device`, but for a preload to the host that a
    #: load to a GPU joins. None: not known yet; see `join`.
    lands: str | None = None
    #: Whether loads take tensors that were preloaded.
    joined = False
    handle: ModelNumber  # the engine's number of it
    _open = False  # it has to free the handle
    _places: dict[str, int] | None = None

    def __init__(
        self,
        source: Any,
        mmap: bool | None = None,
        device: str = "cpu",
        lenient: bool = False,
        keys: Iterable[str] | None = None,
        filter: Callable[[str], bool] | None = None,
        storage_options: Mapping[str, object] | None = None,
        read: str | None = None,
        probe: bool = False,
        opened: int = 0,
        parts: bool = False,
    ):
        """keys, filter: what will be loaded, in `chosen` afterwards. Of a model
        with an index.json only the shards that hold some of it are opened.
        probe: one of several names is tried; metrics count no error then.
        opened: the engine's number of the source, a .tensors file that is open already.
        parts: take files whose tensors are parts of tensors, by their metadata."""
        self.device = device
        self.read = read
        check_values(keys=keys, filter=filter)
        keys = None if keys is None else list(keys)
        shared_handle = getattr(source, "shared_model", None)
        if shared_handle is not None:  # another caller keeps the model open
            self.__dict__.update(shared_handle().on(device).__dict__)
            self.read = read
            self._shared = source
            if getattr(source, "has_bytes", True):
                self.lands = device  # it has the files' bytes itself
            self.chosen = self.choose(keys, filter)
            return
        uris, called, keep, _ = resolve_plain(source)  # keep: until the engine has its own descriptors
        #: As people may see them.
        self.uris = [shown(name) for name in called]
        spec: OpenRequest = {"uris": uris}
        if access := storage(storage_options, uris):
            spec["storage"] = access
        if lenient:
            spec["lenient"] = True
        if mmap is not None:
            spec["map"] = bool(mmap)
        if keys is None and filter is not None:
            names = _verbs.names(spec)
            if names is not None:
                filter = _filter_of(filter, names)
                spec["keys"] = keys = [name for name in names if filter(name)]
                filter = None  # it has spoken
        elif keys is not None:
            spec["keys"] = [key for key in keys if isinstance(key, str)]
        if opened:
            spec["opened"] = opened
        if parts:
            spec["parts"] = True
        try:
            with many_objects(), named_errors(dict(zip(uris, called, strict=True))):
                text, _, _, table, self.handle = _verbs.open(spec)
        except BaseException as error:
            if not probe:
                note("open", "", type(error).__name__)
            if isinstance(error, (CorruptError, FormatError, NotFoundError)):
                written(uris[0])  # what was preloaded of them is of no use either
            raise
        finally:
            heed(uris)
        del keep
        self._open = True
        assert table is not None
        self.table: list[tuple[str, str, tuple[int, ...], int, int, int, int]] = table
        self._sources = text
        try:
            if self.table and self.table[-1][5] > 0:  # several files
                self._refuse_twins(dict(zip(uris, self.uris, strict=False)))
            self.chosen = self.choose(keys, filter)
        except BaseException:
            self.close()
            raise

    @classmethod
    def held(cls, name: str, table: list[Any], number: ModelNumber, device: str) -> Model:
        """A model that the engine has in memory, for loads to the device; name: in errors."""
        model = object.__new__(cls)
        model.device = model.lands = device
        model.uris, model.table, model._sources = [name], table, '{"sources": []}'
        model.handle, model._open = number, True
        return model

    def close(self) -> None:
        """Closes the handle. What a preload has of the files and no load took is
        freed, if some of it was taken."""
        if self._open:
            self._open = False
            release(self.handle)

    def join(self) -> str:
        """Joins what was preloaded of the files, if it is what loads of this model
        to its device give. Returns where `start` lands tensors."""
        if self.lands is None:
            number = join(self.handle, self.device, self.read, False)
            self.joined = number is not None
            self.lands = self.device if number is None else number
            if self.joined:
                log.info("load %s: joins its preload", self.uris[0])
        return self.lands

    def alone(self) -> None:
        """For loads that cannot take what was preloaded of the files: it is dropped."""
        if self.lands is None:
            join(self.handle, self.device, self.read, True)
            self.lands = self.device

    def on(self, device: str) -> Model:
        """The same model, as long as it is open, for loads to another device."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, device=device, lands=None, joined=False, _open=False)
        return view

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse_twins(self, called: Mapping[str, str] | None = None) -> None:
        positions: dict[str, int] = {}
        for name, *_, source, _alias in self.table:
            first = positions.setdefault(name, source)
            if first != source:
                uris = [(called or {}).get(part["uri"], part["uri"]) for part in self.info()]
                raise ArgumentError(
                    f'overwire: open {uris[source]} tensor "{name}": it is in {uris[first]} too; '
                    "open one of the files, or each by itself",
                    source=uris[source],
                    tensor=name,
                )

    @property
    def places(self) -> dict[str, int]:
        """Name to position in the table."""
        if self._places is None:
            self._places = {row[0]: at for at, row in enumerate(self.table)}
        return self._places

    def place(self, name: str) -> int:
        """The position of a tensor; TensorNotFoundError if it is not there."""
        at = self.places.get(name) if isinstance(name, str) else None
        if at is None:
            near = ""
            if isinstance(name, str):  # few are compared: programs may ask for many names that are not there
                near = did_you_mean(name, [other for other in self.places if abs(len(other) - len(name)) <= 3][:_NEAR])
            raise TensorNotFoundError(
                f"overwire: no tensor {name!r} in {', '.join(self.uris)}{near}", source=self.uris[0], tensor=str(name)
            )
        return at

    def row(self, at: int) -> Row:
        """One row of the table, with names."""
        return Row(*self.table[at])

    def info(self) -> list[dict[str, Any]]:
        """For each source: uri, size, metadata, overwire, remote."""
        sources: list[dict[str, Any]] = json.loads(self._sources)["sources"]
        return sources

    def room(self) -> int:
        """The most that one chunk takes of a relay's buffer for each rank."""
        room: int = json.loads(self._sources).get("room", 0)
        return room

    def metadata(self) -> dict[str, str]:
        """Of the first source."""
        return self.info()[0].get("metadata") or {}

    def choose(self, keys: Iterable[str] | None, filter: Callable[[str], bool] | None) -> list[int] | None:
        """The positions that `keys=` and `filter=` leave, None for all."""
        if keys is None and filter is None:
            return None
        check_values(keys=keys, filter=filter)
        positions = dict.fromkeys(range(len(self.table)) if keys is None else map(self.place, keys))
        if filter is None:
            return list(positions)
        filter = _filter_of(filter, (row[0] for row in self.table))
        return [at for at in positions if filter(self.table[at][0])]

    def start(
        self,
        requests: bytes | Sequence[Request] | None,
        watcher: Watcher | None = None,
        cast: str = "",
        end: float | None = None,
        after: int = 0,
    ) -> Job:
        """Starts a load of requests, as they are or packed by `pack_wholes`; None for
        every tensor, whole. cast: as `_cast_rows` has it. end: of `jobs.time_limit`. after: the
        job of a load that has to end before this one reads; 0: none. Tensors land on what
        `join` returns; whole ones without a destination may come out of a preload."""
        lands = self.join()
        rows = requests if isinstance(requests, bytes) else pack_requests(requests or ())
        options: LoadRequest = {}
        if self.read:
            options["read"] = self.read
        if after:
            options["after"] = after
        if lands != "cpu":
            options["device"], options["cast"] = lands, cast
            from ..frameworks.torch import stream_of, used_on

            used_on(lands)
            if requests is not None:
                options["stream"] = stream_of(lands)
        try:
            number = _verbs.load(options, self.handle, requests is None, rows)
        except OutOfMemoryError:
            if lands == "cpu" or imported("torch") is None:
                raise
            from ..frameworks.torch import give_back

            # Memory that torch only keeps is no reason to fail.
            give_back(lands)
            number = _verbs.load(options, self.handle, requests is None, rows)
        return Job(number, "load", watcher, end)

    def begin(
        self, chosen: list[int] | None, frame: Frame, wanted: Any = None, watcher: Watcher | None = None, after: int = 0
    ) -> Load:
        """Starts a load of whole tensors; chosen: by position, None for all. wanted: the
        framework's dtype to cast to, None as they are. after: as for `start`.

        Large ones on a GPU land in tensors of torch's allocator. The others land in the
        engine's memory, on `lands`: small ones, which torch makes more slowly than the engine
        loads them, all on the host, and all of a load that joined a preload.
        """
        rows, cast = self._cast_rows(self.table if chosen is None else [self.table[at] for at in chosen], wanted)
        numbers = range(len(rows)) if chosen is None else chosen

        def requests_of(pointers: list[int]) -> bytes | None:
            return None if chosen is None and not any(pointers) else pack_wholes(numbers, pointers)

        return self._begin_load(requests_of, rows, numbers, frame, wanted, watcher, cast, after)

    def begin_blocks(
        self, blocks: Sequence[tuple[int, tuple[int, int, int, int]]], rows: Sequence[Any], frame: Frame, after: int = 0
    ) -> Load:
        """The same for blocks of tensors: (position, ranges of dims 0 and 1), with
        rows whose shape and bytes are the block's."""

        def requests_of(pointers: list[int]) -> list[Request]:
            return [(at, pointer, *block) for (at, block), pointer in zip(blocks, pointers, strict=True)]

        return self._begin_load(requests_of, rows, [at for at, _ in blocks], frame, after=after)

    def _begin_load(
        self,
        requests: Callable[[list[int]], bytes | Sequence[Request] | None],
        rows: Sequence[Any],
        numbers: Sequence[int],
        frame: Frame,
        wanted: Any = None,
        watcher: Watcher | None = None,
        cast: str = "",
        after: int = 0,
    ) -> Load:
        raw = frame.raw({row[1] for row in rows})
        if frame.name != "bytes":
            for name, dtype, shape, size, *_ in rows:
                if not size:
                    check_empty(dtype, shape, name)
        pointers = [0] * len(rows)
        large = [] if self.join() == "cpu" or self.joined else [at for at, row in enumerate(rows) if row[3] >= _LARGE]
        large.sort(key=numbers.__getitem__)  # as they are read
        for at in large:
            pointers[at] = _LATER
        job = self.start(requests(pointers), watcher, cast, after=after)
        places: dict[int, Any] | None = None
        try:
            # What follows another load has time, and memory that is asked for at once has fewer gaps.
            first = len(large) if after else _FIRST_BATCH
            places = self._settle_targets(job, large, rows, frame, first) if large else {}
        except OutOfMemoryError:
            job.abandon()
        except BaseException:
            job.abandon()
            raise
        if places is None:  # again, now that what the load itself had allocated is free
            places = dict(zip(large, frame.empty_on(self.device, [rows[at] for at in large]), strict=True))
            for at, tensor in places.items():
                pointers[at] = tensor.data_ptr()
            job = self.start(requests(pointers), watcher, cast, after=after)
        return Load(job, rows, frame, raw, places, self.device, self.lands != self.device, wanted)

    def _settle_targets(
        self, job: Job, large: list[int], rows: Sequence[Any], frame: Frame, count: int
    ) -> dict[int, Any]:
        # The tensors are made while the first bytes are on their way: growing
        # torch's allocator takes some 50 us a tensor.
        from ..frameworks.torch import stream_of

        places: dict[int, Any] = {}
        for batch in frame.empty_in_batches(self.device, [rows[at] for at in large], count, _BATCH):
            tensors = {large[at]: tensor for at, tensor in batch.items()}
            job.settle([n for at, tensor in tensors.items() for n in (at, tensor.data_ptr())], stream_of(self.device))
            places |= tensors
        return places

    def _cast_rows(self, rows: Sequence[Any], wanted: Any) -> tuple[Sequence[Any], str]:
        """The rows as they land when the engine casts to a torch dtype on the way,
        and its name for that; "" where it does not: on the host, for other types,
        out of a preload."""
        if wanted is None or self.join() == "cpu" or self.joined:
            return rows, ""
        from ..frameworks.torch import SAVED

        name = SAVED.get(wanted, "")
        if name not in CAST_TO:
            return rows, ""
        return [
            (row[0], name, row[2], nbytes(name, row[2]), *row[4:]) if row[1] in CAST_FROM else row for row in rows
        ], name

    def load(self, chosen: list[int] | None, frame: Frame, wanted: Any, watcher: Watcher | None) -> dict[str, Any]:
        """The chosen tensors, whole, in a dict in the order of `chosen`; see `begin`."""
        if not (self.table if chosen is None else chosen):
            return {}
        load = self.begin(chosen, frame, wanted, watcher)
        return dict(zip(map(itemgetter(0), load.rows), load.tensors(), strict=True))


def _filter_of(filter: Callable[[str], bool], names: Iterable[str]) -> Callable[[str], bool]:
    return filter.over(names) if isinstance(filter, Experts) else filter


def start_engine(source: Any) -> None:
    """Refuses what can be no source while the engine is closed, so that a program that catches that can still fork;
    then Go's runtime starts, which takes as long as what verbs import next."""
    check_source(source)
    open_library()


def check_target(source: Any, framework: Any, device: Any, dtype: Any) -> tuple[Frame, str, Any]:
    """The frame, the device and the dtype of a load, whose arguments they are. What source and
    framework cannot be is refused while the engine is closed: a program that catches that can
    still fork."""
    check_source(source)
    check_framework(framework)
    open_library()  # what is imported next takes as long as Go's runtime to start
    frame = frame_for(framework)
    return frame, check_device(device, frame), check_dtype(frame, dtype)


def prepare(device: str, exchange: bool = False) -> None:
    """Begins to make a GPU ready, so that a load need not wait for it: by this process, or
    by ranks that exchange what they read."""
    if device != "cpu":
        _verbs.prepare(device, int(exchange))


def pack_requests(requests: Iterable[Sequence[int]]) -> bytes:
    """Requests as the engine takes them: position, address, and the ranges of dims 0 and 1."""
    return array("q", [number for request in requests for number in request]).tobytes()


def pack_wholes(numbers: Sequence[int], pointers: Sequence[int]) -> bytes:
    """The requests for many whole tensors, packed, in the engine's memory or at pointers
    that are not 0: a few C calls in all."""
    flat = array("q", bytes(6 * 8 * len(numbers)))
    flat[0::6] = array("q", numbers)
    flat[1::6] = array("q", pointers)
    flat[3::6] = flat[5::6] = array("q", [WHOLE]) * len(numbers)
    return flat.tobytes()
