"""Tests that tests leave no process running, even if they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from conftest import share_cores

FAILING = """
import subprocess, sys
import processes

def test_fails(tmp_path):
    sleeper = "import subprocess, sys; subprocess.Popen(['sleep', '%(long)s'], start_new_session=True); print('x', flush=True)"
    subprocess.run([sys.executable, "-c", sleeper], check=True)  # leaves an orphaned child
    with processes.started(["sh", "-c", "sleep %(long)s & echo x; wait"], stdout=subprocess.PIPE) as group:
        group.stdout.readline()
        assert False
"""


def running(command: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if text == command:
                found.append(entry)
    return found


def test_a_failed_test_leaves_no_process(tmp_path: Path) -> None:
    long = f"{3600 + os.getpid()}"
    (tmp_path / "test_failing.py").write_text(FAILING % {"long": long})
    here = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "conftest", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(tmp_path)],
        env=os.environ
        | {"OVERWIRE_TEST_GRACE": "1", "PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 error" in done.stdout and f"processes of tests were still running and have been killed: ['sleep {long}" in done.stdout, done.stdout
    until = time.monotonic() + 20
    while running(f"sleep {long}") and time.monotonic() < until:
        time.sleep(0.05)
    assert running(f"sleep {long}") == []


def test_workers_share_the_cores() -> None:
    """All pytest workers together use at most one torch thread per core, unless the environment sets another number."""
    for workers, cores, threads in (("6", 16, "2"), ("4", 16, "4"), ("4", 2, "1")):
        env = {"PYTEST_XDIST_WORKER_COUNT": workers}
        share_cores(env, cores)
        assert env.pop("OMP_NUM_THREADS") == threads
    env["OMP_NUM_THREADS"] = "3"
    share_cores(env, 2)
    assert env["OMP_NUM_THREADS"] == "3"
    alone: dict[str, str] = {}
    share_cores(alone, 16)
    assert not alone
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) > 1:
        import torch

        assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
