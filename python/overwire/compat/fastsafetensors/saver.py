"""Saving a model as a set of shards that know that they belong together."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import overwire

from .common import SafeTensorsMetadata
from .frameworks import TensorBase
from .st_types import DType

__all__ = [
    "KEY_SHARD_COUNT", "KEY_SHARD_INDEX", "KEY_SHARD_SET", "FillFn", "ParallelSaver", "ShardSetError", "WriteEntry", "per_entry_fill",
    "plain_entry", "shard_paths", "validate_shard_set",
]  # fmt: skip

KEY_SHARD_INDEX = "fst.shard.index"
KEY_SHARD_COUNT = "fst.shard.count"
KEY_SHARD_SET = "fst.shard.set"


class ShardSetError(ValueError):
    """Files that are not one complete set of shards."""


def shard_paths(base: str, num_shards: int) -> list[str]:
    """base-00001-of-00002.safetensors and so on."""
    return [f"{base}-{at:05d}-of-{num_shards:05d}.safetensors" for at in range(1, num_shards + 1)]


def validate_shard_set(metas: Sequence[SafeTensorsMetadata]) -> None:
    """ShardSetError unless these are all shards of one save."""
    if not metas:
        raise ShardSetError("no files")
    seen: dict[int, str] = {}
    first: tuple[str, str] | None = None
    for meta in metas:
        noted = meta.metadata if isinstance(meta.metadata, Mapping) else {}
        try:
            index, mine = int(noted[KEY_SHARD_INDEX]), (noted[KEY_SHARD_SET], noted[KEY_SHARD_COUNT])
        except (KeyError, ValueError):
            raise ShardSetError(f"{meta.src}: it is not a shard of a set") from None
        if first is None:
            first = mine
        if mine != first:
            raise ShardSetError(f"{meta.src}: it is of another save than {metas[0].src}")
        if index in seen:
            raise ShardSetError(f"{meta.src}: it is shard {index}, as {seen[index]} is")
        seen[index] = meta.src
    assert first is not None
    missing = sorted(set(range(int(first[1]))) - set(seen))
    if missing or len(seen) != int(first[1]):
        raise ShardSetError(f"shards {missing} of {first[1]} are missing")


@dataclass
class WriteEntry:
    """A tensor to be saved: its dtype, shape (in elements) and bytes in the file,
    and its source, which only the fill function needs to understand."""

    name: str
    dtype: DType
    shape: list[int]
    nbytes: int
    source: Any = None


#: Called once with every (buffer, entry) of a save, the largest first. When it
#: returns, the buffers are full; it keeps none of them.
FillFn = Callable[[list[tuple[memoryview, WriteEntry]]], None]


def _raw(tensor: Any) -> Any:
    return tensor.get_raw() if isinstance(tensor, TensorBase) else tensor


def plain_entry(name: str, tensor: Any, *, framework: str = "pytorch") -> WriteEntry:
    """The entry of a tensor, wrapped or not, as it is."""
    raw = _raw(tensor)
    kind = str(raw.dtype).rpartition(".")[2]
    spec = overwire.TensorSpec(dtype=kind, shape=list(raw.shape), data_ptr=0, data_len=raw.nbytes)
    return WriteEntry(name, DType(spec.dtype), spec.shape, spec.data_len, tensor)


def per_entry_fill(fn: Callable[[memoryview, WriteEntry], None], num_threads: int = 8) -> FillFn:
    """A fill function that calls `fn` for each entry, on several threads."""
    if num_threads < 1:
        raise ValueError(f"num_threads {num_threads} must be positive")

    def fill(work: list[tuple[memoryview, WriteEntry]]) -> None:
        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(fn, buffer, entry) for buffer, entry in work]:
                done.result()

    return fill


class ParallelSaver:
    """Saves tensors as `num_shards` files of about equal size, several at a time.

    framework: "pytorch" (torch tensors) or "numpy". num_threads: files written
    at a time. shard_metadata: a shard's entries -> texts for its metadata.
    fill: for `save_entries`: brings the bytes of entries, all at once, into
    buffers; None: sources are tensors, which are saved without a copy.
    min_free_bytes: what must stay free on the disk: OSError before anything is
    written. Each file is synced, and is complete or absent; fsync is taken, and
    always so. compress: stores shards compressed, in overwire's container.
    """

    def __init__(
        self,
        *,
        num_shards: int = 16,
        framework: str = "pytorch",
        num_threads: int = 8,
        shard_metadata: Callable[[Sequence[WriteEntry]], Mapping[str, str]] | None = None,
        fill: FillFn | None = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
        compress: bool = False,
    ) -> None:
        if num_shards < 1 or num_threads < 1:
            raise ValueError(f"num_shards {num_shards} and num_threads {num_threads} must be positive")
        self.num_shards, self.num_threads, self.fill = num_shards, num_threads, fill
        self.shard_metadata, self.min_free_bytes, self.compress = shard_metadata, min_free_bytes, compress

    def save(
        self,
        tensors: Mapping[str, Any],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Writes base-00001-of-0000N.safetensors and so on; their paths.

        metadata: texts for all shards; shard0_metadata: for the first alone.
        header_align: a multiple of 8 that divides 64, where data begin anyway.
        Raises what `overwire.save_file` raises; then shards may be missing, and
        `validate_shard_set` says so.
        """
        entries = [plain_entry(name, tensor) for name, tensor in tensors.items()]
        return self._save(entries, None, base, metadata, shard0_metadata, header_align)

    def save_entries(
        self,
        entries: Sequence[WriteEntry],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """As `save`, of entries. With `fill` the host holds the bytes of all of them.
        ValueError for a name twice, and for bytes that do not fit dtype and shape."""
        return self._save(entries, self.fill, base, metadata, shard0_metadata, header_align)

    def _save(
        self, entries: Sequence[WriteEntry], fill: FillFn | None, base: str, metadata: Mapping[str, str] | None,
        shard0_metadata: Mapping[str, str] | None, header_align: int,
    ) -> list[str]:  # fmt: skip
        if header_align < 8 or header_align % 8 or 64 % header_align:
            raise ValueError(f"header_align {header_align}: expected 8, 16, 32 or 64")
        names = set()
        for entry in entries:
            count = entry.dtype.bits
            for size in entry.shape:
                count *= size
            if entry.name in names or count != 8 * entry.nbytes:
                raise ValueError(f"tensor {entry.name!r}: twice, or not {entry.nbytes} bytes of {entry.dtype.value} {entry.shape}")
            names.add(entry.name)
        base = os.fspath(base)
        paths = shard_paths(base, self.num_shards)
        folder = os.path.dirname(os.path.abspath(base))
        total = sum(entry.nbytes for entry in entries)
        free = shutil.disk_usage(folder).free
        if free - total < self.min_free_bytes:
            raise OSError(28, f"{total} bytes to write, {free} free, {self.min_free_bytes} to stay free", folder)
        # The largest first, each to the shard with the fewest bytes.
        shards: list[list[WriteEntry]] = [[] for _ in paths]
        sizes = [0] * len(paths)
        largest = sorted(entries, key=lambda entry: -entry.nbytes)
        for entry in largest:
            at = sizes.index(min(sizes))
            shards[at].append(entry)
            sizes[at] += entry.nbytes
        ident = uuid.uuid4().hex
        noted: list[dict[str, str]] = []
        for at, shard in enumerate(shards):
            noted.append({**(metadata or {}), **((shard0_metadata or {}) if at == 0 else {})})
            noted[-1] |= {KEY_SHARD_INDEX: str(at), KEY_SHARD_COUNT: str(len(paths)), KEY_SHARD_SET: ident}
            if self.shard_metadata is not None:
                more = self.shard_metadata(tuple(shard))
                if taken := {KEY_SHARD_INDEX, KEY_SHARD_COUNT, KEY_SHARD_SET} & set(more):
                    raise ValueError(f"shard_metadata: {sorted(taken)} are the saver's own")
                noted[-1] |= more
        values: dict[str, Any] = {entry.name: _raw(entry.source) for entry in entries}
        filled: list[ctypes.Array[ctypes.c_char]] = []  # what the values point to, until all is written
        if fill is not None:
            filled = [ctypes.create_string_buffer(max(entry.nbytes, 1)) for entry in largest]
            fill([(memoryview(full).cast("B")[: entry.nbytes], entry) for full, entry in zip(filled, largest, strict=True)])
            for full, entry in zip(filled, largest, strict=True):
                at = ctypes.addressof(full) if entry.nbytes else 0
                values[entry.name] = overwire.TensorSpec(dtype=entry.dtype.value, shape=entry.shape, data_ptr=at, data_len=entry.nbytes)

        def write(at: int) -> None:
            overwire.save_file({entry.name: values[entry.name] for entry in shards[at]}, paths[at], noted[at], compress=self.compress)

        with ThreadPoolExecutor(self.num_threads) as pool:
            for done in [pool.submit(write, at) for at in range(len(paths))]:
                done.result()
        del filled
        return paths
