"""save_file: a dict of tensors becomes one file, or several shards."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _verbs
from ..errors import ArgumentError, NotSupportedError
from ..frameworks.choose import frame_of
from ..frameworks.frame import Bytes
from ..frameworks.spec import TensorSpec
from ..jobs import Job
from ..model.options import StorageOptions, parse_size
from ..model.sources import named
from ..model.storage import storage
from ..paths import local
from ..progress import ProgressLike, watch

if TYPE_CHECKING:
    from .._requests import SaveRequest

__all__ = ["Report", "save_bytes", "save_file"]


@dataclass(frozen=True)
class Report:
    """What was written.

    bytes_in: tensor bytes. bytes_out: bytes of the files. ratio: out / in, 1.0
    when nothing came in. seconds: wall time. compressed: tensors stored
    compressed; aliases: tensors stored as another's bytes (tied or identical).
    files: absolute paths, or URIs, in the order written, an index.json last.
    left: files of a converted folder that were not copied along: over 64 MiB, or
    weights that are not the model's.
    """

    __module__ = "overwire"

    bytes_in: int
    bytes_out: int
    ratio: float
    seconds: float
    tensors: int
    compressed: int
    aliases: int
    files: tuple[str, ...]
    left: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Report:
        """The report in the engine's words."""
        return cls(
            bytes_in=int(report["bytes_in"]),
            bytes_out=int(report["bytes_out"]),
            ratio=float(report["ratio"]),
            seconds=float(report["seconds"]),
            tensors=int(report["tensors"]),
            compressed=int(report["compressed"]),
            aliases=int(report["aliases"]),
            files=tuple(report.get("files") or ()),
            left=tuple(report.get("left") or ()),
        )


def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    filename: str | os.PathLike[str] | None = None,
    compress: bool = True,
    max_shard_size: int | str | None = None,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Report:
    """Saves torch tensors, numpy arrays or `TensorSpec`s (also mixed) by name.

    path: the file to write (ending in .tensors: one of tensorizer's), replaced
        atomically: whatever stops a save, readers
        find the old file or the new one. s3://bucket/key and
        redis://host:port/key (rediss:// with TLS) are written as they are made,
        without a file in between and in bounded memory, and show when they are
        whole. Shards in a store that take the names of old ones remove the old
        index first: meanwhile there is no model, never a mixture. A file that is
        replaced keeps its mode, owner and POSIX ACL, and a symbolic link is
        followed; a new one has what the umask leaves, or the mode of the model
        that it replaces. Beside the index of shards of the same name
        (model.safetensors.index.json), by which the folder would still load the
        old model, one file is refused; with max_shard_size it replaces them.
    filename: another word for path, that of safetensors.
    metadata: texts for `__metadata__`; safetensors' own loaders look for
        {"format": "pt"}.
    compress: writes overwire's container, a safetensors file whose tensors are
        losslessly compressed where that gains at least 1 %. False writes a
        plain file that every safetensors reader reads.
    max_shard_size: the most tensor bytes in one file ("5GB", "512MiB", int);
        more goes to model-00001-of-00002.safetensors and so on, with
        model.safetensors.index.json beside them.
    storage_options: as for `load_file`, for a path that is a URI. Several
        processes that write one key at once leave one of their files.
        `encryption_key` (32 bytes or 64 hex digits) or `encryption_password`
        encrypts a .tensors file, by tensorizer's XSalsa20-Poly1305: the bytes
        of tensors, not their names and shapes.

    Tensors are read in place, those on a GPU chunk by chunk as they are written;
    those that are not dense are copied to the host first. They must not change before this returns. Tied tensors are
    stored once when compressing. Only logical values are stored: strides,
    gradients and subclasses are not (see `compress_pickle`).

    Raises ArgumentError, NotSupportedError for types that safetensors lacks,
    AccessError, IOFailure (a full disk).
    """
    path = named("save_file", path, filename, "path")
    if not isinstance(tensors, Mapping):
        raise ArgumentError(f"overwire: tensors: expected a dict of tensors, got {type(tensors).__name__}")
    described: list[tuple[str, Bytes]] = []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ArgumentError(f"overwire: tensors: the name {name!r} is not a str")
        try:
            described.append((name, tensor.describe() if isinstance(tensor, TensorSpec) else frame_of(tensor).describe(tensor)))
        except (ArgumentError, NotSupportedError) as error:
            error.tensor = name
            error.args = (f"{error} (tensor {name!r})",)
            raise
    return save_bytes(
        described,
        local(path),
        metadata,
        compress=compress,
        shard=parse_size(max_shard_size),
        progress=progress,
        storage_options=storage_options,
    )


def save_bytes(
    described: list[tuple[str, Bytes]],
    path: str,
    metadata: Mapping[str, str] | None,
    *,
    compress: bool = True,
    shard: int = 0,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
    like: str | None = None,
    beside: bool = False,
) -> Report:
    """Saves what is described already, and keeps it alive until that is done.

    like: a local file whose mode, owner and ACL a new file gets. beside: an index
    of shards of the same name may stay beside it."""
    spec: SaveRequest = {"path": path, "compress": bool(compress), "shard": shard, "like": like or "", "beside": beside}
    spec["storage"] = storage(storage_options, [path], writes=True)
    if metadata is not None:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ArgumentError(f"overwire: metadata: keys and values must be str ({key!r}: {value!r})")
        spec["metadata"] = dict(metadata)
    spec["names"] = [name for name, _ in described]
    spec["dtypes"] = [b.dtype for _, b in described]
    spec["shapes"] = [list(b.shape) for _, b in described]
    numbers = array("q", [n for _, b in described for n in (b.pointer, b.nbytes, b.cuda)]).tobytes()
    with Job(_verbs.save(spec, numbers), "save", watch(progress, "save")) as job:
        return Report.of(job.finish())
