"""Decides which rank writes which tensors of a checkpoint, and which blocks the ranks send each other.

Files contain only whole tensors. If several ranks have blocks of a tensor (FSDP, DTensor), one rank gathers and
writes the whole tensor. Each rank writes its tensors in rounds, one file per round, so that it gathers the tensors of
only one file at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ..errors import CorruptError, NotSupportedError
from ..frameworks.torch import SAVED
from .manifest import TRAINING, Manifest, Part, paths_of

# Quantised dtypes. Elements of these dtypes are useless without a scale.
_SCALE_TYPES = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


@dataclass(frozen=True)
class Block:
    """The block of a tensor that one rank has: the whole tensor, or a part that begins at `offsets`."""

    rank: int
    index: MetadataIndex
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor that a rank writes. dtype: None for the bytes of an object. blocks: the blocks that cover all
    elements."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass
class Round:
    """One round of a rank. The rank sends blocks, in the order in which the receivers wait for them, and writes a file.
    file: the path relative to the checkpoint, or "" for none."""

    file: str = ""
    entries: list[Entry] = field(default_factory=list)
    sends: list[tuple[int, MetadataIndex]] = field(default_factory=list)


@dataclass
class Duty:
    """The work of one rank in a save. save: the id. manifest: the contents of checkpoint.json, on the coordinator."""

    rank: int
    ranks: int
    rounds: list[Round]
    save: str
    manifest: Manifest | None = None


def schedule(plans: Sequence[SavePlan], model: str, most: int, save: str, mark: str) -> list[Duty]:
    """Returns a duty for each rank, from the plans of all ranks. most: the most bytes of a file with several tensors.
    save: the id of the save. mark: a part of all file names, or "".

    Raises CorruptError if the blocks of a tensor do not cover it exactly, and NotSupportedError for planner data that
    cannot be stored in the checkpoint.
    """
    paths: dict[str, Any] | None = None
    for plan in plans:
        if (one := paths_of(plan.planner_data)) is not None:
            paths = {**(paths or {}), **one}
    blocks: dict[str, list[tuple[int, WriteItem]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            blocks.setdefault(item.index.fqn, []).append((rank, item))
    prefix = f"{model}."
    has_model_paths = any(len(path) > 1 and path[0] == model for path in (paths or {}).values())
    shares: list[dict[bool, list[tuple[int, Entry]]]] = [{False: [], True: []} for _ in plans]
    load = [0] * len(plans)
    entries: set[str] = set()
    dtypes: dict[str, str] = {}
    for fqn in sorted(blocks):
        size, entry = _make_entry(fqn, blocks[fqn])
        if entry.dtype is None:
            entries.add(fqn)
        elif is_bytes(entry.dtype):
            dtypes[fqn] = str(entry.dtype).removeprefix("torch.")
        below = (paths or {}).get(fqn, ())
        in_model = not has_model_paths or len(below) > 1 and below[0] == model and fqn.startswith(prefix)
        training = entry.dtype is None or not in_model
        if has_model_paths and not training:
            entry = replace(entry, name=fqn.removeprefix(prefix))
        holders = sorted({block.rank for block in entry.blocks})
        owner = holders[0] if len(holders) == 1 else min(range(len(plans)), key=lambda rank: (load[rank], rank))
        load[owner] += size
        shares[owner][training].append((size, entry))
    duties = [Duty(rank, len(plans), [], save) for rank in range(len(plans))]
    parts = []
    for training in (False, True):
        groups = [(rank, group) for rank, one in enumerate(shares) for group in _group_into_files(one[training], most)]
        files = []
        for number, (rank, group) in enumerate(groups, 1):
            numbers = len(groups) > 1 or bool(mark)
            name = f"model{mark}-{number:05}-of-{len(groups):05}.safetensors" if numbers else "model.safetensors"
            files.append(f"{TRAINING}/{name}" if training else name)
            duties[rank].rounds.append(Round(files[-1], group))
        if files:
            parts.append(Part(prefix if has_model_paths and not training else "", tuple(files)))
    _fill_rounds(duties)
    duties[0].manifest = Manifest(tuple(parts), frozenset(entries), paths, save, dtypes)
    return duties


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor as uint8, with an extra last dimension for the bytes of an element."""
    return tensor.view(-1).view(torch.uint8).view(*tensor.shape, tensor.dtype.itemsize)


def is_bytes(dtype: torch.dtype) -> bool:
    """Returns whether tensors of a dtype are stored as bytes, because safetensors lacks the dtype."""
    return dtype not in SAVED and dtype not in _SCALE_TYPES


def _make_entry(fqn: str, items: list[tuple[int, WriteItem]]) -> tuple[int, Entry]:
    rank, first = items[0]
    if first.type == WriteItemType.BYTE_IO:
        about = getattr(first, "bytes_io_data", None)  # torch 2.5 lacks this attribute
        size = about.nbytes if about is not None else 0
        return size, Entry(fqn, None, (), (Block(rank, first.index, (), ()),))
    assert first.tensor_data is not None
    dtype, shape = first.tensor_data.properties.dtype, tuple(first.tensor_data.size)
    blocks: dict[tuple[int, ...], Block] = {}
    for rank, item in items:
        data = item.tensor_data
        if data is None or tuple(data.size) != shape or data.properties.dtype != dtype:
            raise NotSupportedError(f"overwire: {fqn!r} differs between ranks {items[0][0]} and {rank}", tensor=fqn)
        chunk = data.chunk
        if math.prod(chunk.sizes) or not math.prod(shape):
            blocks.setdefault(tuple(chunk.offsets), Block(rank, item.index, tuple(chunk.offsets), tuple(chunk.sizes)))
    if not math.prod(shape):
        blocks = dict(list(blocks.items())[:1])
    elif sum(math.prod(block.sizes) for block in blocks.values()) != math.prod(shape):
        raise CorruptError(f"overwire: the ranks' blocks of {fqn!r} overlap or do not cover it", tensor=fqn)
    for block in blocks.values():
        if any(at < 0 or at + n > size for at, n, size in zip(block.offsets, block.sizes, shape, strict=True)):
            text = f"overwire: rank {block.rank} has a block of {fqn!r} outside of its shape {list(shape)}"
            raise CorruptError(text, tensor=fqn)
    return math.prod(shape) * dtype.itemsize, Entry(fqn, dtype, shape, tuple(blocks.values()))


def _group_into_files(entries: list[tuple[int, Entry]], most: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = []
    room = -1
    for size, entry in entries:
        if room < size:
            groups.append([])
            room = most
        room -= size
        groups[-1].append(entry)
    return groups


def _fill_rounds(duties: list[Duty]) -> None:
    """Adds rounds so that all ranks have the same number, and adds the blocks to send to each round."""
    most = max(len(duty.rounds) for duty in duties)
    for duty in duties:
        duty.rounds += [Round() for _ in range(most - len(duty.rounds))]
    for number in range(most):
        for duty in duties:
            for entry in duty.rounds[number].entries:
                for block in entry.blocks:
                    if block.rank != duty.rank:
                        duties[block.rank].rounds[number].sends.append((duty.rank, block.index))
