"""The pickle and the container of one bundle, opened together: those of one save."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from ..errors import CorruptError, FormatError, NotFoundError, OverwireError
from ..files import read_file, state_of_file
from ..jobs import shown
from ..metering import note
from ..model import layout
from ..model.opened import Model
from ..model.options import StorageOptions
from ..model.reading import read_uri
from ..model.sources import SourceLike
from ..paths import is_file, is_remote, local_file, path_of

# The key of a container's metadata that holds the pickle's SHA-256.
DIGEST = "overwire.pickle"
# The most bytes of a remote object without its tensors.
MOST_PICKLE = 1 << 30
# How often a pickle is read again that another save has replaced meanwhile.
_TRIES = 100


def resolve_pickle(path: str | os.PathLike[str]) -> str:
    """A pickle's path, or the URI of one in a store."""
    target = local_file(path)
    return path_of(target) if is_file(target) else target


def open_pair(
    target: str, folders: Sequence[str], tensors: SourceLike | None, options: StorageOptions | None
) -> tuple[bytes, Model]:
    """A pickle, and the container of the same save, opened.

    A save may end after the pickle has been read: the new one is read then."""
    remote = is_remote(target)
    for attempts in reversed(range(_TRIES)):
        state = None if remote else state_of_file(target)
        data = read_uri(target, options, MOST_PICKLE) if remote else read_file(target)
        digest = hashlib.sha256(data).hexdigest()
        candidates: list[SourceLike]
        try:
            if tensors is not None:
                candidates = [tensors]
            elif remote:
                candidates = [*layout.remote_containers_of(target, folders)]
            else:  # a store has no container of before
                candidates = [name for one in layout.containers_of(target) for name in (one, layout.previous_of(one))]
            return data, _open_container(target, digest, candidates, options if remote or tensors is not None else None)
        except (CorruptError, NotFoundError) as error:
            present = read_uri(target, options, MOST_PICKLE) if remote else state_of_file(target)
            if not attempts or present == (data if remote else state):
                note("open", "", type(error).__name__)
                raise
    raise AssertionError("the last try returns or raises")


def _open_container(
    target: str, digest: str, candidates: Sequence[SourceLike], options: StorageOptions | None
) -> Model:
    """The container that belongs to this very pickle: one of the candidates."""
    absent = 0
    damage: OverwireError | None = None  # of one that may be no bundle's
    for at, candidate in enumerate(candidates):
        try:
            model = Model(candidate, storage_options=options, probe=True)
        except NotFoundError:
            absent += at == absent  # those before it are absent, too
            continue
        except (CorruptError, FormatError) as error:
            damage = damage or error
            continue
        if model.metadata().get(DIGEST) == digest:
            return model
        model.close()
    source, container = shown(target), shown(str(candidates[0]))
    if damage is not None:
        raise damage
    if absent and not is_remote(target):
        raise layout.not_beside(target, container)
    if absent == len(candidates):
        raise NotFoundError(
            f"overwire: open {source}: its tensors are not at {container}; upload the folder beside the pickle with it",
            source=source,
        )
    raise CorruptError(f"overwire: open {source}: the pickle and {container} are not of one save", source=source)
