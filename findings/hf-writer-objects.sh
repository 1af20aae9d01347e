#!/usr/bin/env bash
# Expected: HuggingFaceStorageWriter refuses a state that contains a number, or omits the number, because safetensors
# files can only contain tensors.
# Actual: it writes the pickled number before the safetensors header, in the same file, and reports success. No reader
# accepts the file, not even HuggingFaceStorageReader.
# Versions: torch 2.15.0, safetensors 0.8.0.
# Cause: in torch/distributed/checkpoint/filesystem.py, _write_files_from_queue writes objects to the stream before it
# writes the tensors' safetensors bytes.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 tensorizer==2.12.1 transformers==4.57.1
python -W ignore - <<'P'
import safetensors.torch, torch, torch.distributed.checkpoint as dcp
dcp.save({"w": torch.ones(4), "epoch": 3}, storage_writer=dcp.HuggingFaceStorageWriter("x"))
path = "x/model-00001-of-00001.safetensors"
head = open(path, "rb").read(4)
print(torch.__version__, "the file begins with", head)
assert head == b"PK\3\4", head
try:
    safetensors.torch.load_file(path)
except safetensors.SafetensorError as error:
    print("safetensors:", error)
else:
    raise SystemExit("safetensors reads it now")
try:
    dcp.load({"w": torch.zeros(4)}, storage_reader=dcp.HuggingFaceStorageReader("x"))
except dcp.api.CheckpointException as error:
    print("torch:", str(error).strip().splitlines()[-1][:150])
else:
    raise SystemExit("torch reads it now")
P
