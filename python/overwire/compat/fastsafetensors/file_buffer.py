"""Returns the tensors of files that were copied to devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..._compat_api import skip_at_exit
from .frameworks import FrameworkOpBase, ProcessGroupBase, TensorBase
from .st_types import Device, DType
from .tensor_factory import LazyTensorFactory


class FilesBufferOnDevice:
    """The tensors of all ranks' files. In a group of several ranks, all ranks must make the
    same calls in the same order, except that only the sender and the receiver must call `push_tensor`.

    The caller owns the returned tensors, which outlive `close`. device, dtype: the device and dtype of the results;
    AUTO keeps the dtype as loaded.

    keep_tensor: accepts the names of the tensors to include. borrowed_tensors: has no
    effect, because the caller owns the tensors.
    auto_mem_delete: whether to free a file when all its tensors were returned. It only has an effect with several
    ranks. Raises ValueError for a name that no file has, and for a name that two files have.
    """

    def __init__(
        self,
        rank_loaders: dict[int, list[LazyTensorFactory]],
        pg: ProcessGroupBase,
        framework: FrameworkOpBase,
        auto_mem_delete: bool = True,
        keep_tensor: Callable[[str], bool] | None = None,
        borrowed_tensors: bool = False,
    ) -> None:
        self.borrowed_tensors = borrowed_tensors
        self.framework, self.rank_loaders, self.pg = framework, rank_loaders, pg
        self.key_to_rank_lidx: dict[str, tuple[int, int]] = {}
        self.instantiated: dict[int, dict[int, dict[str, bool]]] = {}
        for rank, loaders in rank_loaders.items():
            self.instantiated[rank] = {}
            for lidx, loader in enumerate(loaders):
                self.instantiated[rank][lidx] = {}
                for name in filter(keep_tensor, loader.names) if keep_tensor else loader.names:
                    if name in self.key_to_rank_lidx:
                        raise ValueError(f"FilesBufferOnDevice: key {name} must be unique among files")
                    self.key_to_rank_lidx[name] = rank, lidx
        self.auto_mem_delete = auto_mem_delete and pg.size() > 1

    def close(self) -> None:
        """Closes all files. A second call does nothing."""
        for loaders in self.rank_loaders.values():
            for loader in loaders:
                loader.free_dev_ptrs()
        self.rank_loaders = {}

    def drain(self) -> None:
        """Waits for tensors that are still loading. The error of a tensor is raised when the tensor is requested."""
        for loaders in list(self.rank_loaders.values()):
            for loader in loaders:
                loader.drain()

    @skip_at_exit
    def __del__(self) -> None:
        if getattr(self, "rank_loaders", None):
            self.close()

    def iter_local_tensors(self, tensor_names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) for each name, without collectives. Raises RuntimeError in a group of several ranks."""
        if self.pg.size() != 1:
            raise RuntimeError("iter_local_tensors is for a group of one rank")
        for name in tensor_names:
            yield name, self.get_tensor(name)

    def get_filename(self, tensor_name: str) -> str:
        """Returns the file that contains a tensor."""
        return self._loader(tensor_name).metadata.src

    def get_shape(self, tensor_name: str) -> list[int]:
        """Returns the tensor's shape in the file."""
        return list(self._loader(tensor_name).metadata.tensors[tensor_name].shape)

    def _get_rank_lidx(self, tensor_name: str) -> tuple[int, int]:
        if tensor_name not in self.key_to_rank_lidx:
            raise ValueError(f"_get_rank: key {tensor_name} was not found in files")
        return self.key_to_rank_lidx[tensor_name]

    def _loader(self, tensor_name: str) -> LazyTensorFactory:
        rank, lidx = self._get_rank_lidx(tensor_name)
        if not self.rank_loaders:
            raise ValueError(f"tensor {tensor_name}: the buffer is closed")
        return self.rank_loaders[rank][lidx]

    def _get_tensor(self, rank: int, lidx: int, tensor_name: str, ret: Any, device: Any, dtype: DType) -> Any:
        # Notes that the tensor was returned, and moves it to the requested device.
        tensor = self.instantiated[rank][lidx]
        tensor[tensor_name] = True
        loader = self.rank_loaders[rank][lidx]
        if self.auto_mem_delete and len(tensor) == len(loader.names):
            loader.free_dev_ptrs()
        if ret is None:
            return None
        return ret.to(None if device is None else Device.of(device), dtype)

    def get_sharded_wrapped(
        self, tensor_name: str, dim: int, device: Any = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """Returns the same as `get_sharded`, but wrapped."""
        rank, lidx = self._get_rank_lidx(tensor_name)
        tensor: TensorBase = self._get_tensor(
            rank, lidx, tensor_name, self._loader(tensor_name).shuffle(self.pg, tensor_name, dim), device, dtype
        )
        return tensor

    def get_sharded(self, tensor_name: str, dim: int, device: Any = None, dtype: DType = DType.AUTO) -> Any:
        """Returns this rank's block along dim, with ceil(size / ranks) elements. The blocks of the last ranks may be
        shorter or empty. dim=-1 returns the whole tensor."""
        return self.get_sharded_wrapped(tensor_name, dim, device, dtype).get_raw()

    def get_tensor_wrapped(self, tensor_name: str, device: Any = None, dtype: DType = DType.AUTO) -> TensorBase:
        """Returns the same as `get_tensor`, but wrapped."""
        return self.get_sharded_wrapped(tensor_name, -1, device, dtype)

    def get_tensor(self, tensor_name: str, device: Any = None, dtype: DType = DType.AUTO) -> Any:
        """Returns the whole tensor on every rank."""
        return self.get_tensor_wrapped(tensor_name, device, dtype).get_raw()

    def push_tensor(self, tensor_name: str, dst_rank: int, device: Any = None, dtype: DType = DType.AUTO) -> Any:
        """Returns the whole tensor on dst_rank, and None on other ranks."""
        rank, lidx = self._get_rank_lidx(tensor_name)
        tensor = self._loader(tensor_name).push(self.pg, tensor_name, dst_rank, rank)
        result = self._get_tensor(rank, lidx, tensor_name, tensor, device, dtype)
        return None if result is None else result.get_raw()

    def get_multi_cols(
        self, tensor_names: list[str], dim: int, device: Any = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """Joins this rank's blocks of several tensors along dim, and returns the wrapped result. The
        tensors may be in several files."""
        blocks = [self.get_sharded_wrapped(name, dim) for name in tensor_names]
        result: TensorBase = self.framework.concat_tensors(blocks, dim)
        return result.to(None if device is None else Device.of(device), dtype)

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TensorBase]:
        """Returns the result of `get_sharded_wrapped` for each name and its dimension (-1: the whole tensor)."""
        return {name: self.get_sharded_wrapped(name, dim) for name, dim in tensor_shard_dim.items()}
