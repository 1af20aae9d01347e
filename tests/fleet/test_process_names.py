"""Tests the names of processes in a Ray cluster, without Ray."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from overwire.fleet import feeder


class Directory:
    """A directory that ignores every call."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: None)


def test_processes_with_one_number_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each container numbers its processes separately, so two processes on a node may have the same number."""
    monkeypatch.setattr(feeder, "find_directory", lambda _: Directory())
    monkeypatch.setattr(os, "getpid", lambda: 7)
    context = SimpleNamespace(get_node_id=lambda: "node")
    ray = SimpleNamespace(get_runtime_context=lambda: context, get=lambda *_, **__: None, is_initialized=lambda: False)
    feeders = [feeder.Feeder(ray, 1 << 20, 1 << 20) for _ in range(2)]
    for one in feeders:
        one.stop()
    assert len({one._process for one in feeders}) == 2
