"""Reads folders of torch's HuggingFaceStorageWriter(save_distributed=True): safetensors files with parts of tensors.

    shard-00001-model-00001-of-00001.safetensors of rank 0; the numbers: rank, file, files
    shard-00002-model-00001-of-00001.safetensors    of rank 1

The metadata of each file state the offset of each part in its whole tensor. No file states the shape of a whole tensor
or the number of ranks. As in torch, a tensor ends where its last part ends. The numbers of the ranks must not have
gaps.

Source: torch.distributed.checkpoint.HuggingFaceStorageWriter, and its files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from .._tables import BITS
from ..errors import AccessError, FormatError, NotFoundError, NotSupportedError
from .content import Content
from .image import SHARDING, Part, read_parts
from .joined import Chunk, Files, Joined, check_cover, open_files
from .links import may_follow

_SHARD = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors")


def shards_in(names: list[str]) -> list[str]:
    """Returns the names that are shards, or an empty list if the folder has other weights."""
    weights = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    return sorted(weights) if weights and all(map(_SHARD.fullmatch, weights)) else []


@contextlib.contextmanager
def open_shards(folder: str, names: list[str]) -> Iterator[Content]:
    """Opens shards with these names, and joins the parts of each tensor.

    Raises NotFoundError for a missing rank, FormatError for parts that overlap or lack elements, and CorruptError for a
    truncated file.
    """
    with open_files() as files:
        yield _read_content(folder, names, files)
        files.compare_files()


def _read_content(folder: str, names: list[str], files: Files) -> Content:
    ranks = {int(_SHARD.fullmatch(name)[1]) for name in names}  # type: ignore[index]
    if missing := sorted(set(range(1, max(ranks) + 1)) - ranks)[:5] if max(ranks) <= 1 << 20 else [1]:
        text = f"overwire: open {folder}: the shards of {', '.join(f'shard-{one:05d}' for one in missing)} are missing"
        raise NotFoundError(f"{text}: fetch the folder again", source=folder)
    numbers = {(int(one[2]), int(one[3])) for one in map(_SHARD.fullmatch, names) if one}
    most = max(of for _, of in numbers)
    if lacking := sorted(set(range(1, min(most, len(names) + 1) + 1)) - {number for number, _ in numbers}):
        # A mapping of torch's writer may skip a number, but without an index this cannot be distinguished from a lost
        # file.
        text = f"overwire: open {folder}: no rank has a file {lacking[0]:05d} of {most:05d}: fetch the folder again, "
        raise NotFoundError(f"{text}or consolidate it with torch if its mapping skips this number", source=folder)
    found: dict[str, list[tuple[str, Part]]] = {}
    for name in sorted(names):
        path = os.path.join(folder, name)
        if not may_follow(folder, path):
            raise AccessError(f"overwire: open {path}: a link that leads out of the folder", source=path)
        for tensor, part in read_parts(files, path).items():
            if part.offsets is None:
                why = f"{SHARDING} does not state its offset"
                raise FormatError(f"overwire: open {path}: tensor {tensor!r}: {why}", source=path, tensor=tensor)
            found.setdefault(tensor, []).append((path, part))
    return Content([(name, _join(name, parts)) for name, parts in found.items()], {}, [], files.mode)


def _join(name: str, parts: list[tuple[str, Part]]) -> Joined:
    path, first = parts[0]

    def error_at(why: str, number: int) -> FormatError:
        at = parts[number][0]
        text = f"overwire: open {at}: tensor {name!r}: chunk {number}: {why}"
        return FormatError(text, source=at, tensor=name, chunk=number)

    for number, (_, part) in enumerate(parts):
        if part.dtype != first.dtype or len(part.shape) != len(first.shape):
            own, other = f"{part.dtype} {list(part.shape)}", f"{first.dtype} {list(first.shape)}"
            raise error_at(f"it is {own} here, but {other} in {path}", number)
    if BITS[first.dtype] % 8:  # torch's offsets count bytes, but the header's shapes count elements
        if len(parts) > 1 or any(first.offsets or ()):
            why = f"it is a part, and {first.dtype} tensors can only be read whole"
            raise NotSupportedError(f"overwire: open {path}: tensor {name!r}: {why}", source=path, tensor=name)
        return Joined(name, first.dtype, first.shape, [Chunk((0,), (first.run.size,), first.run)], (first.run.size,))
    boxes = [(part.offsets or (), part.shape) for _, part in parts]
    shape = tuple(max(low[dim] + size[dim] for low, size in boxes) for dim in range(len(first.shape)))
    check_cover(shape, boxes, error_at)
    chunks = [Chunk(offsets, sizes, part.run) for (offsets, sizes), (_, part) in zip(boxes, parts, strict=True)]
    return Joined(name, first.dtype, shape, chunks)
