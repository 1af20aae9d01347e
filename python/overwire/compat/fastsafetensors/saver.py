"""Saving a model as a set of shards that know that they belong together."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import overwire

from .common import SafeTensorsMetadata

__all__ = ["KEY_SHARD_COUNT", "KEY_SHARD_INDEX", "KEY_SHARD_SET", "ParallelSaver", "ShardSetError", "shard_paths", "validate_shard_set"]

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


class ParallelSaver:
    """Saves tensors as `num_shards` files of about equal size, several at a time.

    framework: "pytorch" (torch tensors) or "numpy". num_threads: files written
    at a time. shard_metadata: (index, names) -> texts for that shard's metadata.
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
        shard_metadata: Callable[[int, list[str]], Mapping[str, str]] | None = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
        compress: bool = False,
    ) -> None:
        if num_shards < 1 or num_threads < 1:
            raise ValueError(f"num_shards {num_shards} and num_threads {num_threads} must be positive")
        self.num_shards, self.num_threads = num_shards, num_threads
        self.shard_metadata, self.min_free_bytes, self.compress = shard_metadata, min_free_bytes, compress

    def save(
        self,
        tensors: Mapping[str, Any],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Writes base-00001-of-0000N.safetensors and so on; their paths.

        metadata: texts for all shards; shard0_metadata: for the first alone.
        Raises what `overwire.save_file` raises; then shards may be missing, and
        `validate_shard_set` says so.
        """
        base = os.fspath(base)
        paths = shard_paths(base, self.num_shards)
        folder = os.path.dirname(os.path.abspath(base))
        total = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(folder).free
        if free - total < self.min_free_bytes:
            raise OSError(28, f"{total} bytes to write, {free} free, {self.min_free_bytes} to stay free", folder)
        # The largest first, each to the shard with the fewest bytes.
        shards: list[dict[str, Any]] = [{} for _ in paths]
        sizes = [0] * len(paths)
        for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
            at = sizes.index(min(sizes))
            shards[at][name] = tensors[name]
            sizes[at] += tensors[name].nbytes
        ident = uuid.uuid4().hex

        def write(at: int) -> None:
            noted = dict(metadata or {})
            if at == 0:
                noted.update(shard0_metadata or {})
            if self.shard_metadata is not None:
                noted.update(self.shard_metadata(at, list(shards[at])))
            noted.update({KEY_SHARD_INDEX: str(at), KEY_SHARD_COUNT: str(len(paths)), KEY_SHARD_SET: ident})
            overwire.save_file(shards[at], paths[at], noted, compress=self.compress)

        with ThreadPoolExecutor(self.num_threads) as pool:
            for done in [pool.submit(write, at) for at in range(len(paths))]:
                done.result()
        return paths
