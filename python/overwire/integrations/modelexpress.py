"""ModelExpress's loading strategy `overwire`, for vLLM.

ModelExpress tries its strategies in turn: another worker's memory first, the disk last.
Of a model with compressed files no strategy but the first can read anything, so this one
joins the chain for such models, before those that read files. It loads as the load format
`overwire` does.

Written after ModelExpress's sources of version 0.7, and not run with them.
"""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..plumbing import is_compressed

__all__ = ["MODULE", "join"]

#: The module whose `execute_load_strategies` runs a chain.
MODULE = "modelexpress.load_strategy"

# Those before which it stands: they read the model's own files.
_READERS = ("instant_tensor", "model_streamer", "gds", "default")


def join(strategies: Any) -> None:
    """Adds the strategy to the chains of a ModelExpress; as often as one likes. strategies:
    its module `MODULE`. A version without `execute_load_strategies` is left as it is."""
    execute = getattr(strategies, "execute_load_strategies", None)
    if execute is not None and not hasattr(execute, "__wrapped__"):
        strategies.execute_load_strategies = _with_ours(execute)


def _with_ours(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def execute_load_strategies(model: Any, ctx: Any, chain: Sequence[Any], *rest: Any, **more: Any) -> Any:
        chain = list(chain)
        at = next((n for n, one in enumerate(chain) if one.name in _READERS), len(chain))
        return execute(model, ctx, [*chain[:at], _strategy(), *chain[at:]], *rest, **more)

    return execute_load_strategies


def _strategy() -> Any:
    from modelexpress.adapter import StrategyFailed
    from modelexpress.load_strategy.base import LoadStrategy, register_tensors
    from modelexpress.load_strategy.context import LoadResult

    class OverwireStrategy(LoadStrategy):  # type: ignore[misc, unused-ignore]
        name = "overwire"

        def is_available(self, ctx: Any) -> bool:
            ours = type(ctx.load_config).__module__.partition(".")[0] == "vllm" and ctx.adapter is not None
            return ours and bool(super().is_available(ctx)) and _compressed(ctx.model_config.model)

        def load(self, result: Any, ctx: Any) -> Any:
            if not isinstance(result, LoadResult):
                result = LoadResult(value=result, model=result)
            try:
                from vllm.model_executor.model_loader import get_model_loader

                # The extra configuration is that of ModelExpress.
                loader = get_model_loader(replace(ctx.load_config, load_format="overwire", model_loader_extra_config={}))
            except Exception as error:
                raise StrategyFailed(str(error), mutated=False) from error
            try:
                loader.load_weights(result.model, ctx.model_config)
                result = ctx.adapter.after_native_load(result)
            except Exception as error:
                raise StrategyFailed(str(error), mutated=True) from error
            register_tensors(result, ctx)
            return result

    return OverwireStrategy()


def _compressed(model: Any) -> bool:
    files = glob.glob(os.path.join(glob.escape(str(model)), "*.safetensors"))
    return any(is_compressed(file) for file in files)
