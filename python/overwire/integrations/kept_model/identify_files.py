"""Identifies the files from which a model is made, so that a stored model is not used for other files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .keep_files import Refused


def identify_files(source: Any, storage_options: Any = None) -> Iterator[Any]:
    """Yields facts that identify the files of a model, in order. They do not depend on the host, so equal files on
    several hosts have equal facts.

    A compressed file is identified by its checksums, an object by its version in the store, and a plain file by its
    header, its modification time and samples of every tensor. They are read from the files, and nothing is put into the
    host store. source, storage_options: as for `safe_open`. Raises
    Refused if nothing identifies a file, and the errors of opening them.
    """
    import overwire

    from ..._compat_api import states_of

    options = {"storage_options": storage_options, "host": False}
    with overwire.safe_open(source, framework="pt", device="cpu", **options) as file:
        for state in states_of(file, samples=True):
            if state["sealed"]:
                yield state["layout"]
            elif state["pin"]:
                yield state["layout"], state["pin"]
            elif not state["modified"]:
                raise Refused("nothing identifies the model's files")
            else:
                yield state["layout"], state["size"], state["modified"], state["sample"]
