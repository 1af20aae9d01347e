"""Implements TensorSerializer, which writes .tensors files byte for byte as tensorizer does."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import mmap
import os
import stat
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._compat_api import new_lock, number_of, start_thread, written
from ..._undo import after_error
from ...records import NewRecord, Record, make_front, write_records
from . import _dtypes, _paths
from ._encryption import EncryptionParams
from ._types import TensorType, refuse_text

if TYPE_CHECKING:
    import torch

# How many bytes tensorizer reserves for the index. A larger index gets more space if its size is known before the first
# tensor is written.
_INDEX_BYTES = 256 * 1024
_HEAD_BYTES = 73
_ENTRY_BYTES = 33  # bytes of an entry without its name, dtype and dims
_TAIL = bytes(8)

# The most tensor bytes that are written together, and how many of these bytes may be copies. A tensor is copied if it
# is not on the host, if it is not dense, or if the file has no descriptor.
_TURN = 4 << 30
_COPIED = 512 << 20


class _Spec(NamedTuple):
    idx: int
    path: _paths.Path
    type: TensorType
    tensor: Any
    holder: torch.nn.Module | None = None  # the module that loses the tensor once it is written


class _Ready(NamedTuple):
    """A tensor that is ready to be written. `keep` owns its bytes in host memory: a copy, or the
    tensor's own memory."""

    spec: _Spec
    record: NewRecord
    keep: Any
    copied: bool


class TensorSerializer:
    """Writes tensors to a .tensors file, one after another.

    file_obj: a path (missing folders are made), a descriptor, or a seekable binary file open for reading and writing.
        `close` closes it. A file at a path is replaced atomically by `close`. If an exception ends a `with` block, or a
        write fails, the older file stays.
    compress_tensors: has no effect, as in tensorizer.
    encryption: how to encrypt. The caller's tensors do not change.
    limit_cpu_concurrency: the most cores for hashing and encrypting, by default all.

    Raises ValueError for unsuitable files, TypeError and ValueError for invalid arguments.
    """

    def __init__(
        self,
        file_obj: Any,
        compress_tensors: bool = False,
        *,
        encryption: EncryptionParams | None = None,
        limit_cpu_concurrency: int | None = None,
    ) -> None:
        from . import stream_io

        self._file: Any = None
        self._failed = False  # whether a write has failed, so that no file is written
        if limit_cpu_concurrency is not None:
            if not isinstance(limit_cpu_concurrency, int):
                kind = limit_cpu_concurrency.__class__.__name__
                raise TypeError(f"limit_cpu_concurrency parameter: expected int or None, {kind} found")
            if limit_cpu_concurrency < 1:
                what = f"must be positive (or None for unbound), got {limit_cpu_concurrency}"
                raise ValueError(f"limit_cpu_concurrency parameter: {what}")
        self.cpu_limit = limit_cpu_concurrency or len(os.sched_getaffinity(0))
        if encryption is not None and not isinstance(encryption, EncryptionParams):
            kind = encryption.__class__.__name__
            raise TypeError(f"encryption parameter: expected EncryptionParams instance or None, {kind} found")
        if isinstance(file_obj, int):
            file_obj = os.fdopen(file_obj, "wb+")
        if isinstance(file_obj, (str, bytes, os.PathLike)):
            self._file = stream_io.open_writer(file_obj)
        else:
            must = 'TensorSerializer\'s file_obj must be readable, writable, and in binary mode (mode="wb+"{})'
            refuse_text(file_obj, "writable", "readable", text=must)
            self._file = file_obj
        seekable = getattr(self._file, "seekable", None)
        if callable(seekable) and not seekable():
            raise ValueError("file_obj must support seeking for serialization")
        self._encryption = encryption
        self.compress_tensors = compress_tensors
        self.total_compressed_tensor_bytes = 0
        self._tree: _paths.Tree = {}
        self._records: list[Record] = []
        self._room = _INDEX_BYTES
        self._index_used = 0
        self._lock = new_lock()
        self._at = _HEAD_BYTES + self._room
        self._begun = False
        with after_error(self._drop):
            self._finish()

    @property
    def total_tensor_bytes(self) -> int:
        """The bytes of data written so far."""
        return sum(r.nbytes for r in self._records)

    def write_tensor(self, idx: int, name: str, tensor_type: TensorType, tensor: Any) -> None:
        """Writes one torch tensor or numpy array. After each call an open file is a complete .tensors file.
        Raises ValueError for a name that exists and for an array in a foreign byte order, and TypeError for a dtype
        that readers do not support."""
        self._write([_Spec(idx, (name,), TensorType(tensor_type), tensor)])

    def write_module(
        self, m: torch.nn.Module, remove_tensors: bool = False, *, include_non_persistent_buffers: bool = True
    ) -> None:
        """Writes the parameters and buffers of all submodules. A tensor's name is the module's name, a
        dot, and its own name.

        remove_tensors: whether to replace each tensor with None in the module once it is written.
        include_non_persistent_buffers: False skips buffers that are not in the state_dict.
        """
        specs = []
        for idx, (where, module) in enumerate(m.named_modules()):
            hidden: set[str] = getattr(module, "_non_persistent_buffers_set", set())
            parameters = [(n, t, TensorType.PARAM) for n, t in module.named_parameters(recurse=False)]
            if include_non_persistent_buffers:
                hidden = set()
            buffers = [(n, t, TensorType.BUFFER) for n, t in module.named_buffers(recurse=False) if n not in hidden]
            for name, tensor, kind in parameters + buffers:
                specs.append(_Spec(idx, (f"{where}.{name}",), kind, tensor, module if remove_tensors else None))
        self._write(specs)

    def write_state_dict(self, state_dict: Any) -> None:
        """Writes tensors in nested dicts with str keys, lists and tuples. `TensorDeserializer.tree` returns
        the structure. Raises TypeError for other keys and leaves."""
        import torch

        specs = [
            _Spec(0, path, TensorType.STATE_DICT, tensor)
            for path, tensor in _paths.flatten(state_dict, lambda value: isinstance(value, torch.Tensor))
        ]
        self._write(specs)

    def _write(self, specs: list[_Spec]) -> None:
        """Writes tensors in batches: while one batch is hashed, encrypted and written, the tensors of
        the next batch are copied to the host."""
        if self._file is None:
            raise ValueError("I/O operation on closed file")
        with self._lock:
            if self._failed:
                raise ValueError("an earlier write has failed, so this serializer writes no file: make a new one")
            for spec in specs:
                _text_of(spec.tensor)  # raises for unsupported tensors before anything is written
            for spec in specs:
                _paths.add(self._tree, spec.path)
            self._make_room(specs)
            with after_error(self._drop):
                self._write_turns(specs)
                self._finish()

    def _write_turns(self, specs: list[_Spec]) -> None:
        specs.reverse()  # pop from the end, so finished tensors can be freed
        whole = _TURN if self._descriptor() is not None else _COPIED
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="overwire-tensors") as pool:
            under_way: concurrent.futures.Future[list[_Spec]] | None = None
            while specs or under_way is not None:
                turn: list[_Ready] = []
                copied = size = 0
                while specs and copied < _COPIED and size < whole:
                    ready = _ready(specs.pop())
                    turn.append(ready)
                    size += ready.record.nbytes
                    copied += ready.record.nbytes if ready.copied else 0
                if under_way is not None:
                    for spec in under_way.result():
                        if spec.holder is not None:
                            setattr(spec.holder, str(spec.path[0]).rpartition(".")[2], None)
                under_way = start_thread(pool.submit, self._put, turn) if turn else None
                del turn

    def _drop(self) -> None:
        """Discards the new file and keeps the older one, if the file object supports that."""
        drop = getattr(self._file, "drop", None)
        if callable(drop):
            self._failed = True
            drop()

    def _make_room(self, specs: list[_Spec]) -> None:
        for spec in specs:
            shape, name = spec.tensor.shape, _paths.text(spec.path).encode()
            extent = 8 if any(d >= 1 << 32 for d in shape) else 4  # bytes of each dimension
            self._index_used += _ENTRY_BYTES + len(name) + len(_text_of(spec.tensor)) + extent * len(shape)
        if self._index_used > self._room:
            if self._records:
                raise RuntimeError("Metadata overflow")
            self._room = -(-self._index_used // 4096) * 4096
            self._at = _HEAD_BYTES + self._room

    def _put(self, turn: list[_Ready]) -> list[_Spec]:
        """Writes records and data. Runs in the writer thread."""
        key = derivation = None
        if self._encryption is not None:
            key, derivation = self._encryption.key, self._encryption._derivation
        new = [ready.record for ready in turn]
        own = self._descriptor()
        with contextlib.ExitStack() as stack:
            file = own
            if file is None:
                file = stack.enter_context(os.fdopen(os.memfd_create("tensors"), "wb")).fileno()
            base = 0 if own is not None else self._at
            name = str(getattr(self._file, "name", ""))
            records = write_records(
                file, new, self._at - base, key=key, derivation=derivation, threads=self.cpu_limit, path=name
            )
            self._records += [replace(r, record=r.record + base, data=r.data + base) for r in records]
            end = self._records[-1].data + self._records[-1].nbytes
            if own is None:
                self._file.seek(self._at)
                _all(self._file, mmap.mmap(file, end - base, access=mmap.ACCESS_READ))
        self._at = end
        return [ready.spec for ready in turn]

    def _descriptor(self) -> int | None:
        """Returns the file's descriptor if the engine can write to it at any offset, otherwise None."""
        with contextlib.suppress(AttributeError, OSError):
            self._flush()
            number = number_of(self._file)
            is_plain = number is not None and stat.S_ISREG(os.fstat(number).st_mode)
            if number is not None and is_plain and not fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND:
                return number
        return None

    def _flush(self) -> None:
        flush = getattr(self._file, "flush", None)
        if callable(flush):
            flush()

    def _finish(self) -> None:
        """Completes the file with the tensors written so far."""
        front = make_front(self._records, self._room, encrypted=self._encryption is not None)
        # The first call writes all the space for the index, and later calls only the used part.
        front = front if not self._begun else front[: _HEAD_BYTES + self._index_used + 64]
        self._begun = True
        self._file.seek(0)
        _all(self._file, front)
        self._file.seek(self._at)
        _all(self._file, _TAIL)
        self._flush()

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            written(str(getattr(file, "name", "")))

    def __enter__(self) -> TensorSerializer:
        return self

    def __exit__(self, kind: object = None, *rest: object) -> None:
        if kind is not None:
            self._drop()
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            if not getattr(self, "_records", ()):
                self._drop()  # an interrupt before the first tensor keeps the old file
            self.close()


def _all(file: Any, data: Any) -> None:
    """Writes all data. A raw file may write less than requested, and no file writes more than 2 GiB per call."""
    view = memoryview(data)
    while len(view):
        n = file.write(view[: 1 << 30])
        if n is None:
            n = min(len(view), 1 << 30)
        if n <= 0:
            raise OSError(f"Could not write {len(view)} bytes")
        view = view[n:]


def _text_of(tensor: Any) -> str:
    return _dtypes.written(tensor.dtype) if hasattr(tensor, "is_meta") else _dtypes.of_numpy(tensor.dtype)


def _copy_from_gpu(tensor: Any) -> Any:
    """Copies a tensor to pinned memory. torch reuses this memory, so later batches are copied at the rate of the PCIe
    link. The copy keeps the tensor's memory layout, because torch would convert to another layout on the GPU first."""
    import torch

    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor).contiguous()


def _ready(spec: _Spec) -> _Ready:
    """Prepares a torch tensor or a numpy array: makes it dense and copies it to the host if needed."""
    tensor, keep, is_copy, pointer, size = spec.tensor, None, False, 0, 0
    if not hasattr(tensor, "is_meta"):
        import numpy

        keep = numpy.ascontiguousarray(tensor)
        is_copy, pointer, size = keep is not tensor, keep.ctypes.data, keep.nbytes
    elif not tensor.is_meta:
        from ..._compat_api import check_memory  # imports torch

        check_memory(tensor, f"overwire: TensorSerializer: {_paths.text(spec.path)!r}")
        keep = tensor.detach().resolve_conj().resolve_neg()
        keep = _copy_from_gpu(keep) if keep.is_cuda else keep.cpu().contiguous()
        pointer, size = keep.data_ptr(), keep.numel() * keep.element_size()
        is_copy = tensor.is_cuda or size > 0 and pointer != tensor.data_ptr()
    shape = tuple(int(d) for d in tensor.shape)
    record = NewRecord(
        _paths.text(spec.path), int(spec.type), spec.idx, _text_of(tensor), shape, pointer if size else 0, size
    )
    return _Ready(spec, record, keep, is_copy)
