"""Shows how `vllm serve --load-format overwire` and SGLang's plug-in read a model.

The program compresses a model folder and keeps its file names. The engines then stream its tensors in file order, in
bounded memory. They own the tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import overwire as ow

try:
    import torch
except ImportError:
    sys.exit("this example needs torch")

plain = Path("model")
plain.mkdir()
(plain / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
tensors = {f"model.layers.{n}.mlp.down_proj.weight": torch.randn(256, 512).bfloat16() for n in range(8)}
ow.save_file(tensors, plain / "model.safetensors", compress=False)

# The same as `overwire compress model -o packed`.
ow.convert(plain, "packed")

budget = 600_000  # bytes to load ahead of use
names = []
for name, tensor in ow.stream("packed", "cpu", framework="pt", in_order=True, max_memory=budget):
    assert torch.equal(tensor, tensors[name])
    names.append(name)
assert names == [planned.name for planned in ow.plan("packed").tensors]

print("vllm serve packed --load-format overwire")
print("python -m sglang.launch_server --model-path packed --load-format overwire")
