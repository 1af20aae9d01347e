"""What is in a file, and a compressed file as a plain one, without the engine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, OverwireError
from .container import BITS
from .read import files_of, safe_open


def inspect(source: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a file, or in the safetensors files of a folder: of each its format, metadata and
    tensors, with their bytes in memory and in the file. Reads no tensor.

    Raises FormatError, CorruptError, NotSupportedError, and OSError.
    """
    return {"sources": [_facts_of(path) for path in files_of(source)]}


def decompress(source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a compressed file as a plain one that any safetensors reader reads; of a folder,
    each file of weights so, and copies of all others. Every checksum is compared. What is
    written appears whole or not at all.

    Raises ArgumentError where target is there and overwrite is not set, or is the source;
    and what reading raises.
    """
    weights = set(files_of(source))
    here, there = Path(source), Path(target)
    if there.exists() and (not overwrite or there.is_dir() or here.samefile(there)):
        raise ArgumentError(f"overwire: decompress: {there} is there already")
    if not here.is_dir():
        _write_atomically(there, lambda path: _write_plain(here, path))
        return
    if here.resolve() in there.resolve().parents:
        raise ArgumentError(f"overwire: decompress: {there} lies in {here}")
    work = Path(tempfile.mkdtemp(prefix=".overwire.", dir=there.absolute().parent))
    try:
        for path in sorted(here.rglob("*")):
            inner = work / path.relative_to(here)
            if path.is_dir():
                inner.mkdir(exist_ok=True)
            elif path in weights:
                _write_plain(path, inner)
            else:
                shutil.copyfile(path, inner)
        work.rename(there)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _facts_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "bytes") as file:
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
        ]
        kind = "overwire" if file.compressed else "safetensors"
        return {
            "uri": str(path),
            "format": kind,
            "size": path.stat().st_size,
            "metadata": file.metadata(),
            "tensors": tensors,
        }


def _write_plain(source: Path, target: Path) -> None:
    with safe_open(source, "bytes") as file, open(target, "xb") as out:
        if not file.compressed:
            with open(source, "rb") as plain:
                shutil.copyfileobj(plain, out)
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


def _write_atomically(target: Path, write: Callable[[Path], None]) -> None:
    work = Path(tempfile.mkdtemp(prefix=".overwire.", dir=target.absolute().parent))
    try:
        write(work / "file")
        os.replace(work / "file", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
