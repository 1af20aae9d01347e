"""Implements TensorDeserializer, which reads a .tensors file as a mapping of parameters."""

from __future__ import annotations

import contextlib
import io
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ... import load_file, safe_open
from ..._compat_api import prepare_gpu, resolve, skip_at_exit
from ...errors import CorruptError, CryptographyError, FormatError, NotSupportedError
from ...records import OpenRecords, Record, derive_key
from ...stores import ObjectReader, shown
from . import _dtypes, _paths, _s3
from ._encryption import DecryptionParams
from ._sums import hashes_of, have_sums
from ._types import FileFeatureFlags, FileHeader, HashMismatchError, TensorEntry, TensorType, refuse_text

if TYPE_CHECKING:
    import numpy
    import torch

# The most tensor bytes that read_tensors loads together.
_BATCH = 256 << 20

# The most bytes of one value in Redis. Redis allows 512 MiB.
_REDIS_VALUE = 256 << 20

# The dtypes that are cast if dtype= is a floating-point dtype.
_CAST = operator.attrgetter("float16", "bfloat16", "float32", "float64")
_PLAIN = "!#$&()*+,/:;<=>?@[]^_`{|}~"


class TensorDeserializer(Mapping[Any, Any], contextlib.AbstractContextManager["TensorDeserializer"]):
    """The tensors of a .tensors file, as a read-only mapping from names to
    `torch.nn.Parameter`s. Levels of nested files are read-only mappings.

    file_obj: a path, a URI, a descriptor, or a binary file open for reading.
    device: the device for the tensors, by default "cuda" if available, otherwise the CPU.
    filter_func: called with each name (a tuple for a path). A false result skips the tensor.
    dtype: the dtype to cast to. A floating-point dtype casts only floats of 16, 32 and 64 bits; integers, bools,
        complex and 8-bit types stay. Any other dtype casts everything except bools.
    lazy_load: whether tensors are read when they are first requested, and then cached.
    verify_hash: whether to compare all checksums of a record, on the host. "crc32" only compares CRC32, during the
        transfer and for any device. (Encrypted tensors have no CRC32, but a MAC that is always compared.)
    encryption: how to decrypt; None for a file that is not encrypted.
    num_readers: checked but not used, because the engine uses all cores.
    plaid_mode, plaid_mode_buffers: these have no effect.

    Raises ValueError for other files and unknown versions, CryptographyError for a
    missing, superfluous or wrong key, HashMismatchError, and the errors of
    `overwire.load_file`.
    """

    def __init__(
        self,
        file_obj: Any,
        device: Any = None,
        filter_func: Callable[[Any], Any] | None = None,
        dtype: Any = None,
        *,
        lazy_load: bool = False,
        plaid_mode: bool | None = None,
        plaid_mode_buffers: int | None = None,
        num_readers: int | None = None,
        verify_hash: bool | str = False,
        encryption: DecryptionParams | None = None,
    ) -> None:
        import torch

        from . import utils

        self._open: safe_open | None = None
        self._records_file: OpenRecords | None = None
        self._own: Any = None
        self._memory: Any = None  # the content of a file that cannot be opened again
        self._device = utils.get_device() if device is None else torch.device(device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("Cannot deserialize to CUDA device because CUDA is not available")
        self._dynamic = self._device.type == "cuda" and self._device.index is None
        if self._dynamic:
            self._device = _current_cuda()
            self._dynamic = lazy_load
        if self._device.type == "cuda" and not lazy_load:
            prepare_gpu(str(self._device))  # runs while the file is opened
        if encryption is not None and not isinstance(encryption, DecryptionParams):
            kind = encryption.__class__.__name__
            raise TypeError(f"encryption parameter: expected DecryptionParams instance or None, {kind} found")
        if num_readers is not None and not isinstance(num_readers, int):
            raise TypeError(f"num_readers: expected int or None, got {num_readers.__class__.__name__}")
        if num_readers is not None and num_readers < 1:
            raise ValueError("num_readers must be positive")
        self._verify_hash = bool(verify_hash) and verify_hash != "crc32"
        self._dtype = dtype
        self._lazy_load = lazy_load
        self._storage: Any = {}
        source = self._resolve(file_obj)
        self._source: str | None = source
        if num_readers is not None and num_readers > 1 and self._memory is not None:
            raise ValueError(
                "Cannot reopen this type of file to enable parallel reading with num_readers > 1. File paths, URIs, "
                "and HTTP(S) or S3 streams returned from tensorizer.stream_io.open_stream, plus some open files are "
                "capable of being reopened."
                " Other file-like objects and special files (e.g. BytesIO, pipes, sockets) are not supported."
            )
        self._records_file = self._read_records(source)
        self._file_info = self._records_file.about
        if verify_hash == "crc32":
            self._storage["verify_crc32"] = True
        if any(_dtypes.foreign(record.dtype) for record in self._file_info.records):
            self._storage["other_dtypes_as_bytes"] = True
        self._prepare_key(encryption)
        self._records_file.storage_options = self._storage or None
        self._records: dict[_paths.Path, Record] = {}
        self._structure: _paths.Tree = {}
        for record in self._file_info.records:
            path = _paths.parse(record.name)
            _paths.add(self._structure, path)
            if filter_func is None or filter_func(_paths.plain(path)):
                self._records[path] = record
        if not self._file_info.records:
            raise ValueError("Tensor index in the file is empty")
        for path in list(_paths.leaves(self._structure)):
            if path not in self._records:
                _paths.remove(self._structure, path)
        self._cache: dict[_paths.Path, Any] = {}
        self._order = {path: i for i, path in enumerate(self._records)}
        self._last = -1
        self.total_tensor_bytes = sum(r.nbytes for r in self._records.values())
        self.total_file_bytes = self._file_info.total
        self.total_compressed_tensor_bytes = 0
        self.read_bytes = 0
        if not lazy_load:
            self._load_tensors(list(self._records), self._verify_hash)
            if self._device.type == "cuda":
                self.close()

    def _resolve(self, file_obj: Any) -> str:
        """Returns the path or URI that overwire opens for a source."""
        from . import stream_io

        if isinstance(file_obj, bool):
            raise TypeError("file_obj: expected a path or a file, got bool")
        if isinstance(file_obj, int):
            return f"/proc/self/fd/{file_obj}"
        if isinstance(file_obj, (str, bytes, os.PathLike)):
            path = os.fsdecode(file_obj)
            if path.lower().startswith("s3://") and not isinstance(file_obj, os.PathLike):
                self._storage.update(_s3.options_for(False))
            return path
        must = 'TensorDeserializer\'s file_obj must be readable and in binary mode (mode="rb"{})'
        refuse_text(file_obj, "readable", text=must)
        self._own = file_obj
        if isinstance(file_obj, (stream_io.CURLStreamFile, stream_io.RedisStreamFile)) and file_obj.reach is not None:
            uri, options = file_obj.reach
            self._storage.update(options)
            return uri
        (uri,), memory = resolve(file_obj)
        self._memory = None if memory is file_obj else memory
        return uri

    def _read_records(self, source: str) -> OpenRecords:
        try:
            return OpenRecords(source, self._storage or None)
        except (FormatError, CorruptError) as error:
            if error.rule == "NotTensors":
                raise ValueError("Not a tensorizer file") from error
            raise
        except NotSupportedError as error:
            raise ValueError(str(error)) from error

    def _prepare_key(self, encryption: DecryptionParams | None) -> None:
        """Derives the file's key once, and adds it to the options of all later calls."""
        if encryption is None:
            if self._file_info.encrypted:
                raise CryptographyError("Tensor is encrypted, but decryption was not requested")
            return
        if encryption.key is None and encryption.source is None:
            raise ValueError("Invalid DecryptionParams, no key or source string provided")
        if not self._file_info.encrypted:
            why = "is not flagged as encrypted"
            if self._file_info.version < 3:
                why = "comes from a tensorizer version predating encryption, so it must not be encrypted"
            text = f"Tensor decryption was requested, but the file provided {why}. Either set encryption=None on the"
            raise CryptographyError(f"{text} TensorDeserializer, or ensure that the correct file was provided.")
        key: bytes | str | None = encryption.key
        if key is None and encryption.source is not None:
            secrets = [r for r in self._file_info.records if r.encrypted]
            ways = {r.derivation for r in secrets}
            if secrets and None in ways:
                text = "Source string was provided, but the tensor was not originally encrypted using a source string"
                raise CryptographyError(f"{text} (e.g. EncryptionParams.from_string()).")
            if len(ways) > 1:
                self._storage["decryption_password"] = encryption.source
                return
            for way in ways:
                if way is not None:
                    key = derive_key(encryption.source, way)
        if key is not None:
            self._storage["decryption_key"] = key

    def _file(self) -> safe_open:
        if self._source is None:
            raise ValueError("I/O operation on closed file")
        if self._open is None:
            self._open = safe_open(self._records_file, framework="pt", device="cpu")
        return self._open

    def close(self) -> None:
        """Closes the file. Tensors that were read stay valid. A second call does nothing."""
        if self._open is not None:
            self._open.close()
        if self._records_file is not None:
            self._records_file.close_file()
        self._open = self._source = self._memory = None
        self._storage = {}
        if getattr(self._own, "close", None) is not None:
            self._own.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @skip_at_exit
    def __del__(self) -> None:
        if getattr(self, "_source", None) is not None:
            self.close()

    @property
    def total_bytes_read(self) -> int:
        """The number of tensor bytes read so far."""
        return sum(self._records[path].nbytes for path in self._cache)

    @property
    def cache_status(self) -> str | None:
        """The x-cache-status header of the HTTP response, or None."""
        headers = getattr(self._own, "response_headers", None)
        return None if headers is None else headers.get("x-cache-status")

    # Programs use these, although their names begin with an underscore.

    @property
    def _file_flags(self) -> FileFeatureFlags:
        flags = FileFeatureFlags.encrypted if self._file_info.encrypted else FileFeatureFlags(0)
        return flags | (FileFeatureFlags.versioned_headers if self._file_info.version >= 5 else FileFeatureFlags(0))

    @property
    def _file_header(self) -> FileHeader:
        info = self._file_info
        return FileHeader(info.version, self._file_flags, info.total, len(info.records))

    @property
    def _metadata(self) -> dict[Any, TensorEntry]:
        entries = {}
        for path, r in self._records.items():
            hashes = hashes_of(r)
            name, version = _paths.plain(path), 5 if any(d >= 1 << 32 for d in r.shape) else 1
            entries[name] = TensorEntry(
                version, name, TensorType(r.type), r.dtype.partition("\0")[0], r.shape, r.record, r.data, r.nbytes,
                hashes,
            )  # fmt: skip
        return entries

    def _target(self) -> Any:
        return _current_cuda() if self._dynamic else self._device

    def _load_tensors(self, paths: Sequence[_paths.Path], verify: bool) -> None:
        """Loads tensors into the cache."""
        missing = [path for path in paths if path not in self._cache]
        if not missing:
            return
        if self._source is None:
            raise ValueError("I/O operation on closed file")
        records = [self._records[path] for path in missing]
        names = [record.name for record in records]
        device = self._target()
        through_host = verify or device.type not in ("cpu", "cuda")
        try:
            if len(missing) == 1:
                tensors = {names[0]: self._file().get_tensor(names[0])}
            else:
                tensors = load_file(
                    self._records_file,
                    device="cpu" if through_host else device,
                    # None for all tensors, which attaches to a preload of the file
                    keys=None if len(names) == len(self._file_info.records) else names,
                    framework="pt",
                )
        except CorruptError as error:
            if error.rule == "Checksum":
                raise HashMismatchError(str(error)) from error
            raise
        for record in records:
            tensors[record.name] = _dtypes.typed(tensors[record.name], record)
        if verify:
            for record, same in zip(records, have_sums(records, [tensors[name] for name in names]), strict=True):
                if not same:
                    raise HashMismatchError(f"Hash mismatch for tensor '{_paths.plain(_paths.parse(record.name))}'")
        for path, name in zip(missing, names, strict=True):
            self._cache[path] = self._parameter(tensors.pop(name), device)

    def _parameter(self, tensor: torch.Tensor, device: Any) -> Any:
        import torch

        dtype = self._dtype
        is_floating = dtype is not None and dtype.is_floating_point
        if tensor.dtype == torch.bool or is_floating and tensor.dtype not in _CAST(torch):
            dtype = None  # a bool, or a type that a floating-point dtype= does not cast
        tensor = tensor.to(device=device, dtype=dtype)
        return torch.nn.Parameter(tensor, requires_grad=tensor.dtype.is_complex or tensor.dtype.is_floating_point)

    def __getitem__(self, name: Any) -> Any:
        if name not in self._structure:
            raise KeyError(f"Tensor {name} not found")
        level = self._structure[name]
        paths = list(_paths.leaves(level))
        self._load_tensors(paths, self._verify_hash)
        return _paths.build(level, self._cache, proxies=True)

    def __iter__(self) -> Iterator[Any]:
        yield from self._structure

    def __len__(self) -> int:
        return len(self._structure)

    def __contains__(self, key: object) -> bool:
        return key in self._structure

    def keys(self) -> Any:
        """Returns the names at the first level. Reads no tensors."""
        return self._structure.keys()

    def tree(
        self,
        prefix: Sequence[Any] | None = None,
        *,
        default: Any = None,
        filter_func: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Returns the saved structure of dicts and lists below a prefix.

        default: the result if there are no tensors. Raises TypeError for a prefix that is a string or a number.
        """
        if isinstance(prefix, (str, int)):
            text = f"Invalid prefix: expected sequence, got {prefix.__class__.__name__!r}"
            raise TypeError(f"{text} (for a single-element prefix, use a single-element sequence)")
        level: Any = self._structure
        for part in prefix or ():
            if not isinstance(level, dict) or part not in level:
                return default
            level = level[part]
        paths = [path for path in _paths.leaves(level) if filter_func is None or filter_func(_paths.plain(path))]
        if not paths:
            return default
        self._load_tensors(paths, self._verify_hash)
        return _paths.build(level, {path: self._cache[path] for path in paths}, proxies=False)

    def _next(
        self, filter_func: Callable[[Any], Any] | None, num_tensors: int, verify_hash: bool | None
    ) -> Iterator[tuple[Record, Any, Any]]:
        if num_tensors < -1:
            raise ValueError("num_tensors must be -1 or non-negative")
        rest = list(self._records)[self._last + 1 :]
        paths = [path for path in rest if filter_func is None or filter_func(_paths.plain(path))]
        if num_tensors >= 0:
            paths = paths[:num_tensors]
        verify = self._verify_hash if verify_hash is None else verify_hash
        for batch in self._batches(paths):
            self._load_tensors(batch, verify)
            for path in batch:
                self._last = self._order[path]
                yield self._records[path], _paths.plain(path), self._cache[path]

    def _batches(self, paths: Iterable[_paths.Path]) -> Iterator[list[_paths.Path]]:
        batch: list[_paths.Path] = []
        size = 0
        for path in paths:
            batch.append(path)
            size += self._records[path].nbytes
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def read_tensors(
        self, filter_func: Callable[[Any], Any] | None = None, num_tensors: int = -1, verify_hash: bool | None = None
    ) -> Iterator[tuple[int, int, Any, torch.nn.Parameter]]:
        """Yields (module number, TensorType, name, parameter) for the next num_tensors tensors in the file that the
        filter accepts; -1 means all. A later call continues after the last of them."""
        for record, name, parameter in self._next(filter_func, num_tensors, verify_hash):
            yield record.module, TensorType(record.type), name, parameter

    def read_numpy_arrays(
        self,
        filter_func: Callable[[Any], Any] | None = None,
        num_tensors: int = -1,
        allow_raw_data: bool = False,
        verify_hash: bool | None = None,
    ) -> Iterator[tuple[int, int, Any, numpy.ndarray[Any, Any], bool, str | None]]:
        """Yields tensors like `read_tensors`, but as numpy arrays, each followed by whether numpy lacks the dtype and
        by torch's name for such a dtype. Tensors of a dtype that numpy lacks become signed integers of the same size,
        or raise ValueError without allow_raw_data. Raises RuntimeError unless the device is the CPU."""
        if self._device.type != "cpu":
            raise RuntimeError("read_numpy_arrays is only valid when deserializing to the CPU")
        import torch

        for record, name, parameter in self._next(filter_func, num_tensors, verify_hash):
            form, true = _dtypes.opaque(record.dtype)
            if true is not None and not allow_raw_data:
                text = f"{name} has an opaque datatype: (Torch: {true}, Numpy: {form}). Set `allow_raw_data=True` to"
                raise ValueError(f"{text} return as a numpy array with a datatype of {form}")
            tensor = parameter.detach()
            if true is not None and self._dtype is None:
                tensor = tensor.view({1: torch.int8, 2: torch.int16}[tensor.element_size()])
            yield record.module, TensorType(record.type), name, tensor.numpy(), true is not None, true

    def to_redis(self, redis_client: Any, key_prefix: str, force: bool = False) -> None:
        """Copies the file to Redis, where it can be read as `redis://host/key_prefix`. The head and the index are
        stored at "prefix:header:0". Each tensor's record and data are stored at "prefix:name:offset", the data in
        values of at most 256 MiB. Filters have no effect, because a part of the file would not be valid.

        redis_client: a client of the package redis, or an object with its methods set, exists,
            get, scan_iter and delete. force: whether to replace existing values of the prefix. By default they stay, so
            an interrupted copy can be continued.
        Raises ValueError if Redis has a different file at this prefix, and after `close`, which an eager load to a GPU
        calls.
        """
        if self._source is None:
            raise ValueError("I/O operation on closed file")
        records = self._file_info.records
        from urllib.parse import quote

        with io.BufferedReader(ObjectReader(self._source, storage_options=self._reach()), 1 << 20) as file:
            header = file.read(records[0].record)
            name = f"{key_prefix}:header:0"
            if force:
                keys = redis_client.scan_iter(re.sub(r"[\\*?\[\]]", r"\\\g<0>", key_prefix) + ":*")
                if stale := [key for key in keys if bytes(key).rsplit(b":", 1)[-1].isdigit()]:
                    redis_client.delete(*stale)
            elif redis_client.get(name) not in (None, header):
                raise ValueError(f"Redis has another file at {key_prefix!r}; pass force=True to replace it")
            redis_client.set(name, header)
            for record in records:
                cuts = [
                    record.record,
                    *range(record.data, record.data + record.nbytes, _REDIS_VALUE),
                    record.data + record.nbytes,
                ]
                for begin, end in zip(cuts, cuts[1:], strict=False):
                    # Quotes the name, because the original's reader cannot request names with blanks and similar
                    # characters.
                    key = f"{key_prefix}:{quote(record.name, safe=_PLAIN)}:{begin}"
                    if begin == end or not force and redis_client.exists(key):
                        continue
                    file.seek(begin)
                    value = file.read(end - begin)
                    if len(value) != end - begin:
                        where = f"{shown(self._source)} @{begin}"
                        raise CorruptError(f"{where}: truncated: expected {end - begin} bytes, got {len(value)}")
                    redis_client.set(key, value)

    def _reach(self) -> dict[str, object] | None:
        options = ("other_dtypes_as_bytes", "decryption_key", "decryption_password", "verify_crc32")
        return {name: value for name, value in self._storage.items() if name not in options} or None

    def load_into_module(
        self, m: torch.nn.Module, filter_func: Callable[[Any], Any] | None = None, verify_hash: bool | None = None
    ) -> int:
        """Loads the parameters and buffers that `TensorSerializer.write_module` has saved into a module, closes the
        file, and returns their number. Tensors that are tied in the module stay tied if the file has the same bytes for
        them. Raises NotImplementedError for files of state dicts."""
        modules = dict(m.named_modules())
        paths = [path for path in self._records if filter_func is None or filter_func(_paths.plain(path))]
        for path in paths:
            if self._records[path].type == TensorType.STATE_DICT:
                raise NotImplementedError(
                    "This was serialized using TensorSerializer.write_state_dict(), so it cannot be loaded using"
                    " TensorDeserializer.load_into_module(). Use the TensorDeserializer object directly as a "
                    "state_dict mapping instead."
                )
        self._load_tensors(paths, self._verify_hash if verify_hash is None else verify_hash)
        ties: dict[int, list[Any]] = {}
        for path in paths:
            where, attribute = str(path[0]).rsplit(".", 1)
            module, tensor = modules[where], self._cache[path]
            own = module._parameters.get(attribute, module._buffers.get(attribute))
            parameter = self._records[path].type == TensorType.PARAM
            hidden = attribute in module._non_persistent_buffers_set
            # Replaces any attribute of that name, whether it is a parameter, a buffer or a plain attribute.
            for there in (module._parameters, module._buffers, module.__dict__):
                there.pop(attribute, None)
            if own is not None:  # keeps tensors tied that are tied in the module, if they are equal
                ties_of_own = ties.setdefault(id(own), [own])
                tensor = next((k for k in ties_of_own[1:] if _alike(k, tensor)), tensor)
                ties_of_own.append(tensor)
            if parameter:
                module.register_parameter(attribute, tensor)
            else:
                module.register_buffer(attribute, tensor, persistent=not hidden)
        self.close()
        return len(paths)

    def verify_module(self, m: torch.nn.Module) -> tuple[bool, list[tuple[str, bool]]]:
        """Compares a module's tensors with the checksums in the file. Returns whether all match, and
        the result for each name."""
        there: dict[str, Any] = dict(m.state_dict())
        there.update(m.named_buffers())
        # write_module puts a dot before every attribute, also if the module's name is empty.
        there.update({f".{name}": tensor for name, tensor in list(there.items()) if "." not in name})
        record_paths = [path for path in self._records if _paths.plain(path) in there]
        tensors = [there[_paths.plain(path)] for path in record_paths]
        same = dict(zip(record_paths, have_sums([self._records[path] for path in record_paths], tensors), strict=True))
        results = [(_paths.plain(path), same.get(path, False)) for path in self._records]
        return all(same for _, same in results), results


def _alike(a: Any, b: Any) -> bool:
    """Returns whether two tensors are equal bit for bit."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
        return False
    x, y = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def _current_cuda() -> Any:
    """Returns the CUDA device that torch uses for "cuda" now."""
    import torch

    with contextlib.suppress(AttributeError):
        device = torch.get_default_device()
        if device.type == "cuda" and device.index is not None:
            return device
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", 0)
