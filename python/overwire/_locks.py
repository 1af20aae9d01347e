"""Makes locks that the same thread may take again, as a signal handler or a finalizer does, and that are
free in a forked child, where other threads cannot release them. Also tells whether this process is a fork."""

import _thread
import _weakref
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_forks: "list[None]" = []  # one item for each fork between the process that imported this and this one

_locks: "set[_weakref.ReferenceType[Any]]" = set()


def new_lock() -> "Any":
    """A lock for a module or an object. It lasts as long as its owner."""
    lock = _thread.RLock()
    _locks.add(_weakref.ref(lock, _locks.discard))
    return lock


def is_fork() -> bool:
    """Whether this process was forked: threads of libraries such as torch may only exist in its parent."""
    return bool(_forks)


def _renew_in_child() -> None:
    _forks.append(None)
    for lock in filter(None, [reference() for reference in list(_locks)]):
        if not lock._is_owned():  # keep locks of the thread that forked
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew_in_child)
