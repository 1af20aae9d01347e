"""Converts nyacomp's own bundles to overwire's.

    python -m overwire.compat.nyacomp recompress MODEL NEW

MODEL is a file that nyacomp's compress or compress_pickle wrote, with its nya/ folder in the same folder.
"""

from __future__ import annotations

import sys

import overwire

from . import bundles


def main(argv: list[str]) -> int:
    if len(argv) != 3 or argv[0] != "recompress":
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    try:
        ratio = bundles.compress_pickle(bundles.load_compressed_pickle(argv[1]), argv[2])
    except overwire.OverwireError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{argv[2]}: {ratio:.3f} of its tensors' bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
