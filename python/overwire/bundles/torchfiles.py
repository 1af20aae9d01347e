"""Reads torch.save files (.bin, .pt, .pth, .ckpt) without running any of their code.

A torch.save file is a zip archive with a pickle, `data.pkl`, and the uncompressed bytes of each storage under `data/`.
`machine` interprets the pickle. Only globals that create tensors from storages have an effect. All others (a Trainer's
arguments, Lightning's hyperparameters) become placeholders, and nothing is imported or called for them. The bytes are
memory-mapped, so a file takes no memory. torch is not needed. Unlike torch.load (2.11), this module compares the
archive's checksums, because a converted file gets new checksums, which would also be valid for wrong bytes.

Source: the notes on serialization in torch's documentation, and pickles that torch writes.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import mmap
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

from .._imports import start_thread
from .._tables import BITS
from ..dtypes import CALLED
from ..errors import (
    CorruptError,
    FormatError,
    IOFailure,
    NotSupportedError,
    OverwireError,
    UntrustedPickleError,
    error_of_system,
)
from ..files import regular, state_of_file
from ..foreign.zips import BAD_ZIP, Span, entries_of
from ..frameworks.spec import TensorSpec
from ..frameworks.views import Bytes
from ..paths import classed_errors
from .allowlist import CALLS, AllowList
from .budget import Budget
from .machine import Machine
from .torcharchive import inflate_entries, not_torch
from .unpickling import inside, run_machine

#: The most bytes of a pickle without its tensors.
_MOST = 256 << 20
# The advice if a pickle is refused.
_CURE = "Nothing in it was run. If it is your own file, save only its state_dict() with torch.save, and use that"

#: All strided tensors together may have the file's bytes plus _SPARE.
_SPARE = 256 << 20
#: All other tensors together may have _TIMES the file's bytes plus _SPARE, because a storage may have several names.
_TIMES = 64
#: The longest name in a pickle, in characters.
_LONGEST = 1 << 10
#: The most bytes of one read (_STEP), and of one read that only computes a checksum (_BLOCK).
_STEP, _BLOCK = 64 << 20, 1 << 20
#: How many bytes are charged for an entry in addition to its characters, and the most bits of an integer.
_ENTRY, _BITS = 64, 1 << 10
# The dtypes of typed storages, by the prefix of the storage class.
_STORAGES = {
    "Float": "F32", "Double": "F64", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64", "Untyped": "U8",
}  # fmt: skip
# Maps functions that rebuild a tensor to the position of their first argument for lazy conjugation or negation.
_LAZY_BITS = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}
_SURROGATE = re.compile("[\ud800-\udfff]")
_DTYPES = {called: code for code, called in CALLED.items()}


class _Named(NamedTuple):
    """A global that the pickle names. It is never imported."""

    module: str
    name: str


#: Tensor classes without content other than the tensor.
_TENSOR_TYPES = (
    _Named("torch", "Tensor"), _Named("torch.nn.parameter", "Parameter"), _Named("torch.nn.parameter", "Buffer"),
)  # fmt: skip


class _Opaque:
    """An object of a class that is not plain data."""

    def __init__(self, kind: _Named) -> None:
        self.kind = kind


def _kind_of(value: Any) -> str:
    if isinstance(value, (_Opaque, _Named)):
        return ".".join(value.kind if isinstance(value, _Opaque) else value)
    return type(value).__name__


class _Storage(NamedTuple):
    key: str
    dtype: str
    numel: int


class _Tensor(NamedTuple):
    """A tensor in a storage. Strides and offset count bytes."""

    storage: _Storage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class TorchFile(NamedTuple):
    """The content of an open file.

    tensors: the tensors with their names. A name is a path of keys and positions, joined by dots.
    values: plain values (numbers, texts, lists of these) by path.
    left: paths and classes of objects that are not plain data.
    has_sums: whether the archive has the checksum of each storage and of the pickle.
    """

    tensors: list[tuple[str, Bytes]]
    values: dict[str, Any]
    left: list[str]
    has_sums: bool


class StoredTensor(NamedTuple):
    """The position of a saved tensor in its file, in bytes. checksum: the checksum of the whole storage, or 0 if there
    is none."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    storage: Span
    checksum: int


def read_item(path: str, number: int, span: Span, name: str) -> StoredTensor | TorchFile:
    """Reads the object that one call of torch.save wrote at `span` of an open file. Returns the position of a tensor,
    and the content of any other object, with paths that begin with `name`. The caller must compare a tensor's checksum.

    The memory of the content's tensors stays valid. Raises the errors of `opened`.
    """
    with open(number, "rb", closefd=False) as file, _classed_errors(path, file, span):
        reader = _Reader(path, entries_of(file, span), number, span)
        root = reader.read_root()
        return reader.locate(root) if isinstance(root, _Tensor) else reader.read_content(root, (name,))


@contextlib.contextmanager
def _classed_errors(path: str, file: BinaryIO, span: Span | None) -> Iterator[None]:
    # Converts errors of reading an archive to overwire's classes.
    try:
        yield
    except OverwireError:
        raise
    except OSError as error:
        raise error_of_system(error, "read", path) from error
    except BAD_ZIP as error:
        raise not_torch(path, file, error, span) from error


@contextlib.contextmanager
def opened(
    path: str, span: Span | None = None, compare: bool = True, scratch: str | None = None
) -> Iterator[TorchFile]:
    """Yields the content of a file, or of the archive at `span` in it. Its memory is valid inside the context.

    compare: whether to read all tensors and compare their checksums.
    scratch: the folder for inflated entries; None: the default folder for temporary files.

    Raises FormatError for a file that torch.save did not write, NotSupportedError for tensors that safetensors lacks
    (sparse, quantised, complex128) or that are inside objects of other classes, UntrustedPickleError for a hostile
    pickle, and CorruptError for an archive that is truncated or damaged, or that changes before the context ends.
    """
    with classed_errors(path, "open"):
        file = open(path, "rb", opener=regular)  # noqa: SIM115
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        before = state_of_file(file.fileno())
        with _classed_errors(path, file, span):
            entries, number, part = entries_of(file, span), file.fileno(), span
            if (copy := inflate_entries(path, file, entries, span, scratch)) is not None:
                stack.callback(copy.close)
                entries, number, part = entries_of(copy), copy.fileno(), None
            reader = _Reader(path, entries, number, part)
            content = reader.read_content(reader.read_root(), compare=compare)
        failure = CorruptError(f"overwire: read {path}: changed while it was read", source=path)
        try:
            yield content
        except IOFailure as error:  # the file may have been shortened while its memory was read
            if state_of_file(file.fileno()) != before:
                raise failure from error
            raise
        if state_of_file(file.fileno()) != before:
            raise failure


class _Names(AllowList):
    """The rules for torch pickles. All globals become placeholders, and calls create tensors or placeholders."""

    def __init__(self, budget: Budget, reader: _Reader) -> None:
        super().__init__(budget)
        self._reader = reader

    def find(self, module: str, name: str) -> Any:
        """Returns a plain Python type, or a placeholder for any other global. Raises UntrustedPickleError for a name
        that is too long."""
        if len(module) + len(name) > _LONGEST:
            raise self.budget.refuse(f"it has a name of {len(module) + len(name)} characters")
        if module.split(".")[0] not in ("torch", "numpy", "overwire"):
            with contextlib.suppress(UntrustedPickleError):
                return super().find(module, name)
        return _Named(module, name)

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Creates tensors, shapes and containers. All other calls, and calls with placeholders, create a placeholder. A
        defaultdict with a placeholder as its factory becomes a dict, so the factory is never called."""
        if isinstance(function, _Opaque):
            return function
        is_odd = any(isinstance(arg, (_Named, _Opaque)) for arg in args)
        if isinstance(function, type) and (is_odd or function not in CALLS):
            kind = _Named(function.__module__, function.__qualname__)
            return {} if function is collections.defaultdict else _Opaque(kind)
        if not isinstance(function, _Named):
            return super().call(function, args)
        if function.module == "torch._utils" and function.name.startswith("_rebuild_"):
            return self._reader.rebuild_tensor(function.name, args)
        if function == _Named("torch._tensor", "_rebuild_from_type_v2") and len(args) == 4:
            return self._rebuild_of_type(*args[:3])
        if function == _Named("torch", "Size") and len(args) == 1 and type(args[0]) is tuple:
            return args[0]
        return _Opaque(function)

    def _rebuild_of_type(self, function: Any, kind: Any, args: Any) -> Any:
        # Returns a tensor without its attributes, or a placeholder for a subclass, whose content may be in attributes.
        if type(function) is _Named and kind in _TENSOR_TYPES and type(args) is tuple:
            return self.call(function, args)
        self._reader.count_lost(args if type(args) is tuple else ())
        return _Opaque(kind if isinstance(kind, _Named) else _Named("torch._tensor", "_rebuild_from_type_v2"))

    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        """Creates a placeholder for an object of any class."""
        if isinstance(kind, _Opaque):  # a class that a call returned; protocol 2 writes nested classes this way
            return kind
        return _Opaque(kind) if isinstance(kind, _Named) else super().new(kind, args)

    def set_state(self, made: Any, state: Any) -> None:
        """Ignores the attributes of placeholders."""
        if not isinstance(made, (_Opaque, _Tensor)):
            super().set_state(made, state)


class _Machine(Machine):
    """A machine that also adds items to placeholders, and ignores the items."""

    def _growing_target(self) -> Any:
        return [] if isinstance(self._stack[-1], _Opaque) else super()._growing_target()

    def _set_items(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], _Opaque):
            super()._set_items(items)


class _Reader:
    """Reads one file once. Bytes that Python parses are read instead of mapped, because access to the mapping of a
    truncated file would crash the process."""

    def __init__(self, path: str, entries: list[zipfile.ZipInfo], number: int, span: Span | None = None) -> None:
        self._path, self._number = path, number
        self._base, self._end = span or (0, os.fstat(number).st_size)
        self._spans: dict[str, tuple[int, int]] = {}
        self._entries = {info.filename: info for info in entries}
        if len(self._entries) != len(entries):
            raise self._error_of("it has two entries with the same name")
        pickles = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._error_of("it has no data.pkl")
        self._folder = pickles[0].removesuffix("data.pkl")
        self._budget = Budget(path, min(_MOST, self._entries[pickles[0]].file_size), _CURE)
        self._made = 0
        self._storages: dict[str, _Storage] = {}  # storages that the pickle names, by key
        self._used: set[str] = set()  # keys of storages that a tensor needs
        self._named = 0  # bytes of mapped tensors, counted once per name
        self._copied = 0  # bytes of strided tensors, which are copied
        self._odd = ""  # the class of the first object that is not plain data
        self._is_over = False  # whether the remaining checksums need not be computed

    @functools.cached_property
    def _memory(self) -> mmap.mmap:
        # Tensors refer to the mapping. It is closed when the last of them is freed.
        try:
            return mmap.mmap(self._number, self._end, access=mmap.ACCESS_READ)
        except ValueError:  # the file was shortened
            raise self._error_of("changed while it was read", CorruptError) from None

    def _error_of(self, why: str, kind: type[OverwireError] = FormatError) -> OverwireError:
        return kind(f"overwire: open {self._path}: {why}", source=self._path)

    def _read_bytes(self, start: int, end: int) -> bytes:
        data = bytearray(end - start)
        for low in range(0, len(data), _STEP):
            self._fill_block(memoryview(data)[low : low + _STEP], start + low)
        return bytes(data)

    def _fill_block(self, block: memoryview, at: int) -> None:
        while block:
            try:
                count = os.preadv(self._number, [block], at)
            except OSError as error:  # an error of reading must not look like an error in the pickle
                raise error_of_system(error, "read", self._path) from error
            if not count:
                raise self._error_of("changed while it was read", CorruptError)
            block, at = block[count:], at + count

    def _span_of_entry(self, name: str) -> tuple[int, int]:
        """Returns the offsets of an entry's first byte and end."""
        if name in self._spans:
            return self._spans[name]
        info = self._entries.get(self._folder + name)
        if info is None:
            raise self._error_of(f"it has no {name:.200}")
        start = self._base + info.header_offset
        head = self._read_bytes(start, start + 30) if self._base <= start <= self._end - 30 else b""
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or head[:4] != b"PK\3\4":
            raise self._error_of(f"{name} is compressed or encrypted")
        start += 30 + sum(struct.unpack("<HH", head[26:]))
        if start + info.file_size > self._end:
            raise self._error_of(f"{name} is truncated")
        self._spans[name] = start, start + info.file_size
        return self._spans[name]

    def _stored_sum(self, name: str) -> int:
        return self._entries[self._folder + name].CRC  # 0 if torch.save ran after set_crc32_options(False)

    def _has_sum(self, name: str) -> bool:
        return bool(self._stored_sum(name)) or not self._entries[self._folder + name].file_size

    def _compare_sum(self, name: str, total: int) -> None:
        """Raises CorruptError if the checksum of an entry does not match. total: the computed checksum."""
        stored_sum = self._stored_sum(name)
        if stored_sum and total != stored_sum:
            why = f"checksum mismatch of {name}: {stored_sum:08x} stored, {total:08x} computed: copy or fetch it again"
            raise self._error_of(why, CorruptError)

    def _compare_storage(self, name: str) -> None:
        # Works like `_compare_sum`, but reads the bytes block by block and computes their checksum.
        if not self._stored_sum(name):
            return
        start, end = self._span_of_entry(name)
        buffer, total = memoryview(bytearray(min(_BLOCK, end - start))), 0
        for low in range(start, end, _BLOCK):
            if self._is_over:
                return
            block = buffer[: end - low]
            self._fill_block(block, low)
            total = zlib.crc32(block, total)
        self._compare_sum(name, total)

    def _compare_storages(self, names: list[str]) -> None:
        """Compares the checksums of storages. Raises FormatError if entries overlap, because the shared bytes would be
        read several times."""
        spans = sorted(map(self._span_of_entry, names))
        if any(low[1] > high[0] for low, high in itertools.pairwise(spans)):
            raise self._error_of("its entries overlap")
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            try:
                list(start_thread(pool.map, self._compare_storage, names))
            finally:  # after an error or Ctrl-C the pool waits for running reads, and this flag ends them early
                self._is_over = True

    def read_root(self) -> Any:
        """Returns the object of the pickle, after comparing the pickle's checksum."""
        if self._folder + "byteorder" in self._entries:
            start, end = self._span_of_entry("byteorder")
            if end - start != 6 or self._read_bytes(start, end) != b"little":
                raise self._error_of("its numbers are big-endian", NotSupportedError)
        start, end = self._span_of_entry("data.pkl")
        if end - start > _MOST:
            raise self._error_of(f"its pickle has {end - start} bytes: expected {_MOST} or fewer")
        data = self._read_bytes(start, end)
        self._compare_sum("data.pkl", zlib.crc32(data))
        return run_machine(_Machine(data, _Names(self._budget, self), self._find_storage), self._path)

    def locate(self, tensor: _Tensor) -> StoredTensor:
        """Returns the position of a tensor's bytes."""
        name = f"data/{tensor.storage.key}"
        start, end = self._span_of_entry(name)
        place = start + tensor.offset
        return StoredTensor(tensor.dtype, tensor.shape, tensor.strides, place, (start, end), self._stored_sum(name))

    def read_content(self, root: Any, at: tuple[str, ...] = (), compare: bool = True) -> TorchFile:
        """Returns the content of the file. compare: whether to compare the checksums of all storages."""
        names = [f"data/{key}" for key in self._storages]
        contents = TorchFile([], {}, [], all(map(self._has_sum, ["data.pkl", *names])))
        visits: set[int] = set()
        self._walk_value(contents, root, at, visits)
        if orphans := self._made - len(visits) + len(self._storages) - len(self._used):
            what = f"objects of {self._odd}" if self._odd else "objects that are not plain data"
            why = f"{orphans} tensors are inside {what}: load the file with the library that wrote it"
            raise self._error_of(f"{why}, and save the state_dict()", NotSupportedError)
        if compare:
            self._compare_storages(names)
        return contents

    def _find_storage(self, pid: Any) -> _Storage:
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            raise self._error_of("a reference to a tensor is malformed")
        _, kind, key, _, numel = pid
        if type(kind) is not _Named or type(key) is not str or type(numel) is not int:
            raise self._error_of("a reference to a tensor is malformed")
        storage = _Storage(key, self._dtype_of(kind.name.removesuffix("Storage"), _STORAGES), numel)
        # torch uses the first storage for all references with its key. Other readers would return other tensors.
        if self._storages.setdefault(key, storage) != storage:
            raise self._error_of(f"data/{key:.200} is used with two dtypes or lengths")
        start, end = self._span_of_entry(f"data/{key}")
        if (end - start) // (BITS[storage.dtype] // 8) != numel:
            raise self._error_of(f"data/{key:.200} has {end - start} bytes: expected {numel} of {storage.dtype}")
        return storage

    def _dtype_of(self, name: str, table: dict[str, str]) -> str:
        if name not in table:
            raise self._error_of(f"safetensors has no dtype {name[:50]}", NotSupportedError)
        return table[name]

    def count_lost(self, args: tuple[Any, ...]) -> None:
        """Counts tensors that a class would create from storages. Other tensors may use the same storages."""
        keys = {arg.key for arg in args if type(arg) is _Storage}
        self._made, self._used = self._made + len(keys), self._used | keys

    def rebuild_tensor(self, name: str, args: tuple[Any, ...]) -> _Tensor:
        """Returns the tensor for a call of one of torch's functions that rebuild tensors."""
        if name in ("_rebuild_parameter", "_rebuild_parameter_with_state") and args and type(args[0]) is _Tensor:
            return args[0]
        if name not in _LAZY_BITS or len(args) < 4:
            kind = name.removeprefix("_rebuild_")[:50]
            raise self._error_of(f"it has a tensor that safetensors lacks ({kind})", NotSupportedError)
        if any(args[_LAZY_BITS[name] :]):  # the elements differ from the storage's bytes
            why = "lazily conjugated or negated: save the result of resolve_conj() and resolve_neg()"
            raise self._error_of(f"it has a tensor that is {why}", NotSupportedError)
        storage, offset, shape, strides = args[:4]
        if type(storage) is not _Storage or type(offset) is not int or not 0 <= offset < 1 << 62:
            raise self._error_of("a tensor is malformed")
        dtype = storage.dtype
        if name == "_rebuild_tensor_v3":
            if len(args) < 7 or type(args[6]) is not _Named:
                raise self._error_of("a tensor is malformed")
            dtype = self._dtype_of(args[6].name, _DTYPES)
        item = BITS[dtype] // 8 or 1
        start, end = self._span_of_entry(f"data/{storage.key}")
        if type(strides) is not tuple or any(type(s) is not int or s < 0 for s in strides):
            raise self._error_of("a tensor is malformed")
        strides = tuple(s * item for s in strides)
        first = 0 if type(shape) is tuple and 0 in shape else offset * item  # an empty tensor may begin anywhere
        if not inside(shape, strides, first, item, end - start):
            raise self._error_of("a tensor extends beyond its storage")
        self._made += 1
        self._used.add(storage.key)
        return _Tensor(storage, dtype, shape, strides, first)

    def _walk_value(self, found: TorchFile, value: Any, at: tuple[str, ...], seen: set[int], *above: int) -> None:
        # Charges each path, because an object may have many paths, and a key may be part of many paths. above: the ids
        # of the objects that contain `value`.
        self._budget.charge_work(1)
        self._budget.charge_memory(_ENTRY + sum(map(len, at)))
        name = ".".join(at)
        if id(value) in above:
            raise self._error_of(f"{name} is an object that contains itself, so its tensors have endless names")
        if isinstance(value, _Tensor):
            seen.add(id(value))
            found.tensors.append((name, self._bytes_of(name, value)))
        elif isinstance(value, (_Opaque, _Named)):
            self._budget.charge_memory(len(kind := _kind_of(value)))
            self._odd = self._odd or kind
            found.left.append(f"{name or 'the whole file'}: {kind}")
        elif isinstance(value, dict) and len(at) < 64:
            for key, part in value.items():
                if (text := self._text_of_key(key)) is None:  # `read_content` reports tensors below this key
                    self._budget.charge_memory(len(kind := _kind_of(key)))
                    found.left.append(f"{name}: an entry with a key of type {kind}".removeprefix(": "))
                else:
                    self._walk_value(found, part, (*at, text), seen, *above, id(value))
        elif (size := self._size_of_plain(value)) is not None:
            self._budget.charge_memory(size)
            if name in found.values:
                found.left.append(f"{name}: another value with this name ({type(value).__name__})")
            else:
                found.values[name] = list(value) if isinstance(value, (list, tuple)) else value
        elif isinstance(value, (list, tuple)) and len(at) < 64:
            for number, part in enumerate(value):
                self._walk_value(found, part, (*at, str(number)), seen, *above, id(value))
        else:
            found.left.append(f"{name}: {_kind_of(value)}")

    def _text_of_key(self, key: Any) -> str | None:
        """Returns a key as part of a name if it is a plain value or a tuple of plain values, otherwise None."""
        parts = key if type(key) is tuple else (key,)
        self._budget.charge_work(len(parts))
        size = 0
        for part in parts:
            own = self._size_of_plain(part)
            if own is None or isinstance(part, (list, tuple)):
                return None
            size += own
        self._budget.charge_memory(size)
        return key if type(key) is str else str(key)

    def _size_of_plain(self, value: Any) -> int | None:
        """Returns the approximate bytes of a plain value or of a list of plain values, or None for other objects."""
        kind = type(value)
        if kind is str:
            return len(value) if value.isascii() or not _SURROGATE.search(value) else None
        if kind is int:
            return 8 if value.bit_length() <= _BITS else None
        if value is None or kind is float or kind is bool:
            return 8
        if kind is not list and kind is not tuple:
            return None
        self._budget.charge_work(len(value))
        sizes = [None if type(part) in (list, tuple) else self._size_of_plain(part) for part in value]
        return None if None in sizes else sum(8 + (size or 0) for size in sizes)

    def _bytes_of(self, name: str, tensor: _Tensor) -> Bytes:
        if tensor.dtype == "F4" and not tensor.shape:
            why = f"{name} is a float4 tensor without dimensions, which safetensors lacks: reshape it to (1,)"
            raise self._error_of(why, NotSupportedError)
        start, _ = self._span_of_entry(f"data/{tensor.storage.key}")
        item = BITS[tensor.dtype] // 8 or 1
        start += tensor.offset
        strides, size = [], item
        for dim in reversed(tensor.shape):
            strides.append(size)
            size *= dim
        rows = zip(tensor.shape, tensor.strides, reversed(strides), strict=True)
        dense = all(dim < 2 or own == want for dim, own, want in rows)
        if dense or not size:
            self._named += size
            if self._named > _TIMES * (self._end - self._base) + _SPARE:
                why = f"with {name}, its tensors have {self._named} bytes, more than {_TIMES} times the file's size"
                raise self._error_of(why, NotSupportedError)
            data: Any = memoryview(self._memory)[start : start + size]
        else:
            try:
                import numpy as np
            except ImportError:
                why = f"{name} is strided, and reading it needs numpy: install numpy"
                raise self._error_of(why, NotSupportedError) from None
            self._copied += size
            if self._copied > self._end - self._base + _SPARE:  # with stride 0, one stored element may become many
                why = f"with {name}, its strided tensors have {self._copied} bytes, more than the size of the file"
                raise self._error_of(why, NotSupportedError)
            whole = np.empty(tensor.shape, f"V{item}")
            self._fill_array(whole, start, tensor.strides)
            data = whole.tobytes()
        return TensorSpec.of(CALLED[tensor.dtype], tensor.shape, data).describe()

    def _fill_array(self, out: Any, start: int, strides: tuple[int, ...]) -> None:
        """Fills an array with elements that are `strides` apart, in reads of at most _STEP bytes."""
        import numpy as np

        reach = [(size - 1) * stride for size, stride in zip(out.shape, strides, strict=True)]
        if (span := sum(reach) + out.itemsize) <= _STEP:
            out[...] = np.ndarray(out.shape, out.dtype, self._read_bytes(start, start + span), 0, strides)
            return
        axis = reach.index(max(reach))
        half = out.shape[axis] // 2
        low, high = np.split(out, [half], axis)  # views
        self._fill_array(low, start, strides)
        self._fill_array(high, start + half * strides[axis], strides)
