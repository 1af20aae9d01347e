"""Calls an installed nvCOMP, through its Python API, for formats that only nvCOMP supports.

nvCOMP is imported when it is first needed, and is not a dependency.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any

from overwire._compat_api import new_lock

from ... import gpu
from ...errors import DeviceError, NotSupportedError, OverwireError
from .arrays import Array, BatchArray

#: Algorithms that only nvCOMP encodes and decodes.
ALGORITHMS = ("ANS", "Bitcomp")

_WHEELS = ("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12")
_OLDEST, _NEWEST = 5, 6  # major versions that this module supports

_impl: Any = None


def _newest_wheel() -> metadata.Distribution | None:
    """Returns the wheel for torch's CUDA version if torch is imported, otherwise the newest wheel."""
    torch = sys.modules.get("torch")
    cuda = str(getattr(getattr(torch, "version", None), "cuda", None) or "").split(".")[0]
    for wheel in sorted(_WHEELS, key=lambda name: not name.endswith("cu" + cuda)):
        try:
            return metadata.distribution(wheel)
        except metadata.PackageNotFoundError:
            continue
    return None


def _why_unfit(version: str) -> str | None:
    """Returns why a version of nvCOMP cannot be used, or None if it can."""
    major = int(version.split(".")[0])
    if major < _OLDEST:
        return f"nvCOMP {version} is too old: expected {_OLDEST} or later"
    if major > _NEWEST:
        return f"nvCOMP {version} is too new: expected {_NEWEST} or earlier"
    return None


def backend() -> str:
    """Returns the name and version of the installed nvCOMP, or what is missing."""
    if (wheel := _newest_wheel()) is None:
        return f"none: needs the wheel {' or '.join(_WHEELS)}"
    wrong = _why_unfit(wheel.version)
    return f"none: {wrong}" if wrong else f"nvcomp {wheel.version}"


def usable() -> bool:
    """Returns whether nvCOMP can be called, because it is installed and there is a GPU."""
    return gpu.count() > 0 and backend().startswith("nvcomp ")


def hinted(error: OverwireError) -> OverwireError:
    """Returns an error with a hint about what nvCOMP needs to read the stream."""
    lacks = backend() if gpu.count() else f"needs a GPU and the wheel {' or '.join(_WHEELS)}"
    text = f"{error}; if nvCOMP wrote this stream, only nvCOMP can read it ({lacks.removeprefix('none: ')})"
    return type(error)(text, chunk=error.chunk, offset=error.offset)


def _load_codec(algorithm: str) -> Any:
    global _impl
    if _impl is not None:
        return _impl
    if (wheel := _newest_wheel()) is None:
        wrong: str | None = f"it needs a GPU and the wheel {' or '.join(_WHEELS)}, which is not installed"
    else:
        wrong = _why_unfit(wheel.version)
    if wheel is None or wrong:
        raise NotSupportedError(f"overwire: nvcomp: {algorithm} is nvCOMP's own: {wrong}")
    # A process can load the extension only once, so this uses the one that is loaded as nvidia.nvcomp, if any.
    try:
        module = getattr(import_module("nvidia.nvcomp"), "nvcomp_impl", None)
    except ImportError:
        module = None
    if module is None:  # overwire may be installed under that name, so the extension is loaded from its file
        tag = f"nvcomp_impl.cpython-{sys.version_info[0]}{sys.version_info[1]}-"
        file = next((f for f in wheel.files or () if f.name.startswith(tag)), None)
        if file is None:
            raise NotSupportedError(f"overwire: nvcomp: nvCOMP {wheel.version} has no extension for this Python")
        import_module("nvidia.libnvcomp").load_library()
        path = str(wheel.locate_file(file))
        spec = spec_from_file_location("nvcomp_impl", path, loader=ExtensionFileLoader("nvcomp_impl", path))
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    _impl = module
    return module


class Original:
    """nvCOMP's own Codec. Threads may share it, because a lock admits one thread at a time.

    algorithm: the name in errors. kwargs: arguments of nvCOMP's Codec. verifies: whether nvCOMP compares checksums.

    Raises NotSupportedError without nvCOMP, and nvCOMP's own errors, for instance without a GPU.
    """

    def __init__(self, algorithm: str, kwargs: dict[str, Any], verifies: bool = False) -> None:
        self.impl = _load_codec(algorithm)
        self._verifies = verifies
        options = {}
        for name, value in kwargs.items():
            kind = getattr(self.impl, type(value).__name__, None)
            options[name] = kind(int(value)) if kind is not None and hasattr(value, "value") else value
        self.codec = self.impl.Codec(**options)
        self._lock = new_lock()

    def to_theirs(self, sources: Sequence[Array], many: bool) -> Any:
        """Converts Arrays to nvCOMP's Arrays on a GPU, the only memory that nvCOMP reads."""
        arrays = [self.impl.as_array(a.cuda() or a) for a in sources]
        return self.impl.as_arrays(arrays) if many else arrays[0]

    def ask_size(self, verb: str, array: Array) -> int:
        """Calls nvCOMP's size method `verb` for one Array."""
        return int(getattr(self.codec, verb)(self.to_theirs([array], False)))

    def run(
        self, verb: str, sources: Sequence[Array], many: bool, *args: Any, outs: Sequence[Any] | None, **configs: Any
    ) -> Any:
        """Encodes or decodes with nvCOMP, and waits for the result, because the copies that it reads are freed on
        return. The resulting Arrays keep nvCOMP's Arrays and its Codec alive."""
        options = {name: value for name, value in configs.items() if value is not None}  # new in nvCOMP 5.2
        with self._lock:
            if outs is not None:
                options["out"] = self.impl.as_arrays(list(outs)) if many else self.impl.as_array(outs[0])
            inputs = self.to_theirs(sources, many)
            results = getattr(self.codec, verb)(inputs, *args, **options)
            if self._verifies and verb == "decode":
                for each in results if many else [results]:
                    each.cpu()  # nvCOMP reports a wrong checksum on the first access
            arrays = [self._take_array(each, results) for each in (results if many else [results])]
        return BatchArray(arrays) if many else arrays[0]

    def _take_array(self, made: Any, batch: Any) -> Array:
        """Wraps one of nvCOMP's Arrays and keeps it alive, because nvCOMP's DLPack capsules and array interfaces do
        not."""
        interface = made.__cuda_array_interface__
        address = int(interface["data"][0] or 0)
        if address == 0:
            return Array(made)
        device = gpu.device_of(address)
        if device < 0:
            raise DeviceError(f"overwire: nvcomp: the result of nvCOMP at {address:#x} is not GPU memory")
        gpu.stream_sync(int(interface.get("stream") or 1), device)
        memory = {**interface, "stream": None}
        return Array(SimpleNamespace(__cuda_array_interface__=memory, keep=(made, batch, self.codec)))
