#!/usr/bin/env bash
# Expected: accelerate.disk_offload writes a model's weights to the folder, and the model runs with them.
# Actual: if the folder already has an index of an earlier call, nothing is written. A model with the same names and
# shapes then runs with the earlier model's weights, without a warning. So does one model that was trained in between.
# Versions: accelerate 1.15.0, torch 2.15.0.
# Cause: disk_offload calls offload_state_dict only if the folder has no index.json, and compares nothing with it.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 accelerate==1.15.0
python -W ignore - <<'P'
import accelerate, torch

def ones_times(value):
    layer = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    return torch.nn.Sequential(layer)

x = torch.ones(1, 4)
first, second = ones_times(1.0), ones_times(2.0)
before = second(x).item()
accelerate.disk_offload(first, "offload", execution_device="cpu")
accelerate.disk_offload(second, "offload", execution_device="cpu")
after = second(x).item()
print("accelerate", accelerate.__version__, "the second model computes", before, "before and", after, "after disk_offload")
assert (before, after) == (8.0, 4.0)
P
