"""Modules that are imported meanwhile: by another thread, or under a signal handler; and process
groups that a forked child has of its parent.

Imported with the package itself, so it imports nothing that is not there already.
"""

import _signal  # type: ignore[import-not-found]
import _weakref
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

_whole: "dict[str, Any]" = {}


def imported(name: str) -> "Any":
    """A module that the program has imported, whole: while another thread imports it, this
    waits. None where it was not imported, and in the thread that is about to, as in a
    signal handler: no object of the module can be there yet."""
    module = sys.modules.get(name)
    if module is None or _whole.get(name) is module:
        return module
    if _is_initializing(module):
        try:
            __import__(name)
        except ImportError:  # the other thread's failed
            return None
        module = sys.modules.get(name)
        if module is None or _is_initializing(module):
            return None
    _whole[name] = module
    return module


def _is_initializing(module: "Any") -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def skip_at_exit(
    finalizer: "Callable[[T], None]", is_exiting: "Callable[[], bool]" = sys.is_finalizing
) -> "Callable[[T], None]":
    """A `__del__` that does nothing while the interpreter exits: the engine has ended all, and
    names of modules, which the interpreter takes apart, may be None."""

    return lambda self: None if is_exiting() else finalizer(self)


_pauses: "list[None]" = []  # of the cycle collector: one for each that lasts


def pause_collector() -> bool:
    """Stops Python's cycle collector, for all threads. Whether it ran: then `resume_collector` must follow."""
    import gc

    if not gc.isenabled():
        return False
    _pauses.append(None)
    gc.disable()
    return True


def resume_collector() -> None:
    """Ends a pause. In a child of a fork all have ended: the threads that would do it are not there."""
    import gc

    gc.enable()
    del _pauses[:1]


def _resume_in_child() -> None:
    if _pauses:
        resume_collector()


os.register_at_fork(after_in_child=_resume_in_child)


def lazy_names(
    homes: "dict[str, tuple[str, ...]]", names: "dict[str, Any]", hint: "Callable[[str], str]" = lambda name: ""
) -> "Callable[[str], Any]":
    """A module's `__getattr__`: fetches a name from its home in the same package when it is first used.

    homes: module -> its names; "": modules of their own. names: the globals of the module.
    hint: what the error of another name adds.
    """
    home_of = {name: module for module, own in homes.items() for name in own}

    def find_name(name: str) -> "Any":
        if name not in home_of:
            raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}{hint(name)}")
        from importlib import import_module

        package = names["__package__"]
        with Undisturbed():
            if not (home := home_of[name]):
                return import_module(f"{package}.{name}")
            value = names[name] = getattr(import_module(f"{package}.{home}"), name)
            return value

    return find_name


_groups: "list[_weakref.ReferenceType[Any]]" = []  # that the parents of this process had when they forked


def _note_groups() -> None:
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    _groups.extend(map(_weakref.ref, getattr(world, "pg_map", ())))


os.register_at_fork(after_in_child=_note_groups)


def is_of_parent(group: "Any") -> bool:
    """Whether a process group was made before this process was forked: its connections, and the threads
    that serve them, are the parent's."""
    return any(reference() is group for reference in _groups)


class Undisturbed:
    """A context manager: while it lasts, handlers that the program has for signals wait.

    They run in the main thread, between any two steps of it. One that came in the middle of
    an import, or while the engine is being loaded, and called overwire would meet half a
    module. Only for what takes milliseconds. Ctrl-C's own handler, which only raises
    KeyboardInterrupt, waits with `ctrl_c` alone, as the start of a thread needs it: the
    thread waits for ever where its starter was interrupted. In other threads nothing waits.

    Nor does the cycle collector run, on any thread: it would run finalizers there, and look
    at all of torch's objects because an import has made a thousand.
    """

    def __init__(self, ctrl_c: bool = False) -> None:
        self._passes = None if ctrl_c else _signal.default_int_handler
        self._collects = False
        self._handlers: dict[int, Any] = {}
        numbers = self._came = list[int]()
        self._note = lambda number, frame: numbers.append(number)  # without self, which would be a cycle

    def __enter__(self) -> None:
        try:
            self._collects = pause_collector()
            for number in range(1, _signal.NSIG):
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not self._passes:
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except ValueError:  # not the main thread
            self._handlers.clear()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            while self._handlers:
                number = next(iter(self._handlers))
                if _signal.getsignal(number) is self._note:
                    _signal.signal(number, self._handlers[number])
                del self._handlers[number]
        finally:
            if self._collects:
                resume_collector()
                self._collects = False
            if self._handlers:
                self.__exit__()  # Ctrl-C came
        while self._came:
            try:
                _signal.raise_signal(self._came.pop(0))
            except BaseException:
                self.__exit__()  # the handlers of the others
                raise


def start_thread(start: "Callable[..., Any]", *args: "Any") -> "Any":
    """Calls what starts a thread (a thread's `start`, a pool's `submit` or `map`), and returns what that returns.

    Ctrl-C waits meanwhile, and is raised when the thread runs: interrupted within, Python's own code leaves
    a thread that waits for ever, for which the end of a pool and that of the process wait."""
    with Undisturbed(ctrl_c=True):
        return start(*args)
