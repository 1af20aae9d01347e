"""Locks that a thread may take again, as a signal handler or a finalizer does, and that a forked
child finds free: no other thread is there that would give them back. And whether this is such a child."""

import _thread
import _weakref
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_forks: "list[None]" = []  # of this process and its parents, since the import

_locks: "set[_weakref.ReferenceType[Any]]" = set()


def new_lock() -> "Any":
    """A lock of a module or an object, which lasts as long as that."""
    lock = _thread.RLock()
    _locks.add(_weakref.ref(lock, _locks.discard))
    return lock


def is_fork() -> bool:
    """Whether this process was forked: threads of libraries, as torch's, may be its parent's."""
    return bool(_forks)


def _renew_in_child() -> None:
    _forks.append(None)
    for lock in filter(None, [reference() for reference in list(_locks)]):
        if not lock._is_owned():  # by the thread that forked
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew_in_child)
