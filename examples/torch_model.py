"""Loads a torch module into its own parameters, and saves it as a whole bundle.

Run it in a writable folder.
"""

from __future__ import annotations

import overwire as ow
import torch


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


model, twin = network(), network()

# Tensors go straight into the module's own parameters: no second copy.
ow.save_model(model, "weights.safetensors")
ow.load_model(twin, "weights.safetensors")

# Any Python object with tensors in it, including tied tensors and views.
ow.save_bundle({"model": model, "step": 7}, "bundle/checkpoint.pkl")
checkpoint = ow.load_bundle("bundle/checkpoint.pkl")

for restored in (twin, checkpoint["model"]):
    for (name, a), b in zip(model.named_parameters(), restored.parameters(), strict=True):
        assert torch.equal(a, b), name
