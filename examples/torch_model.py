"""Loads weights directly into a torch module's parameters, and saves the module in a bundle.

Run it in a writable folder.
"""

from __future__ import annotations

import overwire as ow
import torch


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


model, twin = network(), network()

# Tensors are loaded directly into the module's parameters, without a second copy.
ow.save_model(model, "weights.safetensors")
ow.load_model(twin, "weights.safetensors")

# A bundle can contain any Python object with tensors, including tied tensors and views.
ow.save_bundle({"model": model, "step": 7}, "bundle/checkpoint.pkl")
checkpoint = ow.load_bundle("bundle/checkpoint.pkl")

for restored in (twin, checkpoint["model"]):
    for (name, a), b in zip(model.named_parameters(), restored.parameters(), strict=True):
        assert torch.equal(a, b), name
