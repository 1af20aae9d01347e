"""Implements save_file, which saves a dict of tensors as one file or several shards."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from .. import _verbs
from .._tables import OTHER_FILES, OTHER_WEIGHTS
from ..errors import ArgumentError, NotSupportedError, name_tensor
from ..frameworks.choose import frame_of
from ..frameworks.spec import JoinedTensor, TensorSpec
from ..frameworks.views import Bytes
from ..jobs import Job
from ..model.options import Level, TensorLike, check_options, check_values, parse_size, spell_out
from ..model.saveoptions import SaveOptions
from ..model.starting import named
from ..model.storage import storage
from ..model.storageoptions import StorageOptions
from ..paths import local, local_file
from ..progress import ProgressLike, watch
from .saving import After, Report, Saving, begin

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._requests import SaveRequest

# The name endings of other formats, and of auxiliary files such as config.json. Programs would not recognise a
# safetensors file with such a name.
_OTHERS = OTHER_FILES.union(OTHER_WEIGHTS) - {".tensors"}


@overload
def save_file(
    tensors: Mapping[str, TensorLike], path: str | os.PathLike[str] | None = None,
    metadata: Mapping[str, str] | None = None, *, filename: str | os.PathLike[str] | None = None,
    wait: Literal[True] = True, **options: Unpack[SaveOptions],
) -> Report: ...  # fmt: skip


@overload
def save_file(
    tensors: Mapping[str, TensorLike], path: str | os.PathLike[str] | None = None,
    metadata: Mapping[str, str] | None = None, *, filename: str | os.PathLike[str] | None = None, wait: Literal[False],
    **options: Unpack[SaveOptions],
) -> Saving: ...  # fmt: skip


def save_file(
    tensors: Mapping[str, TensorLike],
    path: str | os.PathLike[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    filename: str | os.PathLike[str] | None = None,
    wait: bool = True,
    **options: Any,
) -> Report | Saving:
    """Saves torch tensors, numpy arrays and `TensorSpec`s by name.

    path: the file to write. A path that ends in .tensors makes a tensorizer file. The file is replaced atomically: if
        the save is interrupted, readers find the old or the new file. A set of shards is replaced in one step, when its
        index is replaced. Objects (s3://bucket/key, redis://host:port/key, rediss:// with TLS) are streamed in bounded
        memory, without a local file, and appear when they are complete. A replaced file keeps its mode, owner and POSIX
        ACL, and symbolic links are followed. A new file gets the mode of the model that it replaces, or the default
        mode of the umask. If the folder has an index of shards with the same name (model.safetensors.index.json), a
        single file is refused, because the folder would still load the old model; with max_shard_size the shards are
        replaced.
    filename: an alias of path, for programs written for safetensors.
    metadata: strings for `__metadata__`. Some loaders require {"format": "pt"}.
    options: see `SaveOptions`.
    wait: False returns a `Saving` as soon as the tensors may change again. At that time, the contents of the files are
        in host memory. They are written from there while the program continues (see docs/saving.md). Another save to
        the same path first waits for this save. progress is also called from another thread.

    Do not change the tensors before the call returns, because they are read in place. Tensors that are not dense are
    first copied to the host. A GPU encodes its own tensors, in up to 0.4 GB of its memory, and copies only the result
    to the host. The host encodes tensors of less than 32 MiB, tensors that do not begin at a multiple of 16 bytes, all
    tensors with level="smaller" or in a .tensors file, and tensors for which the GPU lacks memory. With compression,
    tied tensors are stored once. Only values are stored, not strides, gradients or subclasses (see `save_bundle`).

    Raises ArgumentError, NotSupportedError for types that safetensors lacks, AccessError, IOFailure, for example for a
    full disk, OutOfMemoryError for max_memory, and the error of an earlier save to this path with wait=False, unless
    `Saving.wait` has raised it.
    """
    check_options("save_file", options, SaveOptions)
    path = named("save_file", path, filename, "path")
    if not isinstance(tensors, Mapping):
        advice = "; save_model saves a module" if hasattr(tensors, "state_dict") else ""
        advice = "; the tensors come first, then the path" if isinstance(tensors, (str, os.PathLike)) else advice
        raise ArgumentError(f"overwire: tensors: expected a dict of tensors, got {type(tensors).__name__}{advice}")
    check_values(wait=wait)
    target = local_file(path)
    refuse_other_format(target)
    descriptions: list[tuple[str, Bytes]] = []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ArgumentError(f"overwire: tensors: the name {name!r} is not a str")
        descriptions.append((name, describe_named(name, tensor)))
    max_memory = options.pop("max_memory", None)
    options["shard"] = parse_size(options.pop("max_shard_size", None))
    if not wait:
        return stage_bytes(descriptions, target, metadata, max_memory=max_memory, **options)
    if max_memory is not None:
        raise ArgumentError("overwire: max_memory: only saves with wait=False have this limit")
    return save_bytes(descriptions, target, metadata, **options)


spell_out(save_file, SaveOptions)


def refuse_other_format(target: str) -> None:
    """Raises ArgumentError for a file name with the ending of another format of weights or of auxiliary files."""
    if os.path.splitext(target)[1].lower() in _OTHERS and not os.path.isdir(target):
        text = f"overwire: save {target}: the name has the ending of another format: use one that ends in .safetensors"
        raise ArgumentError(text)


def describe_named(name: str, tensor: Any) -> Bytes:
    """Describes the bytes to save for a tensor. Errors name the tensor."""
    try:
        if isinstance(tensor, (TensorSpec, JoinedTensor)):
            return tensor.describe()
        return frame_of(tensor).describe(tensor)
    except (ArgumentError, NotSupportedError) as error:
        name_tensor(error, name)
        raise


def notes_of(metadata: Any) -> dict[str, str]:
    """Returns the value of a `metadata=` argument. Raises ArgumentError unless it is a mapping of strings."""
    if not isinstance(metadata, Mapping):
        raise ArgumentError(f"overwire: metadata: expected a mapping, got {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ArgumentError(f"overwire: metadata: keys and values must be str ({key!r}: {value!r})")
    return dict(metadata)


def save_bytes(described: list[tuple[str, Bytes]], path: Any, metadata: Mapping[str, str] | None, **how: Any) -> Report:
    """Saves tensors that are already described. how: see `_start_job`."""
    with _start_job(described, local(path), metadata, **how) as job:
        return Report.of(job.finish())


def stage_bytes(
    described: list[tuple[str, Bytes]],
    path: str,
    metadata: Mapping[str, str] | None,
    then: Callable[[Report], None] | None = None,
    undo: Callable[[], None] = lambda: None,
    over: Callable[[], None] = lambda: None,
    *,
    on_start: Callable[[Saving], None] = lambda saving: None,
    key: str | None = None,
    max_memory: int | str | None = None,
    **how: Any,
) -> Saving:
    """Saves in the background, like `save_bytes`. The tensors may change when the call returns. then, undo, over,
    on_start: see `saving.After`. key: see `saving.begin`."""

    def start_save() -> Job:
        return _start_job(
            described, path, metadata, background=True, max_memory=parse_size(max_memory, "max_memory"), **how
        )

    return begin(path, start_save, After(then, undo, over, on_start), key=key, is_sharded=bool(how.get("shard")))


def _start_job(
    described: list[tuple[str, Bytes]],
    path: str,
    metadata: Mapping[str, str] | None,
    *,
    compress: bool = True,
    level: Level = "default",
    digests: bool = False,
    shard: int = 0,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
    like: str | None = None,
    beside: bool = False,
    end: float | None = None,
    background: bool = False,
    max_memory: int = 0,
) -> Job:
    # like: a local file whose mode, owner and ACL a new file gets. beside: whether an index of shards with the same
    # name may stay. end: the result of `jobs.time_limit`.
    check_values(level=level)
    watcher = watch(progress, "save")
    spec: SaveRequest = {
        "path": path, "compress": bool(compress), "level": level, "shard": shard, "like": like or "", "beside": beside,
        "background": background, "max_memory": max_memory, "digests": bool(digests),
        "storage": storage(storage_options, [path], writes=True),
    }  # fmt: skip
    if metadata is not None:
        spec["metadata"] = notes_of(metadata)
    numbers = _request_columns(spec, described)
    return Job(_verbs.save(spec, numbers), "save", watcher, end)


def bytes_of_plain(described: list[tuple[str, Bytes]], metadata: Mapping[str, str] | None) -> bytes:
    """Returns a plain safetensors file as bytes, for tensors in host memory. Raises ArgumentError like `save_file`, and
    MemoryError."""
    spec: SaveRequest = {"path": "<bytes>"}
    if metadata is not None:
        spec["metadata"] = notes_of(metadata)
    front = _verbs.plain_front(spec, _request_columns(spec, described))
    header = front["header"].encode()
    parts = [described[at][1] for at in front["order"]]
    tensors = ((ctypes.c_char * part.nbytes).from_address(part.pointer) for part in parts if part.nbytes)
    return b"".join([len(header).to_bytes(8, "little"), header, *tensors])


def _request_columns(spec: SaveRequest, described: list[tuple[str, Bytes]]) -> bytes:
    # Adds names, dtypes and shapes to a request. Returns addresses, sizes and devices.
    spec["names"] = [name for name, _ in described]
    spec["dtypes"] = [b.dtype for _, b in described]
    if pieces := {name: list(b.pieces) for name, b in described if b.pieces}:
        spec["places"] = pieces
    spec["shapes"] = [list(b.shape) for _, b in described]
    return array("q", [n for _, b in described for n in (b.pointer, b.nbytes, b.cuda)]).tobytes()
