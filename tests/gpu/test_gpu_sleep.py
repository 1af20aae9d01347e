"""Tests the pinned memory that sleeps use with a GPU, real or fake.

`make fakepy` runs this on the fake driver. bench/gpu/device_sleep.py tests sleeps themselves on a GPU.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import overwire as ow
import pytest
from overwire import gpu

if gpu.count() == 0:
    pytest.skip("no CUDA device", allow_module_level=True)

pytest.importorskip("torch")


def test_memory_is_prepared_once_and_freed() -> None:
    """Memory is prepared in the background and freed on request. A size that is too large is refused immediately."""
    with ow.prepare_sleep("8MB", device="cuda:0") as memory:
        assert memory.nbytes == 8_000_000 and "cuda:0" in repr(memory)
        assert memory.wait(60) and memory.wait(0)
        again = ow.prepare_sleep(1_000_000, device=0)
        assert again.wait(60) and again.nbytes == 1_000_000
        del again  # has no effect
    memory.close()
    assert memory.wait() and "closed" in repr(memory)
    with pytest.raises(ow.OutOfMemoryError) as caught:
        ow.prepare_sleep(1 << 42, device="cuda:0")
    assert caught.value.asked == 1 << 42 and 0 < caught.value.free < 1 << 42
    with pytest.raises(ow.OutOfMemoryError, match="max_memory"):
        ow.prepare_sleep("2MB", device="cuda:0", max_memory="1MB")
    for wrong in ({"device": "cuda:99"}, {"device": "cuda:0", "max_memory": "x"}):
        with pytest.raises((ow.ArgumentError, ow.DeviceError, ow.NotFoundError, ow.NotSupportedError)):
            ow.prepare_sleep("1MB", **wrong)  # type: ignore[arg-type]


def test_threads_prepare_and_free_at_once() -> None:
    """Threads can prepare and free memory in any order without an error."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for step in range(8):
                memory = ow.prepare_sleep((number + step) * 1_000_000 + 1, device="cuda:0")
                if step % 3 == number % 3:
                    ow.empty_cache()
                if step % 2:
                    memory.close()
                assert memory.wait(60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ow.empty_cache()
    assert not failures, failures


def test_a_forked_child_is_refused() -> None:
    """A forked child that uses the parent's memory is refused, and the parent keeps the memory."""
    memory: Any = ow.prepare_sleep("4MB", device="cuda:0")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ow.prepare_sleep("4MB", device="cuda:0")
        except ow.ForkedError:
            memory.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.wait(60)
    memory.close()
