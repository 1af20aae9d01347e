"""Lists the contents of files, and converts compressed files to plain files, without the engine."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import ArgumentError, OverwireError
from .container import BITS
from .folders import EXTENSION, model_of
from .read import local_path, open_model, safe_open


def inspect(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Lists the contents of a file, or of the files of the model in a folder: the format, metadata and tensors of
    each file, with the tensors' bytes in memory and in the file. Reads no tensors.

    Raises the errors of `load_file`, and OSError.
    """
    return {"sources": [_facts_of(file, set(names)) for file, names in open_model(source, "bytes")]}


class Report(NamedTuple):
    """The result of a decompression, with the field names of the engine's report.

    bytes_in, bytes_out: bytes of the tensors, and of the files with the tensors. ratio: bytes_out / bytes_in, or 1.0
    without tensors.
    seconds: wall time. files: absolute paths of all files. copied: the files that are not weights.
    """

    bytes_in: int
    bytes_out: int
    ratio: float
    seconds: float
    tensors: int
    files: tuple[str, ...]
    copied: tuple[str, ...]


def decompress(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> Report:
    """Converts a compressed file to a plain file that any safetensors reader supports. For a folder, it converts all
    weights, including those in subfolders, and copies all other files. Several files are written to a folder, each
    under its own name. All checksums are compared. The result appears atomically, and is synced to the disk.

    source: a path or file:// URI of a file or a folder, or a list of files. path: the file or folder to write.

    Returns a `Report`. Raises ArgumentError if `path` is a file and `overwrite` is not set, if `path` is a folder with
    files in it, if `path` is the source, and for a link to a folder. Also raises the errors of reading, for instance
    for a folder with an incomplete model.
    """
    start = time.perf_counter()
    sources = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    places, there = [local_path(one) for one in sources], Path(local_path(path))
    into = len(places) > 1 or os.fspath(path).endswith(("/", os.sep)) and not os.path.isdir(places[0])
    if into and (there.suffix == EXTENSION or len({Path(one).name for one in places}) < len(places)):
        raise ArgumentError(f"overwire: decompress: {there} must be a folder, and the files need different names")
    if order := sys.modules.get("overwire._order"):  # a background save of the engine may still write to this path
        order.await_path(str(there))
    weights = set().union(*(_weights_of(one) for one in places))
    _refuse_target(there, [Path(one) for one in places], overwrite)
    work = Path(tempfile.mkdtemp(prefix=".overwire.", dir=there.absolute().parent))
    try:
        place = work / "made"  # unlike `work`, this folder gets the default mode
        if into:
            place.mkdir()
            for one in places:
                _write_plain(Path(one), place / Path(one).name)
            _sync_folder(place)
        elif os.path.isdir(places[0]):
            _write_folder(Path(places[0]), place, weights)
        else:
            _write_plain(Path(places[0]), place)
        if there.is_dir():
            there.rmdir()
        os.replace(place, there)
        _sync_folder(there.absolute().parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    plain = {there / (Path(one).name if into else os.path.relpath(one, places[0])) for one in weights}
    return _report_of(there.absolute(), {one.absolute() for one in plain}, start)


def _refuse_target(there: Path, sources: list[Path], overwrite: bool) -> None:
    for here in sources:
        if here.is_dir() and here.resolve() in there.resolve().parents:
            raise ArgumentError(f"overwire: decompress: {there} is inside {here}")
        if here.is_dir() and len(sources) > 1:
            raise ArgumentError(f"overwire: decompress: {here} is a folder: decompress it by itself")
        if there.exists() and here.samefile(there):
            raise ArgumentError(f"overwire: decompress: {there} is the source")
    if there.is_dir() and any(there.iterdir()):
        raise ArgumentError(f"overwire: decompress: {there} is a folder with files in it")
    if there.is_file() and not overwrite:
        raise ArgumentError(f"overwire: decompress: {there} exists; pass overwrite=True to replace it")


def _report_of(there: Path, weights: set[Path], start: float) -> Report:
    files = sorted(path for path in there.rglob("*") if path.is_file()) if there.is_dir() else [there]
    entries = [tensor for path in weights for tensor in safe_open(path, "bytes").entries().values()]
    nbytes, size = sum(one.nbytes for one in entries), sum(path.stat().st_size for path in weights)
    copied = tuple(str(path) for path in files if path not in weights)
    seconds = time.perf_counter() - start
    return Report(nbytes, size, size / nbytes if nbytes else 1.0, seconds, len(entries), tuple(map(str, files)), copied)


def _weights_of(place: str) -> set[str]:
    """Returns the weights in a folder and its subfolders, or a single file. Raises an error for a folder with an
    incomplete model, and if there are no weights."""
    if not os.path.isdir(place):
        if model_of(place).index_path is not None:
            raise ArgumentError(f"overwire: decompress: {place} is an index: pass its folder")
        return {place}
    weights: set[str] = set()
    for folder, below, names in os.walk(place, onerror=_raise_error):
        below[:] = [name for name in below if not name.startswith(".")]
        own = {os.path.join(folder, name) for name in names if name.endswith(EXTENSION) and not name.startswith(".")}
        if own:
            open_model(folder, "bytes")
        weights |= own
    if not weights:
        model_of(place)
    return weights


def _raise_error(error: OSError) -> None:
    raise error


def _write_folder(source: Path, target: Path, weights: set[str]) -> None:
    """Writes a folder and its subfolders, and syncs every entry to the disk."""
    target.mkdir()
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            _write_folder(Path(entry.path), target / entry.name, weights)
        elif entry.path in weights:
            _write_plain(Path(entry.path), target / entry.name)
        elif entry.is_file():
            _copy_file(entry.path, target / entry.name)
        else:
            text = f"{entry.path} is a link to a folder, or not a file: remove it, or decompress the folders one by one"
            raise ArgumentError(f"overwire: decompress: {text}")
    _sync_folder(target)


def _copy_file(source: str, target: Path) -> None:
    with open(source, "rb") as file, open(target, "xb") as out:
        shutil.copyfileobj(file, out)
        _sync_file(out)


def _sync_file(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    # Syncs the names in a folder to the disk. Some file systems do not support this, and Windows cannot open folders.
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def _facts_of(file: safe_open, names: set[str]) -> dict[str, Any]:
    tensors = []
    for name, tensor in file.entries().items():
        if name in names:
            facts: dict[str, Any] = {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            size = sum(chunk.stored for chunk in tensor.chunks) if file.compressed else tensor.nbytes
            facts |= {"bytes": tensor.nbytes, "stored": size, "chunks": len(tensor.chunks), "parts": tensor.parts}
            tensors.append(facts)
    kind = "overwire" if file.compressed else "safetensors"
    size = os.path.getsize(file.path)
    return {"uri": file.path, "format": kind, "size": size, "metadata": file.metadata(), "tensors": tensors}


def _write_plain(source: Path, target: Path) -> None:
    with safe_open(source, "bytes") as file, open(target, "xb") as out:
        if not file.compressed:
            with open(source, "rb") as plain:
                shutil.copyfileobj(plain, out)
            _sync_file(out)
            return
        header: dict[str, Any] = {} if not file.metadata() else {"__metadata__": file.metadata()}
        entries, holders = file.entries(), file.holders()
        # Wider elements come first, because readers need each tensor at a multiple of its element's size.
        order = sorted(holders, key=lambda name: -BITS[entries[name].dtype])
        end = 0
        for name in (name for holder in order for name in holders[holder]):
            tensor = entries[name]
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        out.write(len(text).to_bytes(8, "little") + text)
        for _, data in file.tensors(order):
            out.write(data)
        _sync_file(out)


def main() -> int:
    """Runs the command line: overwire inspect FILE; overwire decompress FILE -o OUT [-f]."""
    parser = argparse.ArgumentParser("overwire", description="overwire without its engine: reads compressed weights.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    inspect_parser = verbs.add_parser("inspect", help="list tensors, as JSON")
    plain = verbs.add_parser("decompress", help="write plain safetensors files")
    for verb in (inspect_parser, plain):
        verb.add_argument("source")
    plain.add_argument("-o", dest="target", required=True)
    plain.add_argument("-f", dest="overwrite", action="store_true", help="replace an existing target")
    options = parser.parse_args()
    try:
        if options.verb == "inspect":
            json.dump(inspect(options.source), sys.stdout, indent=1)
        else:
            decompress(options.source, options.target, overwrite=options.overwrite)
    except (OverwireError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
