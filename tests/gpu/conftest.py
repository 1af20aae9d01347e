"""Workers share a GPU: a test that measures or fills its memory has the GPU alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_gpu_for_all(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Who wants it alone keeps the door until the others have ended: none that comes later is before it."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    alone = request.node.get_closest_marker("whole_gpu") is not None
    with (folder / "gpu-door").open("w") as door, (folder / "gpu").open("w") as gpu:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
