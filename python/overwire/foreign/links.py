"""Which links in a folder are followed: a folder from a stranger must not bring in other files of this machine."""

from __future__ import annotations

import os


def may_follow(root: str, path: str) -> bool:
    """Whether a file is one of the folder, or a blob of the Hugging Face cache that it is a snapshot of."""
    if not os.path.isfile(path):
        return False
    real, top = os.path.realpath(path), os.path.realpath(root)
    cache, separator, _ = (top + "/").partition("/snapshots/")
    return real.startswith(top.rstrip("/") + "/") or bool(separator) and os.path.dirname(real) == cache + "/blobs"
