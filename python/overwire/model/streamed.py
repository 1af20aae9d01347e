"""Which parts of a model `offload` keeps on the device and which it streams, by names and sizes alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["LARGEST_SHARE", "LISTED_SHARE", "PlannedOffload", "choose_kept", "plan_offload"]

# A module with more of a model's bytes than this share is cut where it has lists of modules.
LARGEST_SHARE = 1 / 16
# It is cut only if its lists have this share of it: what is in none stays on the device.
LISTED_SHARE = 0.8


@dataclass(frozen=True)
class PlannedOffload:
    """What `offload` would do with a model, in bytes.

    rest: of weights that lie in no block, which stay on the device.
    kept: of blocks that stay there.
    streamed: of the blocks that come and go; stored: the most that they take of host memory.
    ring: of device memory for them, with two slots.
    blocks: names of those that are streamed, in the order of the file.
    """

    __module__ = "overwire"

    rest: int
    kept: int
    streamed: int
    stored: int
    ring: int
    blocks: tuple[str, ...]

    @property
    def device(self) -> int:
        """Bytes of the device that weights take, the ring included."""
        return self.rest + self.kept + self.ring


@dataclass
class _Part:
    # What stands below one name: a module, as far as names tell.
    name: str
    nbytes: int = 0
    stored: int = 0
    parts: dict[str, _Part] = field(default_factory=dict)

    def is_list(self) -> bool:
        return bool(self.parts) and all(key.isdigit() for key in self.parts)


def choose_kept(sizes: Sequence[int], keep: int) -> set[int]:
    """The blocks that stay on the device, at most `keep` bytes of them: spread evenly, so
    that others are fetched while they run."""
    most = bisect_right(list(accumulate(sorted(sizes))), keep)  # of the smallest as many fit
    for count in range(most, 0, -1):
        kept = {at * len(sizes) // count for at in range(count)}
        if sum(sizes[at] for at in kept) <= keep:
            return kept
    return set()


def plan_offload(tensors: Iterable[tuple[str, int, int]], keep: int) -> PlannedOffload:
    """The blocks of a model whose tensors have these names, bytes and stored bytes. A name whose
    parts are all numbered stands for a ModuleList."""
    root = _Part("")
    for name, nbytes, stored in tensors:
        part = root
        for key in name.split("."):
            part.nbytes += nbytes
            part.stored += stored
            part = part.parts.setdefault(key, _Part(f"{part.name}.{key}" if part.name else key))
        part.nbytes += nbytes
        part.stored += stored
    blocks = list(_cut(root, LARGEST_SHARE * root.nbytes))
    kept = choose_kept([block.nbytes for block in blocks], keep)
    away = [block for at, block in enumerate(blocks) if at not in kept]
    stay = sum(block.nbytes for at, block in enumerate(blocks) if at in kept)
    return PlannedOffload(
        root.nbytes - sum(block.nbytes for block in blocks),
        stay,
        sum(block.nbytes for block in away),
        sum(block.stored for block in away),
        2 * max((block.nbytes + block.stored for block in away), default=0),
        tuple(block.name for block in away),
    )


def _cut(part: _Part, limit: float) -> Iterator[_Part]:
    for child in part.parts.values():
        if not child.is_list():
            yield from _cut(child, limit)
            continue
        for block in child.parts.values():
            inner = list(_cut(block, limit)) if block.nbytes > limit else []
            if sum(one.nbytes for one in inner) >= LISTED_SHARE * block.nbytes > 0:
                yield from inner
            elif block.nbytes:
                yield block
