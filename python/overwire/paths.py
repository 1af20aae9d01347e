"""Parses paths and URIs by their text, and makes local paths absolute."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import ArgumentError, NotFoundError, OverwireError, error_of_system

# Texts with one of these need a closer look before they are used as a file name.
_ODD = re.compile(r"\0|//|/\.|/\Z")

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)


def is_remote(uri: str) -> bool:
    """Whether a path has a scheme that is not file://."""
    if "://" not in uri:
        return False
    scheme = uri.partition("://")[0]
    return bool(scheme) and scheme.lower() != "file" and not set(scheme) & set("/\\.")


def local(path: Any) -> str:
    """Converts a path or URI to text: a file:// URI becomes its path, and a relative path becomes
    absolute, so that a later change of the working directory does not matter.

    The file that is opened has the name that os.fsencode makes of the text, whatever its bytes
    are. ArgumentError for a text that cannot be a file name, and for a URI that is not UTF-8."""
    if isinstance(path, str) and path[:1] == "/" and path.isascii() and not _ODD.search(path):
        return path  # the usual case
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(f"overwire: path: expected a str or os.PathLike, got {type(path).__name__}") from None
    if not text:
        raise ArgumentError("overwire: path: it is empty; name a file")
    if "\0" in text:
        raise ArgumentError(
            "overwire: path: it has a NUL byte; pass a file's name or an open file, not the file's content"
        )
    try:
        same = text.isascii() or os.fsencode(text) == text.encode("utf-8", "surrogateescape")
        if is_remote(text):
            text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"overwire: path: {_shown_path(text)} is not a file name or a URI: {error.reason}"
        ) from None
    if not same:
        raise ArgumentError(
            f"overwire: path {_shown_path(text)}: the engine's names are UTF-8, and Python's are not: start it with "
            f"-X utf8"
        )
    if is_remote(text):
        return text
    if is_file(text):
        text = path_of(text)
    # Do not remove ".." textually: after a symbolic link it is another folder. The system resolves it.
    try:
        return _from_root(text) if ".." in text.split("/") else os.path.abspath(text)
    except FileNotFoundError:
        raise NotFoundError(
            f"overwire: path {_shown_path(text)}: the working folder was removed: use another one, or name the file "
            "from / on",
            source=text,
        ) from None


def _from_root(path: str) -> str:
    return path if path.startswith("/") else os.path.join(os.getcwd(), path)


def is_there(path: str) -> bool:
    """`os.path.exists`, but raises if the disk does not answer. os.path.exists says no there, and a caller might then
    replace an existing file."""
    try:
        os.stat(path)
    except OSError as error:
        raise_unless_absent(error, path)
        return False
    return True


@contextlib.contextmanager
def classed_errors(path: str, verb: str = "save") -> Iterator[None]:
    """Raises our error classes for operating system errors inside the block."""
    try:
        yield
    except OverwireError:
        raise
    except OSError as error:
        raise error_of_system(error, verb, path) from error


@contextlib.contextmanager
def named_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors about plain files name those that they stand for."""
    try:
        yield
    except OverwireError as error:
        for plain in sorted(names, key=len, reverse=True):  # /proc/self/fd/1 after /proc/self/fd/12
            error.args = tuple(str(text).replace(plain, names[plain]) for text in error.args)
            error.source = error.source and error.source.replace(plain, names[plain])
        raise


def raise_unless_absent(error: OSError, path: str) -> None:
    """Raises our class for an operating system error, except for a path that does not exist or cannot be reached:
    opening it reports that."""
    if error.errno not in _ABSENT:
        raise error_of_system(error, "stat", path) from error


def local_file(path: Any) -> str:
    """`local` for a file that will be written. ArgumentError for a folder's name, which ends with /."""
    target = local(path)
    if os.fsdecode(path).endswith("/"):
        raise ArgumentError(f"overwire: {_shown_path(os.fsdecode(path))} is a folder's name: name a file in it")
    return target



def _shown_path(text: str) -> str:
    """A path for messages. The engine hides secrets but cannot parse this text, so only the
    scheme of a URI is shown."""
    return repr(text.partition("://")[0] + "://***" if is_remote(text) else text)


def is_file(uri: str) -> bool:
    """Whether a path is written as a file:// URI."""
    return uri[:7].lower() == "file://"


def path_of(uri: str) -> str:
    """The path of a file:// URI, with its escapes decoded to bytes. ArgumentError for another
    host, and for a bare ? or #, which some readers treat as the end of the path and others
    as part of the name."""
    from urllib.parse import unquote_to_bytes

    host, slash, rest = uri.partition("://")[2].partition("/")
    path = os.fsdecode(unquote_to_bytes(os.fsencode(slash + rest)))
    if host not in ("", "localhost") or not slash or set(rest) & set("?#") or "\0" in path:
        raise ArgumentError(
            f"overwire: open {uri}: not the URI of a local file (? is written %3F there, # %23)", source=uri
        )
    return path


def without_scheme(text: str) -> str:
    """The path of a valid file:// URI; other texts stay as they are."""
    try:
        return path_of(text) if is_file(text) else text
    except ArgumentError:  # opening it reports the error
        return text
