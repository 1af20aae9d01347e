"""Adds `--load-format overwire` to SGLang.

SGLang calls `register` in each of its processes. When SGLang creates the configuration of a load, the format is
replaced by the loader's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["FORMAT", "register"]

#: The name of the load format.
FORMAT = "overwire"


def register() -> None:
    """Adds the load format to SGLang. Does not start overwire's engine."""
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([FORMAT])
        HookRegistry.register(
            "sglang.srt.configs.load_config.LoadConfig._verify_load_format", _verify_config, HookType.AROUND
        )


def _verify_config(original: Callable[..., None], config: Any) -> None:
    # SGLang accepts only its own formats by name, but it also accepts a loader's class.
    if isinstance(config.load_format, str) and config.load_format.lower() == FORMAT:
        from .loader import OverwireModelLoader

        config.load_format = OverwireModelLoader
        return
    original(config)
