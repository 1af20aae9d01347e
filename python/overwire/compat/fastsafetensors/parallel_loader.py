"""Loads batch by batch: reads the next batch while the current one is used."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from overwire._compat_api import forked, start_thread
from overwire._undo import keep_error
from overwire.errors import ArgumentError, CancelledError, ForkedError

from .common import SafeTensorsMetadata, SingleGroup
from .config import check_producers
from .file_buffer import FilesBufferOnDevice
from .loader import BaseSafeTensorsFileLoader, SafeTensorsFileLoader


def _refuse_child() -> None:
    if forked():
        raise ForkedError("PipelineParallel: this loader belongs to the process that this one was forked from")


class BudgetInfeasibleError(ValueError):
    """The memory budget is too small for any batch."""


class _Batch(NamedTuple):
    files: list[str]
    names: frozenset[str] | None  # None: all names that the filter accepts
    size: int | None = None  # bytes that copiers should allocate; None: as many as they need


class _Loaded(NamedTuple):
    buffer: FilesBufferOnDevice | None
    error: BaseException | None

    @classmethod
    def nothing(cls) -> _Loaded:
        """Makes an item without a batch, which wakes a thread that waits for a batch when the loader is closed."""
        return cls(None, CancelledError("overwire: iterate_weights: another thread has closed the loader"))


class PipelineParallel:
    """Yields the tensors of files, in batches of one file per rank.

    queue_size: -1 reads a batch after the previous batch is used up, so one batch is in memory; n >= 0 allows n + 2
        batches in memory. tensor_filter: accepts the names of the tensors to read. max_batch_bytes: the maximum tensor
        bytes per file in a batch; a larger tensor gets its own batch.
    device_memory_budget: bytes that this rank may use. Batches get smaller, and fewer are in flight, until they fit.
        The budget includes yielded tensors that the caller keeps: all of them, or those that resident_tensor accepts,
        or none if accumulate_resident is False. Raises BudgetInfeasibleError if the budget is too small.
    use_chunk_budget_as_allocation_size: copiers other than overwire's get the same allocation_size for every batch.
    overlap_io: in a group of one rank, yields tensors before their whole batch has arrived.
    borrowed_tensors: promises that the caller does not keep yielded tensors. Raises ValueError unless
        accumulate_resident is False and the group has one rank. It has no other effect, because the caller owns the
        tensors.
    broadcast_run_bytes, broadcast_run_tensors: these have no effect, but negative values raise ValueError.
    need_clone: this has no effect, because tensors never have to be cloned.

    All ranks of the group must iterate in the same way. A failure on one rank raises an error on all ranks. Unknown
    arguments are ignored.
    """

    def __init__(
        self,
        pg: Any,
        loader: BaseSafeTensorsFileLoader,
        hf_weights_files: list[str],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        tensor_filter: Callable[[str], bool] | None = None,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        check_producers(max_concurrent_producers)
        if use_chunk_budget_as_allocation_size and max_batch_bytes is None and device_memory_budget is None:
            raise ValueError("use_chunk_budget_as_allocation_size is for max_batch_bytes or device_memory_budget")
        if broadcast_run_bytes < 0 or broadcast_run_tensors < 0:
            raise ValueError("broadcast_run_bytes and broadcast_run_tensors must not be negative")
        if borrowed_tensors and (accumulate_resident or loader.pg.size() != 1):
            raise ValueError("borrowed_tensors is for accumulate_resident=False and a group of one rank")
        if resident_tensor is not None and not accumulate_resident:
            raise ValueError("resident_tensor selects tensors to keep, but accumulate_resident=False keeps none")
        self.pg = SingleGroup() if pg is None else pg
        self.loader = loader
        self.hf_weights_files = [str(path) for path in hf_weights_files]
        self.max_concurrent_producers = max_concurrent_producers
        self.queue_size = queue_size
        self.use_tqdm_on_load = use_tqdm_on_load
        self.need_clone = self.pg.size() == 1 and not borrowed_tensors
        self.weight_files_batches = self._create_batches(self.pg)
        self.batch_queue: queue.SimpleQueue[_Loaded] = queue.SimpleQueue()
        self.log_prefix = f"PG{self.pg.rank()}"
        self.overlap_io, self.borrowed_tensors = overlap_io, borrowed_tensors
        self._same_size = use_chunk_budget_as_allocation_size
        self._filter = tensor_filter
        self._depth = 1 if queue_size < 0 else queue_size + 2
        self._is_closed = self._is_ending = False  # the loader, and its iteration
        # One item for each batch that may be read. Ctrl-C can leave locks of `threading` locked, but not this queue.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._plan = [_Batch(files, None) for files in self.weight_files_batches]
        if max_batch_bytes is not None or device_memory_budget is not None:
            self._split(max_batch_bytes, device_memory_budget, resident_tensor or (lambda name: accumulate_resident))

    def _create_batches(self, pg: Any) -> list[list[str]]:
        ranks = pg.size()
        return [self.hf_weights_files[at : at + ranks] for at in range(0, len(self.hf_weights_files), ranks)]

    def _split(self, most: int | None, budget: int | None, stays: Callable[[str], bool]) -> None:
        # Uses only the headers, so all ranks get the same result.
        sizes: list[list[dict[str, int]]] = []  # batch, file: name to bytes
        for files in self.weight_files_batches:
            sizes.append([])
            for path in files:
                frames = SafeTensorsMetadata.from_file(path, self.loader.framework).tensors
                ranges = [(n, f.data_offsets) for n, f in frames.items() if self._filter is None or self._filter(n)]
                sizes[-1].append({name: end - begin for name, (begin, end) in ranges})
        largest = max((nbytes for batch in sizes for file in batch for nbytes in file.values()), default=0)
        if budget is not None:
            every = [(name, nbytes) for batch in sizes for file in batch for name, nbytes in file.items()]
            stay_bytes = sum(nbytes for name, nbytes in every if stays(name))
            # A tensor from another rank needs memory in addition to the batches.
            transit = largest if self.pg.size() > 1 else 0
            copier, paths = self.loader.copier_class, self.hf_weights_files
            times, padding = copier.chunk_transient_multiplier(paths), copier.chunk_device_overhead(paths)
            overhead = copier.fixed_device_overhead(paths)
            free = budget - overhead - stay_bytes - transit

            def room(depth: int) -> int:
                return (free // depth - padding) // times

            while self._depth > 1 and room(self._depth) < largest:
                self._depth -= 1
            if room(self._depth) < largest:
                raise BudgetInfeasibleError(
                    f"device_memory_budget {budget}: {stay_bytes} bytes are kept, {transit} are in transit, and the "
                    f"copier holds {overhead}; the largest tensor has {largest} bytes, and a batch needs {times} times "
                    f"its size and {padding} bytes"
                )
            most = min(most or room(self._depth), room(self._depth))
        assert most is not None
        self._plan = []
        for files, batch in zip(self.weight_files_batches, sizes, strict=True):
            runs = [_runs(file, most) for file in batch]
            for at in range(max(map(len, runs))):
                names = frozenset(name for run in runs if at < len(run) for name in run[at])
                self._plan.append(_Batch(files, names, max(most, largest) if self._same_size else None))

    def _load_single_batch(self, batch: _Batch) -> FilesBufferOnDevice:
        loader, names, keeps = self.loader, batch.names, self._filter
        loader.reset()
        loader.set_tensor_filter(keeps if names is None else names.__contains__)
        loader._chunk = None if names is None else (names, batch.size)
        loader.add_filenames({rank: [path] for rank, path in enumerate(batch.files)})
        return loader.copy_files_to_device(allow_inflight=self.overlap_io, borrowed_tensors=self.borrowed_tensors)

    def _produce(self) -> None:
        for batch in self._plan:
            self._room.get()
            if self._is_closed or self._is_ending:
                self.batch_queue.put(_Loaded.nothing())
                return
            item = _Loaded.nothing()
            with keep_error() as failure:
                item = _Loaded(self._load_single_batch(batch), None)
            self.batch_queue.put(item._replace(error=failure.error))
            if item.buffer is None:
                return
            item.buffer.drain()  # batches are read one after another

    def iterate_weights(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) of all tensors, whole and in the same order on all ranks. Raises the error of a load
        on any rank, ForkedError in a forked child, ArgumentError while another iteration of this loader is running,
        and CancelledError if another thread closes the loader."""
        if self._is_closed:
            return
        _refuse_child()
        if self._is_ending:
            self._finish()  # an earlier call was interrupted
        if self._thread is not None:
            raise ArgumentError("overwire: iterate_weights: another iteration is running: exhaust or close it first")
        bar = self._bar()
        self.loader._agrees = False  # this function makes the ranks agree on errors
        self._room, self.batch_queue = queue.SimpleQueue(), queue.SimpleQueue()
        for _ in range(self._depth):
            self._room.put(None)
        group = self.loader.pg
        try:
            start_thread(self._start_producing)
            for _ in self._plan:
                _refuse_child()
                item = self.batch_queue.get()
                try:
                    group.agree(item.error)
                    buffer = item.buffer
                    assert buffer is not None
                    for name in list(buffer.key_to_rank_lidx):
                        _refuse_child()
                        yield name, buffer.get_tensor(name)
                finally:
                    if item.buffer is not None and not sys.is_finalizing():
                        item.buffer.close()
                self._room.put(None)
                if bar is not None:
                    bar.update(1)
        finally:
            self._finish()
            self.loader._agrees = True
            if bar is not None:
                bar.close()

    def _start_producing(self) -> None:
        thread = threading.Thread(target=self._produce, name="overwire-fst", daemon=True)
        thread.start()
        self._thread = thread

    def _finish(self) -> None:
        thread = self._thread
        if thread is None or forked() or sys.is_finalizing():  # at exit, other threads are stopped
            return
        self._is_ending = True
        self._room.put(None)
        thread.join()
        while not self.batch_queue.empty():
            item = self.batch_queue.get()
            if item.buffer is not None:
                item.buffer.close()
        self.batch_queue.put(_Loaded.nothing())  # wakes a thread that waits for the next batch
        self._thread, self._is_ending = None, False

    def _bar(self) -> Any:
        if not self.use_tqdm_on_load or self.pg.rank() != 0:
            return None
        try:
            from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            return None
        return tqdm(total=len(self._plan), desc="Loading fastsafetensors checkpoint shards", leave=False)

    def close(self) -> None:
        """Stops loading and ends `iterate_weights`. Does nothing in a forked child, because the parent owns the
        loader."""
        if not forked():
            self._is_closed = True
            self._finish()
            self.loader.close()


def _runs(sizes: dict[str, int], most: int) -> list[list[str]]:
    runs: list[list[str]] = []
    room = 0
    for name, nbytes in sizes.items():
        if not runs or nbytes > room:
            runs.append([])
            room = most
        runs[-1].append(name)
        room -= nbytes
    return runs or [[]]


class ParallelLoader(PipelineParallel):
    """A PipelineParallel over SafeTensorsFileLoader.

    all_local: whether each rank reads all files itself, without collectives.
    """

    def __init__(
        self,
        pg: Any,
        hf_weights_files: list[str],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        tensor_filter: Callable[[str], bool] | None = None,
        all_local: bool = False,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        use_fgds: bool = False,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        group = None if all_local else pg
        loader = SafeTensorsFileLoader(
            group, device, bbuf_size_kb, max_threads, nogds, set_numa, debug_log=debug_log, framework=framework,
            use_fgds=use_fgds,
        )  # fmt: skip
        super().__init__(
            group, loader, hf_weights_files, max_concurrent_producers, queue_size, use_tqdm_on_load, tensor_filter,
            max_batch_bytes, use_chunk_budget_as_allocation_size, device_memory_budget, accumulate_resident,
            resident_tensor, broadcast_run_bytes, broadcast_run_tensors, overlap_io, borrowed_tensors,
        )  # fmt: skip
