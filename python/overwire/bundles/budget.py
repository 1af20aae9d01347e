"""Limits the memory, work and nesting depth that one untrusted pickle may cost, relative to its size.

The cost of reading a pickle is proportional to its length. Creating, copying, hashing or comparing objects may cost
more, because a pickle can refer to one object many times. These operations are charged here before they run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from ..errors import FormatError, UntrustedPickleError

# How many bytes an attribute takes in a dict, and the most characters of a name that a message shows.
ATTRIBUTE = 100
LONGEST = 200

# The limits of a pickle's cost: a base, and an amount for each of its bytes. Bundles stay below the limits, because
# everything in them is written out in the pickle or in a blob. A step of work takes about 100 ns.
_MEMORY_EACH, _MEMORY_BASE = 64, 1 << 24
_WORK_EACH, _WORK_BASE = 64, 1 << 16
_COPIES_OF_BLOBS = 4

# Python hashes tuples recursively, without a limit.
_KEY_DEPTH = 100
# The most keys of one container with the same hash. Each of them is compared with all others.
_SAME_HASH = 64
# Strings up to this length are not charged as keys.
_SHORT = 1 << 10
# Integers up to this size are their own hash.
_OWN_HASH = (1 << 61) - 2
# The most nesting levels of objects that Python frees recursively. Python itself has no limit.
_NESTED = 50


class Budget:
    """The budget of one unpickling. Each method that charges it raises UntrustedPickleError if the pickle costs more
    than its size allows.

    size: bytes of the pickle. source: the file, for messages. cure: the advice in messages.
    """

    def __init__(
        self, source: str, size: int, cure: str = "If you trust where the file comes from, load it with trust=True"
    ) -> None:
        self._source, self._cure = source, cure
        self._memory = _MEMORY_BASE + _MEMORY_EACH * size
        self._work = _WORK_BASE + _WORK_EACH * size
        self._growth = _NESTED
        # Keys are the ids of objects. Each value refers to its object, so that no other object gets the same id.
        self._depths: dict[int, tuple[int, Any]] = {}
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}
        #: Copies of content that was checked; see `tensors`.
        self.private: dict[Any, Any] = {}

    def refuse(self, what: str) -> UntrustedPickleError:
        """Returns the error for a pickle that does something that only a trusted pickle may do."""
        return UntrustedPickleError(f"overwire: unpickle {self._source}: {what}. {self._cure}", source=self._source)

    def add_blob(self, size: int) -> None:
        """Raises the limit for the memory that copies of a blob of `size` bytes take. Call it once per blob."""
        self._memory += _COPIES_OF_BLOBS * size
        self._work += _COPIES_OF_BLOBS * size

    def charge_memory(self, size: int) -> None:
        """Charges memory that is about to be allocated, in bytes."""
        self._memory -= size
        if self._memory < 0:
            raise self.refuse("it creates objects that take more memory than its size allows")

    def charge_work(self, steps: int) -> None:
        """Charges work that is about to be done, in steps."""
        self._work -= steps
        if self._work < 0:
            raise self.refuse("it takes more work than its size allows")

    def nest(self, holder: Any, held: Iterable[Any]) -> None:
        """Records that `holder` is about to refer to the objects in `held`. Counts only objects that Python frees
        recursively."""
        deep = 1
        for part in held:
            if type(part) is defaultdict:
                self._depths.setdefault(id(part), (1, part))
            depth = self._depths.get(id(part))
            if depth is not None:
                deep = max(deep, depth[0] + 1)
        before = self._depths.get(id(holder))
        if before is not None:
            # Other objects may already refer to `holder`, so their nesting also becomes deeper.
            deep = max(deep, before[0])
            self._growth -= deep - before[0]
        self._depths[id(holder)] = (deep, holder)
        if deep > _NESTED or self._growth < 0:
            raise self.refuse(f"it nests {type(holder).__name__} objects deeper than {_NESTED}")

    def keys(self, container: Any, keys: list[Any]) -> None:
        """Charges the budget for putting keys into `container`: for hashing each key, and for comparing it with keys of
        the same hash. Raises TypeError for a key that cannot be hashed. container: the container, or the list of keys
        from which it will be created."""
        same = None
        for key in keys:
            kind = type(key)
            if kind is str and len(key) <= _SHORT or kind is int and -_OWN_HASH <= key <= _OWN_HASH:
                continue
            self.charge_work(self._cost_of_key(key))
            if kind is str or kind is bytes:
                continue  # the hash depends on a secret of the process
            if same is None:
                same = self._hashes.setdefault(id(container), (container, {}))[1]
            number = hash(key)
            count = same[number] = same.get(number, 0) + 1
            if count > _SAME_HASH:
                raise self.refuse("it has too many keys with the same hash, which would be slow")

    def _cost_of_key(self, key: Any) -> int:
        """Returns the steps for hashing a key and comparing it with an equal one."""
        level = [key]
        cost = depth = 0
        while level:
            below: list[Any] = []
            cost += len(level)
            for part in level:
                kind = type(part)
                if kind is tuple or kind is frozenset:
                    below.extend(part)
                elif kind is slice:
                    below.extend((part.start, part.stop, part.step))
                elif kind is int or kind is Decimal:
                    cost += (sys.getsizeof(part) >> 7) ** 2
                elif kind is not float and kind is not bool:
                    cost += sys.getsizeof(part) >> 10
                if len(below) + cost > self._work:
                    break
            depth += 1
            if len(below) + cost > self._work or depth > _KEY_DEPTH:
                raise self.refuse("it has a key that is too large or nested too deeply")
            level = below
        return cost


def attributes(budget: Budget, made: Any, state: Any) -> dict[str, Any]:
    """Returns a copy of a pickled state. Raises an error if it does more than set attributes of `made`."""
    if type(state) is not dict:
        raise FormatError("the state of an object is not a dict")
    budget.charge_memory(ATTRIBUTE * len(state))
    own = dict(state)
    kind = type(made)
    for name in own:
        if type(name) is not str:
            raise FormatError("an attribute's name is not a str")
        if name.startswith("__") or callable(getattr(kind, name, None)):
            raise budget.refuse(f"it sets {name[:LONGEST]!a} of {kind.__name__}, which is not on the allow-list")
    return own
