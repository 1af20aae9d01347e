"""Models that torch.save wrote, as files and folders that the engine converts.

`pytorch_model.bin` becomes `model.safetensors`, its shards and their index likewise;
another file keeps its stem. What lies beside the weights comes along. The plain files
are temporary: they lie in a folder of their own, beside what is written, and go when the
conversion has ended.
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

#: Names of weights in a folder, by libraries that save no others with them. A number tells several models apart.
_WEIGHTS = re.compile(
    r"(pytorch_model|diffusion_pytorch_model|adapter_model|open_clip_pytorch_model)(_\d+)?([-.].*)?\.bin"
)
#: Names of what trainers save with weights.
_OTHERS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|trainer_state)(\b|_\d).*|.*_states"
)
_INDEX = ".bin.index.json"
_MARK = ".overwire-torch-"
#: The most bytes of plain values that the metadata of a file keeps.
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
    """Rewrites a model: plain to compressed, compressed to plain
    (compress=False), other shards. Memory does not grow with the model.

    A plain file that was compressed alone is restored byte for byte, including its
    header; its SHA-256 is compared before the file appears (`Report.originals`).

    Files of torch.save (.bin, .pt, .pth, .ckpt), and local folders of them, are read
    without running any code of theirs: see the page on folders.

    source: what `inspect` takes, a file or folder of torch.save, or a list of files.
    path: the file, or a folder if it ends in a slash, or if the source is a folder or
        several files and it does not end in .safetensors.
    level, metadata, max_shard_size: as for `save_file`; metadata None keeps the
        metadata of the source.
    sha256: whether a compressed file keeps the SHA-256 of the local file that it was made
        from, by which its restoration is proven. One core computes it, about 1 GB/s for
        each file; without it, the header and the hashes of the tensors are the proof.
    storage_options: as for `load_file`, for source and path; `decryption_*` are
        for the source and `encryption_*`, as for `save_file`, for the path. From
        .tensors to .tensors, types, modules and every dtype stay: so files are
        encrypted, decrypted, or given another key.

    Returns a Report; raises what loading and saving raise.
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
    """Whether a local path is a file that torch.save wrote, or a folder whose weights are such files."""
    if is_remote(path) or not may_be_torch(path):
        return False
    with classed_errors(path, "open"):
        if os.path.isdir(path):
            return any(_weights_of_folders(path).values())
        refusal = refusal_of(path)
        if refusal is not None and type(refusal) is not FormatError:
            raise refusal
        return refusal is None  # the engine says what another file is


def _weights_of_folders(root: str) -> dict[str, list[str]]:
    """The names of the files of weights in a folder and in those below it, by the path of each."""
    return {folder: _weights_of(folder) for folder, _ in folders_of(root)}


def _weights_of(folder: str) -> list[str]:
    """The names of the files of weights in a folder. Raises for what has the name or the ending of weights and cannot
    be read as such, or is missing: without it the model would lack tensors."""
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
    """The name of a file of weights, or of its index, as safetensors."""
    stem = name.removesuffix(_INDEX) if name.endswith(_INDEX) else os.path.splitext(name)[0]
    stem = re.sub(r"^pytorch_model\b", "model", stem)
    return f"{stem}.safetensors.index.json" if name.endswith(_INDEX) else f"{stem}.safetensors"


@contextlib.contextmanager
def plain_models(sources: list[str], target: str) -> Iterator[tuple[list[str], list[str]]]:
    """Those of the sources that torch.save wrote as plain files and folders, the others as they are;
    and what of them has no place there: large files that are no weights, and objects that are not data.

    target: what is written from them; the temporary files lie on its disk where it is local."""
    parent = os.path.dirname(os.path.abspath(target)) if not is_remote(target) else tempfile.gettempdir()
    if not os.path.isdir(parent):
        raise NotFoundError(f"overwire: save {target}: there is no folder {parent}", source=target)
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
            with contextlib.suppress(OSError):  # a later conversion removes the rest
                shutil.rmtree(top, ignore_errors=True)
        finally:
            os.close(lock)


def _name_sources(error: OverwireError, sources: Mapping[str, str]) -> None:
    """Makes an error name the sources instead of the plain files that were made of them."""
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
    """A new temporary folder, and the descriptor that has it locked."""
    while True:
        top = tempfile.mkdtemp(prefix=_MARK, dir=parent)
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
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
    """Removes what conversions have left that were killed: no process has it locked."""
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
    """Writes the tensors of a file that torch.save wrote. Plain values become metadata. Returns what is left out."""
    with opened(source, os.path.dirname(path)) as content:
        notes = {"format": "pt"}
        values = _text_of(content.values)
        if content.values and values is not None:
            notes["torch.values"] = values
        elif content.values:
            content.left.append(f"{len(content.values)} plain values of more than {_VALUES} letters")
        try:
            save_bytes(content.tensors, path, notes, compress=False)
        except ArgumentError as error:  # of a name that no file can have
            reason = str(error).removeprefix("overwire: bad argument: ")
            raise FormatError(f"overwire: open {source}: {reason}", source=source, tensor=error.tensor) from error
        return [f"{source}: {what}" for what in content.left]


def _text_of(values: dict[str, Any]) -> str | None:
    """Values as JSON; None where that has more letters than metadata keeps: one value may stand for many."""
    parts, letters = [], 0
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(values):
        letters += len(part)
        if letters > _VALUES:
            return None
        parts.append(part)
    return "".join(parts)


def _plain_folder(source: str, path: str) -> list[str]:
    """Makes a folder like the source, with its weights as plain files. Returns what is left out."""
    remainder = []
    of_folders = _weights_of_folders(source)
    for folder, names in of_folders.items():
        place = os.path.normpath(os.path.join(path, os.path.relpath(folder, source)))
        os.mkdir(place)
        weights = set(names)
        sources: dict[str, str] = {}
        for name in sorted(weights) + [name for name in sorted(os.listdir(folder)) if name.endswith(_INDEX)]:
            if (other := sources.setdefault(_plain_name(name), name)) != name:
                why = f"{other} and {name} would both become {_plain_name(name)}: convert one of them by its name"
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
    """Whether a file is one of the folder, or a blob of the Hugging Face cache that it is a snapshot of."""
    if not os.path.isfile(path):
        return False
    real, top = os.path.realpath(path), os.path.realpath(root)
    cache, separator, _ = (top + "/").partition("/snapshots/")
    return real.startswith(top + "/") or bool(separator) and os.path.dirname(real) == cache + "/blobs"


def _is_left(name: str) -> bool:
    """Whether a name is hidden, or that of an index of safetensors files, of which the folder has none."""
    return name.startswith(".") or name.endswith(".json") and ".safetensors." in name


def _is_large(path: str) -> bool:
    """Whether a file is of a format of weights, and too large to be copied along."""
    return os.path.splitext(path)[1].lower() in OTHER_WEIGHTS and os.path.getsize(path) > MOST_OTHER


def _link_or_copy(path: str, target: str) -> None:
    real = os.path.realpath(path)
    try:
        os.link(real, target)
    except OSError:  # another file system
        shutil.copy(real, target)


def _read_index(path: str) -> dict[str, Any]:
    """The index of shards; its weight_map has names only."""
    try:
        index: dict[str, Any] = json.loads(read_file(path, 64 << 20))
        if all(type(shard) is str for shard in index["weight_map"].values()):
            return index
        raise ValueError("a shard without a name")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"overwire: open {path}: no index of shards", source=path) from error


def _plain_index(path: str, target: str) -> None:
    """Writes the index of shards with their new names."""
    index = _read_index(path)
    index["weight_map"] = {name: _plain_name(shard) for name, shard in index["weight_map"].items()}
    with open(target, "x", encoding="utf-8") as file:
        file.write(json.dumps(index))
