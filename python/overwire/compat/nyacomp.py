"""nyacomp's four verbs under their own names and defaults.

    import overwire.compat.nyacomp as nyacomp

Differences that are meant: **pickles are trusted, as nyacomp trusts them: load
only files that you made**; `compress` leaves the caller's model as it is;
nothing is printed; nothing is preloaded unless PRELOAD_PATH is set. Files are
overwire's own; bundles written by nyacomp itself are refused by name.
"""

from __future__ import annotations

import os
from typing import Any, Union

import overwire

__all__ = ["compress", "compress_pickle", "load_compressed", "load_compressed_pickle"]

_PathLike = Union[str, "os.PathLike[str]"]
_DEFAULT = "./boneless_model.pth"


def compress(model: Any, path: _PathLike = _DEFAULT) -> float:
    """Saves a module, a pipeline or a state dict; returns stored / original."""
    return overwire.compress(model, path)


def compress_pickle(obj: Any, path: _PathLike = _DEFAULT, algo: int = 0) -> float:
    """Saves any object; returns stored / original. `algo` (0, 1 or 2) chose one
    of nvCOMP's settings; all mean the same here."""
    if algo not in (0, 1, 2):
        raise overwire.ArgumentError(f"overwire: algo: expected 0, 1 or 2, got {algo!r}")
    return overwire.compress_pickle(obj, path)


def load_compressed(path: _PathLike = _DEFAULT) -> Any:
    """Loads what `compress` saved, trusting it."""
    return overwire.load_compressed(path, trust=True)


def load_compressed_pickle(path: _PathLike = _DEFAULT) -> Any:
    """Loads what `compress_pickle` saved, trusting it."""
    return overwire.load_compressed_pickle(path, trust=True)
