"""Reads AutoLoader's settings from a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from overwire._compat_api import regular

from .common import init_logger

CONFIG_ENV_VAR = "FASTSAFETENSORS_CONFIG"
DEFAULT_CONFIG_PATH = "fastsafetensors.json"
logger = init_logger("overwire")


@dataclass
class LoaderConfig:
    """Selects a loader and its settings. A section with the name of a loader has that loader's arguments. The sections
    "parallel" and "debug" only group the fields below."""

    loader: str = "base"
    framework: str = "pytorch"
    debug_log: bool = False
    set_numa: bool = True
    disable_cache: bool = True
    use_pipeline: bool = False
    max_concurrent_producers: int = 1
    queue_size: int = 0
    use_tqdm_on_load: bool = True
    max_batch_bytes: int | None = None
    use_chunk_budget_as_allocation_size: bool = False  # no effect: tensors are allocated one by one
    device_memory_budget: int | None = None
    _extensions: dict[str, dict[str, Any]] = field(default_factory=dict)

    _COMMON_GROUPS: ClassVar[frozenset[str]] = frozenset({"parallel", "debug"})
    _COMMON_FIELDS_FOR_EXTENSION: ClassVar[frozenset[str]] = frozenset(
        {"framework", "debug_log", "set_numa", "disable_cache"}
    )

    def __post_init__(self) -> None:
        check_producers(self.max_concurrent_producers)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoaderConfig:
        """Makes a config from a dict. Unknown fields are skipped and logged."""
        names = {one.name for one in fields(cls) if not one.name.startswith("_")}
        settings: dict[str, Any] = {}
        extensions: dict[str, dict[str, Any]] = {}
        flat = dict(data)
        for group in cls._COMMON_GROUPS:
            if isinstance(flat.get(group), dict):
                flat.update(flat.pop(group))
        for name, value in flat.items():
            if isinstance(value, dict):
                extensions[name] = dict(value)
            elif name in names:
                settings[name] = value
            else:
                logger.warning("fastsafetensors config: unknown field %r is skipped", name)
        return cls(**settings, _extensions=extensions)

    def get_extension_config(self, name: str) -> dict[str, Any]:
        """Returns a copy of a loader's section, without the fields that all loaders share."""
        section = self._extensions.get(name, {})
        return {key: value for key, value in section.items() if key not in self._COMMON_FIELDS_FOR_EXTENSION}

    @classmethod
    def from_file(cls, path: str) -> LoaderConfig:
        """Reads a JSON file. Raises FileNotFoundError, json.JSONDecodeError, ValueError."""
        with open(path, encoding="utf-8", opener=regular) as file:
            data = json.load(file)
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected a JSON object, got {type(data).__name__}")
        return cls.from_dict(data)

    def create_parallel_kwargs(self) -> dict[str, Any]:
        """Returns the keyword arguments of a pipeline. Without `use_pipeline`, batches are loaded one after the
        other."""
        names = ["max_batch_bytes", "use_chunk_budget_as_allocation_size", "device_memory_budget"]
        if self.use_pipeline:
            names += ["max_concurrent_producers", "queue_size", "use_tqdm_on_load"]
        options = {name: getattr(self, name) for name in names}
        return options if self.use_pipeline else options | {"queue_size": -1}


def check_producers(count: int) -> None:
    """Raises ValueError for more than one producer: all ranks need the same batch order."""
    if count != 1:
        raise ValueError(f"max_concurrent_producers must be 1 (got {count}), because all ranks need their batches in "
                         f"the same order")


def load_config() -> LoaderConfig:
    """Reads the file in FASTSAFETENSORS_CONFIG, which must exist if the variable is set. If it is not set, reads
    ./fastsafetensors.json if that exists, or else returns the defaults."""
    path = os.environ.get(CONFIG_ENV_VAR)
    if path:
        if not os.path.exists(path):
            raise FileNotFoundError(f"Config file specified by {CONFIG_ENV_VAR} not found: {path}")
        return LoaderConfig.from_file(path)
    return LoaderConfig.from_file(DEFAULT_CONFIG_PATH) if os.path.exists(DEFAULT_CONFIG_PATH) else LoaderConfig()
