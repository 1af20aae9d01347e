"""What a path or URI says by its text alone: where it leads."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import Any

from .errors import ArgumentError, NotFoundError, OverwireError, error_of_system

# What a text may have that is no name as it stands.
_ODD = re.compile(r"\0|//|/\.|/\Z")

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)


def is_remote(uri: str) -> bool:
    """Whether a path has a scheme that is not file://."""
    if "://" not in uri:
        return False
    scheme = uri.partition("://")[0]
    return bool(scheme) and scheme.lower() != "file" and not set(scheme) & set("/\\.")


def local(path: Any) -> str:
    """One path or URI as text, a file:// URI as its path; a relative path is made absolute, so that a
    later change of the working directory does not matter.

    What os.fsencode makes of the text is the name that is opened, whatever its
    bytes are. A text that no name has, and a URI that is not UTF-8, are
    ArgumentError."""
    if isinstance(path, str) and path[:1] == "/" and path.isascii() and not _ODD.search(path):
        return path  # as most are
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(f"overwire: path: expected a str or os.PathLike, got {type(path).__name__}") from None
    if not text:
        raise ArgumentError("overwire: path: it is empty")
    if "\0" in text:
        raise ArgumentError(
            "overwire: path: it has a NUL byte; pass the name of a file, or an open file, not its content"
        )
    try:
        same = text.isascii() or os.fsencode(text) == text.encode("utf-8", "surrogateescape")
        if is_remote(text):
            text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"overwire: path: {_shown_path(text)} is no name of a file, nor a URI: {error.reason}"
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
    # ".." after a symbolic link is not the name before: the system finds it.
    try:
        return _from_root(text) if ".." in text.split("/") else os.path.abspath(text)
    except FileNotFoundError:
        raise NotFoundError(
            f"overwire: path {_shown_path(text)}: the working folder was removed: go to another one, or name the file "
            "from / on",
            source=text,
        ) from None


def _from_root(path: str) -> str:
    return path if path.startswith("/") else os.path.join(os.getcwd(), path)


def is_there(path: str) -> bool:
    """`os.path.exists`, which says no where a disk does not answer, so that a caller could replace what is there:
    here that raises."""
    try:
        os.stat(path)
    except OSError as error:
        raise_unless_absent(error, path)
        return False
    return True


@contextlib.contextmanager
def classed_errors(path: str, verb: str = "save") -> Iterator[None]:
    """Our classes for what the operating system says of a verb."""
    try:
        yield
    except OverwireError:
        raise
    except OSError as error:
        raise error_of_system(error, verb, path) from error


def raise_unless_absent(error: OSError, path: str) -> None:
    """Raises our class for what a disk says, and nothing for what is not there or not to be reached, which opening it
    reports."""
    if error.errno not in _ABSENT:
        raise error_of_system(error, "stat", path) from error


def local_file(path: Any) -> str:
    """`local` of a file that is to be written; ArgumentError for the name of a folder, which ends with /."""
    target = local(path)
    if os.fsdecode(path).endswith("/"):
        raise ArgumentError(f"overwire: {_shown_path(os.fsdecode(path))} is the name of a folder: name the file in it")
    return target



def _shown_path(text: str) -> str:
    """A path as people may see it. The engine, which hides secrets, cannot take this
    one: of a URI only the scheme is left."""
    return repr(text.partition("://")[0] + "://***" if is_remote(text) else text)


def is_file(uri: str) -> bool:
    """Whether a path is written as a file:// URI."""
    return uri[:7].lower() == "file://"


def path_of(uri: str) -> str:
    """The path of a file:// URI: the very bytes that its escapes stand for.
    ArgumentError for another host's, and for a bare ? or #, which some readers
    take for the end of the path and others for a part of the name."""
    from urllib.parse import unquote_to_bytes

    host, slash, rest = uri.partition("://")[2].partition("/")
    path = os.fsdecode(unquote_to_bytes(os.fsencode(slash + rest)))
    if host not in ("", "localhost") or not slash or set(rest) & set("?#") or "\0" in path:
        raise ArgumentError(
            f"overwire: open {uri}: not the URI of a local file (? is written %3F there, # %23)", source=uri
        )
    return path


def without_scheme(text: str) -> str:
    """The path of a file:// URI that is valid; all else stays."""
    try:
        return path_of(text) if is_file(text) else text
    except ArgumentError:  # opening it reports what is wrong
        return text
