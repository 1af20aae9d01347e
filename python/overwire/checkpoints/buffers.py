"""Allocates a stager's host memory. The other ranks of the host can map this memory. A rank that gathers a tensor
copies blocks from the other ranks' memory, so these blocks need not be sent.

A buffer is an anonymous memory file. Other processes of the same user open this file through /proc, and recognise it by
its random name.
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
from .._undo import after_error
from ..errors import OutOfMemoryError

# How many bytes one thread allocates at a time.
_STEP = 64 << 20


class _Buffer(NamedTuple):
    begin: int
    nbytes: int
    descriptor: int
    name: str


class BufferOffset(NamedTuple):
    """The position of a block in one of an offer's buffers."""

    buffer: int
    offset: int


class Offer(NamedTuple):
    """Describes the buffers of a process to other processes: its host and process id, and the descriptor, name and size
    of each buffer."""

    host: str
    process: int
    buffers: tuple[tuple[int, str, int], ...]


_buffers: dict[int, _Buffer] = {}  # the buffers of this process, by address


def host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    """Allocates zeroed memory. Other processes can map it while a tensor uses it. If the system has no memory files,
    they cannot, and the blocks in the memory are sent.

    pinned: whether to page-lock the memory, for copies from a GPU. Raises OutOfMemoryError."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    name = f"overwire-{secrets.token_hex(12)}"
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    with after_error(os.close, descriptor):
        try:
            steps = [(descriptor, at, min(_STEP, nbytes - at)) for at in range(0, nbytes, _STEP)]
            with ThreadPoolExecutor(min(len(steps), os.cpu_count() or 1, 8)) as pool:
                list(start_thread(pool.map, lambda step: os.posix_fallocate(*step), steps))
            array = (ctypes.c_ubyte * nbytes).from_buffer(mmap.mmap(descriptor, nbytes))
            begin = ctypes.addressof(array)
            if pinned and int(torch.cuda.cudart().cudaHostRegister(begin, nbytes, 1)):  # type: ignore[no-untyped-call]
                text = f"overwire: CheckpointStager: cannot pin {nbytes} bytes of host memory"
                raise OutOfMemoryError(text, asked=nbytes)
        except OSError as error:
            text = f"overwire: CheckpointStager: cannot allocate {nbytes} bytes of host memory: {error.strerror}"
            raise OutOfMemoryError(text, asked=nbytes) from error
    _buffers[begin] = _Buffer(begin, nbytes, descriptor, name)
    weakref.finalize(array, _release, begin, pinned, os.getpid()).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _release(begin: int, pinned: bool, process: int) -> None:
    # Runs before the memory is unmapped.
    os.close(_buffers.pop(begin).descriptor)
    if pinned and os.getpid() == process:
        torch.cuda.cudart().cudaHostUnregister(begin)  # type: ignore[no-untyped-call]


def offer_buffers() -> Offer:
    """Returns the offer of this process. A `BufferOffset` is valid only together with the offer for which it was
    made."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
    except OSError:
        host = ""
    return Offer(host, os.getpid(), tuple((one.descriptor, one.name, one.nbytes) for one in list(_buffers.values())))


def find_block(tensor: torch.Tensor, offer: Offer) -> BufferOffset | None:
    """Returns a tensor's position in this process's buffers, or None if it is not contiguous or not in a buffer."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    begin = tensor.data_ptr()
    for one in list(_buffers.values()):
        if one.begin <= begin and begin + tensor.nbytes <= one.begin + one.nbytes:
            with contextlib.suppress(ValueError):  # the buffer may be newer than the offer
                return BufferOffset(offer.buffers.index((one.descriptor, one.name, one.nbytes)), begin - one.begin)
    return None


def map_buffers(offer: Offer) -> list[torch.Tensor] | None:
    """Maps the buffers of another process. Returns None if it is on another host, or if mapping is not permitted."""
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
