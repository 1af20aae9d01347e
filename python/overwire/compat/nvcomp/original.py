"""nvCOMP itself, where it is installed: asked for what only it decodes.

It is never imported before that, and never a dependency.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from ...errors import NotSupportedError

__all__ = ["ALGORITHMS", "algorithm_of", "backend", "check_stream", "codec"]

#: What nvCOMP alone encodes and decodes, and the format numbers of native streams.
ALGORITHMS = {"ANS": 2, "Bitcomp": 5}

_WHEELS = ("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12")
_OLDEST, _NEWEST = 5, 6  # major versions whose API this module knows
_MAGICS = {b"\x26\x13\x91\x52": 5, b"\x27\x13\x91\x52": 6}

_impl: Any = None


def algorithm_of(header: bytes) -> str | None:
    """Which of these a native stream is."""
    if len(header) < 64 or header[:4] not in _MAGICS:
        return None
    return next((name for name, number in ALGORITHMS.items() if number == header[6]), None)


def check_stream(header: bytes, version: str) -> None:
    """Raises NotSupportedError where a native stream is that of another major
    version than `version`: ANS and Bitcomp of one are not those of the next."""
    written = _MAGICS.get(header[:4])
    if written is not None and written != int(version.split(".")[0]):
        raise NotSupportedError(
            f"overwire: nvcomp: the stream was written by nvCOMP {written}, and nvCOMP {version} is installed, "
            "which does not read it"
        )


def _installed() -> metadata.Distribution | None:
    """The wheel of torch's CUDA version, where torch is imported, else the newest."""
    torch = sys.modules.get("torch")
    cuda = str(getattr(getattr(torch, "version", None), "cuda", None) or "").split(".")[0]
    for wheel in sorted(_WHEELS, key=lambda name: not name.endswith("cu" + cuda)):
        try:
            return metadata.distribution(wheel)
        except metadata.PackageNotFoundError:
            continue
    return None


def _unfit(version: str) -> str | None:
    """What is wrong with a version of nvCOMP."""
    major = int(version.split(".")[0])
    if major < _OLDEST:
        return f"nvCOMP {version} is too old: {_OLDEST} or later is asked"
    if major > _NEWEST:
        return f"nvCOMP {version} is too new: {_NEWEST} is the last that is known"
    return None


def backend() -> str:
    """Which nvCOMP is installed, or what is missing."""
    found = _installed()
    if found is None:
        return f"none: needs the wheel {' or '.join(_WHEELS)}"
    wrong = _unfit(found.version)
    return f"none: {wrong}" if wrong else f"nvcomp {found.version}"


def _load(algorithm: str) -> Any:
    global _impl
    if _impl is not None:
        return _impl
    found = _installed()
    if found is None:
        raise NotSupportedError(
            f"overwire: nvcomp: {algorithm} is nvCOMP's own: it needs a GPU and the wheel {' or '.join(_WHEELS)}, "
            "which is not installed"
        )
    wrong = _unfit(found.version)
    if wrong:
        raise NotSupportedError(f"overwire: nvcomp: {algorithm} is nvCOMP's own: {wrong}")
    # One process can load the extension once: where it is nvidia.nvcomp, that is the one.
    try:
        made = getattr(import_module("nvidia.nvcomp"), "nvcomp_impl", None)
    except ImportError:
        made = None
    if made is None:  # by that name goes this package: the extension is loaded by its file
        tag = f"nvcomp_impl.cpython-{sys.version_info[0]}{sys.version_info[1]}-"
        file = next((f for f in found.files or () if f.name.startswith(tag)), None)
        if file is None:
            raise NotSupportedError(f"overwire: nvcomp: nvCOMP {found.version} has no extension for this Python")
        import_module("nvidia.libnvcomp").load_library()
        path = str(found.locate_file(file))
        spec = spec_from_file_location("nvcomp_impl", path, loader=ExtensionFileLoader("nvcomp_impl", path))
        assert spec is not None and spec.loader is not None
        made = module_from_spec(spec)
        spec.loader.exec_module(made)
    _impl = made
    return made


def codec(algorithm: str, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """nvCOMP's own Codec and its module. Raises NotSupportedError without it, and
    what it raises itself, such as without a GPU."""
    impl = _load(algorithm)
    theirs = {}
    for name, value in kwargs.items():
        kind = getattr(impl, type(value).__name__, None)
        theirs[name] = kind(int(value)) if kind is not None and hasattr(value, "value") else value
    return impl.Codec(**theirs), impl
