"""Reads the records of tensorizer's .tensors files, and writes such files tensor by tensor.

`load_file`, `safe_open`, `stream`, `verify`, `convert` and `save_file` accept .tensors files
directly. This module is for programs that need the tensors' modules, checksums or encryption. It does not import torch.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _verbs
from ._engine import HandleOwner, ModelNumber, release
from ._imports import skip_at_exit
from .errors import ArgumentError
from .model.opened import Model
from .model.sourcelike import SourceLike
from .model.sources import resolve
from .model.storage import storage

if TYPE_CHECKING:
    from ._requests import Record as RecordItem
    from ._requests import TensorizerDerivation, WriteRequest

__all__ = [
    "KeyDerivation", "NewRecord", "OpenRecords", "Record", "RecordFile", "derive_key", "make_front", "read_records",
    "sums", "write_records",
]  # fmt: skip


@dataclass(frozen=True)
class KeyDerivation:
    """Parameters for deriving a key from a password with Argon2id, version 1.3, with one lane.

    passes: libsodium's opslimit. memory: its memlimit, in bytes. salt: 16 bytes.
    """

    passes: int
    memory: int
    salt: bytes

    def spec(self) -> TensorizerDerivation:
        """Converts the parameters to the engine's request."""
        return {"passes": self.passes, "memory": self.memory, "salt": base64.b64encode(self.salt).decode()}


@dataclass(frozen=True)
class Record:
    """One tensor of a .tensors file.

    name: the name in the file. A path is stored as "\\x1e" and a JSON list.
    type: 0 parameter, 1 buffer, 2 state dict entry. module: the number of the tensor's module.
    dtype: numpy's name. For a dtype that only torch has, the numpy name of a type of the same size, a NUL, and torch's
    name. shape: the shape in the file. record, data: offsets in the file.
    nbytes: the bytes of the data; 0 for a tensor with elements means that all elements are zero.
    prefix: bytes that the checksums cover before the data. crc32, sha256: the checksums, or None. encrypted: whether
    the data are encrypted. derivation: how the key was derived, or None.
    """

    name: str
    type: int
    module: int
    dtype: str
    shape: tuple[int, ...]
    record: int
    data: int
    nbytes: int
    prefix: bytes
    crc32: bytes | None
    sha256: bytes | None
    encrypted: bool
    derivation: KeyDerivation | None


@dataclass(frozen=True)
class RecordFile:
    """The contents of a .tensors file. total: bytes of data, as stated in the file;
    size: bytes of the file; records: in file order."""

    version: int
    encrypted: bool
    total: int
    size: int
    records: tuple[Record, ...]


def read_records(source: SourceLike, *, storage_options: Mapping[str, object] | None = None) -> RecordFile:
    """Reads the index and the records of a .tensors file, but not its data.

    source: a path, a URI, or a binary file open for reading.
    storage_options: as for `load_file`.

    Raises FormatError for other files, NotSupportedError for unknown versions, flags and
    dtypes, CorruptError, NotFoundError.
    """
    file = OpenRecords(source, storage_options)
    file.close_file()
    return file.about


class OpenRecords(HandleOwner):
    """A .tensors file that stays open after its records are read. Loads accept it as a source and
    do not open or index it again. `storage_options` may change until the first load."""

    has_bytes = False  # so loads may use preloaded tensors of the file
    _number: int = 0
    _model: Model | None = None

    def __init__(self, source: SourceLike, storage_options: Mapping[str, object] | None = None) -> None:
        self.storage_options = storage_options
        self._uris, keep = resolve(source)
        if len(self._uris) != 1:
            raise ArgumentError(f"overwire: records: expected one .tensors file, got {len(self._uris)}")
        access = storage(storage_options, self._uris)
        answer = _verbs.records({"uri": self._uris[0], "storage": access})
        # If an interrupt comes before a Model owns the handle, this object's finalizer closes the file.
        self._number = ModelNumber(answer["handle"])
        del keep
        records = tuple(map(_make_record, answer["entries"]))
        self.about = RecordFile(answer["version"], answer["encrypted"], answer["total"], answer["size"], records)

    def shared_model(self) -> Model:
        """Returns the model of the file, shared by its loads."""
        if self._model is None:
            number, self._number = self._number, 0
            self._model = Model(self._uris[0], storage_options=self.storage_options, opened=number)
        return self._model

    @skip_at_exit
    def __del__(self) -> None:
        self.close_file()

    def close_file(self) -> None:
        """Closes the file. Running loads continue."""
        number, self._number = self._number, 0
        if self._model is not None:
            self._model.close()
        elif number:
            release(number)


def _make_record(entry: Mapping[str, Any]) -> Record:
    derivation = None
    if (derive := entry.get("derive")) is not None:
        derivation = KeyDerivation(derive["passes"], derive["memory"], base64.b64decode(derive["salt"]))
    fields = {name: entry[name] for name in ("name", "type", "module", "dtype", "record", "data")}
    fields |= {name: bytes.fromhex(entry[name]) if entry.get(name) else None for name in ("crc32", "sha256")}
    fields |= {"shape": tuple(entry["dims"] or ()), "nbytes": entry["bytes"], "encrypted": entry["sealed"]}
    return Record(**fields, prefix=base64.b64decode(entry.get("prefix", "")), derivation=derivation)


def derive_key(password: bytes, derivation: KeyDerivation) -> bytes:
    """Derives a 32-byte key. Uses `derivation.memory` bytes of memory; 256 MiB take about a second. Raises
    CryptographyError for parameters that libsodium refuses, and NotSupportedError above 4 GiB or 1,024 passes."""
    return bytes.fromhex(_verbs.key({"password": password.hex(), **derivation.spec()}))


def sums(items: Iterable[tuple[bytes, int, int]]) -> list[tuple[bytes, bytes]]:
    """Computes the CRC32 and SHA-256 checksums of records. Each item is a prefix, followed by the address and number of
    bytes of memory. The memory must not change during the call. Uses all cores and releases the GIL. One call with many
    items is faster than one call for each item."""
    rows = list(items)
    numbers = array("q", [n for _, pointer, nbytes in rows for n in (pointer, nbytes)]).tobytes()
    texts = _verbs.sums([prefix.hex() for prefix, _, _ in rows], numbers)
    return [(bytes.fromhex(crc), bytes.fromhex(sha)) for crc, sha in texts]


@dataclass(frozen=True)
class NewRecord:
    """A tensor to be written. The fields are as in `Record`; `pointer` is the host address of its data."""

    name: str
    type: int
    module: int
    dtype: str
    shape: tuple[int, ...]
    pointer: int
    nbytes: int


def write_records(
    file: int,
    records: Iterable[NewRecord],
    offset: int,
    *,
    key: bytes | None = None,
    derivation: KeyDerivation | None = None,
    threads: int = 0,
    path: str = "",
) -> list[Record]:
    """Writes records and their data consecutively from an offset of a file, and returns the
    records as written. Does not write the head and the index, which `make_front` returns.

    file: a descriptor open for writing at any offset (without O_APPEND). key: 32 bytes with which the data are
    encrypted, with new nonces; `derivation` describes to readers how the key was derived. The tensors' memory must not
    change during the call. threads: 0 means one per core.
    path: the file's name in errors. Releases the GIL.

    Raises ArgumentError for tensors that the format does not support, and IOFailure if writing fails. After an
    IOFailure, a part of the data may have been written.
    """
    new = list(records)
    spec: WriteRequest = {"fd": file, "path": path, "offset": offset, "threads": threads}
    spec["items"] = [{**_item_of(r), "module": r.module} for r in new]
    spec["key"] = "" if key is None else key.hex()
    spec["derive"] = None if derivation is None else derivation.spec()
    places = _verbs.write(spec, array("q", [r.pointer for r in new]).tobytes())["places"]
    is_encrypted = key is not None
    rows = []
    for r, (at, data) in zip(new, places, strict=True):
        fields = (r.name, r.type, r.module, r.dtype, r.shape, at, data, r.nbytes)
        rows.append(Record(*fields, b"", None, None, is_encrypted and r.nbytes > 0, derivation))
    return rows


def _item_of(record: Record | NewRecord) -> RecordItem:
    item: RecordItem = {"name": record.name, "type": record.type, "dtype": record.dtype}
    return {**item, "dims": list(record.shape), "bytes": record.nbytes}


def make_front(records: Iterable[Record], index_bytes: int, *, encrypted: bool, version: int = 1) -> bytes:
    """Makes the first bytes of a file: the head, and an index of `index_bytes` bytes.

    The index has the name, type, dtype, shape, offsets and nbytes of each record. version: the minimum version; the
    records may require a higher version. Raises ArgumentError if the index does not fit.
    """
    items: list[RecordItem]
    items = [{**_item_of(r), "record": r.record, "data": r.data, "sealed": encrypted} for r in records]
    if not 0 <= index_bytes <= 1 << 30:
        raise ArgumentError(f"overwire: index_bytes {index_bytes}: expected 0 to {1 << 30}")
    oldest = max(version, 3 if encrypted else 1)
    return bytes.fromhex(_verbs.front({"items": items, "length": index_bytes, "version": oldest}))
