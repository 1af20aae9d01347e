"""Tests that calls in a process with too few resources succeed or raise a typed error, and never end the process."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from process_helper import run, write_plain


def test_first_calls_without_descriptors(tmp_path: Path) -> None:
    """With any number of free descriptors, the first call succeeds or raises an OSError, and later calls succeed."""
    target = tmp_path / "to" / "b.safetensors"
    target.parent.mkdir()
    source = write_plain(tmp_path / "a.safetensors", {"x": ("U8", [1 << 16], bytes(1 << 16))})
    run(
        """
import resource
import overwire as ow
source, target = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
failed = []
for free in range(12):
    child = os.fork()
    if child == 0:
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for number in taken[:free]:
            os.close(number)
        failed = False
        try:
            ow.convert(source, target)
        except OSError:
            failed = True
        for number in taken[free:]:
            os.close(number)
        ow.convert(source, target)
        os._exit(failed)
    failed.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert set(failed) == {0, 1}, failed
assert failed == sorted(failed, reverse=True), failed
assert os.listdir(os.path.dirname(target)) == [os.path.basename(target)]
""",
        source,
        target,
    )


def test_limits_are_read_without_proc() -> None:
    """In a sandbox without /proc, limits are still checked before the engine starts. Otherwise Go's runtime would end
    the process."""
    run(
        """
import builtins, resource
from overwire import _engine
resource.setrlimit(resource.RLIMIT_AS, (1 << 45, 1 << 46))
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, 64 << 20))
resource.setrlimit(resource.RLIMIT_NPROC, (1 << 14, 1 << 14))
usual, real = _engine._read_limits(), open
def refuse(path, *mode):
    if path == "/proc/self/limits":
        raise FileNotFoundError(path)
    return real(path, *mode)
builtins.open = refuse
assert _engine._read_limits() == {name: usual[name] for name in _engine._LIMITS}
assert list(_engine._read_limits().values()) == [1 << 45, 8 << 20, 1 << 14]
"""
    )


def test_the_engine_starts_without_free_descriptors(tmp_path: Path) -> None:
    """If no descriptor is free, starting the engine raises IOFailure with the system's errno. A later call starts the
    engine."""
    source = write_plain(tmp_path / "a.safetensors", {"x": ("U8", [1 << 16], bytes(1 << 16))})
    run(
        """
import errno, json, resource
import overwire as ow
from overwire import _engine, _verbs
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
try:
    _engine.open_library()
except errors.IOFailure as error:
    number = error.errno
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
assert number == errno.EMFILE
ow.inspect(sys.argv[1])
""",
        source,
    )


def test_first_call_in_a_small_address_space(tmp_path: Path) -> None:
    """With any limit on address space (`ulimit -v`), the first call succeeds or raises MemoryError."""
    source = write_plain(tmp_path / "a.safetensors", {"x": ("U8", [1 << 16], bytes(1 << 16))})
    run(
        """
import resource
import overwire as ow, overwire.errors, overwire.verbs.results
used = int(open("/proc/self/statm").read().split()[0]) * 4096
failed = []
for free in (256, 768, 1152, 1280, 1350, 1400, 1450, 1500, 1600, 32768):
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (used + (free << 20), resource.RLIM_INFINITY))
        try:
            ow.inspect(sys.argv[1])
        except MemoryError:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            ow.inspect(sys.argv[1])
            os._exit(1)
        os._exit(0)
    failed.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert failed[0] == 1 and failed[-1] == 0 and set(failed) == {0, 1}, failed
""",
        source,
    )


def test_first_call_with_few_threads(tmp_path: Path) -> None:
    """With any limit on threads (`ulimit -u`), the first call succeeds, or raises a MemoryError that names the
    limit."""
    source = write_plain(tmp_path / "a.safetensors", {"x": ("U8", [1 << 16], bytes(1 << 16))})
    program = """
import os, resource, sys
import overwire as ow, overwire.errors, overwire.verbs.results
failed = []
for most in (1, 3, 6, 10, 4096):
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        try:
            ow.inspect(sys.argv[1])
        except MemoryError as error:
            assert "threads" in str(error) and "ulimit -u" in str(error)
            os._exit(1)
        os._exit(0)
    failed.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert failed[0] == 1 and failed[-1] == 0 and set(failed) == {0, 1}, failed
"""
    as_user: list[str] = []
    if os.geteuid() == 0:  # the limit does not apply to root
        if not (setpriv := shutil.which("setpriv")):
            pytest.skip("no setpriv to drop root privileges (Debian: util-linux)")
        rights = "+dac_override,+dac_read_search"
        as_user = [setpriv, f"--reuid={54321 + os.getpid() % 1000}", f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    done = subprocess.run([*as_user, sys.executable, "-c", program, source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


EVERY_WRITER = """
import os, sys
import numpy as np
import overwire as ow
from overwire import stores
folder = sys.argv[1]
tensors = {"x": np.arange(1 << 16, dtype="f4"), "y": np.arange(9)}
def wrote(name, write):
    for _ in range(2):  # the second write replaces the file
        write(folder + name)
        assert os.path.exists(folder + name), name
def stream(path):
    with stores.FileWriter(path) as file:
        file.write(b"bytes")
wrote("/a.safetensors", lambda path: ow.save_file(tensors, path))
wrote("/s.safetensors.index.json", lambda path: ow.save_file(tensors, folder + "/s.safetensors", max_shard_size=9))
wrote("/b.safetensors", lambda path: ow.convert(folder + "/a.safetensors", path, compress=False))
wrote("/p.pkl", lambda path: ow.save_bundle(tensors, path))
wrote("/d.safetensors", lambda path: ow.save_delta(tensors | {"y": np.ones(9, "i8")}, tensors, path))
wrote("/f.bin", stream)
for name in ("a.safetensors", "b.safetensors", "s.safetensors.index.json"):
    assert (ow.load_file(f"{folder}/../{os.path.basename(folder)}/{name}", framework="np")["x"] == tensors["x"]).all()
assert (ow.load_bundle(folder + "/p.pkl")["x"] == tensors["x"]).all()
assert open(folder + "/f.bin").read() == "bytes"
assert not [name for name in os.listdir(folder) if ".overwire-" in name]
"""


def test_writers_without_a_working_folder(tmp_path: Path) -> None:
    """If the working folder was removed, every writer and reader works with absolute paths."""
    gone = tmp_path / "gone"
    gone.mkdir()
    run("import sys, os\nos.rmdir(os.getcwd())\n" + EVERY_WRITER, tmp_path, cwd=gone)


def test_writers_without_proc(tmp_path: Path) -> None:
    """Every writer and reader works without /proc, as in some sandboxes."""
    hide = ["unshare", "-m", "sh", "-c", 'umount -l /proc && exec "$@"', "sh"]
    if subprocess.run([*hide, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot unmount /proc")
    subprocess.run([*hide, sys.executable, "-c", EVERY_WRITER, tmp_path], check=True, timeout=240)


REFUSED_CALLS = """
import ctypes, struct
# x86-64: fadvise64, fallocate, preadv2, renameat2, memfd_create, copy_file_range, statx, io_uring_setup, openat2,
# cachestat, getxattr, prlimit64, sync_file_range, mbind
refused = [221, 285, 327, 316, 319, 326, 332, 425, 437, 451, 191, 302, 277, 237]
code = struct.pack("HBBI", 0x20, 0, 0, 0)  # the number of the system call
for at, number in enumerate(refused):
    code += struct.pack("HBBI", 0x15, len(refused) - at, 0, number)
code += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000) + struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | 38)  # ENOSYS
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Program(len(code) // 8, code))) == 0
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the system call numbers are those of x86-64")
def test_writers_on_an_old_system(tmp_path: Path) -> None:
    """Every writer and reader works if the system refuses rare and newer system calls, as old kernels and sandboxes
    do."""
    run(REFUSED_CALLS + EVERY_WRITER, tmp_path)


def test_errors_have_the_systems_errno(tmp_path: Path) -> None:
    """An OSError has the system's errno, even after pickling, so that programs can recognise a full disk."""
    run(
        """
import errno, pickle, resource
import numpy as np
import overwire as ow
folder, numbers = sys.argv[1], []
def note(call, *args):
    try:
        call(*args)
    except OSError as error:
        numbers.append((error.errno, pickle.loads(pickle.dumps(error)).errno))
note(lambda: ow.load_file(folder + "/absent.safetensors", framework="np"))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
note(lambda: ow.save_file({"x": np.ones(1 << 16)}, folder + "/x.safetensors"))
assert numbers == [(one, one) for one in (errno.ENOENT, errno.EFBIG)], numbers
assert os.listdir(folder) == []
""",
        tmp_path,
    )


def test_errors_of_python_code_have_the_systems_errno(
    torch_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Errors of system calls in Python code also have errno and file name, even after they were sent from another
    process and a rank has added its number."""
    torch_script(
        """
import concurrent.futures, errno, multiprocessing, os, pickle, resource
import torch
import overwire as ow
from overwire.checkpoints.places import Place
from overwire.distributed.group import _name_rank, _pickle_error
folder = os.getcwd()
plain, loop, weights = folder + "/plain", folder + "/loop", folder + "/x.pt"
open(plain, "wb").close()
os.symlink(loop, loop)
torch.save({"x": torch.ones(4)}, weights)
ow.convert(weights, folder + "/y.safetensors")

def raised(call, *args):
    try:
        call(*args)
    except ow.OverwireError as error:
        return error
    raise AssertionError("nothing is raised")

def without_descriptors(call, *args):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        call(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

def raise_error(error):
    raise error

def begin(target):
    Place(target, None, True).begin()

def bundle(target):
    ow.save_bundle({"x": torch.ones(4)}, target)

def read(path):
    from overwire.files import read_file
    read_file(path)

limits = resource.getrlimit(resource.RLIMIT_NOFILE)
cases = [
    (errno.ENOTDIR, ow.IOFailure, plain + "/below", bundle, plain + "/below/x.pkl"),
    (errno.EMFILE, ow.IOFailure, folder + "/step", without_descriptors, begin, folder + "/step"),
    (errno.ELOOP, ow.IOFailure, loop, read, loop),
    (errno.ENOENT, ow.NotFoundError, folder + "/absent", read, folder + "/absent"),
    (errno.EMFILE, ow.IOFailure, plain, without_descriptors, read, plain),
    (errno.EMFILE, ow.IOFailure, weights, without_descriptors, ow.convert, weights, folder + "/z.safetensors"),
]
with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
    for number, kind, name, call, *args in cases:
        here = raised(call, *args)
        for error in (
            here, pickle.loads(pickle.dumps(here)), raised(pool.submit(raise_error, here).result),
            _name_rank(1, pickle.loads(_pickle_error(here))),
        ):
            assert type(error) is kind and error.errno == number, (here, error)
            assert error.filename == name and error.source == here.source, (error.filename, name)
"""
    )
