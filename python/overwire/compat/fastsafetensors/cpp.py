"""Implements fastsafetensors' extension module for plug-ins that call it.

Memory is identified by its address. Reads run on threads of this module. overwire's own loads do not use the module.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import overwire
from overwire._compat_api import new_lock, regular, start_thread

_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]

# Bytes per read. With a GPU, each read goes through a host buffer of this size.
_PIECE = 16 << 20


class cpp_metrics:
    """The counters of this module. bounce_buffer_bytes: the total size of the host buffers that readers are using."""

    def __init__(self) -> None:
        self.bounce_buffer_bytes = 0


_metrics = cpp_metrics()
_lock = new_lock()


def get_cpp_metrics() -> cpp_metrics:
    return _metrics


def _lease(nbytes: int) -> None:
    with _lock:
        _metrics.bounce_buffer_bytes += nbytes


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def is_cuda_found() -> bool:
    """Returns whether there is a driver and a GPU."""
    driver = _library("libcuda.so.1")
    if driver is None or driver.cuInit(0) != 0:
        return False
    count = ctypes.c_int(0)
    return driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def is_hip_found() -> bool:
    return False


def is_cufile_found() -> bool:
    """Returns whether libcufile can be loaded."""
    return is_cuda_found() and _library("libcufile.so.0") is not None


def cufile_version() -> int:
    """Returns cuFile's version as 1000 * major + 10 * minor, or 0 without cuFile."""
    library = _library("libcufile.so.0") if is_cuda_found() else None
    version = ctypes.c_int(0)
    if library is None or library.cuFileGetVersion(ctypes.byref(version)) != 0:
        return 0
    return version.value


def is_gds_supported(device: int) -> int:
    """Returns 1 if GPUDirect Storage works, which needs libcufile and the kernel module nvidia-fs; else 0."""
    return int(is_cuda_found() and overwire.doctor()["gpudirect_storage"]["usable"])


def get_alignment_size() -> int:
    return 4096


def init_gds() -> int:
    return 0


def close_gds() -> int:
    return 0


def set_debug_log(enable: bool) -> None:
    """Does nothing: overwire logs to logging.getLogger("overwire")."""


def load_library_functions(cudart_lib_name: str = "") -> None:
    """Does nothing: no CUDA runtime library is needed."""


_gil_release = False


def set_gil_release(enable: bool) -> None:
    """Stores the flag. It has no effect, because the GIL is always released."""
    global _gil_release
    _gil_release = bool(enable)


def get_gil_release() -> bool:
    return _gil_release


def set_numa_node(node: int) -> int:
    """Returns 0. Does not move the caller's thread, because the engine places its own threads."""
    return 0


def get_device_pci_bus(device: int) -> str:
    """Returns the PCI address of a GPU, or "" if it does not exist."""
    driver = _library("libcuda.so.1") if is_cuda_found() else None
    number, text = ctypes.c_int(0), ctypes.create_string_buffer(64)
    if driver is None or driver.cuDeviceGet(ctypes.byref(number), device) != 0:
        return ""
    return text.value.decode().lower() if driver.cuDeviceGetPCIBusId(text, 64, number) == 0 else ""


def read_buffer(address: int, length: int) -> bytes:
    """Returns a copy of host memory."""
    # ctypes.string_at takes a 32-bit size before Python 3.14.
    return (ctypes.c_char * length).from_address(address).raw if length else b""


def cpu_malloc(length: int) -> int:
    """Allocates host memory, which `cpu_free` frees. Raises MemoryError if there is not enough memory."""
    address = _libc.malloc(max(length, 1))
    if not address:
        raise MemoryError(f"cpu_malloc: {length} bytes")
    return int(address)


def cpu_free(address: int) -> None:
    _libc.free(address)


def _gpu() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("gpu memory: no CUDA device, CUDA error 100 (cudaErrorNoDevice)")
    return torch


def gpu_malloc(length: int) -> int:
    """Allocates memory on the current GPU, from torch's allocator."""
    return int(_gpu().cuda.caching_allocator_alloc(length))


def gpu_free(address: int) -> None:
    _gpu().cuda.caching_allocator_delete(address)


def _tensor_at(address: int, length: int, cuda: bool) -> Any:
    # Returns the bytes at an address as a torch tensor that does not own them.
    from torch.utils.dlpack import from_dlpack

    from .dlpack import from_cuda_buffer
    from .st_types import Device, DeviceType, DType

    device = Device(DeviceType.CUDA, _gpu().cuda.current_device()) if cuda else Device()
    return from_dlpack(from_cuda_buffer(address, [length], [1], DType.U8, device))


def memcpy_h2d_async(dst: int, src: int, length: int) -> int:
    """Queues a copy to the current GPU. Returns 0, or raises RuntimeError with CUDA's error number."""
    try:
        _tensor_at(dst, length, True).copy_(_tensor_at(src, length, False), non_blocking=True)
    except RuntimeError as error:
        raise RuntimeError(f"memcpy_h2d_async: {error}") from error
    return 0


class gds_device_buffer:
    """Memory into which files are read: its address, its length, and whether it is on the GPU.

    owner: an object that keeps the memory alive; None if the caller keeps it alive.
    """

    def __init__(self, ptr: int, length: int, use_cuda: bool, owner: Any = None) -> None:
        self._ptr, self._length, self._cuda = int(ptr), int(length), bool(use_cuda)
        self.owner = owner

    def get_base_address(self) -> int:
        return self._ptr

    def get_length(self) -> int:
        return self._length

    def cufile_register(self, offset: int = 0, length: int = 0) -> int:
        """Returns 0: registration is not needed."""
        return 0

    def cufile_deregister(self, offset: int = 0) -> int:
        return 0

    def memmove(self, dst_off: int, src_off: int, tmp: gds_device_buffer, length: int) -> int:
        """Moves bytes inside the buffer. The ranges may overlap. Returns 0, or -1 if a range is not inside the buffer.
        `tmp` is ignored."""
        if length < 0 or min(dst_off, src_off) < 0 or max(dst_off, src_off) + length > self._length:
            return -1
        if self._cuda:
            whole = _tensor_at(self._ptr, self._length, True)
            whole[dst_off : dst_off + length].copy_(whole[src_off : src_off + length].clone())
        else:
            ctypes.memmove(self._ptr + dst_off, self._ptr + src_off, length)
        return 0

    def _write(self, at: int, data: Any) -> None:
        # data: bytes, or for a GPU a host tensor of bytes.
        _tensor_at(self._ptr + at, data.numel(), True).copy_(data)


class _Descriptor:
    # A shared file descriptor, which is closed when the last reference is dropped.

    number = -1  # -1 means that it is not set yet

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


class _Work:
    # The work of a reader's threads. This object does not refer to the reader, because the reader's finalizer waits for
    # the threads.

    def __init__(self, use_cuda: bool, device_id: int) -> None:
        self._cuda, self._device = bool(use_cuda), int(device_id)
        self.done: dict[int, int] = {}  # bytes read so far, for reads that track their progress
        self.moved = threading.Condition(new_lock())

    def _tell_reached(self, number: int, done: int) -> None:
        if number in self.done:
            with self.moved:
                self.done[number] = done
                self.moved.notify_all()

    def read_range(
        self, file: _Descriptor, buffer: gds_device_buffer, offset: int, length: int, ptr_off: int, number: int
    ) -> int:
        fd = file.number
        try:
            if self._cuda:
                return self._read_cuda(fd, buffer, offset, length, ptr_off, number)
            position = 0
            while position < length:
                size = min(_PIECE, length - position)
                into = (ctypes.c_char * size).from_address(buffer.get_base_address() + ptr_off + position)
                position += _check_read(os.preadv(fd, [into], offset + position), offset + position)
                self._tell_reached(number, position)
            return position
        finally:
            file.close()
            with self.moved:  # wake threads that wait for more bytes, to raise the error
                self.moved.notify_all()

    def _read_cuda(
        self, fd: int, buffer: gds_device_buffer, offset: int, length: int, ptr_off: int, number: int
    ) -> int:
        torch = _gpu()
        size = min(_PIECE, length)
        _lease(size)
        try:
            bounce = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            into = memoryview(bounce.numpy())
            position = 0
            with torch.cuda.device(self._device):
                while position < length:
                    count = _check_read(
                        os.preadv(fd, [into[: min(size, length - position)]], offset + position), offset + position
                    )
                    buffer._write(ptr_off + position, bounce[:count])
                    torch.cuda.synchronize()
                    position += count
                    self._tell_reached(number, position)
            return position
        finally:
            _lease(-size)


class _Reader:
    # Reads with a thread pool, which the first read starts. Calls in a forked child fail, because it lacks the threads.

    def __init__(self, max_threads: int, use_cuda: bool, device_id: int) -> None:
        self._threads, self._work = max(1, int(max_threads)), _Work(use_cuda, device_id)
        self._process = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[int, tuple[Future[int], int]] = {}
        self._numbers = itertools.count(1)

    def _submit_read(
        self, fd: int, buffer: gds_device_buffer, offset: int, length: int, ptr_off: int, track: bool = False
    ) -> int:
        self._refuse_child()
        if length < 0 or ptr_off < 0 or ptr_off + length > buffer.get_length():
            raise ValueError(f"submit_read: {length} bytes at {ptr_off} of a buffer of {buffer.get_length()}")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "overwire-fst")
        own = _Descriptor()
        own.number = os.dup(fd)  # the caller may close fd
        number = next(self._numbers)
        if track:
            self._work.done[number] = 0
        pool = self._pool

        def begin_read() -> None:
            future = pool.submit(self._work.read_range, own, buffer, offset, length, ptr_off, number)
            self._pending[number] = future, buffer.get_base_address() + ptr_off

        start_thread(begin_read)
        return number

    def wait_read(self, number: int) -> int:
        """Waits for a read and returns the address of its bytes. Raises the read's error, and ForkedError in a forked
        child."""
        self._refuse_child()
        if number not in self._pending:
            raise ValueError(f"wait_read: no read {number}")
        future, address = self._pending.pop(number)
        try:
            future.result()
        finally:
            self._work.done.pop(number, None)
            del future  # the traceback of its error refers to this frame, and would keep the reader alive
        return address

    def wait_read_prefix(self, number: int, length: int) -> int:
        """Waits for the first `length` bytes of a read that tracks its progress. Returns how many bytes have arrived.
        Raises the read's error, and ForkedError in a forked child."""
        self._refuse_child()
        if number not in self._pending or number not in self._work.done:
            raise ValueError(f"wait_read_prefix: no read {number} that tracks its progress")
        future, _ = self._pending[number]
        with self._work.moved:
            while self._work.done[number] < length and not future.done():
                self._work.moved.wait(0.05)  # the future is done shortly after the last notification
            count = self._work.done[number]
        if count < length:
            try:
                future.result()
            finally:
                del future
            raise ValueError(f"wait_read_prefix: {length} bytes of a read of {count}")
        return count

    def _refuse_child(self) -> None:
        if self._process != os.getpid():
            raise overwire.ForkedError("fastsafetensors: a reader works only in the process that made it: make another")

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None and self._process == os.getpid():
            pool.shutdown(wait=True, cancel_futures=False)


def _check_read(got: int, offset: int) -> int:
    if got == 0:
        raise RuntimeError(f"submit_read: the file is truncated: it ends before byte {offset}")
    return got


class nogds_file_reader(_Reader):
    """Reads ranges of open files into buffers."""

    def __init__(self, use_mmap: bool, bbuf_size_kb: int, max_threads: int, use_cuda: bool, device_id: int) -> None:
        super().__init__(max_threads, use_cuda, device_id)

    def submit_read(
        self, fd: int, dst: gds_device_buffer, offset: int, length: int, ptr_off: int, track_progress: bool = False
    ) -> int:
        """Starts a read and returns its number, which is above 0."""
        return self._submit_read(fd, dst, offset, length, ptr_off, track_progress)


class gds_file_handle(_Descriptor):
    """An open file."""

    def __init__(self, filename: str, o_direct: bool, use_cuda: bool) -> None:
        self.number = regular(filename)


class gds_file_reader(_Reader):
    """Like `nogds_file_reader`, but reads `gds_file_handle`s."""

    def submit_read(
        self, fh: gds_file_handle, dst: gds_device_buffer, offset: int, length: int, ptr_off: int, file_length: int = 0,
        track_progress: bool = False,
    ) -> int:  # fmt: skip
        """Starts a read and returns its number, which is above 0."""
        return self._submit_read(fh.number, dst, offset, length, ptr_off, track_progress)
