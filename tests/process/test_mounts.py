"""Tests saves to file systems that do not support a system call, which a seccomp filter simulates."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable

import pytest

# System call numbers by machine.
NUMBERS = {
    "x86_64": {"link": (86, 265), "ftruncate": (77,), "fsync": (74, 75), "fchmod": (91,), "pwrite": (18,), "rename": (82, 264, 316)},
    "aarch64": {"link": (37,), "ftruncate": (46,), "fsync": (82, 83), "fchmod": (52,), "pwrite": (68,), "rename": (38, 276)},
}.get(platform.machine(), {})

PROGRAM = """
import ctypes, errno, os, shutil, struct, sys
import torch
import overwire as ow
import torch.distributed.checkpoint as dcp
from overwire.checkpoints import CheckpointReader, CheckpointWriter
from overwire.stores import FileWriter

def refuse_calls(numbers, code):
    rows = [(0x20, 0, 0, 0), *((0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers))]
    rows += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x00050000 | code)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rows), ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
        os._exit(77)

def state(value):
    return {"w": torch.full((3000,), float(value)), "zeros": torch.zeros(3000)}

def save_checkpoint(value):
    dcp.save(state(value), storage_writer=CheckpointWriter("step"), no_dist=True)

def load_checkpoint():
    into = state(9)
    dcp.load(into, storage_reader=CheckpointReader("step"), no_dist=True)
    return into

def save_stream(value):
    with FileWriter("stream") as file:
        file.write(bytes([value]) * 10)

def load_stream():
    with open("stream", "rb") as file:
        return {"w": torch.tensor(list(file.read()))}

SAVES = {
    "stream": (save_stream, load_stream),
    "plain": (lambda value: ow.save_file(state(value), "p.safetensors", compress=False), lambda: ow.load_file("p.safetensors")),
    "compressed": (lambda value: ow.save_file(state(value), "c.safetensors"), lambda: ow.load_file("c.safetensors")),
    "shards": (lambda value: ow.save_file(state(value), "s/m.safetensors", max_shard_size=12000), lambda: ow.load_file("s")),
    "bundle": (lambda value: ow.save_bundle(state(value), "b.pkl"), lambda: ow.load_bundle("b.pkl")),
    "checkpoint": (save_checkpoint, load_checkpoint),
}

def in_child(body, *args):
    # This process starts no engine, so each child has its own.
    child = os.fork()
    if child == 0:
        try:
            body(*args)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def save_all():
    os.makedirs("old/s")
    os.chdir("old")
    for save, _ in SAVES.values():
        save(1)

def replace_all(call, code, error, says):
    os.chdir("new")
    if call == "pwrite":
        del SAVES["stream"]  # stream writes in order, without pwrite
    before = sorted(os.listdir())
    refuse_calls(NUMBERS[call], code)
    for name, (save, load) in SAVES.items():
        caught = None
        try:
            save(2)
        except BaseException as failure:  # CheckpointException is not an Exception
            caught = failure.failures[0][0] if hasattr(failure, "failures") else failure
        assert type(caught) is error and says in str(caught), (name, repr(caught))
        assert load()["w"][0].item() == (2 if error is type(None) else 1), name
    assert sorted(os.listdir()) == before, os.listdir()

assert in_child(save_all) == 0
for call, code, error, says in (
    ("ftruncate", errno.ENOSYS, type(None), ""),
    ("ftruncate", errno.EPERM, type(None), ""),
    ("link", errno.ENOSYS, type(None), ""),
    ("fsync", errno.EINVAL, type(None), ""),
    ("fchmod", errno.EPERM, type(None), ""),
    ("pwrite", errno.EINVAL, ow.IOFailure, "nvalid argument"),
    ("rename", errno.ENOSYS, ow.NotSupportedError, "the file system cannot"),
    ("rename", errno.EINVAL, ow.NotSupportedError, "the file system cannot"),
):
    shutil.copytree("old", "new")
    status = in_child(replace_all, call, code, error, says)
    if status:
        print(call, code)
        sys.exit(status)
    shutil.rmtree("new")
"""


def test_file_systems_that_lack_a_call(torch_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Files, shards, bundles and checkpoints can be saved without ftruncate, fsync or fchmod. Without pwrite or rename,
    a save raises an error that names the call, the old files stay, and no other file is left."""
    if not NUMBERS:
        pytest.skip(f"the system call numbers of {platform.machine()} are not known")
    done = torch_script(f"NUMBERS = {NUMBERS}\n{PROGRAM}", check=False)
    if done.returncode == 77:
        pytest.skip("this process may not install a seccomp filter")
    assert done.returncode == 0, done.stdout + done.stderr
