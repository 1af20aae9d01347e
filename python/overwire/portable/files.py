"""What is in a file, and a compressed file as a plain one, without the engine."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ArgumentError, OverwireError
from .container import BITS
from .folders import EXTENSION, model_of
from .read import local_path, open_model, safe_open


def inspect(source: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a file, or in the files of a folder's model: of each its format, metadata and
    tensors, with their bytes in memory and in the file. Reads no tensor.

    Raises what `load_file` raises, and OSError.
    """
    return {"sources": [_facts_of(file, set(names)) for file, names in open_model(source, "bytes")]}


def decompress(source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a compressed file as a plain one that any safetensors reader reads; of a folder, and of
    those below it, each file of weights so, and copies of all others. Every checksum is compared. What
    is written appears whole or not at all, and is on the disk then.

    Raises ArgumentError where target is there and overwrite is not set, or is the source, and for
    a link to a folder; what reading raises, also for a folder with a part of a model.
    """
    here, there = Path(local_path(source)), Path(target)
    if order := sys.modules.get("overwire._order"):  # the engine may have a save in the background there
        order.await_path(str(there))
    weights = _weights_of(str(here))
    if there.exists() and (not overwrite or there.is_dir() or here.samefile(there)):
        raise ArgumentError(f"overwire: decompress: {there} is there already")
    if here.is_dir() and here.resolve() in there.resolve().parents:
        raise ArgumentError(f"overwire: decompress: {there} lies in {here}")
    work = Path(tempfile.mkdtemp(prefix=".overwire.", dir=there.absolute().parent))
    try:
        place = work / "made"  # with the mode that the umask leaves
        if here.is_dir():
            _write_folder(here, place, weights)
        else:
            _write_plain(here, place)
        os.replace(place, there)
        _sync_folder(there.absolute().parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _weights_of(place: str) -> set[str]:
    """The files of weights of a folder and of those below it; that of a file. Raises for a folder with a part of a
    model, and where there are none."""
    if not os.path.isdir(place):
        if model_of(place).index_path is not None:
            raise ArgumentError(f"overwire: decompress: {place} is an index: name its folder")
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
    """Writes a folder and those below it, each entry of which is on the disk in the end."""
    target.mkdir()
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            _write_folder(Path(entry.path), target / entry.name, weights)
        elif entry.path in weights:
            _write_plain(Path(entry.path), target / entry.name)
        elif entry.is_file():
            _copy_file(entry.path, target / entry.name)
        else:
            text = f"{entry.path} is a link to a folder, or no file: remove it, or decompress the folders one by one"
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
    """Puts the names in a folder on the disk. Some file systems cannot, and Windows opens no folders."""
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
    tensors = [
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
            "stored": sum(chunk.stored for chunk in tensor.chunks) if file.compressed else tensor.nbytes,
            "chunks": len(tensor.chunks),
            "parts": tensor.parts,
        }
        for name, tensor in file.entries().items()
        if name in names
    ]
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
        # Elements of more bytes come first: readers need each tensor at a multiple of its element's size.
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
    """The command line: overwire inspect FILE; overwire decompress FILE -o OUT [-f]."""
    parser = argparse.ArgumentParser("overwire", description="overwire without its engine: reads compressed weights.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    inspect_parser = verbs.add_parser("inspect", help="list tensors, as JSON")
    plain = verbs.add_parser("decompress", help="write plain safetensors files")
    for verb in (inspect_parser, plain):
        verb.add_argument("source")
    plain.add_argument("-o", dest="target", required=True)
    plain.add_argument("-f", dest="overwrite", action="store_true", help="replace what is there")
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
