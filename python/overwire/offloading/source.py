"""Reads the weights of a model that is offloaded with source=.

If a file has a weight as it is needed, its stored chunks are taken unchanged, as a native X16 stream. That is the case
if the file is compressed, and dtype and shape match. Other weights are decoded and, if necessary, cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from .. import _verbs
from ..errors import ModelMismatchError
from ..frameworks.torch import SAVED, _errors_of
from ..jobs import Job
from ..model.opened import WHOLE, Model
from ..verbs.into import ALL, table_of
from ..verbs.open import safe_open
from ..verbs.states import tensors_of_module
from .blocks import Weight
from .stored import FileStream, StoredMemory

if TYPE_CHECKING:
    from ..distributed.meeting import OpenFiles
    from ..model.sourcelike import SourceLike


class Source:
    """A file with a model's weights, under the model's names."""

    def __init__(self, model: torch.nn.Module, source: SourceLike, device: torch.device, is_shared: bool) -> None:
        """is_shared: whether the ranks of a group read the stored chunks together, even those of preloaded files."""
        self._device = device
        self._file = safe_open(source, framework="pt")
        self._tables: list[Any] = [table for part in model.modules() for table in (part._parameters, part._buffers)]
        self._placeholders: list[tuple[Any, str, torch.Tensor]] = []  # the model's meta tensors
        file_names, (state, _) = set(self._file.keys()), tensors_of_module(model, "offload")
        self._streams: Model | None = None
        self._loads: list[Job] = []  # running loads of streams, in their order
        self._rows: dict[str, FileStream] = {}  # by name
        self._names: dict[int, str] = {}
        needs: dict[int, str] = {}
        both = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        for name, tensor in chain(*both):
            if name in file_names:
                self._names[id(tensor)] = name
            elif name in state or tensor.device.type == "meta":
                needs.setdefault(id(tensor), name)
        if missing := [name for key, name in needs.items() if key not in self._names]:
            first = ", ".join(sorted(missing)[:5])
            raise ModelMismatchError(f"overwire: offload: {source} lacks {len(missing)} weights of the model: {first}")
        self._open_streams(is_shared)

    def give_memory(self) -> None:
        """Replaces each meta tensor by a tensor in host memory, under all its names."""
        tensors: dict[int, torch.Tensor] = {}
        for table in self._tables:
            for key, old in table.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in tensors:  # the new tensor takes no memory before it is written
                    new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, old.requires_grad)
                    tensors[id(old)] = new
                    self._names[id(tensors[id(old)])] = self._names[id(old)]
                self._placeholders.append((table, key, old))
                table[key] = tensors[id(old)]

    def take_memory(self) -> None:
        """Undoes `give_memory`."""
        while self._placeholders:
            table, key, old = self._placeholders.pop()
            table[key] = old

    def load_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        self._file.load_into([(self._names[id(t)], None, t.data) for t in tensors if id(t) in self._names])

    def read_block(self, weights: list[Weight]) -> list[torch.Tensor | FileStream]:
        """Returns the stream of each weight that the file has as it is needed, and the values of the others."""
        # Values are on the device, because a GPU encodes them there and then sends only stored bytes to the host.
        contents: list[torch.Tensor | FileStream] = []
        pairs: list[tuple[str, None, torch.Tensor]] = []
        with _errors_of(str(self._device), sum(weight.parameter.nbytes for weight in weights)):
            for weight in weights:
                if stream := self.stream_of(weight):
                    contents.append(stream)
                    continue
                contents.append(values := torch.empty_like(weight.parameter.detach(), device=self._device))
                pairs.append((self._names[id(weight.parameter)], None, values))
        if pairs:
            self._file.load_into(pairs)
        return contents

    def load_streams(self, parts: list[tuple[int, int, int, int]], memory: StoredMemory) -> Callable[[], None] | None:
        """Starts to load parts of streams into memory, after the parts of earlier calls. parts: for each part the
        number of its stream, an address, and its range [lo, hi) of the stream's bytes. Returns a function that waits
        until they are loaded and their checksums are compared, or None if there are none."""
        if not parts:
            return None
        assert self._streams is not None
        device = str(self._device) if memory.is_on_device else "cpu"
        view = self._streams.on(device)
        view.lands = device  # a preload has no streams
        requests = [
            (number, address, *((low, high, 0, WHOLE) if high - low < self._streams.table[number][3] else ALL))
            for number, address, low, high in parts
        ]
        job = view.start(requests, after=self._loads[-1].number if self._loads else 0)
        job.keep_memory(memory)
        self._loads.append(job)
        return partial(self._await_load, job)

    def _await_load(self, job: Job) -> None:
        with job:
            job.wait()
        self._loads.remove(job)

    def cancel_loads(self) -> None:
        """Ends the loads that `load_streams` has started."""
        while self._loads:
            self._loads.pop().abandon()

    def describe_files(self) -> OpenFiles | None:
        """Returns the facts about the files that the ranks of a group compare, or None if no stored chunks are
        taken."""
        from ..distributed.meeting import describe_open_files

        return describe_open_files([self._file._live_model()]) if self._rows else None

    def close_files(self) -> None:
        """Ends all loads and closes the files. A second call does nothing."""
        self.cancel_loads()
        if self._streams is not None:
            self._streams.close()
        self._file.close()

    def stream_of(self, weight: Weight) -> FileStream | None:
        """Returns the stream that the file has for a weight, or None."""
        like = weight.parameter.detach()
        stream = self._rows.get(self._names[id(weight.parameter)])
        if stream is None or not like.is_contiguous() or like.dtype != stream.like.dtype:
            return None
        return stream._replace(like=like) if like.shape == stream.like.shape else None

    def _open_streams(self, is_shared: bool) -> None:
        # Finds the streams of the tensors in compressed files. If the files are preloaded, they are not read again,
        # except in a group, because ranks may have different preloads.
        model = self._file._live_model()
        view, parts = model.on(str(self._device)), model.info()
        if not is_shared:
            view.join()
        if view.joined or not any(part["overwire"] for part in parts):
            return
        _, numbers, _, table, handle = _verbs.streams(model.handle)
        self._streams = Model.held(model.uris[0], table or [], handle, "cpu")
        chunks, types = memoryview(numbers).cast("q"), {name: dtype for dtype, name in SAVED.items()}
        shapes = {name: (types.get(dtype), shape) for name, dtype, shape in table_of(self._file)}
        for number, (name, _, _, nbytes, _, source, _) in enumerate(self._streams.table):
            dtype, shape = shapes[name]
            if dtype is not None:
                like = torch.empty(shape, dtype=dtype, device="meta")
                self._rows[name] = FileStream(number, nbytes, chunks[number], like, parts[source]["uri"], name)
