"""Patches transformers' loader for `overwire.patch_safetensors`.

A model's tensors are loaded in one pass, each to the device that `device_map` assigns to its parameter. transformers 5
passes every slice, with its device and dtype, to `spawn_materialize` before it uses the first slice. transformers 4
loads shard by shard in `load_shard_file`, and the arguments of this function show devices and dtypes. In both versions
the device memory comes from torch's allocator, which transformers' warm-up has filled. The loaded tensor becomes the
parameter and is not copied again.

Models with a part offloaded to disk, and models that are quantised while they load, are read tensor by tensor, because
loading ahead would need the memory that offloading or quantisation saves. With a tensor-parallel plan, slices are also
read one by one, each directly to its device.

While transformers builds the modules, the engine prepares the GPUs of the `device_map`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .._compat_api import new_lock
from . import Lazy, uses_disk

__all__ = ["MODULES", "pair_replacements"]

#: The modules of transformers that `pair_replacements` uses.
MODULES = ("transformers.core_model_loading", "transformers.modeling_utils")


def pair_replacements(found: Callable[[str, str], Any], lazy: Lazy) -> list[tuple[Any, Any]]:
    """Returns the objects to replace, each with its replacement."""
    # transformers 4 determines the device map after it has built the model. transformers 5 does this only for "auto".
    maps = (found(MODULES[1], name) for name in ("check_and_set_device_map", "_get_device_map"))
    pairs: list[tuple[Any, Any]] = [
        (original, _prepare_devices(original, lazy)) for original in maps if original is not None
    ]
    warm = found(MODULES[1], "caching_allocator_warmup")
    if warm is not None:
        pairs.append((warm, _skip_warmup(warm, lazy)))
    convert = found(MODULES[0], "convert_and_load_state_dict_in_model")
    spawn = found(MODULES[0], "spawn_materialize")
    if convert is not None and spawn is not None:
        return pairs + _wrap_conversion(convert, spawn, lazy)
    shard = found(MODULES[1], "load_shard_file")
    return pairs if shard is None else [*pairs, (shard, _wrap_shard_loader(shard, lazy))]


def _prepare_devices(original: Any, lazy: Lazy) -> Any:
    @functools.wraps(original)
    def device_map_of(*args: Any, **kwargs: Any) -> Any:
        device_map = original(*args, **kwargs)
        lazy.prepare(device_map)
        return device_map

    return device_map_of


class _Result(Future[Any]):
    # Replaces the Future of a transformers worker thread. The engine's threads load the tensor, and the first request
    # starts the load.

    def __init__(self, give: Callable[[], Any]) -> None:
        super().__init__()
        self._give = give
        self._lock = new_lock()

    def result(self, timeout: float | None = None) -> Any:
        with self._lock:
            if not self.done():
                try:
                    self.set_result(self._give())
                except BaseException as error:
                    self.set_exception(error)
        return super().result(timeout)


def _skip_warmup(original: Any, lazy: Lazy) -> Any:
    @functools.wraps(original)
    def caching_allocator_warmup(*args: Any, **kwargs: Any) -> Any:
        # A model that a pipeline loads ahead already has its memory, and the warm-up would allocate the same amount
        # again.
        if not lazy.passed():
            original(*args, **kwargs)

    return caching_allocator_warmup


def _wrap_conversion(convert: Any, spawn: Any, lazy: Lazy) -> list[tuple[Any, Any]]:
    loading = threading.local()

    @functools.wraps(convert)
    def convert_and_load_state_dict_in_model(
        model: Any, state_dict: Any, load_config: Any, *rest: Any, **more: Any
    ) -> Any:
        before = getattr(loading, "ahead", None)
        sparing = uses_disk(load_config.device_map) or _is_quantising(load_config.hf_quantizer)
        with contextlib.closing(lazy.ahead()) as ahead:
            loading.ahead = None if sparing else ahead
            try:
                return convert(model, state_dict, load_config, *rest, **more)
            finally:
                loading.ahead = before

    @functools.wraps(spawn)
    def spawn_materialize(
        thread_pool: Any,
        tensor: Any,
        device: Any = None,
        dtype: Any = None,
        sharding_op: Any = None,
        tensor_idx: Any = None,
    ) -> Any:
        target = tensor.device(device) if isinstance(tensor, lazy.slice) else None
        if target is None:
            return spawn(thread_pool, tensor, device, dtype, sharding_op, tensor_idx)
        ahead = getattr(loading, "ahead", None)
        if ahead is None or sharding_op is not None:
            return spawn(thread_pool, tensor.on(target), device, dtype, sharding_op, tensor_idx)
        give = ahead.want(tensor, target, dtype)

        def materialize() -> Any:
            # This casts only if the engine could not cast.
            return give().to(device=device, dtype=dtype)

        return materialize if thread_pool is None else _Result(materialize)

    return [(convert, convert_and_load_state_dict_in_model), (spawn, spawn_materialize)]


def _wrap_shard_loader(shard: Any, lazy: Lazy) -> Any:
    @functools.wraps(shard)
    def load_shard_file(args: Any) -> Any:
        # The arguments of transformers 4.57. Other versions are not patched.
        if len(args) != 14 or not isinstance(args[6], dict):
            return shard(args)
        device_map, quantizer, names, mesh = args[4], args[5], args[6], args[13]
        if mesh is not None or uses_disk(device_map) or _is_quantising(quantizer):
            return shard(args)
        devices = _device_of(device_map)
        with lazy.plan(lambda name: devices(names[name]) if name in names else None):
            return shard(args)

    return load_shard_file


def _device_of(device_map: Any) -> Callable[[str], Any]:
    # Tries longer prefixes before shorter ones, as transformers does.
    if device_map is None:
        return lambda name: "cpu"
    pattern = re.compile("|".join(re.escape(prefix) for prefix in sorted(device_map, reverse=True)))

    def device_of_name(name: str) -> Any:
        match = pattern.search(name)
        return None if match is None else device_map[match.group()]

    return device_of_name


def _is_quantising(quantizer: Any) -> bool:
    return quantizer is not None and not quantizer.pre_quantized
