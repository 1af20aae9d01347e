"""The records of tensorizer's .tensors files, and writing such a file tensor by
tensor.

`load_file`, `safe_open`, `stream`, `verify`, `convert` and `save_file` take
.tensors files directly. This module is for programs that need more: the modules
of tensors, their checksums, their encryption. It does not need torch.
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
from .model.sources import SourceLike, resolve
from .model.storage import storage

if TYPE_CHECKING:
    from ._requests import Record as RecordItem
    from ._requests import TensorizerDerivation, WriteRequest

__all__ = [
    "KeyDerivation",
    "NewRecord",
    "Record",
    "RecordFile",
    "derive_key",
    "make_front",
    "read_records",
    "sums",
    "write_records",
]


@dataclass(frozen=True)
class KeyDerivation:
    """How a key is made of a password: Argon2id, version 1.3, with one lane.

    passes: libsodium's opslimit. memory: its memlimit, in bytes. salt: 16 bytes.
    """

    passes: int
    memory: int
    salt: bytes

    def spec(self) -> TensorizerDerivation:
        """In the engine's words."""
        return {"passes": self.passes, "memory": self.memory, "salt": base64.b64encode(self.salt).decode()}


@dataclass(frozen=True)
class Record:
    """One tensor of a .tensors file.

    name: as the file has it; a path begins with "\\x1e" and is a JSON list then.
    type: 0 parameter, 1 buffer, 2 of a state dict. module: number of its module.
    dtype: numpy's name, or for torch's own types one of the same size, NUL, and
    torch's name. shape: as it is written. record, data: offsets in the file.
    nbytes: of the data; 0 although the shape has elements: they are all zero.
    prefix: what is summed up before the data. crc32, sha256: the sums, None where
    there are none. encrypted, derivation: how the data are stored.
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
    """What a .tensors file says about itself. total: bytes of data, as the file states;
    size: bytes of the file; records: in the order of the file."""

    version: int
    encrypted: bool
    total: int
    size: int
    records: tuple[Record, ...]


def read_records(source: SourceLike, *, storage_options: Mapping[str, object] | None = None) -> RecordFile:
    """Reads the index and the records of a .tensors file, and none of its data.

    source: a path, a URI, or a binary file open for reading.
    storage_options: as for `load_file`.

    Raises FormatError for other files, NotSupportedError for versions, flags and
    dtypes that are not known, CorruptError, NotFoundError.
    """
    file = OpenRecords(source, storage_options)
    file.close_file()
    return file.about


class OpenRecords(HandleOwner):
    """A .tensors file that stays open once its records are read: loads take it as a source, and
    neither open nor index it again. `storage_options` may change till the first load."""

    has_bytes = False  # loads join what was preloaded of it
    _number: int = 0
    _model: Model | None = None

    def __init__(self, source: SourceLike, storage_options: Mapping[str, object] | None = None) -> None:
        self.storage_options = storage_options
        self._uris, keep = resolve(source)
        if len(self._uris) != 1:
            raise ArgumentError(f"overwire: {len(self._uris)} files where one was expected")
        access = storage(storage_options, self._uris)
        answer = _verbs.records({"uri": self._uris[0], "storage": access})
        # What is interrupted between here and a model that takes it over closes the file.
        self._number = ModelNumber(answer["handle"])
        del keep
        self.about = RecordFile(
            answer["version"],
            answer["encrypted"],
            answer["total"],
            answer["size"],
            tuple(map(_make_record, answer["entries"])),
        )

    def shared_model(self) -> Model:
        """The model of the file, which loads share."""
        if self._model is None:
            number, self._number = self._number, 0
            self._model = Model(self._uris[0], storage_options=self.storage_options, opened=number)
        return self._model

    @skip_at_exit
    def __del__(self) -> None:
        self.close_file()

    def close_file(self) -> None:
        """Closes the file; loads that run continue."""
        number, self._number = self._number, 0
        if self._model is not None:
            self._model.close()
        elif number:
            release(number)


def _make_record(entry: Mapping[str, Any]) -> Record:
    derive = entry.get("derive")
    return Record(
        name=entry["name"],
        type=entry["type"],
        module=entry["module"],
        dtype=entry["dtype"],
        shape=tuple(entry["dims"] or ()),
        record=entry["record"],
        data=entry["data"],
        nbytes=entry["bytes"],
        prefix=base64.b64decode(entry.get("prefix", "")),
        crc32=bytes.fromhex(entry["crc32"]) if entry.get("crc32") else None,
        sha256=bytes.fromhex(entry["sha256"]) if entry.get("sha256") else None,
        encrypted=entry["sealed"],
        derivation=None
        if derive is None
        else KeyDerivation(derive["passes"], derive["memory"], base64.b64decode(derive["salt"])),
    )


def derive_key(password: bytes, derivation: KeyDerivation) -> bytes:
    """The 32 bytes of a key. Takes `derivation.memory` bytes, and about a second
    where that is 256 MiB. CryptographyError for parameters that libsodium would
    refuse, NotSupportedError above 4 GiB or 1,024 passes."""
    return bytes.fromhex(_verbs.key({"password": password.hex(), **derivation.spec()}))


def sums(items: Iterable[tuple[bytes, int, int]]) -> list[tuple[bytes, bytes]]:
    """CRC32 and SHA-256, as records have them, of each of some items: a prefix,
    and memory by its address and its bytes, which do not change meanwhile. On all
    cores, without the GIL; of many items of one size faster than one by one."""
    rows = list(items)
    numbers = array("q", [n for _, pointer, nbytes in rows for n in (pointer, nbytes)]).tobytes()
    return [
        (bytes.fromhex(crc), bytes.fromhex(sha))
        for crc, sha in _verbs.sums([prefix.hex() for prefix, _, _ in rows], numbers)
    ]


@dataclass(frozen=True)
class NewRecord:
    """A tensor to be written: fields as in `Record`, and `pointer`, where the
    nbytes of its data lie in host memory."""

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
    """Writes records and their data one after the other from an offset of a file, and
    returns them as written. Head and index are not written: see `make_front`.

    file: the descriptor of a file that is open for writing and takes bytes at any
    place (without O_APPEND). key: 32 bytes, that the data are encrypted with, by
    nonces never used before; `derivation` says what the key was made of. The
    memory must not change meanwhile. threads: 0: one a core. path: what errors
    name. Without the GIL.

    Raises ArgumentError for what the format cannot say, IOFailure when the file
    cannot be written; then some of it may be.
    """
    new = list(records)
    spec: WriteRequest = {
        "items": [{**_item_of(r), "module": r.module} for r in new],
        "fd": file,
        "path": path,
        "offset": offset,
        "threads": threads,
        "key": "" if key is None else key.hex(),
        "derive": None if derivation is None else derivation.spec(),
    }
    places = _verbs.write(spec, array("q", [r.pointer for r in new]).tobytes())["places"]
    is_encrypted = key is not None
    rows = []
    for r, (at, data) in zip(new, places, strict=True):
        fields = (r.name, r.type, r.module, r.dtype, r.shape, at, data, r.nbytes)
        rows.append(Record(*fields, b"", None, None, is_encrypted and r.nbytes > 0, derivation))
    return rows


def _item_of(record: Record | NewRecord) -> RecordItem:
    return {
        "name": record.name,
        "type": record.type,
        "dtype": record.dtype,
        "dims": list(record.shape),
        "bytes": record.nbytes,
    }


def make_front(records: Iterable[Record], index_bytes: int, *, encrypted: bool, version: int = 1) -> bytes:
    """The first bytes of a file: head and index, the latter of `index_bytes`.

    Of each record, name, type, dtype, shape, offsets and nbytes count. version:
    the least; it is raised to what the records need. ArgumentError when they do
    not fit.
    """
    items: list[RecordItem] = [
        {**_item_of(r), "record": r.record, "data": r.data, "sealed": encrypted} for r in records
    ]
    if not 0 <= index_bytes <= 1 << 30:
        raise ArgumentError(f"overwire: an index of {index_bytes} bytes")
    return bytes.fromhex(
        _verbs.front({"items": items, "length": index_bytes, "version": max(version, 3 if encrypted else 1)})
    )
