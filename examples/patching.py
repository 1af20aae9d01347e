"""Makes libraries that use safetensors read compressed files.

transformers, diffusers and accelerate work the same way:

    with ow.patch_safetensors():
        model = AutoModel.from_pretrained("folder of compressed files")
"""

from __future__ import annotations

import overwire as ow
import safetensors.torch
import torch

weights = {"embed": torch.randn(512, 256).bfloat16()}
ow.save_file(weights, "model.safetensors", metadata={"format": "pt"})

with ow.patch_safetensors():
    tensors = safetensors.torch.load_file("model.safetensors")
assert torch.equal(tensors["embed"], weights["embed"])

# Or use overwire's implementation of safetensors' API, without installing safetensors.
from overwire.compat.safetensors import safe_open  # noqa: E402

with safe_open("model.safetensors", framework="pt") as f:
    assert f.metadata() == {"format": "pt"}
    assert f.get_slice("embed")[:16].shape == (16, 256)
