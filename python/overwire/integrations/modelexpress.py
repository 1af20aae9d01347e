"""ModelExpress's loading strategy `overwire`, for vLLM.

ModelExpress tries its strategies in turn: another worker's memory first, the disk last. For a
model with compressed files only the first strategy can read anything. So for such models this
one joins the chain before the strategies that read files. It loads like the load format
`overwire`.

    python -m overwire.integrations.modelexpress > $MX_PLUGIN_DIR/mx_plugin_overwire.py

writes the plug-in for a ModelExpress that takes plug-in files (from 0.8). There
`MX_LOAD_PLUGIN=overwire` and `MX_LOAD_PLUGIN_BEFORE` choose its place.

Up to ModelExpress 0.7 a strategy's `load` also processes the weights and registers the
tensors. From 0.8 the chain does, through `prepare`, `finalize` and `abort` of the strategy's
base class, and a reload has `load` fill a model layer by layer and each layer is processed on arrival.
Written for the wheels of 0.7.0 and 0.8.0.dev20261026, and run with both in vLLM's Python code.
"""

from __future__ import annotations

import functools
import glob
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..plumbing import is_compressed

__all__ = ["MODULE", "PLUGIN", "join", "strategy"]

#: The module with `execute_load_strategies`, which runs a chain.
MODULE = "modelexpress.load_strategy"

#: The content of the plug-in file mx_plugin_overwire.py in the folder MX_PLUGIN_DIR.
PLUGIN = '''"""Loads compressed models with overwire: see overwire.integrations.modelexpress."""

from overwire.integrations.modelexpress import strategy


def register_plugin():
    return strategy()
'''

# It goes before these, which read the model's own files.
_READERS = ("instant_tensor", "model_streamer", "gds", "default")


def join(strategies: Any) -> None:
    """Adds the strategy to the chains of a ModelExpress; may be called repeatedly. strategies: its
    module `MODULE`. A version without `execute_load_strategies` is left as it is."""
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
    """Makes the strategy's class for the installed ModelExpress."""
    from modelexpress.adapter import StrategyFailed
    from modelexpress.load_strategy import base
    from modelexpress.load_strategy.context import LoadResult

    # From 0.8 on, its base class processes and registers what `load` has loaded.
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

    # The extra configuration belongs to ModelExpress.
    changes: dict[str, Any] = {"load_format": "overwire", "model_loader_extra_config": {}}
    if getattr(ctx, "is_reload", False):
        # The parameters are on the meta device. Each layer is created and processed when its
        # last tensor has arrived.
        changes["model_loader_extra_config"] = {"plan": False, "strict": False}
        changes["device"] = ctx.load_config.device or str(ctx.target_device)
    return get_model_loader(replace(ctx.load_config, **changes))


def _is_compressed(model: Any) -> bool:
    files = glob.glob(os.path.join(glob.escape(str(model)), "*.safetensors"))
    return any(is_compressed(file) for file in files)


if __name__ == "__main__":
    sys.stdout.write(PLUGIN)
