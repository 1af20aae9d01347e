"""overwire for machines without the engine: macOS, Windows, musl, PyPy and others. In the platform-independent
wheel this file is overwire/__init__.py.

The module reads plain and compressed files of every version of the format, and needs only numpy. It has `load_file`,
`safe_open`, `inspect`, and `decompress`, which writes plain safetensors files. Other names of overwire need the
engine and raise ImportError.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from overwire.errors import (
    ArgumentError,
    CorruptError,
    FormatError,
    MissingPackageError,
    NotFoundError,
    NotSupportedError,
    OverwireError,
    TensorNotFoundError,
)
from overwire.portable.facts import NAMES, __version__
from overwire.portable.files import Report, decompress, inspect
from overwire.portable.read import load_file, safe_open

__all__ = [
    "ArgumentError", "CorruptError", "FormatError", "MissingPackageError", "NotFoundError", "NotSupportedError",
    "OverwireError", "Report", "TensorNotFoundError", "__version__", "decompress", "inspect", "load_file", "safe_open",
]  # fmt: skip


def _needs_engine(name: str) -> str:
    need = f"{name} needs the engine, which is available for Linux with glibc on x86-64 and aarch64"
    return f"overwire: {need}: this installation of {__version__} only has {', '.join(__all__[-4:])}"


def __getattr__(name: str) -> Any:
    if name in NAMES:
        raise ImportError(_needs_engine(name))
    raise AttributeError(f"module 'overwire' has no attribute {name!r}")


class _Missing(MetaPathFinder):
    # The last finder of sys.meta_path. It raises a clear error for modules of the full package.

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "overwire":
            raise ModuleNotFoundError(_needs_engine(name), name=name)
        return None


if __name__ == "overwire":
    sys.meta_path.append(_Missing())
