"""Raises KeyboardInterrupt at the start of every overwire function that runs while an object is used, one function at a
time. Nothing may stay open or half written, no thread may keep running, and the object must be usable again."""

from __future__ import annotations

import pytest

INTERRUPTING = """
import gc, os, sys, threading, time
from pathlib import Path
import torch, overwire as ow
from overwire import stores
from overwire.compat import fastsafetensors as fst, tensorizer
from overwire.compat.fastsafetensors import cpp

FOLDER = os.path.dirname(ow.__file__)
tensors = {f"t{i}": torch.full((30, 10), float(i)) for i in range(4)}
ow.save_file(tensors, "m.safetensors")
ow.save_file(tensors, "p.safetensors", compress=False)
with tensorizer.TensorSerializer("n.tensors") as serializer:
    for at, (name, tensor) in enumerate(tensors.items()):
        serializer.write_tensor(at, name, 0, tensor)

def compare(loaded):
    assert {name: tensor[0, 0].item() for name, tensor in loaded.items()} == {f"t{i}": i for i in range(4)}

def write_file():
    with stores.FileWriter("written") as file:
        file.write(b"all of it")

def is_whole():
    assert Path("written").read_bytes() in (b"old", b"all of it")
    Path("written").write_bytes(b"old")

def read_file():
    with stores.ObjectReader("p.safetensors") as file:
        assert len(file.readall()) == os.path.getsize("p.safetensors")

def deserialize():
    with tensorizer.TensorDeserializer("n.tensors", device="cpu", lazy_load=True) as file:
        compare(file)

def serialize():
    with tensorizer.TensorSerializer("written") as file:
        file.write_tensor(0, "a", 0, torch.ones(30))

def has_its_tensor():
    if Path("written").read_bytes() != b"old":
        with tensorizer.TensorDeserializer("written", device="cpu") as file:
            assert list(file) == ["a"]
    Path("written").write_bytes(b"old")

def load_batches():
    loader = fst.ParallelLoader(None, ["p.safetensors"], use_tqdm_on_load=False, device="cpu")
    try:
        compare(dict(loader.iterate_weights()))
    finally:
        loader.close()

def read_range():
    reader = cpp.nogds_file_reader(False, 1024, 2, False, 0)
    memory = cpp.gds_device_buffer(cpp.cpu_malloc(4096), 4096, False)
    with open("p.safetensors", "rb") as file:
        reader.wait_read(reader.submit_read(file.fileno(), memory, 0, 1000, 0))

def open_one():
    with ow.safe_open("m.safetensors", "pt") as file:
        compare({name: file.get_tensor(name) for name in file})

def stream_all():
    compare(dict(ow.stream("m.safetensors")))

def stream_windows():
    compare(dict(ow.stream("m.safetensors", max_memory=5000)))

def nothing():
    pass

LIVES = {
    "stream": (stream_all, nothing),
    "windows": (stream_windows, nothing),
    "safe_open": (open_one, nothing),
    "FileWriter": (write_file, is_whole),
    "ObjectReader": (read_file, nothing),
    "TensorDeserializer": (deserialize, nothing),
    "TensorSerializer": (serialize, has_its_tensor),
    "ParallelLoader": (load_batches, nothing),
    "reader": (read_range, nothing),
}

class Interrupt:
    '''Raises KeyboardInterrupt when the function with number `at` starts.'''
    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, frame, event, argument):
        if event != "call" or not frame.f_code.co_filename.startswith(FOLDER) or under_finalizer(frame):
            return
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt

def under_finalizer(frame):
    # Python discards an interrupt in a finalizer.
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "<lambda>"):
            return True
        frame = frame.f_back
    return False

def opened():
    return sorted(filter(None, map(target_of, os.listdir("/proc/self/fd"))))

def target_of(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None  # listing the folder opened this descriptor, now closed

life, after = LIVES[os.environ["LIFE"]]
complaints = []
sys.unraisablehook = lambda what: complaints.append(repr(what.exc_value)) if what.exc_type is not KeyboardInterrupt else None
Path("written").write_bytes(b"old")
for _ in range(2):
    life()
    after()
gc.collect()
gc.freeze()
before, files = opened(), sorted(os.listdir())
counting = Interrupt(0)
sys.settrace(counting)
life()
sys.settrace(None)
after()
assert counting.count > 10
for at in range(1, counting.count + 1, max(1, counting.count // 150)):
    sys.settrace(Interrupt(at))
    try:
        life()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    gc.collect()
    after()
    until = time.monotonic() + 20  # a load that was dropped ends in the background
    while (opened() != before or threading.active_count() > 1) and time.monotonic() < until:
        time.sleep(0.001)
    assert opened() == before, (at, opened(), before)
    assert sorted(os.listdir()) == files, (at, os.listdir())
    assert threading.active_count() == 1 and not complaints, (at, threading.enumerate(), complaints)
life()
after()
"""


@pytest.mark.parametrize(
    "life",
    [
        "stream", "windows", "safe_open", "FileWriter", "ObjectReader", "TensorDeserializer", "TensorSerializer", "ParallelLoader",
        "reader",
    ],
)  # fmt: skip
def test_an_interrupt_at_every_function(torch_script, life: str) -> None:
    """After an interrupt at the start of any function, everything is released, and the same work succeeds."""
    torch_script(INTERRUPTING, LIFE=life)


EXITING = """
import torch, overwire as ow
from overwire.compat import fastsafetensors as fst
for name in ("a", "b"):
    ow.save_file({name: torch.ones(9)}, name)
loader = fst.ParallelLoader(None, ["a", "b"], use_tqdm_on_load=False, device="cpu")
batches = loader.iterate_weights()
next(batches)
"""


def test_exit_with_an_open_batch(torch_script) -> None:
    """If the interpreter exits in the middle of iterating a ParallelLoader, it does not wait for a thread that has
    already ended."""
    assert not torch_script(EXITING).stderr


CLOSING = """
import threading
import torch, overwire as ow
from overwire.compat import fastsafetensors as fst
names = ["a", "b", "c"]
for name in names:
    ow.save_file({name: torch.ones(9)}, name)
# The thread has the first batch and waits for the second, which does not arrive before the loader is closed.
loader = fst.ParallelLoader(None, names, use_tqdm_on_load=False, device="cpu")
reads, waits, results = loader._load_single_batch, threading.Event(), []
def read_after(batch):
    if batch.files != ["a"]:
        waits.set()
        while not loader._is_closed:
            waits.wait(0.01)
        raise OSError("closed meanwhile")
    return reads(batch)
loader._load_single_batch = read_after
def consume():
    try:
        for name, _ in loader.iterate_weights():
            results.append(name)
    except (ow.CancelledError, OSError) as error:
        results.append(type(error).__name__)
thread = threading.Thread(target=consume)
thread.start()
waits.wait()
loader.close()
thread.join(60)
assert not thread.is_alive() and results[0] == "a" and results[1:] in (["CancelledError"], ["OSError"]), results
assert list(loader.iterate_weights()) == []
# Only one iteration at a time is allowed.
loader = fst.ParallelLoader(None, names, use_tqdm_on_load=False, device="cpu")
first = loader.iterate_weights()
assert next(first)[0] == "a"
try:
    next(loader.iterate_weights())
except ow.ArgumentError as error:
    assert "another iteration is running" in str(error)
else:
    raise SystemExit("two at once")
assert [name for name, _ in first] == ["b", "c"]
assert [name for name, _ in loader.iterate_weights()] == names
"""


def test_a_loader_that_another_thread_closes(torch_script) -> None:
    """If a ParallelLoader is closed, a thread that waits for a batch in it continues. A second iteration at the same
    time is refused."""
    torch_script(CLOSING)
