"""Opens a model in Python: reads its table of tensors, and starts loads."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from .. import _verbs
from .._engine import release
from .._imports import imported, many_objects
from .._tables import CAST_FROM, CAST_TO
from .._undo import after_error
from ..counting import note
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
from ..frameworks.choose import HOST, check_device, check_dtype, device_number, frame_for
from ..frameworks.frame import Frame, check_empty
from ..jobs import Job, heed, log, shown
from ..model.joining import join, written
from ..paths import named_errors
from .loads import Load
from .options import check_values
from .sources import resolve_plain
from .storage import storage

if TYPE_CHECKING:
    from .._engine import ModelNumber
    from .._requests import LoadRequest, OpenRequest
    from ..progress import Watcher
    from .rows import Row

#: A block to load: (tensor, destination address, lo0, hi0, lo1, hi1). If the address is 0, the engine allocates the
#: memory.
Request = tuple[int, int, int, int, int, int]

#: The end of a range that covers the whole dimension.
WHOLE = -1

# GPU tensors of at least _LARGE bytes come from torch's allocator. The first _FIRST_BATCH of them are allocated
# together, then at most _BATCH at a time.
_LARGE = 1 << 20
_FIRST_BATCH, _BATCH = 4, 32

# The destination of a request that gets its address while the load runs.
_LATER = 1

# The maximum number of names that are compared with a missing name to suggest one of them.
_NEAR = 500


#: The options of public functions that are also keywords of `Model`.
_OPENS = ("mmap", "lenient", "keys", "filter", "storage_options", "read", "host")


def opening(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a public function that `Model` also takes. The option `ray` becomes a storage option."""
    opens = {name: options[name] for name in _OPENS if name in options}
    if options.get("ray") is not None:
        opens["storage_options"] = {**(opens.get("storage_options") or {}), "ray": options["ray"]}
    return opens


class Model:
    """An open model: a handle of the engine and a table of tensors. Tensors and running loads stay valid after
    `close`."""

    read: str | None = None
    chosen: list[int] | None = None  # the positions that keys and filter select, or None for all
    #: The device on which `start` places tensors: `device`, or the host if a load to a GPU joins a preload to the host.
    #: None before the first call of `join`.
    lands: str | None = None
    #: Whether loads use preloaded tensors.
    joined = False
    handle: ModelNumber  # the engine's number for this model
    _open = False  # whether `close` has to free the handle
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
        host: bool | None = None,
    ):
        """Opens a model. keys, filter: select the tensors to load (`chosen`). With an index.json, only shards with
        selected tensors are opened. probe: whether the file may be missing; metrics then count no error. opened: the
        engine's number for a .tensors file that is already open. parts: whether to accept files with only parts of
        tensors, as their metadata shows. host: see `LoadOptions`."""
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
                self.lands = device  # the source has the files' bytes in memory, so no preload is needed
            self.chosen = self.choose(keys, filter)
            return
        opened_source = resolve_plain(source)
        uris, paths = opened_source.uris, opened_source.names
        #: The names of the files for messages.
        self.uris = [shown(name) for name in paths]
        spec: OpenRequest = {"uris": uris}
        if access := storage(storage_options, uris):
            spec["storage"] = access
        if lenient:
            spec["lenient"] = True
        if mmap is not None:
            spec["map"] = bool(mmap)
        if keys is None and filter is not None:
            if (names := _verbs.names(spec)) is not None:
                filter = _filter_of(filter, names)
                spec["keys"] = keys = [name for name in names if filter(name)]
                filter = None  # the engine has already applied the filter
        elif keys is not None:
            spec["keys"] = [key for key in keys if isinstance(key, str)]
        if opened:
            spec["opened"] = opened
        if parts:
            spec["parts"] = True
        if host is not None:
            spec["host"] = bool(host)
        try:
            with many_objects(), named_errors(dict(zip(uris, paths, strict=True))):
                text, _, _, table, self.handle = _verbs.open(spec)
        except BaseException as error:
            if not probe:
                note("open", "", type(error).__name__)
            if isinstance(error, (CorruptError, FormatError, NotFoundError)):
                written(uris[0])  # drops a preload of these files, which is useless
            raise
        finally:
            heed(uris, bool(os.environ.get("OVERWIRE_HOST")) if host is None else host)
        del opened_source  # the engine has its own descriptors
        self._open = True
        assert table is not None
        self.table: list[tuple[str, str, tuple[int, ...], int, int, int, int]] = table
        self._sources = text
        with after_error(self.close):
            if self.table and self.table[-1][5] > 0:  # the model has several files
                self._refuse_twins(dict(zip(uris, self.uris, strict=False)))
            self.chosen = self.choose(keys, filter)

    @classmethod
    def held(cls, name: str, table: list[Any], number: ModelNumber, device: str) -> Model:
        """Returns a model that is in the engine's memory, for loads to a device. name: the model's name in errors."""
        model = object.__new__(cls)
        model.device = model.lands = device
        model.uris, model.table, model._sources = [name], table, '{"sources": []}'
        model.handle, model._open = number, True
        return model

    def close(self) -> None:
        """Closes the handle. If loads have used some tensors of a preload, its other tensors are freed."""
        if self._open:
            self._open = False
            release(self.handle)

    def join(self) -> str:
        """Joins a preload of the files if it has the tensors that loads of this model return. Returns the device on
        which `start` places tensors."""
        if self.lands is None:
            number = join(self.handle, self.device, self.read, False)
            self.joined = number is not None
            self.lands = self.device if number is None else number
            if self.joined:
                log.info("load %s: joins its preload", self.uris[0])
        return self.lands

    def alone(self) -> None:
        """Drops a preload of the files. Loads that cannot use a preload call this."""
        if self.lands is None:
            join(self.handle, self.device, self.read, True)
            self.lands = self.device

    def on(self, device: str) -> Model:
        """Returns the same open model for loads to another device."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, device=device, lands=None, joined=False, _open=False)
        return view

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse_twins(self, names: Mapping[str, str] | None = None) -> None:
        positions: dict[str, int] = {}
        for name, *_, source, _alias in self.table:
            first = positions.setdefault(name, source)
            if first != source:
                uris = [(names or {}).get(part["uri"], part["uri"]) for part in self.info()]
                why = f"{uris[first]} also contains it: open only one of the files, or each separately"
                text = f'overwire: open {uris[source]} tensor "{name}": {why}'
                raise ArgumentError(text, source=uris[source], tensor=name)

    @property
    def places(self) -> dict[str, int]:
        """The position of each tensor in the table, by name."""
        if self._places is None:
            self._places = {row[0]: at for at, row in enumerate(self.table)}
        return self._places

    def place(self, name: str) -> int:
        """Returns the position of a tensor. Raises TensorNotFoundError if it does not exist."""
        at = self.places.get(name) if isinstance(name, str) else None
        if at is None:
            near = ""
            if isinstance(name, str):  # compares few names, because programs may ask for many missing tensors
                near = did_you_mean(name, [other for other in self.places if abs(len(other) - len(name)) <= 3][:_NEAR])
            text = f"overwire: no tensor {name!r} in {', '.join(self.uris)}{near}"
            raise TensorNotFoundError(text, source=self.uris[0], tensor=str(name))
        return at

    def row(self, at: int) -> Row:
        """Returns one row of the table, with named fields."""
        from .rows import Row

        return Row(*self.table[at])

    def info(self) -> list[dict[str, Any]]:
        """Returns a dict for each source, with uri, size, metadata, overwire and remote."""
        sources: list[dict[str, Any]] = json.loads(self._sources)["sources"]
        return sources

    def room(self) -> int:
        """Returns the most bytes that one chunk takes in a group load's buffer for each rank."""
        room: int = json.loads(self._sources).get("room", 0)
        return room

    def from_host(self) -> int:
        """Returns the number of files that are in the memory of the host store."""
        count: int = json.loads(self._sources).get("host", 0)
        return count

    def metadata(self) -> dict[str, str]:
        """Returns the metadata of the first source."""
        return self.info()[0].get("metadata") or {}

    def choose(self, keys: Iterable[str] | None, filter: Callable[[str], bool] | None) -> list[int] | None:
        """Returns the positions of the tensors that `keys=` and `filter=` select, or None for all."""
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
        """Starts a load of requests to the device that `join` returns. Whole tensors without a destination may come
        from a preload.

        requests: a sequence, or bytes from `pack_wholes`, or None for all whole tensors. cast: see `_cast_rows`.
        end: the result of `jobs.time_limit`. after: the job of another load that must end before this load reads, or 0.
        """
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

            # The missing memory may be in torch's cache.
            give_back(lands)
            number = _verbs.load(options, self.handle, requests is None, rows)
        return Job(number, "load", watcher, end)

    def begin(
        self, chosen: list[int] | None, frame: Frame, wanted: Any = None, watcher: Watcher | None = None, after: int = 0
    ) -> Load:
        """Starts a load of whole tensors. chosen: positions, or None for all. wanted: the framework's dtype to cast to,
        or None for no cast. after: see `start`.

        Large GPU tensors land in memory from torch's allocator. Small GPU tensors land in the engine's memory, because
        torch allocates them more slowly than the engine loads them. Tensors on the host, and all tensors of a load that
        has joined a preload, also land in the engine's memory.
        """
        rows, cast = self._cast_rows(self.table if chosen is None else [self.table[at] for at in chosen], wanted)
        numbers = range(len(rows)) if chosen is None else chosen

        def requests_of(pointers: list[int]) -> bytes | None:
            return None if chosen is None and not any(pointers) else pack_wholes(numbers, pointers)

        return self._begin_load(requests_of, rows, numbers, frame, wanted, watcher, cast, after)

    def begin_blocks(
        self, blocks: Sequence[tuple[int, tuple[int, int, int, int]]], rows: Sequence[Any], frame: Frame, after: int = 0
    ) -> Load:
        """Starts a load of blocks like `begin`. blocks: each a position and the ranges of dimensions 0 and 1. rows:
        table rows with the shapes and sizes of the blocks."""

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
        large.sort(key=numbers.__getitem__)  # the order in which they are read
        for at in large:
            pointers[at] = _LATER
        job = self.start(requests(pointers), watcher, cast, after=after)
        places: dict[int, Any] | None = None
        with suppress(OutOfMemoryError), after_error(job.abandon):
            # A load that waits for another load has time to allocate all tensors in one batch, which leaves fewer gaps.
            first = len(large) if after else _FIRST_BATCH
            places = self._settle_targets(job, large, rows, frame, first) if large else {}
        if places is None:  # tries again, because the abandoned load has freed its memory
            places = dict(zip(large, frame.empty_on(self.device, [rows[at] for at in large]), strict=True))
            for at, tensor in places.items():
                pointers[at] = tensor.data_ptr()
            job = self.start(requests(pointers), watcher, cast, after=after)
        return Load(job, rows, frame, raw, places, self.device, self.lands != self.device, wanted)

    def _settle_targets(
        self, job: Job, large: list[int], rows: Sequence[Any], frame: Frame, count: int
    ) -> dict[int, Any]:
        # The tensors are allocated while the load reads, because torch's allocator takes about 50 us to grow for each
        # tensor.
        from ..frameworks.torch import stream_of

        places: dict[int, Any] = {}
        for batch in frame.empty_in_batches(self.device, [rows[at] for at in large], count, _BATCH):
            tensors = {large[at]: tensor for at, tensor in batch.items()}
            job.settle([n for at, tensor in tensors.items() for n in (at, tensor.data_ptr())], stream_of(self.device))
            places |= tensors
        return places

    def _cast_rows(self, rows: Sequence[Any], wanted: Any) -> tuple[Sequence[Any], str]:
        """Returns the rows with the dtypes in which tensors land, and the engine's name for the dtype to which it casts
        tensors. The name is "" if the engine does not cast: on the host, to a dtype that it does not support, and from
        a preload."""
        if wanted is None or self.join() == "cpu" or self.joined:
            return rows, ""
        from ..frameworks.torch import SAVED

        name = SAVED.get(wanted, "")
        if name not in CAST_TO:
            return rows, ""
        casts = ((row[0], name, row[2], nbytes(name, row[2]), *row[4:]) if row[1] in CAST_FROM else row for row in rows)
        return list(casts), name

    def load(self, chosen: list[int] | None, frame: Frame, wanted: Any, watcher: Watcher | None) -> dict[str, Any]:
        """Loads the chosen tensors whole, and returns them in a dict in the order of `chosen`. See `begin`."""
        if not (self.table if chosen is None else chosen):
            return {}
        load = self.begin(chosen, frame, wanted, watcher)
        return dict(zip(map(itemgetter(0), load.rows), load.tensors(), strict=True))


def _filter_of(filter: Callable[[str], bool], names: Iterable[str]) -> Callable[[str], bool]:
    from .selection import Experts

    return filter.over(names) if isinstance(filter, Experts) else filter


class Target:
    """Describes the tensors that a load makes. dtype: the framework's dtype to cast to, or None for no cast.
    max_memory: the most bytes on the device, or None for no limit."""

    def __init__(self, frame: Frame, device: str, dtype: Any, max_memory: int | str | None) -> None:
        self.frame, self.device, self.dtype, self.max_memory = frame, device, dtype, max_memory


def check_target(framework: Any, device: Any, options: Mapping[str, Any]) -> Target:
    """Returns the target of a load's arguments. Call `start_engine` first: Go's runtime then starts while the frame's
    module is imported."""
    if framework is None and (imported("torch") is not None or device_number(device) != HOST):
        framework = "pt"
    frame = frame_for(framework)
    dtype = options.get("dtype")
    return Target(frame, check_device(device, frame), check_dtype(frame, dtype), options.get("max_memory"))


def pack_requests(requests: Iterable[Sequence[int]]) -> bytes:
    """Packs requests for the engine. A request has a position, an address, and the ranges of dimensions 0 and 1."""
    return array("q", [number for request in requests for number in request]).tobytes()


def pack_wholes(numbers: Sequence[int], pointers: Sequence[int]) -> bytes:
    """Packs requests for many whole tensors in few C calls. The engine allocates the memory where a pointer is 0."""
    flat = array("q", bytes(6 * 8 * len(numbers)))
    flat[0::6] = array("q", numbers)
    flat[1::6] = array("q", pointers)
    flat[3::6] = flat[5::6] = array("q", [WHOLE]) * len(numbers)
    return flat.tobytes()
