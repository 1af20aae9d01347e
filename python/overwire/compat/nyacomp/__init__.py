"""Implements nyacomp's API: `import overwire.compat.nyacomp as nyacomp`. For programs that you
cannot change, see `overwire.compat`.

**Pickles are trusted, as in nyacomp: only load files that you made.**

Intended differences:

- Tied tensors, views, strides, parameters and all dtypes are preserved.
- `compress` does not change the caller's model. A stale file in nya/ is never used.
- Nothing is printed, and nothing is written outside the bundle's folder. No module is hidden from import.
- Variables with invalid values cause warnings.
- Bundles are overwire's own: one container, with manifests in nyacomp's form.

Bundles in nyacomp's layout can be loaded if their files are plain (".raw"), or were compressed by this package's
`_nyacomp` or by nvCOMP. Files in the nvCOMP formats ANS and Bitcomp are refused.

Modules: `_nyacomp` (its extension), `hf`, `partition`. `settings` documents the environment variables.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from ..._compat_api import honour_nyacomp, imported
from . import _nyacomp, bundles, hf, partition, settings
from .bundles import (
    PathLike,
    compress,
    compress_parameter,
    compress_pickle,
    get_args,
    get_pipeline_params,
    get_tensors,
    load_compressed,
    load_compressed_pickle,
    tensor_bytes,
)
from .hf import stats
from .manifests import MERGE_INFO as MERGE_INFO_FNAME
from .manifests import ints, to_csv
from .merging import (
    calculate_makespan,
    iterative_merge_tensors,
    merge_tensors,
    split_into_bins,
    split_tensors,
    tensor_size,
)

try:
    from nvtx import annotate  # type: ignore[import-not-found]
except ImportError:

    class annotate(contextlib.ContextDecorator):  # type: ignore[no-redef]
        """Does nothing. It replaces nvtx's `annotate`, which marks a range for NVIDIA's profiler."""

        def __init__(self, message: str = "") -> None:
            self.message = message

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exc: object) -> None:
            return None


try:
    from humanize.filesize import naturalsize as natsize  # type: ignore[import-not-found]
except ImportError:
    natsize = str

__all__ = [
    "HOST", "MERGE_INFO_FNAME", "NUM_THREADS", "_nyacomp", "annotate", "calculate_makespan", "cleanup", "compress",
    "compress_parameter", "compress_pickle", "decompressor", "default_path", "empty_cache", "get_args",
    "get_pipeline_params", "get_tensors", "hf", "ints", "iterative_merge_tensors", "load_compressed",
    "load_compressed_pickle", "merge_tensors", "natsize", "partition", "split_into_bins", "split_tensors", "stats",
    "tensor_bytes", "tensor_size", "timer", "to_csv", "with_cleanup",
]  # fmt: skip

log = logging.getLogger("overwire")

default_path = bundles.DEFAULT
NUM_THREADS = settings.num_threads()
HOST = settings.host()

honour_nyacomp()
settings.check()
bundles.start_preload()
decompressor = bundles.decompressor


@contextlib.contextmanager
def timer(msg: str) -> Iterator[None]:
    """Logs the duration of its block at level DEBUG."""
    start = time.perf_counter()
    try:
        yield
    finally:
        log.debug("%s took %.3f s", msg, time.perf_counter() - start)


def empty_cache() -> None:
    """Collects garbage and returns torch's unused GPU memory, if there is any."""
    import gc

    gc.collect()
    if (cuda := _cuda()) is not None:
        cuda.empty_cache()


@contextlib.contextmanager
def cleanup() -> Iterator[None]:
    """Runs `empty_cache` after its block. Logs torch's GPU memory before and after the block at level DEBUG."""
    before = _reserved()
    try:
        yield
    finally:
        nbytes = _reserved()
        empty_cache()
        log.debug("GPU memory of torch: %s before, %s used, %s after", *map(natsize, (before, nbytes, _reserved())))


def _cuda() -> Any:
    torch = imported("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _reserved() -> int:
    return 0 if (cuda := _cuda()) is None else int(cuda.memory_reserved())


def with_cleanup(path: PathLike) -> None:
    """Loads a bundle and frees it again, to measure the time."""
    with cleanup():
        load_compressed_pickle(path)
