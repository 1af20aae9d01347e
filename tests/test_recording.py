"""The recorder of loaders: what it does to torch is undone, also where it cannot begin."""

from __future__ import annotations

import pytest
import torch
from overwire.integrations.shared import recording

NAMES = ("device", "is_meta", "is_cpu", "is_cuda")


def test_a_torch_without_the_recorders_key_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch lacks what records operations, the load goes tensor by tensor, and nothing of torch is changed."""
    before = [vars(torch.Tensor).get(name) for name in NAMES]
    recording._recorder_keys.cache_clear()
    monkeypatch.setattr(recording, "_register_keys", lambda: (_ for _ in ()).throw(RuntimeError("no such key")))
    with pytest.raises(recording.Unplannable, match="no such key"):
        recording.Recorder(lambda copies: None).__enter__()
    recording._recorder_keys.cache_clear()
    assert [vars(torch.Tensor).get(name) for name in NAMES] == before


def test_what_others_have_put_on_tensors_is_there_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A property that another package has set on torch.Tensor answers while a loader is recorded, and afterwards."""
    other = property(lambda self: "other's")
    monkeypatch.setattr(torch.Tensor, "device", other, raising=False)
    with recording._places:
        assert torch.ones(1).device == "other's"
    assert vars(torch.Tensor)["device"] is other
