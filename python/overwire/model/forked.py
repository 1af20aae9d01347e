"""Reads local files in forked children, which cannot use the engine.

DataLoader workers are such children, on Linux by default up to Python 3.13. `safe_open`, `load_file`, `stream` and
`load_model` work there for local files. Plain files are mapped, and their tensors are copied. Compressed files are
decoded by the portable reader, which is slow and needs numpy. Copies and casts avoid torch's thread pool, because it
does not survive a fork. URIs, GPUs and all other functions need the engine and raise ForkedError.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .. import errors
from ..errors import FormatError, NotFoundError, error_of_system
from ..frameworks.frame import Frame
from ..paths import is_file, path_of, raise_unless_absent
from ..portable.folders import refuse_mixture
from ..progress import Watcher
from .indexing import plan
from .opened import Model
from .sources import resolve
from .storage import storage

# The errors of reading a folder, a pipe or a socket. The reader that is chosen for the source reports them.
_SPECIAL = (errno.EISDIR, errno.ESPIPE, errno.ENXIO)

# The longest header that the format allows, in bytes.
_HEADER = 100_000_000

# Patterns for the names of an index.json and of a numbered shard.
_INDEX = re.compile(r"[^.].*\.safetensors(\.[^.]+)?\.index(\.[^.]+)?\.json")
_SHARD = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})\.safetensors")

_warnings: list[None] = []


def is_compressed(source: Any) -> bool | None:
    """Returns whether a local file (a path, an open file, or a file's bytes) is an overwire container, or None if it is
    not a safetensors file or does not exist. Reads only the header, without the engine. Raises an error if the disk
    fails. Otherwise a caller would read an unrecognised container as a plain file, with stored bytes as tensors."""
    try:
        if isinstance(source, (bytes, bytearray, memoryview)):
            view = memoryview(source)
            header = bytes(view[8 : 8 + int.from_bytes(view[:8], "little")])
        elif hasattr(source, "fileno"):
            header = _read_header(source.fileno())
        else:
            number = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                header = _read_header(number)
            finally:
                os.close(number)
        if not header.startswith(b"{"):
            return None
        may_be = b'"overwire"' in header or b"\\u00" in header  # JSON may escape letters
        return may_be and "overwire" in json.loads(header).get("__metadata__", ())
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return None
    except OSError as error:
        if error.errno not in _SPECIAL:
            raise_unless_absent(error, str(source))
        return None


def _read_header(number: int) -> bytes:
    size = int.from_bytes(_read_all(number, 8, 0), "little")
    return _read_all(number, min(_HEADER, size), 8)


def _read_all(number: int, size: int, at: int) -> bytes:
    # Repeats reads that return fewer bytes than requested, because a truncated header is not valid JSON.
    parts = []
    while size and (part := os.pread(number, size, at)):
        parts.append(part)
        size, at = size - len(part), at + len(part)
    return b"".join(parts)


class _PlainFile:
    # A mapped plain file. Writes to the mapping stay in this process.

    def __init__(self, path: str) -> None:
        from ..portable.container import parse

        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b"")
        self.entries, self.metadata, self.is_compressed = parse(self._data, path)

    def bytes_of(self, name: str) -> memoryview:
        """Returns the bytes of a tensor, in the mapping."""
        entry = self.entries[name]
        return self._data[entry.offset : entry.offset + entry.nbytes]


class _CompressedFile:
    # A compressed file, read without the engine.

    def __init__(self, path: str) -> None:
        from ..portable.read import safe_open

        self._file = safe_open(path, "bytes")
        self.entries, self.metadata = self._file.entries(), self._file.metadata()

    def bytes_of(self, name: str) -> memoryview:
        """Returns a copy of the bytes of a tensor."""
        return memoryview(self._file.get_tensor(name))

    def read_all(self, names: set[str]) -> Iterator[tuple[str, memoryview]]:
        """Decodes several tensors together, and yields their names and bytes."""
        holders = [holder for holder, own in self._file.holders().items() if not names.isdisjoint(own)]
        return ((name, data) for name, data in self._file.tensors(holders) if name in names)


class ForkedModel(Model):
    """A model of local files that reads without the engine. The returned tensors belong to the caller.

    table: the parent's table of the same files. If it is given, it defines the positions of tensors. Other arguments of
    `Model` have no effect.

    Raises ForkedError for everything that needs the engine, and the errors of opening the files.
    """

    def __init__(
        self,
        source: Any,
        device: str = "cpu",
        keys: Iterable[str] | None = None,
        filter: Callable[[str], bool] | None = None,
        storage_options: Mapping[str, object] | None = None,
        table: list[tuple[str, str, tuple[int, ...], int, int, int, int]] | None = None,
        **_: object,
    ) -> None:
        if hasattr(source, "shared_model") or device != "cpu":
            raise errors.forked()
        self.device = self.lands = device
        uris, self._keep = resolve(source)
        storage(storage_options, uris)  # refuses options for a local path
        uris = [path_of(uri) if is_file(uri) else uri for uri in uris]
        parts = [one for uri in uris for one in _files_of(uri)]
        self.uris = [path for path, _ in parts]
        self._files = [_open_file(path) for path in self.uris]
        if not _warnings and any(isinstance(file, _CompressedFile) for file in self._files):
            _warnings.append(None)
            text = "this process was forked after the engine had started, so it decodes compressed files slowly, "
            text += "without the engine: use the spawn or forkserver start method"
            warnings.warn(f"overwire: {text}", stacklevel=4)  # names the caller of the public function
        if [one for uri in uris for one in _files_of(uri)] != parts:
            raise errors.CorruptError(f"overwire: open {uris[0]}: it was replaced while it was opened", source=uris[0])
        refuse_mixture((path, file.metadata) for path, file in zip(self.uris, self._files, strict=True))
        self.table = [
            (name, entry.dtype, entry.shape, entry.nbytes, entry.nbytes, at, -1)
            for at, (file, (path, names)) in enumerate(zip(self._files, parts, strict=True))
            for name, entry in _entries_of(file, path, names)
        ]
        if table is not None:
            if {row[:4] + row[5:6] for row in table} - {row[:4] + row[5:6] for row in self.table}:
                why = f"overwire: open {uris[0]}: it was replaced after it was opened"
                raise errors.CorruptError(why, source=uris[0])
            self.table = table
        self._refuse_twins()
        self.chosen = self.choose(keys, filter)

    def info(self) -> list[dict[str, Any]]:
        return [{"uri": uri, "metadata": file.metadata} for uri, file in zip(self.uris, self._files, strict=True)]

    def read_index(self, at: int, frame: Frame, index: Any = ...) -> Any:
        """Returns `tensor[index]` of one tensor, by default the whole tensor."""
        row = self.row(at)
        file = self._files[row.source]
        data = file.bytes_of(row.name)
        cut = None if index is ... else plan(index, row.shape, dims=0).cut
        if cut and frame.name == "bytes":
            raise errors.forked("a part of a tensor as bytes")
        if cut and isinstance(file, _PlainFile):  # reads only the requested part
            part = frame.index(frame.of_bytes(data, row.dtype, row.shape), cut, row.dtype)
            if math.prod(part.shape) != math.prod(row.shape):
                return part
        tensor = frame.of_bytes(bytearray(data) if isinstance(file, _PlainFile) else data, row.dtype, row.shape)
        return frame.index(tensor, cut, row.dtype) if cut else tensor

    def iter_tensors(
        self, chosen: Iterable[int], frame: Frame, wanted: Any, in_order: bool
    ) -> Iterator[tuple[str, Any]]:
        """Yields the names and cast tensors. Decodes the tensors of a compressed file together, unless `in_order`."""
        frame.raw({self.table[at][1] for at in chosen})  # raises an error for dtypes that the framework lacks
        groups: dict[int, list[int]] = {}
        for number, at in enumerate(chosen):
            groups.setdefault(number if in_order else self.table[at][5], []).append(at)
        for group in groups.values():
            rows = {self.table[at][0]: self.row(at) for at in group}
            file = self._files[self.table[group[0]][5]]
            if isinstance(file, _PlainFile):
                pairs = ((name, memoryview(bytearray(file.bytes_of(name)))) for name in rows)
            else:
                pairs = ((name, data) for name, data in file.read_all(set(rows)))
            for name, data in pairs:
                tensor = frame.of_bytes(data, rows[name].dtype, rows[name].shape)
                yield name, tensor if wanted is None else frame.cast(tensor, rows[name].dtype, wanted)

    def load(self, chosen: list[int] | None, frame: Frame, wanted: Any, watcher: Watcher | None) -> dict[str, Any]:
        positions = range(len(self.table)) if chosen is None else chosen
        tensors = dict(self.iter_tensors(positions, frame, wanted, False))
        return {self.table[at][0]: tensors[self.table[at][0]] for at in positions}


def _open_file(path: str) -> _PlainFile | _CompressedFile:
    if "://" in path or not os.path.isfile(path) and os.path.exists(path):
        raise errors.forked(f"{path}, which is not a local file,")
    try:
        plain = _PlainFile(path)
        return _CompressedFile(path) if plain.is_compressed else plain
    except ImportError:
        raise errors.forked(f"{path}, which is compressed and can be read here only with numpy,") from None
    except OSError as error:
        raise error_of_system(error, "open", path) from error


def _entries_of(file: _PlainFile | _CompressedFile, path: str, names: list[str] | None) -> Iterable[tuple[str, Any]]:
    if names is None:
        return file.entries.items()
    if lacking := [name for name in names if name not in file.entries]:
        why = f"overwire: open {path}: it lacks {lacking[0]!r}, which its index.json lists"
        raise FormatError(why, source=path, tensor=lacking[0])
    return ((name, entry) for name, entry in file.entries.items() if name in set(names))


def _files_of(path: str) -> list[tuple[str, list[str] | None]]:
    # Returns the files of a path, each with the tensors that an index lists for it, or None for all its tensors.
    if "://" in path:
        return [(path, None)]
    if _INDEX.fullmatch(os.path.basename(path)) and not os.path.isdir(path):
        return _files_of_index(path)
    if not os.path.isdir(path):
        return [(path, None)]
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise error_of_system(error, "open", path) from error
    indexes = [name for name in names if _INDEX.fullmatch(name)]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indexes) == 1:
        return _files_of_index(os.path.join(path, indexes[0]))
    if not indexes and not files:
        raise NotFoundError(f"overwire: open {path}: no .safetensors file in this folder", source=path)
    shards = [match for name in files if (match := _SHARD.fullmatch(name))]
    count = int(shards[0][3]) if shards else 1
    whole = len(files) == count and sorted({int(one[2]) for one in shards} or {1}) == list(range(1, count + 1))
    if indexes or not whole or len({(one[1], one[3]) for one in shards}) > 1 or "-ow" in files[0]:
        raise errors.forked(f"choosing the model among the files of {path} (name its files or its index.json instead)")
    return [(os.path.join(path, name), None) for name in files]


def _files_of_index(path: str) -> list[tuple[str, list[str] | None]]:
    try:
        with open(path, "rb") as file:
            weights = json.loads(file.read(_HEADER))["weight_map"]
        names = {name: list[str]() for name in weights.values()}
        for tensor, name in weights.items():
            names[name].append(tensor)
        if not names or any(os.path.basename(name) != name or name in ("", ".", "..") for name in names):
            raise ValueError("invalid file names")
    except OSError as error:
        raise error_of_system(error, "open", path) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"overwire: open {path}: not an index of shards: {error!r}", source=path) from None
    folder = os.path.dirname(path)
    return [(os.path.join(folder, name), names[name]) for name in sorted(names)]
