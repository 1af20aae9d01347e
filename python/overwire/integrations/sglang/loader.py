"""Implements SGLang's load format `overwire`, as SGLang's own loader that reads through overwire.

Written for SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader, maybe_add_mtp_safetensors

from .. import check_options, iter_weights
from ..devices import device_or_host
from ..load_plan.run_plan import SliceLoad, load_by_slices

log = logging.getLogger("sglang.overwire")

_INDEX = "model.safetensors.index.json"

_KEYS = {"plan": (bool, "true or false")}


class OverwireModelLoader(DefaultModelLoader):  # type: ignore[misc, unused-ignore]
    """Loads plain and compressed safetensors through overwire.

    The model's `load_weights` first runs on stand-ins for the tensors, which shows where it copies each part. Then
    exactly these bytes are loaded directly into the parameters. If the model cannot be loaded by slices, `load_weights`
    gets real tensors in file order, on the GPU if torch uses a GPU. The model owns these tensors.

    Raises ValueError for an invalid `model_loader_extra_config`.
    """

    def __init__(self, load_config: Any) -> None:
        self._options = check_options(load_config.model_loader_extra_config or {}, _KEYS)
        super().__init__(replace(load_config, load_format=LoadFormat.SAFETENSORS, model_loader_extra_config={}))
        self._attempt: SliceLoad | None = None  # if set, the iterators yield its stand-ins instead of tensors

    def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> _Weights:
        return _Weights(model_config, functools.partial(self._yield_weights, model_config, model))

    def _yield_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._get_all_weights(model_config, model)
        if self._attempt is not None:
            self._attempt.load_recorded()

    def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Any, target_device: Any) -> None:
        """Runs SGLang's function, but loads all weights of a model by slices if possible.

        An updater loads tensor by tensor, because it requests the iterator of one source and may skip names."""
        plan = isinstance(weights, _Weights) and self._options.get("plan", getattr(model, "quant_config", None) is None)
        if plan and not load_by_slices(
            functools.partial(self._load_by_slices, model, weights, target_device), self._options["max_memory"], log
        ):
            weights, plan = weights.again(), False
        if not plan:
            self.load_weights_only(model, weights, target_device)
        self.postprocess_weights(model, target_device)

    def _load_by_slices(
        self, model: torch.nn.Module, weights: _Weights, target_device: Any, attempt: SliceLoad
    ) -> None:
        self._attempt = attempt
        try:
            with attempt.replace_loader(model, weights.again):
                self.load_weights_only(model, weights, target_device)
        finally:
            self._attempt = None

    def download_model(self, model_config: Any) -> None:
        """Downloads the files that the model needs. Does nothing for a model at `source`."""
        if not self._at_source(model_config, getattr(model_config, "model_path", None)):
            super().download_model(model_config)

    def _at_source(self, model_config: Any, path: Any) -> bool:
        """Returns whether weights are read from `source`. This is true for the served model, but not for a draft model
        with its own files, although SGLang loads both with the same options."""
        if "source" not in self._options or model_config is None:
            return False
        return not getattr(model_config, "is_draft_model", False) or (path is not None and path == _served_path())

    def _get_weights_iterator(
        self, source: Any, *, resolved_source: Any = None, **startup: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        where: Any
        index: str | None = None
        tensors: Iterator[tuple[str, torch.Tensor]] | None = None
        if self._attempt is not None:
            tensors = self._attempt.next_stand_ins()
        if tensors is not None:
            return self._select_weights(source, tensors)
        # Only the first of the model's sources has a model configuration.
        if source.allow_patterns_overrides is None and self._at_source(source.model_config, source.model_or_path):
            where = self._options["source"]
        else:
            where, index = self._files_of(source, resolved_source)
        if self._attempt is not None:
            tensors = self._attempt.open_source(where, _current_device(), self._options, index=index)
        else:
            tensors = iter_weights(where, _current_device(), self._options, index=index)
        return self._select_weights(source, tensors)

    def _select_weights(
        self, source: Any, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if self.load_config.draft_model_idx is not None:
            pairs: Iterator[tuple[str, torch.Tensor]] = self._filter_mtp_weights(
                tensors, source.prefix, self.load_config.draft_model_idx
            )
            return pairs
        return ((source.prefix + name, tensor) for name, tensor in tensors)

    def _files_of(self, source: Any, resolved: Any) -> tuple[list[str], str | None]:
        """Returns the files of a source in SGLang's order, and their index.json if it applies."""
        if resolved is not None:
            folder, files, safe = resolved.hf_folder, list(resolved.weight_files), resolved.use_safetensors
        else:
            folder, files, safe = self._prepare_weights(
                source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
            )
            if safe and source.model_config is not None:
                files = maybe_add_mtp_safetensors(files, folder, _INDEX, source.model_config.hf_config)
        if not safe or not all(file.endswith(".safetensors") for file in files):
            names = ", ".join(map(os.path.basename, files[:3]))
            raise ValueError(f"overwire: {folder}: expected safetensors files, got {names}: use --load-format auto")
        return files, os.path.join(folder, _INDEX) if source.allow_patterns_overrides is None else None


class _Weights:
    # Iterates once over all weights of a model. `again` returns a new iterator.

    def __init__(self, model_config: Any, again: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self.model_config, self.again = model_config, again
        self._rest = again()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._rest

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._rest)


def _served_path() -> Any:
    # Returns the path of the model that the server serves, or None if SGLang does not know it.
    try:
        from sglang.srt.runtime_context import get_server_args

        return getattr(get_server_args(), "model_path", None)
    except (ImportError, ValueError):
        return None


def _current_device() -> str:
    is_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return device_or_host(torch.device("cuda" if is_begun else "cpu"))
