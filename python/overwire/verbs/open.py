"""safe_open: tensors and slices of open files, one at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast, overload

from .. import _engine
from .._imports import skip_at_exit
from .._tables import BITS
from ..dtypes import PACKED, nbytes
from ..errors import ArgumentError, CorruptError, NotSupportedError
from ..model.indexing import plan
from ..model.opened import WHOLE, Model, check_target, opening, prepare
from ..model.options import (
    ArrayName,
    BytesName,
    DeviceLike,
    FrameworkName,
    OpenOptions,
    TorchName,
    check_options,
    spell_out,
)
from ..model.sources import SourceLike, named
from ..progress import ProgressLike, spell_count, watch
from .ahead import Block, ReadAhead
from .into import fill, parse_targets, target_of

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import TypeVar, Unpack

    from ..model.forked import ForkedModel


if TYPE_CHECKING:
    T = TypeVar("T", default=Any)  # what the framework's tensors are
else:
    from typing import TypeVar

    T = TypeVar("T")


def _states_of_files(paths: Iterable[str]) -> list[tuple[int, ...] | None]:
    # The identities of the files, to notice replaced ones; see `ForkedModel`.
    states: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            state = os.stat(path)
            states.append((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
        except (OSError, ValueError):
            states.append(None)
    return states


class safe_open(_engine.HandleOwner, Generic[T]):
    """Opens plain or compressed safetensors files for reading by name.

    source: as for `load_file`: a path, a folder, an index.json, a list of
        paths, an open file.
    framework: "pt", "np" or "bytes"; None: torch if it is installed, else numpy.
    device: as for `load_file`.
    filename: source, by the name that safetensors gives it.
    options: dtype, mmap, lenient, storage_options, as in `LoadOptions`.

    A context manager; you may also call `close`. `file[name]`, `name in file`, `len(file)`
    and iteration over the sorted names work as in a dict. Tensors belong to the caller and
    stay valid after it. Threads may share one object.

    A program that takes one tensor after the other, in the order of their bytes or of their
    names, need not wait for each: the next ones are loaded meanwhile, on the host at most 256
    MiB of them, on a GPU 2 GiB or an eighth of its free memory. So are slices, where tensors
    whose names differ in numbers alone are cut alike. What is asked for in no order is loaded
    by itself.

    The engine cannot run in a forked child: there, local files, also those opened before
    the fork, are read without it, as `load_file` says.

    Raises what `load_file` raises; ArgumentError once it is closed; in a forked
    child, ForkedError for URIs and GPUs.
    """

    __module__ = "overwire"

    @overload
    def __init__(
        self: safe_open[torch.Tensor],
        source: SourceLike | None = None,
        framework: TorchName | None = None,
        device: DeviceLike = "cpu",
        *,
        filename: SourceLike | None = None,
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[numpy.ndarray[Any, Any]],
        source: SourceLike | None = None,
        framework: ArrayName = ...,
        device: DeviceLike = "cpu",
        *,
        filename: SourceLike | None = None,
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[memoryview],
        source: SourceLike | None = None,
        framework: BytesName = ...,
        device: DeviceLike = "cpu",
        *,
        filename: SourceLike | None = None,
        **options: Unpack[OpenOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: safe_open[Any],
        source: SourceLike | None = None,
        framework: FrameworkName | None = ...,
        device: DeviceLike = "cpu",
        *,
        filename: SourceLike | None = None,
        **options: Unpack[OpenOptions],
    ) -> None: ...

    def __init__(
        self, source: Any = None, framework: Any = None, device: Any = "cpu", *, filename: Any = None, **options: Any
    ) -> None:
        check_options("safe_open", options, OpenOptions)
        source = named("safe_open", source, filename)
        self._frame, where, self._dtype = check_target(source, framework, device, options.get("dtype"))
        self._ahead = ReadAhead(self._frame)
        self._model: Model | None
        if _engine.forked():
            from ..model.forked import ForkedModel

            self._model = ForkedModel(source, where, storage_options=options.get("storage_options"))
        else:
            prepare(where)
            self._model = Model(source, device=where, parts=True, **opening(options))
            self._seen = _states_of_files(self._model.uris)
        self._uri = self._model.uris[0]

    def __enter__(self) -> safe_open[T]:
        self._live_model()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @skip_at_exit
    def __del__(self) -> None:
        if getattr(self, "_model", None) is not None:  # the constructor may have failed
            self.close()

    def __repr__(self) -> str:
        if (model := self._model) is None:
            return "safe_open(closed)"
        more = f" and {len(model.uris) - 1} more" if len(model.uris) > 1 else ""
        count = spell_count(len(model.table), "tensor")
        return f"safe_open({model.uris[0]!r}{more}, {self._frame.name!r}, {model.device!r}): {count}"

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        if (model := self._model) is None:
            return html.block("safe_open", [("closed", "")])
        uris, rows = model.uris, model.table
        tensors = html.tensors(
            "in the order of their bytes", (row[:5] for row in rows), len(rows), folded=len(rows) > 12
        )
        facts = [
            ("framework", self._frame.name),
            ("device", model.device),
            ("in memory", html.size(sum(row[3] for row in rows))),
        ]
        return html.block(
            "safe_open", facts, html.table("Files", ("file",), ((uri,) for uri in uris), len(uris)), tensors
        )

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        model, self._model = self._model, None
        if model is not None:
            self._ahead.close()
            model.close()

    def _live_model(self) -> Model:
        model = self._model
        if model is None:
            raise ArgumentError(f"overwire: {self._uri}: it is closed; close it after all reads", source=self._uri)
        if _engine.forked() and not hasattr(model, "read_alone"):
            from ..model.forked import ForkedModel

            if self._seen != _states_of_files(model.uris):
                raise CorruptError(
                    f"overwire: open {model.uris[0]}: the file was replaced since it was opened", source=model.uris[0]
                )
            model = self._model = ForkedModel(model.uris, model.device, table=model.table)
        return model

    @contextlib.contextmanager
    def _open_model(self) -> Iterator[Model]:
        """The open model, for one read of it, before which another thread may close it."""
        try:
            yield self._live_model()
        except ArgumentError:
            self._live_model()  # its error, if it is closed
            raise

    def keys(self) -> list[str]:
        """The names of all tensors, sorted."""
        self._ahead.by_name = True
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """The names of all tensors, in the order of their bytes in the files."""
        return [row[0] for row in self._live_model().table]

    def __len__(self) -> int:
        return len(self._live_model().table)

    def __contains__(self, name: object) -> bool:
        return name in self._live_model().places

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> T:
        """`get_tensor`."""
        return self.get_tensor(name)

    def metadata(self) -> dict[str, str] | None:
        """The `__metadata__` of the file, without overwire's own entry; None if there is
        none, and empty if it has no entries. Of several files, the entries of all; the first
        file wins.
        """
        metadata: dict[str, str] | None = None
        for source in self._live_model().info():
            entries = source.get("metadata")
            if entries is not None:
                metadata = {**{key: value for key, value in entries.items() if key != "overwire"}, **(metadata or {})}
        return metadata

    def get_tensor(self, name: str) -> T:
        """Loads one tensor. Raises TensorNotFoundError if the files do not have it."""
        with self._open_model() as model:
            return cast("T", self._read_one(model, model.place(name), None, self._dtype))

    def _read_one(self, model: Model, at: int, block: Block | None, wanted: Any) -> Any:
        """A tensor, or a block of it, cast to `wanted`: what was read ahead, or a load of its own."""
        tensor = None if _engine.forked() else self._ahead.take(model, at, block, wanted)
        if tensor is not None:
            return tensor
        name, dtype, *_ = model.table[at]
        if block is None:
            return model.load([at], self._frame, wanted, None)[name]
        (lo0, hi0), (lo1, hi1), shape = block
        rows = [(name, dtype, shape, nbytes(dtype, shape))]
        return model.begin_blocks([(at, (lo0, hi0, lo1, hi1))], rows, self._frame).tensors()[0]

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, T]:
        """Loads several tensors together, in the order of names; None: all of them."""
        with self._open_model() as model:
            return model.load(model.choose(names, None), self._frame, self._dtype, None)

    def load_into(
        self,
        targets: Iterable[tuple[str, Sequence[tuple[int, int]] | None, torch.Tensor]],
        *,
        max_memory: int | str | None = None,
        progress: ProgressLike = None,
    ) -> None:
        """Loads tensors, or blocks of them, into torch tensors that are there already.

        targets: name, block and destination. block: ranges (lo, hi) of the first one or
            two dimensions; None: the whole tensor. Only what holds the block is read,
            of a plain file its bytes, of a compressed one its chunks. destination: of
            the block's shape. It is written to in place if it is contiguous and of the
            file's dtype, on the host or on a GPU; else the block is loaded beside it
            and copied, which casts. Destinations may be on several devices, and
            overlap: the last one then wins. Of a DTensor this rank's part is loaded.
        max_memory: the most bytes of what is loaded beside; what was read ahead is freed.
        progress: as for `load_file`.

        All are loaded in one pass, whatever their order. The caller keeps them and must
        not use them before this returns; afterwards work on torch's current stream may.

        Raises, before anything is read or changed, TensorNotFoundError, ArgumentError
        for blocks and shapes that do not fit, for memory that was freed (`sleep`) and for
        elements that share memory, NotSupportedError for tensors without one memory of
        their own (sparse, nested, FakeTensors, wrappers of other tensors), and
        OutOfMemoryError for max_memory; and what `load_file` raises. If the load itself
        fails, the destinations have old values and new ones.
        """
        model = self._live_model()
        if self._frame.name != "torch":
            raise ArgumentError(f"overwire: load_into: needs framework='pt', got {self._frame.name!r}")
        into = [target_of(model, *target) for target in parse_targets(targets)]
        if max_memory is not None:
            self._ahead.drop()
        targets_here = [target for target in into if target is not None]
        with self._open_model() as model:
            fill(model, self._frame, targets_here, None, max_memory, watch(progress, "load"))

    def get_slice(self, name: str) -> TensorSlice[T]:
        """Returns a `TensorSlice`; nothing is read before it is indexed."""
        self._ahead.by_slice = True
        return TensorSlice(self, name)


spell_out(safe_open.__init__, OpenOptions, owner=safe_open)


class TensorSlice(Generic[T]):
    """A tensor of an open file; indexing it reads the elements.

    Indices are ints, slices with any step, Ellipsis and None, as in numpy: `s[3]`,
    `s[:, ::2]`, `s[..., -1]`, `s[5:2:-1, None]`; lists and masks are not supported.
    It reads the smallest block of dimensions 0 and 1 that has the result. The result
    is a new tensor with only its own bytes.
    """

    __module__ = "overwire"

    def __init__(self, file: safe_open[T], name: str) -> None:
        self._file = file
        self._name = name
        model = file._live_model()
        self._at = model.place(name)
        self._row = model.row(self._at)

    def get_shape(self) -> list[int]:
        """The whole tensor's shape, in elements, as the file's header has it."""
        return list(self._row.shape)

    def get_dtype(self) -> str:
        """The dtype's name in the file: "F32", "BF16", "F8_E4M3" ..."""
        return self._row.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """`get_shape` as a tuple."""
        return tuple(self._row.shape)

    @property
    def dtype(self) -> str:
        """`get_dtype`."""
        return self._row.dtype

    def __repr__(self) -> str:
        return f"TensorSlice({self._name!r}, {self._row.dtype}, {self.get_shape()})"

    def __getitem__(self, index: Any) -> T:
        return cast("T", self._read_index(index))

    def _read_index(self, index: Any) -> Any:
        with self._file._open_model() as model:
            return self._read_from(model, index)

    def _read_from(self, model: Model, index: Any) -> Any:
        file, row, frame = self._file, self._row, self._file._frame
        if row.dtype in PACKED:
            return self._read_packed(index)
        if _engine.forked():
            tensor = cast("ForkedModel", model).read_alone(self._at, frame, index)
        else:
            reading = plan(index, row.shape)
            if reading.empty:
                tensor = frame.empty(row.dtype, reading.shape, model.device)
            elif reading.shape == row.shape:
                tensor = file._read_one(model, self._at, None, None)
            else:
                rows, columns = reading.block
                tensor = file._read_one(
                    model, self._at, (rows, (0, WHOLE) if len(row.shape) == 1 else columns, reading.shape), None
                )
            if reading.cut:
                tensor = frame.index(tensor, reading.cut, row.dtype)
        return tensor if file._dtype is None else frame.cast(tensor, row.dtype, file._dtype)

    def _read_packed(self, index: Any) -> Any:
        # Elements share bytes, so the tensor is read whole. Where the framework
        # keeps them packed, the last dimension cannot be cut.
        frame, row = self._file._frame, self._row
        tensor: Any = self._file.get_tensor(self._name)
        reading = plan(index, row.shape, dims=0)
        if tuple(tensor.shape) == row.shape:
            return frame.index(tensor, reading.cut, row.dtype) if reading.cut else tensor
        entries = [entry for entry in reading.cut if entry is not None]
        whole_last = not entries or entries[-1] == slice(0, row.shape[-1], 1)
        if len(tensor.shape) != len(row.shape) or not whole_last:
            raise NotSupportedError(
                f"overwire: {row.dtype} has {8 / BITS[row.dtype]:g} elements a byte: its last "
                "dimension cannot be sliced here; load it, or use framework='np' for F4",
                tensor=self._name,
            )
        cut = plan(index, tuple(tensor.shape), dims=0).cut
        return frame.index(tensor, cut, row.dtype) if cut else tensor
