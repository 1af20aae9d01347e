"""Implements vLLM's sleep mode: `--enable-sleep-mode --sleep-mode-backend overwire`.

vLLM's own back end copies the weights to pinned memory that it allocates for each sleep. This back end encodes them on
the GPU first, and reuses the pinned memory. In all other respects it works like vLLM's. Addresses stay the same, so
captured graphs, communicators and compiled code stay valid. The KV cache is released. The pinned memory is prepared in
the background once a worker has loaded its model. Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.logger import init_logger

log = init_logger("vllm.overwire")

_TAG = "weights"

# The number of words of an allocation that are sampled.
_SAMPLE = 4096

# Maps the engine's number of the best transform for a sample to a dtype (docs/format.md 3.1).
_DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32, 4: torch.float8_e4m3fn, 5: torch.float8_e5m2}


class SleepBackend(CuMemBackend):  # type: ignore[misc, unused-ignore]
    """A sleep back end for vLLM. Level 1 keeps the weights compressed in pinned memory. Other levels and `discard` work
    like vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self._asleep: Any = None
        self._memory: Any = None  # memory that is being prepared
        self._dtypes: dict[int, torch.dtype] = {}  # keyed by address, because addresses do not change

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Returns True, because compiled kernels stay loaded."""
        return True

    def suspend(self, level: int = 1) -> None:
        """Frees the GPU memory. Raises the errors of `overwire.sleep`. After an error all weights are awake."""
        from vllm.device_allocator import get_mem_allocator_instance

        allocator = get_mem_allocator_instance()
        if level == 1:
            self._put_to_sleep(allocator)
        super().suspend(level if level != 1 else 2)  # level 2 does not save the weights, which are already saved

    def _put_to_sleep(self, allocator: Any) -> None:
        from vllm.device_allocator.cumem import unmap_and_release

        import overwire

        blocks = {
            ptr: data for ptr, data in allocator.pointer_to_data.items() if data.tag == _TAG and not data.is_asleep
        }
        if not blocks:
            return
        if self._asleep is not None:
            raise RuntimeError("overwire: sleep: some weights are asleep and others awake: wake them first")
        tensors = self._tensors_of_blocks(blocks)
        self._asleep = overwire.sleep(tensors, release=False)
        del tensors
        size, stored_size = self._asleep.nbytes, self._asleep.stored
        for data in blocks.values():
            try:
                unmap_and_release(data.handle)
            finally:
                data.is_asleep = True
        log.info("overwire: %.2f GiB of weights sleep in %.2f GiB of host memory", size / 2**30, stored_size / 2**30)

    def prepare(self) -> None:
        """Starts to prepare the host memory for the first sleep. Logs errors, because the sleep also works without
        this."""
        from vllm.device_allocator import get_mem_allocator_instance

        import overwire

        blocks = {ptr: data for ptr, data in get_mem_allocator_instance().pointer_to_data.items() if data.tag == _TAG}
        if blocks and self._asleep is None:
            try:
                self._memory = overwire.prepare_sleep(self._tensors_of_blocks(blocks))
            except overwire.OverwireError as error:
                log.warning("overwire: the first sleep will take longer: %s", error)

    def _tensors_of_blocks(self, held: Any) -> dict[str, torch.Tensor]:
        for device in {data.handle[0] for data in held.values()}:
            torch.accelerator.synchronize(device)
        tensors = {}
        for ptr, data in held.items():
            memory = memory_of(ptr, data.handle[1], data.handle[0])
            if ptr not in self._dtypes:
                self._dtypes[ptr] = _dtype_for(memory)
            tensors[f"{ptr:x}"] = memory.view(self._dtypes[ptr])
        return tensors

    def resume(self, tags: list[str] | None = None) -> None:
        """Maps the memory again and decodes the weights into it. Can be called again after an error."""
        super().resume(tags)
        if self._asleep is not None and (tags is None or _TAG in tags):
            self._state = "RESUMING"
            self._asleep.wake()
            self._asleep = None
            self._state = "RUNNING"


def memory_of(ptr: int, size: int, device: int) -> torch.Tensor:
    """Returns a uint8 tensor in an existing GPU allocation, without a copy."""
    interface = {"shape": (size,), "typestr": "|u1", "data": (ptr, False), "version": 3, "strides": None}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=f"cuda:{device}")


def _dtype_for(memory: torch.Tensor) -> torch.dtype:
    """Returns the dtype with which an allocation compresses best. Any dtype is correct; the choice affects only the
    size."""
    from ... import gpu

    usable = memory[: memory.numel() // 4 * 4]
    if not usable.numel():
        return torch.uint8
    words = usable.view(torch.int32)[:: max(1, usable.numel() // (_SAMPLE * 4))].cpu().contiguous()
    return _DTYPES.get(gpu.transform(None, words.numpy()) or 0, torch.uint8)
