"""Compares tensors with the checksums of a .tensors file's records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...records import Record, sums
from ._types import HashType, TensorHash

if TYPE_CHECKING:
    import torch


def have_sums(records: Sequence[Record], tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Returns whether each tensor has the checksums of its record. Computes all checksums in one call."""
    for record in records:
        if record.crc32 is None and record.sha256 is None:
            raise RuntimeError(f"No hashes found in metadata for {record.name}")
    copies = [tensor.detach().cpu().contiguous() for tensor in tensors]
    sizes = [tensor.numel() * tensor.element_size() for tensor in copies]
    fits = [record.nbytes in (0, size) for record, size in zip(records, sizes, strict=True)]
    rows = [row for row, fit in zip(zip(records, copies, strict=True), fits, strict=True) if fit]
    hashes = iter(sums((r.prefix, t.data_ptr() if r.nbytes else 0, r.nbytes) for r, t in rows))
    same = []
    for record, fit in zip(records, fits, strict=True):
        crc, sha = next(hashes) if fit else (b"", b"")
        own = {HashType.CRC32: crc, HashType.SHA256: sha}
        same.append(fit and all(entry.hash == own[entry.type] for entry in hashes_of(record)))
    return same


def hashes_of(record: Record) -> list[TensorHash]:
    """Returns the checksums of a record. Programs may replace `serialization.TensorHash` to compare other checksums."""
    from . import serialization

    hash_type: type[TensorHash] = vars(serialization)["TensorHash"]
    pairs = ((HashType.CRC32, record.crc32), (HashType.SHA256, record.sha256))
    return [hash_type(type=kind, hash=one) for kind, one in pairs if one is not None]
