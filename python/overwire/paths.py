"""What a path or URI says by its text alone: where it leads."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

from .errors import AccessError, ArgumentError, NotFoundError, OverwireError, error_of_system

# What a text may have that is no name as it stands.
_ODD = re.compile(r"\0|//|/\.|/\Z")

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)

# How many links Linux follows in one path.
_MOST_LINKS = 40


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


def resolve_links(path: str) -> str:
    """`os.path.realpath` of a path to be written. Like Linux (fs.protected_symlinks), which sees none of the links
    that are resolved here, it raises AccessError for one that another user may have planted."""
    rest = _from_root(path).split("/")[::-1]
    at, links = "/", 0
    while rest:
        name = rest.pop()
        if name in ("", ".", ".."):
            at = os.path.dirname(at) if name == ".." else at
            continue
        step = os.path.join(at, name)
        try:
            to = _read_link(step)
        except OverwireError:
            raise
        except OSError as error:
            if error.errno != errno.EINVAL:  # no link
                raise_unless_absent(error, step)
            at = step
            continue
        if (links := links + 1) > _MOST_LINKS:
            raise error_of_system(OSError(errno.ELOOP, os.strerror(errno.ELOOP)), "save", path)
        at = "/" if to.startswith("/") else at
        rest += to.split("/")[::-1]
    return at


def _read_link(path: str) -> str:
    # What is read is what was checked, whatever has the path a moment later. Raises AccessError, and what the system
    # says of what is no link.
    os.readlink(path)  # most are none, and cost no descriptor
    number = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        entry = os.fstat(number)
        _refuse_others(path, entry)
        folder = os.path.dirname(path)
        while folder != "/":
            _refuse_others(folder, os.lstat(folder))
            folder = os.path.dirname(folder)
        to = os.readlink("", dir_fd=number)
        _refuse_unnamed(path, entry, to)
        return to
    finally:
        os.close(number)


def _refuse_unnamed(path: str, entry: os.stat_result, to: str) -> None:
    # The text of a link of /proc to a memfd, or to a deleted file, only describes that: a save would write another file
    # called by the description.
    try:
        if entry.st_dev != os.stat("/proc/self").st_dev:
            return
        is_named = os.path.samestat(os.stat(path), os.lstat(os.path.join(os.path.dirname(path), to)))
    except OSError:  # there is no /proc, or nothing of that name
        is_named = not os.path.exists("/proc/self")
    if not is_named:
        raise ArgumentError(f"overwire: {path}: it leads to an open file that no folder has ({to}): name a file")


def refuse_planted_entry(path: str) -> None:
    """Raises AccessError where the last element of a path belongs to another user, in a folder that everyone may
    write: neither to this user, nor to root, nor to the folder's owner. The engine has the same rule."""
    try:
        _refuse_others(path, os.lstat(path))
    except OverwireError:
        raise
    except OSError as error:  # absent: not planted
        raise_unless_absent(error, path)


def _refuse_others(path: str, entry: os.stat_result) -> None:
    folder = os.stat(os.path.dirname(path))
    is_shared = folder.st_mode & stat.S_IWOTH and entry.st_dev == folder.st_dev  # only root mounts
    if is_shared and entry.st_uid not in (os.geteuid(), 0, folder.st_uid):
        raise AccessError(
            f"overwire: permission denied: {path} belongs to user {entry.st_uid}, in a folder that everyone may write: "
            f"remove it, or choose a folder of your own",
            source=path,
        )


def refuse_planted(path: str) -> None:
    """`refuse_planted_entry` for each element of an absolute path."""
    while path != "/":
        refuse_planted_entry(path)
        path = os.path.dirname(path)


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
