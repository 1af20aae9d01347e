"""Implements safe_open, which reads individual tensors and slices of open files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast, overload

from .. import _engine
from .._imports import skip_at_exit
from .._tables import BITS
from ..dtypes import PACKED, nbytes
from ..errors import ArgumentError, NotSupportedError
from ..model.indexing import plan
from ..model.opened import Model
from ..model.options import ArrayName, BytesName, DeviceLike, FrameworkName, OpenOptions, TorchName, spell_out
from ..model.sourcelike import SourceLike
from ..progress import ProgressLike, spell_count
from .ahead import ReadAhead
from .into import destination_of, parse_targets
from .loader import Loader
from .starting import open_loader

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import TypeVar, Unpack

    T = TypeVar("T", default=Any)  # the type of the framework's tensors
else:
    from typing import TypeVar

    T = TypeVar("T")


class safe_open(_engine.HandleOwner, Generic[T]):
    """Opens plain or compressed safetensors files for reading by name.

    source: as for `load_file`: a path, a folder, an index.json, a list of paths, an open file.
    framework: "pt", "np" or "bytes". By default torch if it is installed, otherwise numpy.
    device: as for `load_file`.
    filename: an alias of source, for programs written for safetensors.
    options: dtype, mmap, lenient, storage_options, as in `LoadOptions`.

    The object is a context manager. You may also call `close`. `file[name]`, `name in file`, `len(file)` and iteration
    over the sorted names work as in a dict. Tensors belong to the caller and stay valid when the file is closed.
    Threads may share one object.

    If a program requests tensors in the order of their bytes or of their names, the next tensors are loaded in advance:
    on the host up to 256 MiB, on a GPU up to 2 GiB or an eighth of its free memory. This also works for slices, if
    tensors with names that differ only in numbers are sliced in the same way.

    The engine cannot run in a forked child. There, local files are read without the engine, even if they were opened
    before the fork; see `load_file`.

    Raises the errors of `load_file`, and ArgumentError after `close`.
    """

    __module__ = "overwire"

    @overload
    def __init__(
        self: safe_open[torch.Tensor], source: SourceLike | None = None, framework: TorchName | None = None,
        device: DeviceLike = "cpu", *, filename: SourceLike | None = None, **options: Unpack[OpenOptions],
    ) -> None: ...  # fmt: skip

    @overload
    def __init__(
        self: safe_open[numpy.ndarray[Any, Any]], source: SourceLike | None = None, framework: ArrayName = ...,
        device: DeviceLike = "cpu", *, filename: SourceLike | None = None, **options: Unpack[OpenOptions],
    ) -> None: ...  # fmt: skip

    @overload
    def __init__(
        self: safe_open[memoryview], source: SourceLike | None = None, framework: BytesName = ...,
        device: DeviceLike = "cpu", *, filename: SourceLike | None = None, **options: Unpack[OpenOptions],
    ) -> None: ...  # fmt: skip

    @overload
    def __init__(
        self: safe_open[Any], source: SourceLike | None = None, framework: FrameworkName | None = ...,
        device: DeviceLike = "cpu", *, filename: SourceLike | None = None, **options: Unpack[OpenOptions],
    ) -> None: ...  # fmt: skip

    def __init__(
        self, source: Any = None, framework: Any = None, device: Any = "cpu", *, filename: Any = None, **options: Any
    ) -> None:
        loader = open_loader("safe_open", OpenOptions, options, source, device, framework, filename, parts=True)
        self._frame, self._dtype = loader.target.frame, loader.target.dtype
        self._ahead = ReadAhead(self._frame)
        self._uri = loader.model.uris[0]
        self._loader: Loader | None = loader  # set last, because `close` needs the other attributes

    def __enter__(self) -> safe_open[T]:
        self._live_model()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @skip_at_exit
    def __del__(self) -> None:
        if getattr(self, "_loader", None) is not None:  # the constructor may have failed
            self.close()

    def __repr__(self) -> str:
        if (loader := self._loader) is None:
            return "safe_open(closed)"
        model = loader.model
        more = f" and {len(model.uris) - 1} more" if len(model.uris) > 1 else ""
        count = spell_count(len(model.table), "tensor")
        return f"safe_open({model.uris[0]!r}{more}, {self._frame.name!r}, {model.device!r}): {count}"

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        if (loader := self._loader) is None:
            return html.block("safe_open", [("closed", "")])
        uris, rows = loader.model.uris, loader.model.table
        order, columns = "in the order of their bytes", (row[:5] for row in rows)
        tensors = html.tensors(order, columns, len(rows), folded=len(rows) > 12)
        files = html.table("Files", ("file",), ((uri,) for uri in uris), len(uris))
        facts = [("framework", self._frame.name), ("device", loader.model.device)]
        facts.append(("in memory", html.size(sum(row[3] for row in rows))))
        return html.block("safe_open", facts, files, tensors)

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        loader, self._loader = self._loader, None
        if loader is not None:
            self._ahead.close()
            loader.close()

    def _live_loader(self) -> Loader:
        loader = self._loader
        if loader is None:
            raise ArgumentError(f"overwire: {self._uri}: it is closed; close it after all reads", source=self._uri)
        here = loader.in_this_process()
        if here is not loader:
            self._loader = here
        return here

    def _live_model(self) -> Model:
        return self._live_loader().model

    @contextlib.contextmanager
    def _open_loader(self) -> Iterator[Loader]:
        """Yields the loader for one read. If another thread closes this object during the read, the error says so."""
        try:
            yield self._live_loader()
        except ArgumentError:
            self._live_loader()
            raise

    def keys(self) -> list[str]:
        """Returns the names of all tensors, sorted."""
        self._ahead.order.by_name = True
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """Returns the names of all tensors, in the order of their bytes in the files."""
        return [row[0] for row in self._live_model().table]

    def __len__(self) -> int:
        return len(self._live_model().table)

    def __contains__(self, name: object) -> bool:
        return name in self._live_model().places

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> T:
        """Does the same as `get_tensor`."""
        return self.get_tensor(name)

    def metadata(self) -> dict[str, str] | None:
        """Returns the `__metadata__` of the file, without overwire's own entry, or None if the file has none. For
        several files, returns the entries of all files; if several files have a key, the value of the first file."""
        metadata: dict[str, str] | None = None
        for source in self._live_model().info():
            entries = source.get("metadata")
            if entries is not None:
                metadata = {**{key: value for key, value in entries.items() if key != "overwire"}, **(metadata or {})}
        return metadata

    def get_tensor(self, name: str) -> T:
        """Loads one tensor. Raises TensorNotFoundError if the files do not have it."""
        with self._open_loader() as loader:
            return cast("T", loader.read_tensor(loader.model.place(name), self._dtype, self._ahead))

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, T]:
        """Loads several tensors together, in the order of `names`, by default all tensors."""
        with self._open_loader() as loader:
            return loader.model.load(loader.model.choose(names, None), self._frame, self._dtype, None)

    def load_into(
        self,
        targets: Iterable[tuple[str, Sequence[tuple[int, int]] | None, torch.Tensor]],
        *,
        max_memory: int | str | None = None,
        progress: ProgressLike = None,
    ) -> None:
        """Loads tensors, or blocks of them, into existing torch tensors.

        targets: triples of name, block and destination. block: ranges (lo, hi) of the first one or two dimensions;
            None: the whole tensor. Of a plain file, only the block's bytes are read; of a compressed file, only the
            block's chunks. destination: a tensor with the block's shape. If it is contiguous and has the file's dtype,
            it is filled in place, on the host or on a GPU. Otherwise the block is loaded separately and copied, with a
            cast. Destinations may be on several devices. If they overlap, the last one wins. For a DTensor, this rank's
            part is loaded.
        max_memory: the most bytes of blocks that are loaded separately. Tensors that were read in advance are freed.
        progress: as for `load_file`.

        All blocks are loaded in one pass. Do not use the destinations before the call returns. Afterwards, work on
        torch's current stream may use them.

        Raises, before it reads or changes anything: TensorNotFoundError; ArgumentError for blocks and shapes that do
        not fit, for memory that was freed (`sleep`) and for elements that share memory; NotSupportedError for tensors
        without memory of their own (sparse, nested, FakeTensors, wrappers of other tensors); OutOfMemoryError for
        max_memory. Also raises the errors of `load_file`. If the load itself fails, the destinations have a mixture of
        old and new values.
        """
        model = self._live_model()
        if self._frame.name != "torch":
            raise ArgumentError(f"overwire: load_into: needs framework='pt', got {self._frame.name!r}")
        into = [destination_of(model, *target) for target in parse_targets(targets)]
        if max_memory is not None:
            self._ahead.drop_blocks()
        with self._open_loader() as loader:
            loader.load_into(lambda *_: [one for one in into if one is not None], False, max_memory, progress)

    def get_slice(self, name: str) -> TensorSlice[T]:
        """Returns a `TensorSlice`, which reads when it is indexed."""
        self._ahead.by_slice = True
        return TensorSlice(self, name)


spell_out(safe_open.__init__, OpenOptions, owner=safe_open)


class TensorSlice(Generic[T]):
    """A tensor of an open file. Indexing it reads the indexed elements.

    Indices are ints, slices with any step, Ellipsis and None, as in numpy: `s[3]`, `s[:, ::2]`, `s[..., -1]`,
    `s[5:2:-1, None]`. Lists and masks are not supported. Indexing reads the smallest block of dimensions 0 and 1 that
    contains the result. The result is a new tensor with only its own bytes.
    """

    __module__ = "overwire"

    def __init__(self, file: safe_open[T], name: str) -> None:
        self._file = file
        self._name = name
        model = file._live_model()
        self._at = model.place(name)
        self._row = model.row(self._at)

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor in the file, in elements."""
        return list(self._row.shape)

    def get_dtype(self) -> str:
        """Returns the dtype's name in the file: "F32", "BF16", "F8_E4M3" ..."""
        return self._row.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, as a tuple; see `get_shape`."""
        return tuple(self._row.shape)

    @property
    def dtype(self) -> str:
        """The dtype's name; see `get_dtype`."""
        return self._row.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole tensor, uncompressed."""
        return nbytes(self._row.dtype, self._row.shape)

    def __repr__(self) -> str:
        return f"TensorSlice({self._name!r}, {self._row.dtype}, {self.get_shape()})"

    def __getitem__(self, index: Any) -> T:
        file, row = self._file, self._row
        with file._open_loader() as loader:
            if row.dtype in PACKED:
                return cast("T", self._read_packed(index))
            tensor: Any = loader.read_index(self._at, index, file._ahead)
            return cast("T", tensor if file._dtype is None else file._frame.cast(tensor, row.dtype, file._dtype))

    def _read_packed(self, index: Any) -> Any:
        # Elements share bytes, so the tensor is read whole. If the framework keeps them packed, the last dimension
        # cannot be cut.
        frame, row = self._file._frame, self._row
        tensor: Any = self._file.get_tensor(self._name)
        reading = plan(index, row.shape, dims=0)
        if tuple(tensor.shape) == row.shape:
            return frame.index(tensor, reading.cut, row.dtype) if reading.cut else tensor
        entries = [entry for entry in reading.cut if entry is not None]
        whole_last = not entries or entries[-1] == slice(0, row.shape[-1], 1)
        if len(tensor.shape) != len(row.shape) or not whole_last:
            text = "its last dimension cannot be sliced here; load it, or use framework='np' for F4"
            packing = f"{row.dtype} has {8 / BITS[row.dtype]:g} elements per byte"
            raise NotSupportedError(f"overwire: {packing}: {text}", tensor=self._name)
        cut = plan(index, tuple(tensor.shape), dims=0).cut
        return frame.index(tensor, cut, row.dtype) if cut else tensor
