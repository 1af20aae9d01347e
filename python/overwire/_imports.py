"""Helps with imports that another thread or a signal handler may interrupt. Also pauses the cycle collector and signal
handlers, and recognizes process groups that were made before a fork.

The package imports this module first, so it only imports modules that Python has already loaded.
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
    """Returns a module if the program has imported it, else None. Waits while another thread imports it. In the thread
    that is importing it, for instance in a signal handler, it returns None: no object of the module can exist yet."""
    module = sys.modules.get(name)
    if module is None or _whole.get(name) is module:
        return module
    if _is_initializing(module):
        try:
            __import__(name)
        except ImportError:  # the other thread's import failed
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
    """Makes a `__del__` do nothing while the interpreter exits. The engine has then ended all work, and
    module globals may already be None."""

    return lambda self: None if is_exiting() else finalizer(self)


_pauses: "list[None]" = []  # one item for each active pause of the cycle collector


def pause_collector() -> bool:
    """Disables Python's cycle collector. Returns whether it was enabled; if so, call `resume_collector` later."""
    import gc

    if not gc.isenabled():
        return False
    _pauses.append(None)
    gc.disable()
    return True


def resume_collector() -> None:
    """Ends a pause that `pause_collector` began."""
    import gc

    gc.enable()
    del _pauses[:1]


class many_objects:
    """A context manager that pauses the cycle collector while thousands of objects are created.

    Otherwise they trigger full collections, which take longer than creating the objects and free nothing.
    """

    __slots__ = ("_pauses",)

    def __enter__(self) -> None:
        self._pauses = pause_collector()

    def __exit__(self, *exc: object) -> None:
        if self._pauses:
            resume_collector()


def _resume_in_child() -> None:
    if _pauses:  # the threads that would end the other pauses do not exist in the child
        resume_collector()


os.register_at_fork(after_in_child=_resume_in_child)


def lazy_names(
    homes: "dict[str, tuple[str, ...]]",
    names: "dict[str, Any]",
    hint: "Callable[[str], str]" = lambda name: "",
    finish: "Callable[[Any], None]" = lambda function: None,
) -> "Callable[[str], Any]":
    """Makes a module's `__getattr__` that imports each name on first use from a module of the same package.

    homes: maps modules to their names; "" lists names that are modules themselves. names: the
    globals of the lazy module. hint: returns text to add to the error for an unknown name.
    finish: called with each function without a `__signature__` on its first use.
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
            if type(value) is type(find_name) and not hasattr(value, "__signature__"):
                finish(value)
            return value

    return find_name


_groups: "list[_weakref.ReferenceType[Any]]" = []  # process groups that existed when this process was forked


def _note_groups() -> None:
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    _groups.extend(map(_weakref.ref, getattr(world, "pg_map", ())))


os.register_at_fork(after_in_child=_note_groups)


def is_of_parent(group: "Any") -> bool:
    """Returns whether a process group was made before this process was forked. Then its connections and threads
    belong to the parent."""
    return any(reference() is group for reference in _groups)


class Undisturbed:
    """A context manager that delays the program's signal handlers and the cycle collector.

    Handlers run in the main thread between any two bytecodes. A handler that calls overwire during
    an import, or while the engine is loading, would find an incomplete module. Only use this for work
    that takes milliseconds. Ctrl-C's default handler, which raises KeyboardInterrupt, is only delayed if `ctrl_c` is
    set, as by `start_thread`. In threads other than the main thread, no signal is delayed.

    The cycle collector is paused in all threads. It would run finalizers, and an import that
    creates many objects would make it scan all of torch's objects.
    """

    def __init__(self, ctrl_c: bool = False) -> None:
        self._passes = None if ctrl_c else _signal.default_int_handler
        self._collects = False
        self._handlers: dict[int, Any] = {}
        numbers = self._came = list[int]()
        self._note = lambda number, frame: numbers.append(number)  # without self, which would be a cycle

    def __enter__(self) -> None:
        import gc

        try:
            self._collects = gc.isenabled()  # set it before gc.disable(), because Ctrl-C may come between the two lines
            if self._collects:
                pause_collector()
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
            if self._collects:  # while Ctrl-C is still delayed
                resume_collector()
                self._collects = False
            while self._handlers:
                number = next(iter(self._handlers))
                if _signal.getsignal(number) is self._note:
                    _signal.signal(number, self._handlers[number])
                del self._handlers[number]
        finally:
            if self._handlers:
                self.__exit__()  # Ctrl-C interrupted it
        if self._came:
            try:
                _signal.raise_signal(self._came.pop(0))
            finally:
                self.__exit__()  # run the remaining handlers


def start_thread(start: "Callable[..., Any]", *args: "Any") -> "Any":
    """Calls a function that starts threads (a thread's `start`, a pool's `submit` or `map`), and returns its result.

    Ctrl-C is delayed until the thread runs. If it interrupted Python's threading code, the new thread would wait
    forever, and so would the pool's shutdown and the process exit."""
    with Undisturbed(ctrl_c=True):
        return start(*args)
