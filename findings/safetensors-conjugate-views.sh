#!/usr/bin/env bash
# Expected: save_file stores the values of a complex tensor, whichever view of its memory the tensor is.
# Actual: of x.conj() it stores x, and of x.conj().imag it stores x.imag. The signs are lost without an error.
# Versions: safetensors 0.8.0, torch 2.15.0.
# Cause: conj() only sets a flag on a view, and the writer copies the memory below. torch.save keeps the flag.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0
python -W ignore - <<'P'
import io, safetensors, safetensors.torch, torch
x = torch.tensor([1 + 2j, 3 - 4j])
saved = {"conj": x.conj(), "imag": torch.tensor([1 + 2j]).conj().imag}
safetensors.torch.save_file(saved, "x.safetensors")
loaded = safetensors.torch.load_file("x.safetensors")
buffer = io.BytesIO()
torch.save(saved, buffer)
buffer.seek(0)
kept = torch.load(buffer)
for name, tensor in saved.items():
    print("safetensors", safetensors.__version__, name, tensor.tolist(), "loads as", loaded[name].tolist())
    assert not torch.equal(loaded[name], tensor) and torch.equal(kept[name], tensor)
P
