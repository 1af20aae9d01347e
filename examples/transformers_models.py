"""Saves a transformers model compressed, and loads it directly to a device.

The same two lines work for diffusers pipelines and peft adapters.
"""

from __future__ import annotations

import sys

import overwire as ow
import torch

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("this example needs transformers and accelerate")

device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)  # type: ignore[no-untyped-call, unused-ignore]
model = LlamaForCausalLM(config).bfloat16()  # type: ignore[no-untyped-call, unused-ignore]

with ow.patch_safetensors(compress=True):
    model.save_pretrained("model", max_shard_size="100KB")

with ow.patch_safetensors():
    loaded = AutoModelForCausalLM.from_pretrained("model", device_map=device, dtype="auto")

for name, tensor in model.state_dict().items():
    assert torch.equal(loaded.state_dict()[name].cpu(), tensor), name
