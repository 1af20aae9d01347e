"""Copiers bring one file's tensors to a device; plug-ins register their own."""

from __future__ import annotations

from . import gds, nogds, threefs, unified
from .base import CopierInterface
from .gds import GdsFileCopier
from .nogds import NoGdsFileCopier
from .registry import create_copier_constructor, register_copier_constructor
from .threefs import ThreeFSFileCopier
from .unified import UnifiedMemCopier

__all__ = [
    "CopierInterface",
    "GdsFileCopier",
    "NoGdsFileCopier",
    "ThreeFSFileCopier",
    "UnifiedMemCopier",
    "create_copier_constructor",
    "gds",
    "nogds",
    "register_copier_constructor",
    "threefs",
    "unified",
]
