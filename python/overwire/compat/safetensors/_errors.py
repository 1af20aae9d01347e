"""Converts overwire's errors to safetensors' own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import overwire

_Base: Any = Exception
with contextlib.suppress(ImportError):
    # With this base class, `except` clauses for the installed package's class also catch this one.
    from safetensors import SafetensorError as _Base


class SafetensorError(_Base):  # type: ignore[misc]
    """Raised if a safetensors file, a name or a slice is invalid."""

    __module__ = "overwire.compat.safetensors"


# Maps the names of rules in overwire's messages to the original's words.
_WORDS = {
    "HeaderTooSmall": "header too small",
    "HeaderTooLarge": "header too large",
    "InvalidHeaderLength": "invalid header length",
    "InvalidHeaderDeserialization": "invalid JSON in header",
    "InvalidHeader": "invalid UTF-8 in header",
    "MetadataIncompleteBuffer": "incomplete metadata, file not fully covered",
    "InvalidOffset": "invalid offset for tensor",
    "TensorInvalidInfo": "invalid shape, data type, or offset for tensor",
    "ValidationOverflow": "overflow computing buffer size from shape and/or element type",
    "MisalignedSlice": "The slice is slicing for subbytes dtypes, and the slice does not end up "
    "at a byte boundary, this is invalid.",
}


def header_error(error: overwire.OverwireError, begin: str) -> SafetensorError:
    """Makes the error for a bad header, with safetensors' text followed by overwire's."""
    words = _WORDS.get(error.rule or "")
    if error.rule == "InvalidOffset":
        words = f"{words} `{error.tensor}`"
    return SafetensorError(f"{begin}: {words} ({error})" if words else f"{begin}: {error}")


def not_contiguous(name: str) -> ValueError:
    """Makes the error for saving a tensor that is not dense."""
    return ValueError(
        f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either means you"
        " are trying to save tensors which are reference of each other in which case it's recommended to save"
        " only the full tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to"
        " pack it before saving."
    )


def check(what: str, value: Any, kind: type) -> None:
    """Raises the original's TypeError if an argument, or a part of an argument, is not a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"argument '{what}': {type(value).__name__!r} object is not an instance of '{kind.__name__}'")


@contextlib.contextmanager
def reading(filename: Any, begin: str = "Error while deserializing header") -> Iterator[None]:
    """Converts errors of code that opens or reads."""
    try:
        if not filename and isinstance(filename, str):
            raise overwire.NotFoundError("overwire: the path is empty")
        yield
    except overwire.NotFoundError as error:
        raise FileNotFoundError(f"No such file or directory: {filename}") from error
    except overwire.TensorNotFoundError as error:
        raise SafetensorError(f"File does not contain tensor {error.tensor}") from error
    except (overwire.FormatError, overwire.CorruptError, overwire.NotSupportedError) as error:
        raise header_error(error, begin) from error


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Converts errors of code that writes."""
    try:
        yield
    except (overwire.ArgumentError, overwire.NotSupportedError, OSError) as error:
        raise SafetensorError(f"Error while serializing: {error}") from error
