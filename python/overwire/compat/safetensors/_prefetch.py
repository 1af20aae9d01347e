"""Implements the additions of safetensors 0.9 to an open file: header entries, and tensors that are loaded in the
background."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import overwire
from overwire._compat_api import forked, new_lock

from ._errors import SafetensorError, check, reading

CLOSED_WORDS = "prefetch loader closed"
Rows = tuple[int, int]


class Internal:
    """The base of classes that only this package instantiates, with `object.__new__`."""

    __slots__ = ()

    def __new__(cls) -> Any:
        raise TypeError(f"cannot create '{cls.__name__}' instances")


class TensorMeta(Internal):
    """A tensor's entry in the header."""

    __slots__ = ("_entry",)

    _entry: tuple[str, list[int], tuple[int, int]]

    @property
    def dtype(self) -> str:
        """The dtype's name in the file: "F32", "BF16" ..."""
        return self._entry[0]

    @property
    def shape(self) -> list[int]:
        """The shape in elements."""
        return list(self._entry[1])

    @property
    def data_offsets(self) -> tuple[int, int]:
        """The begin and end of the tensor's bytes, relative to the first tensor. For a compressed file, the offsets
        count decoded bytes, in the order of `offset_keys`."""
        return self._entry[2]

    def __repr__(self) -> str:
        dtype, shape, offsets = self._entry
        return f'TensorMeta {{ dtype: "{dtype}", shape: {shape}, data_offsets: {offsets} }}'


class PrefetchLoader(Internal):
    """Loads tensors of one file in the background. `safe_open.prefetch` returns it.

    `take` or iteration returns each tensor once, and the caller then owns it. Whole tensors begin to load immediately.
    All planned rows are loaded together when the first of them is requested. Threads may share the loader. The loader
    is a context manager.
    """

    __slots__ = (
        "_arrivals", "_busy", "_due", "_error", "_file", "_lock", "_name", "_names", "_ready", "_rows", "_where"
    )  # fmt: skip

    _due: dict[str, None]  # tensors that were not returned yet

    def _begin_load(
        self, file: overwire.safe_open, source: Any, name: Any, plan: dict[str, Rows | None], where: str
    ) -> None:
        # source: the file, which is opened again. name: the file's name in messages.
        self._file, self._name, self._where = file, name, where
        self._names, self._due = list(plan), dict.fromkeys(plan)
        self._rows = {key: rows for key, rows in plan.items() if rows is not None}
        self._ready: dict[str, Any] = {}
        self._lock, self._busy = new_lock(), False
        self._error: Exception | None = None
        # The stream is needed even if the plan has only rows, because it checks the device and begins to prepare it.
        whole = [key for key, rows in plan.items() if rows is None]
        self._arrivals: Any = overwire.stream(source, where, framework="pt", keys=whole)

    def names(self) -> list[str]:
        """Returns the names of all planned tensors, in file order."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> Any:
        """Waits for one tensor, or for its planned rows, and returns it.

        Raises SafetensorError for a name that is not in the plan or was already returned, and if the loader is closed.
        Raises ForkedError in a forked child.
        """
        check("name", name, str)
        with self._one_at_a_time():
            if name not in self._due:
                if name not in self._names:
                    raise SafetensorError(f"tensor {name} is not in the prefetch plan")
                raise SafetensorError(f"{name}: tensor already delivered: take and iteration return each tensor once")
            while name not in self._ready:
                self._land_next(rows=name in self._rows)
            return self._give_tensor(name)

    def __iter__(self) -> TensorStream:
        stream: TensorStream = object.__new__(TensorStream)
        stream._loader = self
        return stream

    def _take_next(self) -> tuple[str, Any]:
        # Returns a tensor that has landed, or waits for the next one. Raises StopIteration after the last.
        with self._one_at_a_time():
            if not self._due:
                raise StopIteration
            while not self._ready:
                self._land_next(rows=len(self._due) == len(self._rows))
            name = next(iter(self._ready))
            return name, self._give_tensor(name)

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        # The lock is reentrant, so a signal handler can acquire it again. `_busy` detects this case, which is refused.
        if forked():
            raise overwire.ForkedError(f"{self._name}: it is loaded by the process that this one was forked from")
        with self._lock:
            if self._busy:
                raise SafetensorError("a signal handler used the prefetch loader during another call to the loader")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _give_tensor(self, name: str) -> Any:
        del self._due[name]
        return self._ready.pop(name)

    def _land_next(self, rows: bool) -> None:
        # Waits for the next whole tensor, or loads all rows.
        if self._error is not None:
            raise self._error
        try:
            with reading(self._name, "Error while reading"):
                if rows:
                    self._ready.update(self._load_rows())
                else:
                    name, tensor = next(self._arrivals, ("", None))
                    if not name and tensor is None:
                        raise SafetensorError(CLOSED_WORDS)
                    self._ready[name] = tensor
        except overwire.CancelledError as error:
            self._error = SafetensorError(CLOSED_WORDS)
            raise self._error from error
        except Exception as error:
            self._error = error
            raise

    def _load_rows(self) -> dict[str, Any]:
        import torch

        from overwire._compat_api import torch_dtype, torch_shape

        tensors, targets = {}, []
        for name, (first, end) in self._rows.items():
            whole = overwire.TensorSlice(self._file, name)
            dtype = whole.get_dtype()
            shape = torch_shape(dtype, (end - first, *whole.shape[1:]))
            tensors[name] = torch.empty(shape, dtype=torch_dtype(dtype), device=self._where)
            targets.append((name, [(first, end)], tensors[name]))
        self._file.load_into(targets)
        self._rows = {}
        return tensors

    def close(self) -> None:
        """Ends the load and frees the tensors that were not returned. Does nothing in a forked child, because the
        parent owns the load."""
        if forked():
            return
        self._arrivals.close()  # wakes a thread that waits for the next tensor
        with self._lock:
            self._error, self._ready = SafetensorError(CLOSED_WORDS), {}

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, _exc_type: Any, _exc_value: Any, _traceback: Any) -> None:
        self.close()


class TensorStream(Internal):
    """Iterates over a `PrefetchLoader`. Yields (name, tensor) in the order of arrival."""

    __slots__ = ("_loader",)

    _loader: PrefetchLoader

    def __iter__(self) -> TensorStream:
        return self

    def __next__(self) -> tuple[str, Any]:
        return self._loader._take_next()


def rows_of_plan(file: overwire.safe_open, plan: Any) -> dict[str, Rows | None]:
    """Returns the tensors of a plan in file order, each with the begin and end of its rows, or None for all rows.

    Raises SafetensorError for an invalid plan, before anything is read.
    """
    if plan is not None:
        check("plan", plan, dict)
        for name in plan:
            if not isinstance(name, str):
                raise SafetensorError("prefetch plan keys must be tensor names")
            if name not in file:
                raise SafetensorError(f"File does not contain tensor {name}")
    from overwire._compat_api import torch_dtype  # imports torch

    parts: dict[str, Rows | None] = {}
    for name in file.offset_keys():
        if plan is None or name in plan:
            whole = overwire.TensorSlice(file, name)
            if torch_dtype(whole.get_dtype()) is None:
                raise SafetensorError(f"prefetch cannot load {whole.get_dtype()}: torch has no matching dtype")
            parts[name] = None if plan is None else _bounds_of_rows(name, plan[name], whole)
    if plan is not None and not parts:
        raise SafetensorError("prefetch plan selects no tensors")
    return parts


def _bounds_of_rows(name: str, rows: Any, whole: overwire.TensorSlice) -> Rows | None:
    if rows is None:
        return None
    shape = whole.get_shape()
    if not isinstance(rows, slice):
        raise SafetensorError(f"prefetch plan values must be None or a slice, got {type(rows)} for {name}")
    if not shape:
        raise SafetensorError(f"cannot slice rows of the 0-d tensor {name}")
    try:
        bounds = [None if bound is None else operator.index(bound) for bound in (rows.start, rows.stop)]
        step = 1 if rows.step is None else operator.index(rows.step)
    except TypeError:
        raise SafetensorError(f"prefetch plan slice bounds for {name} must be integers or None") from None
    if whole.get_dtype() == "F4" and len(shape) == 1:
        raise SafetensorError(f"cannot slice the only dimension of {name}: two elements of F4 share a byte")
    high = shape[0]
    for word, bound in zip(("start", "stop"), bounds, strict=True):
        if bound is not None and not -high <= bound <= high:
            raise SafetensorError(f"prefetch plan slice {word} {bound} for {name} is out of range for {high} rows")
    if step != 1:
        raise SafetensorError(f"prefetch plan slices must have step 1, got {step} for {name}")
    first, end, _ = slice(*bounds).indices(high)
    return (first, max(first, end))
