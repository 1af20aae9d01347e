#!/usr/bin/env bash
# Expected: FileSystemReader reads a checkpoint that was written by
# FileSystemWriter(serialization_format=SerializationFormat.SAFETENSORS), as it does with the other format.
# Actual: the save succeeds, and every load fails. The .distcp file is a safetensors file. For every tensor, .metadata
# gives offset 0 and the tensor's length, and the reader passes these bytes to torch.load.
# Versions: torch 2.15.0, safetensors 0.8.0.
# Cause: in torch/distributed/checkpoint/filesystem.py, _write_item writes nothing for this format, and read_data only
# supports torch.load.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 tensorizer==2.12.1 transformers==4.57.1
python -W ignore - <<'P'
import pickle, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
state = {"a": torch.arange(4.0), "b": torch.ones(2)}
dcp.save(state, storage_writer=dcp.FileSystemWriter("x", serialization_format=SerializationFormat.SAFETENSORS))
places = pickle.load(open("x/.metadata", "rb")).storage_data
seen = {index.fqn: (place.offset, place.length) for index, place in places.items()}
print(torch.__version__, "places", seen)
assert seen == {"a": (0, 16), "b": (0, 8)}, seen
try:
    dcp.load({"a": torch.zeros(4), "b": torch.zeros(2)}, storage_reader=dcp.FileSystemReader("x"))
except dcp.api.CheckpointException as error:
    print("the load fails:", str(error).strip().splitlines()[-1][:150])
else:
    raise SystemExit("it loads now")
P
