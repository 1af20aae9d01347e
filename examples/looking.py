"""Shows the contents of a file, checks whether it is intact, and shows the progress of a load."""

import overwire as ow
import torch

ow.save_file({"w": torch.randn(400, 300).bfloat16(), "ids": torch.arange(10)}, "model.safetensors")

for tensor in ow.inspect("model.safetensors")["sources"][0]["tensors"]:
    print(tensor["name"], tensor["dtype"], tensor["shape"], tensor["coding"], f"{tensor['ratio']:.3f}")

proof = ow.verify("model.safetensors")  # raises if a checksum, a hash or decoding fails
assert proof["ok"] and proof["tensors"] == 2

ow.load_file("model.safetensors", progress=lambda p: print(f"{p.bytes}/{p.total_bytes} bytes"))
print(ow.last_report())

with open("model.safetensors", "r+b") as file:
    file.seek(-5000, 2)
    file.write(b"oops")
try:
    ow.load_file("model.safetensors")
except ow.CorruptError as error:
    print(error.source, error.tensor, error.chunk, error.offset)
