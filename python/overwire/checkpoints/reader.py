"""Defines CheckpointReader, which loads checkpoints for torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import io
import pickle
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

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

from ..distributed.meeting import OpenFiles, describe_open_files, find_difference
from ..dtypes import PACKED
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
from ..model.storageoptions import StorageOptions
from ..paths import local
from ..verbs.into import table_of
from ..verbs.open import safe_open
from .manifest import NAME, SAVE, Manifest
from .places import Located, read_manifest, state_of
from .schedule import bytes_of, is_bytes


class _View(NamedTuple):
    # Identifies the checkpoint that a rank has opened: by the id of the save, or by the files if there is no id.
    save: str
    files: OpenFiles | None


class CheckpointReader(Located, StorageReader):
    """Reads a checkpoint that `CheckpointWriter` has written, for `dcp.load`.

    path: the folder, or s3://bucket/prefix; None uses the `checkpoint_id` of the load.
    storage_options: as for `load_file`.

    Any number of ranks can load the checkpoint, with any sharding. Each rank reads the blocks of its own tensors
    directly into their memory. Other objects are unpickled as by `torch.load(weights_only=True)`. A class that this
    function refuses raises UntrustedPickleError, unless `torch.serialization.add_safe_globals` allows it.

    The constructor or `reset` opens the checkpoint. Both raise NotFoundError if no complete checkpoint exists,
    FormatError, and CorruptError. A load reads a single save, even while other saves replace the checkpoint. If the
    checkpoint was replaced before the load, the load opens it again. If ranks have opened different saves, all ranks
    raise CorruptError before any tensor is loaded. The next load then opens the checkpoint again. A load raises torch's
    CheckpointException. Its `failures` contains the error of each rank: CorruptError, TensorNotFoundError,
    UntrustedPickleError, IOFailure.
    """

    _schemes = ("s3", "http", "https", "hf")

    def __init__(self, path: Any = None, *, storage_options: StorageOptions | None = None) -> None:
        self._options = storage_options
        self._files: list[tuple[str, Any]] = []  # the prefix and the safe_open of each part
        self._metadata: Metadata | None = None
        self._manifest = Manifest((), frozenset(), None, "", {})
        self._is_planned = False  # whether a load has begun but not read tensors yet
        if path is not None:
            self.reset(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Opens the checkpoint at `checkpoint_id`. None opens the same path again."""
        if checkpoint_id is not None:
            self._path = local(checkpoint_id)
        self.close()
        if self._path is None:
            return
        state = state_of(self._path, self._options)
        try:
            self._open_files(self._path, state)
        except OverwireError:
            self.close()
            if state in (None, now := state_of(self._path, self._options)):
                raise
            self._open_files(self._path, now)  # a save has replaced the checkpoint since it was opened

    def _open_files(self, path: str, state: Any) -> None:
        # state: the state of the checkpoint before it is opened.
        manifest = read_manifest(path, self._options)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            for part in manifest.parts:
                files = [f"{path.rstrip('/')}/{file}" for file in part.files]
                file = stack.enter_context(safe_open(files, "pt", storage_options=self._options))
                self._files.append((part.prefix, file))
                self._refuse_other_saves(manifest, file)
            if not manifest.save and state_of(path, self._options) != state:
                raise CorruptError(f"overwire: {path} was replaced while it was opened: load again", source=path)
            self._metadata = self._describe_tensors(manifest)
            self._manifest, self._is_planned = manifest, False
            stack.pop_all()

    def _refuse_other_saves(self, manifest: Manifest, file: Any) -> None:
        for one in file._live_model().info():
            if (one["metadata"] or {}).get(SAVE, "") != manifest.save:
                why = "the checkpoint was replaced while it was opened, or files of two saves were mixed: load again"
                text = f"overwire: {one['uri']} is from a different save than the {NAME} next to it: {why}"
                raise CorruptError(text, source=one["uri"])

    def _error_of(self, kind: type[OverwireError], tensor: str, why: str) -> OverwireError:
        return kind(f"overwire: {self._path}: {why}", source=self._path, tensor=tensor)

    def _describe_tensors(self, manifest: Any) -> Metadata:
        entries: dict[str, Any] = {}
        for prefix, file in self._files:
            for name, dtype, shape in table_of(file):
                fqn = prefix + name
                if fqn in entries:
                    raise self._error_of(FormatError, fqn, f"{fqn!r} exists twice")
                if fqn in manifest.bytes:
                    if dtype != "U8" or len(shape) != 1:
                        raise self._error_of(FormatError, fqn, f"{fqn!r}: expected bytes, got {dtype} {shape}")
                    entries[fqn] = BytesStorageMetadata()
                    continue
                kind = torch_dtype(dtype)
                if fqn in manifest.dtypes:
                    kind, shape = self._type_of_bytes(fqn, manifest.dtypes[fqn], dtype, shape)
                if kind is None:
                    raise self._error_of(NotSupportedError, fqn, f"{fqn!r} has dtype {dtype}, which this torch lacks")
                size = torch.Size(shape)
                chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
                entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=kind), size, [chunk])
        if missing := sorted((manifest.bytes | set(manifest.dtypes)) - set(entries)):
            raise self._error_of(CorruptError, missing[0], f"its files lack {missing[0]!r}")
        return Metadata(entries, planner_data=manifest.paths)

    def _type_of_bytes(
        self, fqn: str, name: str, dtype: str, shape: tuple[int, ...]
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        # Returns the dtype and shape of a tensor that is stored as bytes.
        kind = getattr(torch, name, None)
        if not isinstance(kind, torch.dtype):
            raise self._error_of(NotSupportedError, fqn, f"{fqn!r} has dtype {name}, which this torch lacks")
        if not is_bytes(kind) or dtype != "U8" or shape[-1:] != (kind.itemsize,):
            raise self._error_of(FormatError, fqn, f"{fqn!r}: expected the bytes of {name}, got {dtype} {shape}")
        return kind, shape[:-1]

    def close(self) -> None:
        """Closes the files."""
        files, self._files, self._metadata = self._files, [], None
        for _, file in files:
            file.close()

    def read_metadata(self, *args: Any) -> Metadata:
        """Returns names, dtypes and shapes, with one block per tensor. torch calls this. Raises ArgumentError if there
        is no path."""
        if self._path is None:
            raise ArgumentError("overwire: CheckpointReader: expected a path or a checkpoint_id")
        if self._metadata is None or self._is_planned:
            self.reset()
        assert self._metadata is not None
        self._metadata.storage_meta = StorageMeta(checkpoint_id=self._path)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Does nothing. torch calls this."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the id of the save that this rank has opened to the plan. torch calls this."""
        self._is_planned = True
        files = None if self._manifest.save else describe_open_files([file._live_model() for _, file in self._files])
        return replace(plan, storage_data=_View(self._manifest.save, files))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises CorruptError if ranks have opened different saves, before any tensor is loaded. The next load opens
        the checkpoint again. torch calls this on the coordinator."""
        views = [plan.storage_data for plan in plans]
        if not all(isinstance(one, _View) for one in views):
            raise NotSupportedError("overwire: CheckpointReader: the planner must not drop the ranks' storage_data")
        other = next((rank for rank, one in enumerate(views) if one.save != views[0].save), 0)
        if other:
            text = f"ranks 0 and {other} have opened different saves, because one save replaced the other: load again"
            raise CorruptError(f"overwire: {self._path}: {text}", source=self._path)
        if error := find_difference({rank: one.files for rank, one in enumerate(views) if one.files is not None}):
            raise error
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Loads all blocks into their tensors' memory, in one pass per part. torch calls this."""
        self._is_planned = False
        passes: list[list[Any]] = [[] for _ in self._files]
        slow: list[tuple[int, str, ReadItem, torch.Tensor]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        commits: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            fqn = item.storage_index.fqn
            at, name = self._find_tensor(fqn)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._check_entry(at, name, fqn))
                continue
            place = planner.resolve_tensor(item)
            commits.append((item, place))
            place = place.detach()
            block = self._block_of(item, name, self._files[at][1])
            if block is None:
                slow.append((at, name, item, place))
                continue
            if fqn in self._manifest.dtypes:
                kind = getattr(torch, self._manifest.dtypes[fqn])
                if place.dtype != kind or not place.is_contiguous() or place.is_conj() or place.is_neg():
                    place, whole = torch.empty(place.shape, dtype=kind, device=place.device), place
                    copies.append((whole, place))
                place = bytes_of(place)
            passes[at].append((name, block, place))
        for (_, file), targets in zip(self._files, passes, strict=True):
            if targets:
                file.load_into(targets)
        for at, name, item, place in slow:
            copies.append((place, self._cut_tensor(self._files[at][1], name, item)))
        for place, tensor in copies:
            place.copy_(tensor)
        for item, place in commits:
            planner.commit_tensor(item, place)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _block_of(self, item: ReadItem, name: str, file: Any) -> list[tuple[int, int]] | None:
        # Returns the block of a tensor for `load_into`, or None if `load_into` does not support this block.
        assert self._metadata is not None
        entry: Any = self._metadata.state_dict_metadata[item.storage_index.fqn]
        size = entry.size
        ranges = [(low, low + n) for low, n in zip(item.storage_offsets, item.lengths, strict=True)]
        while ranges and ranges[-1] == (0, size[len(ranges) - 1]):
            ranges.pop()
        is_packed = file.get_slice(name).dtype in PACKED  # elements share bytes along the last dimension
        return None if len(ranges) > 2 or is_packed and len(ranges) == len(size) else ranges

    def _cut_tensor(self, file: Any, name: str, item: ReadItem) -> torch.Tensor:
        # Reads a slice of the file. If the file and torch lay out the elements differently, reads the whole tensor.
        cut = tuple(slice(low, low + n) for low, n in zip(item.storage_offsets, item.lengths, strict=True))
        if item.storage_index.fqn in self._manifest.dtypes:
            kind = getattr(torch, self._manifest.dtypes[item.storage_index.fqn])
            flat: torch.Tensor = file.get_slice(name)[cut].contiguous().view(-1)
            return flat.view(kind).view(*item.lengths)
        one = file.get_slice(name)
        tensor: torch.Tensor = (file.get_tensor(name) if one.dtype in PACKED else one)[cut]
        return tensor

    def _find_tensor(self, fqn: str) -> tuple[int, str]:
        for at, (prefix, file) in enumerate(self._files):
            if fqn.startswith(prefix) and (name := fqn.removeprefix(prefix)) in file:
                return at, name
        raise self._error_of(TensorNotFoundError, fqn, f"no tensor {fqn!r}")

    def _check_entry(self, at: int, name: str, fqn: str) -> io.BytesIO:
        """Returns the bytes of an object for a planner. The planner unpickles all bytes that it gets, so the object is
        first loaded by torch's restricted unpickler and pickled again."""
        if fqn not in self._manifest.bytes:
            why = f"{fqn!r} is a tensor, but the state to load has no tensor there"
            raise self._error_of(NotSupportedError, fqn, why)
        content = self._files[at][1].get_tensor(name).numpy().tobytes()
        try:
            value = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        except Exception as error:
            # Omits the beginning of torch's message, because it advises users to run the pickle.
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
            why = f"{fqn!r}: torch.load(weights_only=True) refuses it: {reason:.300}"
            raise self._error_of(UntrustedPickleError, fqn, why) from None
        try:
            return _rewrite_object(value)
        except pickle.PicklingError as error:
            raise self._error_of(UntrustedPickleError, fqn, f"{fqn!r}: {error}") from None


# Objects are pickled again because torch's planner unpickles all bytes without restrictions. A restricted unpickler may
# set any attribute of the objects that it creates, and pickle looks up some methods on the instance instead of its
# class (`__reduce_ex__`, the `items` of an OrderedDict). A file could thus replace these methods, so `_Pickler` refuses
# such objects.


class _Pickler(pickle.Pickler):
    # Refuses objects with an attribute that has the name of a method of their class.
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        for name in () if isinstance(value, type) else getattr(value, "__dict__", ()):
            if callable(getattr(kind, name, None)):
                raise pickle.PicklingError(f"its attribute {name!r} hides a method of {kind.__qualname__}")
        return NotImplemented


_module = ModuleType("overwire.pickle")
_module.__dict__.update(vars(pickle), Pickler=_Pickler)


def _rewrite_object(value: Any) -> io.BytesIO:
    """Returns the torch.save bytes of an object. Raises pickle.PicklingError if an attribute hides a method of the
    object's class, before any of its methods is called."""
    out = io.BytesIO()
    torch.save(value, out, pickle_module=_module)
    out.seek(0)
    return out
