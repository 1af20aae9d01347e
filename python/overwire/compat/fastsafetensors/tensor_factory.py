"""Represents a file that one rank loads: its tensors on that rank, and their transfer to other ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from . import cpp
from .allocation import SharedDeviceAllocation
from .common import SafeTensorsMetadata
from .copier.base import CopierInterface, DummyDeviceBuffer, EngineCopier
from .frameworks import FrameworkOpBase, ProcessGroupBase, TensorBase
from .st_types import Device, DType, converts


class LazyTensorFactory:
    """A file that one rank loads. rank: the rank that loads it. copier: None on all other ranks.
    names: the tensors to load; set them before loading.

    gbuf: the buffer of the tensors' memory, or None if it was freed or belongs to another rank.
    wait_tensor: a function that waits for a tensor, or None if all tensors have arrived. All ranks of the group must
    make the same calls in the same order.
    """

    def __init__(
        self,
        metadata: SafeTensorsMetadata,
        device: Device,
        rank: int,
        local_rank: bool,
        factory_idx_bits: int,
        lidx: int,
        copier: CopierInterface | None,
        framework: FrameworkOpBase,
        disable_cache: bool = True,
    ) -> None:
        self.metadata, self.device, self.framework = metadata, device, framework
        self.copier = copier if local_rank else None
        self.rank, self.lidx = rank, lidx
        self.names = list(metadata.tensors)
        self.tensors: Mapping[str, TensorBase] = {}
        self.shuffled: dict[tuple[str, int], TensorBase] = {}
        self.gbuf: cpp.gds_device_buffer | None = None
        self.allocation: SharedDeviceAllocation | None = None
        self.wait_tensor: Callable[[str], None] | None = None
        self.disable_cache = disable_cache
        self.dtype = DType.AUTO
        self._tag = 0

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int, allow_inflight: bool = False) -> None:
        if self.copier is not None:
            if allow_inflight and self.copier.enable_tensor_readiness():
                self.wait_tensor = self.copier.wait_tensor
            self.gbuf = self.copier.submit_io(use_buf_register, max_copy_block_size)

    def wait_io(self, dtype: DType = DType.AUTO, noalign: bool = False, borrowed_tensors: bool = False) -> None:
        """Waits for the file. If the copier can wait for individual tensors and `dtype` is AUTO, the function returns
        at once, and later calls wait for their tensors. borrowed_tensors: no effect, because the caller owns the
        tensors."""
        self.dtype = dtype
        copier = self.copier
        if copier is None or self.gbuf is None:
            return
        inflight = self.wait_tensor is not None and dtype is DType.AUTO
        call = copier.prepare_tensors if inflight else copier.wait_io
        options: dict[str, Any] = {} if inflight else {"dtype": dtype, "noalign": noalign}
        if "owner" in inspect.signature(call).parameters and not isinstance(copier, EngineCopier):
            dummy = isinstance(self.gbuf, DummyDeviceBuffer)
            self.allocation = SharedDeviceAllocation(self.gbuf, self.framework, self.device, owns_memory=not dummy)
            options["owner"] = self.allocation
        self.tensors = call(self.gbuf, **options)
        if not inflight:
            self.copier, self.wait_tensor = None, None

    def drain(self) -> None:
        """Waits for all tensors that the engine is loading. The error of a tensor is raised when the tensor is
        requested."""
        if isinstance(self.copier, EngineCopier) and self.wait_tensor is not None:
            with suppress(Exception):
                self.copier.finish_io()

    def _dtype(self, name: str) -> DType:
        own = self.metadata.tensors[name].dtype
        return self.dtype if converts(own, self.dtype) else own

    def shape(self, name: str) -> list[int]:
        """Returns the shape of the tensor in memory."""
        frame = self.metadata.tensors[name]
        if frame.dtype.bits == 6:
            return [(frame.data_offsets[1] - frame.data_offsets[0])]
        return self.framework.get_native_shape(frame.dtype, frame.shape)

    def _empty(self, name: str, shape: list[int]) -> TensorBase:
        # shape: the tensor's shape in memory.
        dtype = self._dtype(name)
        logical = [*shape[:-1], 2 * shape[-1]] if dtype is DType.F4 else shape
        empty: TensorBase = self.framework.get_empty_tensor(logical, dtype, self.device)
        return empty

    def _own_tensor(self, name: str) -> TensorBase:
        if name not in self.tensors:
            raise ValueError(f"{self.metadata.src}: tensor {name} was already freed, or was not loaded")
        if self.wait_tensor is not None:
            self.wait_tensor(name)
        return self.tensors[name]

    def push(self, pg: ProcessGroupBase, tensor_name: str, dst_rank: int, src_rank: int) -> TensorBase | None:
        """Sends the tensor to dst_rank. Returns None on other ranks."""
        me = pg.rank()
        if pg.size() == 1 or src_rank == dst_rank:
            return self._own_tensor(tensor_name) if me == dst_rank or pg.size() == 1 else None
        self._tag += 1
        if me == src_rank:
            pg.send(self._own_tensor(tensor_name).contiguous(), dst_rank, self._tag)
        elif me == dst_rank:
            tensor = self._empty(tensor_name, self.shape(tensor_name))
            pg.recv(tensor, src_rank, self._tag)
            return tensor
        return None

    def shuffle(self, pg: ProcessGroupBase, tensor_name: str, dim: int) -> TensorBase:
        """Returns the whole tensor (dim=-1), or this rank's block along dim, with ceil(size / ranks) elements. The
        blocks of the last ranks may be shorter or empty."""
        if pg.size() == 1:
            return self._own_tensor(tensor_name)
        result = self.shuffled.get((tensor_name, dim))
        if result is None:
            result = self._broadcast(pg, tensor_name) if dim == -1 else self._scatter(pg, tensor_name, dim)
            if not self.disable_cache:
                self.shuffled[tensor_name, dim] = result
        return result

    def shuffle_multi_cols(self, pg: ProcessGroupBase, tensor_names: list[str], dim: int) -> TensorBase:
        """Joins this rank's blocks of several tensors of the file along dim."""
        result: TensorBase = self.framework.concat_tensors([self.shuffle(pg, name, dim) for name in tensor_names], dim)
        return result

    def _broadcast(self, pg: ProcessGroupBase, name: str) -> TensorBase:
        is_owner = pg.rank() == self.rank
        tensor = self._own_tensor(name).contiguous() if is_owner else self._empty(name, self.shape(name))
        pg.broadcast(tensor, self.rank)
        return tensor

    def _scatter(self, pg: ProcessGroupBase, name: str, dim: int) -> TensorBase:
        shape, ranks = self.shape(name), pg.size()
        if not 0 <= dim < len(shape):
            raise ValueError(f"{self.metadata.src}: tensor {name} has no dimension {dim}: its shape is {shape}")
        block = -(-shape[dim] // ranks)
        frame = self.metadata.tensors[name]
        if frame.dtype is DType.F4 and dim == len(shape) - 1:  # blocks count elements, as in the file
            block = -(-frame.shape[dim] // ranks)
            if block % 2:
                text = f"{self.metadata.src}: tensor {name}: F4 tensors come in pairs, and blocks of {block} of"
                raise ValueError(f"{text} dimension {dim} of {frame.shape} for {ranks} ranks cut one")
            block //= 2

        def index(lo: int, hi: int) -> Any:
            return tuple(slice(lo, hi) if at == dim else slice(None) for at in range(len(shape)))

        # A scatter needs parts of equal size, so short parts are padded.
        full = [*shape[:dim], block, *shape[dim + 1 :]]
        parts: list[TensorBase] = []
        if pg.rank() == self.rank:
            whole = self._own_tensor(name)
            for rank in range(ranks):
                lo, hi = min(rank * block, shape[dim]), min((rank + 1) * block, shape[dim])
                part = whole[index(lo, hi)].contiguous()
                if hi - lo < block:
                    rest = self._empty(name, [*shape[:dim], block - (hi - lo), *shape[dim + 1 :]])
                    part = self.framework.concat_tensors([part, rest], dim)
                parts.append(part)
        own_part = self._empty(name, full)
        pg.scatter(own_part, parts, self.rank)
        me = pg.rank()
        size = min((me + 1) * block, shape[dim]) - min(me * block, shape[dim])
        # Copy the block, to free the padding.
        return own_part if size == block else own_part[index(0, size)].clone().contiguous()

    def free_dev_ptrs(self) -> None:
        """Closes the file, after waiting for reads into its memory. Tensors that were returned stay valid."""
        self.tensors, self.shuffled = {}, {}
        gbuf, self.gbuf = self.gbuf, None
        copier, self.copier = self.copier, None
        allocation, self.allocation = self.allocation, None
        inflight, self.wait_tensor = self.wait_tensor is not None, None
        if isinstance(copier, EngineCopier):
            copier.cancel()
        elif copier is not None and gbuf is not None:
            with suppress(Exception):  # these bytes are no longer needed
                if inflight:
                    copier.finish_io()
                else:
                    copier.wait_io(gbuf, noalign=True)
        if gbuf is None:
            return
        if allocation is None:
            self.framework.free_tensor_memory(gbuf, self.device)
        else:
            self.framework.uncount(gbuf)
            allocation.release()
