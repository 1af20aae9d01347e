"""Opens files for a load by slices, possibly while an engine builds its model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..._compat_api import start_thread
from .copies import elements

#: A loader gets tensors of at most this many elements with their data, because it combines several of them in one
#: parameter: scales, and shapes of packed matrices.
SMALL = 2


class Sheet:
    """An open file and its table. rows: name, dtype and shape of each tensor. digest: a digest of the rows."""

    def __init__(self, file: Any) -> None:
        from ..._compat_api import table_of

        self.file = file
        self.rows = table_of(file)
        self.digest = hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()

    def small_positions(self) -> list[int]:
        """Returns the positions of the tensors with at most `SMALL` elements."""
        return [at for at, row in enumerate(self.rows) if elements(row[2]) <= SMALL]


class Opening:
    """Opens a source on another thread, and prepares the device for a load.

    Errors are ignored, because opening the source again raises them.
    """

    def __init__(
        self, find: Callable[[], tuple[Any, str | None] | None], device: str, chosen: Mapping[str, Any]
    ) -> None:
        """find: returns the source to open and its index.json, or None to open nothing. chosen: see `check_options`."""
        self._find, self._device, self._chosen = find, device, chosen
        self._found: tuple[Any, str | None] | None = None
        self._sheet: Sheet | None = None
        self._absent: list[tuple[str, str]] = []
        self._thread = threading.Thread(target=self._run_opening, name="overwire opening", daemon=True)
        start_thread(self._thread.start)

    def _run_opening(self) -> None:
        import overwire

        from .. import missing_names

        try:
            result = self._find()
            if result is None:
                return
            options: Any = {key: self._chosen.get(key) for key in ("storage_options", "host")}
            sheet = Sheet(overwire.safe_open(result[0], framework="pt", device=self._device, **options))
            self._found, self._sheet = result, sheet  # after an error, `close` closes the file
            self._absent = missing_names(result[1], result[0], {row[0] for row in sheet.rows})
        except Exception:
            self._found = None

    def take(self, where: Any, index: str | None, device: str) -> tuple[Sheet, list[tuple[str, str]]] | None:
        """Returns the open file and its `missing_names`. The file then belongs to the caller. Returns None if another
        source was opened, or if the file was already taken."""
        self._thread.join()
        sheet, self._sheet = self._sheet, None
        if sheet is None:
            return None
        if self._found != (where, index) or self._device != device:
            sheet.file.close()
            return None
        return sheet, self._absent

    def close(self) -> None:
        """Closes a file that was not taken."""
        self._thread.join()
        sheet, self._sheet = self._sheet, None
        if sheet is not None:
            sheet.file.close()
