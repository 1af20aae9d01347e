#!/usr/bin/env bash
# Expected: write_module(include_non_persistent_buffers=False) omits exactly the buffers that state_dict() omits.
# Actual: it also omits persistent buffers of the module itself. It keeps those of submodules.
# Versions: tensorizer 2.12.1, torch 2.15.0.
# Cause: the names of the module's own buffers get a leading dot (".seen"). tensorizer looks them up in the set of
# persistent names, where they have no dot.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 tensorizer==2.12.1 transformers==4.57.1
python -W ignore - <<'P'
import tensorizer, torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(2))
        self.norm = torch.nn.BatchNorm1d(2)
model = Model()
names = {}
for every in (True, False):
    serializer = tensorizer.TensorSerializer("m.tensors")
    serializer.write_module(model, include_non_persistent_buffers=every)
    serializer.close()
    names[every] = sorted(tensorizer.TensorDeserializer("m.tensors", device="cpu").keys())
print(tensorizer.__version__, "state_dict has", sorted(model.state_dict()))
print("with False the file lacks", sorted(set(names[True]) - set(names[False])))
assert set(names[True]) - set(names[False]) == {".seen"} and "seen" in model.state_dict()
P
