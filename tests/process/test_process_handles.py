"""Tests the handles, texts and memory that Python and the engine pass to each other."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from process_helper import run, write_plain

DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Writes a file with a 3 x 4 tensor of each dtype that has whole bytes, and with tensors of unusual shapes."""
    tensors = {
        name: (name, [3, 4], bytes(i % 2 for i in range(12 * size)))
        for name, size in sorted(DTYPES.items(), key=lambda d: -d[1])
    }
    tensors |= {"pairs": ("F4", [3, 4], bytes(range(6))), "six": ("F6_E2M3", [4], bytes(range(3)))}
    tensors |= {"empty": ("F32", [3, 0, 5], b""), "scalar": ("U8", [], b"\x07")}
    yield write_plain(tmp_path_factory.mktemp("every") / "every.safetensors", tensors)


def test_wrong_handles() -> None:
    """Stale, invented and ill-typed handles raise ArgumentError. Closing or freeing a handle twice does nothing."""
    run("""
calls = [lambda h: e.load_start(h, None, "{}"), lambda h: e.job_wait(h, 0), lambda h: e.preload_join(h, "{}"),
         lambda h: e.job_next(h, 0), e.job_take, e.job_progress, e.job_report, e.job_cancel]
for call in calls:
    for handle in (0, -1, 1 << 64, (1 << 64) - 1, 4711, 1.0, "1", None, True):
        try:
            call(handle)
        except errors.ArgumentError as error:
            assert isinstance(error, ValueError)
        else:
            sys.exit(f"{call} took {handle!r}")
for call in (e.close_model, e.job_free):
    call(4711)
    call(4711)
    for handle in (0, -1, 1 << 64, None):
        try:
            call(handle)
        except errors.ArgumentError:
            continue
        sys.exit(f"{call} took {handle!r}")
""")


def test_objects_with_a_handle_are_not_copied(every: str) -> None:
    """copy, deepcopy and pickle refuse an object with a handle, because deleting the copy would close the original's
    handle."""
    run("""
import copy, pickle
import overwire as ow
path = sys.argv[1]
file = ow.safe_open(path, "bytes")
owners = [file, ow.stream(path, framework="bytes"), ow.preload(path), ow.pin(path), file._live_model().handle]
for owner in owners:
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        try:
            way(owner)
        except TypeError as error:
            assert "cannot be copied or pickled" in str(error), error
        else:
            sys.exit(f"{way.__name__} took {type(owner).__name__}")
assert bytes(file["U8"]) == bytes(i % 2 for i in range(12))
""", every)


def test_handles_are_never_reused(every: str) -> None:
    """A handle is never reused. Closing a model ends exactly the work that belongs to the model."""
    run("""
spec = json.dumps({"uris": [sys.argv[1]]})
seen = set()
for _ in range(100):
    model = e.open_model(spec)
    assert model not in seen
    seen.add(model)
    job = e.load_start(model, None, "{}")
    e.close_model(model)  # the load continues
    assert e.job_wait(job, None)
    assert e.job_take(job)
    try:
        e.load_start(model, None, "{}")
    except errors.ArgumentError:
        pass
    else:
        sys.exit("loaded from a closed model")
    e.job_free(job)
    try:
        e.job_take(job)
    except errors.ArgumentError:
        continue
    sys.exit("took from a freed job")
""", every)


def test_texts_and_lists_are_checked(every: str) -> None:
    """Text with NUL or lone surrogates, numbers out of range and wrong tuples raise ValueError or TypeError before the
    engine is called."""
    run("""
import struct
model = e.open_model(json.dumps({"uris": [sys.argv[1]]}))
def refuse(kinds, call, *args):
    try:
        call(*args)
    except kinds:
        return
    sys.exit(f"{call.__name__}{args!r} was taken")
for call in (e.open_model, e.convert_start, e.verify_start, e.preload_start):
    for text in ("a\\0b", "\\ud800"):
        refuse(ValueError, call, text)
    refuse(TypeError, call, 1)
    refuse(TypeError, call, b"{}")
for text in ("", "[]", "{", '{"uris": 1}'):
    refuse(ValueError, e.open_model, text)
refuse(ValueError, e.run, "destroy", "{}")
refuse(ValueError, e.run, "knobs", "{}")
refuse(ValueError, e.run, "\\0", "{}")
refuse(TypeError, e.run, 1, "{}")
refuse(ValueError, e.load_start, model, None, "\\0")
refuse(ValueError, e.load_start, model, None, "nonsense")
refuse(TypeError, e.load_start, model, "text", "{}")
refuse(TypeError, e.core().start, "load", "{}", bytearray(16))
refuse(ValueError, e.core().start, "load", "{}", bytes(8))
refuse(ValueError, e.load_start, model, b"x", "{}")
for request in [(-1, 0, 0, -1, 0, -1), (10**6, 0, 0, -1, 0, -1), (0, 0, 2, 1, 0, -1), (0, 0, 0, 99, 0, -1), (0, 0, -5, -1, 0, -1)]:
    refuse((ValueError, KeyError, IndexError), e.load_start, model, struct.pack("=6q", *request), "{}")
good = ("x", "U8", (1,), id(e), 1)
spec = json.dumps({"path": "/nonexistent-folder/x.safetensors"})
for tensors in ([("\\0", *good[1:])], [("x", "U9", *good[2:])], [("x", "U8", (1,), 0, 1)], [("x", "U8", (1,), id(e), -1)],
                [(1, *good[1:])], [("x", "U8", (1.5,), id(e), 1)], [("x", "U8", (1 << 70,), id(e), 1)], [("x", "U8", None, id(e), 2)]):
    refuse(ValueError, lambda: e.job_wait(e.save_start(spec, tensors), None))
columns = {"path": "/nonexistent-folder/x.safetensors", "names": ["x"], "dtypes": ["U8"], "shapes": [[1]]}
for wrong in ({"names": []}, {"dtypes": []}, {"shapes": [[1], [1]]}):
    refuse(ValueError, e.core().start, "save", json.dumps(columns | wrong), struct.pack("=3q", id(e), 1, 0))
refuse(ValueError, e.core().start, "save", json.dumps(columns), struct.pack("=2q", id(e), 1))
job = e.load_start(model, None, "{}")
for timeout in ("1", [], float("nan")):
    refuse((TypeError, ValueError), e.job_wait, job, timeout)
assert e.job_wait(job, float("inf")) and e.job_wait(job, -5) and e.job_wait(job, 10**12)
refuse(ValueError, e.job_next, e.verify_start(json.dumps({"uris": [sys.argv[1]]})), 0)
""", every)


def test_a_model_table_equals_the_files_header(every: str) -> None:
    """Names, dtypes, shapes and sizes pass unchanged through the packed buffer."""
    run("""
model = e.open_model(json.dumps({"uris": [sys.argv[1]]}))
with open(sys.argv[1], "rb") as f:
    header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
table = e.model_table(model)
assert {row[0]: (row[1], list(row[2]), row[3], row[4]) for row in table} == {
    name: (t["dtype"], t["shape"], *[t["data_offsets"][1] - t["data_offsets"][0]] * 2) for name, t in header.items()}
assert all(row[5:] == (0, -1) for row in table)
source, = e.model_info(model)["sources"]
assert source["uri"] == sys.argv[1] and source["size"] == os.path.getsize(sys.argv[1]) and not source["overwire"]
""", every)


@pytest.mark.imports_torch
def test_torch_accepts_every_dtype(every: str) -> None:
    """Each capsule becomes a torch tensor with the file's bytes, dtype and shape."""
    pytest.importorskip("torch")
    run("""
import torch
from torch.utils.dlpack import from_dlpack
want = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
        "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
        "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2, "F6_E2M3": torch.uint8}
model = e.open_model(json.dumps({"uris": [sys.argv[1]]}))
table = e.model_table(model)
for raw in (False, True):
    for (name, dtype, shape, size, *_), (capsule, address) in zip(table, load(sys.argv[1], raw)):
        tensor = from_dlpack(capsule)
        assert tensor.numel() == 0 or tensor.data_ptr() == address
        shape = {"F4": (3, 2), "F6_E2M3": (3,)}.get(dtype, shape)
        assert tuple(tensor.shape) == shape and tensor.is_contiguous(), name
        if raw:
            assert str(tensor.dtype).startswith("torch.uint") and tensor.element_size() * tensor.numel() == size
        else:
            assert tensor.dtype == want[dtype], (name, tensor.dtype)
        if dtype == "BOOL":
            assert tensor.flatten().int().tolist() == [0, 1] * 6
        try:
            from_dlpack(capsule)  # a capsule can be used once
        except (RuntimeError, ValueError):
            continue
        sys.exit("taken twice")
""", every)


def test_numpy_accepts_raw_capsules(every: str) -> None:
    """With raw=True, numpy accepts every capsule, and the memory lives as long as the array."""
    pytest.importorskip("numpy")
    run("""
import gc, numpy
class Holder:
    def __init__(self, capsule): self.capsule = capsule
    def __dlpack__(self, **kwargs): return self.capsule
    def __dlpack_device__(self): return 1, 0
model = e.open_model(json.dumps({"uris": [sys.argv[1]]}))
arrays = [numpy.from_dlpack(Holder(capsule)) for capsule, _ in load(sys.argv[1], True)]
gc.collect()
with open(sys.argv[1], "rb") as f:
    skip = int.from_bytes(f.read(8), "little")
    data = f.read()[skip:]
assert b"".join(a.tobytes() for a in arrays) == data
""", every)


def test_tensors_returned_one_by_one(every: str) -> None:
    """job_next returns each requested tensor once, in order of arrival. After that, job_take returns nothing."""
    run("""
model = e.open_model(json.dumps({"uris": [sys.argv[1]]}))
n = len(e.model_table(model))
job = e.load_start(model, None, "{}")
seen = []
while landed := e.job_next(job, None):
    for at, capsule, address in landed:
        assert capsule is not None
        seen.append(at)
assert sorted(seen) == list(range(n))
assert e.job_next(job, 0) == [] and e.job_wait(job, None)
assert e.job_take(job) == [(None, 0)] * n
""", every)


def test_tensors_returned_in_columns(every: str) -> None:
    """Packed columns have the same contents as job_next and job_take: non-empty tensors with their positions, and the
    number of empty tensors."""
    run("""
import struct
model = e.open_model(json.dumps({"uris": [sys.argv[1]]}))
rows = e.model_table(model)
empty = [at for at, row in enumerate(rows) if 0 in row[2]]
assert empty
job = e.load_start(model, None, "{}")
seen = []
while (landed := e.columns(job)).capsules:
    assert len(landed.positions) == len(landed.addresses) == len(landed.capsules)
    usable = list(landed.usable())
    assert len(usable) == len(landed.capsules) - landed.missing and None not in [capsule for _, capsule in usable]
    seen += [at for at, _ in usable]
assert sorted(seen + empty) == list(range(len(rows)))
assert not e.columns(job, 0).capsules
again = e.job_columns(job)
assert again.capsules == [None] * len(rows) and again.missing == len(rows) and list(again.usable()) == []
e.job_free(job)
place = bytearray(48)
import ctypes
at = ctypes.addressof(ctypes.c_char.from_buffer(place))
number = [row[0] for row in rows].index("I32")
job = e.load_start(model, struct.pack("=18q", number, at, 0, -1, 0, -1, number, 0, 0, -1, 0, -1, empty[0], 0, 0, -1, 0, -1), "{}")
assert e.job_wait(job, None)
landed = e.job_columns(job)
assert landed.capsules[0] is None and landed.missing == 2 and [at for at, _ in landed.usable()] == [1]
""", every)


def test_the_table_of_many_tensors(tmp_path: Path) -> None:
    """In the table of a model with many tensors, rows share equal objects."""
    random = Random(5)
    names = sorted(DTYPES)
    want = {}
    for at in range(3000):
        dtype, shape = random.choice(names), [random.randrange(4) for _ in range(random.randrange(5))]
        size = DTYPES[dtype]
        for dim in shape:
            size *= dim
        want[f"t{at}.\u00e9"] = (dtype, shape, bytes(size))
    path = write_plain(tmp_path / "crowd.safetensors", want)
    (tmp_path / "want.json").write_text(
        json.dumps({name: (dtype, shape, len(data)) for name, (dtype, shape, data) in want.items()})
    )
    run("""
with open(sys.argv[2]) as f:
    want = json.load(f)
model = e.open_model(json.dumps({"uris": [sys.argv[1]]}))
rows = e.model_table(model)
assert len(rows) == len(want)
for name, dtype, shape, nbytes, stored, source, alias in rows:
    assert [dtype, list(shape), nbytes] == want[name] and (stored, source, alias) == (nbytes, 0, -1)
""", path, str(tmp_path / "want.json"))


def test_destinations_and_slices(every: str) -> None:
    """If a request for a tensor or a slice has a destination, the data is loaded there and no capsule is returned."""
    run("""
import ctypes, struct
model = e.open_model(json.dumps({"uris": [sys.argv[1]]}))
place = [row[0] for row in e.model_table(model)].index("I32")
whole = ctypes.create_string_buffer(48)
part = ctypes.create_string_buffer(8)
at = ctypes.addressof
job = e.load_start(model, struct.pack("=12q", place, at(whole), 0, -1, 0, -1, place, at(part), 1, 2, 2, 4), "{}")
assert e.job_wait(job, None)
assert e.job_take(job) == [(None, 0)] * 2
assert whole.raw == bytes(i % 2 for i in range(48)) and part.raw == whole.raw[24:32]
""", every)


def test_unused_capsules_are_freed(tmp_path: Path) -> None:
    """Dropped capsules, unused jobs and used tensors free their memory, so the resident memory stays bounded."""
    size = 8 << 20
    big = {f"t{i}": ("U8", [size], bytes(size)) for i in range(2)}
    many = {f"s{i}": ("U8", [1000], bytes(1000)) for i in range(2000)}
    run("""
def rounds(n, use):
    for _ in range(n):
        model = e.open_model(json.dumps({"uris": [path], "map": mapped}))
        job = e.load_start(model, None, "{}")
        use(job)
        e.job_free(job)
        e.close_model(model)
def drop(job):
    e.job_wait(job, None)
    for capsule, address in e.job_take(job):
        del capsule
def half(job):
    e.job_next(job, None)
def columns(job):
    e.job_wait(job, None)
    kept = e.job_columns(job)
def gathered(job):
    kept = [e.columns(job)]
def leave(job):
    e.job_wait(job, None)
def hurry(job):
    pass
for path in sys.argv[1:]:
    for mapped in (False, True):
        for use in (drop, half, columns, gathered, leave, hurry):
            rounds(3, use)
            time.sleep(0.05)
            before = rss()
            rounds(20, use)
            for _ in range(100):  # workers of the last job may still be running
                time.sleep(0.1)
                grown = (rss() - before) >> 20
                if grown < 16:
                    break
            assert grown < 16, (path, mapped, use.__name__, grown)
""", write_plain(tmp_path / "big.safetensors", big), write_plain(tmp_path / "many.safetensors", many), small_quarantine=True)


def test_save_and_load_through_handles(tmp_path: Path) -> None:
    """Data that save_start saves, plain or compressed, can be verified and is unchanged after converting it back."""
    run("""
import array, ctypes
values = array.array("H", [0x3F80 + i % 97 for i in range(1 << 17)])
address, n = values.buffer_info()
for compress in (False, True):
    path = f"{sys.argv[1]}/{compress}.safetensors"
    spec = json.dumps({"path": path, "compress": compress, "metadata": {"a": "b"}})
    job = e.save_start(spec, [("w", "BF16", (1 << 10, 1 << 7), address, n * 2), ("e", "F32", (0,), 0, 0)])
    assert e.job_wait(job, None)
    report = json.loads(e.job_report(job))
    assert report["tensors"] == 2 and report["bytes_in"] == n * 2
    e.job_free(job)
    model = e.open_model(json.dumps({"uris": [path]}))
    names = [row[0] for row in e.model_table(model)]
    landed = dict(zip(names, load(path)))
    assert ctypes.string_at(landed["w"][1], n * 2) == values.tobytes()
    assert e.model_info(model)["sources"][0]["overwire"] is compress
    assert e.run("inspect", json.dumps({"uris": [path]}))
    verify = e.verify_start(json.dumps({"uris": [path]}))
    assert e.job_wait(verify, None) and json.loads(e.job_report(verify))
convert = e.convert_start(json.dumps({"uris": [f"{sys.argv[1]}/True.safetensors"], "path": f"{sys.argv[1]}/back.safetensors"}))
assert e.job_wait(convert, None)
def read(name):
    with open(f"{sys.argv[1]}/{name}.safetensors", "rb") as f:
        return f.read()
assert read("back") == read("False")
""", tmp_path)


def test_errors_have_class_source_and_message(tmp_path: Path) -> None:
    """The class, source and message of an engine error are attributes of the error and survive pickling."""
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    run("""
import pickle
try:
    e.open_model(json.dumps({"uris": [sys.argv[1]]}))
except errors.OverwireError as error:
    assert isinstance(error, ValueError), error
    assert error.source == sys.argv[1] and sys.argv[1] in str(error) and str(error).startswith("overwire: ")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and again.source == error.source and str(again) == str(error)
else:
    sys.exit("opened")
try:
    e.open_model(json.dumps({"uris": ["/nonexistent/x"]}))
except FileNotFoundError as error:
    assert isinstance(error, errors.NotFoundError)
""", bad)


def test_freed_numbers_run_no_python_code(every: str) -> None:
    """Freeing the numbers of jobs and models runs no `__del__`, because Python would discard a Ctrl-C in it."""
    run(
        """
import overwire as ow
ended = []
def watch(frame, event, _):
    if event == "call" and frame.f_code.co_name == "__del__":
        ended.append(type(frame.f_locals["self"]).__name__)
def verbs():
    ow.load_file(sys.argv[1], framework="bytes")
    ow.inspect(sys.argv[1])
    ow.verify(sys.argv[1])
    with ow.safe_open(sys.argv[1], "bytes") as file:
        file.get_tensor("pairs")
    with ow.pin(sys.argv[1]) as pinned:
        dict(pinned.stream(framework="bytes"))
verbs()
sys.setprofile(watch)
verbs()
sys.setprofile(None)
assert ended and not {"JobNumber", "ModelNumber"} & set(ended), ended
""",
        every,
    )
