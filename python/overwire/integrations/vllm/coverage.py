"""Checks which parameters of a vLLM model, and which parts of fused parameters, were loaded.

vLLM does not notice if a linear weight is missing in all files, or if one third of a fused weight is missing. This
module watches the parameters' loaders while `load_weights` runs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch

_QKV = frozenset("qkv")
_EXPERT = frozenset(("w1", "w2", "w3"))


class Coverage:
    """A context that notes the arguments of each weight's `weight_loader`.

    It watches only parameters named `weight`, and `w13_weight` and `w2_weight` of fused experts, because biases, scales
    and caches may be missing in a valid model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._watched: list[tuple[str, Any, Any, Any]] = []  # name, parameter, its module, its own loader
        self._shards: dict[str, set[Any]] = defaultdict(set)
        self._experts: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        identities: set[int] = set()
        for path, module in model.named_modules():
            for own, param in module.named_parameters(recurse=False):
                if own.removeprefix("w13_").removeprefix("w2_") == "weight" and id(param) not in identities:
                    identities.add(id(param))
                    loader = getattr(param, "weight_loader", None)
                    if loader is not None:
                        self._watched.append((f"{path}.{own}".lstrip("."), param, module, loader))

    def __enter__(self) -> Coverage:
        for name, param, _, loader in self._watched:
            param.weight_loader = self._watch_loader(name, loader)
        return self

    def __exit__(self, *exc: object) -> None:
        for _, param, _, loader in self._watched:
            param.weight_loader = loader

    def _watch_loader(self, name: str, loader: Any) -> Any:
        @functools.wraps(loader)
        def load_watched(*args: Any, **kwargs: Any) -> Any:
            result = loader(*args, **kwargs)
            self._note_part(name, [*args, *(value for key, value in kwargs.items() if key != "return_success")])
            return result

        return load_watched

    def _note_part(self, name: str, arguments: list[Any]) -> None:
        words = [word for word in arguments if not isinstance(word, torch.Tensor)]
        part = next((word for word in words if isinstance(word, str) and word in _EXPERT), None)
        if part is not None:
            numbers = [word for word in words if isinstance(word, int) and not isinstance(word, bool)]
            self._experts[name][part].update(numbers[:1])
        for word in words or (None,):
            self._shards[name].update(word if isinstance(word, (tuple, list)) else (word,))

    def missing_weights(self, loaded: set[str] | None) -> set[str]:
        """Returns the weights that were not loaded, and the missing parts of fused weights as `name[part]`.

        loaded: the names that the model reports as loaded. If None, a weight counts as loaded even if its loader was
        never called.
        """
        out: set[str] = set()
        experts: set[int] = set()
        parts: dict[bool, set[str]] = {True: set(), False: set()}  # parts of w2 (True) and w13 (False)
        for name, expert_names in self._experts.items():
            parts[name.endswith("w2_weight")] |= expert_names.keys()
            experts.update(*expert_names.values())
        for name, _, module, _ in self._watched:
            shards = self._shards.get(name, set())
            if not shards:
                if loaded is not None and name not in loaded:
                    out.add(name)
            elif name in self._experts:
                for part in parts[name.endswith("w2_weight")]:
                    out.update(f"{name}[{part} of expert {number}]" for number in experts - self._experts[name][part])
            elif None in shards:
                continue  # the file contains the fused weight as one tensor
            elif shards & _QKV:
                out.update(f"{name}[{part}]" for part in _QKV - shards)
            elif all(isinstance(shard, int) for shard in shards):
                out.update(f"{name}[{part}]" for part in set(range(len(getattr(module, "output_sizes", ())))) - shards)
        return out
