"""Loads while Python imports: by a call, or by an environment variable."""

import os
import subprocess
import sys

import overwire as ow
import torch

ow.save_file({"w": torch.randn(2000, 500)}, "model.safetensors")

job = ow.preload("model.safetensors")  # returns at once, needs no GIL
import json  # noqa: E402  # heavy imports go here

done, total, *_ = job.progress()
print(f"{done} of {total} bytes while importing {json.__name__}")
tensors = ow.load_file("model.safetensors")  # joins it
assert tensors["w"].shape == (2000, 500)

# The same without code: OVERWIRE_PRELOAD starts it at `import overwire`.
program = "import overwire as ow, torch; print(ow.load_file('model.safetensors')['w'].shape)"
subprocess.run([sys.executable, "-c", program], env=os.environ | {"OVERWIRE_PRELOAD": "model.safetensors"}, check=True)
