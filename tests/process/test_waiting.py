"""Tests functions that wait for silent or slow servers, for servers that stop in the middle, and for pipes and devices
in place of files.

Each function ends with a typed error after its timeout, and Ctrl-C ends it immediately. waiting_worker.py runs all
cells of a table in one process.
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
# The same as retry.OpenTries in Go.
TRIES = 3


def cells(table: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the results of all cells of one table. If a cell hangs or ends the process, the error names it."""
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
    """A function ends with a typed error after its timeout, and tries at most as often as documented."""
    found = cells("servers", tmp_path)

    def good(cell: dict[str, Any]) -> bool:
        # The two files of a list are opened at the same time. A preload and its load each open the file.
        tries = TRIES * (2 if "list" in cell["cell"] or "preload and load" in cell["cell"] else 1)
        wanted = ("CancelledError",) if "close" in cell["cell"] else ("DeadlineError", "OverwireError")
        return cell["ended"] in wanted and 1 <= cell.get("seen", 1) <= tries

    assert not bad(found, good)
    # At least one function makes all tries. On a busy machine, a try may be lost.
    assert max(cell["seen"] for cell in found.values() if cell["cell"].endswith("silent")) >= TRIES


def test_special_files(tmp_path: Path) -> None:
    """Each function that opens a path ends with a typed error if the path is not a regular file."""
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
        # If a neighbour cannot be read, it may be a bundle with a container of the same name, so IOFailure is raised.
        beside = [cell for cell in beside if not cell["cell"].endswith("is memory")]
        assert [cell for cell in beside if cell["ended"] != "CancelledError"] == []


def may_go_well(name: str) -> bool:
    verb, _, place = name.partition(", ")
    return (
        verb == "save_file"  # these replace the file or the target of the link
        or (verb in ("preload", "inspect", "verify") and place.startswith("bundle"))  # these only read the container
        or (verb == "read_bytes" and place.endswith("/proc"))
        or (verb == "ObjectReader" and place.endswith("terabytes"))  # this reads only one byte
    )


def test_ctrl_c_ends_every_wait(tmp_path: Path) -> None:
    """Ctrl-C raises KeyboardInterrupt long before the timeout of one minute, and connections are closed."""
    found = cells("signals", tmp_path)
    assert found.pop("files that are left")["ended"] == "none"
    assert found.pop("a number that no one holds")["ended"] == "closed"
    assert not bad(found, lambda cell: cell["ended"] == "KeyboardInterrupt")


def test_compat_modules(tmp_path: Path) -> None:
    """Waits in the compat modules end in the same way."""
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
