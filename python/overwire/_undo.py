"""Provides context managers that undo work after an exception, or keep the exception."""

import sys
from functools import partial

from ._imports import Undisturbed


class after_error(partial[object]):
    """A context manager. If an exception leaves its block, it calls a function once, with its arguments, and then
    raises the exception.

    Signal handlers such as that of Ctrl-C are delayed until the function has returned. If one raises an exception just
    before or after the block, the function runs when this object is dropped. The class derives from `partial` because
    signal handlers cannot run inside its constructor, which is written in C.

    If the function raises an Exception, the block's exception is still raised, with the function's traceback in its
    notes. If the block's exception is GeneratorExit, the function's exception is raised instead, because Python
    discards GeneratorExit when it closes a generator. If Ctrl-C comes while the function runs, KeyboardInterrupt is
    raised when the function has returned, with the block's exception as its context.

    The function also runs in a child that was forked inside the block. Functions that change files or jobs must
    therefore do nothing in a forked child.
    """

    _is_over = _tells = False
    _delays = True

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: "type[BaseException] | None", error: "BaseException | None", *rest: object) -> None:
        if error is None:
            self._is_over = True
            return
        try:
            # While Python is finalizing, no handler runs, and nothing can be imported.
            if self._delays and not sys.is_finalizing():
                with Undisturbed(ctrl_c=True):
                    self._run_once(error)
        finally:
            self._run_once(error)  # the interpreter exits, or an interrupt came before the handlers were delayed

    def __del__(self) -> None:
        if not self._is_over:
            self._run_once(GeneratorExit())

    def _run_once(self, error: BaseException) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            self(error) if self._tells else self()
        except Exception as second:
            if isinstance(error, GeneratorExit):
                raise
            if second is not error:
                _add_note(error, second)


class after_error_at_store(after_error):
    """Like `after_error`, for functions that wait for a server. Signal handlers run while the function runs, so Ctrl-C
    can interrupt it. An interrupted function must leave nothing on this host."""

    _delays = False


class pass_error_to(after_error):
    """Like `after_error`, but passes the exception to the function as its last argument."""

    _tells = True


def _add_note(error: BaseException, second: BaseException) -> None:
    import traceback

    lines = traceback.format_exception(type(second), second, second.__traceback__, chain=False)
    note = "While this error was handled, another one occurred:\n" + "".join(lines).rstrip()
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]  # `add_note` needs Python 3.11


class keep_error:
    """A context manager that keeps an exception in `error` instead of raising it, for code that must do something else
    first. The manager can be entered several times, even in several threads, and keeps the first exception. It does not
    keep GeneratorExit, which must end a generator.

    error: an earlier exception, which is kept."""

    def __init__(self, error: "BaseException | None" = None) -> None:
        self.error = error

    def __enter__(self) -> "keep_error":
        return self

    def __exit__(self, kind: "type[BaseException] | None", error: "BaseException | None", *rest: object) -> bool:
        if error is None or isinstance(error, GeneratorExit):
            return False
        self.error = self.error or error
        return True
