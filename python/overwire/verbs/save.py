"""save_file: a dict of tensors becomes one file, or several shards."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import _verbs
from ..errors import ArgumentError, NotSupportedError, name_tensor
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

__all__ = ["Report", "bytes_of_plain", "notes_of", "save_bytes", "save_file"]


@dataclass(frozen=True)
class Report:
    """What was written.

    bytes_in, bytes_out: bytes of the tensors, and of the files that hold them.
    bytes_copied: of the files in copied.
    ratio: out / in, 1.0 without tensors.
    seconds: wall time.
    compressed, aliases: how many tensors are stored compressed, and how many as
        another's bytes (tied or identical).
    files: absolute paths, or URIs, in the order written, an index.json last.
    copied: those of files that a converted folder had beside its weights, as they were.
    left: what of a converted folder was not copied: weights that are not the model's
        (of 64 MiB and more, if they are not safetensors), hidden files, and links that
        lead out of the folder to anything but the blobs of its Hugging Face cache.
    originals: of `convert`, files by name with the SHA-256, in hex, of the plain
        file that a compressed one keeps, or that a decompressed one is, byte for byte;
        "" where it came over a network and was not hashed.
    anew: plain files made of compressed ones that keep no original: their tensors are
        the same, the header is new.
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
    copied: tuple[str, ...] = ()
    originals: Mapping[str, str] = field(default_factory=dict, hash=False)
    anew: tuple[str, ...] = ()
    bytes_copied: int = 0

    def __repr__(self) -> str:
        return (
            f"Report({self.tensors} tensors, {self.compressed} compressed, in {len(self.files)} files: bytes_in={self.bytes_in}, "
            f"bytes_out={self.bytes_out}, ratio={self.ratio:.4f}, seconds={self.seconds:.3f})"
        )

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        facts = [
            ("tensors", f"{self.tensors:,}"),
            ("compressed", f"{self.compressed:,}"),
            ("in", html.size(self.bytes_in)),
            ("out", html.size(self.bytes_out)),
            ("ratio", f"{self.ratio:.3f}"),
            ("seconds", f"{self.seconds:.2f}"),
        ]
        columns = ("file", "SHA-256 of the original") if self.originals else ("file",)
        rows = ((file, self.originals.get(file, ""))[: len(columns)] for file in self.files)
        tables = [html.table("Files written", columns, rows, len(self.files))]
        if self.left:
            tables.append(html.table("Not copied", ("file",), ((f,) for f in self.left), len(self.left)))
        return html.block("Report", facts, *tables)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Report:
        """The report from the engine's JSON."""
        changed: dict[str, Any] = {name: float(report[name]) for name in ("ratio", "seconds")}
        changed |= {name: tuple(report.get(name) or ()) for name in ("files", "left", "copied", "anew")}
        changed["originals"] = {one["file"]: one["sha256"] for one in report.get("originals") or ()}
        return cls(**{**report, **changed})


#: Formats whose names a safetensors file should not bear: other programs would take it for theirs.
_OTHERS = (".gguf", ".h5", ".npz", ".onnx")


def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    filename: str | os.PathLike[str] | None = None,
    compress: bool = True,
    level: str = "default",
    digests: bool = False,
    max_shard_size: int | str | None = None,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Report:
    """Saves torch tensors, numpy arrays or `TensorSpec`s (also mixed) by name.

    path: the file to write; .tensors makes a tensorizer file. It is replaced
        atomically: whatever stops a save, readers find the old file or the new one.
        s3://bucket/key and redis://host:port/key (rediss:// with TLS) are streamed
        in bounded memory, without a local file, and appear when they are complete. A
        set of shards is replaced in one step, by its index. A replaced file keeps its
        mode, owner and POSIX ACL, and a symbolic link is followed. A
        new file has the mode that the umask leaves, or that of the model that it
        replaces. If the folder has an index of shards of the same name
        (model.safetensors.index.json), a single file is refused, because the folder
        would still load the old model; with max_shard_size they are replaced.
    filename: path, by the name that safetensors gives it.
    metadata: texts for `__metadata__`; some loaders require {"format": "pt"}.
    compress: write overwire's container, whose tensors are compressed without loss
        where that gains at least 1 %; only overwire can read them. False writes a
        plain file for every safetensors reader.
    level: "default" decodes at full speed, on a GPU too. "smaller" takes 0.2 to 1.5 % of
        the original less, but saving is slow, and its tensors are decoded by the CPU
        alone, some ten times as slowly, on their way to a GPU too; overwire must be as
        new as format 1.2.
    digests: keep the digest of each tensor in a compressed file (see `digest`), so that
        `verify(path, tensors=)` need not read the file's tensors.
    max_shard_size: the most tensor bytes in one file ("5GB", "512MiB", int). A
        larger model becomes model-00001-of-00002.safetensors and so on, with
        model.safetensors.index.json. Where an earlier set is, the names get a mark
        (model-ow1f2e3d4c-00001-of-00002.safetensors), so that both sets are whole until
        the index is replaced; then the old one is removed.
    storage_options: as for `load_file`, if path is a URI. If several processes write
        one key at once, one of their files stays.
        `encryption_key` (32 bytes or 64 hex digits) or `encryption_password`
        encrypts a .tensors file, by tensorizer's XSalsa20-Poly1305: the bytes
        of tensors, not their names and shapes.

    Do not change the tensors before this returns: they are read in place, tensors on
    a GPU chunk by chunk; tensors that are not dense are copied to the host first.
    Tied tensors are stored once when compressing. Only values are stored, not strides,
    gradients or subclasses (see `compress_pickle`).

    Raises ArgumentError, NotSupportedError for types that safetensors lacks,
    AccessError, IOFailure (a full disk).
    """
    path = named("save_file", path, filename, "path")
    if not isinstance(tensors, Mapping):
        advice = "; save_model saves a module" if hasattr(tensors, "state_dict") else ""
        advice = "; the tensors come first, then the path" if isinstance(tensors, (str, os.PathLike)) else advice
        raise ArgumentError(f"overwire: tensors: expected a dict of tensors, got {type(tensors).__name__}{advice}")
    target = local(path)
    if os.path.splitext(target)[1].lower() in _OTHERS:
        raise ArgumentError(f"overwire: save {target}: the name is that of another format; safetensors files end in .safetensors")
    described: list[tuple[str, Bytes]] = []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ArgumentError(f"overwire: tensors: the name {name!r} is not a str")
        try:
            described.append((name, tensor.describe() if isinstance(tensor, TensorSpec) else frame_of(tensor).describe(tensor)))
        except (ArgumentError, NotSupportedError) as error:
            name_tensor(error, name)
            raise
    return save_bytes(
        described,
        target,
        metadata,
        compress=compress,
        level=level,
        digests=digests,
        shard=parse_size(max_shard_size),
        progress=progress,
        storage_options=storage_options,
    )


def notes_of(metadata: Any) -> dict[str, str]:
    """What a `metadata=` argument says; ArgumentError if it is no mapping of texts."""
    if not isinstance(metadata, Mapping):
        raise ArgumentError(f"overwire: metadata: expected a mapping, got {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ArgumentError(f"overwire: metadata: keys and values must be str ({key!r}: {value!r})")
    return dict(metadata)


def save_bytes(
    described: list[tuple[str, Bytes]],
    path: str,
    metadata: Mapping[str, str] | None,
    *,
    compress: bool = True,
    level: str = "default",
    digests: bool = False,
    shard: int = 0,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
    like: str | None = None,
    beside: bool = False,
    end: float | None = None,
) -> Report:
    """Saves what is described already, and keeps it alive until that is done.

    like: a local file whose mode, owner and ACL a new file gets. beside: an index
    of shards of the same name may stay beside it. end: of `jobs.time_limit`."""
    spec: SaveRequest = {"path": path, "compress": bool(compress), "level": level, "shard": shard, "like": like or "", "beside": beside}
    spec["storage"] = storage(storage_options, [path], writes=True)
    if digests:
        spec["digests"] = True
    if metadata is not None:
        spec["metadata"] = notes_of(metadata)
    numbers = _columns(spec, described)
    with Job(_verbs.save(spec, numbers), "save", watch(progress, "save"), end) as job:
        return Report.of(job.finish())


def bytes_of_plain(described: list[tuple[str, Bytes]], metadata: Mapping[str, str] | None) -> bytes:
    """A plain safetensors file as bytes, of tensors in host memory: one copy of them.

    Raises ArgumentError, as `save_file` does; MemoryError.
    """
    spec: SaveRequest = {"path": "<bytes>"}
    if metadata is not None:
        spec["metadata"] = notes_of(metadata)
    front = _verbs.plain_front(spec, _columns(spec, described))
    header = front["header"].encode()
    parts = [described[at][1] for at in front["order"]]
    tensors = ((ctypes.c_char * part.nbytes).from_address(part.pointer) for part in parts if part.nbytes)
    return b"".join([len(header).to_bytes(8, "little"), header, *tensors])


def _columns(spec: SaveRequest, described: list[tuple[str, Bytes]]) -> bytes:
    # What a request says of tensors, but for their numbers, which it returns.
    spec["names"] = [name for name, _ in described]
    spec["dtypes"] = [b.dtype for _, b in described]
    spec["shapes"] = [list(b.shape) for _, b in described]
    return array("q", [n for _, b in described for n in (b.pointer, b.nbytes, b.cuda)]).tobytes()
