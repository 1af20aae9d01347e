"""Defines overwire's exceptions, one class for each error class of the engine.

Every class derives from `OverwireError` and from the built-in that a user would catch without knowing overwire
(`FileNotFoundError`, `TimeoutError`, `KeyError` ...). Every exception has `source`, `tensor`, `chunk`, `offset` and
`rule`, which are None if unknown, and can be pickled. Subclasses of OSError also have `errno` (None for an IOFailure
without an operating system error) and `filename`, which is `source` unless the system named another file. The engine
writes the messages and redacts secrets in them.
"""

from __future__ import annotations

import errno
import pickle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# The prefix of the engine's messages.
_PREFIX = "overwire-fault:"

# Escapes for terminal control characters, except line ends and tabs, and for characters that change the
# direction of text. gosrc/errs has the same table.
_CONTROLS = {
    code: f"\\u{code:04x}"
    for codes in (range(0x20), range(0x7F, 0xA0), (0x61C, 0x200E, 0x200F), range(0x202A, 0x202F), range(0x2066, 0x206A))
    for code in codes
    if chr(code) not in "\n\t"
}

# Values of `errno`, for programs that check it instead of overwire's classes.
_NUMBERS = ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES), (TimeoutError, errno.ETIMEDOUT))


class OverwireError(Exception):
    """The base class of every error that overwire raises on purpose.

    `source` is the file or URI, `tensor` the tensor's name, `chunk` the chunk's number in the tensor, `offset` the byte
    offset in the source. `rule` is a more precise error name than the class, such as "InvalidOffset" or "Checksum".
    """

    def __init__(
        self,
        message: str = "",
        *,
        source: str | None = None,
        tensor: str | None = None,
        chunk: int | None = None,
        offset: int | None = None,
        rule: str | None = None,
    ) -> None:
        # A file name may contain invalid text or terminal control characters. The message escapes them, so it can
        # always be printed. `source` has the unchanged name.
        super().__init__(message.encode("utf-8", "backslashreplace").decode().translate(_CONTROLS))
        self.source, self.tensor, self.chunk, self.offset, self.rule = source, tensor, chunk, offset, rule
        for kind, number in _NUMBERS:
            if isinstance(self, kind):
                _set_number(self, number)
        _set_filename(self, source)

    def __str__(self) -> str:
        # KeyError would quote its argument, and OSError would show an errno tuple.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.__dict__
        if isinstance(self, OSError):  # OSError does not keep these in __dict__
            state = state | {"errno": self.errno, "filename": self.filename}
        return type(self), self.args, state


def _set_number(error: BaseException, number: int) -> None:
    if isinstance(error, OSError):
        error.errno = number


def _set_filename(error: BaseException, name: str | None) -> None:
    if isinstance(error, OSError):
        error.filename = name


class OutOfMemoryError(OverwireError, MemoryError):
    """There is not enough host or device memory. All memory of the failed call is freed.

    `asked`, `free` and `total` are bytes: the size of the failed allocation, the free memory at
    that time, and the total memory. `device` is "cuda:0" or "host". They are None if unknown.
    """

    def __init__(
        self,
        message: str = "",
        *,
        asked: int | None = None,
        free: int | None = None,
        total: int | None = None,
        device: str | None = None,
        **place: Any,
    ) -> None:
        super().__init__(message, **place)
        self.asked, self.free, self.total, self.device = asked, free, total, device


# By `make gen` out of the table in gosrc/errs: do not edit.


class CancelledError(OverwireError, RuntimeError):
    """The work was cancelled by the caller, or because the process ends."""


class ForkedError(OverwireError, RuntimeError):
    """The engine was started before `fork`, and this is the child."""


class EngineError(OverwireError, RuntimeError):
    """A bug in overwire. The engine refuses further work; please report the bug."""


class CorruptError(OverwireError, ValueError):
    """The bytes of a valid file have changed."""


class FormatError(OverwireError, ValueError):
    """The bytes were never a valid file of this format."""


class NotFoundError(OverwireError, FileNotFoundError):
    """The file or object does not exist."""


class AccessError(OverwireError, PermissionError):
    """The file is there, but may not be read or written."""


class DeadlineError(OverwireError, TimeoutError):
    """The time limit has passed."""


class ArgumentError(OverwireError, ValueError):
    """An argument is invalid; the message names it."""


class TensorNotFoundError(OverwireError, KeyError):
    """There is no tensor with that name."""


class NotSupportedError(OverwireError, NotImplementedError):
    """This build does not support the input."""


class DeviceError(OverwireError, RuntimeError):
    """The device or its driver failed."""


class CryptographyError(OverwireError, ValueError):
    """A key is missing or wrong, or encrypted bytes have changed."""


class DeltaBaseError(OverwireError, ValueError):
    """The delta was made from different tensors than those it was applied to. Nothing was changed."""


class IOFailure(OverwireError, OSError):
    """The disk or the network failed: an I/O error, a full disk, a short read."""


# End of what is generated.


# Classes that only Python raises.


class SliceError(ArgumentError, IndexError):
    """An index is out of range, or has a type that slices do not support."""


class ModelMismatchError(OverwireError, RuntimeError):
    """A module and a file have different tensors. The message names all missing, unexpected and misshapen tensors."""


class MissingPackageError(OverwireError, ImportError):
    """A required Python package is not installed. The message names it."""


class UntrustedPickleError(OverwireError, pickle.UnpicklingError):
    """A pickle uses a class or function that is not on the allow-list; see `trust=True`."""


__all__ = sorted(name for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, OverwireError))


# Functions that make the engine's exceptions. The C files of gosrc/bind/core call them.


def hold_daemon() -> None:
    """Does nothing. At interpreter exit, a function that never returns in daemon threads replaces this one."""


def of_engine(error: BaseException) -> BaseException:
    """Converts an engine error to the exception that its text describes. Returns other errors unchanged. At interpreter
    exit the function does not return in daemon threads, because their work was cancelled."""
    text = str(error)
    if not text.startswith(_PREFIX):
        return error
    import json

    hold_daemon()
    return error_of(json.loads(text[len(_PREFIX) :]))


def error_of(fields: dict[str, Any]) -> BaseException:
    """Makes the exception that the engine's description of an error calls for."""
    fields = dict(fields)
    kind, number = globals().get(fields.pop("class"), EngineError), fields.pop("errno", None)
    error: BaseException = kind(fields.pop("message"), **fields)
    if number:
        _set_number(error, number)
    return error


# Maps errno values to overwire's error classes and texts. Other values become an IOFailure.
_OF_SYSTEM = {
    errno.ENOENT: (NotFoundError, "not found"),
    errno.EACCES: (AccessError, "permission denied"),
    errno.EPERM: (AccessError, ""),
    errno.EROFS: (AccessError, ""),
    errno.ENAMETOOLONG: (ArgumentError, ""),
}


def error_of_system(error: OSError, verb: str, source: str) -> OverwireError:
    """Converts an operating system error to overwire's class with the same errno. verb: what the program was doing with
    `source`. If the error names another file, the message and `filename` name that file."""
    number = error.errno or next((number for kind, number in _NUMBERS if isinstance(error, kind)), 0)
    kind, reason = _OF_SYSTEM.get(number, (IOFailure, ""))
    place = error.filename if isinstance(error.filename, str) else source
    failure: OverwireError = kind(f"overwire: {verb} {place}: {reason or error.strerror or error}", source=source)
    _set_filename(failure, place)
    if number:
        _set_number(failure, number)
    return failure


def name_tensor(error: OverwireError, name: str) -> None:
    """Adds a tensor's name to an error that was raised without one."""
    error.tensor = name
    error.args = (f"{error} (tensor {name!r})",)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a suggestion to append to a message if a name resembles a known name, otherwise ""."""
    import difflib  # imported here, because the import takes a millisecond and only errors need it

    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def not_a_handle(number: object) -> BaseException:
    """Makes the error for an invalid handle."""
    return ArgumentError(f"overwire: {number!r} is not a handle")


def forked(what: str = "this call") -> BaseException:
    """Makes the error for calls that need the engine in a process that was forked after the engine had started. Calls
    that only read local files do not raise it. what: the call that needs the engine."""
    why = "this process cannot use it because it was forked after the engine had started"
    todo = "use the spawn or forkserver start method, or fork before the first call"
    return ForkedError(f"overwire: {what} needs the engine, and {why}: {todo}")
