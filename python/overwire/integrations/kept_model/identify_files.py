"""Identifies the files from which a model is made, so that a stored model is not used for other files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .keep_files import Refused


def identify_files(source: Any, storage_options: Any = None) -> Iterator[Any]:
    """Yields facts that identify the files of a model, in order.

    A compressed file is identified by its checksums and an object by its version in the store, so they have equal facts
    on every host. A plain file is identified by its header, its times of modification and of the last change, and
    samples of every tensor. Its facts change if the file is written to, copied, renamed or gets another mode. The facts
    are read from the files, and nothing is put into the host store. source, storage_options: as for `safe_open`. Raises
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
