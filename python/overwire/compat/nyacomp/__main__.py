"""Turns bundles of nyacomp's own into overwire's.

    python -m overwire.compat.nyacomp recompress MODEL NEW

MODEL is what nyacomp's compress or compress_pickle wrote, with its nya/ folder
beside it. nvCOMP's files are read by nyacomp itself, which must then be
installed, with a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import overwire
from overwire.plumbing import regular

from . import bundles, manifests


def load(path: str) -> Any:
    """The object in a bundle: loaded by ourselves, or where we cannot, by nyacomp."""
    try:
        return bundles.load_compressed_pickle(path)
    except overwire.NotSupportedError as refused:
        # Its own loader takes the tensors from PRELOAD_PATH, wherever `path` is.
        meta = manifests.find(path, manifests.META)
        os.environ.update(PRELOAD_PATH=str(meta), NO_PRELOAD="1", NO_HIDE_MODULES="1")
        spec = importlib.util.find_spec("nyacomp")
        if spec is None or "overwire" in (spec.origin or ""):
            raise refused
        import nyacomp  # type: ignore[import-not-found]

        with open(path, "rb", opener=regular) as file:
            module = file.read(2) == b"PK"
        return (nyacomp.load_compressed if module else nyacomp.load_compressed_pickle)(path)


def main(argv: list[str]) -> int:
    if len(argv) != 3 or argv[0] != "recompress":
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    try:
        ratio = bundles.compress_pickle(load(argv[1]), argv[2])
    except overwire.OverwireError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{argv[2]}: {ratio:.3f} of its tensors' bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
