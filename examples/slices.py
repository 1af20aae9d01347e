"""Opens files and only reads single tensors and slices."""

import overwire as ow
import torch

ow.save_file({"w": torch.arange(12.0).reshape(3, 4)}, "a.safetensors")
ow.save_file({"b": torch.ones(3)}, "b.safetensors")

with ow.safe_open(["a.safetensors", "b.safetensors"], framework="pt") as f:
    print(f.keys(), f.metadata())
    bias = f.get_tensor("b")
    w = f.get_slice("w")
    print(w.get_shape(), w.get_dtype())
    columns = w[:, 1:3]  # reads only this block
    last = w[-1, ::2]

assert columns.tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]  # tensors outlive the file
assert last.tolist() == [8.0, 10.0] and bias.sum() == 3
