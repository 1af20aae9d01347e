"""Implements nyacomp's extension module `_nyacomp`, which stores each tensor in a file.

A file with a name that ends in "raw" is plain bytes. Other files are overwire containers with one tensor. nvCOMP's
files can also be read (see `hlif`). Results are writable torch tensors, each in its own memory. As in nyacomp, they are
on the first GPU if torch finds a GPU, otherwise on the host. Importing this module does not import torch and starts no
work.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import overwire
import overwire.gpu as gpu
from overwire._compat_api import error_of_system, imported, new_lock, path_of, regular
from overwire.stores import ObjectReader, shown

from . import hlif, manifests, settings

__version__ = overwire.__version__


def compress(data: Any, filename: str | os.PathLike[str], algo: int = 0) -> int:
    """Compresses bytes into a file, which is replaced atomically.

    The dtype for compression is chosen from samples of the bytes. In nyacomp, `algo` (0, 1 or 2)
    selects one of nvCOMP's settings; here it has no effect.

    Returns the file's size, which may be larger than the data.
    """
    settings.check_algo(algo)
    view = memoryview(data).cast("B")
    kind, size = _KINDS.get(gpu.transform(None, view) or 0, ("U8", 1))
    if len(view) % size:
        kind, size = "U8", 1
    return write_tensor(overwire.TensorSpec.of(kind, [len(view) // size], view), filename)


# Maps the number of an X16 transform (docs/format.md 3.1) to a dtype and its size.
_KINDS = {1: ("BF16", 2), 2: ("F16", 2), 3: ("F32", 4), 4: ("F8_E4M3", 1), 5: ("F8_E5M2", 1)}


# The metadata key for a tensor's digest. Other files refer to the tensor by its digest.
_DIGEST = "overwire.digest"


def write_tensor(tensor: Any, filename: str | os.PathLike[str], digest: str | None = None) -> int:
    """Compresses a tensor into a file, and stores the digest in the metadata. Returns the file's size."""
    name = os.path.basename(os.fspath(filename)).rsplit(".", 1)[0]
    overwire.save_file({name or "tensor": tensor}, filename, None if digest is None else {_DIGEST: digest})
    return os.stat(filename).st_size


class CompressedFile:
    """A tensor file and the description of its tensor. The first five arguments may be positional.

    The file is opened when it is decompressed. digest: the tensor's digest. If it is given, decompressing a file with
    another digest or without a digest raises CorruptError."""

    __slots__ = ("compressed_size", "decompressed_size", "digest", "dtype", "filename", "shape")

    def __init__(
        self,
        filename: str,
        shape: Sequence[int],
        dtype: str,
        decompressed_size: int,
        compressed_size: int,
        *,
        digest: str | None = None,
    ) -> None:
        self.filename = os.fspath(filename)
        self.shape = tuple(shape)
        self.dtype = dtype
        self.decompressed_size = decompressed_size
        self.compressed_size = compressed_size
        self.digest = digest

    def __repr__(self) -> str:
        sizes = f"{self.decompressed_size}, {self.compressed_size}"
        return f"CompressedFile({self.filename!r}, {list(self.shape)}, {self.dtype!r}, {sizes})"

    @property
    def raw(self) -> bool:
        """Whether the file is plain bytes: its name ends in "raw"."""
        return self.filename.endswith("raw")


def decompress(filename: str | os.PathLike[str], shape: Sequence[int], dtype: str) -> Any:
    """Returns the tensor in one file."""
    size = math.prod(shape) * _dtype(dtype, os.fspath(filename)).itemsize
    file = CompressedFile(os.fspath(filename), shape, dtype, size, size)
    return _read_entries([_Entry(file, _place(file.filename))], None, sizes=False)[0]


def batch_decompress(files: Sequence[CompressedFile], assignments: Sequence[Sequence[int]]) -> list[Any]:
    """Returns the tensors of all files, in the order of files.

    assignments: positions in files for each thread, in any number of bins. The assignments are checked but not used,
        because each worker takes the next file.

    Raises ArgumentError for invalid assignments, FormatError for wrong sizes (before anything is allocated),
    NotFoundError, CorruptError, and NotSupportedError for nvCOMP formats that only nvCOMP can read.
    """
    if not manifests.bins_fit(assignments, len(files)):
        text = f"overwire: assignments: expected different positions of {len(files)} files, got {assignments!r:.100}"
        raise overwire.ArgumentError(text)
    return _read_entries([_Entry(file, _place(file.filename)) for file in files], None)


def decompress_from_meta(csv_path: str | os.PathLike[str]) -> list[Any]:
    """Returns the tensors of all files in a meta.csv (a path or URI), in its order. For the meta.csv
    of an overwire bundle, returns all its tensors in the order of its pickle."""
    return _read_entries(_parse_entries(os.fspath(csv_path)), None)


class AsyncDecompressor:
    """Runs `decompress_from_meta` in the background.

    Loading begins when it is created, on the engine's own threads, without the GIL and
    without torch. Errors are only raised by `get`."""

    _preload: overwire.Preload | None = None

    def __init__(self, csv_path: str | os.PathLike[str], *, start: bool = True) -> None:
        """Starts loading. start: False if a preload of the meta.csv is already running; `get` then attaches to it."""
        #: The absolute path or the URI of the meta.csv.
        self.path = os.fspath(csv_path) if "://" in os.fspath(csv_path) else os.path.abspath(csv_path)
        self._lock = new_lock()
        self._tensors: list[Any] | None = None
        if start:
            with contextlib.suppress(overwire.OverwireError):  # get() raises the error again
                self._preload = overwire.preload(self.path)

    def get(self) -> list[Any]:
        """Waits for all tensors and returns them. Every call returns the same tensors. Raises the
        errors of `decompress_from_meta`; the next call then loads again."""
        with self._lock:
            if self._tensors is None:
                self._tensors = _read_entries(_parse_entries(self.path), self._preload)
            return list(self._tensors)

    def take(self) -> list[Any]:
        """Returns the same as `get`, but does not keep the tensors, so a later call loads again."""
        with self._lock:
            tensors, self._tensors = self._tensors, None
            return _read_entries(_parse_entries(self.path), self._preload) if tensors is None else tensors


class _Entry(NamedTuple):
    """A file and its current location."""

    file: CompressedFile
    place: str


def _parse_entries(csv_path: str) -> list[_Entry]:
    manifest = manifests.read_csv(csv_path)
    return [_Entry(CompressedFile(*row), _place(row.filename, manifest)) for row in manifest.rows]


def _place(filename: str, manifest: manifests.Manifest | None = None) -> str:
    """Returns the current location of a listed file. The file is searched like a container, first next to the csv. With
    DOWNLOAD, a listed URL is always used.

    A csv from a URL may name files next to it, and URLs on its own server or on HOST, but no
    local files and no other servers. Raises FormatError."""
    if manifest is not None and "://" in manifest.path:
        return _sibling(filename, manifest.path)
    if "://" in filename and (settings.flag("DOWNLOAD") or manifest is None):
        return filename
    if manifest is not None:
        return manifest.place_of(filename)
    return next((place for place in (filename, filename.lstrip("/")) if os.path.exists(place)), filename)


def _sibling(filename: str, csv_path: str) -> str:
    if "://" in filename:
        origin = filename.split("/")[:3]
        host = settings.host()
        if origin == csv_path.split("/")[:3] or host and filename.startswith(host + "/"):
            return filename
        raise _misfit(csv_path, f"it names {filename!r}, which is neither on its own server nor on HOST")
    name = os.path.basename(filename)
    if name in ("", ".", "..") or any(c in name for c in "\\?#%\0"):
        raise _misfit(csv_path, f"{filename!r} is not a file name")
    path, mark, rest = csv_path.partition("?")
    folder = path[: path.rindex("/") + 1]
    return folder + manifests.Manifest.name_in(folder, filename) + mark + rest


def device() -> str:
    """Returns the device for tensors: the first GPU if torch finds a GPU, otherwise the host."""
    torch = imported("torch")
    return "cuda:0" if torch is not None and torch.cuda.is_available() else "cpu"


def _dtype(name: str, place: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise _misfit(place, f"{name!r} is not a torch dtype")
    return dtype


def _read_entries(entries: list[_Entry], preload: overwire.Preload | None, sizes: bool = True) -> list[Any]:
    """Loads the tensors of all entries. First checks headers and sizes. Then loads all containers in one call, which
    uses the preload if that has the same files. sizes: whether the listed sizes must match the files."""
    if sizes and preload is None and (settings.text("OVERWIRE_DOWNLOADER") or settings.text("DOWNLOADER_PATH")):
        with _brought(entries) as there:
            return _tensors(there, None)
    return _tensors(entries, preload)


@contextlib.contextmanager
def _brought(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Downloads remote entries to a temporary folder, and yields all entries. As in nyacomp, one
    downloader process gets all URLs, and its stream is split by the listed sizes."""
    remote = [entry for entry in entries if entry.place.startswith(("http://", "https://"))]
    if not remote:
        yield entries
        return
    sizes = [entry.file.compressed_size for entry in remote]
    with tempfile.TemporaryDirectory(prefix="overwire-") as folder:
        places = [
            os.path.join(folder, f"{at}-{os.path.basename(urlsplit(entry.place).path)}")
            for at, entry in enumerate(remote)
        ]
        with ObjectReader([entry.place for entry in remote], sizes=sizes) as reader:
            for place, size in zip(places, sizes, strict=True):
                with open(place, "wb") as file:
                    while size and (part := reader.read(min(size, 1 << 20))):
                        file.write(part)
                        size -= len(part)
            reader.read(1)  # raises an error of the download, if any
        here = {id(entry): entry._replace(place=place) for entry, place in zip(remote, places, strict=True)}
        try:
            yield [here.get(id(entry), entry) for entry in entries]
        except overwire.OverwireError as error:
            text = str(error)
            for entry, place in zip(remote, places, strict=True):
                text = text.replace(place, shown(entry.place))
                if error.source == place:
                    error.source = shown(entry.place)
            error.args = (text, *error.args[1:])
            raise


def _tensors(entries: list[_Entry], preload: overwire.Preload | None) -> list[Any]:
    sizes = [_check(entry) for entry in entries]
    containers = [(entry, names) for entry, names in zip(entries, sizes, strict=True) if isinstance(names, list)]
    places, flat = [entry.place for entry, _ in containers], [name for _, names in containers for name in names]
    by_name: dict[str, Any] = {}
    if flat and len(set(flat)) == len(flat):
        if preload is not None and len(preload.uris) == len(places):
            places = preload.uris
        by_name = overwire.load_file(places, framework="pt", device=device())
    tensors: list[Any] = []
    for entry, names in zip(entries, sizes, strict=True):
        if not isinstance(names, list):
            tensors.append(_shaped(names(entry), entry))
            continue
        # Files with equal tensor names, such as copies, are loaded one by one.
        source = by_name or overwire.load_file(entry.place, framework="pt", device=device())
        if _is_bundle(entry):
            tensors += [source.pop(name) for name in names]
        else:
            tensors.append(_shaped(source.pop(names[0]), entry))
    return tensors


def _is_bundle(entry: _Entry) -> bool:
    # The container of a whole bundle is listed as one tensor of bytes.
    return entry.place.endswith(".safetensors")


def _check(entry: _Entry) -> list[str] | Callable[[_Entry], Any]:
    """Returns the names in a container, or for any other file the function that reads its bytes. Only reads headers."""
    file, place = entry.file, entry.place
    if _is_bundle(entry):
        (source,) = overwire.inspect(place)["sources"]
        order = (source.get("metadata") or {}).get("overwire.blobs", "")
        return order.split("\n") if order else [row["name"] for row in source["tensors"]]
    item = _dtype(file.dtype, place).itemsize
    if math.prod(max(d, 1) for d in file.shape) * item >= 1 << 63:
        raise _misfit(place, f"shape {list(file.shape)} of {file.dtype}: no tensor can be that large")
    size = math.prod(file.shape) * item
    if size != file.decompressed_size:
        raise _misfit(
            place, f"shape {list(file.shape)} of {file.dtype} has {size} bytes, but {file.decompressed_size} are listed"
        )
    if file.raw:
        if "://" not in place:
            actual_size = _size_of(place)
            if actual_size != size:
                text = f"overwire: open {place}: expected {size} bytes, got {actual_size}"
                raise overwire.CorruptError(text, source=place)
        return _raw
    if "://" not in place:
        _size_of(place)
        foreign = hlif.sniff(place)
        if foreign is not None and file.digest is None:
            if foreign.plain != size:
                raise _misfit(place, f"it contains {foreign.plain} bytes, expected {size}")
            return _foreign
    try:
        (source,) = overwire.inspect(place)["sources"]
    except overwire.FormatError:
        if "://" not in place or file.digest is not None:
            raise
        return _foreign  # an invalid file is detected after its download
    rows = source["tensors"]
    if file.digest is not None and (source.get("metadata") or {}).get(_DIGEST) != file.digest:
        why = f"overwire: open {place}: the file has a different tensor than the checkpoint: another checkpoint with "
        why += "equal keys was compressed in this folder later; compress each checkpoint in its own folder"
        raise overwire.CorruptError(why, source=place)
    if len(rows) != 1 or rows[0]["bytes"] != size:
        contents = f"{len(rows)} tensors with {sum(row['bytes'] for row in rows)} bytes"
        raise _misfit(place, f"expected one tensor with {size} bytes, got {contents}")
    return [rows[0]["name"]]


def _misfit(place: str, why: str) -> overwire.FormatError:
    return overwire.FormatError(f"overwire: open {place}: {why}", source=place)


def _size_of(place: str) -> int:
    try:
        return os.stat(place).st_size
    except OSError as error:
        raise error_of_system(error, "open", place) from error


def _raw(entry: _Entry) -> Any:
    """Returns the bytes of a raw file as a flat tensor."""
    import torch

    place, size = entry.place, entry.file.decompressed_size
    if place.startswith("file://"):
        place = path_of(place)
    if "://" in place:
        data = bytearray(overwire.read_bytes(place, size))
    else:
        data = bytearray(size)
        with open(place, "rb", opener=regular) as file:
            if file.readinto(data) < size or file.read(1):
                raise overwire.CorruptError(f"overwire: read {place}: its size is no longer {size} bytes", source=place)
    if len(data) != size:
        raise overwire.CorruptError(f"overwire: read {place}: {len(data)} bytes, expected {size}", source=place)
    flat = torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    return flat.to(device())


def _foreign(entry: _Entry) -> Any:
    """Returns the bytes of a file that nvCOMP wrote, as a flat tensor."""
    import torch

    size = entry.file.decompressed_size
    # The limit leaves room for incompressible chunks and for the tables.
    plain = hlif.decode(entry.place, overwire.read_bytes(entry.place, 2 * size + (1 << 20)), size)
    flat = torch.frombuffer(plain, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    return flat.to(device())


def _shaped(tensor: Any, entry: _Entry) -> Any:
    import torch

    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
    dtype = _dtype(entry.file.dtype, entry.place)
    if not flat.numel():
        return torch.empty(entry.file.shape, dtype=dtype, device=tensor.device)
    return flat.view(dtype).reshape(entry.file.shape)
