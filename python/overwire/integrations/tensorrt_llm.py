"""TensorRT-LLM's checkpoint format `overwire`: `LLM(model, checkpoint_format="overwire")`.

Importing this module registers it. All but the reading is TensorRT-LLM's own Hugging Face
format: configuration, mapping of names, `.bin` and `.pth` files. TensorRT-LLM divides whole
tensors among ranks, so each rank reads all of them, into host memory.

Written after the released sources of TensorRT-LLM 1.2 and 1.3, and not run with them.
"""

from __future__ import annotations

import glob
import os
from typing import Any

from tensorrt_llm._torch.models.checkpoints import base_weight_loader
from tensorrt_llm._torch.models.checkpoints.hf.checkpoint_loader import HfCheckpointLoader
from tensorrt_llm._torch.models.checkpoints.hf.config_loader import HfConfigLoader
from tensorrt_llm._torch.models.checkpoints.hf.weight_loader import HfWeightLoader
from tensorrt_llm._torch.models.modeling_utils import (
    register_checkpoint_loader,
    register_checkpoint_weight_loader,
    register_config_loader,
)

import overwire

__all__ = ["FORMAT", "OverwireCheckpointLoader", "OverwireWeightLoader"]

#: The name of the checkpoint format.
FORMAT = "overwire"

# Gives its tensors back as TensorRT-LLM has copied them; older versions take a dict.
_Weights: Any = getattr(base_weight_loader, "ConsumableWeightsDict", dict)


class OverwireWeightLoader(HfWeightLoader):  # type: ignore[misc, unused-ignore]
    """Reads plain and compressed safetensors by overwire, in one pass; other files as
    TensorRT-LLM does."""

    def load_weights(self, checkpoint_dir: str, *asked: Any, **more: Any) -> Any:
        """All tensors of a folder by name, on the host, each with memory of its own.

        use_consolidated: whether files with that word in their name are read instead of
        the others, where there are both. Raises what `overwire.load_file` raises.
        """
        files = sorted(glob.glob(os.path.join(glob.escape(checkpoint_dir), "*.safetensors")))
        use_consolidated = bool(more.get("use_consolidated", False))
        files = [file for file in files if ("consolidated" in os.path.basename(file)) == use_consolidated] or files
        if not files:
            return super().load_weights(checkpoint_dir, *asked, **more)
        return _Weights(overwire.load_file(files, framework="pt"))


@register_checkpoint_loader(FORMAT)  # type: ignore[untyped-decorator, unused-ignore]
class OverwireCheckpointLoader(HfCheckpointLoader):  # type: ignore[misc, unused-ignore]
    """TensorRT-LLM's Hugging Face format, read by overwire. Its `checkpoint_format` stays
    "HF", by which TensorRT-LLM finds the mapping of names."""

    def get_default_weight_loader(self) -> OverwireWeightLoader:
        """What reads the weights where none was given."""
        return OverwireWeightLoader()


register_checkpoint_weight_loader(FORMAT)(OverwireWeightLoader)
register_config_loader(FORMAT)(HfConfigLoader)
