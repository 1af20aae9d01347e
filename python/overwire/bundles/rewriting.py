"""Compresses and decompresses files and folders, as the commands `overwire compress` and `overwire decompress` do."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from .. import _verbs
from ..errors import ArgumentError
from ..jobs import shown
from ..model.options import Level, check_switches, check_values, spell_out
from ..model.saveoptions import BundleOptions
from ..model.storage import storage
from ..model.storageoptions import StorageOptions
from ..paths import local
from ..progress import ProgressLike
from ..verbs.save import notes_of
from ..verbs.saving import Report, Saving
from .torchfolders import convert

if TYPE_CHECKING:
    from typing_extensions import Unpack


def decompress(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Report:
    """Converts compressed files to plain files, which any safetensors reader can read, like the command `overwire
    decompress`. A file that `compress` made from one safetensors file is restored byte for byte, and its SHA-256 is
    checked before the file appears.

    source: the path or URI of a file, a folder or an index.json, or a list of these.
    path: the file to write. It is a folder if it ends in a slash, or if the source is a folder or several files and
        path does not end in .safetensors.
    overwrite: whether to replace an existing file, or to write into a folder that is not empty.
    metadata, max_shard_size: as for `save_file`; metadata None copies the source's metadata.
    progress: as for `load_file`.
    storage_options: as for `convert`.

    Returns a `Report`. Raises ArgumentError if path exists and overwrite is not set, and the errors of `convert`.
    """
    return _rewrite(
        "decompress", source, path, overwrite, compress=False, metadata=metadata, max_shard_size=max_shard_size,
        progress=progress, storage_options=storage_options,
    )  # fmt: skip


@overload
def compress(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], path: str | os.PathLike[str], *,
    overwrite: bool = False, level: Level = "default", metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None, sha256: bool = True, progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Report: ...  # fmt: skip


@overload
def compress(
    source: Any, path: str | os.PathLike[str], *, wait: Literal[True] = True, **options: Unpack[BundleOptions]
) -> float: ...


@overload
def compress(
    source: Any, path: str | os.PathLike[str], *, wait: Literal[False], **options: Unpack[BundleOptions]
) -> Saving: ...


def compress(source: Any, path: str | os.PathLike[str], **options: Any) -> Report | float | Saving:
    """Compresses a file, a folder or several files without loss, like the command `overwire compress`. `decompress`
    restores them, byte for byte.

    source: the path or URI of a file, a folder or an index.json, a torch.save file or folder, or a list of these.
    path: the file to write. It is a folder if it ends in a slash, or if the source is a folder or several files and
        path does not end in .safetensors.
    overwrite: whether to replace an existing file, or to write into a folder that is not empty.
    level, metadata, max_shard_size: as for `save_file`; metadata None copies the source's metadata.
    sha256: as for `convert`.
    progress: as for `load_file`.
    storage_options: as for `convert`.

    Returns a `Report`. Raises ArgumentError if path exists and overwrite is not set, and the errors of `convert`.

    If source is an object, this function works like nyacomp's `compress(model, path)`. It saves a module, a pipeline or
    a state dict in nyacomp's layout, with the options of `save_bundle`, and returns stored bytes / original tensor
    bytes. New programs use `save_bundle`, or `save_model` and `save_file`.
    """
    if not _are_paths(source):
        from .bundle import compress_model

        return compress_model(source, path, **options)
    return _compress_files(source, path, **options)


def _compress_files(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    level: Level = "default",
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    sha256: bool = True,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Report:
    if local(path).lower().endswith(".tensors"):
        why = "the .tensors format has no compression: use overwire.convert to write such files"
        raise ArgumentError(f"overwire: compress {shown(local(path))}: {why}")
    return _rewrite(
        "compress", source, path, overwrite, level=level, metadata=metadata, max_shard_size=max_shard_size,
        sha256=sha256, progress=progress, storage_options=storage_options,
    )  # fmt: skip


_compress_files.__qualname__ = "compress"  # for the error about an unknown keyword
spell_out(_compress_files)
compress.__signature__ = inspect.signature(_compress_files)  # type: ignore[attr-defined]


def _are_paths(source: Any) -> bool:
    kinds = (str, bytes, os.PathLike)
    if isinstance(source, (list, tuple)):
        return bool(source) and all(isinstance(one, kinds) for one in source)
    return isinstance(source, kinds)


def _rewrite(verb: str, source: Any, path: str | os.PathLike[str], overwrite: bool, **options: Any) -> Report:
    check_switches(overwrite=overwrite)
    check_values(**options)
    if options["metadata"] is not None:
        notes_of(options["metadata"])
    target = local(path)
    access = storage(options["storage_options"], [target], writes=True)
    occupant = "" if overwrite else _verbs.occupied({"uri": target, "storage": access})
    if occupant:
        is_file = occupant == "file"
        why = "the file exists" if is_file else "the folder is not empty"
        way = "to replace it" if is_file else "to write into it and replace files of the same names"
        raise ArgumentError(f"overwire: {verb} {shown(target)}: {why}: pass overwrite=True {way}", source=target)
    return convert(source, path, **options)
