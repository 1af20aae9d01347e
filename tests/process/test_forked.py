"""Tests that forked children, such as DataLoader workers, read local files while the engine runs in their parent."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import overwire
import pytest
from overwire.model.forked import is_compressed

# Reads with every safetensors function. The files in `opened` were opened by the parent.
WORKER = """
import sys
import overwire as ow, safetensors, safetensors.numpy, safetensors.torch, torch
from safetensors import safe_open as bound
from safetensors.torch import load_file as bound_load

def check(plain, packed, opened, patched):
    want = torch.arange(12.0).reshape(3, 4)
    reads = {
        "safe_open": lambda p: safetensors.safe_open(p, "pt").get_tensor("w"),
        "safe_open, numpy": lambda p: torch.from_numpy(safetensors.safe_open(p, framework="np").get_tensor("w")),
        "bound before": lambda p: bound(p, "pt").get_tensor("w"),
        "get_slice": lambda p: safetensors.safe_open(filename=p, framework="pt").get_slice("w")[:],
        "load_file": lambda p: safetensors.torch.load_file(p)["w"],
        "load_file, bound before": lambda p: bound_load(p)["w"],
        "load": lambda p: safetensors.torch.load(open(p, "rb").read())["w"],
        "numpy.load_file": lambda p: torch.from_numpy(safetensors.numpy.load_file(p)["w"]),
        "numpy.load": lambda p: torch.from_numpy(safetensors.numpy.load(open(p, "rb").read())["w"]),
        "load_model": lambda p: model(p),
        "deserialize": lambda p: floats(dict(safetensors.deserialize(open(p, "rb").read()))["w"]["data"]),
        "ow.load_file": lambda p: ow.load_file(p)["w"],
        "ow.load_file, list": lambda p: ow.load_file([p], keys=["w"])["w"],
        "ow.load_file, numpy": lambda p: torch.from_numpy(ow.load_file(p, framework="np")["w"]),
        "ow.load_file, open": lambda p: ow.load_file(open(p, "rb"))["w"],
        "ow.safe_open": lambda p: ow.safe_open(p).get_tensor("w"),
        "ow.safe_open, slice": lambda p: torch.cat([ow.safe_open(p).get_slice("w")[:1], ow.safe_open(p).get_slice("w")[1:, ::1]]),
    }
    if hasattr(safetensors, "_safe_open_handle"):
        reads["_safe_open_handle"] = lambda p: safetensors._safe_open_handle(open(p, "rb"), "pt").get_tensor("w")
    for name, read in reads.items():
        got = read(plain)
        assert torch.equal(got, want), name
        if patched or name.startswith("ow."):
            assert torch.equal(read(packed), want), f"{name}, compressed"
    for name, file in opened.items():
        assert file.keys() == ["b", "w"] and len(file.keys()) == 2, name
        assert torch.equal(torch.as_tensor(file.get_tensor("w")), want), name
        assert torch.equal(torch.as_tensor(file.get_slice("w")[1]), want[1]), name
    mine = ow.load_file(plain)["w"]
    mine.zero_()
    assert torch.equal(ow.load_file(plain)["w"], want) and ow.load_file(plain, dtype="bfloat16")["w"].dtype == torch.bfloat16
    assert ow.safe_open(plain).metadata() == {"who": "test"}
    for wrong, kind in (("nope", FileNotFoundError), (__file__, ow.FormatError)):
        try:
            ow.load_file(wrong)
        except kind:
            continue
        raise AssertionError(wrong)
    safetensors.torch.save_file({"w": want}, plain + ".out")  # safetensors' own code writes
    assert torch.equal(safetensors.torch.load(safetensors.torch.save({"w": want}))["w"], want)
    return 1

def floats(data):
    return torch.frombuffer(data, dtype=torch.float32).reshape(3, 4)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3, 4))
        self.b = torch.nn.Parameter(torch.zeros(2))

def model(p):
    made = Model()
    safetensors.torch.load_model(made, p)
    return made.w.detach()

class Data(torch.utils.data.Dataset):
    def __init__(self, *what):
        self.what = what

    def __len__(self):
        return 1

    def __getitem__(self, at):
        return check(*self.what)
"""

PROGRAM = """
import os, sys
sys.path.insert(0, os.getcwd())
import worker
import overwire as ow, safetensors.torch, torch

tensors = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2)}
ow.save_file(tensors, "plain dir/p.safetensors", {"who": "test"}, compress=False)
ow.save_file(tensors, "c.safetensors")
opened = {"ow": ow.safe_open("plain dir/p.safetensors"), "np": ow.safe_open("plain dir/p.safetensors", "np")}
def run(patched):
    data = worker.Data(os.path.abspath("plain dir/p.safetensors"), os.path.abspath("c.safetensors"), opened, patched)
    loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork")
    assert next(iter(loader)).item() == 1

run(False)
with ow.patch_safetensors():
    ow_read = safetensors.torch.load_file("c.safetensors")  # this read uses the engine
    assert torch.equal(ow_read["w"], tensors["w"])
    opened["patched"] = safetensors.safe_open("plain dir/p.safetensors", "pt")
    opened["patched numpy"] = safetensors.safe_open("plain dir/p.safetensors", "np")
    run(True)
    assert torch.equal(safetensors.safe_open("c.safetensors", "pt").get_tensor("w"), tensors["w"])

# After it is replaced, the file is not the file that was opened.
ow.save_file({"w": torch.zeros(3, 4), "b": torch.ones(2)}, "plain dir/p.safetensors", compress=False)
child = os.fork()
if child == 0:
    try:
        opened["ow"].get_tensor("w")
    except ow.CorruptError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
print("ok")
"""


def test_data_loader_workers_read_files(tmp_path: Path, torch_script) -> None:
    """A forked worker can read a plain file with every function, with or without the patch. overwire's functions can
    also read a compressed file."""
    pytest.importorskip("safetensors")
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "plain dir").mkdir()
    done = torch_script(PROGRAM)
    assert done.stdout == "ok\n" and "Exception ignored" not in done.stderr, done.stderr
    assert done.stderr.count("decodes compressed files slowly") == 2, done.stderr  # once per worker


DROPPING = """
import gc, os, sys
import torch, overwire as ow
from overwire import stores
ow.save_file({f"t{i}": torch.full((100, 100), float(i)) for i in range(50)}, "m.safetensors")
ow.save_file({"a": torch.ones(9)}, "preloaded.safetensors")
ow.save_delta({"a": torch.zeros(5)}, {"a": torch.ones(5)}, "delta.safetensors")
held = {
    "preload": ow.preload("preloaded.safetensors"),
    "stream": ow.stream("m.safetensors"),
    "windows": ow.stream("m.safetensors", max_memory=200_000),
    "pinned": ow.pin("m.safetensors"),
    "open": ow.safe_open("m.safetensors", "pt"),
    "delta": ow.open_delta("delta.safetensors"),
    "asleep": ow.sleep({"a": torch.ones(1000)}, release=False),
    "memory": ow.prepare_sleep({"a": torch.ones(1000)}),
    "reader": stores.ObjectReader("m.safetensors"),
}
names = [next(held["stream"])[0], next(held["windows"])[0]]
for name in list(held):
    child = os.fork()
    if not child:
        del held[name]
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
assert len(names + [name for name, _ in held["stream"]] + [name for name, _ in held["windows"]]) == 100
held["asleep"].wake()
"""


def test_a_container_is_recognised_in_every_spelling(tmp_path: Path) -> None:
    """Compressed files are recognised even if their header has characters written as JSON escapes, with and without the
    engine."""
    path = tmp_path / "m.safetensors"
    overwire.save_file({"w": np.zeros(9000, np.float32)}, path)
    data = path.read_bytes()
    assert is_compressed(path)
    spelled = data.replace(b'"overwire":', rb'"\u006fverwire":', 1)[: len(data)]
    assert is_compressed(spelled) and is_compressed(data) and is_compressed(memoryview(spelled))
    overwire.save_file({"w": np.zeros(9)}, path, {"k": "\u00e9"}, compress=False)
    assert is_compressed(path) is False


def test_objects_that_a_child_drops_stay_usable_in_the_parent(torch_script) -> None:
    """If a child drops its parent's objects, nothing is printed, and the parent can still use them."""
    done = torch_script(DROPPING)
    assert not done.stderr, done.stderr


def test_a_child_that_is_forked_while_the_engine_starts_is_refused(torch_script) -> None:
    """If Ctrl-C interrupts a call after the engine was mapped and before it has started, a child that is then forked is
    refused, and the parent continues."""
    torch_script(
        """
import os, sys
import torch
import overwire as ow
from overwire import _engine
from overwire.frameworks import choose
from overwire.model import opened
present = []
def stop_at_frame(framework):
    choose.frame_for(framework)
    present.append("overwire._core" in sys.modules)
    raise KeyboardInterrupt
opened.frame_for = stop_at_frame
try:
    ow.load_file("m")
except KeyboardInterrupt:
    opened.frame_for = choose.frame_for
assert present == [True] and not _engine.is_loaded()
child = os.fork()
if not child:
    try:
        ow.inspect("none")
    except ow.ForkedError:
        os._exit(0 if _engine.forked() else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert not _engine.forked()
ow.save_file({"a": torch.ones(3)}, "m")
assert ow.load_file("m")["a"].tolist() == [1, 1, 1]
"""
    )


def test_wrong_arguments_leave_the_engine_closed(torch_script) -> None:
    """Invalid sources, sources without a file name, and invalid options are refused before the engine starts, so the
    program can still fork."""
    torch_script(
        """
import inspect, os
import torch
import overwire as ow
from overwire import _engine
verbs = [ow.load_file, ow.safe_open, ow.stream, ow.plan, ow.load_compressed_pickle, ow.pin, ow.inspect, ow.verify]
model = torch.nn.Linear(2, 2)
verbs += [lambda source: ow.load_model(model, source), lambda source: ow.save_model(source, "m")]
for verb in verbs:
    for source in (5, None, 3.5, "", "a\\0b", object()):
        try:
            verb(source)
        except (ow.OverwireError, TypeError):
            continue
        raise SystemExit(f"{verb} takes {source!r}")
for arguments in ((5,), (5, 5, 5), ("m", "m", "cpu"), ("m", [5], "cpu"), ("m", ["m"], 5), (None, ["m"], "cpu")):
    try:
        ow.Preload(*arguments)
    except (ow.ArgumentError, TypeError):
        continue
    raise SystemExit(f"Preload takes {arguments}")
wrong = [{name: 5} for name in ("keys", "filter", "progress", "read", "mmap", "lenient", "max_memory", "storage_options")]
wrong += [{"framework": 5}, {"framework": "jax"}]
for name, value in ((name, value) for one in wrong for name, value in one.items()):
    value = -1 if name == "max_memory" else value
    takes = [verb for verb in verbs[:4] if name in inspect.signature(verb).parameters]
    assert takes, name
    for verb in takes:
        try:
            verb("m", **{name: value})
        except ow.ArgumentError as error:
            assert name.removeprefix("max_") in str(error), error
            continue
        raise SystemExit(f"{verb} takes {name}={value!r}")
assert _engine._library is None
child = os.fork()
if not child:
    ow.save_file({"a": torch.ones(3)}, "m")
    os._exit(0 if ow.load_file("m")["a"].tolist() == [1, 1, 1] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )


def test_a_child_cannot_use_its_parents_group(torch_script) -> None:
    """A forked child that uses its parent's process group is refused immediately, even if the engine never started. A
    group that the child creates works."""
    torch_script(
        """
import os
import torch, torch.distributed as dist
import overwire as ow
from overwire import _engine
def join():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
world = join()
if not (child := os.fork()):
    try:
        for act in (ow.load_file, ow.stream, lambda path, group: ow.distributed.agree(group, None)):
            try:
                act("m", group=world)
            except ow.ForkedError as error:
                assert "group" in str(error), error
            else:
                os._exit(2)
        assert _engine._library is None
        ow.save_file({"a": torch.ones(3)}, "m")
        dist.destroy_process_group()
        os._exit(0 if ow.load_file("m", group=join())["a"].tolist() == [1, 1, 1] else 3)
    finally:
        os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
dist.destroy_process_group()
"""
    )


LOCKS = r"\b(?:Lock|RLock|Condition|Semaphore|BoundedSemaphore|Barrier|allocate_lock)\((?!new_lock\(\)\))"
# Modules that create locks themselves, and why.
OTHER_LOCKS = {
    "_engine.py": "daemon threads wait for it at exit",
    "_locks.py": "creates all locks",
    "fleet/feeder.py": "only its own threads wait for it, and a forked child does not have them",
}


def test_every_lock_is_replaced_in_a_child() -> None:
    """One module creates all locks, and replaces them in a forked child. The list has the exceptions."""
    folder = Path(overwire.__file__).parent
    makers = {
        str(path.relative_to(folder)) for path in folder.rglob("*.py") if re.search(LOCKS, path.read_text(encoding="utf-8"))
    }
    assert makers == OTHER_LOCKS.keys()


HOLDING = """
import importlib, os, pkgutil, signal, sys, threading
import torch, overwire as ow
from overwire import _locks

def held_by_a_thread(more):
    '''Starts a thread that holds all locks and those of `more`. Returns a function that ends the thread.'''
    ready, leave = threading.Event(), threading.Event()
    def hold():
        locks = [lock for lock in (reference() for reference in list(_locks._locks)) if lock is not None] + list(more)
        locks = [lock for lock in locks if lock.acquire(blocking=False)]  # other threads hold the other locks
        ready.set()
        leave.wait()
        for lock in locks:
            lock.release()
    thread = threading.Thread(target=hold)
    thread.start()
    assert ready.wait(20)
    def end():
        leave.set()
        thread.join()
    return end

def in_child(work, *more):
    '''Runs work in a child that is forked while a thread holds all locks, for at most ten seconds.'''
    end = held_by_a_thread(more)
    child = os.fork()
    if not child:
        signal.alarm(10)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(1)
    end()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

MODULES = """
names = [module.name for module in pkgutil.walk_packages(ow.__path__, "overwire.", onerror=lambda name: None)]
for name in names:
    if not name.rpartition(".")[2].startswith("__main__"):
        try:
            importlib.import_module(name)
        except Exception:
            pass  # its package is not installed
ow.save_file({"a": torch.ones(3)}, "m", compress=False)
ow.load_file("m")
kind = type(_locks.new_lock())
locks = {
    f"{name}.{key}": value
    for name, module in list(sys.modules.items()) if name.startswith("overwire")
    for key, value in vars(module).items() if isinstance(value, (kind, type(threading.Lock()), threading.Condition))
}
modules = {name.removeprefix("overwire.") for name in locks}
assert {"_engine._lock", "jobs._lock", "counting._lock", "model.kept._lock", "verbs.saving._lock"} <= modules, modules

def take_all():
    for name, lock in locks.items():
        assert lock.acquire(timeout=1), name
        lock.release()
    assert ow.last_report() is not None
    assert ow.load_file("m")["a"].tolist() == [1, 1, 1]
    assert ow.safe_open("m").get_tensor("a").tolist() == [1, 1, 1]
    assert not ow.metrics()
    for refused in (lambda: ow.save_file({"a": torch.ones(3)}, "n"), lambda: ow.inspect("m")):
        try:
            refused()
        except ow.ForkedError:
            continue
        raise AssertionError(refused)

assert in_child(take_all) == 0
with locks["overwire.jobs._lock"]:  # as if a signal handler forked here, the child must release the lock
    child = os.fork()
if not child:
    os._exit(0 if ow.last_report() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ow.load_file("m")["a"].tolist() == [1, 1, 1]
"""


def test_no_module_waits_for_a_lock_of_the_parent(torch_script) -> None:
    """Even if another thread of the parent holds the locks of all modules during a fork, the child can read plain
    files. Other calls are refused without waiting."""
    torch_script(HOLDING + MODULES)


OBJECTS = """
from overwire import stores
from overwire.compat import fastsafetensors as fst, safetensors as sft, tensorizer
from overwire.compat.fastsafetensors import cpp
from overwire.compat.nyacomp import _nyacomp
from overwire.compat.safetensors import _lazy
from overwire.integrations.kept_model import move_tensors
from overwire.integrations.load_plan import open_files
from overwire.stores import FileWriter

tensors = {f"t{i:02}": torch.full((300, 100), float(i)) for i in range(20)}
ow.save_file(tensors, "m.safetensors")
ow.save_file(tensors, "p.safetensors", compress=False)
ow.save_file({"a": torch.ones(9)}, "preloaded.safetensors")
size = _nyacomp.compress(bytes(40000), "0.gz")
open("meta.csv", "w").write(f"0\\n/0.gz 10000 float32 40000 {size}")
rows = {name: ["torch.Tensor", "torch.float32", [300, 100], [100, 1], "cpu", None, []] for name in tensors}

def offloaded():
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])
    weights = [block.weight.detach().clone() for block in model.blocks]
    away = ow.offload(model, "cpu")
    away.run = torch.no_grad()(lambda: model.blocks[2](torch.ones(1, 64)))
    away.weights = lambda: all(torch.equal(block.weight, was) for block, was in zip(model.blocks, weights, strict=True))
    return away

def saving():
    leave = threading.Event()
    def watch(now):  # keeps the save's thread waiting
        if threading.current_thread() is not threading.main_thread():
            leave.wait()
    made = ow.save_file(tensors, "saved.safetensors", wait=False, progress=watch)
    made.leave = leave
    return made

def reader():
    made = cpp.nogds_file_reader(False, 1024, 2, False, 0)
    made.memory = cpp.gds_device_buffer(cpp.cpu_malloc(4096), 4096, False)
    with open("p.safetensors", "rb") as file:
        made.number = made.submit_read(file.fileno(), made.memory, 0, 4096, 0)
    return made

def begun(loader):
    made = loader.iterate_weights()
    next(made)
    return loader, made

def wanted():
    ahead = _lazy.Ahead()
    file = _lazy.kept("m.safetensors")
    slices = {name: _lazy.Slice(sft.safe_open("m.safetensors", "pt").get_slice(name), "m.safetensors", name, "cpu", {}) for name in tensors}
    gives = {name: ahead.want(one, "cpu") for name, one in slices.items()}
    ahead.begin()
    ahead.gives = gives
    return ahead

def writer():
    file = FileWriter("written")
    file.write(b"a" * 100)
    return file

def serializer():
    made = tensorizer.TensorSerializer("s.tensors")
    made.write_tensor(0, "a", 0, torch.ones(30))
    return made

# By name, four functions: make the object, read it, end it, and use it in the parent afterwards.
refused = (ow.ForkedError, ValueError)  # ValueError for a closed file
objects = {
    "stream": (lambda: ow.stream("m.safetensors"), next, lambda it: it.close(), lambda it: len(list(it)) == 20),
    "windows": (lambda: ow.stream("m.safetensors", max_memory=500_000), next, lambda it: it.close(), lambda it: len(list(it)) == 20),
    "pinned": (lambda: ow.pin("m.safetensors"), lambda it: it.load_file(), lambda it: it.release(), lambda it: len(it.load_file()) == 20),
    "saving": (saving, lambda it: it.wait(), repr, lambda it: it.leave.set() or it.wait().tensors == 20),
    "preload": (lambda: ow.preload("preloaded.safetensors"), lambda it: it.wait(), repr, lambda it: it.wait()),
    "asleep": (lambda: ow.sleep({"a": torch.ones(1000)}, release=False), lambda it: it.wake(), lambda it: it.close(), lambda it: it.wake() is None),
    "offloaded": (offloaded, lambda it: it.run(), lambda it: it.close(), lambda it: it.run() is not None and it.close() is None and it.weights()),
    "object reader": (lambda: stores.ObjectReader("m.safetensors"), lambda it: it.read(8), lambda it: it.close(), lambda it: len(it.read(8)) == 8),
    "writer": (writer, lambda it: it.write(b"b"), lambda it: it.close(), lambda it: it.close() is None and open("written", "rb").read() == b"a" * 100),
    "arriving": (lambda: move_tensors.Arriving("m.safetensors", rows, torch.device("cpu")), lambda it: it.finish_loading(), lambda it: it.close(), lambda it: it.finish_loading() is None),
    "prefetch": (lambda: sft.safe_open("m.safetensors", "pt").prefetch(), lambda it: it.take("t03"), lambda it: it.close(), lambda it: len(dict(it)) == 20),
    "ahead": (wanted, lambda it: it.gives["t19"](), lambda it: it.close(), lambda it: it.gives["t19"]()[0, 0] == 19),
    "tensorizer": (serializer, lambda it: it.write_tensor(1, "b", 0, torch.ones(3)), lambda it: it.close(), lambda it: it.write_tensor(1, "b", 0, torch.ones(3)) is None and it.close() is None),
    "decompressor": (lambda: _nyacomp.AsyncDecompressor("meta.csv"), lambda it: it.get(), repr, lambda it: len(it.get()) == 1),
    "batches": (
        lambda: begun(fst.ParallelLoader(None, ["m.safetensors", "p.safetensors"], use_tqdm_on_load=False)),
        lambda it: next(it[1]), lambda it: it[0].close(), lambda it: len(list(it[1])) == 39,
    ),
    "reader": (reader, lambda it: it.wait_read(it.number), repr, lambda it: it.wait_read(it.number) == it.memory.get_base_address()),
}

def refuse(it, read, end):
    try:
        read(it)
    except refused:
        pass
    else:
        raise AssertionError("it reads")
    end(it)

for name, (make, read, end, go_on) in objects.items():
    it = make()
    assert in_child(lambda: refuse(it, read, end)) == 0, name
    assert go_on(it), name
    del it

opened = ow.safe_open("m.safetensors")
part = opened.get_slice("t04")
def read_opened():
    assert opened["t03"][0, 0] == 3 and part[:2].shape == (2, 100) and part[0, 0] == 4
    opened.close()
assert in_child(read_opened) == 0
assert opened["t03"][0, 0] == 3 and part[0, 0] == 4

saved = saving()
saved.leave.set()
saved.wait()
assert in_child(lambda: saved.wait() and saved.cancel(), saved._ended._cond) == 0  # an ended save does not wait
"""


def test_no_object_waits_for_a_lock_of_the_parent(torch_script) -> None:
    """If another thread of the parent holds the locks of the parent's objects during a fork, the child gets an error
    when it reads through these objects, and can close them without waiting. The parent can still use them."""
    done = torch_script(HOLDING + OBJECTS)
    assert all("decodes compressed files slowly" in line or line.startswith("  ") for line in done.stderr.splitlines()), done.stderr


WRITERS = """
import gc, os, sys
import overwire as ow
from overwire.stores import FileWriter
ends = {
    "close": lambda files: files.pop().close(),
    "drop": lambda files: files.pop().drop(),
    "collect": lambda files: files.clear() or gc.collect(),
    "exit": lambda files: sys.exit(),
}
for name, end in ends.items():
    files = [FileWriter("f")]
    files[0].write(b"a" * 100)
    if not os.fork():
        end(files)
        os._exit(0)
    assert os.wait()[1] == 0, name
    files[0].write(b"b" * 100)
    files[0].close()
    assert open("f", "rb").read() == b"a" * 100 + b"b" * 100, name
"""


def test_buffered_data_is_written_once(script) -> None:
    """Data that the parent has buffered in a file object is written once, by the parent, even if a child closes the
    file."""
    done = script(WRITERS)
    assert not done.stderr, done.stderr
