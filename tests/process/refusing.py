"""Makes system calls of a child process fail, one at a time: the n-th call of a kind fails with a given errno.

A seccomp filter in the child, which needs no privileges, passes each call of these kinds to this process, which allows
or refuses it. Calls of all threads are counted together, from the start of a task to its answer.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# x86-64 numbers. clone, futex, getrandom and mappings of anonymous memory are not listed, because Go's runtime ends the
# process if they fail.
CALLS = {
    "read": 0, "write": 1, "open": 2, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9, "pread64": 17,
    "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "mincore": 27, "madvise": 28, "dup": 32, "socket": 41,
    "connect": 42, "accept": 43, "sendto": 44, "recvfrom": 45, "shutdown": 48, "bind": 49, "listen": 50,
    "getsockname": 51, "getpeername": 52, "setsockopt": 54, "getsockopt": 55, "uname": 63, "fcntl": 72, "flock": 73,
    "fsync": 74, "fdatasync": 75, "ftruncate": 77, "getcwd": 79, "rename": 82, "mkdir": 83, "rmdir": 84, "link": 86,
    "unlink": 87, "readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "sysinfo": 99, "statfs": 137,
    "fstatfs": 138, "fsetxattr": 190, "getxattr": 191, "fremovexattr": 199, "sched_setaffinity": 203,
    "sched_getaffinity": 204, "getdents64": 217, "fadvise64": 221, "epoll_ctl": 233, "mbind": 237, "openat": 257,
    "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265, "readlinkat": 267,
    "fchmodat": 268, "faccessat": 269, "sync_file_range": 277, "utimensat": 280, "fallocate": 285, "accept4": 288,
    "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "prlimit64": 302,
    "syncfs": 306, "renameat2": 316, "memfd_create": 319, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328,
    "statx": 332, "openat2": 437, "faccessat2": 439, "cachestat": 451,
}  # fmt: skip

_NAMES = {number: name for name, number in CALLS.items()}
_WAKING = (CALLS["read"], CALLS["write"])

# Constants of linux/seccomp.h and linux/filter.h.
_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _NEW_LISTENER, _WAIT_KILLABLE = 38, 1, 1 << 3, 1 << 5
_ALLOW, _NOTIFY, _CONTINUE = 0x7FFF0000, 0x7FC00000, 1
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_SECCOMP = 317


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse_calls(control: socket.socket) -> None:
    """Installs the filter in the child. From then on, the parent answers the child's calls. Raises OSError if the
    system has no such filter."""
    numbers = sorted(set(CALLS.values()) - {CALLS["mmap"]})
    steps = [(0x20, 0, 0, 0)]  # the call number
    steps += [(0x15, 0, 2, CALLS["mmap"]), (0x20, 0, 0, 48), (0x15, len(numbers), len(numbers) + 1, 0xFFFFFFFF)]
    steps += [(0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Filter(len(steps), code)
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        listener = libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, ctypes.byref(program))
        if listener >= 0:
            # From here on, each call of these kinds waits for an answer.
            socket.send_fds(control, [b"listener"], [listener])
            return
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Refusal:
    """A child that runs tasks while chosen system calls fail."""

    def __init__(self, program: Path) -> None:
        """Starts program, a file that calls `serve_tasks`. Raises OSError if the system has no such filter."""
        self._control, other = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(other.fileno())], pass_fds=[other.fileno()], stderr=subprocess.PIPE,
            start_new_session=True, text=True,
        )  # fmt: skip
        other.close()
        self._control.settimeout(60)
        text, descriptors, *_ = socket.recv_fds(self._control, 100, 1)
        if text != b"listener":
            self.process.kill()
            errors = self.process.communicate()[1]
            assert text, errors
            raise OSError(errno.ENOSYS, text.decode())
        self._listener = descriptors[0]
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._refused: tuple[str, int, int, bool] | None = None
        self.was_refused = False
        threading.Thread(target=self._answer_calls, daemon=True).start()

    def _answer_calls(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        try:
            while poll.poll()[0][1] & select.POLLIN:
                notice = bytearray(80)
                try:
                    fcntl.ioctl(self._listener, _RECEIVE, notice)
                except OSError:  # a signal interrupted the call
                    continue
                identity, process, _, call = struct.unpack_from("QIIi", notice)
                first = struct.unpack_from("q", notice, 32)[0]
                number = 0 if call in _WAKING and self._is_event(process, first) else self._decide(_NAMES[call])
                answer = bytearray(struct.pack("QqiI", identity, 0, -number, 0 if number else _CONTINUE))
                try:
                    fcntl.ioctl(self._listener, _SEND, answer)
                except OSError:
                    continue
        finally:
            os.close(self._listener)

    def _is_event(self, process: int, descriptor: int) -> bool:
        # Go's runtime wakes its threads through an eventfd, and ends the process if this fails.
        try:
            return "eventfd" in os.readlink(f"/proc/{process}/fd/{descriptor}")
        except OSError:
            return False

    def _decide(self, call: str) -> int:
        with self._lock:
            self._counts[call] += 1
            if self._refused is None or call != self._refused[0]:
                return 0
            _, at, number, lasts = self._refused
            if self._counts[call] != at and not (lasts and self._counts[call] > at):
                return 0
            self.was_refused = True
            return number

    def run(
        self, task: Iterable[Any], call: str = "", at: int = 1, number: int = 0, *, lasts: bool = False,
        timeout: float = 60,
    ) -> Any:
        """Runs a task and returns its answer. Call number `at` of a kind fails with the errno `number`. With `lasts`,
        so do all later ones.

        Raises TimeoutError if the answer takes too long, and ConnectionError if the child has exited.
        """
        self.refuse(call, at, number, lasts=lasts)
        self._control.settimeout(timeout)
        self._control.sendmsg([json.dumps(list(task)).encode() + b"\n"])
        answer = b""
        while not answer.endswith(b"\n"):
            block = self._control.recv(1 << 20)
            if not block:
                status, text = self.process.wait(), self.process.stderr.read()[-3000:]
                raise ConnectionError(f"the child has ended: {status}: {text}")
            answer += block
        with self._lock:
            self._refused = None
        return json.loads(answer)

    def refuse(self, call: str = "", at: int = 1, number: int = 0, *, lasts: bool = False) -> None:
        """Restarts the counts, and refuses calls as in `run` until the next task ends. Without a kind, all calls are
        allowed."""
        with self._lock:
            self._counts.clear()
            self.was_refused = False
            self._refused = (call, at, number, lasts) if call else None

    def counts(self) -> dict[str, int]:
        """Returns the number of calls of each kind since the last task began."""
        with self._lock:
            return dict(self._counts)

    def end(self) -> None:
        """Ends the child."""
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        self._control.close()


def serve_tasks(number: int, programs: dict[str, Any]) -> None:
    """Runs the requested programs in the child until the parent exits."""
    control = socket.socket(fileno=number)
    try:
        refuse_calls(control)
    except OSError as error:
        control.sendmsg([str(error).encode()])
        return
    while True:
        text = b""
        while not text.endswith(b"\n"):
            block = control.recvmsg(1 << 16)[0]
            if not block:
                return
            text += block
        name, *args = json.loads(text)
        answer = programs[name](*args)
        control.sendmsg([json.dumps(answer).encode() + b"\n"])
