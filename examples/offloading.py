"""A language model whose layers do not stay on the device: they come while they run.

Run in a folder that may be written to; on a GPU where there is one.
"""

from __future__ import annotations

import overwire as ow
import torch


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        return x + inner


class LanguageModel(torch.nn.Module):
    def __init__(self, layers: int = 8, width: int = 128, words: int = 1000) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


device = "cuda" if torch.cuda.is_available() else "cpu"
model = LanguageModel().bfloat16().to(device)
ids = torch.arange(12, device=device).reshape(1, 12)
with torch.inference_mode():
    resident = model(ids)
ow.save_model(model, "model.safetensors")

# Two of the eight layers stay on the device.
with ow.offload(model, device, keep=2 * 263_000) as offloaded, torch.inference_mode():
    print(offloaded, "beside", offloaded.kept, "bytes that stay")
    for _ in range(3):
        assert torch.equal(model(ids), resident)
    try:
        model.state_dict()
    except ow.NotSupportedError as error:
        print(error)

# Straight from a file, into a model that has no weights.
with torch.device("meta"):
    empty = LanguageModel().bfloat16()
with ow.offload(empty, device, source="model.safetensors"), torch.inference_mode():
    assert torch.equal(empty(ids), resident)
