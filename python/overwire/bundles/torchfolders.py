"""Converts models that torch.save wrote, as files and folders, into plain files that the engine converts.

`pytorch_model.bin` becomes `model.safetensors`, and so do its shards and their index. Other files keep their stems.
Other files in a folder are copied along. The plain files are temporary: they are in a folder of their own, next
to the target, and are removed when the conversion ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .._tables import MOST_OTHER, OTHER_WEIGHTS
from ..errors import ArgumentError, FormatError, NotFoundError, OverwireError
from ..files import TORCH_ENDINGS, folders_of, lock_file, may_be_torch, read_file
from ..paths import classed_errors, is_remote, local, without_scheme
from ..progress import ProgressLike
from ..verbs.inspecting import rewrite
from ..verbs.save import save_bytes
from ..verbs.saving import Report
from .torcharchive import FOREIGN, refusal_of
from .torchfiles import opened

if TYPE_CHECKING:
    from ..model.options import Level, StorageOptions
    from ..model.sources import SourceLike

#: Weights in a folder, by the names that libraries give them. A number tells several models apart.
_WEIGHTS = re.compile(
    r"(pytorch_model|diffusion_pytorch_model|adapter_model|open_clip_pytorch_model)(_\d+)?([-.].*)?\.bin"
)
#: Files that trainers save next to weights, by name.
_OTHERS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|trainer_state)(\b|_\d).*|.*_states"
)
_INDEX = ".bin.index.json"
_MARK = ".overwire-torch-"
#: The most characters of plain values that a file's metadata keeps.
_VALUES = 1 << 20


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
    """Rewrites a model: plain to compressed, compressed to plain (compress=False), or into other shards. Memory use
    does not grow with the model.

    A plain file that was compressed as a single file is restored byte for byte, including its header. Its SHA-256 is
    compared before the file appears (`Report.originals`).

    torch.save files (.bin, .pt, .pth, .ckpt), and local folders of them, are read without running any of their
    code: see the page on folders.

    source: anything that `inspect` takes, a torch.save file or folder, or a list of files.
    path: the file, or a folder if it ends in a slash, or if the source is a folder or
        several files and it does not end in .safetensors.
    level, metadata, max_shard_size: as for `save_file`; metadata None keeps the source's metadata.
    sha256: whether a compressed file keeps the SHA-256 of the local file that it was made from, which proves that
        it can be restored. One core computes it, at about 1 GB/s for each file. Without it, the header and the
        hashes of the tensors are the proof.
    storage_options: as for `load_file`, for source and path. `decryption_*` applies to the source, and
        `encryption_*` to the path, as for `save_file`. From .tensors to .tensors, types, modules and every dtype
        are kept, so files can be encrypted, decrypted, or given another key.

    Returns a Report. Raises the errors of loading and saving.
    """
    options: dict[str, Any] = {
        "compress": compress, "level": level, "metadata": metadata, "max_shard_size": max_shard_size
    }
    options |= {"sha256": sha256, "progress": progress, "storage_options": storage_options}
    names = source if isinstance(source, (list, tuple)) else [source]
    paths = [without_scheme(os.fsdecode(name)) for name in names if isinstance(name, (str, os.PathLike))]
    if not any(map(is_torch_model, paths)):
        return rewrite(source, path, **options)
    with plain_models([local(name) for name in names], local(path)) as (plain, remainder):
        report = rewrite(plain if len(plain) > 1 else plain[0], path, **options)
    return replace(report, left=(*report.left, *remainder))


def is_torch_model(path: str) -> bool:
    """Whether a local path is a torch.save file, or a folder with weights in such files."""
    if is_remote(path) or not may_be_torch(path):
        return False
    with classed_errors(path, "open"):
        if os.path.isdir(path):
            return any(_weights_of_folders(path).values())
        refusal = refusal_of(path)
        if refusal is not None and type(refusal) is not FormatError:
            raise refusal
        return refusal is None  # the engine reports what another file is


def _weights_of_folders(root: str) -> dict[str, list[str]]:
    """Returns the names of files of weights in a folder and its subfolders, by folder."""
    return {folder: _weights_of(folder) for folder, _ in folders_of(root)}


def _weights_of(folder: str) -> list[str]:
    """Returns the names of files of weights in a folder. Raises if a file that is named like weights is missing or
    cannot be read, because the model would lack tensors."""
    entries = sorted(os.listdir(folder))
    names = [
        name
        for name in entries
        if name.endswith(TORCH_ENDINGS)
        and not name.startswith(".")
        and not _OTHERS.fullmatch(os.path.splitext(name)[0])
        and not os.path.isdir(os.path.join(folder, name))
    ]
    refusals = {name: refusal_of(os.path.join(folder, name)) for name in names}
    usual = {name for name in names if _WEIGHTS.fullmatch(name)}
    for index in (name for name in entries if name.endswith(_INDEX)):
        shards = set(_read_index(os.path.join(folder, index))["weight_map"].values())
        if lacking := shards - set(names):
            text = f"{min(lacking)} is missing, and {index} lists it: fetch the model again"
            raise NotFoundError(f"overwire: open {folder}: {text}", source=folder)
        usual |= shards
    for name, refusal in refusals.items():
        if refusal is not None and (refusal.rule != FOREIGN or name in usual):
            raise refusal
    return [name for name in sorted(usual or names) if refusals[name] is None]


def _plain_name(name: str) -> str:
    """Returns the safetensors name for a file of weights or its index."""
    stem = name.removesuffix(_INDEX) if name.endswith(_INDEX) else os.path.splitext(name)[0]
    stem = re.sub(r"^pytorch_model\b", "model", stem)
    return f"{stem}.safetensors.index.json" if name.endswith(_INDEX) else f"{stem}.safetensors"


@contextlib.contextmanager
def plain_models(sources: list[str], target: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the sources, with torch.save files and folders replaced by plain ones, and a list of
    what the plain ones leave out: large files without weights, and objects that are not plain data.

    target: the path to be written. If it is local, the temporary files are on its disk."""
    parent = os.path.dirname(os.path.abspath(target)) if not is_remote(target) else tempfile.gettempdir()
    if not os.path.isdir(parent):
        raise NotFoundError(f"overwire: save {target}: the folder {parent} does not exist", source=target)
    with classed_errors(target):
        _sweep_leftovers(parent)
        top, lock = _locked_folder(parent)
    try:
        with classed_errors(target):
            plain, remainder = _write_plain_models(sources, top)
        try:
            yield plain, remainder
        except OverwireError as error:
            _name_sources(error, dict(zip(plain, sources, strict=True)))
            raise
    finally:
        try:
            with contextlib.suppress(OSError):  # a later conversion removes leftovers
                shutil.rmtree(top, ignore_errors=True)
        finally:
            os.close(lock)


def _name_sources(error: OverwireError, sources: Mapping[str, str]) -> None:
    """Makes an error name the sources instead of the plain files made from them."""
    for plain, source in sources.items():
        error.args = tuple(str(text).replace(plain, source) for text in error.args)
        error.source = error.source and error.source.replace(plain, source)


def _write_plain_models(sources: list[str], top: str) -> tuple[list[str], list[str]]:
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
            remainder += _plain_folder(source, plain[-1])
        else:
            plain.append(os.path.join(place, _plain_name(os.path.basename(source))))
            remainder += _write_plain_file(source, plain[-1])
    return plain, remainder


def _locked_folder(parent: str) -> tuple[str, int]:
    """Makes a temporary folder. Returns its path, and the descriptor that locks it."""
    while True:
        top = tempfile.mkdtemp(prefix=_MARK, dir=parent)
        with contextlib.suppress(FileNotFoundError):  # another conversion removed it before it was locked
            lock = -1
            try:
                lock = os.open(top, os.O_RDONLY | os.O_CLOEXEC)
                lock_file(lock, top, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(lock), os.stat(top)):
                    return top, lock
            except BaseException:
                if lock >= 0:
                    os.close(lock)
                with contextlib.suppress(OSError):
                    os.rmdir(top)
                raise
            os.close(lock)


def _sweep_leftovers(parent: str) -> None:
    """Removes the folders of killed conversions, which no process locks."""
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


def _write_plain_file(source: str, path: str) -> list[str]:
    """Writes the tensors of a torch.save file. Plain values become metadata. Returns what is left out."""
    with opened(source, os.path.dirname(path)) as content:
        notes = {"format": "pt"}
        values = _text_of(content.values)
        if content.values and values is not None:
            notes["torch.values"] = values
        elif content.values:
            content.left.append(f"{len(content.values)} plain values of more than {_VALUES} characters")
        try:
            save_bytes(content.tensors, path, notes, compress=False)
        except ArgumentError as error:  # about a name that a file cannot have
            reason = str(error).removeprefix("overwire: bad argument: ")
            raise FormatError(f"overwire: open {source}: {reason}", source=source, tensor=error.tensor) from error
        return [f"{source}: {what}" for what in content.left]


def _text_of(values: dict[str, Any]) -> str | None:
    """Returns values as JSON; None if that is longer than metadata may be, because one value may be repeated."""
    parts, letters = [], 0
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(values):
        letters += len(part)
        if letters > _VALUES:
            return None
        parts.append(part)
    return "".join(parts)


def _plain_folder(source: str, path: str) -> list[str]:
    """Makes a folder like the source, with plain files of weights. Returns what is left out."""
    remainder = []
    of_folders = _weights_of_folders(source)
    for folder, names in of_folders.items():
        place = os.path.normpath(os.path.join(path, os.path.relpath(folder, source)))
        os.mkdir(place)
        weights = set(names)
        sources: dict[str, str] = {}
        for name in sorted(weights) + [name for name in sorted(os.listdir(folder)) if name.endswith(_INDEX)]:
            if (other := sources.setdefault(_plain_name(name), name)) != name:
                why = f"{other} and {name} would both become {_plain_name(name)}: convert one of them by its own name"
                raise ArgumentError(f"overwire: convert {folder}: {why}", source=folder)
        for name in sorted(os.listdir(folder)):
            at = os.path.join(folder, name)
            if name in weights:
                remainder += _write_plain_file(at, os.path.join(place, _plain_name(name)))
            elif name.endswith(_INDEX):
                _plain_index(at, os.path.join(place, _plain_name(name)))
            elif at in of_folders or name.startswith(_MARK):
                continue
            elif name in sources or _is_left(name) or not _may_follow(source, at) or _is_large(at):
                remainder.append(at)
            else:
                _link_or_copy(at, os.path.join(place, name))
    return remainder


def _may_follow(root: str, path: str) -> bool:
    """Whether a file is inside the folder, or is a blob of the Hugging Face cache that the folder belongs to."""
    if not os.path.isfile(path):
        return False
    real, top = os.path.realpath(path), os.path.realpath(root)
    cache, separator, _ = (top + "/").partition("/snapshots/")
    return real.startswith(top + "/") or bool(separator) and os.path.dirname(real) == cache + "/blobs"


def _is_left(name: str) -> bool:
    """Whether a name is hidden, or that of a safetensors index (the folder has no such files)."""
    return name.startswith(".") or name.endswith(".json") and ".safetensors." in name


def _is_large(path: str) -> bool:
    """Whether a file has a format for weights, and is too large to be copied along."""
    return os.path.splitext(path)[1].lower() in OTHER_WEIGHTS and os.path.getsize(path) > MOST_OTHER


def _link_or_copy(path: str, target: str) -> None:
    real = os.path.realpath(path)
    try:
        os.link(real, target)
    except OSError:  # it is on another file system
        shutil.copy(real, target)


def _read_index(path: str) -> dict[str, Any]:
    """Reads the index of shards and checks that its weight_map has only names."""
    try:
        index: dict[str, Any] = json.loads(read_file(path, 64 << 20))
        if all(type(shard) is str for shard in index["weight_map"].values()):
            return index
        raise ValueError("a shard without a name")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"overwire: open {path}: not an index of shards", source=path) from error


def _plain_index(path: str, target: str) -> None:
    """Writes the index of shards with the shards' new names."""
    index = _read_index(path)
    index["weight_map"] = {name: _plain_name(shard) for name, shard in index["weight_map"].items()}
    with open(target, "x", encoding="utf-8") as file:
        file.write(json.dumps(index))
