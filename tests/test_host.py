"""Tests the host store with the real `overwire host` command: loads in new processes, faults, and subcommands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import overwire
import pytest

# Loads a model and prints a digest of its tensors, the counters and the log. The arguments are the path, the function
# to load with, and whether to wait until this process has put the file into the store.
LOAD = """
import hashlib, json, logging, sys, time
import overwire as ow
lines = []
logging.getLogger("overwire").addHandler(type("H", (logging.Handler,), {"emit": lambda s, r: lines.append(r.getMessage())})())
path, verb, wait = sys.argv[1:4]
if verb == "load_file":
    tensors = ow.load_file(path, framework="np", host=True)
elif verb == "stream":
    tensors = dict(ow.stream(path, framework="np", host=True))
elif verb == "safe_open":
    with ow.safe_open(path, framework="np", host=True) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
elif verb == "setting":
    tensors = ow.load_file(path, framework="np")
elif verb == "identify":
    from overwire.integrations.kept_model.identify_files import identify_files
    tensors = {str(list(identify_files(path))): __import__("numpy").zeros(1)}
else:
    tensors = ow.load_file(path, framework="np", host=False)
end = time.time() + 60
while wait == "wait" and not ow.metrics().host.puts and time.time() < end:
    time.sleep(0.01)
text = hashlib.sha256(b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))).hexdigest()
print(json.dumps({"digest": text, "host": vars(ow.metrics().host), "log": lines}))
"""


class Store:
    """A running `overwire host`."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "socket"
        self.env = {**os.environ, "OVERWIRE_HOST": str(self.socket)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "overwire", "host", "--budget", "200MB"], env=self.env, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert str(self.socket) in self.process.stdout.readline()

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "overwire", "host", *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, check=False)

    def report(self) -> dict:
        done = self.command("list", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def load(self, path: Path, verb: str = "load_file", wait: bool = False) -> dict:
        words = [sys.executable, "-c", LOAD, str(path), verb, "wait" if wait else ""]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = Store(tmp_path)
    yield one
    one.kill()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save_tensors(name: str, seed: int = 0, compress: bool = True) -> Path:
        random = np.random.default_rng(seed)
        tensors = {f"t{i}": (random.standard_normal((200, 300)) * 0.02).astype(np.float32) for i in range(4)}
        tensors |= {"empty": np.zeros((0, 3), np.int8), "scalar": np.array(seed, np.int64)}
        overwire.save_file(tensors, tmp_path / name, compress=compress)
        return tmp_path / name

    return save_tensors


@pytest.mark.parametrize("compress", [True, False])
def test_second_process_loads_from_memory(store: Store, save: Callable[..., Path], compress: bool) -> None:
    """The first load reads the file and puts it into the store. In later processes, every function reads it from
    there."""
    path = save("m.safetensors", compress=compress)
    time.sleep(0 if compress else 3.1)  # a plain file is only put after three seconds without a change
    first = store.load(path, wait=True)
    assert (first["host"]["misses"], first["host"]["puts"]) == (1, 1)
    for verb in ("load_file", "stream", "safe_open", "setting"):
        again = store.load(path, verb)
        assert again["digest"] == first["digest"]
        assert (again["host"]["hits"], again["host"]["misses"], again["host"]["lost"]) == (1, 0, 0), verb
        assert again["log"] == []
    without = store.load(path, "file")
    assert without["digest"] == first["digest"]
    assert not any(without["host"].values())
    (entry,) = store.report()["entries"]
    assert (entry["label"], entry["users"], entry["state"]) == (str(path), 0, "ready")


def test_files_that_are_identified_are_not_put(store: Store, save: Callable[..., Path]) -> None:
    """Engines identify plain files by samples of their bytes before they know whether they need the files. This does
    not put a file into the store, and the result is the same if the store already has the file."""
    pytest.importorskip("torch")
    path = save("m.safetensors", compress=False)
    time.sleep(3.1)
    first = store.load(path, "identify")
    assert not any(first["host"].values()) and not store.report()["entries"]
    assert store.command("put", str(path)).returncode == 0
    assert store.load(path, "identify") == first


def test_changed_files_are_never_served(store: Store, save: Callable[..., Path]) -> None:
    """A file that was replaced or written to is read from the disk, even if its modification time was restored."""
    path = save("m.safetensors", compress=False)
    time.sleep(3.1)
    assert store.command("put", str(path)).returncode == 0
    assert store.load(path)["host"]["hits"] == 1
    times, size = path.stat(), path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size - 1)
        file.write(b"\x7f")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = store.load(path)
    assert changed["host"]["hits"] == 0
    assert changed["digest"] == store.load(path, "file")["digest"]
    container = save("c.safetensors", seed=1)
    assert store.command("put", str(container)).returncode == 0
    save("c.safetensors", seed=2)
    assert store.load(container)["host"]["hits"] == 0


def test_a_load_works_without_a_store(store: Store, save: Callable[..., Path], tmp_path: Path) -> None:
    """If there is no store, or it does not answer, a load reads the file and logs one line. A new store takes over the
    socket of a killed store."""
    path = save("m.safetensors")
    assert store.command("put", str(path)).returncode == 0
    before = store.load(path)
    store.process.send_signal(signal.SIGSTOP)
    silent = store.load(path)
    assert silent["digest"] == before["digest"]
    assert (silent["host"]["hits"], silent["host"]["lost"], len(silent["log"])) == (0, 1, 1)
    store.kill()
    lost = store.load(path)
    assert lost["digest"] == before["digest"]
    assert (lost["host"]["lost"], len(lost["log"])) == (1, 1)
    assert "host store" in lost["log"][0]
    new = Store(tmp_path)
    try:
        assert new.report()["entries"] == []
        assert new.load(path)["host"]["lost"] == 0
    finally:
        new.kill()


# A store that serves a file with one changed byte and prints each command. The arguments are the socket and the file.
FAKE = """
import fcntl, json, os, socket, struct, sys
path, file = sys.argv[1:]
data = bytearray(open(file, "rb").read())
data[len(data) // 2] ^= 1
fd = os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.write(fd, data)
fcntl.fcntl(fd, 1033, 15)  # F_ADD_SEALS
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    while head := connection.recv(4):
        request = json.loads(connection.recv(struct.unpack("<I", head)[0]))
        print(request["op"], flush=True)
        body = json.dumps({"found": True, "size": len(data)}).encode()
        message = struct.pack("<I", len(body)) + body
        socket.send_fds(connection, [message], [fd] if request["op"] == "get" else [])
"""


def test_wrong_bytes_in_memory(save: Callable[..., Path], tmp_path: Path) -> None:
    """If a checksum is wrong, the entry is dropped, and load_file returns the bytes of the file after a warning. Other
    functions raise the error."""
    path, store = save("m.safetensors"), object.__new__(Store)
    store.env = {**os.environ, "OVERWIRE_HOST": str(tmp_path / "fake")}
    command = [sys.executable, "-c", FAKE, str(tmp_path / "fake"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as fake:
        assert fake.stdout is not None
        try:
            assert fake.stdout.readline() == "ready\n"
            loaded = store.load(path)
            assert [fake.stdout.readline() for _ in range(2)] == ["get\n", "drop\n"]
            assert (loaded["host"]["hits"], loaded["host"]["distrusted"], len(loaded["log"])) == (1, 1, 1)
            with pytest.raises(AssertionError, match="CorruptError"):
                store.load(path, "stream")
            assert [fake.stdout.readline() for _ in range(2)] == ["get\n", "drop\n"]
        finally:
            fake.kill()
    assert loaded["digest"] == store.load(path, "file")["digest"]


def test_commands(store: Store, save: Callable[..., Path], tmp_path: Path) -> None:
    """The subcommands `put`, `list`, `drop` and `budget` do what their help says. They refuse invalid arguments and
    files that do not fit."""
    path = save("m.safetensors")
    assert "kept" in store.command("put", str(path)).stdout
    assert "present" in store.command("put", str(path)).stdout
    (entry,) = store.report()["entries"]
    assert entry["name"][:12] in store.command("list").stdout
    assert store.command("drop", "zz").returncode == 3
    assert store.command("drop", entry["name"][:8]).returncode == 0
    assert store.report()["used"] == 0
    assert store.command("budget", "1MB").returncode == 0
    assert store.report()["budget"] == 1_000_000
    big = tmp_path / "big.safetensors"
    overwire.save_file({"a": np.random.default_rng(0).integers(0, 255, 2_000_000, np.uint8)}, big)
    full = store.command("put", str(big))
    assert full.returncode == 4
    assert "budget" in full.stderr
    (tmp_path / "text.safetensors").write_text("no model")
    assert store.command("put", str(tmp_path / "text.safetensors")).returncode == 1
    in_memory = Path(shutil.copy(save("plain.safetensors", compress=False), f"/dev/shm/overwire-test-{os.getpid()}"))
    try:
        refused = store.command("put", str(in_memory))
    finally:
        in_memory.unlink()
    assert refused.returncode == 5 and "not in /dev/shm" in refused.stderr
    for words in (["fly"], ["put"], ["drop"], ["list", "x"], ["budget", "1"], ["list", "--budget", "1GB"]):
        assert store.command(*words).returncode == 2, words
    second = store.command()
    assert second.returncode == 2
    assert "another store" in second.stderr
    store.process.send_signal(signal.SIGINT)
    assert store.process.wait(60) == 130
    assert not store.socket.exists()
    assert store.command("list").returncode == 3


def test_prepared_for_engines() -> None:
    """The extra configuration of the engines accepts `host`, but only as a boolean."""
    from overwire.integrations import check_options

    assert check_options({"host": True}, {})["host"] is True
    with pytest.raises(ValueError, match="host"):
        check_options({"host": "yes"}, {})
    with pytest.raises(overwire.ArgumentError, match="host"):
        overwire.load_file("none.safetensors", host="yes")  # type: ignore[call-overload]


QUIESCE = """
import os, sys
import overwire as ow
def things():
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(name) for name in names if os.path.exists(name) or os.path.islink(name)]
ow.load_file(sys.argv[1], framework="np", host=True)
ow.quiesce(timeout=60)
assert ow.metrics().host.puts == 1
assert not [thing for thing in things() if thing.startswith(("socket:", "/memfd:", os.path.dirname(sys.argv[1])))], things()
assert len(ow.load_file(sys.argv[1], framework="bytes", host=True)) and ow.metrics().host.hits == 1
"""


def test_quiesce_waits_for_background_puts(store: Store, tmp_path: Path) -> None:
    """`quiesce` waits until a file is in the store, and then closes the connection to the store. Later calls use the
    store again."""
    path = tmp_path / "m.safetensors"
    overwire.save_file({"w": np.arange(3_000_000, dtype="f4")}, path)
    words = [sys.executable, "-c", QUIESCE, str(path)]
    done = subprocess.run(words, env=store.env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
