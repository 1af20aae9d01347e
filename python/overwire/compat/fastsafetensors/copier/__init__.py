"""Copies one file's tensors to a device. Plug-ins can register their own copiers."""

from __future__ import annotations

from . import gds, nogds, threefs, unified
from .base import CopierInterface
from .gds import GdsFileCopier
from .nogds import NoGdsFileCopier
from .registry import (
    CopierConstructFunc,
    CopierType,
    copier_class_of,
    create_copier_constructor,
    get_copier_class,
    register_copier_constructor,
)
from .threefs import ThreeFSFileCopier
from .unified import UnifiedMemCopier

__all__ = [
    "CopierConstructFunc", "CopierInterface", "CopierType", "GdsFileCopier", "NoGdsFileCopier", "ThreeFSFileCopier",
    "UnifiedMemCopier", "copier_class_of", "create_copier_constructor", "gds", "get_copier_class", "nogds",
    "register_copier_constructor", "threefs", "unified",
]  # fmt: skip
