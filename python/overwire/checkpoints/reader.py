"""CheckpointReader: what torch.distributed.checkpoint loads through."""

from __future__ import annotations

import contextlib
import io
import pickle
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import (
    ArgumentError,
    CorruptError,
    FormatError,
    NotSupportedError,
    OverwireError,
    TensorNotFoundError,
    UntrustedPickleError,
)
from ..frameworks.torch import torch_dtype
from ..model.options import StorageOptions
from ..paths import local
from ..verbs.into import table_of
from ..verbs.open import safe_open
from .places import Located, read_manifest


class CheckpointReader(Located, StorageReader):
    """Reads a checkpoint that `CheckpointWriter` has written, for `dcp.load`.

    path: the folder, or s3://bucket/prefix; None: the `checkpoint_id` of the load.
    storage_options: as for `load_file`.

    Any number of ranks, with any sharding, loads it: each reads the blocks of its own tensors,
    into their memory. Objects that are no tensors are unpickled as by
    `torch.load(weights_only=True)`: what it refuses is UntrustedPickleError, unless
    `torch.serialization.add_safe_globals` has allowed it.

    The checkpoint's description is read here, or by `reset`: NotFoundError where no whole
    checkpoint is, FormatError, CorruptError. The load raises torch's CheckpointException,
    whose `failures` has the error of each rank: CorruptError, TensorNotFoundError,
    UntrustedPickleError, IOFailure.
    """

    _schemes = ("s3", "http", "https", "hf")

    def __init__(self, path: Any = None, *, storage_options: StorageOptions | None = None) -> None:
        self._options = storage_options
        self._files: list[tuple[str, Any]] = []  # of each part: its prefix, a safe_open
        self._metadata: Metadata | None = None
        self._bytes: frozenset[str] = frozenset()
        if path is not None:
            self.reset(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Opens the checkpoint at `checkpoint_id`; None: that of before, if it has changed or was closed."""
        if checkpoint_id is not None:
            self._path = local(checkpoint_id)
        self.close()
        if self._path is None:
            return
        manifest = read_manifest(self._path, self._options)
        with contextlib.ExitStack() as stack:
            for part in manifest.parts:
                files = [f"{self._path.rstrip('/')}/{file}" for file in part.files]
                file = stack.enter_context(safe_open(files, "pt", storage_options=self._options))
                self._files.append((part.prefix, file))
            self._metadata = self._describe_tensors(manifest)
            self._bytes = manifest.bytes
            stack.pop_all()

    def _error_of(self, kind: type[OverwireError], tensor: str, why: str) -> OverwireError:
        return kind(f"overwire: {self._path}: {why}", source=self._path, tensor=tensor)

    def _describe_tensors(self, manifest: Any) -> Metadata:
        entries: dict[str, Any] = {}
        for prefix, file in self._files:
            for name, dtype, shape in table_of(file):
                fqn = prefix + name
                if fqn in entries:
                    raise self._error_of(FormatError, fqn, f"{fqn!r} is there twice")
                if fqn in manifest.bytes:
                    if dtype != "U8" or len(shape) != 1:
                        raise self._error_of(FormatError, fqn, f"{fqn!r} should be bytes, and is {dtype} {shape}")
                    entries[fqn] = BytesStorageMetadata()
                    continue
                if (kind := torch_dtype(dtype)) is None:
                    raise self._error_of(NotSupportedError, fqn, f"{fqn!r} is {dtype}, which this torch lacks")
                size = torch.Size(shape)
                chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
                entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=kind), size, [chunk])
        if missing := sorted(manifest.bytes - set(entries)):
            raise self._error_of(CorruptError, missing[0], f"its files lack {missing[0]!r}")
        return Metadata(entries, planner_data=manifest.paths)

    def close(self) -> None:
        """Closes the files."""
        files, self._files, self._metadata = self._files, [], None
        for _, file in files:
            file.close()

    def read_metadata(self, *args: Any) -> Metadata:
        """Called by torch: names, dtypes and shapes, each tensor in one block. Raises ArgumentError without a path."""
        if self._path is None:
            raise ArgumentError("overwire: CheckpointReader: neither a path nor a checkpoint_id was given")
        if self._metadata is None:
            self.reset()
        assert self._metadata is not None
        self._metadata.storage_meta = StorageMeta(checkpoint_id=self._path)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Called by torch."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called by torch."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called by torch."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called by torch: all blocks of a part's tensors are loaded in one pass, into their memory."""
        passes: list[list[Any]] = [[] for _ in self._files]
        slow: list[tuple[int, str, ReadItem, torch.Tensor]] = []
        commits: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            at, name = self._find_tensor(item.storage_index.fqn)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._check_entry(at, name, item.storage_index.fqn))
                continue
            place = planner.resolve_tensor(item)
            commits.append((item, place))
            ranges = [(low, low + n) for low, n in zip(item.storage_offsets, item.lengths, strict=True)]
            shape = self._files[at][1].get_slice(name).shape
            if tuple(ranges[2:]) == tuple((0, size) for size in shape[2:]):
                passes[at].append((name, ranges[:2], place.detach()))
            else:
                slow.append((at, name, item, place.detach()))
        for (_, file), targets in zip(self._files, passes, strict=True):
            if targets:
                file.load_into(targets)
        for at, name, item, place in slow:
            cut = tuple(slice(low, low + n) for low, n in zip(item.storage_offsets, item.lengths, strict=True))
            place.copy_(self._files[at][1].get_slice(name)[cut])
        for item, place in commits:
            planner.commit_tensor(item, place)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _find_tensor(self, fqn: str) -> tuple[int, str]:
        for at, (prefix, file) in enumerate(self._files):
            if fqn.startswith(prefix) and fqn[len(prefix) :] in file:
                return at, fqn[len(prefix) :]
        raise self._error_of(TensorNotFoundError, fqn, f"no tensor {fqn!r}")

    def _check_entry(self, at: int, name: str, fqn: str) -> io.BytesIO:
        """What an entry's bytes are, for a planner, which unpickles all that it gets: written
        anew, of the object that torch's restricted unpickler makes."""
        if fqn not in self._bytes:
            why = f"{fqn!r} is a tensor, and the state to load has none there"
            raise self._error_of(NotSupportedError, fqn, why)
        content = self._files[at][1].get_tensor(name).numpy().tobytes()
        try:
            value = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        except Exception as error:
            # What torch puts before names no class, and advises to run the pickle.
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
            why = f"{fqn!r}: torch.load(weights_only=True) refuses it: {reason:.300}"
            raise self._error_of(UntrustedPickleError, fqn, why) from None
        try:
            return _rewrite_object(value)
        except pickle.PicklingError as error:
            raise self._error_of(UntrustedPickleError, fqn, f"{fqn!r}: {error}") from None


# torch's planner unpickles whatever it gets, and a restricted unpickler may set any attribute of
# the objects that it makes. What pickle asks an instance for, and not its class (`__reduce_ex__`,
# an OrderedDict's `items`), would then be the file's own choice: objects are written anew.


class _Pickler(pickle.Pickler):
    # Refuses objects whose attributes hide a method of their class.
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        for name in () if isinstance(value, type) else getattr(value, "__dict__", ()):
            if callable(getattr(kind, name, None)):
                raise pickle.PicklingError(f"its attribute {name!r} hides a method of {kind.__qualname__}")
        return NotImplemented


_module = ModuleType("overwire.pickle")
_module.__dict__.update(vars(pickle), Pickler=_Pickler)


def _rewrite_object(value: Any) -> io.BytesIO:
    """What torch.save writes of an object. Raises pickle.PicklingError if an attribute hides a
    method of its class, before anything of the object is called."""
    out = io.BytesIO()
    torch.save(value, out, pickle_module=_module)
    out.seek(0)
    return out
