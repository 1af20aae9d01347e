"""Loads files with the loader that a config file selects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .common import init_logger, set_debug
from .config import LoaderConfig, load_config
from .loader import BaseSafeTensorsFileLoader, SafeTensorsFileLoader
from .parallel_loader import PipelineParallel
from .threefs_loader import ThreeFSLoader

logger = init_logger("overwire")

# The values are names in this module instead of classes, so that programs can replace the classes.
_LOADER_REGISTRY = {"base": "SafeTensorsFileLoader", "3fs": "ThreeFSLoader"}
_ = (SafeTensorsFileLoader, ThreeFSLoader)


def _resolve_loader_class(loader_name: str) -> type[BaseSafeTensorsFileLoader]:
    if loader_name not in _LOADER_REGISTRY:
        raise ValueError(f"Unknown loader type: {loader_name!r}. Available: {list(_LOADER_REGISTRY)}")
    loader: type[BaseSafeTensorsFileLoader] = globals()[_LOADER_REGISTRY[loader_name]]
    return loader


class AutoLoader:
    """Yields the tensors of files, with the loader and settings of `load_config`.

    pg, device: as for SafeTensorsFileLoader.
    """

    def __init__(self, pg: Any, hf_weights_files: list[str], device: Any = "cpu") -> None:
        self._config = load_config()
        config = self._config
        if config.debug_log:
            set_debug()
        kind = _resolve_loader_class(config.loader)
        section = config.get_extension_config(config.loader)
        options = kind.process_extension_config(section, hf_weights_files=hf_weights_files)
        logger.debug(
            "AutoLoader: loader %s, device %s, %d files, %s", config.loader, device, len(hf_weights_files), options
        )
        self._loader = kind(
            pg, device=device, set_numa=config.set_numa, disable_cache=config.disable_cache, debug_log=config.debug_log,
            framework=config.framework, **options,
        )  # fmt: skip
        self._pipeline = PipelineParallel(
            pg=pg, loader=self._loader, hf_weights_files=hf_weights_files, **config.create_parallel_kwargs()
        )  # fmt: skip

    @property
    def config(self) -> LoaderConfig:
        """The active settings."""
        return self._config

    def iterate_weights(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) of all tensors, like ParallelLoader."""
        yield from self._pipeline.iterate_weights()

    def close(self) -> None:
        """Stops loading."""
        self._pipeline.close()
