"""Decides which links in a folder are followed, because an untrusted folder must not include other files of this
machine."""

from __future__ import annotations

import os


def may_follow(root: str, path: str) -> bool:
    """Returns whether a file is in the folder or, for a snapshot in the Hugging Face cache, a blob of that cache."""
    if not os.path.isfile(path):
        return False
    real, top = os.path.realpath(path), os.path.realpath(root)
    cache, separator, _ = (top + "/").partition("/snapshots/")
    return real.startswith(top.rstrip("/") + "/") or bool(separator) and os.path.dirname(real) == cache + "/blobs"
