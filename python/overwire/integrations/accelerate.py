"""accelerate under `overwire.patch_safetensors`: weights that stay in compressed
files, because they are offloaded to disk, are found there after the patch too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Lazy

__all__ = ["MODULES", "hooks"]

#: The modules of accelerate that `hooks` looks into.
MODULES = ("accelerate.utils.offload",)


def hooks(found: Callable[[str, str], Any], lazy: Lazy) -> list[tuple[Any, Any]]:
    """The names that change, and what stands for each while patched."""
    loader = found(MODULES[0], "OffloadedWeightsLoader")
    return [] if loader is None else [(loader, _through_overwire(loader, lazy))]


def _through_overwire(loader: Any, lazy: Lazy) -> Any:
    class OffloadedWeightsLoader(loader):  # type: ignore[misc]
        # Models keep it as long as they live, and read by it whenever they run.
        __doc__ = loader.__doc__

        def __getitem__(self, key: str) -> Any:
            about = {} if key in self.state_dict else self.index[key]
            path = about.get("safetensors_file")
            if path is None or not lazy.compressed(path):
                return super().__getitem__(key)
            import torch

            with lazy.open(path, "pt", "cpu" if self.device is None else self.device) as file:
                tensor = file.get_tensor(about.get("weight_name", key))
            return tensor.to(getattr(torch, about["dtype"])) if "dtype" in about else tensor

    return OffloadedWeightsLoader
