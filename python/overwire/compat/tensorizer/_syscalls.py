"""tensorizer._syscalls: room in files and pages in memory, ahead of their use."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from typing import Any

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14


@functools.cache
def _function(name: str, *parameters: Any) -> Any:
    """A function of libc that says -1 for an error; None where it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes, function.restype = parameters, ctypes.c_int
    return function


def _fallocate() -> Any:
    return _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


def has_fallocate() -> bool:
    """Whether the system has fallocate(2)."""
    return _fallocate() is not None


def try_fallocate(fd: int, offset: int, length: int, suppress_all_errors: bool = False) -> bool:
    """Makes room in a file; whether that was done. OSError, unless all errors are
    suppressed, for any reason but a file system that cannot."""
    call = _fallocate()
    if call is None:
        return False
    if call(fd, 0, offset, length) == 0:
        return True
    number = ctypes.get_errno()
    if suppress_all_errors or number == errno.EOPNOTSUPP:
        return False
    raise OSError(number, os.strerror(number))


def prefault(address: Any, length: int) -> None:
    """Has the system back `length` bytes at an address with memory; their content
    stays."""
    start = int(getattr(address, "value", address))
    first = start - start % mmap.PAGESIZE
    madvise = _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise is not None and madvise(first, start + length - first, _POPULATE_WRITE) == 0:
        return
    for page in (start, *range(first + mmap.PAGESIZE, start + length, mmap.PAGESIZE)):
        byte = ctypes.c_ubyte.from_address(page)
        byte.value = byte.value
