"""ComfyUI: its loader nodes read compressed files.

`ComfyUI/custom_nodes/overwire.py`:

    from overwire.integrations.comfyui import NODE_CLASS_MAPPINGS, install
    install()

Checkpoints, diffusion models, text encoders, VAEs and LoRAs all come through one function
of ComfyUI's, `comfy.utils.load_torch_file`. Plain files stay its own: it maps them, and may
read them again when it moves weights between host and GPU.

Written after ComfyUI's sources of November 2026, and not run with them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import overwire

from ..plumbing import is_compressed

__all__ = ["NODE_CLASS_MAPPINGS", "install"]

#: Nodes of its own: none. ComfyUI asks each module for this name.
NODE_CLASS_MAPPINGS: dict[str, Any] = {}


def install() -> None:
    """Lets ComfyUI's `load_torch_file` read compressed files; as often as one likes."""
    import comfy.utils

    if not hasattr(comfy.utils.load_torch_file, "_overwire"):
        comfy.utils.load_torch_file = _reading_file(comfy.utils.load_torch_file)


def _reading_file(original: Any) -> Any:
    @functools.wraps(original)
    def load_torch_file(
        ckpt: Any, safe_load: bool = False, device: Any = None, return_metadata: bool = False, **more: Any
    ) -> Any:
        if not is_compressed(ckpt):
            return original(ckpt, safe_load=safe_load, device=device, return_metadata=return_metadata, **more)
        with overwire.safe_open(ckpt, framework="pt", device="cpu" if device is None else str(device)) as file:
            tensors, metadata = file.get_tensors(), file.metadata()
        # Newer versions note where a tensor came from.
        annotate = getattr(sys.modules.get("comfy.storage"), "annotate_state_dict", None)
        if annotate is not None:
            annotate(tensors, ckpt)
        return (tensors, metadata) if return_metadata else tensors

    load_torch_file._overwire = True  # type: ignore[attr-defined]
    return load_torch_file
