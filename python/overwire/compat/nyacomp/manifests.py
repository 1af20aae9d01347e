"""Reads and writes the manifests next to tensor files: meta.csv, metadata.pkl, merged_tensors.csv.

docs/nyacomp.md describes meta.csv. metadata.pkl is a pickled list with a dict for each row (filename, shape, dtype,
decompressed_size, compressed_size; {} for a tensor that was not stored), and the bins as the last item. All three may
be in nya/, as in nyacomp's code, or next to the pickle, as in its README.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import overwire
from overwire import _compat_api
from overwire._compat_api import load_plain
from overwire.stores import open_writer

from . import settings

FOLDER = "nya"
META = "meta.csv"
METADATA = "metadata.pkl"
MERGE_INFO = "merged_tensors.csv"
_LIMIT = 1 << 26  # maximum bytes of a manifest


# The fields of a row.
_FIELDS = ("filename", "shape", "dtype", "decompressed_size", "compressed_size")


class Manifest(_compat_api.Manifest):
    """A meta.csv: its location, the positions of files for each thread, and the files."""

    bins: list[list[int]]


def bins_fit(bins: Sequence[Sequence[int]], count: int) -> bool:
    """Returns whether the bins contain only positions of existing files, and each position at most once."""
    indices = [at for part in bins for at in part]
    return len(set(indices)) == len(indices) and all(0 <= at < count for at in indices)


def _check_bins(bins: Sequence[Sequence[int]], count: int, path: str) -> None:
    if not bins_fit(bins, count):
        raise overwire.FormatError(f"overwire: open {path}: its bins do not match its {count} files", source=path)


def read_csv(path: str | os.PathLike[str]) -> Manifest:
    """Reads the meta.csv at a path or URI. It may have any number of bins, including empty ones.
    Raises NotFoundError, FormatError."""
    place = os.fspath(path)
    text = os.fsdecode(overwire.read_bytes(place, _LIMIT))  # names may be any bytes
    try:
        bins = [[int(at) for at in part.split(";") if at] for part in text.partition("\n")[0].strip().split(",")]
    except ValueError as error:
        why = f"overwire: open {place} line 1: expected bins such as '0;2,1'"
        raise overwire.FormatError(why, source=place) from error
    manifest = Manifest(place, text)
    manifest.bins = bins
    _check_bins(bins, len(manifest.rows), place)
    return manifest


def to_csv(meta: Sequence[Mapping[str, Any]], bins: Sequence[Sequence[int]], f: str | os.PathLike[str]) -> None:
    """Writes a meta.csv from the dicts that `compress_parameter` returns (empty dicts are skipped) and from bins of
    positions among the other dicts. Raises ArgumentError for a name with a line break, before anything is written."""
    for row in meta:
        if row and "\n" in str(row["filename"]):
            text = f"overwire: save {os.fspath(f)!r}: {row['filename']!r} has a line break: rename it"
            raise overwire.ArgumentError(text)
    rows = [
        f"{row['filename']} {ints(row['shape'])} {row['dtype']} {row['decompressed_size']} {row['compressed_size']}"
        for row in meta
        if row
    ]
    write_file(Path(f), os.fsencode("\n".join([",".join(map(ints, bins)), *rows])))


def ints(i: Sequence[int]) -> str:
    """Joins numbers with semicolons. Returns "" if there are none."""
    return ";".join(map(str, i))


def write_file(path: Path, data: bytes) -> None:
    """Replaces a file atomically: readers see the old file or the new one. Keeps the mode and owner,
    and follows a symbolic link."""
    with open_writer(str(path)) as file:
        file.write(data)


def host_name(path: str | os.PathLike[str]) -> str:
    """Returns a file's name for a manifest, with the prefix HOST if DOWNLOAD is set."""
    name = os.fspath(path)
    prefix = settings.host()
    return f"{prefix}/{name.lstrip('/')}" if prefix else name


def write(folder: Path, meta: Sequence[Mapping[str, Any]], bins: Sequence[Sequence[int]], merge_info: str) -> None:
    """Writes the manifests of the tensor files in folder/nya, both to `folder` and to folder/nya."""
    rows = [*meta, [list(part) for part in bins]]
    for place in (folder / FOLDER, folder):
        write_file(place / METADATA, pickle.dumps(rows, protocol=4))
        write_file(place / MERGE_INFO, merge_info.encode())
        to_csv(meta, bins, place / META)


def find(path: str | os.PathLike[str], name: str) -> Path | None:
    """Returns the path of a manifest of the bundle at `path`, in either folder, or None if neither has it."""
    folder = Path(path).absolute().parent
    for place in (folder / FOLDER / name, folder / name):
        if place.exists():
            return place
    return None


def read_merge_info(path: str | os.PathLike[str]) -> str:
    """Reads merged_tensors.csv of the bundle at `path`, as text for `split_tensors`."""
    return overwire.read_bytes(_beside(path, MERGE_INFO), _LIMIT).decode()


def _beside(path: str | os.PathLike[str], name: str) -> Path:
    place = find(path, name)
    if place is None:
        raise overwire.NotFoundError(f"overwire: open {path}: its {name} is missing", source=os.fspath(path))
    return place


def _is_row(row: Mapping[str, Any]) -> bool:
    name, shape, dtype, *sizes = (row.get(field) for field in _FIELDS)
    if not isinstance(name, str) or "\0" in name or not isinstance(dtype, str) or not isinstance(shape, (list, tuple)):
        return False
    return all(type(size) is int and size >= 0 for size in (*shape, *sizes))


def read_metadata(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Reads metadata.pkl of the bundle at `path`. Returns the dicts, including empty ones, and the bins.

    The pickle may only contain plain data. Raises NotFoundError, FormatError, UntrustedPickleError."""
    place = _beside(path, METADATA)
    try:
        *rows, bins = load_plain(overwire.read_bytes(place, _LIMIT), str(place))
        bins = [[int(at) for at in part] for part in bins]
        if not all(isinstance(row, dict) and (not row or _is_row(row)) for row in rows):
            raise ValueError("a row does not have the five fields")
    except overwire.OverwireError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise overwire.FormatError(f"overwire: open {place}: not a {METADATA}: {error}", source=str(place)) from error
    _check_bins(bins, sum(bool(row) for row in rows), str(place))
    return rows, bins
