"""The exceptions of overwire: one class for each error class of the engine.

Every one derives from `OverwireError` and from the built-in that a user would
catch without knowing us (`FileNotFoundError`, `TimeoutError`, `KeyError` ...).
All carry `source`, `tensor`, `chunk`, `offset` and `rule`, None where it is not known, those that are
an OSError also `errno`, None for an IOFailure without a number of the system's, and `filename`, which is
`source` unless the system named another file, and survive pickling. Messages are made by the engine,
with secrets redacted.
"""

from __future__ import annotations

import errno
import pickle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# What the engine's texts begin with.
_PREFIX = "overwire-fault:"

# Characters that control a terminal, but for line ends and tabs, and those that change the
# order in which a text is read, and how they are shown: as in gosrc/errs.
_CONTROLS = {
    code: f"\\u{code:04x}"
    for codes in (range(0x20), range(0x7F, 0xA0), (0x61C, 0x200E, 0x200F), range(0x202A, 0x202F), range(0x2066, 0x206A))
    for code in codes
    if chr(code) not in "\n\t"
}

# What programs that know us not look at, beside the class.
_NUMBERS = ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES), (TimeoutError, errno.ETIMEDOUT))


class OverwireError(Exception):
    """The base of every error that overwire raises on purpose.

    `source` is the file or URI, `tensor` the name, `chunk` its number in the
    tensor, `offset` the byte offset in the source. `rule` names what the error is about
    beside its class, as "InvalidOffset" or "Checksum".
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
        # A name of a file may hold bytes that are no text, and characters that a terminal
        # obeys (`source` has it whole); a message can always be printed.
        super().__init__(message.encode("utf-8", "backslashreplace").decode().translate(_CONTROLS))
        self.source = source
        self.tensor = tensor
        self.chunk = chunk
        self.offset = offset
        self.rule = rule
        for kind, number in _NUMBERS:
            if isinstance(self, kind):
                _set_number(self, number)
        _set_filename(self, source)

    def __str__(self) -> str:
        # KeyError would show its argument in quotes, OSError an errno tuple.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.__dict__
        if isinstance(self, OSError):  # which keeps these beside its other attributes
            state = state | {"errno": self.errno, "filename": self.filename}
        return type(self), self.args, state


def _set_number(error: BaseException, number: int) -> None:
    if isinstance(error, OSError):
        error.errno = number


def _set_filename(error: BaseException, name: str | None) -> None:
    if isinstance(error, OSError):
        error.filename = name


class OutOfMemoryError(OverwireError, MemoryError):
    """Host or device memory was not enough. What had been allocated is freed.

    `asked`, `free`, `total` are bytes: the size of the allocation, the free memory at
    that time, and all memory; `device` is where: "cuda:0", or "host". None where unknown.
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
        self.asked = asked
        self.free = free
        self.total = total
        self.device = device


# By `make gen` out of the table in gosrc/errs: do not edit.


class CancelledError(OverwireError, RuntimeError):
    """The work was cancelled: by the caller, or because the process ends."""


class ForkedError(OverwireError, RuntimeError):
    """The engine was started before `fork`, and this is the child."""


class EngineError(OverwireError, RuntimeError):
    """A bug in overwire. The engine refuses further work; please report it."""


class CorruptError(OverwireError, ValueError):
    """A valid file whose bytes have changed."""


class FormatError(OverwireError, ValueError):
    """The bytes were never a valid file of this kind."""


class NotFoundError(OverwireError, FileNotFoundError):
    """No such file or object."""


class AccessError(OverwireError, PermissionError):
    """The file is there, but may not be read or written."""


class DeadlineError(OverwireError, TimeoutError):
    """The time limit has passed."""


class ArgumentError(OverwireError, ValueError):
    """An invalid argument, which the message names."""


class TensorNotFoundError(OverwireError, KeyError):
    """No tensor of that name."""


class NotSupportedError(OverwireError, NotImplementedError):
    """Valid, but not something this build can do."""


class DeviceError(OverwireError, RuntimeError):
    """The device or its driver failed."""


class CryptographyError(OverwireError, ValueError):
    """A key is missing or wrong, or encrypted bytes have changed."""


class DeltaBaseError(OverwireError, ValueError):
    """A delta was made from other tensors than those that it should change. Nothing was changed."""


class IOFailure(OverwireError, OSError):
    """The medium failed: an I/O error, a full disk, a short read."""


# End of what is generated.


# Classes of the Python side alone.


class SliceError(ArgumentError, IndexError):
    """An index out of range, or of a kind that slices do not take."""


class ModelMismatchError(OverwireError, RuntimeError):
    """A module and a file that do not fit: missing, unexpected or misshapen
    tensors, all of them named."""


class MissingPackageError(OverwireError, ImportError):
    """A Python package that this needs is not installed; the text names it."""


class UntrustedPickleError(OverwireError, pickle.UnpicklingError):
    """A pickle asks for something outside the allow-list: see `trust=True`."""


__all__ = sorted(name for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, OverwireError))


# What the engine raises: called by the C files of gosrc/bind/core.


def hold_daemon() -> None:
    """Replaced while the interpreter exits: then it does not return in a daemon thread."""


def of_engine(error: BaseException) -> BaseException:
    """The exception that an error text of the engine names; other errors as they are. In a daemon thread, whose
    work the exit of the interpreter has ended, it does not return."""
    text = str(error)
    if not text.startswith(_PREFIX):
        return error
    import json

    hold_daemon()
    return error_of(json.loads(text[len(_PREFIX) :]))


def error_of(fields: dict[str, Any]) -> BaseException:
    """The exception that the engine describes."""
    fields = dict(fields)
    kind, number = globals().get(fields.pop("class"), EngineError), fields.pop("errno", None)
    error: BaseException = kind(fields.pop("message"), **fields)
    if number:
        _set_number(error, number)
    return error


# The classes of the system's numbers, and the words that stand for its own. Others are an IOFailure.
_OF_SYSTEM = {
    errno.ENOENT: (NotFoundError, "not found"),
    errno.EACCES: (AccessError, "permission denied"),
    errno.EPERM: (AccessError, ""),
    errno.EROFS: (AccessError, ""),
    errno.ENAMETOOLONG: (ArgumentError, ""),
}


def error_of_system(error: OSError, verb: str, source: str) -> OverwireError:
    """The exception for what the operating system says while a verb works on a source, with its number. Where the
    system names another file, the text and `filename` name that one."""
    number = error.errno or next((number for kind, number in _NUMBERS if isinstance(error, kind)), 0)
    kind, reason = _OF_SYSTEM.get(number, (IOFailure, ""))
    place = error.filename if isinstance(error.filename, str) else source
    failure: OverwireError = kind(f"overwire: {verb} {place}: {reason or error.strerror or error}", source=source)
    _set_filename(failure, place)
    if number:
        _set_number(failure, number)
    return failure


def name_tensor(error: OverwireError, name: str) -> None:
    """Adds the name of a tensor to an error that was raised for one without a name."""
    error.tensor = name
    error.args = (f"{error} (tensor {name!r})",)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What a message adds about a name that is like a known one."""
    import difflib  # costs a millisecond, and only mistakes need it

    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def not_a_handle(number: object) -> BaseException:
    """What is raised for what is no handle."""
    return ArgumentError(f"overwire: {number!r} is not a handle")


def forked(what: str = "this call") -> BaseException:
    """What every call raises in a child of a process that had loaded the engine, but those that read local files.
    what: what needs the engine."""
    return ForkedError(
        f"overwire: this process was forked from one that had started the engine, and cannot use it; {what} needs it: "
        "use the spawn or forkserver start method, or fork before the first call"
    )
