#!/usr/bin/env bash
# Expected: after a model is saved in shards and then saved again as one file, it loads from its folder.
# Actual: the second save_pretrained removes the shards but not their index. from_pretrained reads the index first
# and fails, although the new file is complete. transformers leaves the same index, but reads the new file.
# Versions: diffusers 0.42.1, torch 2.15.0.
# Cause: models/modeling_utils.py removes only files that are named like shards from the folder of an earlier save, and
# from_pretrained treats a folder with an index as a model in shards.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 diffusers==0.42.1
python -W ignore - 2>/dev/null <<'P'
import os, diffusers

model = diffusers.UNet2DModel(
    sample_size=8, block_out_channels=(32,), layers_per_block=1, norm_num_groups=8,
    down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
)
model.save_pretrained("m", max_shard_size="100KB")
diffusers.UNet2DModel.from_pretrained("m")
model.save_pretrained("m")
print(diffusers.__version__, sorted(os.listdir("m")))
assert "diffusion_pytorch_model.safetensors" in os.listdir("m")
try:
    diffusers.UNet2DModel.from_pretrained("m")
except OSError as error:
    print(type(error).__name__, str(error)[:150])
else:
    raise SystemExit("the folder loads now")
P
