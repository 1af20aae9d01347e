"""Save a dict of tensors compressed, load it back: the same words as safetensors."""

import overwire as ow
import torch

tensors = {"embed": torch.randn(1000, 256).bfloat16(), "norm": torch.ones(256)}

report = ow.save_file(tensors, "model.safetensors", metadata={"format": "pt"})
print(f"{report.bytes_in} -> {report.bytes_out} bytes, ratio {report.ratio:.3f}")

loaded = ow.load_file("model.safetensors")  # name -> tensor, the caller's own
assert torch.equal(loaded["embed"], tensors["embed"])

half = ow.load_file("model.safetensors", keys=["norm"], dtype=torch.float16)  # reads only that
arrays = ow.load_file("model.safetensors", framework="np")  # numpy, bfloat16 by ml_dtypes
assert half["norm"].dtype == torch.float16 and arrays["norm"].shape == (256,)

ow.convert("model.safetensors", "plain.safetensors", compress=False)  # for any safetensors reader
