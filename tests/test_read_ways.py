"""OVERWIRE_READ: which way bytes come off the disk decides the time alone."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Script = Callable[..., "subprocess.CompletedProcess[str]"]

LOADS = """
import os, threading
import numpy as np
import overwire as ow

rng = np.random.default_rng(5)
made = {f"t{i}": rng.standard_normal(n).astype("f4") for i, n in enumerate([3, 70_001, 1_000_003, 0, 500_000, 2_000_000])}
for name, compress in {"plain": False, "packed": True}.items():
    ow.save_file(made, name, compress=compress)
    os.posix_fadvise(os.open(name, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
    got = {}
    job = threading.Thread(target=lambda: got.update(ow.load_file(name, framework="np", mmap=False)))
    job.start()
    while job.is_alive():  # a forked child shares pages that the disk is writing to
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    job.join()
    assert got.keys() == made.keys()
    for key, tensor in made.items():
        assert got[key].tobytes() == tensor.tobytes(), (name, key)
    os.truncate(name, os.path.getsize(name) - 1000)
    try:
        ow.load_file(name, framework="np", mmap=False)
    except ow.CorruptError as e:
        assert name in str(e), e
    else:
        raise AssertionError("a file that is cut off loads")

# Cut off between the opening and the reading.
ow.save_file(made, "late", compress=False)
with ow.safe_open("late", framework="np") as file:
    os.truncate("late", os.path.getsize("late") - 1000)
    try:
        file.get_tensor("t5")
    except ow.CorruptError as e:
        assert "late" in str(e), e
    else:
        raise AssertionError("a tensor that is cut off loads")
print("same")
"""


@pytest.mark.parametrize("how", ["auto", "buffered", "direct"])
def test_every_way_gives_the_same(script: Script, how: str) -> None:
    done = script(LOADS, OVERWIRE_READ=how)
    assert done.stdout == "same\n"
    assert "OVERWIRE_READ" not in done.stderr


def test_a_way_that_is_none_is_told(script: Script) -> None:
    done = script("import overwire as ow; ow.doctor()", OVERWIRE_READ="sideways")
    assert 'OVERWIRE_READ="sideways" ignored' in done.stderr
