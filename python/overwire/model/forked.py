"""Plain files in children of fork, which cannot use the engine: what
`safe_open` and `load_file` read there goes through the package safetensors.

Workers of a DataLoader are such children, on Linux by default up to Python 3.13.
Compressed files, folders, URIs and GPUs need the engine: ForkedError, as for
every other verb.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .. import errors
from ..dtypes import nbytes
from ..errors import FormatError, NotSupportedError, error_of_system
from ..frameworks.frame import Frame
from ..paths import raise_unless_absent
from ..progress import Watcher
from .indexing import plan
from .opened import Model
from .sources import resolve
from .storage import storage

# What reading a folder, a pipe or a socket says, which its own reader refuses.
_SPECIAL = (errno.EISDIR, errno.ESPIPE, errno.ENXIO)

# The longest header that the format allows.
_HEADER = 100_000_000


def original(name: str) -> Any:
    """A name of the package safetensors, as it was before `patch_safetensors`.
    ForkedError where the package is not installed."""
    try:
        import safetensors
    except ImportError:
        raise errors.forked() from None
    function = getattr(safetensors, name)
    patching = sys.modules.get("overwire.compat.safetensors.patching")
    if patching is not None:
        function = patching.behind(function)
    if getattr(function, "__module__", "").startswith("overwire"):
        raise errors.forked()  # ours goes by that name
    return function


def refuse_compressed(source: Any) -> None:
    """ForkedError if a path, an open file or a file's bytes are a container of
    overwire's. What is no safetensors file at all is left to its reader."""
    if is_compressed(source):
        raise errors.forked()


def is_compressed(source: Any) -> bool | None:
    """Whether a path of a local file, an open file or a file's bytes are a container
    of overwire's; None for what is no safetensors file, or not there. Reads the header only,
    without the engine. Raises where the disk fails: a container that was not seen would be
    taken for a plain file, and its stored bytes for tensors."""
    try:
        if isinstance(source, (bytes, bytearray, memoryview)):
            view = memoryview(source)
            header = bytes(view[8 : 8 + int.from_bytes(view[:8], "little")])
        elif hasattr(source, "fileno"):
            header = _read_header(source.fileno())
        else:
            number = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                header = _read_header(number)
            finally:
                os.close(number)
        if not header.startswith(b"{"):
            return None
        may_be = b'"overwire"' in header or b"\\u00" in header  # letters may be spelled by their numbers
        return may_be and "overwire" in json.loads(header).get("__metadata__", ())
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return None
    except OSError as error:
        if error.errno not in _SPECIAL:
            raise_unless_absent(error, str(source))
        return None


def _read_header(number: int) -> bytes:
    size = int.from_bytes(_read_all(number, 8, 0), "little")
    return _read_all(number, min(_HEADER, size), 8)


def _read_all(number: int, size: int, at: int) -> bytes:
    # A read may give less than it was asked for: a container would be no JSON.
    parts = []
    while size and (part := os.pread(number, size, at)):
        parts.append(part)
        size, at = size - len(part), at + len(part)
    return b"".join(parts)


class ForkedModel(Model):
    """A model of plain local files, for what `safe_open` and `load_file` do with
    one: its table, and tensors one by one. Each is the caller's own.

    Raises ForkedError for what needs the engine or where the package safetensors
    is not installed, and what opening the files raises, as overwire's classes.
    """

    def __init__(
        self,
        source: Any,
        device: str = "cpu",
        keys: Iterable[str] | None = None,
        filter: Callable[[str], bool] | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        if hasattr(source, "shared_model") or device != "cpu":
            raise errors.forked()
        self.device = self.lands = device
        self.uris, self._keep = resolve(source)
        if any(not os.path.isfile(uri) and os.path.exists(uri) or "://" in uri for uri in self.uris):
            raise errors.forked()
        storage(storage_options, self.uris)  # refused for a local path
        for uri in self.uris:
            refuse_compressed(uri)
        self.table = []
        self._files: dict[tuple[int, str], Any] = {}
        for at in range(len(self.uris)):
            file = self._file_of(at, "np")
            order = file.offset_keys() if hasattr(file, "offset_keys") else file.keys()
            for name in order:
                about = file.get_slice(name)
                shape = tuple(about.get_shape())
                size = nbytes(about.get_dtype(), shape)
                self.table.append((name, about.get_dtype(), shape, size, size, at, -1))
        self._refuse_twins()
        self.chosen = self.choose(keys, filter)

    def _file_of(self, at: int, framework: str) -> Any:
        file = self._files.get((at, framework))
        if file is None:
            reader = original("safe_open")
            try:
                file = reader(self.uris[at], framework)
            except OSError as error:
                raise error_of_system(error, "open", self.uris[at]) from error
            except Exception as error:
                raise FormatError(f"overwire: open {self.uris[at]}: {error}", source=self.uris[at]) from error
            if "overwire" in (file.metadata() or {}):  # it has taken the place of the one that was looked at
                raise errors.forked()
            self._files[at, framework] = file
        return file

    def info(self) -> list[dict[str, Any]]:
        return [{"uri": uri, "metadata": self._file_of(at, "np").metadata()} for at, uri in enumerate(self.uris)]

    def read_alone(self, at: int, frame: Frame, index: Any = None) -> Any:
        """One tensor, or `tensor[index]` of it."""
        row = self.row(at)
        framework = {"torch": "pt", "numpy": "np"}.get(frame.name)
        if framework is None:
            raise errors.forked()
        try:
            tensor = self._file_of(row.source, framework).get_tensor(row.name)
        except Exception as error:
            raise NotSupportedError(
                f"overwire: read {row.name!r} of {self.uris[row.source]}: {error}", tensor=row.name
            ) from error
        if index is not None:
            cut = plan(index, row.shape, dims=0).cut
            tensor = frame.index(tensor, cut, row.dtype) if cut else tensor
        # Its memory is the whole file's.
        return tensor.clone() if framework == "pt" else tensor.copy()

    def load(self, chosen: list[int] | None, frame: Frame, wanted: Any, watcher: Watcher | None) -> dict[str, Any]:
        tensors = {}
        for at in range(len(self.table)) if chosen is None else chosen:
            row = self.row(at)
            tensor = self.read_alone(at, frame)
            tensors[row.name] = tensor if wanted is None else frame.cast(tensor, row.dtype, wanted)
        return tensors
