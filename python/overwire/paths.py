"""Parses paths and URIs by their text, and makes local paths absolute."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import ArgumentError, NotFoundError, OverwireError, error_of_system

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)


def is_remote(uri: str) -> bool:
    """Returns whether a path has a scheme that is not file://."""
    if "://" not in uri:
        return False
    scheme = uri.partition("://")[0]
    return bool(scheme) and scheme.lower() != "file" and not set(scheme) & set("/\\.")


def local(path: Any) -> str:
    """Converts a path or URI to text. A file:// URI becomes its path. A relative path becomes
    absolute, because the working directory may change before the file is opened.

    `os.fsencode` of the result is the name of the opened file. Raises ArgumentError for a text that
    cannot be a file name, and for a URI that is not UTF-8."""
    if isinstance(path, str) and path[:1] == "/" and path.isascii() and not _is_odd(path):
        return path  # the usual case
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(f"overwire: path: expected a str or os.PathLike, got {type(path).__name__}") from None
    if not text:
        raise ArgumentError("overwire: the path is empty: name a file")
    if "\0" in text:
        todo = "pass a file's name or an open file, not the file's content"
        raise ArgumentError(f"overwire: the path has a NUL byte: {todo}")
    try:
        same = text.isascii() or os.fsencode(text) == text.encode("utf-8", "surrogateescape")
        if is_remote(text):
            text.encode()
    except UnicodeEncodeError as error:
        why = f"{_shown_path(text)} is not a file name or a URI: {error.reason}"
        raise ArgumentError(f"overwire: path: {why}") from None
    if not same:
        why = "the engine uses UTF-8 for file names, and this Python does not: start Python with -X utf8"
        raise ArgumentError(f"overwire: path {_shown_path(text)}: {why}")
    if is_remote(text):
        return text
    if is_file(text):
        text = path_of(text)
    # The system resolves "..", because after a symbolic link it leads to another folder than the text suggests.
    try:
        return _from_root(text) if ".." in text.split("/") else os.path.abspath(text)
    except FileNotFoundError:
        why = "the working folder was removed: change to another folder, or use an absolute path"
        raise NotFoundError(f"overwire: path {_shown_path(text)}: {why}", source=text) from None


def _is_odd(path: str) -> bool:
    # Returns whether a path needs more checks before it is used as a file name.
    return path.endswith("/") or "\0" in path or "//" in path or "/." in path


def _from_root(path: str) -> str:
    return path if path.startswith("/") else os.path.join(os.getcwd(), path)


def is_there(path: str) -> bool:
    """Returns whether a path exists. Raises an error if the file system fails. `os.path.exists` would return False in
    this case, and a caller might replace an existing file."""
    try:
        os.stat(path)
    except OSError as error:
        raise_unless_absent(error, path)
        return False
    return True


@contextlib.contextmanager
def classed_errors(path: str, verb: str = "save") -> Iterator[None]:
    """Converts operating system errors inside the block to overwire's error classes."""
    try:
        yield
    except OverwireError:
        raise
    except OSError as error:
        raise error_of_system(error, verb, path) from error


@contextlib.contextmanager
def named_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces the paths of temporary plain files in errors. names: maps these paths to the names of the original
    files."""
    try:
        yield
    except OverwireError as error:
        for plain in sorted(names, key=len, reverse=True):  # the longest first, because a path may begin with another
            error.args = tuple(str(text).replace(plain, names[plain]) for text in error.args)
            error.source = error.source and error.source.replace(plain, names[plain])
        raise


def raise_unless_absent(error: OSError, path: str) -> None:
    """Converts an operating system error to overwire's class and raises it. Does nothing for paths that do not exist or
    cannot be reached, because opening them reports this."""
    if error.errno not in _ABSENT:
        raise error_of_system(error, "stat", path) from error


def local_file(path: Any) -> str:
    """Converts the path of a file that will be written, like `local`. Raises ArgumentError for a path that ends with
    /."""
    target = local(path)
    if os.fsdecode(path).endswith("/"):
        raise ArgumentError(f"overwire: {_shown_path(os.fsdecode(path))} is a folder's name: name a file in it")
    return target


def _shown_path(text: str) -> str:
    """Formats a path for messages. Of a URI, only the scheme is shown, because the engine, which hides secrets in URIs,
    cannot parse this text."""
    return repr(text.partition("://")[0] + "://***" if is_remote(text) else text)


def is_file(uri: str) -> bool:
    """Returns whether a path is written as a file:// URI."""
    return uri[:7].lower() == "file://"


def path_of(uri: str) -> str:
    """Returns the path of a file:// URI, with its escapes decoded to bytes. Raises ArgumentError if it names another
    host, or has a bare ? or #, because some readers treat these as the end of the path and others as part of the
    name."""
    from urllib.parse import unquote_to_bytes

    host, slash, rest = uri.partition("://")[2].partition("/")
    path = os.fsdecode(unquote_to_bytes(os.fsencode(slash + rest)))
    if host not in ("", "localhost") or not slash or set(rest) & set("?#") or "\0" in path:
        why = "not the URI of a local file (write ? as %3F and # as %23)"
        raise ArgumentError(f"overwire: open {uri}: {why}", source=uri)
    return path


def without_scheme(text: str) -> str:
    """Returns the path of a valid file:// URI. Returns other strings unchanged."""
    try:
        return path_of(text) if is_file(text) else text
    except ArgumentError:  # opening it reports the error
        return text
