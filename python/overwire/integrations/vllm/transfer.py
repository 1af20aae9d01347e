"""Implements vLLM's weight transfer, for vLLM's workers and for the trainer.

    vllm serve MODEL --weight-transfer-config '{"backend": "overwire"}'

The trainer writes a push to a folder or a store, or sends it over a process group. Each worker loads the slices that it
needs directly into its parameters. Written for vLLM 0.32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.logger import init_logger

from ..._compat_api import start_thread
from ...errors import ArgumentError
from .. import iter_weights
from ..devices import tensor_parallel_group
from ..load_plan.update_weights import Incomplete, Places, reason_against
from ..pushes import Group, Publisher
from .coverage import Coverage
from .device import device_of
from .straight import obstacle_of

log = init_logger("vllm.overwire")

BACKEND = "overwire"


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
    """The trainer's one-time message to a worker, which says how to reach pushes.

    master_address, master_port, world_size, rank_offset: the process group that sends pushes; not used for a folder or
    a store. deltas: whether the trainer will push deltas. For the other fields see docs/live-updates.md.
    """

    storage_options: dict[str, Any] | None = None
    max_memory: int | str = "1GiB"
    strict: bool = True
    deltas: bool = False
    master_address: str | None = None
    master_port: int | None = None
    world_size: int | None = None
    rank_offset: int = 1
    timeout: float = 300


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
    """The info of one push, from a `Publisher`."""

    kind: str
    number: int
    size: int
    path: str | None = None


class TransferEngine(WeightTransferEngine):  # type: ignore[misc, unused-ignore]
    """Loads pushes into the parameters of one worker.

    If the parameters contain the checkpoint's bytes, they are overwritten in place. Then only this rank's slices are
    decoded, and no extra memory is needed. If vLLM has changed the weights after loading, for example in a quantized
    model, vLLM loads the model again layer by layer.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._info: Any = InitInfo()
        self._group: Group | None = None
        self._places: dict[int, Places] = {}  # keyed by the id of a model, which the engine's worker keeps alive

    def init_transfer_engine(self, init_info: Any) -> None:
        """Notes how to reach pushes, and joins the group if there is one.

        Raises ValueError if the trainer will push deltas and this model does not support them. Otherwise the error
        would come at the second push, after a training step."""
        from ..._compat_api import parse_size

        self.shutdown()
        parse_size(init_info.max_memory, "init_info: max_memory")
        self._info = init_info
        if init_info.master_address is not None:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
            self._group = Group(
                init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout
            )
        if init_info.deltas:
            try:
                self._require_delta_support()
            except ValueError:
                self.shutdown()  # then the trainer, which waits for this rank, fails
                raise

    def _require_delta_support(self) -> None:
        if (reason := obstacle_of(self.model, self.model_config)) is not None:
            text = f"this model does not support deltas, because vLLM changes its weights: {reason}"
            raise ValueError(f"overwire: {text}: push all weights")

    def start_weight_update(self) -> None:
        """Does nothing, because each push is a complete update."""

    def finish_weight_update(self) -> None:
        """Does nothing, because a push is in use when `update_weights` returns."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a push."""
        if self.device.type == "cpu":  # vLLM's function would try to synchronize a GPU
            self.receive_weights(self.parse_update_info(update_info))
        else:
            super().update_weights(update_info)

    @torch.no_grad()
    def receive_weights(self, update_info: Any) -> None:
        """Loads a push.

        Raises `Incomplete`, a ValueError, if the push lacks a weight, and DeltaBaseError for a delta of other weights.
        These two errors leave the model unchanged. After any other error the model may have a mix of old and new
        weights, and the trainer must push all weights again.
        """
        if reason := reason_against(update_info.kind, update_info.path):
            if self._group is not None:
                self._group.refuse_push(update_info.number, reason)  # the other ranks must not wait for this one
            raise ValueError(f"overwire: update_info: {reason}")
        with self._receive_file(update_info) as where:
            if update_info.kind == "whole":
                self._load_whole(where)
            else:
                self._require_delta_support()
                self._places_of_model().apply_delta(where, self._info.storage_options)

    @contextlib.contextmanager
    def _receive_file(self, info: Any) -> Iterator[str]:
        if info.path is not None:
            yield info.path
        elif self._group is None:
            text = "overwire: update_info: expected a path, because no group was joined:"
            raise ValueError(f"{text} call init_weight_transfer_engine first, or push to a folder or store")
        else:
            with self._group.received(info.size, info.number) as where:
                yield where

    def _load_whole(self, where: str) -> None:
        reason = obstacle_of(self.model, self.model_config)
        if reason is None and self._places_of_model().load_whole(where, self._info.storage_options, log):
            return
        if reason is not None:
            log.info_once("overwire: updates layer by layer: %s", reason)
        self._load_layerwise(where)

    def _places_of_model(self) -> Places:
        from ..._compat_api import parse_size

        model = self.model
        if id(model) not in self._places:
            most = parse_size(self._info.max_memory, "max_memory") or 1
            ranks = tensor_parallel_group(parallel_state, "device_group")
            self._places[id(model)] = Places(
                model, self._load_weights, device_of(model, self.vllm_config.load_config), most, ranks
            )
        return self._places[id(model)]

    def _load_weights(self, tensors: Any) -> None:
        # This runs on stand-ins, so a missing weight is found before anything changes.
        with Coverage(self.model) as coverage:
            names = self.model.load_weights(tensors)
        missing = coverage.missing_weights(None if names is None else set(names)) if self._info.strict else ()
        if missing:
            raise Incomplete(f"overwire: the push lacks weights of the model: {sorted(missing)}")

    def _load_layerwise(self, where: str) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        from ..._compat_api import parse_size

        device = device_of(self.model, self.vllm_config.load_config)  # called before vLLM removes the parameters
        options = {
            "storage_options": self._info.storage_options,
            "max_memory": parse_size(self._info.max_memory, "max_memory"),
        }
        initialize_layerwise_reload(self.model)
        with disable_mtp_completeness_check():
            self.model.load_weights(iter_weights(where, device, options))
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.close()
            self._group = None
        self._places.clear()


@dataclass
class TrainerInit(TrainerInitInfo):  # type: ignore[misc, unused-ignore]
    """Configures the trainer. `rank` is the rank of this process. Rank 0 pushes.

    where: a folder or URI that workers reach under the same name. master_address, master_port, world_size (all workers
    and one trainer): the process group that sends pushes, if `where` is None.
    deltas: whether to keep a copy of the pushed weights, and to push only changes.
    dtype: the workers' dtype ("bfloat16"), to which floating-point tensors are cast before a push.
    host: whether to move each tensor to the host when the source yields it, for models that do not fit on one GPU.
    storage_options: how the trainer reaches the store. worker_options: how the workers reach it; None means
    storage_options.
    """

    backend: ClassVar[str] = BACKEND

    where: str | None = None
    master_address: str | None = None
    master_port: int | None = None
    world_size: int | None = None
    deltas: bool = False
    dtype: str | None = None
    compress: bool = True
    host: bool = False
    strict: bool = True
    max_memory: int | str = "1GiB"
    storage_options: dict[str, Any] | None = None
    worker_options: dict[str, Any] | None = None
    timeout: float = 300

    def __post_init__(self) -> None:
        group = (self.master_address, self.master_port, self.world_size)
        if any(part is None for part in group) and (self.where is None or group != (None, None, None)):
            raise ValueError("overwire: init_info: pass where, or all of master_address, master_port and world_size")


class TrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc, unused-ignore]
    """Pushes the weights of a `WeightSource`, or their changes. Each call of `send_weights` makes one push."""

    init_info_cls = TrainerInit

    def __init__(self, init_info: TrainerInit, **base: Any) -> None:
        super().__init__(is_sender=init_info.is_sender, **base)
        self._info = init_info
        self._publisher: Publisher | None = None

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> TrainerEngine:
        """Configures the workers, and joins the group with them if there is one."""
        if source is None:
            raise ValueError("overwire: trainer_init: expected a WeightSource, got None: pass source=")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._meet_engines()
        return engine

    def _meet_engines(self) -> None:
        info = self._info
        reach = info.storage_options if info.worker_options is None else info.worker_options
        facts: dict[str, Any] = {name: getattr(info, name) for name in ("strict", "max_memory", "timeout", "deltas")}
        facts["storage_options"] = reach
        group = None
        if info.master_address is not None and info.master_port is not None and info.world_size is not None:
            facts.update(master_address=info.master_address, master_port=info.master_port, world_size=info.world_size)
            with ThreadPoolExecutor(1) as side:  # the call returns only after workers and trainer have joined the group
                future = start_thread(side.submit, self.client.init_weight_transfer_engine, facts)
                try:
                    group = Group(info.master_address, info.master_port, 0, info.world_size, info.timeout, future.done)
                except ArgumentError:
                    future.result()  # raises the engines' error, which has more details
                    raise
                future.result()
        else:
            self.client.init_weight_transfer_engine(facts)
        more: Any = {"deltas": info.deltas, "compress": info.compress, "storage_options": info.storage_options}
        self._publisher = Publisher(info.where, group=group, **more)

    @torch.no_grad()
    def send_weights(self, *, whole: bool = False) -> None:
        """Pushes the weights of the source, and returns when all workers have loaded them. Call it on every rank of the
        trainer. whole: whether to push all weights instead of a delta, for example for a worker that has just
        started."""
        if not self.is_sender:
            for _ in self.source:
                pass  # this rank only helps to assemble tensors
            return
        if self._publisher is None:
            raise RuntimeError("overwire: send_weights: the trainer was shut down: call trainer_init again")
        tensors = {name: self._convert_tensor(tensor) for name, tensor in self.source}
        with self._publisher.push(tensors, whole=whole) as push:
            self.client.start_weight_update()
            side = ThreadPoolExecutor(1)
            try:
                future = start_thread(side.submit, self.client.update_weights, push.info)
                try:
                    push.carry(future.done)
                except ArgumentError:
                    if future.done():
                        future.result()  # raises the engines' error, which has more details
                    raise
                future.result()
            finally:
                side.shutdown(wait=False)  # a failed worker may never answer
            self.client.finish_weight_update()

    def _convert_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self._info.dtype) if self._info.dtype and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device="cpu" if self._info.host else None, dtype=dtype)

    def shutdown(self) -> None:
        """Leaves the group. The workers' vLLM keeps running."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


# vLLM looks for plug-ins only in its own processes. A trainer registers the back end by importing this module.
if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, TrainerEngine)
