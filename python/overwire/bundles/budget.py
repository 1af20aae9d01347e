"""What one untrusted pickle may cost: memory, work and depth, by its size.

Reading a pickle costs what its length accounts for; what its calls make, copy,
hash or compare may cost more, because a pickle can name one object many times.
Everything of that kind is charged here before it is done.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from ..errors import FormatError, UntrustedPickleError

# Bytes that an attribute takes in a dict; letters of a name in a message.
ATTRIBUTE = 100
LONGEST = 200

# Allowances. Bundles stay below: their content is written out in the pickle or in a
# blob. Work is counted in steps of some 100 ns.
_MEMORY_EACH, _MEMORY_BASE = 64, 1 << 24
_WORK_EACH, _WORK_BASE = 64, 1 << 16
_COPIES_OF_BLOBS = 4

# Python hashes tuples by recursion and without a limit.
_KEY_DEPTH = 100
# Keys of one container with one hash: each is compared with all others.
_SAME_HASH = 64
# Texts up to this length cost nothing that counts.
_SHORT = 1 << 10
# Integers of this size and below are their own hash.
_OWN_HASH = (1 << 61) - 2
# Objects that Python frees by recursion and without a limit, each in the other.
_NESTED = 50


class Budget:
    """The account of one unpickling; each method raises UntrustedPickleError
    when the pickle asks for more than its size accounts for.

    size: bytes of the pickle; source: for messages; cure: what these advise, where the caller takes no `trust`.
    """

    def __init__(
        self, source: str, size: int, cure: str = "If you trust where the file comes from, load it with trust=True"
    ) -> None:
        self._source, self._cure = source, cure
        self._memory = _MEMORY_BASE + _MEMORY_EACH * size
        self._work = _WORK_BASE + _WORK_EACH * size
        self._growth = _NESTED
        # By id, with the object itself, so that no other gets its id.
        self._depths: dict[int, tuple[int, Any]] = {}
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}
        #: Copies of what was checked by content: see `tensors`.
        self.private: dict[Any, Any] = {}

    def refuse(self, what: str) -> UntrustedPickleError:
        """The error for a pickle that does what only a trusted one may."""
        return UntrustedPickleError(f"overwire: unpickle {self._source}: {what}. {self._cure}", source=self._source)

    def add_blob(self, size: int) -> None:
        """Allows for work on a blob of `size` bytes, once a blob."""
        self._memory += _COPIES_OF_BLOBS * size
        self._work += _COPIES_OF_BLOBS * size

    def charge_memory(self, size: int) -> None:
        """Charges memory that is about to be taken, in bytes."""
        self._memory -= size
        if self._memory < 0:
            raise self.refuse("it makes more of its bytes than an honest bundle does")

    def charge_work(self, steps: int) -> None:
        """Charges work that is about to be done."""
        self._work -= steps
        if self._work < 0:
            raise self.refuse("it is more work than an honest bundle of its size")

    def nest(self, holder: Any, held: Iterable[Any]) -> None:
        """Notes that `holder` is about to hold these. Both are objects that are
        freed by recursion, or `held` has others, which do not count."""
        deep = 1
        for part in held:
            if type(part) is defaultdict:
                self._depths.setdefault(id(part), (1, part))
            depth = self._depths.get(id(part))
            if depth is not None:
                deep = max(deep, depth[0] + 1)
        before = self._depths.get(id(holder))
        if before is not None:
            # It may be held already: whatever holds it is as much deeper now.
            deep = max(deep, before[0])
            self._growth -= deep - before[0]
        self._depths[id(holder)] = (deep, holder)
        if deep > _NESTED or self._growth < 0:
            raise self.refuse(f"it nests {type(holder).__name__} objects deeper than {_NESTED}")

    def keys(self, container: Any, keys: list[Any]) -> None:
        """Charges putting keys into `container`: hashing each, and comparing it with
        those that have its hash. TypeError for one that has none. For an object
        that is about to be made of its keys, `container` is the list of them."""
        same = None
        for key in keys:
            kind = type(key)
            if kind is str and len(key) <= _SHORT or kind is int and -_OWN_HASH <= key <= _OWN_HASH:
                continue
            self.charge_work(self._cost_of_key(key))
            if kind is str or kind is bytes:
                continue  # hashed with a secret of the process
            if same is None:
                same = self._hashes.setdefault(id(container), (container, {}))[1]
            number = hash(key)
            count = same[number] = same.get(number, 0) + 1
            if count > _SAME_HASH:
                raise self.refuse("it has keys that are chosen to be slow")

    def _cost_of_key(self, key: Any) -> int:
        """The steps of hashing a key, and of comparing it with an equal one."""
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
                raise self.refuse("it has a key that is nested too deeply, or too often")
            level = below
        return cost


def attributes(budget: Budget, made: Any, state: Any) -> dict[str, Any]:
    """A copy of a state that sets attributes of `made` and nothing else."""
    if type(state) is not dict:
        raise FormatError("a state is no dict")
    budget.charge_memory(ATTRIBUTE * len(state))
    own = dict(state)
    kind = type(made)
    for name in own:
        if type(name) is not str:
            raise FormatError("an attribute's name is no text")
        if name.startswith("__") or callable(getattr(kind, name, None)):
            raise budget.refuse(f"it sets {name[:LONGEST]!a} of {kind.__name__}, which is not on the allow-list")
    return own
