#!/usr/bin/env bash
# Expected: HuggingFaceStorageReader reads each tensor from the shard that model.safetensors.index.json names. After a
# checkpoint is saved again with fewer shards, a load returns the values of the last save.
# Actual: the reader never opens the index. It reads all safetensors files in the folder, including those of the first
# save. If two files have a tensor, it reads the tensor from the file that the file system lists last.
# Versions: torch 2.15.0, safetensors 0.8.0.
# Cause: in torch/distributed/checkpoint/hf_storage.py, read_metadata iterates over Path.iterdir, and each file
# overwrites the entries of earlier files. HuggingFaceStorageWriter does not remove old shards.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 tensorizer==2.12.1 transformers==4.57.1
python -W ignore - <<'P'
import json, os, pathlib, safetensors.torch, torch, torch.distributed.checkpoint as dcp


def save(value, shards):
    state = {name: torch.full((4,), value) for name in shards}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter("m", fqn_to_index_mapping=shards))


def load():
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader("m"))
    return state["a"][0].item()


save(1.0, {"a": 1, "b": 2})
save(2.0, {"a": 1, "b": 1})
index = pathlib.Path("m/model.safetensors.index.json")
named = json.loads(index.read_text())["weight_map"]["a"]
files = [path for path in pathlib.Path("m").iterdir() if path.suffix == ".safetensors"]
held = {path.name: tensors["a"][0].item() for path in files if "a" in (tensors := safetensors.torch.load_file(path))}
print(torch.__version__, "a by file:", held, "- the index names", named)
assert sorted(held.values()) == [1.0, 2.0] and held[named] == 2.0
loads = [load()]
for file in held:  # whatever the index says
    index.write_text(json.dumps({"weight_map": {"a": file, "b": file}}))
    loads.append(load())
os.remove(index)
loads.append(load())
print("loaded with the index, with each file in the index, and without one:", loads)
assert len(set(loads)) == 1 and loads[0] == list(held.values())[-1], loads
P
