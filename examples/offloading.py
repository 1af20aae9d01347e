"""Runs a language model, and loads each layer to the device only while the layer runs.

Run it in a writable folder; it uses a GPU if there is one.
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
config = LlamaConfig(  # type: ignore[no-untyped-call, unused-ignore]
    hidden_size=128, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, vocab_size=1000, pad_token_id=0
)
model = LlamaForCausalLM(config).bfloat16().eval().to(device)  # type: ignore[no-untyped-call, unused-ignore]
prompt = torch.arange(12, device=device).reshape(1, 12)
how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 5, "do_sample": False}
resident = model.generate(prompt, **how)
ow.save_model(model, "model.safetensors")

# Show which weights would be streamed, and how much memory and time that would take.
print(ow.plan("model.safetensors", keep="1.1MB"))

# Two of the eight layers stay on the device.
with ow.offload(model, device, keep="1.1MB") as offloaded:
    print(offloaded, "and", offloaded.kept, "bytes stay on the device")
    assert torch.equal(model.generate(prompt, **how), resident)
    try:
        model.state_dict()
    except ow.NotSupportedError as error:
        print(error)

# Stream from a file, for a model without weights.
with torch.device("meta"):
    empty = LlamaForCausalLM(config).bfloat16().eval()  # type: ignore[no-untyped-call, unused-ignore]
empty.model.rotary_emb = model.model.rotary_emb  # its buffers are not in the file
with ow.offload(empty, device, source="model.safetensors"):
    assert torch.equal(empty.generate(prompt, **how), resident)

# With accelerate's device_map: weights on the CPU are streamed to the GPU.
if device == "cuda":
    model.save_pretrained("model")
    where = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0, "model.layers": "cpu"}
    with ow.patch_safetensors(offload=True):
        spread = AutoModelForCausalLM.from_pretrained("model", device_map=where, dtype="auto")
    assert torch.equal(spread.generate(prompt, **how), resident)
