"""Implements vLLM's load format `overwire`.

vLLM's own loader selects the files and experts of a model and checks that all weights are loaded. overwire reads the
files. Written for vLLM 0.32 and 0.33.

In this module a *part* is one `Source` of vLLM, the *files* are the paths of a part, and the *source* is the option
that replaces the files of the served model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import vllm
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.weight_utils import enable_tqdm

from ..._compat_api import parse_size
from .. import check_options, iter_weights
from ..devices import tensor_parallel_group
from ..load_plan.open_files import Opening
from ..load_plan.run_plan import SliceLoad, load_by_slices
from .coverage import Coverage
from .device import device_of, device_of_config
from .methods import COPIED

# vLLM configures only loggers with names that begin with "vllm".
log = init_logger("vllm.overwire")

KNOWN = ("0.32.", "0.33.")

_KEYS = {
    "plan": (bool, "true or false"),
    "prepared": ((bool, str), "true, false or a folder"),
    "offload": ((bool, str), "true, false or the bytes of layers that stay on the GPU, like '8GB'"),
    "offload_where": (str, "'host' or 'device'"),
    "strict": (bool, "true or false"),
    "enable_weights_track": (bool, "true or false"),
}


class OverwireModelLoader(BaseModelLoader):  # type: ignore[misc, unused-ignore]
    """Loads plain and compressed safetensors through overwire.

    The model's `load_weights` first runs on stand-ins for the tensors, which shows where it copies each part. Then
    exactly these bytes are loaded directly into the parameters. If the model cannot be loaded by slices, `load_weights`
    gets real tensors in file order, on the model's device. The model owns these tensors.

    Raises ValueError for an invalid `model_loader_extra_config`.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._options = check_options(load_config.model_loader_extra_config, _KEYS)
        offload = self._options.get("offload")
        self._streams = bool(offload)
        self._keep = parse_size(offload if isinstance(offload, str) else None, "model_loader_extra_config: offload")
        if self._streams and self._options.get("prepared"):
            raise ValueError("overwire: model_loader_extra_config: offload cannot be combined with prepared")
        self._where = self._options.get("offload_where", "host")
        if self._where not in ("host", "device"):
            raise ValueError("overwire: model_loader_extra_config: offload_where must be 'host' or 'device'")
        if not self._streams and "offload_where" in self._options:
            raise ValueError("overwire: model_loader_extra_config: offload_where needs offload")
        if not vllm.__version__.startswith(KNOWN):
            log.warning_once("overwire was tested with vLLM 0.32 and 0.33, not with %s", vllm.__version__)
        self._reader = _Reader(load_config, self._options)

    def download_model(self, model_config: Any) -> None:
        """Downloads the files that the model needs. Does nothing for a model at `source`."""
        if not self._reader.at_source(model_config):
            self._reader.download_model(model_config)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the names and tensors of all weights that the model reads, secondary weights last."""
        self._reader.note_model(model_config, model)
        weights: Iterator[tuple[str, torch.Tensor]] = self._reader.get_all_weights(model_config, model)
        return weights

    def load_model(self, vllm_config: Any, model_config: Any, *more: Any, **named: Any) -> torch.nn.Module:
        """Loads the model as vLLM's loader does. While vLLM builds the model, overwire opens the files and prepares the
        device. Garbage collections visit only objects that the load has created."""
        self._reader.config = vllm_config
        try:
            with _only_new_garbage():
                return self._load_model(vllm_config, model_config, *more, **named)
        finally:
            self._reader.close()
            self._reader.config = None

    def _load_model(self, vllm_config: Any, model_config: Any, prefix: str = "", **named: Any) -> torch.nn.Module:
        if self._streams and model_config is vllm_config.model_config:  # a draft model's layers stay on the GPU
            return self._load_hosted(vllm_config, model_config, prefix, **named)
        start = None
        if option := self._options.get("prepared"):
            from .prepared import PreparedStart

            start = PreparedStart(option, vllm_config, model_config, prefix, self._reader)
            ready = start.load_model()
            if ready is not None:
                self._reader.note_model(model_config, ready)
                return ready
        if self._takes_slices(model_config):
            self._reader.open_ahead(vllm_config, model_config)
        module: torch.nn.Module = super().load_model(vllm_config, model_config, prefix, **named)
        if start is not None:
            start.note_model(module)
        return module

    def _load_hosted(self, vllm_config: Any, model_config: Any, prefix: str, **named: Any) -> torch.nn.Module:
        from .streaming import hosted_layers, prepare_config

        static = prepare_config(vllm_config, model_config)
        with hosted_layers(torch.device(device_of_config(vllm_config, self.load_config))) as layers:
            model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix, **named)
            layers.stream_layers(model, self._keep, static, self._where)
        return model

    def _takes_slices(self, model_config: Any) -> bool:
        method = model_config.quantization
        return not self._streams and bool(self._options.get("plan", method is None or method in COPIED))

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Loads the weights of a model. Raises ValueError with vLLM's message if the files lack a parameter or a part
        of a parameter."""
        self._reader.note_model(model_config, model)
        is_quantised = model_config.quantization is not None
        if not self._takes_slices(model_config) or not load_by_slices(
            functools.partial(self._load_by_slices, model, model_config, is_quantised), self._options["max_memory"], log
        ):
            self._load_checked(model, model_config, is_quantised)

    def _load_by_slices(self, model: torch.nn.Module, model_config: Any, quantised: bool, attempt: SliceLoad) -> None:
        reader = self._reader
        weights = functools.partial(reader.get_all_weights, model_config, model)
        ranks = tensor_parallel_group(parallel_state, "cpu_group")
        reader.attempt = attempt
        try:
            with attempt.replace_loader(model, weights, ranks, reader.sharing_pays):
                self._load_checked(model, model_config, quantised)
        finally:
            reader.attempt = None

    def _load_checked(self, model: torch.nn.Module, model_config: Any, quantised: bool) -> None:
        if not self._options.get("strict", True) or quantised:
            self._reader.load_weights(model, model_config)  # only vLLM can check quantised parameters
            return
        with Coverage(model) as coverage:
            self._reader.load_weights(model, model_config)
        missing = coverage.missing_weights(self._reader.loaded)
        if missing:
            text = f"Following weights were not initialized from checkpoint: {missing} (found by overwire; "
            text += "--model-loader-extra-config '{\"strict\": false}' leaves this check to vLLM)"
            raise ValueError(text)


# Python 3.12 itself freezes a few hundred objects. If the count is larger, the program has frozen objects.
_FROZEN_BY_PYTHON = 1000


@contextlib.contextmanager
def _only_new_garbage() -> Iterator[None]:
    # vLLM collects garbage twice in a load. A collection that visits all objects of vLLM's modules would take longer
    # than loading the weights, so these objects are frozen. Does nothing if the program has frozen objects itself.
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# The path of the first model that this process loaded from each source, for calls without a vLLM configuration.
_first_models: dict[str, str] = {}


def _target_path(config: Any) -> str | None:
    """Returns the path of the model that a configuration serves. Draft models may have other paths."""
    target = getattr(getattr(config, "speculative_config", None), "target_model_config", None)
    path: str | None = getattr(target or getattr(config, "model_config", None), "model", None)
    return path


class _Reader(DefaultModelLoader):  # type: ignore[misc, unused-ignore]
    """A loader that works like vLLM's own loader, except that overwire reads the files."""

    def __init__(self, load_config: Any, chosen: dict[str, Any]) -> None:
        extra = {key: chosen[key] for key in ("enable_weights_track",) if key in chosen}
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config=extra))
        self._options = chosen
        #: The path or URI of the served model's weights if they are not in the model's folder, and the options to reach
        #: it.
        self.source, self.storage_options = chosen.get("source"), chosen.get("storage_options")
        self.counter_before_loading_weights: float = 0.0
        self._device = "cpu"
        self.loaded: set[str] | None = None  # the names that the model reports as loaded
        self.attempt: SliceLoad | None = None  # if set, it provides stand-ins instead of tensors
        self._sourced_model: str | None = None  # the path of the model with its weights at `source`
        self.config: Any = None  # vLLM's configuration while `load_model` runs
        self._opening: Opening | None = None

    @property
    def sharing_pays(self) -> bool:
        """Whether ranks gain by sharing the reading, because weights go to GPUs or come from a store; see
        `should_share_reading`. Valid after `note_model`."""
        from ..._compat_api import is_remote

        return self._device != "cpu" or (self._sourced_model is not None and is_remote(str(self.source)))

    def open_ahead(self, vllm_config: Any, model_config: Any) -> None:
        """Starts to open the files that a model will probably read, before the model is built."""
        device = device_of_config(vllm_config, self.load_config)
        self._opening = Opening(functools.partial(self._likely_files, model_config), device, self._options)

    def at_source(self, model_config: Any) -> bool:
        """Returns whether the weights are read from `source`. This is true for the served model, but not for a
        draft model, although vLLM loads both with the same options."""
        from vllm.config import get_current_vllm_config_or_none

        if "source" not in self._options:
            return False
        target = _target_path(self.config or get_current_vllm_config_or_none())
        if target is None:
            target = _first_models.setdefault(str(self.source), model_config.model)
        return bool(model_config.model == target)

    def _likely_files(self, model_config: Any) -> tuple[Any, str | None] | None:
        if self.at_source(model_config):
            return self.source, None
        if not os.path.isdir(model_config.model):  # vLLM downloads the model later
            return None
        return self.files_of(DefaultModelLoader.Source(model_config.model, model_config.revision))

    def close(self) -> None:
        """Closes files that `open_ahead` opened and no load has used."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.close()

    def note_model(self, model_config: Any, model: torch.nn.Module) -> None:
        """Notes the device and the source of a model. Call it before vLLM removes the parameters, as in a reload."""
        self._device = device_of(model, self.load_config)
        # A reload from another path must not read the weights at `source`.
        is_first = model.__dict__.setdefault("_overwire_model", model_config.model) == model_config.model
        self._sourced_model = model_config.model if is_first and self.at_source(model_config) else None

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the names and tensors of all weights that the model reads. Loads the recorded copies after the last
        stand-in."""
        yield from super().get_all_weights(model_config, model)
        if self.attempt is not None:
            self.attempt.load_recorded()

    def _get_weights_iterator(self, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if self.load_config.safetensors_load_strategy == "torchao":
            raise ValueError("overwire: torchao's safetensors are not supported: use --load-format safetensors")
        weights = None if self.attempt is None else self.attempt.next_stand_ins()
        if weights is None:
            weights = self._read_part(part)
        return ((part.prefix + name, tensor) for name, tensor in weights)

    def _read_part(self, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
        files: Any = self.source
        index = None
        if part.model_or_path != self._sourced_model or part.subfolder or part.allow_patterns_overrides is not None:
            files, index = self.files_of(part)
        if not self.counter_before_loading_weights:
            self.counter_before_loading_weights = time.perf_counter()
        options: dict[str, Any] = {"wanted": self._is_wanted, "unused": part.is_unused_weight, "index": index}
        if self.attempt is None:
            progress = bool(enable_tqdm(self.load_config.use_tqdm_on_load))
            return iter_weights(files, self._device, self._options, progress=progress, **options)
        if self.local_expert_ids is None:
            options["wanted"] = None
        return self.attempt.open_source(files, self._device, self._options, opening=self._opening, **options)

    def track_weights_loading(
        self, model: torch.nn.Module, loaded_weights: set[str] | None, *args: Any, **more: Any
    ) -> None:
        """Runs vLLM's own check, and stores the model's loaded names for overwire's check."""
        self.loaded = None if loaded_weights is None else set(loaded_weights)
        super().track_weights_loading(model, loaded_weights, *args, **more)

    def _is_wanted(self, name: str) -> bool:
        return not should_skip_weight(name, self.local_expert_ids)

    def files_of(self, part: Any) -> tuple[list[str], str | None]:
        """Returns the files of a part in vLLM's order, and their index.json if it applies."""
        folder, files, is_safe, index = self._prepare_weights(
            part.model_or_path, part.subfolder, part.revision, part.fall_back_to_pt, part.allow_patterns_overrides
        )
        if not is_safe:
            names = ", ".join(map(os.path.basename, files[:3]))
            raise ValueError(f"overwire: {folder}: expected safetensors files, got {names}: use --load-format auto")
        if self._encoder_only_lm_prefixes is not None:
            from vllm.model_executor.model_loader.weight_utils import filter_mm_encoder_only_safetensors_files

            files = filter_mm_encoder_only_safetensors_files(
                files, folder, index, self._encoder_only_lm_prefixes, weights_mapper=self._encoder_only_weights_mapper
            )
            if not files:
                raise RuntimeError(f"overwire: {folder}: no weight file remains after filtering for --mm-encoder-only")
        index_path = os.path.join(folder, index) if part.allow_patterns_overrides is None else None
        return sorted(files, key=_natural_order), index_path


def reader_of(config: Any) -> Any:
    """Returns a loader that knows the safetensors files of the models in an engine's configuration, even if the load
    format is not overwire."""
    is_ours = config.load_config.load_format == "overwire"
    options = config.load_config.model_loader_extra_config if is_ours else {}
    reader = _Reader(config.load_config, check_options(options, _KEYS))
    reader.config = config
    return reader


def _natural_order(path: str) -> list[Any]:
    return [(int(text), "") if text.isdigit() else (-1, text) for text in re.split(r"(\d+)", os.path.basename(path))]
