"""Defines CheckpointWriter, which saves checkpoints for torch.distributed.checkpoint."""

from __future__ import annotations

import io
import json
import uuid
import weakref
from collections import deque
from concurrent.futures import Future as Executed
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .._imports import start_thread
from .._undo import after_error, after_error_at_store
from ..errors import ArgumentError, NotSupportedError
from ..frameworks.memory import check_memory
from ..frameworks.spec import JoinedTensor
from ..model.options import Level, TensorLike, check_values, parse_size
from ..model.storageoptions import StorageOptions
from ..paths import local
from ..verbs.save import save_file
from .exchange import Copy, Exchange, Gathered, copy_blocks
from .groups import OwnGroup, free_groups, group_of_save, is_next_to_training
from .manifest import NAME, SAVE, TRAINING, Manifest, check_prefix, encode
from .places import INDEX, Located, Place
from .schedule import Duty, Round, bytes_of, is_bytes, schedule

# The number of files that a rank writes at a time. File systems allow only one writer per file.
_AT_ONCE = 4


class CheckpointWriter(Located, StorageWriter):
    """Writes a checkpoint as an overwire folder, for `dcp.save` and `dcp.async_save`.

    path: the folder, on a file system that all ranks share, or s3://bucket/prefix; None uses the `checkpoint_id` of the
        save. The checkpoint appears complete or not at all. However the save ends, an older checkpoint with this name
        stays complete until it is replaced. In a store, a checkpoint is never replaced. If several saves run at the
        same time there, one of them succeeds.
    model: the key of the model in the state. The tensors below this key are stored in the folder itself, named without
        the key. Everything else is stored in the subfolder `training`. If the state is not nested or lacks the key, all
        tensors are stored as the model.
    compress, level: as for `save_file`.
    max_shard_size: the most tensor bytes in a file. Each rank writes up to four files at a time. A rank that gathers
        sharded tensors needs memory for them on the device where it gathers.
    overwrite: whether to replace an older checkpoint.
    process_group: the group through which the ranks send blocks of tensors to each other. By default it is the group
        that was passed to torch for the save. If there is none, `dcp.save` uses the default group, and `dcp.async_save`
        uses a gloo group that the writer creates and training does not use.
    storage_options: as for `load_file`.

    All tensors are stored whole. The blocks of a sharded tensor (FSDP, DTensor) are sent by the group's backend to the
    rank that writes the tensor, or copied from a stager's memory on the same host. Objects other than tensors are
    stored as torch.save writes them. A tensor with a dtype that safetensors lacks (complex128, complex32) is stored as
    U8 bytes with an extra last dimension, and is restored with its own dtype.

    A save raises torch's CheckpointException. Its `failures` contains the error of each rank: ArgumentError for a
    folder that is not a checkpoint, NotSupportedError for tensors with more data than their elements (quantised,
    sparse), NotFoundError if the coordinator has ended, IOFailure, and the errors of `save_file`. In a background
    save, a rank raises IOFailure directly if the other ranks do not begin the save.
    """

    _schemes = ("s3",)

    def __init__(
        self,
        path: str | Any | None = None,
        *,
        model: str = "model",
        compress: bool = True,
        level: Level = "default",
        max_shard_size: int | str = "1GB",
        overwrite: bool = True,
        process_group: dist.ProcessGroup | None = None,
        storage_options: StorageOptions | None = None,
    ) -> None:
        check_values(compress=compress, level=level, storage_options=storage_options)
        self._model = check_prefix(model)
        self._how: dict[str, Any] = {"compress": compress, "level": level, "storage_options": storage_options}
        self._most = parse_size(max_shard_size)
        if self._most <= 0:
            raise ArgumentError(f"overwire: max_shard_size: expected a number of bytes, got {max_shard_size!r}")
        self._overwrite = overwrite
        self._group = process_group
        self._options = storage_options
        self._path = None if path is None else local(path)
        self._place: Place | None = None
        self._duty: Duty | None = None  # set on the coordinator
        self._plans: list[SavePlan] = []  # the latest plan of each rank, for planners that cache plans
        self._save = ""
        self._group_of_save: Any = None
        self._own_groups: list[OwnGroup] = []
        weakref.finalize(self, free_groups, self._own_groups).atexit = False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begins another checkpoint, at `checkpoint_id` unless it is None."""
        if checkpoint_id is not None:
            self._path = local(checkpoint_id)
        self._drop_place()
        self._save, self._group_of_save = str(uuid.uuid4()), None

    def storage_meta(self) -> StorageMeta:
        """Returns a description of the save for planners. torch calls this first, before the ranks send anything."""
        self._group_of_save = group_of_save(str(self._path), self._group, self._own_groups)
        return StorageMeta(checkpoint_id=self._path, save_id=self._save)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepares the destination. torch calls this. Raises ArgumentError if there is no path, and NotSupportedError
        for saves without collectives."""
        if self._path is None:
            raise ArgumentError("overwire: CheckpointWriter: expected a path or a checkpoint_id")
        if not kwargs.get("use_collectives", True):
            why = "use_collectives=False is not supported, because all ranks write one checkpoint"
            raise NotSupportedError(f"overwire: CheckpointWriter: {why}")
        self._place = Place(self._path, self._options, self._overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged. torch calls this."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decides which rank writes which tensors, and locks the destination. torch calls this on the coordinator."""
        assert self._place is not None
        plans = self._merge_plans(plans)
        duties = schedule(plans, self._model, self._most, self._place.save, self._place.mark)
        self._duty = duties[0]
        self._place.begin()
        return [replace(plan, storage_data=duty) for plan, duty in zip(plans, duties, strict=True)]

    def _merge_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Planners with enable_plan_caching send an unchanged plan only once.
        if any(not getattr(plan, "usable", True) for plan in plans):
            if len(self._plans) != len(plans):
                text = "a planner with enable_plan_caching needs the same CheckpointWriter for all its saves"
                raise NotSupportedError(f"overwire: {text}")
            plans = [plan if plan.usable else old for plan, old in zip(plans, self._plans, strict=True)]
        self._plans = plans
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, and sends blocks to the ranks that write them. torch calls this."""
        assert self._place is not None
        duty: Duty = plan.storage_data
        self._place.join_save(duty.save)
        items = {item.index: item for item in plan.items}
        results: list[WriteResult] = []
        exchange = Exchange(self._take_group(duty), duty, lambda index: _tensor_of(planner, items[index]))
        with self._undo_kind()(self._drop_save, exchange):
            with ThreadPoolExecutor(_AT_ONCE, "overwire-checkpoint") as pool:
                saves: deque[Executed[list[WriteResult]]] = deque()

                def write_steps(step: Round) -> None:
                    tensors, copies = exchange.gather(step)
                    if not step.file:
                        return
                    for entry in step.entries:
                        if entry.dtype is None:
                            tensors[entry.name] = _bytes_of(planner, items[entry.blocks[0].index])
                    if len(saves) == _AT_ONCE:
                        results.extend(saves.popleft().result())
                    saves.append(start_thread(pool.submit, self._write_step, step, tensors, copies))

                def finish_writing() -> None:
                    for one in saves:
                        results.extend(one.result())

                exchange.run(write_steps, finish_writing)
            self._place.hand_over()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _take_group(self, duty: Duty) -> Any:
        group, self._group_of_save = self._group or self._group_of_save, None
        if group is None and duty.ranks > 1 and is_next_to_training():
            why = "this save runs next to training, and torch.distributed.checkpoint did not start it"
            todo = "pass a process_group= that training does not use"
            raise NotSupportedError(f"overwire: CheckpointWriter: {why}: {todo}")
        return group

    def _write_step(self, step: Round, tensors: dict[str, Gathered], copies: list[Copy]) -> list[WriteResult]:
        assert self._place is not None
        copy_blocks(copies)
        for entry in step.entries:
            if entry.dtype is not None and is_bytes(entry.dtype):
                tensors[entry.name] = _as_bytes(tensors[entry.name], entry.name)
        metadata = {"format": "pt", SAVE: self._place.save}
        report = save_file(cast(dict[str, TensorLike], tensors), self._place.make(step.file), metadata, **self._how)
        sizes = [report.bytes_out] + [0] * len(step.entries)  # the first entry counts for the whole file
        files = [{"name": entry.name, "file": step.file} for entry in step.entries]
        indices = [entry.blocks[0].index for entry in step.entries]
        return list(map(WriteResult, indices, sizes, files))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the checkpoint. torch calls this on the coordinator."""
        assert self._place is not None and self._duty is not None and self._duty.manifest is not None
        place, manifest = self._place, self._duty.manifest
        files = [file for part in manifest.parts for file in part.files]
        place.take_over(files)
        with self._undo_kind()(self._drop_place):
            place.write(NAME, encode(manifest))  # in a store, this succeeds for only one of several saves
            _write_indexes(place, manifest, results)
        place.publish([*files, NAME])

    def _undo_kind(self) -> type[after_error]:
        return after_error_at_store if self._place is not None and self._place.remote else after_error

    def _drop_save(self, exchange: Exchange) -> None:
        if not exchange.group_is_usable:
            self._own_groups.clear()
        self._drop_place()

    def _drop_place(self) -> None:
        if self._place is not None:
            self._place.drop()


def _write_indexes(place: Place, manifest: Manifest, results: list[list[WriteResult]]) -> None:
    files: dict[str, dict[str, str]] = {}
    for one in (result.storage_data for rank in results for result in rank):
        files.setdefault(one["file"].rpartition("/")[0], {})[one["name"]] = one["file"].rpartition("/")[2]
    for part in manifest.parts:
        if len(part.files) > 1 or place.mark:
            folder = part.files[0].rpartition("/")[0]
            index = {"metadata": {"checkpoint": place.save}, "weight_map": dict(sorted(files[folder].items()))}
            text = json.dumps(index, indent=2)
            place.write(f"{TRAINING}/{INDEX}" if folder else INDEX, text.encode())


def _as_bytes(tensor: Gathered, name: str) -> Gathered:
    if isinstance(tensor, JoinedTensor):
        return JoinedTensor([cast(torch.Tensor, _as_bytes(part, name)) for part in tensor.parts])
    try:
        return bytes_of(tensor.resolve_conj().resolve_neg().contiguous())
    except (RuntimeError, NotImplementedError) as error:
        raise NotSupportedError(f"overwire: {name!r} has dtype {tensor.dtype}: {error}", tensor=name) from error


def _tensor_of(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise _kind_error(item, "a tensor", value)
    check_memory(value, f"overwire: CheckpointWriter: {item.index.fqn!r}", item.index.fqn)
    return value.detach()


def _bytes_of(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, io.BytesIO):
        raise _kind_error(item, "bytes", value)
    content = bytearray(value.getbuffer())
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _kind_error(item: WriteItem, expected: str, value: Any) -> NotSupportedError:
    fqn, kind = item.index.fqn, type(value).__name__
    return NotSupportedError(f"overwire: {fqn!r}: expected {expected} from the planner, got a {kind}", tensor=fqn)
