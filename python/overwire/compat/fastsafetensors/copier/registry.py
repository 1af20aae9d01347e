"""The copiers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..st_types import Device
from .base import CopierConstructFunc

__all__ = ["create_copier_constructor", "register_copier_constructor"]

_copier_registry: dict[str, Callable[..., CopierConstructFunc]] = {}


def register_copier_constructor(copier_type: str) -> Callable[[Callable[..., CopierConstructFunc]], Callable[..., CopierConstructFunc]]:
    """A decorator: the function takes (device, **kwargs) and returns what makes a
    copier of (metadata, device, framework). The last one of a name counts."""

    def register(function: Callable[..., CopierConstructFunc]) -> Callable[..., CopierConstructFunc]:
        _copier_registry[copier_type] = function
        return function

    return register


def create_copier_constructor(copier_type: str, device: Device, **kwargs: Any) -> CopierConstructFunc:
    """What makes copiers of a kind. KeyError for an unknown one."""
    if copier_type not in _copier_registry:
        raise KeyError(f"Copier type '{copier_type}' is not registered. Available types: {list(_copier_registry)}")
    return _copier_registry[copier_type](device, **kwargs)
