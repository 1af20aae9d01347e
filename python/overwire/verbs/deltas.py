"""Writes the changes between two models as a delta, and applies deltas to tensors in place."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from .. import _verbs, gpu
from .._engine import HandleOwner, buffer_of, release
from .._imports import skip_at_exit
from ..errors import ArgumentError, NotSupportedError
from ..frameworks.choose import check_device, columns_of, frame_of
from ..frameworks.frame import ODD
from ..jobs import Job, time_limit
from ..model.options import check_values, parse_size
from ..model.storage import storage
from ..model.storageoptions import StorageOptions
from ..paths import local
from ..progress import ProgressLike, spell_count, watch
from .save import notes_of, refuse_other_format
from .states import ModelSide, batches, hosted, pair, place_tensor, same_names, settle_devices, tensors_of, write_back

if TYPE_CHECKING:
    from .._requests import DeltaApply, DeltaFile, DeltaMerge, DeltaSave, DeltaTensors

#: A delta: its path or URI, its bytes, or an open delta.
DeltaLike = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, "Delta"]


@dataclass(frozen=True)
class DeltaReport:
    """Describes the deltas that were written or applied.

    tensors: how many tensors the deltas name; changed: how many of them change.
    bytes: the size of these tensors, including unchanged tensors. stored: bytes of the delta that was written, or of
        the chunks that were applied.
    path: the path that was written, as it was given, or "" if nothing was written. files: the written files in order:
        copied auxiliary files first, an index.json last.
    seconds: the duration of each stage of the engine, by name: "encode" and "write" for `save_delta`; "plan", "base
        digests", "change" and "new digests" for `apply_delta`; empty for other functions.
    """

    __module__ = "overwire"

    tensors: int
    changed: int
    bytes: int
    stored: int
    path: str = ""
    files: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class DeltaRow:
    """The difference between two states of a tensor: `changed` of its `elements` have different bits, and a delta for
    it takes `stored` bytes. Elements smaller than a byte are counted by bytes, and complex numbers as two elements."""

    __module__ = "overwire"

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    elements: int
    changed: int
    stored: int

    @property
    def share(self) -> float:
        """changed / elements, or 0.0 if the tensor is empty."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Diff:
    """The difference between two models.

    rows: one row for each tensor that both models have, including equal tensors, sorted by name.
    only_a, only_b: names that only one model has. other: names of tensors whose dtype or shape differs.
    """

    __module__ = "overwire"

    rows: tuple[DeltaRow, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    other: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the models have the same tensors, bit by bit."""
        return not (self.only_a or self.only_b or self.other or any(row.changed for row in self.rows))

    @property
    def changed(self) -> tuple[DeltaRow, ...]:
        """The rows of tensors that differ."""
        return tuple(row for row in self.rows if row.changed)

    def __repr__(self) -> str:
        elements, changed_elements = sum(row.elements for row in self.rows), sum(row.changed for row in self.rows)
        return (
            f"Diff({len(self.changed)} of {spell_count(len(self.rows), 'tensor')} differ, "
            f"in {changed_elements} of {spell_count(elements, 'element')}; "
            f"only_a={len(self.only_a)}, only_b={len(self.only_b)}, other={len(self.other)})"
        )

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        rows = (
            (row.name, row.dtype, list(row.shape), f"{row.changed:,} of {row.elements:,}", html.size(row.stored))
            for row in html.largest(self.changed, lambda row: row.changed)
        )
        head = ("tensor", "dtype", "shape", "elements changed", "delta")
        lists = [("only in a", self.only_a), ("only in b", self.only_b), ("another type or shape", self.other)]
        facts: list[tuple[str, object]] = [("equal", sum(not row.changed for row in self.rows))]
        facts += [(what, ", ".join(names)) for what, names in lists if names]
        table = html.table("Tensors that differ, the most changed first", head, rows, len(self.changed))
        return html.block("Diff", facts, *([table] if self.changed else []))


class Delta(HandleOwner):
    """A delta that `open_delta` has read into host memory and checked. It can be applied any number of times, and by
    several threads. It takes the files' stored bytes (`nbytes`), and about 40 bytes for each 256 KiB of a tensor that
    changes, but contains no decoded bytes."""

    __module__ = "overwire"
    __slots__ = ("__weakref__", "_about", "_number", "_places")

    def __init__(self, about: DeltaFile) -> None:
        self._about = about
        self._number = about["handle"]
        self._places = {name: at for at, name in enumerate(about["names"] or ())}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted, including those that do not change."""
        return tuple(self._places)

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the tensors that change."""
        about = self._about
        return tuple(name for name, at in self._places.items() if about["bases"][at] != about["news"][at])

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that was passed to `save_delta`."""
        return dict(self._about["metadata"] or {})

    @property
    def nbytes(self) -> int:
        """Bytes of the file, or of all shards."""
        return self._about["size"]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors that the delta names."""
        return self._about["bytes"]

    def dtype(self, name: str) -> str:
        """Returns a tensor's dtype, as safetensors names it."""
        return self._about["dtypes"][self._place_of(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return tuple(self._about["shapes"][self._place_of(name)] or ())

    def base(self, name: str) -> str:
        """Returns the digest, in hex, of the tensor that the delta is applied to."""
        return self._about["bases"][self._place_of(name)]

    def new(self, name: str) -> str:
        """Returns the digest, in hex, of the changed tensor."""
        return self._about["news"][self._place_of(name)]

    def stored(self, name: str) -> int:
        """Returns how many bytes a tensor takes in the file: 0 if it is unchanged or shares another tensor's bytes."""
        return self._about["stored"][self._place_of(name)]

    def _place_of(self, name: str) -> int:
        if name not in self._places:
            raise ArgumentError(f"overwire: the delta has no tensor {name!r}")
        return self._places[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __repr__(self) -> str:
        count = spell_count(len(self), "tensor")
        return f"Delta({count}, {len(self.changed)} change, {self.nbytes} bytes for {self.tensor_bytes})"

    @skip_at_exit
    def __del__(self) -> None:
        if number := getattr(self, "_number", 0):
            release(number)


def open_delta(source: DeltaLike, *, storage_options: StorageOptions | None = None) -> Delta:
    """Reads a whole delta into host memory and checks every byte. `apply_delta` then only has to apply it.

    source: the path or URI of a file, a folder of shards, or their index.json; or the
        contents of a delta file as bytes, which are copied.
    storage_options: as for `load_file`.

    Raises NotFoundError (even if only a shard is missing), CorruptError, FormatError if a file is not a delta or shards
    belong to different deltas, ArgumentError for a folder with several deltas, OutOfMemoryError before it reads more
    bytes than fit into memory, and NotSupportedError.
    """
    if isinstance(source, Delta):
        return source
    if isinstance(source, (bytes, bytearray, memoryview)):
        address, nbytes, keep = buffer_of(source)
        if not nbytes:
            raise ArgumentError("overwire: delta: it is empty")
        about = _verbs.delta_open({"uri": "delta"}, address, nbytes)
        del keep
        return Delta(about)
    path = local(source)
    return Delta(_verbs.delta_open({"uri": path, "storage": storage(storage_options, [path])}, 0, 0))


def chain_of(delta: Any, storage_options: StorageOptions | None = None) -> list[Delta]:
    """Opens one delta, or several deltas in order."""
    if isinstance(delta, (str, bytes, bytearray, memoryview, os.PathLike, Delta)):
        delta = [delta]
    if not isinstance(delta, Iterable):
        raise ArgumentError(f"overwire: delta: expected a path, bytes, a Delta or a list, got {type(delta).__name__}")
    chain = [open_delta(one, storage_options=storage_options) for one in delta]
    if not chain:
        raise ArgumentError("overwire: delta: the list is empty")
    return chain


def save_delta(
    new: Any,
    base: Any,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> DeltaReport:
    """Writes the changes from `base` to `new`. With this file, `apply_delta` turns `base` into `new`. The file is small
    if little has changed.

    new, base: each a dict of torch tensors or numpy arrays, a torch module, or the path or URI of a model. Both must
        have the same names, dtypes and shapes. A model is loaded to the host 1 GiB at a time (a larger tensor by
        itself). If both states of a tensor are on a GPU, the GPU encodes; otherwise tensors on a GPU are copied to the
        host.
    path: the file to write, or a writable URI. It is a folder if a folder with this name exists, if it ends in a slash,
        or if `new` is a folder and path does not end in .safetensors. In a folder the files are named delta, and other
        files of `new` are copied next to them, as by `convert`. The path appears complete or not at all.
    metadata: strings to store in the delta.
    max_shard_size: the most bytes of the delta in one file ("5GB", "512MiB", int). A longer delta is written in shards
        with an index.json, named like those of `save_file`. Each tensor is in one shard.

    The same tensors give the same file, on any device. Unchanged tensors, and chunks of 256 KiB that did not change,
    take no space. The file has the digests of each tensor before and after the change. The whole delta is in host
    memory before it is written.

    Raises ArgumentError for names, dtypes or shapes that differ and for a path that is the base, and the errors of
    `save_file`.
    """
    notes = {} if metadata is None else notes_of(metadata)
    target, most, watcher = local(path), parse_size(max_shard_size), watch(progress, "save")
    refuse_other_format(target)
    check_values(storage_options=storage_options)
    with (
        ModelSide(new, "new", storage_options) as now,
        ModelSide(base, "base", storage_options) as before,
        contextlib.ExitStack() as stack,
    ):
        before.refuse_target(target)
        same_names(now, before)
        handles: list[int] = []
        seconds = 0.0
        *some, last = batches(now, before)
        for names in some:
            some_tensors, numbers, keep = _pair_states(names, now, before)
            with Job(_verbs.delta_encode(some_tensors, numbers), "save", watcher) as job:
                part = job.finish()
            stack.callback(release, part["handle"])
            handles.append(part["handle"])
            seconds += part["seconds"]
            del keep
        tensors, numbers, keep = _pair_states(last, now, before)
        request: DeltaSave = {
            "path": target, "shard": most, "beside": _companions_of(new), "metadata": notes, "encoded": handles,
            "storage": storage(storage_options, [target], writes=True), **tensors,
        }  # fmt: skip
        with Job(_verbs.delta_save(request, numbers), "save", watcher) as job:
            report = _report_of(job.finish(), target)
        del keep
    report.seconds["encode"] += seconds
    return report


def _pair_states(names: list[str], now: ModelSide, before: ModelSide) -> tuple[DeltaTensors, bytes, Any]:
    """Returns the engine's arguments for some tensors in both states, and objects to keep alive until the engine has
    finished."""
    news, olds = now.take(names), before.take(names)
    columns = columns_of([*(news[name] for name in names), *(olds[name] for name in names)])
    count, keep = len(names), []
    for at, name in enumerate(names):
        both = at, count + at
        if columns.kinds[at] == ODD or any(column[at] != column[both[1]] for column in (columns.kinds, columns.cuda)):
            keep.append(pair(name, news[name], olds[name]))
            for place, one in zip(both, keep[-1], strict=True):
                columns.set(place, one)
    settle_devices(columns.cuda)
    streams, types = _streams_of(columns.cuda), list(columns.types)
    numbers = array("q")
    for at, cuda in enumerate(columns.cuda[:count]):
        numbers.extend((columns.pointers[at], columns.pointers[count + at], cuda, streams[cuda]))
    kinds = [types[kind] for kind in columns.kinds[:count]]
    request: DeltaTensors = {"names": names, "dtypes": [dtype for dtype, _ in kinds]}
    request["shapes"] = [list(shape) for _, shape in kinds]
    return request, numbers.tobytes(), (keep, news, olds)


def apply_delta(
    tensors: Any,
    delta: DeltaLike | Sequence[DeltaLike],
    *,
    missing: bool = False,
    storage_options: StorageOptions | None = None,
    timeout: float | None = None,
) -> DeltaReport:
    """Applies a delta, or several one after the other, to tensors in place, on the host and on GPUs.

    tensors: a dict of torch tensors or numpy arrays, or a torch module, equal to the delta's base. Tied tensors are
        changed once. Tensors that the delta does not name stay unchanged. A tensor that is not dense is changed through
        a copy. A tensor with elements that share memory (`expand`) is refused.
    delta: a path or URI, the contents of a delta file as bytes, or an open delta from `open_delta`. A list is a chain:
        the base of each delta is the result of the delta before it. The time depends on the size of the changes, not on
        the number of deltas.
    missing: whether the delta may name tensors that `tensors` lacks.
    timeout: seconds after which DeadlineError is raised, counted from the time when the delta has been read. The
        tensors are then unchanged. When the first tensor has begun to change, the timeout no longer applies.

    Work that is already queued on the current streams runs first, and all work is finished on return. The digest of
    each tensor is compared before the first byte changes, and again after the last. If a digest differs, changes are
    undone, and the error describes the tensors' state. Nothing else may use the tensors during the call.

    Raises DeltaBaseError if a tensor differs from the delta's base, ArgumentError,
    CorruptError, NotSupportedError, DeviceError, and the errors of `open_delta`.
    """
    time_limit(timeout)  # refuses an invalid timeout before anything is read
    check_values(missing=missing, storage_options=storage_options)
    return apply_part(tensors, chain_of(delta, storage_options), "", missing, time_limit(timeout))


def apply_part(
    tensors: Any, chain: Sequence[Delta], part: str, missing: bool = True, end: float | None = None
) -> DeltaReport:
    """Does a part of the work of `apply_delta`, for processes that change tensors together.

    part: "check" compares the digests and changes nothing; "change" does the rest after a "check"; "undo" reverts a
        "change"; "" does everything. end: the result of `time_limit`.
    """
    tensors_by_name = tensors_of(tensors, "tensors")
    names: list[str] = []
    files: list[int] = []
    rows: list[int] = []
    for name in tensors_by_name:
        number = next((number for number, one in enumerate(chain) if name in one), None)
        if number is not None:
            names.append(name)
            files.append(number)
            rows.append(chain[number]._places[name])
    targets = [tensors_by_name[name] for name in names]
    columns = columns_of(targets)
    copies: list[tuple[str, Any, Any]] = []  # tensors that are changed through a copy, and the copies
    for at, kind in enumerate(columns.kinds):
        if kind == ODD:
            place, is_copy = place_tensor(names[at], targets[at])
            columns.set(at, place)
            if is_copy:
                copies.append((names[at], targets[at], place.keep))
    settle_devices(columns.cuda)
    streams = _streams_of(columns.cuda)
    request: DeltaApply = {"files": [one._number for one in chain], "missing": bool(missing), "part": part}
    request["dtypes"] = [dtype for dtype, _ in columns.types]
    request["shapes"] = [list(shape) for _, shape in columns.types]
    request["streams"] = [streams.get(cuda, 0) for cuda in range(max(streams, default=0) + 1)]
    numbers = (array("q", one) for one in (files, rows, columns.kinds, columns.cuda, columns.pointers))
    job = _verbs.delta_apply(request, b"".join(one.tobytes() for one in numbers))
    with Job(job, "apply", None, end) as running:
        report = _report_of(running.finish())
    if part != "check":
        write_back(copies)
    return report


def merge_deltas(
    deltas: Iterable[DeltaLike],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    storage_options: StorageOptions | None = None,
) -> DeltaReport:
    """Writes a chain of deltas as a single delta: the same file that `save_delta` would write for the first delta's
    base and the last delta's result. Neither of these two models is needed. path, max_shard_size: as for `save_delta`.
    If the result is a folder of shards, other files of the last delta's folder are copied next to them.

    Raises DeltaBaseError if the base of a delta is not the result of the delta before it, and the errors of
    `open_delta` and `save_delta`.
    """
    if not isinstance(deltas, Iterable) or isinstance(deltas, (str, bytes, Mapping)):
        raise ArgumentError(f"overwire: deltas: expected a list of paths or Deltas, got {type(deltas).__name__}")
    names = list(deltas)
    target, most = local(path), parse_size(max_shard_size)
    refuse_other_format(target)
    check_values(storage_options=storage_options)
    chain = chain_of(names, storage_options)
    merge: DeltaMerge = {"files": [one._number for one in chain], "path": target, "shard": most}
    merge["beside"], merge["storage"] = _companions_of(names[-1]), storage(storage_options, [target], writes=True)
    with Job(_verbs.delta_merge(merge), "save", None) as running:
        report = _report_of(running.finish(), target)
    del chain
    return report


def diff(a: Any, b: Any, *, progress: ProgressLike = None, storage_options: StorageOptions | None = None) -> Diff:
    """Compares two models bit by bit. The result has the tensors that differ, the number of changed elements, and the
    bytes that a delta of each tensor would take.

    a, b: as for `save_delta`, but names, dtypes and shapes may differ. Tensors on a GPU are copied to the host.

    Raises the errors of `save_delta`.
    """
    other: list[str] = []
    rows: list[DeltaRow] = []
    watcher = watch(progress, "verify")
    check_values(storage_options=storage_options)
    with ModelSide(a, "a", storage_options) as one, ModelSide(b, "b", storage_options) as two:
        for names in batches(one, two):
            lefts, rights = one.take(names), two.take(names)
            both, numbers = [], array("q")
            for name in names:
                older, right = hosted(name, lefts[name]), hosted(name, rights[name])
                if (older.dtype, older.shape) != (right.dtype, right.shape):
                    other.append(name)
                    continue
                both.append((name, older, right))
                numbers.extend((right.pointer, older.pointer, 0, 0))
            request: DeltaTensors = {
                "names": [name for name, _, _ in both],
                "dtypes": [older.dtype for _, older, _ in both],
                "shapes": [list(older.shape) for _, older, _ in both],
            }
            with Job(_verbs.delta_diff(request, numbers.tobytes()), "diff", watcher) as job:
                rows += [DeltaRow(**{**row, "shape": tuple(row["shape"] or ())}) for row in job.finish() or ()]
    only_a, only_b = sorted(one.sizes.keys() - two.sizes.keys()), sorted(two.sizes.keys() - one.sizes.keys())
    return Diff(tuple(rows), tuple(only_a), tuple(only_b), tuple(sorted(other)))


def _report_of(said: Any, path: str = "") -> DeltaReport:
    stages, files = said.pop("stages") or (), tuple(said.pop("files") or ())
    return DeltaReport(**said, path=path, files=files, seconds={stage["name"]: stage["seconds"] for stage in stages})


def _companions_of(model: Any) -> str:
    """Returns the path of a model, which may be a folder with auxiliary files, or "" for tensors in memory."""
    return local(model) if isinstance(model, (str, os.PathLike)) else ""


def _streams_of(devices: Iterable[int]) -> dict[int, int]:
    """Returns the current stream of each device, or 0 for the host."""
    return {cuda: gpu.current_stream(cuda - 1) if cuda else 0 for cuda in set(devices)}


def load_on(
    load: Callable[[], dict[str, Any]], base: Any, delta: Any, device: Any, framework: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Implements `load_file(base=)`. Returns new tensors, made from the base by the delta or chain. load: loads the
    base, if it is not tensors in memory."""
    if options.get("dtype") is not None:
        raise NotSupportedError("overwire: load_file: base= cannot be used with dtype=: cast the returned tensors")
    if framework == "bytes":
        raise NotSupportedError("overwire: load_file: base= needs framework='pt' or 'np'")
    reach: StorageOptions | None = options.get("storage_options")
    chain = chain_of(delta, reach)  # first, so that an invalid delta is refused before the larger base is loaded
    has_tensors = isinstance(base, Mapping) or hasattr(base, "state_dict")
    tensors = _copy_base(base, device, options) if has_tensors else load()
    apply_delta(tensors, chain, missing=options.get("keys") is not None or options.get("filter") is not None)
    return tensors


def _copy_base(base: Any, device: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns copies of tensors. Tied tensors stay tied."""
    keys, choice = options.get("keys"), options.get("filter")
    selection = None if keys is None else set(keys)
    result: dict[str, Any] = {}
    copies: dict[Any, Any] = {}
    for name, tensor in tensors_of(base, "base").items():
        if (selection is not None and name not in selection) or (choice is not None and not choice(name)):
            continue
        if frame_of(tensor).name == "torch":
            from ..frameworks.memory import check_memory, identity_of

            check_memory(tensor, f"overwire: load_file: base: {name!r}", name)
            if tensor.is_quantized:
                text = f"overwire: load_file: base: {name!r} is quantised, which deltas do not support"
                raise NotSupportedError(text, tensor=name)
            where, key = check_device(device, frame_of(tensor)), identity_of(tensor)
            if key not in copies:
                copies[key] = tensor.detach().to(where, copy=True).contiguous()
            result[name] = copies[key]
        else:
            result[name] = tensor.copy()
    return result
