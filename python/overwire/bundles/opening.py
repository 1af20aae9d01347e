"""Opens the pickle and the container of a bundle, and ensures that both come from the same save."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from ..counting import note
from ..errors import CorruptError, FormatError, NotFoundError, OverwireError
from ..files import read_file, state_of_file
from ..jobs import shown
from ..model.opened import Model
from ..model.reading import read_uri
from ..model.sourcelike import SourceLike
from ..model.storageoptions import StorageOptions
from ..paths import is_file, is_remote, local_file, path_of
from . import containers

# The metadata key of a container for the SHA-256 of its pickle.
DIGEST = "overwire.pickle"
# The largest pickle in a store, in bytes, without its tensors.
MOST_PICKLE = 1 << 30
# The most attempts to read a pickle that other saves keep replacing.
_TRIES = 100


def resolve_pickle(path: str | os.PathLike[str]) -> str:
    """Returns the path of a pickle, or its URI in a store."""
    target = local_file(path)
    return path_of(target) if is_file(target) else target


def open_pair(
    target: str, folders: Sequence[str], tensors: SourceLike | None, options: StorageOptions | None
) -> tuple[bytes, Model]:
    """Returns a pickle and the open container of the same save. Starts again if another save replaces the pickle before
    the container is open."""
    remote = is_remote(target)
    for attempts in reversed(range(_TRIES)):
        state = None if remote else state_of_file(target)
        data = read_uri(target, options, MOST_PICKLE) if remote else read_file(target)
        digest = hashlib.sha256(data).hexdigest()
        candidates: list[SourceLike] = []
        try:
            if tensors is not None:
                candidates = [tensors]
            elif remote:
                candidates = [*containers.remote_containers_of(target, folders)]
            else:  # only local folders may contain a previous container
                for one in containers.containers_of(target):
                    candidates += [one, containers.previous_of(one)]
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
    """Opens the candidate that was saved together with this pickle."""
    absent = 0
    damage: OverwireError | None = None  # the error of a candidate that cannot be read
    for at, candidate in enumerate(candidates):
        try:
            model = Model(candidate, storage_options=options, probe=True)
        except NotFoundError:
            absent += at == absent  # the number of candidates at the start of the list that are absent
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
        raise containers.not_beside(target, container)
    if absent == len(candidates):
        text = f"there is no container {container}: upload that folder together with the pickle"
        raise NotFoundError(f"overwire: open {source}: {text}", source=source)
    raise CorruptError(f"overwire: open {source}: the pickle and {container} are from different saves", source=source)
