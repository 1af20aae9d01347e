"""Fixtures and helpers for the tests of the Python package."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import processes
import pytest
import warm

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    """Restores the default handler of SIGINT. Shells start background jobs with SIGINT ignored, and children inherit
    this."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    share_cores(os.environ, len(os.sched_getaffinity(0)))
    processes.adopt()
    warm.watch()


def share_cores(env: MutableMapping[str, str], cores: int) -> None:
    """Divides the cores among pytest's workers. Otherwise, torch starts one thread per core in each worker. Threads
    that spin while they wait make CPU work ten times slower."""
    workers = int(env.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))


# The slowest tests run first. If they ran last, the other workers would wait for them.
FIRST = ("test_transformers.py", "test_waiting.py", "test_process.py", "test_build.py")
# These test files start many processes or builds. `make quick` leaves them out.
HEAVY = """benches build compat_nvcomp demo distributed examples fastsafetensors fastsafetensors_later
    fastsafetensors_plugins fastsafetensors_release forked guides hostile_manifests http interrupts memory nyacomp_readme
    patch_safetensors pickle_hostile pickle_limits preload preload_identity process process_handles processes
    redirects secrets stores stream tensorizer_matrix tensorizer_readme tensorizer_stores tensorizer_streams
    transformers typing vllm waiting writers""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in HEAVY:
            item.add_marker("heavy")
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(scope="session", autouse=True)
def nothing_stays() -> Iterator[None]:
    """At the end, kills processes that tests have started and that still run, and fails if there are any."""
    yield
    warm.end()
    stayed = processes.left(float(os.environ.get("OVERWIRE_TEST_GRACE") or 30))
    assert not stayed, f"processes of tests were still running and have been killed: {stayed}"


@pytest.fixture(autouse=True)
def torch_is_imported_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that starts a program which imports torch, unless it has the mark imports_torch. The import takes
    seconds."""
    warm.anew.clear()
    yield
    marked = request.node.get_closest_marker("imports_torch") is not None
    assert marked or not warm.anew, f"use `torch_script` or `warm.run`, or add the mark imports_torch: {warm.anew}"


@pytest.fixture(autouse=True)
def one_gpu_for_all(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives a test with the mark whole_gpu exclusive use of the GPU, which the workers otherwise share. While such a
    test waits for running tests to end, no other test starts."""
    if request.path.parent.name != "gpu":
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    alone = request.node.get_closest_marker("whole_gpu") is not None
    with (folder / "gpu-door").open("w") as door, (folder / "gpu-lock").open("w") as gpu:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yields a new seed for each run and prints it. OVERWIRE_TEST_SEED sets the seed."""
    value = int(os.environ.get("OVERWIRE_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"seed {value} (OVERWIRE_TEST_SEED={value} repeats it)")
    yield value


def soon(ok: Callable[[], bool], limit: float = 60) -> bool:
    """Returns whether ok() becomes true within limit seconds. Background work may need this long on a busy machine."""
    until = time.monotonic() + limit
    while not ok() and time.monotonic() < until:
        time.sleep(0.01)
    return ok()


def open_files() -> set[str]:
    """Returns what the open descriptors of this process refer to, as /proc names it."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # listing the folder opened this descriptor, now closed
            links.add(os.readlink(f"/proc/self/fd/{number}"))
    return links


def cleaned(*more: str) -> dict[str, str]:
    """Returns the environment without the engine's settings, and without variables with one of the given prefixes."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OVERWIRE_", "PRELOAD", *more))}


def _script(
    start: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(source: str, *, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        done = start(["-c", source], cwd=folder, env=cleaned() | env)
        if check:
            assert done.returncode == 0, done.stderr + done.stdout
        return done

    return run


@pytest.fixture
def torch_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs Python source in tmp_path, in a separate process that has imported only torch. See
    `warm`."""
    return _script(warm.run, tmp_path)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs Python source in tmp_path, in a fresh interpreter."""
    return _script(warm.fresh, tmp_path)


def every_dtype() -> dict[str, Any]:
    """Returns a tensor of each torch dtype. Together, its elements contain every byte value."""
    import torch
    from overwire.frameworks.torch import _TYPES

    every = torch.arange(256, dtype=torch.uint8).repeat(3)
    made = {name: every.clone().view(dtype).reshape(3, -1) for name, dtype in _TYPES.items() if name != "BOOL"}
    made["BOOL"] = torch.arange(15).reshape(3, 5) % 2 == 0
    return made


def ugly() -> dict[str, Any]:
    """Returns tensors with shapes, strides and values that loaders often get wrong."""
    import torch

    torch.manual_seed(7)
    big = torch.randn(64, 48)
    return {
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "one": torch.tensor([1], dtype=torch.int8),
        "empty": torch.empty(0, dtype=torch.float16),
        "empty.many": torch.empty(3, 0, 5),
        "odd": torch.randn(17, 13, 7).half(),
        "prime": torch.randn(65537).bfloat16(),
        "transposed": big.t(),
        "strided": big[::3, 1::5],
        "expanded": torch.randn(5, 1).expand(5, 9),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "nan": torch.tensor([0x7FC1, 0xFF81, 0x0001, 0x8000], dtype=torch.uint16).view(torch.bfloat16),
        "same": torch.full((40000,), 0.125),
        "noise": torch.randint(0, 256, (30001,), dtype=torch.uint8),
        "näme/with.dots and spaces": torch.arange(3),
        "": torch.arange(4),
    }


def raw(tensor: Any) -> bytes:
    """Returns the bytes of a torch tensor's or numpy array's elements, in row-major order."""
    if hasattr(tensor, "detach"):
        import torch

        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # A tensor of one element may have any stride, and view refuses some of them.
        flat = dense.as_strided((dense.numel(),), (1,))
        return flat.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return tensor.tobytes()


def same(a: Any, b: Any) -> None:
    """Asserts that two tensors or arrays have equal dtype, shape and bytes."""
    assert a.dtype == b.dtype
    assert tuple(a.shape) == tuple(b.shape)
    assert raw(a) == raw(b)
