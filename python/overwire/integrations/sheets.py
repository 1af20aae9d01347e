"""Open files as a slice plan needs them: their tables as columns, and files that are opened
while an engine makes its model."""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy
import torch

from .copies import PACKED, elements

__all__ = ["Opening", "Sheet", "code_of"]

_CODES: dict[torch.dtype, int] = {}


def code_of(dtype: torch.dtype) -> int:
    """A number of a dtype, the same as long as the process lives."""
    return _CODES.setdefault(dtype, len(_CODES))


class Sheet:
    """An open file and its table.

    rows: name, dtype and shape of each tensor. columns: of each tensor the code of its
    dtype (-1 where no block can be taken of it), how many dimensions it has, the sizes of
    the first two, and the elements that the others have; 1 where there is none. digest: of
    the rows.
    """

    def __init__(self, file: Any) -> None:
        from ..plumbing import table_of, torch_dtype

        self.file = file
        self.rows = table_of(file)
        codes = {"": -1}
        for dtype in {row[1] for row in self.rows}:
            found = torch_dtype(dtype)
            codes[dtype] = -1 if found is None or dtype in PACKED else code_of(found)
        flat = array("q", chain.from_iterable(_sizes(codes, *row) for row in self.rows))
        self.columns = numpy.frombuffer(flat, numpy.int64).reshape(-1, 5)
        self.digest = hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()

    def small(self) -> list[int]:
        """The positions of tensors of at most one element."""
        counts = self.columns[:, 2] * self.columns[:, 3] * self.columns[:, 4]
        return [int(at) for at in (counts <= 1).nonzero()[0]]


def _sizes(codes: Mapping[str, int], name: str, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:  # the most
        return (codes[dtype], 2, *shape, 1)
    if not shape:
        return (-1, 0, 1, 1, 1)
    return (codes[dtype], len(shape), shape[0], shape[1] if len(shape) > 1 else 1, elements(shape[2:]))


class Opening:
    """A source that is opened on a thread, with the device made ready for a load.

    Whatever goes wrong there is said where the source is opened again.
    """

    def __init__(self, find: Callable[[], tuple[Any, str | None] | None], device: str, chosen: Mapping[str, Any]) -> None:
        """find: what to open, and its index.json; None for nothing. chosen: see `options`."""
        self._find, self._device, self._chosen = find, device, chosen
        self._found: tuple[Any, str | None] | None = None
        self._sheet: Sheet | None = None
        self._absent: list[tuple[str, str]] = []
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="overwire opening", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        import overwire

        from . import absent

        try:
            found = self._find()
            if found is None:
                return
            reach = self._chosen.get("storage_options")
            sheet = Sheet(overwire.safe_open(found[0], framework="pt", device=self._device, storage_options=reach))
            self._found, self._sheet = found, sheet  # from here on `close` closes it
            self._absent = absent(found[1], found[0], {row[0] for row in sheet.rows})
        except Exception:
            self._found = None

    def take(self, where: Any, index: str | None, device: str) -> tuple[Sheet, list[tuple[str, str]]] | None:
        """What was opened, the caller's from now on, and the names that the index lists and
        the files lack, see `absent`; None if it is not this source, or was taken."""
        self._wait()
        sheet, self._sheet = self._sheet, None
        if sheet is None:
            return None
        if self._found != (where, index) or self._device != device:
            sheet.file.close()
            return None
        return sheet, self._absent

    def close(self) -> None:
        """Closes what was not taken."""
        self._wait()
        sheet, self._sheet = self._sheet, None
        if sheet is not None:
            sheet.file.close()

    def _wait(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
