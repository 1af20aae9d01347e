"""Tests import, fork, exit, signals and threads of the engine, each in a separate interpreter.

What depends on timing is tested many times with random delays from a seed, and hundreds of times by `make more`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import warm
from process_helper import BIG, FEWER, PRELUDE, run, write_plain, write_sparse


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sparse(tmp_path_factory.mktemp("big") / "big.safetensors", *BIG)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    data = bytes(range(256)) * 4096
    return write_plain(tmp_path_factory.mktemp("small") / "small.safetensors", {"x": ("U8", [len(data)], data)})


def test_import_starts_nothing() -> None:
    """The import starts no thread, and imports neither the engine nor torch, numpy or logging. The engine starts with
    the first call."""
    run("""
assert threads() == AT_FIRST
for name in ("overwire._core", "torch", "numpy", "logging", "json"):
    assert name == "json" or name not in sys.modules, name
assert not e.forked()
e.knobs()
assert threads() > AT_FIRST and "overwire._core" in sys.modules
assert "torch" not in sys.modules and "numpy" not in sys.modules
""")


@pytest.mark.parametrize("forks", [max(10, 40 // FEWER), pytest.param(200, marks=pytest.mark.slow)])
def test_forked_children_are_refused(big: str, small: str, forks: int) -> None:
    """In a forked child, every call raises ForkedError immediately, existing tensors can be read, and the child exits
    with code 0."""
    out = run("""
import ctypes
import overwire.jobs  # imported once, not in each child
big, small, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
busy = LongJob(big)
tensors = load(small)
address = tensors[0][1]
calls = [
    lambda: e.open_model("{}"), lambda: e.close_model(1),
    lambda: e.load_start(1, None, "{}"), lambda: e.job_wait(1, None), lambda: e.job_next(1, None),
    lambda: e.job_take(1), lambda: e.job_progress(1), lambda: e.job_cancel(1), lambda: e.job_free(1),
    lambda: e.job_report(1), lambda: e.save_start("{}", []), lambda: e.convert_start("{}"),
    lambda: e.verify_start("{}"), lambda: e.run("inspect", "x"), lambda: e.doctor(), lambda: e.knobs(),
    lambda: e.cli([]), lambda: e.preload_start("{}"), lambda: e.preload_join(1, "{}"),
]
def body():
    for call in calls:
        try:
            call()
        except errors.ForkedError as error:
            assert "spawn" in str(error)
        else:
            os._exit(3)
    assert e.forked()
    assert ctypes.string_at(address, 256) == bytes(range(256))
    global tensors
    del tensors  # a child frees nothing and must not hang
for i in range(n):
    time.sleep((i * 7919 % 31) / 10000)
    assert child(body) == 0, i
assert not e.forked()
end = time.monotonic() + 60
while e.job_progress(busy.job)[0] == 0:
    assert time.monotonic() < end, "the job makes no progress"
    time.sleep(0.01)
assert ctypes.string_at(address, 256) == bytes(range(256))
busy.end()
""", big, small, forks)
    print(out.stdout)


def test_direct_engine_calls_are_refused_in_children(small: str) -> None:
    """Calling the engine directly, without overwire._verbs, is also refused in a child."""
    run("""
from overwire import _core as raw
e.knobs()
# These functions do not enter Go and also work in children.
free = {"forked", "buffer_of", "dlpack_give", "dlpack_take", "Exporter"}
def body():
    for name in dir(raw):
        function = getattr(raw, name)
        if not callable(function) or name.startswith("__") or name in free:
            continue
        for args in ((), (1,), (1, None), (1, 2, 3)):
            try:
                function(*args)
            except TypeError:
                pass  # the function needs another number of arguments
            except RuntimeError as error:
                assert isinstance(error, errors.ForkedError), (name, error)
                break
        else:
            os._exit(3)
    assert raw.forked()
assert child(body) == 0
assert not raw.forked()
""")


def test_fork_while_the_runtime_starts(small: str) -> None:
    """If a child is forked after the engine's file was mapped and before its first call, the child's calls are refused,
    but not the parent's."""
    run("""
from overwire import _engine
_engine.open_library()
_engine.open_library()
assert not _engine.is_loaded() and not _engine.forked()
def body():
    assert _engine.forked()
    try:
        e.knobs()
    except errors.ForkedError:
        return
    os._exit(3)
assert child(body) == 0
assert e.knobs() and _engine.is_loaded() and not _engine.forked()
""")


def test_fork_before_the_first_call(small: str) -> None:
    """If a process has only imported overwire, its child can start its own engine."""
    run("""
def body():
    assert len(load(sys.argv[1])) == 1
for i in range(20):
    assert child(body) == 0, i
body()
""", small)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing(method: str, small: str, tmp_path: Path) -> None:
    """Workers that spawn or forkserver starts can use the engine after their parent has used it."""
    program = tmp_path / "program.py"
    program.write_text(PRELUDE + """
import multiprocessing
def work(path):
    return len(load(path)), os.getpid()
if __name__ == "__main__":
    load(sys.argv[1])
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        got = pool.map(work, [sys.argv[1]] * 8, chunksize=1)
    assert all(n == 1 and pid != os.getpid() for n, pid in got)
""")
    done = warm.fresh([program, small, method], timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("exits", [28, pytest.param(700, marks=pytest.mark.slow)])
def test_exit_during_work(big: str, small: str, exits: int, tmp_path: Path) -> None:
    """A process can exit with code 0 at any time during a load, a save or a preload, even if daemon threads wait for
    it."""
    run("""
import random
big, small, n, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
sparse = write_sparse(f"{out}/sparse.safetensors", 64 << 20)
kept = []
def body():
    kind = ["load", "poll", "wait", "next", "save", "preload", "tensors"][i % 7]
    if kind == "tensors":
        kept.extend(load(small))
    if kind == "save":
        import ctypes
        kept.append(bytearray(64 << 20))
        address = ctypes.addressof((ctypes.c_char * len(kept[-1])).from_buffer(kept[-1]))
        spec = json.dumps({"path": f"{out}/{os.getpid()}.safetensors", "compress": True})
        e.save_start(spec, [("w", "BF16", (32 << 20,), address, 64 << 20)])
    elif kind == "preload":
        e.preload_start(json.dumps({"uris": [sparse], "map": False}))
    else:
        busy = LongJob(big)
        kept.append(busy)
        do = {"poll": lambda: e.job_progress(busy.job), "wait": lambda: e.job_wait(busy.job, None),
              "next": lambda: e.job_next(busy.job, 0.001)}.get(kind)
        def loop():
            while True:
                do()
        for _ in range(3 if do else 0):
            threading.Thread(target=loop, daemon=True).start()
    time.sleep(random.Random(i).random() * 0.02)
for i in range(n):
    code = child(body)
    assert code == 0, (i, i % 7, code)
""", big, small, max(7, exits // FEWER), tmp_path)


def test_exit_raises_nothing_in_daemon_threads(big: str) -> None:
    """If the interpreter exits while a daemon thread waits for a job, no error is raised in the thread, because Python
    would print it."""
    run("""
import atexit
busy = LongJob(sys.argv[1])
ended, begun = [], threading.Event()
def wait():
    begun.set()
    try:
        e.job_wait(busy.job, None)
    finally:
        ended.append(True)
def look():
    time.sleep(0.2)
    assert not ended, "the wait has ended"
    print("looked", flush=True)
threading.Thread(target=wait, daemon=True).start()
begun.wait()
time.sleep(0.1)  # until the thread waits
import overwire._engine as engine
atexit.unregister(engine._at_exit)
engine._at_exit()  # as at the interpreter's exit
look()
""", big)


@pytest.mark.parametrize("call", ["job_wait(busy.job, None)", "job_next(busy.job, None)", "job_wait(busy.job, 60)"])
def test_ctrl_c_while_waiting(call: str, big: str) -> None:
    """SIGINT during a wait for a job raises KeyboardInterrupt. The job continues."""
    out = run(f"""
import overwire.jobs  # imported before any signal arrives
busy = LongJob(sys.argv[1])
waits = []
for i in range(10):
    sent = []
    def send():
        time.sleep(0.02 + 0.013 * i)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=send)
    try:
        thread.start()  # the signal may arrive before this thread runs again
        while True:
            e.{call}
    except KeyboardInterrupt:
        waits.append(time.perf_counter() - sent[0])
    thread.join()
print("worst", max(waits), "median", sorted(waits)[5])
before, end = e.job_progress(busy.job)[0], time.monotonic() + 60
while e.job_progress(busy.job)[0] == before:
    assert time.monotonic() < end
    time.sleep(0.01)
busy.end()
""", big)
    print(out.stdout)


def test_sigterm_ends_the_process_at_once(big: str) -> None:
    """SIGTERM keeps its default action and ends the process at once."""
    program = PRELUDE + "busy = LongJob(sys.argv[1])\nprint('go', flush=True)\ne.job_wait(busy.job, None)"
    with processes.started([sys.executable, "-c", program, big], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_the_engine_keeps_pythons_signal_handlers() -> None:
    """Starting the engine keeps the handlers of INT, TERM, HUP, USR1 and CHLD, and Python's handlers still run."""
    run("""
hits = []
for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(s, lambda n, f: hits.append(n))
e.knobs()
for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
    os.kill(os.getpid(), s)
    assert hits.pop() == s
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
""")


def test_waiting_lets_other_threads_run(big: str) -> None:
    """A wait blocks neither the GIL nor other calls."""
    run("""
busy = LongJob(sys.argv[1])
def wait():
    try:
        e.job_wait(busy.job, None)
    except errors.CancelledError:
        pass
waiter = threading.Thread(target=wait)
waiter.start()
time.sleep(0.05)
for _ in range(1000):
    e.job_progress(busy.job)
assert waiter.is_alive()
e.job_cancel(busy.job)
waiter.join()
busy.end()
""", big)


def test_many_threads(small: str) -> None:
    """Eight threads can use models, jobs and tensors at the same time."""
    run("""
import ctypes
failed = []
def work():
    try:
        for _ in range(40):
            landed = load(sys.argv[1])
            assert ctypes.string_at(landed[0][1] + 256 * 100, 256) == bytes(range(256))
    except BaseException as error:
        failed.append(error)
workers = [threading.Thread(target=work) for _ in range(8)]
for w in workers: w.start()
for w in workers: w.join()
assert not failed, failed
""", small)


@pytest.mark.parametrize("first", ["main", "another"])
def test_other_interpreters_are_refused(first: str, small: str) -> None:
    """Importing overwire in a second interpreter of the process raises a clear ImportError. The main interpreter works
    and exits without hanging, whichever interpreter imports overwire first, and even if the second one is not
    closed."""
    pytest.importorskip("_xxsubinterpreters")
    run(
        r"""
import _xxsubinterpreters as interpreters
small, first = sys.argv[1:]
asks = f'''
import sys
sys.path[:] = {sys.path}
from overwire import load_file
try:
    load_file({small!r})
except ImportError as error:
    assert 'interpreter' in str(error), error
else:
    raise SystemExit(1)
'''
if first == "main":
    kept = load(small)
for _ in range(2):
    other = interpreters.create()
    interpreters.run_string(other, asks)
interpreters.destroy(other)
assert len(load(small)) == 1 and e.knobs()
""",
        small,
        first,
        timeout=60,
    )


def test_calls_raise_after_a_panic_and_python_continues() -> None:
    """A call in which Go panics, and all later calls, raise EngineError. The stack is printed once, and the process
    continues."""
    done = run("""
from overwire._engine import core
for call in (lambda: core().call("panic", "", b""), lambda: e.knobs(), lambda: e.open_model("{}"), lambda: e.job_wait(1, None)):
    try:
        call()
    except errors.EngineError as error:
        assert "panic in panic: asked for" in str(error)
    else:
        sys.exit("no error")
print("alive")
""")
    assert done.stdout == "alive\n"
    assert done.stderr.count("overwire: panic in panic: asked for") == 1 and "goroutine" in done.stderr


def test_no_writer_runs_after_a_panic(big: str) -> None:
    """After a panic in any call, a wait for a load ends only when nothing writes to the caller's memory any more."""
    run("""
from overwire._engine import core
busy = LongJob(sys.argv[1])
while e.job_progress(busy.job)[0] == 0:
    time.sleep(0.001)
try:
    core().call("panic", "", b"")
except errors.EngineError:
    pass
try:
    e.job_wait(busy.job, None)
except errors.EngineError as error:
    assert "panic in panic: asked for" in str(error)
else:
    sys.exit("no error")
busy.memory[:] = b"\\xff" * len(busy.memory)  # the file has zeros
time.sleep(0.2)
assert busy.memory.count(0xFF) == len(busy.memory)
e.job_free(busy.job)
e.close_model(busy.model)
""", big)


def test_settings_are_read_from_os_environ() -> None:
    """Changes to os.environ before the first call take effect, and invalid values are logged as warnings."""
    done = run("""
import logging
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
os.environ["OVERWIRE_THREADS"] = "1"
os.environ["OVERWIRE_NO_SUCH"] = "1"
rows = {row["name"]: row for row in e.knobs()}
assert rows["OVERWIRE_THREADS"]["value"] == "1", rows["OVERWIRE_THREADS"]
""")
    assert "overwire WARNING" in done.stderr and "OVERWIRE_NO_SUCH" in done.stderr


def test_a_preload_is_joined_once(small: str, tmp_path: Path) -> None:
    """Only one load can join a preload. If the preload failed, only its own job reports this."""
    run("""
import ctypes
path, missing = sys.argv[1], sys.argv[2]
job = e.preload_start(json.dumps({"uris": [path]}))
assert e.job_wait(job, None) and e.job_progress(job)[2] == 1
try:
    e.job_take(job)
except errors.ArgumentError:
    pass
else:
    sys.exit("a preload's tensors belong to loads")
def joins():
    model = e.open_model(json.dumps({"uris": [path]}))
    return model, e.preload_join(model, "{}")["device"]
model, device = joins()
assert device == ""
load = e.load_start(model, None, "{}")
assert e.job_wait(load, None)
(capsule, address), = e.job_take(load)
e.job_free(load); e.close_model(model); e.job_free(job)
assert ctypes.string_at(address, 256) == bytes(range(256))
assert joins()[1] is None

job = e.preload_start(json.dumps({"uris": [missing]}))
try:
    e.job_wait(job, None)
except errors.NotFoundError as error:
    assert "missing" in str(error)
else:
    sys.exit("no error")
assert joins()[1] is None

job = e.preload_start(json.dumps({"uris": [path]}))
e.job_cancel(job)  # cancelled, so no load can join it
assert joins()[1] is None
""", small, tmp_path / "missing.safetensors")


def test_cli_ctrl_c_gives_130(tmp_path: Path) -> None:
    """Ctrl-C cancels a command, which exits with status 130 and without a traceback."""
    source = write_sparse(tmp_path / "big.safetensors", 4 << 30)
    program = PRELUDE + "e.main()"
    command = [sys.executable, "-c", program, "compress", source, "-o", str(tmp_path / "out.safetensors")]
    with processes.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:  # wait for its temporary file
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (process.returncode, out, err)
    assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["big.safetensors"]


def test_objects_that_outlive_their_modules_print_nothing(small: str, tmp_path: Path) -> None:
    """Objects that live until overwire's modules are cleared at exit print nothing when they are destroyed."""
    (tmp_path / "holder.py").write_text("kept = []\n")
    program = """
import holder  # imported before overwire, so it is cleared after it
import sys
import overwire
file = overwire.safe_open(sys.argv[1], "np")
stream = overwire.stream(sys.argv[1], framework="np")
holder.kept += [file, stream, overwire.pin(sys.argv[1]), file.get_tensor("x")]
sys.modules_of_program = [module for name, module in sys.modules.items() if name.startswith(("overwire", "holder"))]
"""
    (tmp_path / "program.py").write_text(program)
    ended = warm.fresh([tmp_path / "program.py", small])
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
