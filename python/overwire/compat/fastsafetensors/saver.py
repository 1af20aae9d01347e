"""Saves a model as a set of shards. The metadata of each shard identifies the set."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import overwire
from overwire._compat_api import start_thread
from overwire.stores import open_writer

from .common import MAX_HEADER, SafeTensorsMetadata
from .frameworks import TensorBase, get_framework_op
from .st_types import DType

KEY_SHARD_INDEX = "fst.shard.index"
KEY_SHARD_COUNT = "fst.shard.count"
KEY_SHARD_SET = "fst.shard.set"
_KEYS = {KEY_SHARD_INDEX, KEY_SHARD_COUNT, KEY_SHARD_SET}


class ShardSetError(ValueError):
    """The files are not the complete set of shards of one save."""


def shard_paths(base: str, num_shards: int) -> list[str]:
    """Returns the paths base-00001-of-00002.safetensors and so on. Raises ValueError if num_shards is not positive."""
    if num_shards < 1:
        raise ValueError(f"num_shards {num_shards} must be positive")
    return [f"{base}-{at:05d}-of-{num_shards:05d}.safetensors" for at in range(1, num_shards + 1)]


def validate_shard_set(metas: Sequence[SafeTensorsMetadata]) -> None:
    """Raises ShardSetError unless the files are all shards of one save, in order."""
    if not metas:
        raise ShardSetError("no files")
    idents = set()
    for at, meta in enumerate(metas):
        metadata = meta.metadata if isinstance(meta.metadata, Mapping) else {}
        try:
            index, count = int(metadata[KEY_SHARD_INDEX]), int(metadata[KEY_SHARD_COUNT])
            ident = metadata[KEY_SHARD_SET]
        except (KeyError, TypeError, ValueError):
            raise ShardSetError(f"{meta.src}: it is not a shard of a set") from None
        if (index, count) != (at, len(metas)):
            raise ShardSetError(f"{meta.src}: it is shard {index} of {count}, where {at} of {len(metas)} was expected")
        idents.add(ident)
    if len(idents) > 1:
        raise ShardSetError(f"the files belong to {len(idents)} saves: {[meta.src for meta in metas]}")


@dataclass
class WriteEntry:
    """A tensor to save. dtype, shape (in elements), nbytes: as in the file. source: the tensor's data, which only the
    fill function interprets."""

    name: str
    dtype: DType
    shape: list[int]
    nbytes: int
    source: Any = None


@dataclass
class ShardPlan:
    """A file to write. header: its first bytes, including the length before the JSON.
    offsets: the range [begin, end) of each entry in the file. total_bytes: the file's size."""

    path: str
    entries: list[WriteEntry]
    header: bytes
    offsets: dict[str, tuple[int, int]] = field(default_factory=dict)
    total_bytes: int = 0


#: A function that is called once per save, with all pairs (buffer, entry), the largest first. It must fill the buffers
#: before it returns, and must not keep them.
FillFn = Callable[[list[tuple[memoryview, WriteEntry]]], None]

#: A function that computes the metadata of a shard from its entries.
ShardMetadataFn = Callable[[Sequence[WriteEntry]], Mapping[str, str]]


def _wrap(tensor: Any, framework: str) -> TensorBase:
    return tensor if isinstance(tensor, TensorBase) else get_framework_op(framework).wrap_tensor(tensor)


def plain_entry(name: str, tensor: Any, *, framework: str = "pytorch") -> WriteEntry:
    """Makes an entry from a tensor, wrapped or not. Raises TypeError for a dtype that safetensors lacks."""
    tensor_base = _wrap(tensor, framework)
    return WriteEntry(name, tensor_base.dtype, tensor_base.get_shape(), tensor_base.get_nbytes(), tensor)


def per_entry_fill(fn: Callable[[memoryview, WriteEntry], None], num_threads: int = 8) -> FillFn:
    """Makes a fill function that calls `fn` for each entry on several threads."""
    if num_threads < 1:
        raise ValueError(f"num_threads {num_threads} must be positive")

    def fill(work: list[tuple[memoryview, WriteEntry]]) -> None:
        with ThreadPoolExecutor(num_threads) as pool:
            for future in [start_thread(pool.submit, fn, buffer, entry) for buffer, entry in work]:
                future.result()

    return fill


def tensor_fill(num_threads: int = 8, *, framework: str = "pytorch") -> FillFn:
    """Makes a fill function that copies tensors, which are the entries' sources."""
    return per_entry_fill(lambda buffer, entry: _wrap(entry.source, framework).copy_to_buffer(buffer), num_threads)


def _texts(given: Mapping[str, str] | None, what: str) -> dict[str, str]:
    for key, value in (given or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"{what}: {key!r}: metadata must map strings to strings")
    return dict(given or {})


def _check_entries(entries: Sequence[WriteEntry]) -> None:
    names = set()
    for entry in entries:
        name, bits = entry.name, entry.dtype.bits
        if name in names or name == "__metadata__":
            raise ValueError(f"tensor {name!r}: the name occurs twice or is reserved for the metadata")
        names.add(name)
        for size in entry.shape:
            if size < 0:
                raise ValueError(f"tensor {name!r}: invalid shape {entry.shape}: expected integers of 0 or more")
            bits *= size
        if entry.dtype is DType.AUTO or bits != 8 * entry.nbytes:
            kind = f"{entry.dtype.value} {entry.shape}"
            raise ValueError(f"tensor {name!r}: its {entry.nbytes} bytes do not match {kind}")
        if entry.dtype is DType.F4 and (not entry.shape or entry.shape[-1] % 2):
            raise ValueError(f"tensor {name!r}: F4 comes in pairs: the last dimension of {entry.shape} is odd")


def plan_shards(
    entries: Sequence[WriteEntry],
    paths: Sequence[str],
    *,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadataFn | None = None,
    header_align: int = 8,
) -> list[ShardPlan]:
    """Plans the files of `write_shards`. Entries are distributed over the paths, the largest
    first, each to the file with the fewest bytes so far. Nothing is written.

    metadata: strings for all files. shard0_metadata: strings for the first file.
    shard_metadata: computes strings for each file from its entries. header_align: a multiple of 8. Data begin at a
    multiple of header_align and of 64. Raises ValueError for missing or repeated paths, a repeated name, bytes that do
    not match dtype and shape, metadata that are not strings or that the saver reserves, and a header of more than 100
    MB.
    """
    paths = [os.fspath(path) for path in paths]
    if not paths or len({os.path.abspath(path) for path in paths}) != len(paths):
        raise ValueError(f"paths: expected at least one path, and no path twice, got {paths}")
    if header_align < 8 or header_align % 8:
        raise ValueError(f"header_align {header_align}: expected a multiple of 8")
    _check_entries(entries)
    texts = [_texts(metadata, "metadata") for _ in paths]
    texts[0] |= _texts(shard0_metadata, "shard0_metadata")
    shards: list[list[WriteEntry]] = [[] for _ in paths]
    sizes = [0] * len(paths)
    for entry in sorted(entries, key=lambda entry: -entry.nbytes):
        at = sizes.index(min(sizes))
        shards[at].append(entry)
        sizes[at] += entry.nbytes
    ident, plans = uuid.uuid4().hex, []
    for at, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        texts[at] |= {KEY_SHARD_INDEX: str(at), KEY_SHARD_COUNT: str(len(paths)), KEY_SHARD_SET: ident}
        if shard_metadata is not None:
            more = _texts(shard_metadata(tuple(shard)), "shard_metadata")
            if clashes := _KEYS & set(more):
                raise ValueError(f"shard_metadata: the keys {sorted(clashes)} are reserved for the saver")
            texts[at] |= more
        table: dict[str, Any] = {}
        end = 0
        for entry in shard:
            begin, end = end, end + entry.nbytes
            table[entry.name] = {"dtype": entry.dtype.value, "shape": list(entry.shape), "data_offsets": [begin, end]}
        text = json.dumps({**table, "__metadata__": texts[at]}, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % math.lcm(64, header_align))
        if len(text) > MAX_HEADER:
            raise ValueError(f"{path}: HeaderTooLarge: {len(text)} bytes")
        start = 8 + len(text)
        ranges = {name: row["data_offsets"] for name, row in table.items()}
        offsets = {name: (start + begin, start + end) for name, (begin, end) in ranges.items()}
        plans.append(ShardPlan(path, shard, len(text).to_bytes(8, "little") + text, offsets, start + end))
    return plans


def _check_plan(plan: ShardPlan) -> None:
    # Callers may make or change plans. The offsets must match the header.
    try:
        table = json.loads(plan.header[8:])
        size = len(plan.header)
        fits = int.from_bytes(plan.header[:8], "little") == size - 8 and size <= plan.total_bytes
        for entry in plan.entries:
            row, (begin, end) = table[entry.name], plan.offsets[entry.name]
            fits &= [begin - size, end - size] == row["data_offsets"] and end - begin == entry.nbytes
            fits &= (row["dtype"], row["shape"]) == (entry.dtype.value, list(entry.shape))
        fits &= set(table) - {"__metadata__"} == {entry.name for entry in plan.entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{plan.path}: the plan's header is malformed: {error!r}") from error
    if not fits:
        raise ValueError(f"{plan.path}: the plan's header, offsets and entries disagree")


def _check_room(folder: str, nbytes: int, min_free_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free - nbytes < min_free_bytes:
        raise OSError(28, f"{nbytes} bytes to write, {free} free, and {min_free_bytes} must stay free", folder)


def write_shards(
    plans: Sequence[ShardPlan], fill: FillFn, *, min_free_bytes: int = 0, fsync: bool = False
) -> list[str]:
    """Writes the planned files and returns their paths. `fill` writes the tensors' bytes
    directly into the mapped files.

    Each file gets its name when all files are complete and on the disk. min_free_bytes: the
    space that must stay free on each disk. fsync has no effect: files are always synced.
    Missing folders are made. Before `fill` is called, the function raises ValueError for inconsistent plans or equal
    paths, FormatError for headers that break the format's rules, and OSError if there is not enough space. An exception
    of `fill` is passed on. In all these cases no file remains.
    """
    paths = [os.path.abspath(plan.path) for plan in plans]
    if len(set(paths)) != len(paths):
        raise ValueError(f"plans: a path occurs twice: {paths}")
    counts: dict[int, int] = {}
    for plan, path in zip(plans, paths, strict=True):
        _check_plan(plan)
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        disk = os.stat(folder).st_dev
        counts[disk] = counts.get(disk, 0) + plan.total_bytes
        _check_room(folder, counts[disk], min_free_bytes)
    with ExitStack() as stack:
        writers: list[Any] = []
        work: list[tuple[memoryview, WriteEntry]] = []
        mappings: list[tuple[memoryview, mmap.mmap]] = []
        for path, plan in zip(paths, plans, strict=True):
            writers.append(open_writer(path))
            stack.callback(writers[-1].drop)
            number = writers[-1].fileno()
            os.posix_fallocate(number, 0, plan.total_bytes)  # a full disk raises here; a write would get SIGBUS
            memory = mmap.mmap(number, plan.total_bytes)
            mappings.append((memoryview(memory), memory))
            memory[: len(plan.header)] = plan.header
            try:
                overwire.safe_open(writers[-1], framework="bytes").close()  # validates the header
            except overwire.FormatError as error:
                raise overwire.FormatError(f"{plan.path}: {error}", source=plan.path) from error
            for entry in plan.entries:
                begin, end = plan.offsets[entry.name]
                work.append((mappings[-1][0][begin:end], entry))
        fill(sorted(work, key=lambda one: -one[1].nbytes))
        for buffer, _ in work:
            buffer.release()
        for view, memory in mappings:
            view.release()
            memory.close()  # raises BufferError if `fill` has kept a view
        for writer in writers:
            writer.close()
    return [plan.path for plan in plans]


def save_sharded(
    entries: Sequence[WriteEntry],
    base: str,
    *,
    num_shards: int = 16,
    fill: FillFn | None = None,
    framework: str = "pytorch",
    min_free_bytes: int = 0,
    fsync: bool = False,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadataFn | None = None,
    header_align: int = 8,
) -> list[str]:
    """Plans and writes base-00001-of-0000N.safetensors and so on, and returns the paths.
    fill: None means that the sources are tensors of `framework`."""
    saver = ParallelSaver(
        num_shards=num_shards, framework=framework, fill=fill, min_free_bytes=min_free_bytes, fsync=fsync,
        shard_metadata=shard_metadata
    )  # fmt: skip
    return saver.save_entries(
        entries, base, metadata=metadata, shard0_metadata=shard0_metadata, header_align=header_align
    )


class ParallelSaver:
    """Saves tensors as `num_shards` files of about equal size.

    framework: the framework of unwrapped tensors. num_threads: the number of tensors, or of
    compressed files, that are written simultaneously. fill: writes the bytes of all entries
    to buffers; None: the sources are tensors. Other arguments are as for `plan_shards` and
    `write_shards`.
    compress: whether to compress shards into overwire's container. The filled buffers then stay in host memory until
    they are written. Data then begin at multiples of 64, and header_align must divide 64.
    """

    def __init__(
        self,
        *,
        num_shards: int = 16,
        framework: str = "pytorch",
        num_threads: int = 8,
        shard_metadata: ShardMetadataFn | None = None,
        fill: FillFn | None = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
        compress: bool = False,
    ) -> None:
        if num_shards < 1 or num_threads < 1:
            raise ValueError(f"num_shards {num_shards} and num_threads {num_threads} must be positive")
        self.num_shards, self.num_threads, self.framework, self.fill = num_shards, num_threads, framework, fill
        self.shard_metadata, self.compress = shard_metadata, compress
        self.min_free_bytes, self.fsync = min_free_bytes, fsync

    def save(
        self,
        tensors: Mapping[str, Any],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Writes base-00001-of-0000N.safetensors and so on, and returns the paths. Raises the errors
        of `plan_shards`, `write_shards` and, with compress, `overwire.save_file`. After an error, shards may be
        missing; `validate_shard_set` detects this."""
        entries = [plain_entry(name, tensor, framework=self.framework) for name, tensor in tensors.items()]
        return self.save_entries(
            entries, base, metadata=metadata, shard0_metadata=shard0_metadata, header_align=header_align
        )

    def save_entries(
        self,
        entries: Sequence[WriteEntry],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Does the same as `save`, for entries."""
        if self.compress and 64 % header_align:
            raise ValueError(f"header_align {header_align}: expected a divisor of 64, because the files are compressed")
        plans = plan_shards(
            entries, shard_paths(os.fspath(base), self.num_shards), metadata=metadata, shard0_metadata=shard0_metadata,
            shard_metadata=self.shard_metadata, header_align=header_align,
        )  # fmt: skip
        if self.compress:
            return self._compressed(plans)
        fill = tensor_fill(self.num_threads, framework=self.framework) if self.fill is None else self.fill
        return write_shards(plans, fill, min_free_bytes=self.min_free_bytes, fsync=self.fsync)

    def _compressed(self, plans: list[ShardPlan]) -> list[str]:
        total = sum(entry.nbytes for plan in plans for entry in plan.entries)
        folder = os.path.dirname(os.path.abspath(plans[0].path))
        os.makedirs(folder, exist_ok=True)
        _check_room(folder, total, self.min_free_bytes)
        entries = sorted((entry for plan in plans for entry in plan.entries), key=lambda entry: -entry.nbytes)
        values: dict[str, Any] = {}
        buffers: list[ctypes.Array[ctypes.c_char]] = []  # keeps the memory of the values alive
        if self.fill is None:
            values = {
                entry.name: entry.source.get_raw() if isinstance(entry.source, TensorBase) else entry.source
                for entry in entries
            }
        else:
            buffers = [ctypes.create_string_buffer(max(entry.nbytes, 1)) for entry in entries]
            pairs = list(zip(buffers, entries, strict=True))
            self.fill([(memoryview(full).cast("B")[: entry.nbytes], entry) for full, entry in pairs])
            for full, entry in pairs:
                at = ctypes.addressof(full) if entry.nbytes else 0
                values[entry.name] = overwire.TensorSpec(
                    dtype=entry.dtype.value, shape=entry.shape, data_ptr=at, data_len=entry.nbytes
                )

        def write(plan: ShardPlan) -> str:
            metadata = json.loads(plan.header[8:])["__metadata__"]
            overwire.save_file(
                {entry.name: values[entry.name] for entry in plan.entries}, plan.path, metadata, compress=True
            )
            return plan.path

        with ThreadPoolExecutor(self.num_threads) as pool:
            return list(start_thread(pool.map, write, plans))
