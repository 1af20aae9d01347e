"""Restores a worker's weights after a level-2 sleep, from a file with the bytes of the worker's memory pool.

The file is a container with one tensor for each allocation of the pool, in order. The file's name is a fingerprint of
the model's files and of the sizes and digests of the allocations. The file contains no addresses, so equal workers
share a file. This module does not import vLLM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..._compat_api import prepare_gpu, start_thread
from ..kept_model import keep_files
from ..kept_model.keep_files import Damaged, Refused

# An image records no modules.
_RECORD: dict[str, Any] = {"tensors": {}, "names": {}, "modules": {}, "origins": "image of a memory pool"}

#: The allocations of a pool: contiguous tensors by address, in the pool's order.
Pool = Mapping[int, torch.Tensor]


class PoolImage:
    """The file for one worker's pool. Calls must not overlap, but may run during the background writing.

    folder: the folder for the files. facts: a digest that identifies the model's files. log: the logger, which gets one
    line for each event.
    """

    def __init__(self, folder: str, facts: str, log: Any) -> None:
        self._folder, self.facts, self._log = folder, facts, log
        self._name = self._path = self._device = ""
        self._digests: dict[int, str] = {}  # digests of the written pool, by address
        self._reason = "the file with the weights is not written yet"  # why there is no usable file; "" if there is one
        self._writer: threading.Thread | None = None

    def begin_writing(self, pool: Pool) -> None:
        """Starts to write the file in the background, unless it exists. The pool must not change until
        `finish_writing`."""
        self.finish_writing()
        self._reason = "the file with the weights was not written"
        self._writer = threading.Thread(target=self._write, args=(pool,), name="overwire image", daemon=True)
        try:
            start_thread(self._writer.start)
        except RuntimeError as error:
            self._writer, self._reason = None, str(error)

    def finish_writing(self) -> None:
        """Waits for the background writing. Call it before the pool changes."""
        writer = self._writer
        if writer is not None:
            writer.join()
            self._writer = None

    def _write(self, pool: Pool) -> None:
        import overwire

        start, size = time.perf_counter(), _size_of(pool)
        try:
            digests = dict(zip(pool, overwire.digest(by_position(pool)).values(), strict=True))
            facts = [(pool[address].nbytes, digest) for address, digest in digests.items()]
            name = keep_files.fingerprint("image", self.facts, facts)
            self._name, self._digests = name, digests
            self._device = str(next(iter(pool.values())).device)
            if self._find_file() is None:
                tensors = by_position(pool)
                path = keep_files.keep_file(
                    self._folder, name, tensors, _RECORD, dict(zip(tensors, digests.values(), strict=True))
                )
                seconds = time.perf_counter() - start
                words = "overwire: stored %.2f GiB of weights for level-2 sleep in %.1f s: %s"
                self._log.info(words, size, seconds, path)
            self._reason = ""
        except Exception as error:
            self._reason = str(error) or type(error).__name__
            self._log.warning("overwire: cannot store the weights for level-2 sleep: %s", self._reason)

    def _find_file(self) -> str | None:
        # Returns the path of the file, or None. A damaged file is removed.
        try:
            kept = keep_files.find_file(self._folder, self._name)
        except Damaged:
            return None
        if kept is None:
            return None
        self._path = kept.path
        return kept.path

    def reason_against(self, pool: Pool) -> str:
        """Returns why the file cannot restore this pool, or "" if it can. Computes the digests of the pool, but does
        not read the file."""
        if self._reason:
            return self._reason
        try:
            if not self.has_bytes_of(pool):
                return "the weights have changed since they were stored"
            path = self._find_file()
        except Exception as error:  # vLLM's own level 2 works without the file
            return str(error) or type(error).__name__
        if path is None:
            self._reason = "the file with the weights has been removed"
            return self._reason
        keep_files.note_use(path)
        return ""

    def has_bytes_of(self, pool: Pool) -> bool:
        """Returns whether a pool has the stored addresses, sizes and bytes."""
        import overwire

        if not self._digests or list(pool) != list(self._digests):
            return False
        return list(overwire.digest(by_position(pool)).values()) == list(self._digests.values())

    def restore_pool(self, map_pool: Callable[[], Pool]) -> None:
        """Maps the pool's memory while the file is opened, and then loads the file into this memory. map_pool: maps the
        memory, and returns the pool.

        Raises Refused if the file is missing or does not contain the stored bytes, and the errors of loading and of
        map_pool. After an error the pool's values are undefined.
        """
        import overwire

        start = time.perf_counter()
        with ThreadPoolExecutor(1) as worker:
            opening: Future[Any] = start_thread(worker.submit, self._open_file)
            pool = map_pool()
            map_end = time.perf_counter()
            try:
                with opening.result() as file:
                    file.load_into((name, None, tensor) for name, tensor in by_position(pool).items())
                if not self.has_bytes_of(pool):
                    raise Damaged(f"{self._path} does not contain the weights that were stored")
            except (overwire.CorruptError, overwire.FormatError, Damaged) as error:
                self._reason = str(error)
                keep_files.try_remove(self._path)
                raise
        self._log.info(
            "overwire: restored %.2f GiB of weights in %.2f s, after %.2f s to map their memory",
            _size_of(pool), time.perf_counter() - map_end, map_end - start,
        )  # fmt: skip

    def _open_file(self) -> Any:
        import overwire

        path = self._find_file()
        if path is None:
            raise Refused("the file with the weights has been removed")
        prepare_gpu(self._device)
        return overwire.safe_open(path, framework="pt", device=self._device)


def by_position(pool: Pool) -> dict[str, torch.Tensor]:
    """Returns the allocations of a pool with names that are equal in equal workers."""
    return {str(position): tensor for position, tensor in enumerate(pool.values())}


def _size_of(pool: Pool) -> float:
    return sum(tensor.nbytes for tensor in pool.values()) / 2**30
