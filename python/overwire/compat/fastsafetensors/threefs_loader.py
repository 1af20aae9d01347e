"""Loads from 3FS through the reader of the package fastsafetensor_3fs_reader, or of a different package that provides
the same two names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .common import set_debug
from .loader import BaseSafeTensorsFileLoader
from .parallel_loader import PipelineParallel


class ThreeFSLoader(BaseSafeTensorsFileLoader):
    """A loader for 3FS. mount_point: the folder where 3FS is mounted. entries, io_depth, buffer_size: arguments for the
    reader.
    """

    @classmethod
    def process_extension_config(cls, ext_config: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Infers a missing or empty mount_point from the files, if the reader's package is installed.
        Otherwise the default applies."""
        config = dict(ext_config)
        if not str(config.get("mount_point") or "").strip():
            config.pop("mount_point", None)
            files = kwargs.get("hf_weights_files") or []
            try:
                from fastsafetensor_3fs_reader import extract_mount_point  # type: ignore
            except ImportError:
                return config
            if files:
                config["mount_point"] = extract_mount_point(files[0])
        return config

    def __init__(
        self,
        pg: Any,
        device: Any = "cpu",
        mount_point: str = "/mnt/3fs",
        debug_log: bool = False,
        disable_cache: bool = True,
        framework: str = "pytorch",
        set_numa: bool = True,
        **kwargs: Any,
    ) -> None:
        if debug_log:
            set_debug()
        super().__init__(pg, device, "3fs", set_numa, disable_cache, framework, mount_point=mount_point, **kwargs)


class ParallelThreeFSLoader(PipelineParallel):
    """A PipelineParallel over ThreeFSLoader. The mount point is inferred from the files."""

    def __init__(
        self,
        pg: Any,
        hf_weights_files: list[str],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Any = "cpu",
        debug_log: bool = False,
        framework: str = "pytorch",
        **kwargs: Any,
    ) -> None:
        from fastsafetensor_3fs_reader import extract_mount_point

        loader = ThreeFSLoader(
            pg, device=device, mount_point=extract_mount_point(hf_weights_files[0]), debug_log=debug_log,
            framework=framework, **kwargs
        )  # fmt: skip
        super().__init__(
            pg, loader, hf_weights_files, max_concurrent_producers=max_concurrent_producers, queue_size=queue_size,
            use_tqdm_on_load=use_tqdm_on_load,
        )  # fmt: skip
