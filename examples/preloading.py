"""Loads while Python imports modules, started by a call or by an environment variable."""

import os
import subprocess
import sys

import overwire as ow
import torch

ow.save_file({"w": torch.randn(2000, 500)}, "model.safetensors")

job = ow.preload("model.safetensors")  # returns immediately; the load does not need the GIL
import json  # noqa: E402  # heavy imports go here

done, total, *_ = job.progress()
print(f"{done} of {total} bytes while importing {json.__name__}")
tensors = ow.load_file("model.safetensors")  # uses the preloaded bytes
assert tensors["w"].shape == (2000, 500)

# OVERWIRE_PRELOAD starts a preload at `import overwire`, without a change of the program.
program = "import overwire as ow, torch; print(ow.load_file('model.safetensors')['w'].shape)"
subprocess.run([sys.executable, "-c", program], env=os.environ | {"OVERWIRE_PRELOAD": "model.safetensors"}, check=True)
