"""Tests reads in forked children. They cannot use the engine, which runs in their parent."""

from __future__ import annotations

AFTER_TORCH = """
import os, signal, sys, warnings
import torch, overwire as ow
torch.set_num_threads(4)
large = torch.randn(190, 180)
tensors = {
    "f32": large, "bf16": large.bfloat16(), "fp8": large.to(torch.float8_e4m3fn), "i64": torch.arange(35000).view(350, 100),
    "bool": large > 0, "u16": torch.arange(34000, dtype=torch.int32).to(torch.uint16), "c64": large.to(torch.complex64),
    "f4": (torch.arange(190 * 180) % 251).to(torch.uint8).view(torch.float4_e2m1fn_x2).view(190, 180),
    "alias": large[:], "scalar": torch.tensor(3.0), "none": torch.empty(0, 5), "small": torch.ones(3, 4, dtype=torch.float16),
}
some = {name: tensors[name] for name in ("f32", "bf16", "i64")}
cuts = [(slice(7, None, 3),), (slice(None, None, -1), slice(5, 170)), (slice(None), slice(None, None, -2)), (3,), (Ellipsis, slice(1, 179))]

def facts(tensor):  # uses no thread of torch, because a child has none
    return tensor.dtype, tensor.shape, tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""

def cut_facts(tensor, cut):  # numpy cuts, because torch does not support negative steps
    words = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return facts(torch.from_numpy(words.numpy()[cut].copy()).view(tensor.dtype))

def model():
    made = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.empty(190, 180), False) for name in ("f32", "bf16")})
    made.register_buffer("i64", torch.empty(350, 100, dtype=torch.int32))
    return made

wanted = {name: facts(tensor) for name, tensor in tensors.items()}
halves = {name: facts(t.to(torch.float16) if t.dtype.is_floating_point and name != "f4" else t) for name, t in tensors.items()}
parts = {(name, at): cut_facts(tensors[name], cut) for name in ("f32", "bf16", "fp8", "i64", "bool") for at, cut in enumerate(cuts)}
pairs = facts(tensors["f4"].view(torch.uint8)[5:150].contiguous().view(torch.float4_e2m1fn_x2))
in_models = facts(tensors["bf16"].float()), facts(tensors["i64"].int())
modules = [model(), model().to("meta"), model(), model().to("meta")]
into = torch.empty(190, 180), torch.empty(180, 180, dtype=torch.float64)
rows = facts(large[2:182].double())
opened = {}
for kind in ("plain", "packed"):
    os.makedirs(kind + "/set")
    ow.save_file(tensors, kind + "/one.safetensors", {"who": "test"}, compress=kind == "packed")
    ow.save_file(some, kind + "/model.safetensors", compress=kind == "packed")
    ow.save_file(tensors, kind + "/set/model.safetensors", compress=kind == "packed", max_shard_size=200_000)
    opened[kind] = ow.safe_open(kind + "/set", "pt")
    opened[kind + ", numpy"] = ow.safe_open(kind + "/one.safetensors", "np")
    opened[kind + " slice"] = opened[kind].get_slice("bf16")
assert len(os.listdir("plain/set")) > 2
order = {kind: list(ow.load_file(kind + "/one.safetensors", framework="pt")) for kind in ("plain", "packed")}
torch.randn(1000, 1000).bfloat16().add_(1)  # starts torch's threads

def check(kind):
    one, whole = kind + "/one.safetensors", [kind + "/set", kind + "/set/model.safetensors.index.json"]
    for source in (one, [one], open(one, "rb"), *whole):
        got = ow.load_file(source, framework="pt")
        assert list(got) == order[kind] or source in whole
        assert {name: facts(tensor) for name, tensor in got.items()} == wanted
        got["small"].zero_()  # the tensor belongs to the caller
    assert {name: facts(tensor) for name, tensor in ow.load_file(one, framework="pt", dtype="float16").items()} == halves
    assert list(ow.load_file(whole[0], keys=["i64", "f32"], framework="pt")) == ["i64", "f32"]
    assert [name for name, _ in ow.stream(one, framework="pt", in_order=True)] == order[kind]
    assert all(facts(tensor) == wanted[name] for name, tensor in ow.stream(whole[0], framework="pt", filter=lambda name: name != "alias"))
    with ow.safe_open(one, "pt") as file:
        assert file.metadata() == {"who": "test"}
        for (name, at), expected in parts.items():
            assert facts(file.get_slice(name)[cuts[at]]) == expected, (name, at)
        assert facts(file.get_slice("f4")[5:150]) == pairs
        file.load_into([("f32", None, into[0]), ("f32", ((2, 182),), into[1])])
        assert facts(into[0]) == wanted["f32"] and facts(into[1]) == rows
    for made in modules[:2] if kind == "plain" else modules[2:]:
        assert ow.load_model(made, kind + "/model.safetensors") == ([], [])
        assert facts(made["f32"].detach()) == wanted["f32"] and (facts(made["bf16"].detach()), facts(made.i64)) == in_models
    assert {name: facts(tensor) for name, tensor in opened[kind].get_tensors().items()} == wanted
    assert facts(opened[kind + " slice"][::3]) == cut_facts(tensors["bf16"], slice(None, None, 3))
    assert (opened[kind + ", numpy"].get_slice("f32")[4:9] == large.numpy()[4:9]).all()
    for refused in (lambda: ow.load_file(one, max_memory="1GB"), lambda: next(ow.stream(one, max_memory="1GB")), lambda: ow.load_file("hf://a/b"), lambda: ow.verify(one)):
        try:
            refused()
        except ow.ForkedError:
            continue
        raise AssertionError("not refused")

for kind in ("plain", "packed"):
    if not (child := os.fork()):
        signal.alarm(60)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                check(kind)
                assert sum("slowly, without the engine" in str(one.message) for one in caught) == (kind == "packed"), list(caught)
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, kind
"""


def test_reads_after_torch_has_started_its_threads(torch_script) -> None:
    """A forked child, which has none of torch's threads, reads plain and compressed files and folders: completely, by
    slices, cast, into modules and as a stream."""
    torch_script(AFTER_TORCH)


FOLDERS = """
import json, os, shutil
import numpy as np, overwire as ow
def folder(name, *files):
    os.makedirs(name)
    for file in files:
        ow.save_file({file: np.ones(3)}, f"{name}/{file}", compress=False)
def index(name, weights):
    json.dump({"weight_map": weights}, open(f"{name}/model.safetensors.index.json", "w"))
folder("whole", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
folder("half", "model-00001-of-00002.safetensors")
folder("two", "a.safetensors", "b.safetensors")
folder("empty")
folder("less", "a.safetensors", "b.safetensors")
index("less", {"a.safetensors": "a.safetensors"})
folder("more", "a.safetensors")
index("more", {"a.safetensors": "a.safetensors", "x": "a.safetensors"})
folder("gone", "a.safetensors")
index("gone", {"a.safetensors": "a.safetensors", "x": "b.safetensors"})
folder("out", "a.safetensors")
index("out", {"a.safetensors": "../two/a.safetensors"})
ow.load_file("whole", framework="np")
if not (child := os.fork()):
    try:
        assert len(ow.load_file("whole", framework="np")) == 2
        assert list(ow.load_file("less", framework="np")) == ["a.safetensors"]
        for name, kind in {"half": ow.ForkedError, "two": ow.ForkedError, "empty": ow.NotFoundError, "more": ow.FormatError, "gone": ow.NotFoundError, "out": ow.FormatError}.items():
            try:
                ow.load_file(name, framework="np")
            except kind:
                continue
            raise AssertionError(name)
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_folder_is_read_whole_or_not_at_all(script) -> None:
    """A child reads a folder that has an index.json or a complete set of shards, and refuses any other folder."""
    script(FOLDERS)


def test_without_numpy(script) -> None:
    """Without numpy, a forked child reads plain files, and raises ForkedError for compressed files."""
    script(
        """
import os, sys
sys.modules["numpy"] = None  # as if it were not installed
import overwire as ow
ow.save_file({"w": ow.TensorSpec.of("F32", (3000,), bytes(range(250)) * 48)}, "p", compress=False)
ow.save_file({"w": ow.TensorSpec.of("F32", (3000,), bytes(range(250)) * 48)}, "c")
child = os.fork()
if child == 0:
    assert bytes(ow.load_file("p", framework="bytes")["w"]) == bytes(range(250)) * 48
    for call in (lambda: ow.load_file("c", framework="bytes"), lambda: ow.safe_open("c", "bytes"), lambda: next(ow.stream("c", framework="bytes"))):
        try:
            call()
        except ow.ForkedError as error:
            assert "numpy" in str(error)
            continue
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )
