"""Registers copiers by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..st_types import Device
from .base import CopierConstructFunc as CopierConstructFunc
from .base import CopierInterface

CopierType = str

_copier_registry: dict[str, Callable[..., CopierConstructFunc]] = {}
_classes: dict[str, type[CopierInterface]] = {}


def register_copier_constructor(
    copier_type: str, copier_class: type[CopierInterface] | None = None
) -> Callable[[Callable[..., CopierConstructFunc]], Callable[..., CopierConstructFunc]]:
    """Returns a decorator that registers a function under a name. The function takes (device, **kwargs) and returns a
    constructor, which makes a copier from (metadata, device, framework). A later registration replaces an earlier one.
    copier_class: the class of the copiers, which `get_copier_class` and `copier_class_of` return."""

    def register(function: Callable[..., CopierConstructFunc]) -> Callable[..., CopierConstructFunc]:
        @functools.wraps(function)
        def factory(*args: Any, **kwargs: Any) -> CopierConstructFunc:
            construct = function(*args, **kwargs)
            if getattr(construct, "copier_class", None) is None and not isinstance(construct, type):
                with suppress(AttributeError):  # some objects do not accept attributes
                    construct.copier_class = copier_class  # type: ignore[attr-defined]
            return construct

        _copier_registry[copier_type] = factory
        if copier_class is not None:
            _classes[copier_type] = copier_class
        return factory

    return register


def copier_class_of(construct: CopierConstructFunc) -> type[CopierInterface]:
    """Returns the class of a constructor's copiers, or CopierInterface if the class is not known."""
    kind = construct if isinstance(construct, type) else getattr(construct, "copier_class", None)
    return kind if isinstance(kind, type) and issubclass(kind, CopierInterface) else CopierInterface


def get_copier_class(copier_type: str) -> type[CopierInterface]:
    """Returns the class that was registered with a copier type, or CopierInterface if none was."""
    return _classes.get(copier_type, CopierInterface)


def create_copier_constructor(copier_type: str, device: Device, **kwargs: Any) -> CopierConstructFunc:
    """Makes a constructor for copiers of a type. Raises KeyError for an unknown type."""
    if copier_type not in _copier_registry:
        raise KeyError(f"Copier type '{copier_type}' is not registered. Available types: {list(_copier_registry)}")
    return _copier_registry[copier_type](device, **kwargs)
