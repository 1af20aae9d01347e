"""Converts models of other libraries.

Their weights are first written as plain safetensors files, which the engine then converts. `pytorch_model.bin` becomes
`model.safetensors`, and shards and their index are renamed in the same way. Other files keep their stems. Auxiliary
files next to the weights are copied. The plain files are in a temporary folder next to the target. This folder is
removed after the conversion.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .._tables import MOST_OTHER, OTHER_WEIGHTS
from .._undo import after_error
from ..errors import ArgumentError, FormatError, NotFoundError
from ..files import TORCH_ENDINGS, folders_of, has_weights, lock_file, may_be_foreign
from ..foreign.content import write_plain
from ..foreign.dcp import files_of
from ..foreign.kinds import (
    INDEX,
    has_usual_name,
    kind_of,
    open_content,
    plain_name,
    read_index,
    refuse_empty,
    weights_of,
)
from ..foreign.links import may_follow
from ..foreign.shards import shards_in
from ..paths import classed_errors, is_remote, local, named_errors, without_scheme
from ..progress import ProgressLike
from ..verbs.inspecting import rewrite
from ..verbs.saving import Report

if TYPE_CHECKING:
    from ..model.options import Level
    from ..model.sourcelike import SourceLike
    from ..model.storageoptions import StorageOptions

_MARK = ".overwire-torch-"


def convert(
    source: SourceLike,
    path: str | os.PathLike[str],
    *,
    compress: bool = True,
    level: Level = "default",
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    sha256: bool = True,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Report:
    """Converts a model: plain to compressed, compressed to plain (compress=False), or into other shards. Memory use
    does not grow with the model.

    A plain file that was compressed as a single file is restored byte for byte, including its header. Its SHA-256 is
    checked before the file appears (`Report.originals`).

    torch.save files (.bin, .pt, .pth, .ckpt), and local folders of them, are read without running any of their
    code; see the page on folders.

    source: anything that `inspect` takes, a torch.save file or folder, or a list of files.
    path: the file to write. It is a folder if it ends in a slash, or if the source is a folder or several files and
        path does not end in .safetensors.
    level, metadata, max_shard_size: as for `save_file`; metadata None copies the source's metadata.
    sha256: whether to store the SHA-256 of a local source file in the compressed file, so that a restored file can be
        checked. One core computes it, at about 1 GB/s for each file. Without the SHA-256, the header and the hashes of
        the tensors are checked.
    storage_options: as for `load_file`, for source and path. `decryption_*` applies to the source, and
        `encryption_*` to the path, as for `save_file`. If both are .tensors files, types, modules and all dtypes
        are preserved, so files can be encrypted, decrypted, or encrypted with another key.

    Returns a Report. Raises the errors of loading and saving.
    """
    options: dict[str, Any] = {
        "compress": compress, "level": level, "metadata": metadata, "max_shard_size": max_shard_size, "sha256": sha256,
        "progress": progress, "storage_options": storage_options,
    }  # fmt: skip
    names = source if isinstance(source, (list, tuple)) else [source]
    paths = [without_scheme(os.fsdecode(name)) for name in names if isinstance(name, (str, os.PathLike))]
    if not any(map(is_torch_model, paths)):
        return rewrite(source, path, options)
    with plain_models([local(name) for name in names], local(path)) as (plain, remainder):
        report = rewrite(plain if len(plain) > 1 else plain[0], path, options)
        sources = names_of(plain, [local(name) for name in names])
        left = [sources.get(one, one) for one in report.left]
    return replace(report, left=(*left, *remainder))


def names_of(plain: list[str], sources: list[str]) -> dict[str, str]:
    """Returns the source path of each plain file and folder, and of everything in these folders."""
    names: dict[str, str] = {}
    for own, source in zip(plain, sources, strict=True):
        names[own] = source
        for folder, below, files in os.walk(own) if own != source else ():
            place = os.path.normpath(os.path.join(source, os.path.relpath(folder, own)))
            by_plain = {plain_name(one): one for one in os.listdir(place) if one.endswith((*TORCH_ENDINGS, INDEX))}
            for name in (*below, *files):
                names[os.path.join(folder, name)] = os.path.join(place, by_plain.get(name, name))
    return names


def is_torch_model(path: str) -> bool:
    """Returns whether a local path is a supported file of another library, or a folder with such weights. Raises errors
    if weights are damaged or missing."""
    if is_remote(path) or not may_be_foreign(path):
        return False
    with classed_errors(path, "open"):
        if not os.path.isdir(path):
            return bool(kind_of(path))
        folders = [folder for folder, below in folders_of(path) if not _is_sharded_copy(path, below)]
        if any(map(kind_of, folders)):
            return True
        return any(_weights_by_folder(path, folders).values())


def _is_sharded_copy(root: str, below: str) -> bool:
    """Returns whether a folder contains the shards from which the weights in its parent folder were assembled."""
    above, name = os.path.split(below.rstrip("/"))
    return name == "sharded" and has_weights(os.listdir(os.path.join(root, above)))


def _has_safetensors(folder: str) -> bool:
    return has_weights(os.listdir(folder)) and kind_of(folder) != "shards"


def _weights_by_folder(root: str, folders: list[str]) -> dict[str, list[str]]:
    """Returns the torch.save files to convert, by folder. Omits folders that already contain safetensors files, and all
    folders if the root does. Raises errors if any weights are damaged or missing."""
    plain = {folder for folder in folders if _has_safetensors(folder)}
    to_read = [folder for folder in folders if root not in plain and folder not in plain and not kind_of(folder)]
    return {folder: weights_of(folder, is_usual=bool(plain)) for folder in to_read}


@contextlib.contextmanager
def plain_models(sources: list[str], target: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the sources, with torch.save files and folders replaced by plain ones, and a list of the content that was
    omitted: large files without weights, and objects that are not plain data.

    target: the path to be written. If it is local, the temporary files are on the same disk."""
    parent = os.path.dirname(os.path.abspath(target)) if not is_remote(target) else tempfile.gettempdir()
    if not os.path.isdir(parent):
        raise NotFoundError(f"overwire: save {target}: the folder {parent} does not exist", source=target)
    with classed_errors(target):
        _sweep_leftovers(parent)
        top, lock = _locked_folder(parent)
    try:
        with classed_errors(target):
            plain, remainder = _write_plain_models(sources, top, target.endswith((".safetensors", ".tensors")))
        with named_errors(names_of(plain, sources)):
            yield plain, remainder
    finally:
        try:
            with contextlib.suppress(OSError):  # a later conversion removes the remaining files
                shutil.rmtree(top, ignore_errors=True)
        finally:
            os.close(lock)


def _write_plain_models(sources: list[str], top: str, into_file: bool) -> tuple[list[str], list[str]]:
    plain: list[str] = []
    remainder: list[str] = []
    for number, source in enumerate(sources):
        if not is_torch_model(source):
            plain.append(source)
            continue
        place = os.path.join(top, str(number))
        os.mkdir(place)
        if os.path.isdir(source):
            plain.append(os.path.join(place, os.path.basename(os.path.abspath(source))))
            remainder += _plain_folder(source, plain[-1], into_file)
        else:
            plain.append(os.path.join(place, plain_name(os.path.basename(source))))
            remainder += _write_plain_file(source, plain[-1], kind_of(source)) or ()
    return plain, remainder


def _locked_folder(parent: str) -> tuple[str, int]:
    """Creates a temporary folder. Returns its path and the descriptor that locks it."""
    while True:
        top = tempfile.mkdtemp(prefix=_MARK, dir=parent)
        # Another conversion may remove the folder before this one locks it.
        with contextlib.suppress(FileNotFoundError), after_error(os.rmdir, top):
            lock = os.open(top, os.O_RDONLY | os.O_CLOEXEC)
            with after_error(os.close, lock):
                lock_file(lock, top, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(lock), os.stat(top)):
                    return top, lock
            os.close(lock)


def _sweep_leftovers(parent: str) -> None:
    """Removes the temporary folders of killed conversions. No process holds their locks."""
    for name in os.listdir(parent):
        if name.startswith(_MARK):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)


def _write_plain_file(source: str, path: str, kind: str, may_lack: bool = False) -> list[str] | None:
    """Writes the tensors of a file or folder of a kind as a plain file. Plain values become metadata. Returns the
    omitted content. may_lack: whether to write nothing and return None if the source has no tensors."""
    with open_content(source, kind, scratch=os.path.dirname(path)) as content:
        if may_lack and not content.tensors:
            return None
        refuse_empty(content, source, kind)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return write_plain(content, number, source)
        finally:
            os.close(number)


def _plain_folder(source: str, path: str, into_file: bool) -> list[str]:
    """Creates a folder like the source with the weights as plain files. Returns the omitted content. into_file: whether
    the target is a single file; the auxiliary files are then omitted."""
    remainder: list[str] = []
    is_empty = True
    folders = dict(folders_of(source))
    has_plain = any(map(_has_safetensors, folders))
    to_read = [own for own, below in folders.items() if not _is_sharded_copy(source, below)]
    of_folders = _weights_by_folder(source, to_read)
    for folder, below in folders.items():
        weights = of_folders.get(folder, [])
        if below and _is_sharded_copy(source, below):
            remainder.append(folder)
            continue
        place = os.path.join(path, below)
        os.makedirs(place, exist_ok=True)
        names = sorted(os.listdir(folder))
        done: set[str] = set()
        sources: dict[str, str] = {}
        if kind := kind_of(folder):
            done = set(files_of(names) if kind == "dcp" else shards_in(names))
            sources = {"model.safetensors": folder}
            others = [name for name in names if has_weights([name]) or has_usual_name(name)]
            _refuse_twins(folder, sources, [name for name in others if name not in done])
            remainder += _write_plain_file(folder, os.path.join(place, "model.safetensors"), kind) or ()
            is_empty = False
        indexes = [name for name in names if name.endswith(INDEX)] if weights else []
        _refuse_twins(folder, sources, sorted(weights) + indexes)
        is_stale = not has_weights([name for name in names if name not in done])
        for name in names:
            at = os.path.join(folder, name)
            if name in done or at in folders or name.startswith(_MARK):
                continue
            if name in weights:
                target = os.path.join(place, plain_name(name))
                left = _write_plain_file(at, target, "torch", may_lack=not has_usual_name(name))
                if left is not None:
                    is_empty = False
                    remainder += left
                    continue
            if name in indexes:
                _plain_index(at, os.path.join(place, plain_name(name)))
            elif (
                not has_weights([name]) and (into_file or not _is_companion(source, at))
                or name in sources
                or is_stale and name.endswith(".json") and ".safetensors." in name
            ):  # fmt: skip
                remainder.append(at)
            else:
                _link_or_copy(at, os.path.join(place, name))
    if is_empty and not has_plain:
        why = "the torch.save files of this folder have no tensors"
        raise FormatError(f"overwire: open {source}: {why}", source=source)
    return remainder


def _refuse_twins(folder: str, sources: dict[str, str], names: list[str]) -> None:
    for name in names:
        if (other := sources.setdefault(plain_name(name), name)) != name:
            why = f"{other} and {name} would both become {plain_name(name)}: convert one of them by its name"
            raise ArgumentError(f"overwire: convert {folder}: {why}", source=folder)


def _is_companion(root: str, path: str) -> bool:
    if os.path.basename(path).startswith(".") or not may_follow(root, path):
        return False
    is_other = os.path.splitext(path)[1].lower() in OTHER_WEIGHTS
    return not is_other or os.path.getsize(path) <= MOST_OTHER  # large weights in another format are not copied


def _link_or_copy(path: str, target: str) -> None:
    real = os.path.realpath(path)
    try:
        os.link(real, target)
    except OSError:  # the file may be on another file system
        shutil.copy(real, target)


def _plain_index(path: str, target: str) -> None:
    """Writes an index of shards with their new names."""
    index = read_index(path)
    index["weight_map"] = {name: plain_name(shard) for name, shard in index["weight_map"].items()}
    with open(target, "x", encoding="utf-8") as file:
        file.write(json.dumps(index))
