"""Saves a dict of tensors compressed and loads it, with the same functions as safetensors."""

import overwire as ow
import torch

tensors = {"embed": torch.randn(1000, 256).bfloat16(), "norm": torch.ones(256)}

report = ow.save_file(tensors, "model.safetensors", metadata={"format": "pt"})
print(f"{report.bytes_in} -> {report.bytes_out} bytes, ratio {report.ratio:.3f}")

loaded = ow.load_file("model.safetensors")  # name -> tensor, owned by the caller
assert torch.equal(loaded["embed"], tensors["embed"])

half = ow.load_file("model.safetensors", keys=["norm"], dtype=torch.float16)  # reads only these tensors
arrays = ow.load_file("model.safetensors", framework="np")  # numpy, with bfloat16 from ml_dtypes
assert half["norm"].dtype == torch.float16 and arrays["norm"].shape == (256,)

ow.convert("model.safetensors", "plain.safetensors", compress=False)  # any safetensors reader can read it
