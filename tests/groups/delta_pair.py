"""Measures the sizes of a trained model's deltas, of the XOR compressed with Zstandard, and of the whole compressed
model.

docs/deltas.md has the figures.

    python tests/groups/delta_pair.py

A small transformer is trained on this repository's documents on the CPU for about a minute.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import overwire as ow
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
WIDTH, DEPTH, LENGTH, BATCH = 256, 4, 64, 8


class Net(nn.Module):
    """A small transformer that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.body(self.embed(text) + self.place(torch.arange(LENGTH)), mask, is_causal=True))


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list((ROOT / "ARCHITECTURE.md").read_bytes() + (ROOT / "CHANGELOG.md").read_bytes()))
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(rate: float, count: int = 1) -> None:
        for _ in range(count):
            for group in optimizer.param_groups:
                group["lr"] = rate
            at = torch.randint(len(text) - LENGTH - 1, (BATCH,))
            given, wanted = (torch.stack([text[i + k : i + k + LENGTH] for i in at]) for k in (0, 1))
            loss = nn.functional.cross_entropy(net(given).flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def now(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone().to(dtype) for name, tensor in net.state_dict().items()}

    step(3e-4, 60)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, dtype, rate in (
            ("bf16, a step of rate 1e-6", torch.bfloat16, 1e-6),
            ("bf16, a step of rate 1e-5", torch.bfloat16, 1e-5),
            ("bf16, a step of rate 3e-4", torch.bfloat16, 3e-4),
            ("fp32, a step of rate 3e-4", torch.float32, 3e-4),
        ):
            base = now(dtype)
            step(rate)
            new = now(dtype)
            size = sum(tensor.nbytes for tensor in new.values())
            stored = ow.save_delta(new, base, folder / "delta.safetensors").stored
            whole = ow.save_file(new, folder / "whole.safetensors").bytes_out
            flat = [(new[key].flatten().view(torch.uint8), base[key].flatten().view(torch.uint8)) for key in new]
            xor = b"".join((a ^ b).numpy().tobytes() for a, b in flat)
            zstd = sum(len(part) for part in ow.codecs.encode([xor], "Zstd", bitstream="raw"))
            rows = ow.diff(base, new).rows
            changed = sum(row.changed for row in rows) / sum(row.elements for row in rows)
            shares = f"delta {stored / size:.4f}, Zstandard of the XOR {zstd / size:.4f}, whole {whole / size:.4f}"
            print(f"{what}: {changed:7.2%} changed; {shares}")


if __name__ == "__main__":
    main()
