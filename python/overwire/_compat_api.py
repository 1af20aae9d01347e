"""Collects internal functions for the drop-ins of `compat` and for `integrations`.

They are not part of the public interface. Each is imported on first use. A test has the same list, which may only
become shorter, because drop-ins should use public names.
"""

from __future__ import annotations

from ._imports import lazy_names

TYPE_CHECKING = False

if TYPE_CHECKING:
    from ._apart import apart
    from ._engine import forked
    from ._imports import imported, many_objects, skip_at_exit, start_thread
    from ._locks import new_lock
    from ._order import await_path
    from .bundles.bundle import save_listed
    from .bundles.manifest import Manifest
    from .bundles.unpickling import load_plain
    from .distributed.blocks import meet_to_load, should_share_reading
    from .distributed.group import group_verb
    from .dtypes import torch_shape
    from .errors import error_of_system
    from .files import number_of, regular, state_of_file
    from .frameworks.choose import prepare_gpu
    from .frameworks.memory import check_memory
    from .frameworks.torch import torch_dtype
    from .model.forked import is_compressed
    from .model.joining import written
    from .model.kept import KeptFile
    from .model.options import check_switches, parse_size, setting
    from .model.sources import resolve
    from .offloading.fixed import stream_blocks
    from .offloading.hosted import Hosted
    from .paths import is_remote, path_of
    from .verbs.deltas import apply_part
    from .verbs.into import landing, states_of, table_of
    from .verbs.preload import honour_nyacomp
    from .verbs.save import bytes_of_plain, save_bytes

# Maps each module to its names above; a test compares both lists.
_HOMES = {
    "_apart": ("apart",),
    "_engine": ("forked",),
    "_imports": ("imported", "many_objects", "skip_at_exit", "start_thread"),
    "_locks": ("new_lock",),
    "_order": ("await_path",),
    "bundles.bundle": ("save_listed",),
    "bundles.manifest": ("Manifest",),
    "bundles.unpickling": ("load_plain",),
    "distributed.blocks": ("meet_to_load", "should_share_reading"),
    "distributed.group": ("group_verb",),
    "dtypes": ("torch_shape",),
    "errors": ("error_of_system",),
    "files": ("number_of", "regular", "state_of_file"),
    "frameworks.choose": ("prepare_gpu",),
    "frameworks.memory": ("check_memory",),
    "frameworks.torch": ("torch_dtype",),
    "model.forked": ("is_compressed",),
    "model.joining": ("written",),
    "model.kept": ("KeptFile",),
    "model.options": ("check_switches", "parse_size", "setting"),
    "model.sources": ("resolve",),
    "offloading.fixed": ("stream_blocks",),
    "offloading.hosted": ("Hosted",),
    "paths": ("is_remote", "path_of"),
    "verbs.deltas": ("apply_part",),
    "verbs.into": ("landing", "states_of", "table_of"),
    "verbs.preload": ("honour_nyacomp",),
    "verbs.save": ("bytes_of_plain", "save_bytes"),
}

if not TYPE_CHECKING:
    __all__ = sorted(name for names in _HOMES.values() for name in names)
    __getattr__ = lazy_names(_HOMES, globals())
