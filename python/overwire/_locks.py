"""Makes reentrant locks, for code that signal handlers and finalizers also run. In a forked child, a lock that another
thread held at the fork is free again. Also reports whether this process was forked."""

import _thread
import _weakref
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_forks: "list[None]" = []  # one item for each fork since the import of this module

_locks: "set[_weakref.ReferenceType[Any]]" = set()


def new_lock() -> "Any":
    """Returns a reentrant lock."""
    lock = _thread.RLock()
    _locks.add(_weakref.ref(lock, _locks.discard))
    return lock


def is_fork() -> bool:
    """Returns whether this process was forked. If so, the threads of libraries such as torch may exist only in its
    parent."""
    return bool(_forks)


def _renew_in_child() -> None:
    _forks.append(None)
    for lock in filter(None, [reference() for reference in list(_locks)]):
        if not lock._is_owned():  # the thread that forked keeps its locks
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew_in_child)
