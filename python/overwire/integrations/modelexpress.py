"""Adds a loading strategy `overwire` to ModelExpress, for vLLM.

ModelExpress tries its strategies in order, from another worker's memory to the disk. The strategies that read files
cannot read compressed files. For a model with compressed files, this strategy is inserted before them, and loads in the
same way as the load format `overwire`.

    python -m overwire.integrations.modelexpress > $MX_PLUGIN_DIR/mx_plugin_overwire.py

This command writes the plug-in file for ModelExpress 0.8 or later. `MX_LOAD_PLUGIN=overwire` enables it, and
`MX_LOAD_PLUGIN_BEFORE` sets its position in the chain.

Up to ModelExpress 0.7 a strategy's `load` also processes the weights and registers the tensors. From 0.8 the chain
does this through `prepare`, `finalize` and `abort` of the strategy's base class. For a reload, `load` then fills the
model layer by layer, and each layer is processed when it has arrived. Tested with the wheels of 0.7.0 and
0.8.0.dev20261026 and vLLM's Python code.
"""

from __future__ import annotations

import functools
import glob
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .._compat_api import is_compressed

__all__ = ["MODULE", "PLUGIN", "join", "strategy"]

#: The module with `execute_load_strategies`, which runs a chain.
MODULE = "modelexpress.load_strategy"

#: The content of the plug-in file mx_plugin_overwire.py in the folder MX_PLUGIN_DIR.
PLUGIN = '''"""Loads compressed models with overwire: see overwire.integrations.modelexpress."""

from overwire.integrations.modelexpress import strategy


def register_plugin():
    return strategy()
'''

# The strategies that read the model's own files. The new strategy is inserted before the first of them.
_READERS = ("instant_tensor", "model_streamer", "gds", "default")


def join(strategies: Any) -> None:
    """Adds the strategy to every chain that ModelExpress runs. Does nothing if it was already called, or if this
    version has no `execute_load_strategies`. strategies: the module `MODULE`."""
    execute = getattr(strategies, "execute_load_strategies", None)
    if execute is not None and not hasattr(execute, "__wrapped__"):
        strategies.execute_load_strategies = _add_to_chain(execute)


def _add_to_chain(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def execute_load_strategies(model: Any, ctx: Any, chain: Sequence[Any], *rest: Any, **more: Any) -> Any:
        chain = list(chain)
        if all(one.name != "overwire" for one in chain):  # the plug-in file may already have added it
            at = next((n for n, one in enumerate(chain) if one.name in _READERS), len(chain))
            chain.insert(at, strategy()())
        return execute(model, ctx, chain, *rest, **more)

    return execute_load_strategies


@functools.cache
def strategy() -> type[Any]:
    """Returns the class of the strategy for the installed ModelExpress."""
    from modelexpress.adapter import StrategyFailed
    from modelexpress.load_strategy import base
    from modelexpress.load_strategy.context import LoadResult

    # From 0.8 on, the base class processes and registers the loaded tensors.
    has_phases = hasattr(base.LoadStrategy, "finalize")

    class OverwireStrategy(base.NativeLoadStrategy if has_phases else base.LoadStrategy):  # type: ignore[misc, unused-ignore]
        name = "overwire"

        def is_available(self, ctx: Any) -> bool:
            is_vllm = type(ctx.load_config).__module__.partition(".")[0] == "vllm" and ctx.adapter is not None
            return is_vllm and bool(super().is_available(ctx)) and _is_compressed(ctx.model_config.model)

        def load(self, result: Any, ctx: Any) -> Any:
            if not isinstance(result, LoadResult):
                result = LoadResult(value=result, model=result)
            try:
                loader = _loader_of(ctx)
            except Exception as error:
                raise StrategyFailed(str(error), mutated=False) from error
            try:
                loader.load_weights(result.model, ctx.model_config)
                if not has_phases:
                    result = ctx.adapter.after_native_load(result)
            except Exception as error:
                raise StrategyFailed(str(error), mutated=True) from error
            if not has_phases:
                base.register_tensors(result, ctx)
            return result

    return OverwireStrategy


def _loader_of(ctx: Any) -> Any:
    from vllm.model_executor.model_loader import get_model_loader

    # The extra configuration in ctx is for ModelExpress, not for overwire.
    changes: dict[str, Any] = {"load_format": "overwire", "model_loader_extra_config": {}}
    if getattr(ctx, "is_reload", False):
        # The parameters are on the meta device. Each layer is created and processed when its last tensor has arrived.
        changes["model_loader_extra_config"] = {"plan": False, "strict": False}
        changes["device"] = ctx.load_config.device or str(ctx.target_device)
    return get_model_loader(replace(ctx.load_config, **changes))


def _is_compressed(model: Any) -> bool:
    return any(map(is_compressed, glob.glob(os.path.join(glob.escape(str(model)), "*.safetensors"))))


if __name__ == "__main__":
    sys.stdout.write(PLUGIN)
