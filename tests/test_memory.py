"""Memory that the engine keeps, as far as it shows without a GPU."""

from __future__ import annotations

import copy
import pickle

import overwire as ow
import pytest
import torch
from overwire import frame_torch


def test_empty_cache_starts_no_driver(script) -> None:
    script("""
import overwire as ow
ow.empty_cache()
ow.empty_cache()
assert "libcuda" not in open("/proc/self/maps").read()
""")


def test_what_torch_lacks_memory_for_is_our_error_with_sizes() -> None:
    with pytest.raises(ow.OutOfMemoryError) as caught, frame_torch._errors_of("cuda:0", 123):
        raise torch.OutOfMemoryError("CUDA out of memory")
    error = caught.value
    assert isinstance(error, MemoryError) and error.asked == 123 and "123 bytes" in str(error)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is ow.OutOfMemoryError and twin.asked == 123 and str(twin) == str(error)
