"""Tests, without vLLM, the files from which level-2 sleep restores a memory pool.

test_vllm_sleep.py tests the sleep back end, and tests/engines/engines_level2.py runs it in vLLM's real code.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from overwire.integrations.vllm.image import PoolImage

Pool = dict[int, torch.Tensor]


class Log:
    """Collects log messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, words: str, *more: Any) -> None:
        self.lines.append(words % more)

    warning = info


def make_pool(seed: int = 3, at: int = 1000) -> Pool:
    """Returns allocations of several dtypes and sizes. One size is odd."""
    made = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(40_000, generator=made).mul_(0.02).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    ]
    tensors += [torch.randint(0, 256, (size,), generator=made, dtype=torch.uint8) for size in (1, 999, 70_001)]
    return {at + 4096 * number: tensor for number, tensor in enumerate(tensors)}


def stored(folder: Path, pool: Pool, facts: str = "files", log: Log | None = None) -> PoolImage:
    image = PoolImage(str(folder), facts, log or Log())
    image.begin_writing(pool)
    image.finish_writing()
    return image


def discard(pool: Pool) -> Callable[[], Pool]:
    """Overwrites a pool, as a level-2 sleep does."""
    for tensor in pool.values():
        tensor.view(torch.uint8).fill_(0xAB)
    return lambda: pool


def assert_equal(pool: Pool, want: Pool) -> None:
    assert list(pool) == list(want)
    for one, other in zip(pool.values(), want.values(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_equal_workers_share_one_file(tmp_path: Path) -> None:
    """A pool can be restored bit for bit, any number of times. A worker with the same bytes at other addresses uses the
    same file. If the bytes or the model's files differ, another file is used."""
    log = Log()
    one, other = make_pool(), make_pool(at=9000)
    images = [stored(tmp_path, one, log=log), stored(tmp_path, other, log=log)]
    assert len(os.listdir(tmp_path)) == 1 and len(log.lines) == 1 and "for level-2 sleep in" in log.lines[0]
    for _ in range(2):
        for image, pool, at in ((images[0], one, 1000), (images[1], other, 9000)):
            assert image.reason_against(pool) == ""
            image.restore_pool(discard(pool))
            assert_equal(pool, make_pool(at=at))
    stored(tmp_path, make_pool(4))
    stored(tmp_path, make_pool(), "other files")
    assert len(os.listdir(tmp_path)) == 3


def test_changed_weights_are_noticed(tmp_path: Path) -> None:
    """A changed bit, a changed address or a missing allocation is noticed. If the old bytes return, the file is valid
    again."""
    pool = make_pool()
    image = stored(tmp_path, pool)
    for tensor in pool.values():
        tensor.view(torch.uint8)[-1] ^= 4
        assert "changed" in image.reason_against(pool) and not image.has_bytes_of(pool)
        tensor.view(torch.uint8)[-1] ^= 4
    moved = dict(pool)
    moved[7] = moved.pop(1000)
    for wrong in (moved, dict(list(pool.items())[1:]), {}):
        assert "changed" in image.reason_against(wrong)
    assert image.reason_against(pool) == ""


def damage_chunk(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def replace_content(file: Path) -> None:
    with ow.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = ow.load_file(file)
    tensors["0"][0] += 1
    ow.save_file(tensors, file, metadata)
    file.chmod(0o600)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "chunk": damage_chunk,
    "cut": lambda file: os.truncate(file, 1000),
    "empty": lambda file: os.truncate(file, 0),
    "content": replace_content,
    "gone": Path.unlink,
    "link": lambda file: (file.rename(file.with_suffix(".x")), file.symlink_to(file.with_suffix(".x"))),
    "foreign": lambda file: file.chmod(0o666),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_wrong_files_are_never_restored(tmp_path: Path, name: str) -> None:
    """If the file is damaged, replaced or removed while the weights sleep, waking raises an error. A damaged file is
    removed, and the next file is valid."""
    pool = make_pool()
    image = stored(tmp_path, pool)
    assert image.reason_against(pool) == ""
    file = next(tmp_path.iterdir())
    DAMAGES[name](file)
    mapped: list[int] = []

    def map_pool() -> Pool:
        mapped.append(1)
        return discard(pool)()

    with pytest.raises(Exception) as caught:  # noqa: PT011
        image.restore_pool(map_pool)
    assert mapped == [1] and str(caught.value)
    pool = make_pool()
    if name == "foreign":
        assert "write to it" in image.reason_against(pool)
        file.chmod(0o600)
    elif name == "link":
        assert "regular" in image.reason_against(pool)
        file.unlink()
    else:
        assert not file.exists() and image.reason_against(pool)
    again = stored(tmp_path, pool)
    assert again.reason_against(pool) == ""
    again.restore_pool(discard(pool))
    assert_equal(pool, make_pool())


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    """If the file cannot be written, nothing is left, and a log line gives the reason. If mapping memory for a wake
    fails, the wake can be repeated."""
    log, pool = Log(), make_pool()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))  # Python ignores the signal
    try:
        image = stored(tmp_path, pool, log=log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not os.listdir(tmp_path) and len(log.lines) == 1 and "cannot store the weights" in log.lines[0]
    assert image.reason_against(pool) in log.lines[0]
    image = stored(tmp_path, pool)
    with pytest.raises(MemoryError):
        image.restore_pool(lambda: (_ for _ in ()).throw(MemoryError("no memory")))
    image.restore_pool(discard(pool))
    assert_equal(pool, make_pool())


def test_a_killed_writer_leaves_no_visible_file(tmp_path: Path) -> None:
    """A worker that is killed while it writes leaves only a hidden file. No worker uses this file, and the next writer
    removes it."""
    program = f"""
import sys, torch
from overwire.integrations.vllm.image import PoolImage
pool = {{at: torch.randint(-9, 9, (1 << 22,), dtype=torch.int32) for at in range(4)}}
image = PoolImage({str(tmp_path)!r}, "files", None)
print("ready", flush=True)
while True:
    pool[0] += 1
    image.begin_writing(pool)
    image.finish_writing()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        end = time.monotonic() + 120
        while not os.listdir(tmp_path):
            assert child.poll() is None and time.monotonic() < end
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close() if child.stdout else None
    left = os.listdir(tmp_path)
    assert left and all(name.startswith(".") for name in left)
    for name in left:
        os.utime(tmp_path / name, (1, 1))
    pool = make_pool()
    image = stored(tmp_path, pool)
    assert len(os.listdir(tmp_path)) == 1 and not set(left) & set(os.listdir(tmp_path))
    image.restore_pool(discard(pool))
    assert_equal(pool, make_pool())


def test_an_image_that_was_not_written_is_not_used(tmp_path: Path) -> None:
    image = PoolImage(str(tmp_path), "files", Log())
    assert "not written" in image.reason_against(make_pool()) and not image.has_bytes_of({})
    assert not os.listdir(tmp_path)
