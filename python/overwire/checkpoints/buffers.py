"""Host memory of a stager, which the other ranks of the host can map: a rank that gathers a
tensor then copies their blocks from there, and nothing is sent.

A buffer is a memory file without a name in any folder. Another process of the user reaches
it through /proc, and knows it by a random name.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from .._imports import start_thread
from ..errors import OutOfMemoryError

# What one thread allocates at once.
_STEP = 64 << 20


class _Buffer(NamedTuple):
    begin: int
    nbytes: int
    descriptor: int
    name: str


class BufferOffset(NamedTuple):
    """Where a block is in the buffers of an offer."""

    buffer: int
    offset: int


class Offer(NamedTuple):
    """The buffers of a process, as it tells the others: its host, its id, and of each the descriptor, name and
    bytes."""

    host: str
    process: int
    buffers: tuple[tuple[int, str, int], ...]


_buffers: dict[int, _Buffer] = {}  # those of this process, by address


def host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    """New memory of that many bytes, zero, which other processes can map while any tensor has it.

    pinned: for copies of a GPU. Raises OutOfMemoryError. Where the system gives no memory files, other
    processes cannot map it: what lies in it is sent."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    name = f"overwire-{secrets.token_hex(12)}"
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    try:
        steps = [(descriptor, at, min(_STEP, nbytes - at)) for at in range(0, nbytes, _STEP)]
        with ThreadPoolExecutor(min(len(steps), os.cpu_count() or 1, 8)) as pool:
            list(start_thread(pool.map, lambda step: os.posix_fallocate(*step), steps))
        array = (ctypes.c_ubyte * nbytes).from_buffer(mmap.mmap(descriptor, nbytes))
        begin = ctypes.addressof(array)
        if pinned and int(torch.cuda.cudart().cudaHostRegister(begin, nbytes, 1)):  # type: ignore[no-untyped-call]
            raise OutOfMemoryError(
                f"overwire: CheckpointStager: {nbytes} bytes of the host cannot be pinned", asked=nbytes
            )
    except OSError as error:
        os.close(descriptor)
        raise OutOfMemoryError(
            f"overwire: CheckpointStager: {nbytes} bytes of the host: {error.strerror}", asked=nbytes
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    _buffers[begin] = _Buffer(begin, nbytes, descriptor, name)
    weakref.finalize(array, _release, begin, pinned, os.getpid()).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _release(begin: int, pinned: bool, process: int) -> None:
    # Before the memory is unmapped.
    os.close(_buffers.pop(begin).descriptor)
    if pinned and os.getpid() == process:
        torch.cuda.cudart().cudaHostUnregister(begin)  # type: ignore[no-untyped-call]


def offer_buffers() -> Offer:
    """What this process tells the others. Its buffers keep their places in it until the next call."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
    except OSError:
        host = ""
    return Offer(host, os.getpid(), tuple((one.descriptor, one.name, one.nbytes) for one in list(_buffers.values())))


def find_block(tensor: torch.Tensor, offer: Offer) -> BufferOffset | None:
    """Where a tensor is in this process's buffers; None: in none, or not contiguous."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    begin = tensor.data_ptr()
    for one in list(_buffers.values()):
        if one.begin <= begin and begin + tensor.nbytes <= one.begin + one.nbytes:
            with contextlib.suppress(ValueError):  # a buffer that came after the offer
                return BufferOffset(offer.buffers.index((one.descriptor, one.name, one.nbytes)), begin - one.begin)
    return None


def map_buffers(offer: Offer) -> list[torch.Tensor] | None:
    """Another process's buffers; None if it is on another host, or this one may not map them."""
    if not offer.host or offer.host != offer_buffers().host:
        return None
    tensors = []
    for descriptor, name, nbytes in offer.buffers:
        path = f"/proc/{offer.process}/fd/{descriptor}"
        try:
            if f"/memfd:{name}" not in os.readlink(path):
                return None
            number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory: Any = mmap.mmap(number, nbytes)
            finally:
                os.close(number)
        except (OSError, ValueError):
            return None
        tensors.append(torch.frombuffer(memory, dtype=torch.uint8))
    return tensors
