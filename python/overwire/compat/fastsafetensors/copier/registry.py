"""The copiers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..st_types import Device
from .base import CopierConstructFunc, CopierInterface

__all__ = ["create_copier_constructor", "get_copier_class", "register_copier_constructor"]

_copier_registry: dict[str, Callable[..., CopierConstructFunc]] = {}
_classes: dict[str, type[CopierInterface]] = {}


def register_copier_constructor(
    copier_type: str, copier_class: type[CopierInterface] = CopierInterface
) -> Callable[[Callable[..., CopierConstructFunc]], Callable[..., CopierConstructFunc]]:
    """A decorator: the function takes (device, **kwargs) and returns what makes a
    copier of (metadata, device, framework). The last one of a name counts.
    copier_class: what `get_copier_class` says."""

    def register(function: Callable[..., CopierConstructFunc]) -> Callable[..., CopierConstructFunc]:
        _copier_registry[copier_type], _classes[copier_type] = function, copier_class
        return function

    return register


def get_copier_class(copier_type: str) -> type[CopierInterface]:
    """The class that a kind was registered with, CopierInterface without one."""
    return _classes.get(copier_type, CopierInterface)


def create_copier_constructor(copier_type: str, device: Device, **kwargs: Any) -> CopierConstructFunc:
    """What makes copiers of a kind. KeyError for an unknown one."""
    if copier_type not in _copier_registry:
        raise KeyError(f"Copier type '{copier_type}' is not registered. Available types: {list(_copier_registry)}")
    return _copier_registry[copier_type](device, **kwargs)
