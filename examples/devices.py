"""Loads to a GPU if there is one: decodes and casts on the GPU, and keeps weights in pinned memory."""

import overwire as ow
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
weights = {f"layer.{i}": torch.randn(512, 512).bfloat16() for i in range(4)}
ow.save_file(weights, "model.safetensors")

# Compressed bytes are copied over PCIe; the device decodes and casts them.
tensors = ow.load_file("model.safetensors", device=device, dtype="float16")

# Compressed bytes stay in pinned memory, in two thirds of the space. Reloads do not read the disk.
with ow.pin("model.safetensors", device=device) as pinned:
    for _ in range(2):
        tensors = ow.load_file(pinned, device=device)

assert all(torch.equal(tensors[name].cpu(), weights[name]) for name in weights)
