"""Loads the files of all ranks into a buffer of tensors."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from overwire._undo import after_error, keep_error

from .common import SafeTensorsMetadata, TensorFrame, is_cuda, set_debug
from .copier import copier_class_of, create_copier_constructor
from .copier.base import CopierInterface, EngineCopier
from .copier.unified import is_unified_memory_system
from .file_buffer import FilesBufferOnDevice
from .frameworks import get_framework_op
from .st_types import DType
from .tensor_factory import LazyTensorFactory

_BLOCK = 16 << 30


class BaseSafeTensorsFileLoader:
    """The base class of loaders. pg: SingleGroup, None, or a process group of the framework, which
    may be a subgroup. device: a str or torch.device. copier_type: a registered name. Other
    arguments are passed to the copier.
    """

    @classmethod
    def process_extension_config(cls, ext_config: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Converts this class's section of a config to keyword arguments."""
        return dict(ext_config)

    def __init__(
        self,
        pg: Any,
        device: Any,
        copier_type: str,
        set_numa: bool = True,
        disable_cache: bool = True,
        framework: str = "pytorch",
        **kwargs: Any,
    ) -> None:
        self.framework = get_framework_op(framework)
        self.pg = self.framework.get_process_group(pg)
        self.device = self.framework.get_device(device, self.pg)
        self.disable_cache = disable_cache
        self.meta: dict[str, tuple[SafeTensorsMetadata, int]] = {}
        self.frames: OrderedDict[str, TensorFrame] = OrderedDict()
        self.tensor_filter: Callable[[str], bool] | None = None
        self._agrees = True
        # the tensors that a pipeline loads next, and the size of its buffers
        self._chunk: tuple[frozenset[str], int | None] | None = None
        self.copier_constructor = create_copier_constructor(copier_type, self.device, **kwargs)
        self.copier_class = copier_class_of(self.copier_constructor)

    def init_numa(self, set_numa: bool = True) -> None:
        """Does nothing: the caller's thread is not moved."""

    def reset(self) -> None:
        """Removes the files, so that other files can be added. Existing buffers stay valid."""
        self.meta, self.frames = {}, OrderedDict()

    def close(self) -> None:
        """Does the same as `reset`."""
        self.reset()

    def get_keys(self) -> list[str]:
        """Returns the names of all tensors of all files."""
        return list(self.frames)

    def get_shape(self, tensor_name: str) -> list[int]:
        """Returns the tensor's shape in the file. Raises KeyError for an unknown name."""
        return list(self.frames[tensor_name].shape)

    def set_tensor_filter(self, keep_tensor: Callable[[str], bool] | None) -> None:
        """Sets a filter for the names of tensors to read; None: all tensors. All ranks must set the same filter."""
        self.tensor_filter = keep_tensor

    def add_filenames(self, filenames: Mapping[int, list[str]]) -> None:
        """Reads the headers of all ranks' files, {rank: paths}. In a group of several ranks, all ranks must make this
        call with the same files."""
        self._run_on_all_ranks(lambda: self._add(filenames))

    def _run_on_all_ranks(self, work: Callable[[], Any]) -> Any:
        # Returns the result of `work`. An error on one rank raises an error on all, unless a pipeline makes the ranks
        # agree.
        if not self._agrees:
            return work()
        result = None
        with keep_error() as failure:
            result = work()
        with after_error(lambda: result.close() if result is not None else None):
            self.pg.agree(failure.error)
        return result

    def _add(self, filenames: Mapping[int, list[str]]) -> None:
        longest = max((len(paths) for paths in filenames.values()), default=0)
        for at in range(longest):
            for rank, paths in sorted(filenames.items()):
                if at < len(paths):
                    name = str(paths[at])
                    metadata = SafeTensorsMetadata.from_file(name, self.framework)
                    self.meta[name] = metadata, rank
                    for key, frame in metadata.tensors.items():
                        if self.tensor_filter is None or self.tensor_filter(key):
                            self.frames[key] = frame

    def copy_files_to_device(
        self,
        dtype: DType = DType.AUTO,
        use_buf_register: bool = True,
        max_copy_block_size: int = _BLOCK,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Loads this rank's files and waits for them.

        dtype: the dtype to which all tensors are converted. allow_inflight: whether to return at once and wait for a
        tensor when it is requested, if the copier supports this and the group has one rank. Requesting the tensor then
        raises the read's error. borrowed_tensors: raises ValueError unless the group has one rank; it has no other
        effect, because the caller owns the tensors. In a group of several ranks, all ranks must make this call, and a
        failure on one rank raises an error on all ranks.
        """
        if borrowed_tensors and self.pg.size() != 1:
            raise ValueError("borrowed_tensors is for a group of one rank")
        buffer: FilesBufferOnDevice = self._run_on_all_ranks(
            lambda: self._copy(dtype, use_buf_register, max_copy_block_size, allow_inflight)
        )
        return buffer

    def _copier(self, metadata: SafeTensorsMetadata, names: list[str] | None, dtype: DType) -> CopierInterface:
        copier = self.copier_constructor(metadata, self.device, self.framework)
        if isinstance(copier, EngineCopier):
            copier.dtype = dtype
            if names is not None:
                copier.names = names
        elif names is not None:
            selection = set(names)
            ranges = metadata.select_byte_ranges(selection.__contains__)
            if self._chunk is None:
                copier.set_byte_ranges(ranges)
            elif self._chunk[1] is None or not ranges:
                copier.set_chunk(ranges, selection)
            else:
                copier.set_chunk(ranges, selection, self._chunk[1])
        return copier

    def _copy(
        self, dtype: DType, use_buf_register: bool, max_copy_block_size: int, allow_inflight: bool
    ) -> FilesBufferOnDevice:
        self.framework.set_device(self.device)
        loaders: dict[int, list[LazyTensorFactory]] = {}
        factories: list[LazyTensorFactory] = []
        keeps = self.tensor_filter if self._chunk is None else self._chunk[0].__contains__
        with contextlib.ExitStack() as stack:
            for _, (metadata, rank) in sorted(self.meta.items()):
                local = rank == self.pg.rank() or self.pg.size() == 1
                names = None if keeps is None else [name for name in metadata.tensors if keeps(name)]
                of_rank = loaders.setdefault(rank, [])
                copier = self._copier(metadata, names, dtype) if local else None
                factory = LazyTensorFactory(
                    metadata, self.device, rank, local, 0, len(of_rank), copier, self.framework, self.disable_cache
                )  # fmt: skip
                factory.names = list(metadata.tensors) if names is None else names
                of_rank.append(factory)
                if local:
                    factories.append(factory)
                    stack.enter_context(after_error(factory.free_dev_ptrs))
            buffer = FilesBufferOnDevice(loaders, self.pg, self.framework)  # raises if a name is in two files
            allow_inflight = allow_inflight and dtype is DType.AUTO and self.pg.size() == 1
            for factory in factories:
                factory.submit_io(use_buf_register, max_copy_block_size, allow_inflight)
            for factory in factories:
                factory.wait_io(dtype)
        return buffer


class SafeTensorsFileLoader(BaseSafeTensorsFileLoader):
    """Loads plain files and files that overwire has compressed.

    pg, device, framework: as for the base class. debug_log: turns on overwire's debug log.
    disable_cache: False caches broadcast and scattered tensors for a second call.
    nogds: False loads to a GPU through GPUDirect Storage if that is available. use_fgds and the other arguments choose
    between methods that do not differ here, so they have no effect.
    """

    @classmethod
    def process_extension_config(cls, ext_config: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Converts `copier_type` (default "gds") to nogds= and use_fgds=."""
        config = dict(ext_config)
        kind = config.pop("copier_type", "gds")
        config["nogds"] = kind not in ("gds", "fgds")
        config["use_fgds"] = kind == "fgds" or config.get("use_fgds", False)
        return config

    def __init__(
        self,
        pg: Any,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
        **kwargs: Any,
    ) -> None:
        if debug_log:
            set_debug()
        op = get_framework_op(framework)
        where = op.get_device(device, op.get_process_group(pg))
        kind = "gds"
        if nogds:
            kind = "unified" if is_cuda(where) and is_unified_memory_system(op) else "nogds"
        super().__init__(
            pg, device, kind, set_numa, disable_cache, framework, bbuf_size_kb=bbuf_size_kb, max_threads=max_threads,
            **kwargs
        )  # fmt: skip


class fastsafe_open:
    """Opens and loads files in a with-block.

    filenames: a path, paths, or {rank: paths}. framework: "pt", "pytorch",
    "torch" or "paddle". use_fgds: accepted, but libfgds is not used. Other arguments are as for SafeTensorsFileLoader.
    """

    def __init__(
        self,
        filenames: Any,
        framework: str = "pt",
        pg: Any = None,
        device: Any = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = _BLOCK,
        use_fgds: bool = False,
    ) -> None:
        self.loader = SafeTensorsFileLoader(
            pg, device, nogds=nogds, debug_log=debug_log, framework=framework, use_fgds=use_fgds
        )
        if isinstance(filenames, Mapping):
            files = {rank: list(paths) for rank, paths in filenames.items()}
        elif isinstance(filenames, (list, tuple)):
            files = {0: list(filenames)}
        else:
            files = {0: [filenames]}
        self.loader.add_filenames(files)
        self.fb = self.loader.copy_files_to_device(max_copy_block_size=max_copy_block_size)

    def __enter__(self) -> fastsafe_open:
        return self

    def __exit__(self, *exc: object) -> None:
        self.fb.close()
        self.loader.close()

    def metadata(self) -> dict[str, Any]:
        """Returns the writer's metadata of each file, by path."""
        return {name: metadata.metadata for name, (metadata, _) in self.loader.meta.items()}

    def keys(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self.fb.key_to_rank_lidx)

    def get_tensor_wrapped(self, name: str) -> Any:
        return self.fb.get_tensor_wrapped(name)

    def get_tensor(self, name: str) -> Any:
        """Returns a tensor, which outlives the with-block."""
        return self.fb.get_tensor(name)
