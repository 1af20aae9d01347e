"""Calls fastsafetensors 0.5 as a program would, and prints the results as JSON.
tests/peers/test_fastsafetensors_later.py runs it with the real package and with overwire's. The arguments are a folder
for output, and the dtypes that the real package knows."""

# Functions that are made in a loop are called within the same iteration.
# ruff: noqa: B023

import json
import os
import sys
from pathlib import Path

import fastsafetensors as fst
import torch
from fastsafetensors import saver
from fastsafetensors.copier import base, registry
from fastsafetensors.frameworks import get_framework_op
from fastsafetensors.st_types import DTYPE_SIZES, Device, DType

op, folder, out = get_framework_op("pt"), sys.argv[1], []


def ask(call):
    try:
        out.append(call())
    except Exception:
        out.append("raised")


def planned(plan):
    table = json.loads(plan.header[8:])
    table["__metadata__"].pop(saver.KEY_SHARD_SET)
    start = len(plan.header)
    places = {name: [begin - start, end - start] for name, (begin, end) in plan.offsets.items()}
    return [plan.path, table, list(table), places, plan.total_bytes - start, [entry.name for entry in plan.entries]]


E = saver.WriteEntry
sizes = [5, 900, 40, 41, 0, 900, 333, 12, 1, 700]
entries = [E(f"t{at}", DType.U8, [size], size, bytes([at]) * size) for at, size in enumerate(sizes)]
for count in (1, 2, 4, 11):
    paths = saver.shard_paths("m", count)
    ask(
        lambda: [
            planned(plan)
            for plan in saver.plan_shards(
                entries,
                paths,
                metadata={"k": "v"},
                shard0_metadata={"z": "0", "k": "w"},
                shard_metadata=lambda shard: {"n": str(len(shard))},
            )
        ]
    )
for wrong in ([], ["a", "a"], ["a", "./a"]):
    ask(lambda: len(saver.plan_shards(entries, wrong)))
for bad in (
    E("x", DType.F32, [3], 11),
    E("x", DType.AUTO, [0], 0),
    E("x", DType.F4, [2, 3], 3),
    E("x", DType.F4, [2, 4], 4),
    E("__metadata__", DType.U8, [0], 0),
    E("x", DType.U8, [-1, -1], 1),
    E("x", DType.F64, [], 8),
):
    ask(lambda: len(saver.plan_shards([bad], ["a"])))
ask(lambda: len(saver.plan_shards(entries[:1] * 2, ["a"])))
for named in (
    {"header_align": 0},
    {"header_align": 12},
    {"header_align": 4096},
    {"metadata": {"a": 1}},
    {"shard0_metadata": {1: "a"}},
    {"shard_metadata": lambda s: {saver.KEY_SHARD_COUNT: "1"}},
    {"shard_metadata": lambda s: {"x": 2}},
):
    ask(lambda: len(saver.plan_shards(entries, ["a"], **named)))
ask(lambda: saver.shard_paths("m", 0))


def write(name, fill, **named):
    plans = saver.plan_shards(entries, saver.shard_paths(os.path.join(folder, name), 3))
    paths = saver.write_shards(plans, fill, **named)
    metas = [fst.SafeTensorsMetadata.from_file(path, op) for path in paths]
    saver.validate_shard_set(metas)
    found = []
    for path, plan in zip(paths, plans, strict=True):
        data = Path(path).read_bytes()
        found.append([os.path.basename(path), [data[slice(*plan.offsets[entry.name])].hex() for entry in plan.entries]])
    return found


def put(buffer, entry):
    buffer[:] = entry.source


def fails(work):
    raise KeyError("gone")


ask(lambda: write("new/a", saver.per_entry_fill(put, 3)))
ask(lambda: write("b", saver.per_entry_fill(put, 1), min_free_bytes=1 << 62))
ask(lambda: write("c", fails))
ask(lambda: write("d", lambda work: [put(*one) for one in work], fsync=True))
ask(lambda: sorted(name for name in os.listdir(folder)))
tensors = {
    "a": torch.arange(12.0).reshape(3, 4).t(), "b": torch.zeros((), dtype=torch.bfloat16),
    "c": torch.empty(0, 3, dtype=torch.int64),
}
ask(lambda: [[e.name, e.dtype.value, e.shape, e.nbytes] for e in (saver.plain_entry(n, t) for n, t in tensors.items())])
paths = fst.ParallelSaver(num_shards=2).save(tensors, os.path.join(folder, "p"))
for path in paths:
    with fst.fastsafe_open(path, nogds=True) as file:
        ask(
            lambda: {
                name: [str(file.get_tensor(name).dtype), file.get_tensor(name).tolist()] for name in sorted(file.keys())
            }
        )
metas = [fst.SafeTensorsMetadata.from_file(path, op) for path in paths]
for wrong in (metas, metas[::-1], metas[:1], metas + metas, []):
    ask(lambda: saver.validate_shard_set(wrong))
for meta in metas:
    ask(
        lambda: [
            [begin - meta.header_length, end - meta.header_length]
            for begin, end in meta.select_byte_ranges(lambda name: name != "b", 0)
        ]
    )
four = {f"t{i}": torch.full((5000,), float(i)) for i in range(4)}
[big] = fst.ParallelSaver(num_shards=1).save(four, os.path.join(folder, "big"))
meta = fst.SafeTensorsMetadata.from_file(big, op)
first, last = meta.header_length, meta.size_bytes
for gap in (0, 4096, 20000):
    ask(lambda: [[b - first, e - first] for b, e in meta.select_byte_ranges(lambda name: name in ("t0", "t2"), gap)])
for ranges in (
    None,
    [],
    [(first, last)],
    [(first, first)],
    [(first - 1, last)],
    [(first, last + 1)],
    [(first + 8, last), (first, first + 8)],
    [(first, first + 8), (first + 8, last)],
    [(first, True)],
    [("a", last)],
    [(first,)],
    [5],
):
    ask(lambda: [] if ranges is None else [[b - first, e - first] for b, e in base.validated_byte_ranges(meta, ranges)])
for size in (None, 0, 7, 8, 100, True, "x"):
    ask(lambda: base.validated_chunk_allocation_size([(first, first + 8)], size))
for kind in ("gds", "nogds"):
    made = registry.create_copier_constructor(kind, Device(), framework=op)
    one = made(meta, Device(), op)
    ask(lambda: one.enable_tensor_readiness() if kind == "nogds" else True)
    one.set_chunk(meta.select_byte_ranges(lambda name: name == "t2"), {"t2"}) if kind == "nogds" else None
    gbuf = one.submit_io(True, 1 << 30)
    if kind == "nogds":
        views = one.prepare_tensors(gbuf)
        one.wait_tensor("t2")
        ask(lambda: [sorted(views), views["t2"].get_raw().sum().item()])
        one.finish_io()
    else:
        ask(lambda: sorted(one.wait_io(gbuf)))
    ask(
        lambda: [
            registry.copier_class_of(made) is base.CopierInterface,
            type(one).chunk_transient_multiplier([big]),
            type(one).fixed_device_overhead([big]),
        ]
    )
loader = fst.SafeTensorsFileLoader(None, "cpu", nogds=True)
loader.set_tensor_filter(lambda name: name != "t1")
loader.add_filenames({0: [big]})
buffer = loader.copy_files_to_device(allow_inflight=True, borrowed_tensors=True)
ask(lambda: {name: buffer.get_tensor(name).sum().item() for name in loader.get_keys()})
ask(lambda: buffer.get_tensor("t1"))
buffer.close()
for named in (
    {"max_batch_bytes": 20000},
    {"max_batch_bytes": 45000, "use_chunk_budget_as_allocation_size": True},
    {"overlap_io": False},
    {"borrowed_tensors": True},
    {"borrowed_tensors": True, "accumulate_resident": False},
    {"use_chunk_budget_as_allocation_size": True},
    {"device_memory_budget": 10000},
    {"device_memory_budget": 1 << 30, "queue_size": 2},
):
    ask(
        lambda: {
            name: tensor.sum().item()
            for name, tensor in fst.ParallelLoader(
                None, [big], nogds=True, use_tqdm_on_load=False, **named
            ).iterate_weights()
        }
    )
ask(lambda: {dtype.name: DTYPE_SIZES[dtype] for dtype in DType if dtype.name in sys.argv[2].split()})
print("\n" + json.dumps(out))
