"""Implements the frame of torch tensors. Importing this module imports torch.

The engine's capsules become tensors without a copy. Each tensor has its own storage, of exactly its bytes, in the
engine's memory. The memory is freed with the storage.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from .. import _verbs
from .._tables import FLOATS
from ..dtypes import CALLED, PACKED, named, packed_shape
from ..errors import ArgumentError, DeviceError, NotSupportedError, OutOfMemoryError, OverwireError
from .frame import ODD, Columns, Frame, check_empty
from .memory import cast_tensor, check_memory, check_shape, copy_of, is_ready, refuse_fakes

if TYPE_CHECKING:
    from .views import Bytes, View

# The C function, if this torch has it, because torch's Python wrapper takes a quarter longer.
from_dlpack: Any = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)
_to_dlpack: Any = getattr(torch.utils.dlpack, "to_dlpack")  # noqa: B009  typed as private

# The dtypes of the installed torch. Older versions lack some.
_TYPES: dict[str, torch.dtype] = {name: getattr(torch, one) for name, one in CALLED.items() if hasattr(torch, one)}
SAVED = {dtype: name for name, dtype in _TYPES.items()}
_REAL = frozenset(dtype for dtype in SAVED if not dtype.is_complex)


def torch_dtype(name: str) -> torch.dtype | None:
    """Returns torch's dtype for a dtype name in a file, or None if the installed torch lacks it."""
    return _TYPES.get(name)


@cache
def _takes_natively(name: str) -> bool:
    # Returns whether torch accepts capsules of this dtype unchanged. This is tested with a capsule, because torch added
    # DLPack dtypes one at a time.
    if name in PACKED or name not in _TYPES:
        return False
    try:
        probe = torch.empty(0, dtype=torch.uint8).view(_TYPES[name])
        # __dlpack__ cannot be used, because torch.compile traces it, and fails instead of skipping it.
        return bool(from_dlpack(_to_dlpack(probe)).dtype == _TYPES[name])
    except (RuntimeError, BufferError, TypeError):
        return False


# Integer dtypes, by the number of bytes of an element.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def _errors_of(device: str, wanted: int = 0) -> Iterator[None]:
    # Converts torch's GPU errors to overwire's, and protects CUDA graphs that other threads are capturing.
    from ..captures import beside_captures  # loads to the host do not need that module

    try:
        with beside_captures():
            yield
    except OverwireError:
        raise
    except torch.OutOfMemoryError as error:
        free, total = _free_memory(device)
        room = "" if free is None else f"{free} of {total} are free: "
        text = f"overwire: cannot allocate {wanted} bytes of tensors on {device}: {room}{error}"
        raise OutOfMemoryError(text, asked=wanted, free=free, total=total) from error
    except (RuntimeError, AssertionError) as error:  # no driver, or no such device
        raise DeviceError(f"overwire: device {device!r}: {error}") from error


def _free_memory(device: str) -> tuple[int | None, int | None]:
    from ..captures import beside_captures

    try:
        with beside_captures():
            free, total = torch.cuda.mem_get_info(torch.device(device))
        return free, total
    except (RuntimeError, AssertionError):
        return None, None


# torch's allocator requests 2 MiB at a time from the driver, or 20 MiB for a tensor of 1 to 10 MiB. Single allocations
# thus waste memory, and each request pauses copies for 0.1 ms. So tensors above `_LEAST` share allocations of at most
# `_GROUP`. If all tensors are made in one batch, the limit is `_LARGE_GROUP`, because several processes may then make
# requests at the same time, and the driver serves requests one by one. Each tensor begins at a multiple of `_ROUND`.
_ROUND, _LEAST, _GROUP, _LARGE_GROUP = 512, 1 << 20, 1 << 30, 4 << 30

_CONFIGURED = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


# The GPUs where an earlier load made shared allocations. Blocks that torch caches there have the sizes of groups.
_gpus_of_groups: set[int | None] = set()


def _group_sizes(sizes: Sequence[int], largest: int) -> list[list[int]]:
    """Divides tensors into groups of at most `largest` bytes, which share an allocation. Returns their positions."""
    groups: list[list[int]] = []
    group: list[int] = []
    nbytes = largest
    for at, size in enumerate(sizes):
        if not _LEAST < size < largest:
            groups.append([at])
        elif nbytes + size <= largest:
            group.append(at)
            nbytes += size
        else:
            groups.append(group := [at])
            nbytes = size
    return groups


def divide_into_batches(
    sizes: Sequence[int], idle: int, gpu: int | None, first: int, most: int
) -> Iterator[list[list[int]]]:
    """Yields a load's tensors in batches of groups, by position. If torch's `idle` cached bytes are enough, there is
    only one batch. Otherwise the first batch has `first` tensors, and each further batch has twice as many, up to
    `most`. Each tensor is a group by itself if `gpu` is None, or if idle memory is enough and no earlier load made
    groups on the GPU. The groups of a batch are sorted by size. torch uses the smallest free block that is large
    enough, so in a repeated load each group gets the same block again."""
    groups = _group_sizes(sizes, _GROUP if first < len(sizes) else _LARGE_GROUP)
    batch, count = list[list[int]](), 0
    if idle >= sum(sizes):
        first = len(sizes)
    for number, group in enumerate(groups, 1):
        batch.append(group)
        count += len(group)
        if count < first and number < len(groups):
            continue
        idle -= sum(sizes[at] for group in batch for at in group)
        if idle < 0 and gpu is not None:
            _gpus_of_groups.add(gpu)
        if gpu not in _gpus_of_groups:
            batch = [[at] for group in batch for at in group]
        yield sorted(batch, key=lambda group: _round_sizes(sizes[at] for at in group))
        batch, count, first = [], 0, max(first, min(2 * first, most))


def _round_sizes(sizes: Iterable[int]) -> int:
    # Returns how many bytes torch allocates for contiguous tensors of these sizes.
    return sum(-(-size // _ROUND) * _ROUND for size in sizes)


def _divides_memory() -> bool:
    """Returns whether torch's allocator caches freed memory and splits it for later allocations."""
    if torch.cuda.get_allocator_backend() != "native" or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return False
    return not any("max_split_size" in os.environ.get(name, "") for name in _CONFIGURED)


def _idle_memory(device: torch.device) -> int:
    """Returns the bytes on a GPU that torch's allocator caches and no tensor uses."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    sums = [stats[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes") if stats]
    return int(sums[0] - sums[1]) if sums else 0  # the statistics are empty before torch has used a GPU


def unused(device: str) -> int:
    """Returns the free bytes of a GPU, without torch's cached memory, or 0 if the number is unknown."""
    return _free_memory(device)[0] or 0


def around(device: str) -> tuple[int, bool]:
    """Returns the state of torch that affects new tensors: its current stream, and whether inference mode is on.
    This function is called for each tensor that was read ahead, so unlike `stream_of` it does not call the engine or
    change torch's device."""
    index: int = _number_of(device)
    try:
        return torch._C._cuda_getCurrentRawStream(index), torch.is_inference_mode_enabled()
    except RuntimeError as error:  # no driver, or no such device
        stream_of(device)  # raises a clearer error if this call also fails
        raise DeviceError(f"overwire: device {device!r}: {error}") from error


@cache
def _number_of(device: str) -> int:
    return int(torch.device(device).index)


def give_back(device: str) -> None:
    """Makes torch's allocator return its unused memory to the device."""
    _collect_garbage()
    with _errors_of(device):
        torch.cuda.empty_cache()


def _collect_garbage() -> None:
    # Loaders that make thousands of modules disable the cycle collector. A load must not fail if a collection could
    # free memory.
    if not gc.isenabled():
        gc.collect()


def stream_of(device: str) -> int:
    """Returns torch's current stream in DLPack's numbering, in which 1 is the default stream.

    The engine waits for the stream's queued work before it writes to memory of torch's allocator, because the work may
    still use that memory. Raises NotSupportedError if the stream is being captured into a CUDA graph.
    """
    with _errors_of(device):
        _refuse_capture(device)
        return torch.cuda.current_stream(torch.device(device)).cuda_stream or 1


def _refuse_capture(device: Any) -> None:
    from ..captures import refuse_capture

    with torch.cuda.device(torch.device(device)):
        refuse_capture(torch)


def used_on(device: str) -> None:
    """Registers torch's current stream with the engine before tensors in the engine's memory are used on
    it. The memory then outlives the queued work.

    An external stream (`torch.cuda.ExternalStream`) is not registered, because its owner may destroy it at any time.
    """
    with _errors_of(device):
        _refuse_capture(device)
        stream = torch.cuda.current_stream(torch.device(device))
    if stream.cuda_stream and stream.stream_id != stream.cuda_stream:
        _verbs.gpu_used(stream.device_index, stream.cuda_stream)


def on_gpu(data: Any) -> bool:
    """Returns whether the engine can read a tensor or storage in place on a GPU."""
    return data.is_cuda and torch.version.cuda is not None


@cache
def _device_number(device: torch.device) -> int:
    """Returns 1 + the number of a tensor's GPU, or 0 for the host."""
    if device.type == "meta":
        raise ArgumentError("overwire: a tensor on the meta device has no bytes")
    if device.type == "cuda" and torch.version.cuda is not None:
        return int(device.index) + 1
    if device.type != "cpu":
        text = f"overwire: a tensor on {device}: only memory of the CPU and of NVIDIA GPUs can be read"
        raise NotSupportedError(text)
    return 0


def await_writes(data: Any) -> int:
    """Waits for the work that is queued on a GPU tensor's current stream, and returns 1 + the GPU's number. Returns 0
    for host memory. The engine's reads, unlike torch's copies to the host, do not wait for streams."""
    if not data.is_cuda:
        return 0
    await_stream(data.device)
    return int(data.device.index) + 1


def await_stream(device: Any) -> None:
    """Waits for the work that is queued on a GPU's current stream."""
    with _errors_of(str(device)):
        _refuse_capture(device)
        torch.cuda.current_stream(device).synchronize()


def describe_all(tensors: Iterable[Any], made: Columns) -> None:
    """Adds tensors to columns. There may be tens of thousands of tensors, so the function reads each property once, and
    makes no lasting objects, which would trigger garbage collections."""
    kinds: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}
    dtype_names, real, layout, kin = SAVED, _REAL, torch.strided, torch.Tensor
    nvidia, pairs = torch.version.cuda is not None, _TYPES.get("F4")
    add_kind, add_pointer = made.kinds.append, made.pointers.append
    add_size, add_cuda = made.sizes.append, made.cuda.append
    for tensor in tensors:
        kind, pointer, size, cuda = ODD, 0, 0, 0
        try:
            if (
                isinstance(tensor, kin)
                and (dtype := tensor.dtype) in dtype_names
                and tensor.layout is layout
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and (dtype in real or not tensor.is_conj())
                and (tensor.is_cpu or (nvidia and tensor.is_cuda))
            ):
                key = (dtype, tensor.shape)
                kind = kinds.get(key, ODD)
                if kind == ODD and (dtype is not pairs or key[1]):
                    name = dtype_names[dtype]
                    shape = (*key[1][:-1], key[1][-1] * 2) if dtype is pairs else tuple(key[1])
                    kind = kinds[key] = made.types.setdefault((name, shape), len(made.types))
                if kind != ODD and (size := tensor.nbytes):
                    pointer = tensor.data_ptr()
                    end = size + tensor.storage_offset() * dtype.itemsize
                    if not pointer or tensor.untyped_storage().nbytes() < end:
                        kind = ODD  # a subclass without its own memory, or a shortened storage
                cuda = tensor.get_device() + 1
        except (RuntimeError, ValueError):  # a nested or uninitialized tensor, which has no shape
            kind = ODD
        add_kind(kind)
        add_pointer(pointer)
        add_size(size)
        add_cuda(cuda)


class TorchFrame(Frame):
    """The frame of torch; see `frame.Frame`."""

    name = "torch"
    make = staticmethod(from_dlpack)
    refuse_mode = staticmethod(refuse_fakes)

    def raw(self, dtypes: Iterable[str]) -> bool:
        return not all(map(_takes_natively, dtypes))

    def adopt(self, capsule: Any, pointer: int, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        if capsule is None or 0 in shape:
            return self.empty(dtype, shape, device)
        tensor = from_dlpack(capsule)
        if tensor.dtype is _TYPES.get(dtype) and dtype not in PACKED:
            return tensor
        if dtype not in PACKED:
            return tensor.view(self._type_of(dtype))
        # F4 becomes torch's dtype of pairs, with the last dimension halved. Dtypes that torch lacks stay bytes.
        return tensor.view(torch.uint8).reshape(-1).view(self._type_of(dtype)).view(packed_shape(dtype, shape))

    def of_bytes(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        kind = self._type_of(dtype)
        if 0 in shape:
            return self.empty(dtype, shape)
        shape = packed_shape(dtype, shape) if dtype in PACKED else shape
        return torch.frombuffer(data, dtype=torch.uint8).view(kind).view(shape)

    def empty(self, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        check_empty(dtype, shape)
        if dtype in PACKED:
            shape = packed_shape(dtype, shape)
        return torch.empty(shape, dtype=self._type_of(dtype), device=device)

    def empty_on(self, device: str, rows: Sequence[Any]) -> list[Any]:
        tensors: dict[int, Any] | None = None
        with contextlib.suppress(OutOfMemoryError):
            tensors = next(self.empty_in_batches(device, rows, len(rows), len(rows)), {})
        if tensors is None:  # the error, and the tensors made before it, are freed
            _collect_garbage()
            _verbs.empty_cache()  # there may be enough memory without the engine's staging memory
            tensors = next(self.empty_in_batches(device, rows, len(rows), len(rows)))
        return [tensors[at] for at in range(len(rows))]

    def empty_in_batches(self, device: str, rows: Sequence[Any], first: int, most: int) -> Iterator[dict[int, Any]]:
        where, sizes, idle, gpu = torch.device(device), [row[3] for row in rows], 0, None
        if where.type == "cuda":
            with _errors_of(device):
                idle, gpu = _idle_memory(where), where.index if _divides_memory() else None
        for batch in divide_into_batches(sizes, idle, gpu, first, most):
            with _errors_of(device, sum(sizes[at] for group in batch for at in group)):
                tensors = self._make_batch(where, rows, batch)
            yield tensors

    def _make_batch(self, where: torch.device, rows: Sequence[Any], groups: Iterable[list[int]]) -> dict[int, Any]:
        # There may be tens of thousands of tensors. empty_strided takes half the time of empty, because
        # torch checks the arguments of empty against several signatures.
        new = torch.empty_strided
        strides: dict[tuple[int, ...], list[int]] = {}
        tensors: dict[int, Any] = {}
        for group in groups:
            if len(group) > 1:
                with contextlib.suppress(torch.OutOfMemoryError):  # single tensors may still fit
                    # This block is freed immediately, and the allocator splits it for the next tensors.
                    new((_round_sizes(rows[at][3] for at in group),), (1,), dtype=torch.uint8, device=where)
            for at in group:
                _, dtype, shape, *_ = rows[at]
                if dtype in PACKED:
                    tensors[at] = self.empty(dtype, shape, str(where))
                    continue
                if (dense := strides.get(shape)) is None:
                    dense = strides[shape] = [1] * len(shape)
                    for dim in range(len(shape) - 1, 0, -1):
                        dense[dim - 1] = dense[dim] * max(shape[dim], 1)
                tensors[at] = new(shape, dense, dtype=self._type_of(dtype), device=where)
        return tensors

    def _type_of(self, name: str) -> torch.dtype:
        if name.startswith("F6_"):
            return torch.uint8
        try:
            return _TYPES[name]
        except KeyError:
            todo = "install a newer torch, or load with framework='np'"
            raise NotSupportedError(f"overwire: torch {torch.__version__} has no dtype for {name}; {todo}") from None

    def dtype(self, wanted: Any) -> Any:
        if isinstance(wanted, torch.dtype):
            return wanted
        name = named(wanted)
        if isinstance(name, str):
            dtype = _TYPES.get(name) or getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        why = "expected a torch.dtype, or a name: 'bfloat16', 'float16', 'float8_e4m3fn'"
        raise ArgumentError(f"overwire: dtype {wanted!r}: {why}")

    def name_of(self, wanted: Any) -> str:
        return SAVED.get(wanted, "")

    def cast(self, tensor: Any, dtype: str, wanted: Any) -> Any:
        return cast_tensor(tensor, wanted) if dtype in FLOATS else tensor

    def index(self, tensor: Any, index: tuple[Any, ...], dtype: str) -> Any:
        if dtype == "F4":
            # torch cannot index pairs, but it can index bytes, if the index does not divide pairs.
            return self.index(tensor.view(torch.uint8), index, "U8").view(_TYPES["F4"])
        flips, forward, at = [], [], 0
        for entry in index:
            if isinstance(entry, slice) and (entry.step or 1) < 0:
                entry, flip = _rising_slice(entry)
                if flip:
                    flips.append(at)
            if not isinstance(entry, int):
                at += 1
            forward.append(entry)
        result = tensor[tuple(forward)]
        if flips:
            # torch cannot flip float8 or uint32.
            return copy_of(result.view(_WORDS[result.element_size()]), None, flips).view(result.dtype)
        if result.numel() == tensor.numel() and result.is_contiguous():
            return tensor.view(result.shape)  # only the dimensions changed
        return copy_of(result)  # a view would keep the memory of all elements alive

    def view(self, tensor: Any) -> View:
        from .views import View

        check_shape(tensor, "overwire")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            text = f"sparse and quantized tensors are not supported ({tensor.layout}); pass their parts"
            raise NotSupportedError(f"overwire: {text}")
        check_memory(tensor, "overwire")
        here = self._plain_tensor(tensor) if tensor.is_conj() or tensor.is_neg() else tensor
        cuda = _device_number(here.device)
        name, dims = SAVED.get(here.dtype, ""), tuple(here.shape)
        shape = (*dims[:-1], dims[-1] * 2) if name == "F4" and dims else dims
        size = here.nbytes
        if not size or here.is_contiguous():
            return View(name, shape, here.data_ptr() if size else 0, 1, (size,), (1,), here, cuda)
        item = here.element_size()
        strides = tuple(stride * item for stride in here.stride())
        return View(name, shape, here.data_ptr(), item, dims, strides, here, cuda)

    def _plain_tensor(self, tensor: Any) -> Any:
        plain = tensor.detach()
        if plain.is_conj():
            plain = plain.resolve_conj()
        return plain.resolve_neg() if plain.is_neg() else plain

    def describe(self, tensor: Any) -> Bytes:
        from .views import Bytes

        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"overwire: expected a torch tensor, got {type(tensor).__name__}")
        if not (ready := is_ready(tensor)):
            check_shape(tensor, "overwire")
        name = SAVED.get(tensor.dtype)
        if name is None or tensor.layout != torch.strided or tensor.is_quantized:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise NotSupportedError(f"overwire: safetensors has no type for {kind} tensors; use save_bundle")
        if not ready:
            check_memory(tensor, "overwire")
        dense = self._plain_tensor(tensor)
        if not (dense.is_contiguous() and (dense.is_cpu or on_gpu(dense))):
            # torch cannot make strided float4 pairs contiguous, but it can do this with bytes
            bytes_or_all = dense.view(torch.uint8) if name == "F4" else dense
            dense = bytes_or_all.to("cpu").contiguous().view(dense.dtype)
        shape = tuple(dense.shape)
        if name == "F4":
            if not shape:
                raise ArgumentError("overwire: an F4 tensor needs a dimension of pairs; this one has no dimensions")
            shape = (*shape[:-1], shape[-1] * 2)
        size = dense.numel() * dense.element_size()
        return Bytes(name, shape, dense.data_ptr() if size else 0, size, dense, await_writes(dense))


def _rising_slice(entry: slice) -> tuple[slice, bool]:
    """Converts a normalised slice with a negative step to a slice of the same elements with a positive step.
    Also returns whether the result must be reversed."""
    count = len(range(entry.start, -1 if entry.stop is None else entry.stop, entry.step))
    if count == 0:
        return slice(0, 0, 1), False
    last = entry.start + (count - 1) * entry.step
    return slice(last, entry.start + 1, -entry.step), count > 1
