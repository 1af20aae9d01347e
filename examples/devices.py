"""Loads to a GPU if there is one: unpacks there, casts there, and keeps weights in pinned memory."""

import overwire as ow
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
weights = {f"layer.{i}": torch.randn(512, 512).bfloat16() for i in range(4)}
ow.save_file(weights, "model.safetensors")

# Compressed bytes cross the PCIe link; the device unpacks and casts them.
tensors = ow.load_file("model.safetensors", device=device, dtype="float16")

# Stored bytes stay in pinned memory: reloads need no disk, and take two thirds of the memory.
with ow.pin("model.safetensors", device=device) as pinned:
    for _ in range(2):
        tensors = ow.load_file(pinned, device=device)

assert all(torch.equal(tensors[name].cpu(), weights[name]) for name in weights)
