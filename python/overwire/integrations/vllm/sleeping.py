"""Implements vLLM's sleep mode: `--enable-sleep-mode --sleep-mode-backend overwire`.

vLLM's own back end copies the weights to pinned memory that it allocates for each sleep. This back end encodes them on
the GPU first, and reuses the pinned memory. In all other respects it works like vLLM's back end. Addresses stay the
same, so captured graphs, communicators and compiled code stay valid. The KV cache is released. The pinned memory is
prepared in the background when a worker has loaded its model.

If the host store is used, the weights are put into it when the engine is up, only once for all engines of the model.
Weights that have not changed since then sleep without a copy.

vLLM's level 2 discards the weights, and `reload_weights` reads the model again. If OVERWIRE_SLEEP_IMAGES names a
folder, the weights are stored there when the engine is up (`image`), and waking restores them.

Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.distributed import parallel_state
from vllm.logger import init_logger

from ..._compat_api import setting
from ..devices import all_agree
from ..kept_model.keep_files import Refused, ensure_folder, fingerprint
from .image import PoolImage, by_position

log = init_logger("vllm.overwire")

_TAG = "weights"

# The load formats that read the safetensors files of the model's folder.
_FORMATS = ("overwire", "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")

# The most seconds that a level-2 sleep waits for running calls before it frees the engine's memory.
_LONGEST_WAIT = 30.0

# The number of words that are sampled in an allocation.
_SAMPLE = 4096

# Maps the number of a transform (docs/format.md 3.1) to a dtype.
_DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32, 4: torch.float8_e4m3fn, 5: torch.float8_e5m2}


class SleepBackend(CuMemBackend):  # type: ignore[misc, unused-ignore]
    """A sleep back end for vLLM. Level 1 keeps the weights compressed, in pinned memory or in the host store. Level 2
    restores them from a file, if there is a file. Other levels and `discard` work as in vLLM's back end."""

    #: The most recent back end of this process. vLLM has one per worker.
    current: weakref.ref[SleepBackend] | None = None

    def __init__(self) -> None:
        super().__init__()
        SleepBackend.current = weakref.ref(self)
        self._image: PoolImage | None = None
        self._restores = False  # whether the weights are asleep and the image will restore them
        self._asleep: Any = None
        self._memory: Any = None  # memory that is being prepared, or weights that are being put into the host store
        self._host = False  # whether the host store is used
        self._dtypes: dict[int, torch.dtype] = {}  # keyed by address, because addresses do not change

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Returns True, because compiled kernels stay loaded."""
        return True

    def suspend(self, level: int = 1) -> None:
        """Frees the GPU memory. Raises the errors of `overwire.sleep`. After an error all weights are awake. After
        level 2, the process holds no memory for the weights, and overwire has no open files or registered memory."""
        self.finish_storing()
        if level == 1:
            self._put_to_sleep()
        elif level == 2 and self._image is not None and (blocks := _blocks_awake()):
            reason = self._image.reason_against(self._tensors_of_blocks(blocks))
            self._restores = not reason
            if reason:
                log.info("overwire: the weights are discarded, and reload_weights must read the model: %s", reason)
        super().suspend(level if level != 1 else 2)  # overwire has saved the weights, so vLLM must not
        if level == 2:
            self.quiesce_engine()

    def quiesce_engine(self) -> None:
        """Calls `overwire.quiesce`. Logs its errors."""
        import overwire

        try:
            overwire.quiesce(timeout=_LONGEST_WAIT)
        except overwire.OverwireError as error:
            log.warning("%s", error)

    def _put_to_sleep(self) -> None:
        from vllm.device_allocator.cumem import unmap_and_release

        import overwire

        blocks = _blocks_awake()
        if not blocks:
            return
        if self._asleep is not None:
            raise RuntimeError("overwire: sleep: some weights are asleep and others awake: wake them first")
        self._asleep = overwire.sleep(by_position(self._tensors_of_blocks(blocks)), release=False, host=self._host)
        size, stored_size, shared_size = self._asleep.nbytes, self._asleep.stored, self._asleep.shared
        for data in blocks.values():
            try:
                unmap_and_release(data.handle)
            finally:
                data.is_asleep = True
        words = "overwire: %.2f GiB of weights sleep in %.2f GiB of host memory, and %.2f GiB of the host store"
        log.info(words, size / 2**30, stored_size / 2**30, shared_size / 2**30)

    def note_files(self, config: Any, is_dummy: bool) -> None:
        """Notes whether the host store is used. If the weights will be stored for level 2, also notes the files from
        which the model will be loaded. is_dummy: whether vLLM loads random weights."""
        self._image, self._host = None, _uses_host_store(config.load_config)
        folder = str(setting("OVERWIRE_SLEEP_IMAGES"))
        if not folder:
            return
        try:
            if is_dummy:
                raise Refused("vLLM loads random weights")
            self._image = PoolImage(ensure_folder(folder), _facts_of_files(config), log)
        except Exception as error:  # the load itself reports what is wrong with the files
            log.info("overwire: the weights will not be stored for level-2 sleep: %s", error or type(error).__name__)

    def store_weights(self, model: torch.nn.Module) -> None:
        """Starts to store the weights in the background, for level 2 and in the host store. model: the model, which was
        just loaded from its files."""
        self._keep_in_host_store()
        if self._image is not None and (blocks := _blocks_awake()):
            if any(getattr(parameter, "_vllm_is_uva_offloaded", False) for parameter in model.parameters()):
                log.info("overwire: the weights will not be stored for level-2 sleep: some weights are on the host")
                self._image = None
                return
            if any(getattr(model, name, None) for name in ("secondary_weights", "allow_patterns_overrides")):
                log.info("overwire: the weights will not be stored for level-2 sleep: the model also reads other files")
                self._image = None
                return
            try:
                self._image.begin_writing(self._tensors_of_blocks(blocks))
            except Exception as error:
                log.warning("overwire: the weights will not be stored for level-2 sleep: %s", error)
                self._image = None

    def _keep_in_host_store(self) -> None:
        import overwire

        if self._host and self._asleep is None and (blocks := _blocks_awake()):
            try:
                self._memory = overwire.prepare_sleep(by_position(self._tensors_of_blocks(blocks)), host=True)
            except overwire.OverwireError as error:
                self._give_up_host_store(error)

    def _give_up_host_store(self, error: Exception) -> None:
        log.warning("overwire: the weights will sleep in this process's own memory: %s", error)
        self._host = False
        self.prepare()

    def finish_storing(self) -> None:
        """Waits for `store_weights`. Call it before the weights change or their memory is freed."""
        import overwire

        if self._image is not None:
            self._image.finish_writing()
        if self._host and self._memory is not None:
            memory, self._memory = self._memory, None
            try:
                memory.wait()
            except overwire.OverwireError as error:
                self._give_up_host_store(error)

    def has_loaded_weights(self, config: Any) -> bool:
        """Returns whether the weights are stored for level 2 and neither the weights nor the model's files have changed
        since the load. Returns the same on all ranks. Collective."""
        if not setting("OVERWIRE_SLEEP_IMAGES"):
            return False
        same = False
        try:
            blocks = _blocks_awake()
            same = bool(
                self._image is not None
                and self._image.has_bytes_of(self._tensors_of_blocks(blocks))
                and self._image.facts == _facts_of_files(config)
            )
        except Exception as error:
            log.info("overwire: reload_weights reads the model: %s", error or type(error).__name__)
        return all_agree(parallel_state, same, ("_TP", "_PP"))

    def prepare(self) -> None:
        """Starts to prepare the host memory for the first sleep, unless the weights will be stored for level 2 or in
        the host store. Logs errors, because sleep also works without this."""
        import overwire

        blocks = _blocks_awake()
        if blocks and self._asleep is None and self._image is None and not self._host:
            try:
                self._memory = overwire.prepare_sleep(by_position(self._tensors_of_blocks(blocks)))
            except overwire.OverwireError as error:
                log.warning("overwire: the first sleep will take longer: %s", error)

    def _tensors_of_blocks(self, held: Any) -> dict[int, torch.Tensor]:
        for device in {data.handle[0] for data in held.values()}:
            torch.accelerator.synchronize(device)
        tensors = {}
        for ptr, data in held.items():
            memory = memory_of(ptr, data.handle[1], data.handle[0])
            if ptr not in self._dtypes:
                self._dtypes[ptr] = _dtype_for(memory)
            tensors[ptr] = memory.view(self._dtypes[ptr])
        return tensors

    def resume(self, tags: list[str] | None = None) -> None:
        """Maps the memory again and decodes the weights into it. Can be called again after an error. If the weights
        sleep at level 2 and cannot be restored, logs the reason; `reload_weights` must then read the model."""
        wakes = tags is None or _TAG in tags
        if wakes and self._restores and self._image is not None:
            self._restore_weights(self._image, tags)
            return
        super().resume(tags)
        if self._asleep is not None and wakes:
            self._state = "RESUMING"
            self._asleep.wake()
            self._asleep = None
            self._state = "RUNNING"

    def _restore_weights(self, image: PoolImage, tags: list[str] | None) -> None:
        is_mapped = False

        def map_weights() -> dict[int, torch.Tensor]:
            nonlocal is_mapped
            super(SleepBackend, self).resume(tags)
            self._restores, is_mapped = False, True
            return self._tensors_of_blocks(_blocks_awake())

        try:
            image.restore_pool(map_weights)
        except Exception as error:
            if not is_mapped:
                raise
            log.warning("overwire: cannot restore the weights, and reload_weights must read the model: %s", error)


def _blocks_awake() -> dict[int, Any]:
    from vllm.device_allocator import get_mem_allocator_instance

    blocks = get_mem_allocator_instance().pointer_to_data.items()
    return {ptr: data for ptr, data in blocks if data.tag == _TAG and not data.is_asleep}


def _uses_host_store(load: Any) -> bool:
    options = load.model_loader_extra_config if load.load_format == "overwire" else None
    choice = (options or {}).get("host")
    return setting("OVERWIRE_HOST") not in ("", "off") if choice is None else bool(choice)


def _facts_of_files(config: Any) -> str:
    # Returns a digest that identifies the files that `reload_weights` would read.
    from .identity import facts_of_files
    from .loader import reader_of

    load_format = str(config.load_config.load_format)
    if load_format not in _FORMATS:
        raise Refused(f"--load-format {load_format} is not supported")
    return fingerprint(*facts_of_files(config.model_config, reader_of(config)))


def memory_of(ptr: int, size: int, device: int) -> torch.Tensor:
    """Returns a uint8 tensor in an existing GPU allocation, without a copy."""
    interface = {"shape": (size,), "typestr": "|u1", "data": (ptr, False), "version": 3, "strides": None}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=f"cuda:{device}")


def _dtype_for(memory: torch.Tensor) -> torch.dtype:
    """Returns the dtype with which an allocation compresses best. Any dtype is correct, because it affects only the
    size."""
    from ... import gpu

    usable = memory[: memory.numel() // 4 * 4]
    if not usable.numel():
        return torch.uint8
    words = usable.view(torch.int32)[:: max(1, usable.numel() // (_SAMPLE * 4))].cpu().contiguous()
    return _DTYPES.get(gpu.transform(None, words.numpy()) or 0, torch.uint8)
