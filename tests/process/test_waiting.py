"""Tests every function that can wait on something that does not answer: servers that are silent, trickle or stop, and
pipes and devices in place of files.

Each ends by itself with a typed error, and Ctrl-C ends it at once, long before its timeout. The cells of a table run in
one process: see waiting_worker.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest

WORKER = Path(__file__).with_name("waiting_worker.py")
# retry.OpenTries.
TRIES = 3


def cells(table: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the cells of one table. A cell that hangs, or ends the process, is shown."""
    command = [sys.executable, str(WORKER), table, str(folder)]
    with processes.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, errors = process.communicate(timeout=400)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert process.returncode == 0, f"{lines[-1:]}\n{errors[-6000:]}"
    found = {line["cell"]: line for line in lines if "cell" in line}
    assert len(found) > 20
    return found


def bad(found: dict[str, dict[str, Any]], good: Any) -> list[dict[str, Any]]:
    return [cell for cell in found.values() if not good(cell)]


def test_servers_that_do_not_answer(tmp_path: Path) -> None:
    """A function ends with a typed error after a timeout, and a try that times out counts as one."""
    found = cells("servers", tmp_path)

    def good(cell: dict[str, Any]) -> bool:
        # Two files of a list are opened at once, and one file both by its preload and by its load.
        tries = TRIES * (2 if "list" in cell["cell"] or "preload and load" in cell["cell"] else 1)
        wanted = ("CancelledError",) if "close" in cell["cell"] else ("DeadlineError", "OverwireError")
        return cell["ended"] in wanted and 1 <= cell.get("seen", 1) <= tries

    assert not bad(found, good)
    # Not fewer either; one may be lost if the machine is busy for longer than the timeout.
    assert max(cell["seen"] for cell in found.values() if cell["cell"].endswith("silent")) >= TRIES


def test_files_that_are_none(tmp_path: Path) -> None:
    """Whatever is in a file's place, each function that opens it ends with a typed error."""
    found = cells("special", tmp_path)

    def good(cell: dict[str, Any]) -> bool:
        name, ended = cell["cell"], cell["ended"]
        if ended == "returned":
            return may_go_well(name)
        return bool(ended.endswith("Error") or ended == "IOFailure") and (name.startswith("overwire ") or ended != "OverwireError")

    assert not bad(found, good)
    assert found["load_compressed_pickle, bundle is terabytes"]["ended"] in ("OutOfMemoryError", "FormatError")
    for name in ("compress_pickle", "compress_pickle again", "load_compressed_pickle"):
        beside = [cell for cell in found.values() if cell["cell"].startswith(f"{name}, neighbours")]
        # A neighbour that cannot be read may be a bundle whose container has the same name, so it is an IOFailure.
        beside = [cell for cell in beside if not cell["cell"].endswith("is memory")]
        assert [cell for cell in beside if cell["ended"] != "CancelledError"] == []


def may_go_well(name: str) -> bool:
    verb, _, place = name.partition(", ")
    return (
        verb == "save_file"  # it replaces the name, or the target of a link
        or (verb in ("preload", "inspect", "verify") and place.startswith("bundle"))  # they only read the container
        or (verb == "read_bytes" and place.endswith("/proc"))
        or (verb == "ObjectReader" and place.endswith("terabytes"))  # it only reads a byte of it
    )


def test_ctrl_c_ends_every_wait(tmp_path: Path) -> None:
    """KeyboardInterrupt comes while a minute of the timeout is left, and connections are then closed."""
    found = cells("signals", tmp_path)
    assert found.pop("files that are left")["ended"] == "none"
    assert found.pop("a number that no one holds")["ended"] == "closed"
    assert not bad(found, lambda cell: cell["ended"] == "KeyboardInterrupt")


def test_compat_modules(tmp_path: Path) -> None:
    """The same holds for the compat modules."""
    pytest.importorskip("torch")
    found = cells("torch", tmp_path)

    def good(cell: dict[str, Any]) -> bool:
        name, ended = cell["cell"], cell["ended"]
        if "http" in name or "redis" in name:
            return bool(ended == "KeyboardInterrupt")
        return bool(ended == "CancelledError" or (ended == "returned" and name in GO_WELL))

    assert not bad(found, good)


GO_WELL = {
    "open_stream of /proc",
    "open_stream of terabytes",
    "nyacomp read_merge_info of /proc",
    "s3cfg of link to nothing",
}
