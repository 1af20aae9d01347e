"""Reads folders of torch.distributed.checkpoint (FSDP, torchtitan, Megatron-core's torch_dist) without torch.

`.metadata` is a pickle of `Metadata`. It lists the dtype, shape and chunks of each tensor. For
each chunk, and for each object that is not a tensor, it gives a file in the folder, an offset and a length. The
bytes there are the output of one torch.save call. `machine` reads the pickle: its classes become
placeholders with attributes, and nothing is imported or called.

Before the first tensor is read, the reader checks that the chunks of a tensor contain each element exactly once, that
entries do not share bytes, and that the stored objects match `.metadata`.

Source: torch.distributed.checkpoint's documentation and public classes, and its files.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._tables import BITS
from ..bundles.allowlist import AllowList
from ..bundles.budget import Budget
from ..bundles.machine import Machine
from ..bundles.torchfiles import StoredTensor, TorchFile, read_item
from ..bundles.unpickling import run_machine
from ..dtypes import CALLED
from ..errors import CorruptError, FormatError, NotFoundError, NotSupportedError, OverwireError, UntrustedPickleError
from ..files import read_file
from ..frameworks.spec import TensorSpec
from .content import Content, Mapped, Stored
from .image import Part, read_parts
from .joined import Chunk, Files, Joined, PackedRun, Run, check_cover, open_files
from .links import may_follow

#: The name of the file that describes the checkpoint, and the name ending of the others.
METADATA, ENDING = ".metadata", ".distcp"

# Ranks that save independently (use_collectives=False) write files with these names in place of `.metadata`.
_OF_RANK = re.compile(r"__(\d+)\.metadata")
# The limits for the bytes of `.metadata`, the characters of a name, and dimensions.
_MOST, _LONGEST, _DIMS = 1 << 30, 1 << 10, 64
# Advice for checkpoints that overwire cannot read.
_TORCH = "convert it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER OUT.pt`"
_CURE = "Its code was not run. If you trust the folder, " + _TORCH
_DTYPES = {called: code for code, called in CALLED.items()}


class _Name(NamedTuple):
    """The name of a global in the pickle. The global is never imported."""

    module: str
    name: str


class _Object:
    """A placeholder for an object of any class, with its arguments and state."""

    def __init__(self, kind: _Name, args: tuple[Any, ...]) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None


class _Names(AllowList):
    """The allow-list for the pickle. Names and objects of other classes become placeholders."""

    def find(self, module: str, name: str) -> Any:
        if len(module) + len(name) > _LONGEST:
            raise self.budget.refuse(f"it has a name of {len(module) + len(name)} characters")
        if module.split(".")[0] not in ("torch", "numpy", "megatron"):
            with contextlib.suppress(UntrustedPickleError):
                return super().find(module, name)
        return _Name(module, name)

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if function == ("torch", "Size") and len(args) == 1:
            return args[0]
        return _Object(function, args) if isinstance(function, _Name) else super().call(function, args)

    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        return _Object(kind, args) if isinstance(kind, _Name) else super().new(kind, args)

    def set_state(self, made: Any, state: Any) -> None:
        if isinstance(made, _Object):
            made.state = state
        else:
            super().set_state(made, state)


class _Place(NamedTuple):
    """The location of an entry: file, offset and length."""

    path: str
    start: int
    size: int


class _Tensor(NamedTuple):
    """A tensor as `.metadata` lists it. boxes: offsets and sizes of its chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]


def is_checkpoint(folder: str, names: list[str]) -> bool:
    """Returns whether a folder with these file names is a torch.distributed.checkpoint."""
    if any(name.endswith(ENDING) for name in names):
        return True
    path = os.path.join(folder, METADATA)
    if METADATA not in names or not os.path.isfile(path):
        return False
    with contextlib.suppress(OverwireError):
        return b"state_dict_metadata" in read_file(path, _MOST)[:1000]
    return False


def files_of(names: list[str]) -> list[str]:
    """Returns the names that are parts of a checkpoint."""
    return [name for name in names if name.endswith(ENDING) or name == METADATA or _OF_RANK.fullmatch(name)]


@contextlib.contextmanager
def open_checkpoint(folder: str, names: list[str]) -> Iterator[Content]:
    """Opens a checkpoint with these file names.

    Raises FormatError for chunks that overlap or do not cover the shape and for invalid locations, NotFoundError for a
    missing file, CorruptError for a checksum mismatch, NotSupportedError for dtypes that safetensors lacks, and
    UntrustedPickleError for a suspicious pickle.
    """
    with open_files() as files:
        yield _Reader(folder, names, files).read_content()
        files.compare_files()


class _Reader:
    def __init__(self, folder: str, names: list[str], files: Files) -> None:
        self._folder, self._files = folder, files
        self._names = set(names)
        self._images: dict[tuple[str, int], dict[str, Part] | None] = {}
        self._source = os.path.join(folder, self._name_of_description(names))
        data = read_file(self._source, _MOST)
        with files.open_file(self._source):
            pass  # opens the file to note its permissions
        budget = Budget(self._source, len(data), _CURE)

        def refuse_reference(pid: Any) -> Any:
            raise budget.refuse("it refers to an object outside of the pickle")

        self._budget = budget
        self._description = run_machine(Machine(data, _Names(budget), refuse_reference), self._source)

    def _name_of_description(self, names: list[str]) -> str:
        if METADATA in names:
            return METADATA
        of_ranks = sorted(name for name in names if _OF_RANK.fullmatch(name))
        if len(of_ranks) > 1:
            how = f"use_collectives=False; {of_ranks[0]} to {of_ranks[-1]}"
            text = f"the ranks of this torch.distributed.checkpoint saved independently ({how})"
            todo = "load it with dcp.load on the same number of ranks, and save it again with dcp.save"
            raise NotSupportedError(f"overwire: open {self._folder}: {text}: {todo}", source=self._folder)
        if not of_ranks:
            text = "a torch.distributed.checkpoint without its .metadata file, which describes the .distcp files"
            why = "the save did not finish, or the hidden file was not copied: copy or fetch the whole folder again"
            raise NotFoundError(f"overwire: open {self._folder}: {text}: {why}", source=self._folder)
        rank = _OF_RANK.fullmatch(of_ranks[0])[1]  # type: ignore[index]
        others = sorted(name for name in names if name.endswith(ENDING) and not name.startswith(f"__{rank}_"))
        if others:
            text = f"only {of_ranks[0]} is here, but {others[0]} is another rank's: fetch the whole folder"
            raise NotFoundError(f"overwire: open {self._folder}: {text}", source=self._folder)
        return of_ranks[0]

    def _error(
        self, why: str, kind: type[OverwireError] = FormatError, name: str | None = None, chunk: int | None = None
    ) -> OverwireError:
        tensor = f"tensor {name!r}: " if name is not None else ""
        number = f"chunk {chunk}: " if chunk is not None else ""
        text = f"overwire: open {self._source}: {tensor}{number}{why}"
        return kind(text, source=self._source, tensor=name, chunk=chunk)

    def _attributes(self, thing: Any, *classes: str) -> dict[str, Any]:
        """Returns the attributes of an object, which must have one of the classes."""
        if isinstance(thing, _Object) and thing.kind.name in classes:
            if isinstance(thing.state, dict):
                return thing.state
            if isinstance(thing.state, tuple):
                return {"": thing.state}
        raise self._error(f"malformed: expected a {classes[0]}")

    def _numbers(self, value: Any, what: str, name: str, dims: int | None = None) -> tuple[int, ...]:
        """Checks and returns a shape or an offset."""
        is_valid = isinstance(value, (tuple, list)) and len(value) <= _DIMS and dims in (None, len(value))
        if not is_valid or any(type(number) is not int or not 0 <= number < 1 << 62 for number in value):
            raise self._error(f"its {what} is malformed", name=name)
        return tuple(value)

    def read_content(self) -> Content:
        """Reads everything in the folder except the bytes of tensors, which are read later."""
        meta = self._attributes(self._description, "Metadata", "MCoreMetadata")
        entries, places = meta.get("state_dict_metadata"), meta.get("storage_data")
        if type(entries) is not dict or type(places) is not dict or any(type(name) is not str for name in entries):
            raise self._error("malformed: it lists no entries")
        reshaped = meta.get("mcore_data") or {}
        tensors, others = [], []
        for name, entry in entries.items():
            if isinstance(entry, _Object) and entry.kind.name == "BytesStorageMetadata":
                others.append(name)
                continue
            tensors.append(self._tensor_of(name, entry))
            if isinstance(reshaped, dict) and reshaped.get(name):
                why = "Megatron-core stored it flattened, in an earlier layout: load and save it with Megatron-core"
                raise self._error(why, NotSupportedError, name)
        stored = self._places_of(places)
        used = {os.path.basename(place.path) for place in stored.values()}
        content = Content([], {}, [], self._files.mode)
        for one in tensors:
            content.tensors.append((one.name, self._join(one, stored)))
        for name in others:
            if (place := stored.pop((name, None), None)) is None:
                raise self._error("no location is listed for it", name=name)
            self._add_object(content, name, place)
        for name, offset in stored:  # no writer does this, so `.metadata` may lack a tensor
            why = f"no entry describes its location for offset {None if offset is None else list(offset)}"
            raise self._error(why, name=name)
        unused = sorted(name for name in self._names - used if name.endswith(ENDING))
        content.left.extend(f"{name}: {METADATA} does not list it" for name in unused)
        return content._replace(mode=self._files.mode)

    def _tensor_of(self, name: str, entry: Any) -> _Tensor:
        about = self._attributes(entry, "TensorStorageMetadata")
        shape = self._numbers(about.get("size"), "shape", name)
        state = self._attributes(about.get("properties"), "TensorProperties").get("")
        kind = state[0] if state else None
        if not isinstance(kind, _Name) or kind.module != "torch":
            raise self._error("its dtype is malformed", name=name)
        if kind.name not in _DTYPES:
            raise self._error(f"safetensors has no type {kind.name[:50]}", NotSupportedError, name)
        if type(about.get("chunks")) is not list:
            raise self._error("its chunks are malformed", name=name)
        boxes = []
        for chunk in about["chunks"]:
            box = self._attributes(chunk, "ChunkStorageMetadata")
            offsets = self._numbers(box.get("offsets"), "offset", name, len(shape))
            boxes.append((offsets, self._numbers(box.get("sizes"), "size", name, len(shape))))
        check_cover(shape, boxes, lambda why, number: self._error(why, name=name, chunk=number))
        return _Tensor(name, _DTYPES[kind.name], shape, boxes)

    def _places_of(self, places: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], _Place]:
        """Returns the locations of entries, by name and offset. Raises FormatError if two entries share bytes."""
        stored: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        for index, info in places.items():
            key, about = self._attributes(index, "MetadataIndex"), self._attributes(info, "_StorageInfo")
            name, offset = key.get("fqn"), key.get("offset")
            if type(name) is not str:
                raise self._error("the name of an entry is malformed")
            if offset is not None:
                offset = self._numbers(offset, "offset", name)
            if (name, offset) in stored:
                raise self._error(f"two locations are listed for offset {offset}", name=name)
            stored[name, offset] = self._place_of(name, about)
        by_file: dict[str, list[tuple[int, int, str]]] = {}
        for (name, _), place in stored.items():
            if place.size and self._image_at(place) is None:
                by_file.setdefault(place.path, []).append((place.start, place.size, name))
        for path, spans in by_file.items():
            spans.sort()
            for (low, size, name), (start, _, other) in zip(spans, spans[1:], strict=False):
                if low + size > start:
                    why = f"it shares bytes {start} to {low + size} of {os.path.basename(path)} with {other!r}"
                    raise self._error(why, name=name)
        return stored

    def _place_of(self, name: str, about: dict[str, Any]) -> _Place:
        file, start, size = about.get("relative_path"), about.get("offset"), about.get("length")
        if type(file) is not str or not file or "/" in file or "\0" in file or file in (".", ".."):
            raise self._error(f"{file!r:.100} is not the name of a file in the folder", name=name)
        if type(start) is not int or type(size) is not int or start < 0 or size < 0:
            raise self._error(f"its offset or length in {file} is malformed", name=name)
        if about.get("transform_descriptors"):
            kind = f"{about['transform_descriptors']!r:.100}"
            raise self._error(f"it is stored through the extension {kind}: {_TORCH}", NotSupportedError, name)
        path = os.path.join(self._folder, file)
        if file not in self._names:
            why = f"it is missing, and {self._source} lists {name!r} in it: fetch the folder again"
            raise NotFoundError(f"overwire: open {path}: {why}", source=path, tensor=name)
        if not may_follow(self._folder, path):
            raise self._error(f"{file} is a link that leads out of the folder", name=name)
        whole = self._files.size_of(path)
        if start + size > whole:
            why = f"truncated, {name!r} is at bytes {start} to {start + size} and the file has {whole}"
            text = f"overwire: open {path}: {why}: copy or fetch it again"
            raise CorruptError(text, source=path, tensor=name, offset=start)
        return _Place(path, start, size)

    def _image_at(self, place: _Place) -> dict[str, Part] | None:
        """Returns the tensors of a safetensors file at a location, or None if torch.save wrote the bytes."""
        key = place.path, place.start
        if key not in self._images:
            head = bytearray(min(9, self._files.size_of(place.path) - place.start))
            self._files.fill_block(place.path, memoryview(head), place.start)
            self._images[key] = read_parts(self._files, *key) if head[8:] == b"{" and head[:2] != b"PK" else None
        return self._images[key]

    def _join(self, one: _Tensor, stored: dict[tuple[str, tuple[int, ...] | None], _Place]) -> Stored:
        """Joins a tensor's chunks. Raises FormatError for a chunk that does not match `.metadata`."""
        chunks = []
        for number, (offsets, sizes) in enumerate(one.boxes):
            if 0 in sizes:
                continue
            if (place := stored.pop((one.name, offsets), None)) is None:
                raise self._error(f"no location is listed for chunk {list(offsets)}", name=one.name, chunk=number)
            chunks.append(Chunk(offsets, sizes, self._run_of(one, number, place)))
        for offsets, _ in one.boxes:  # an empty chunk may have the offset of another chunk
            stored.pop((one.name, offsets), None)
        return _join_chunks(one.name, one.dtype, one.shape, chunks)

    def _run_of(self, one: _Tensor, number: int, place: _Place) -> Run:
        offsets, sizes = one.boxes[number]

        def error_at(why: str, kind: type[OverwireError] = FormatError) -> OverwireError:
            where = f"at byte {place.start} of {os.path.basename(place.path)}"
            error = self._error(f"{why} {where}", kind, one.name, number)
            error.source, error.offset = place.path, place.start
            return error

        if (parts := self._image_at(place)) is not None:
            part = parts.get(one.name)
            if part is None or (part.dtype, part.shape) != (one.dtype, sizes) or part.offsets != offsets:
                raise error_at("the safetensors file has another chunk, or none,")
            return part.run
        item = self._read_item(place, one.name, number)
        if not isinstance(item, StoredTensor):
            raise error_at("there is an object that is not a tensor")
        if item.dtype != one.dtype or item.shape != sizes:
            raise error_at(f"there is a tensor of {item.dtype} {list(item.shape)} instead of {one.dtype} {list(sizes)}")
        return _run_of_item(self._files, place.path, item)

    def _read_item(self, place: _Place, name: str, number: int | None = None) -> StoredTensor | TorchFile:
        try:
            with self._files.open_file(place.path) as file:
                return read_item(place.path, file, (place.start, place.start + place.size), name)
        except OverwireError as error:
            error.tensor, error.chunk, error.offset = name, number, place.start
            chunk = f"chunk {number} of " if number is not None else ""
            error.args = (f"{error} ({chunk}{name!r}, at byte {place.start})",)
            raise

    def _add_object(self, content: Content, name: str, place: _Place) -> None:
        """Adds an object's tensors and plain values, and a line about each of its other parts."""
        head = bytearray(min(4, place.size))
        self._files.fill_block(place.path, memoryview(head), place.start)
        if head != b"PK\3\4":
            content.left.append(f"{name}: {place.size} bytes that torch.save did not write")
            return
        item = self._read_item(place, name)
        if isinstance(item, StoredTensor):
            chunk = Chunk((0,) * len(item.shape), item.shape, _run_of_item(self._files, place.path, item))
            content.tensors.append((name, _join_chunks(name, item.dtype, item.shape, [chunk])))
            return
        content.tensors.extend((path, Mapped(memory)) for path, memory in item.tensors)
        content.values.update(item.values)
        content.left.extend(item.left)


def _join_chunks(name: str, dtype: str, shape: tuple[int, ...], chunks: list[Chunk]) -> Joined:
    spec = TensorSpec(dtype=CALLED[dtype], shape=shape, data_ptr=0, data_len=0)
    return Joined(name, dtype, tuple(spec.shape), chunks, shape)


def _run_of_item(files: Files, path: str, item: StoredTensor) -> Run:
    """Returns the bytes of a saved tensor. Raises FormatError if fewer elements are stored."""
    one = BITS[item.dtype] // 8 or 1
    size = math.prod(item.shape) * one
    start, end = item.storage
    if size > end - start:  # the tensor has strides of 0, which a checkpoint's writer never saves
        text = f"overwire: open {path}: a tensor of {size} bytes has only {end - start} bytes of storage at {start}"
        raise FormatError(text, source=path, offset=start)
    storage = Run(files, path, start, end - start, item.checksum)
    dense, stride = True, one
    for dim, own in zip(reversed(item.shape), reversed(item.strides), strict=True):
        dense = dense and (dim < 2 or own == stride)
        stride *= dim
    if dense and (item.start, item.start + size) == item.storage:
        return storage
    return PackedRun(storage, item.start, item.shape, item.strides, one)
