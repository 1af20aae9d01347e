"""Runs test programs in forks of one process that has already imported torch.

In a small test program, importing torch takes most of the time, so each pytest worker imports it once. `run` passes the
program to a process that has imported only torch and torch._dynamo, which many torch functions import when they are
called. This process forks, and the child runs the program like `python`, including the exit of the interpreter. Tests
of the import of torch, or of the time before it, use the fixture `script`, which starts a separate process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Programs run many times slower under AddressSanitizer or an emulator.
SLOWER = 10 if os.environ.get("OVERWIRE_TEST_SLOW") else 1


class _Parent:
    """The process that forks. It ends when `end` is called or when this process ends."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a fork would lose threads
            )  # fmt: skip
        self.socket = ours

    def end(self) -> None:
        self.socket.close()
        self.process.wait()


_parent: _Parent | None = None


def end() -> None:
    """Ends the process that forks, if it has been started."""
    global _parent
    if _parent is not None:
        _parent.end()
        _parent = None


def run(
    argv: Sequence[str | Path], *, cwd: Path | str | None = None, env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs a program like `subprocess.run([sys.executable, *argv], ...)` with text output. argv is "-c" and a program,
    or a file, followed by the arguments."""
    global _parent
    if _parent is None:
        _parent = _Parent()
        atexit.register(end)
    words = [str(word) for word in argv]
    job = {"argv": words, "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        text = json.dumps(job).encode()
        socket.send_fds(_parent.socket, [struct.pack("<q", len(text))], [out.fileno(), err.fileno()])
        _parent.socket.sendall(text)
        pid, status = _number(_parent.socket), None
        _parent.socket.settimeout(timeout * SLOWER)
        try:
            status = _number(_parent.socket)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            _parent.socket.settimeout(None)
            _number(_parent.socket)
        finally:
            _parent.socket.settimeout(None)
        out.seek(0)
        err.seek(0)
        said = [f.read().decode(errors="surrogateescape") for f in (out, err)]
    if status is None:
        raise subprocess.TimeoutExpired([sys.executable, *words], timeout, *said)
    return subprocess.CompletedProcess([sys.executable, *words], os.waitstatus_to_exitcode(status), *said)


def fresh(
    argv: Sequence[str | Path], *, cwd: Path | str | None = None, env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs a program like `run`, but in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout * SLOWER, check=False
    )


# Command lines of programs that import torch and that this process has started during the current test.
anew: list[str] = []
_IMPORTS = re.compile(r"(?:^|; ?)(?:import|from) (?:torch|transformers|diffusers|vllm)\b", re.M)


def watch() -> None:
    """Records programs that import torch in `anew` from now on. It recognises imports in the text of a program, but not
    imports through overwire."""
    sys.addaudithook(_started)


def _started(event: str, args: tuple[Any, ...]) -> None:
    if event != "subprocess.Popen" or not isinstance(args[1], (list, tuple)) or len(args[1]) < 2:
        return
    words = [os.fsdecode(word) for word in args[1]]
    if words[0] != sys.executable or words[1] == __file__:
        return
    text = words[2] if words[1] == "-c" else ""
    if words[1].endswith(".py"):
        with contextlib.suppress(OSError):
            text = Path(os.fsdecode(args[2] or "."), words[1]).read_text(encoding="utf-8")
    if _IMPORTS.search(text):
        anew.append(" ".join(words)[:300])


def _number(s: socket.socket) -> int:
    got = _exactly(s, 8)
    assert len(got) == 8, "the process that forks has ended"
    number: int = struct.unpack("<q", got)[0]
    return number


def _exactly(s: socket.socket, n: int) -> bytes:
    got = b""
    while len(got) < n and (more := s.recv(n - len(got))):
        got += more
    return got


def _serve(s: socket.socket) -> dict[str, Any]:
    """Forks a child for each job. Returns the job in the child, and never returns in the parent."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    while True:
        size, fds, _, _ = socket.recv_fds(s, 8, 2)
        if not size:
            os._exit(0)
        job: dict[str, Any] = json.loads(_exactly(s, struct.unpack("<q", size)[0]))
        if pid := os.fork():
            for fd in fds:
                os.close(fd)
            s.sendall(struct.pack("<q", pid))
            s.sendall(struct.pack("<q", os.waitpid(pid, 0)[1]))
            continue
        s.close()
        os.setsid()
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        for fd in fds:
            os.close(fd)
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        rest = (path for path in sys.path[1:] if path not in own)
        # The parent folder has modules that the test folders share.
        sys.path[:] = ["", *named, *rest, str(Path(__file__).parent)]
        return job


def _begin(argv: list[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Returns the code of a program, which will run in a new `__main__`."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        return compile(argv[1], "<string>", "exec"), main.__dict__
    sys.argv = list(argv)
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    main.__file__ = argv[0]
    return compile(Path(argv[0]).read_bytes(), argv[0], "exec"), main.__dict__


if __name__ == "__main__":
    import ctypes
    import gc

    threads = os.listdir("/proc/self/task")  # an emulator may have its own threads

    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()  # otherwise, a collection in a child would copy pages of the imports

    assert os.listdir("/proc/self/task") == threads, "a fork would lose threads"
    # Skips the exit handlers of torch's libraries. They unregister each kernel, which takes half a second of CPU time
    # per child. Libraries that are loaded later are ended before this.
    libc = ctypes.CDLL(None)
    assert libc.on_exit(libc._exit, None) == 0
    exec(*_begin(_serve(socket.socket(fileno=int(sys.argv[1])))["argv"]))
