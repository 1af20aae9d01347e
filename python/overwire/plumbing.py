"""Collects internal functions for drop-ins, integrations and benchmarks.

They are not part of the public interface. Each is imported on first use.
"""

from __future__ import annotations

from ._imports import lazy_names

TYPE_CHECKING = False

if TYPE_CHECKING:
    from ._apart import apart
    from ._children import code_command, module_command
    from ._engine import forked, refuse_child
    from ._imports import Undisturbed, imported, many_objects, skip_at_exit, start_thread
    from ._locks import new_lock
    from ._order import await_path
    from ._verbs import read_floor
    from .bundles.bundle import save_listed
    from .bundles.loading import load_compressed_pickle
    from .bundles.torchfolders import is_torch_model, names_of, plain_models
    from .bundles.unpickling import load_plain
    from .distributed.blocks import Blocks, meet_to_load, should_share_reading
    from .distributed.group import group_verb
    from .dtypes import nbytes, torch_shape
    from .errors import error_of_system
    from .files import number_of, read_file, regular, state_of_file
    from .foreign.memory import read_components, read_foreign
    from .frameworks.memory import check_memory
    from .frameworks.torch import torch_dtype
    from .jobs import shown
    from .model.forked import is_compressed
    from .model.joining import written
    from .model.kept import forget, keep
    from .model.layout import MetaRow, beside, meta_rows, place_of, refuse_urls
    from .model.opened import prepare
    from .model.options import check_switches, parse_size, setting
    from .model.sources import resolve
    from .offloading.blocks import can_store
    from .offloading.hosted import Hosted, HostedWeight, listed_blocks
    from .offloading.offload import stream_blocks
    from .paths import is_remote, local, path_of, without_scheme
    from .records import OpenRecords
    from .stores import FileWriter, ObjectReader, ObjectWriter, presign, publish, refuse_planted, write_bytes
    from .verbs.deltas import apply_part
    from .verbs.into import landing, states_of, table_of
    from .verbs.preload import honour_nyacomp
    from .verbs.save import bytes_of_plain, save_bytes

# Maps each module to its names above; a test compares both lists.
_HOMES = {
    "_apart": ("apart",),
    "_children": ("code_command", "module_command"),
    "_engine": ("forked", "refuse_child"),
    "_imports": ("Undisturbed", "imported", "many_objects", "skip_at_exit", "start_thread"),
    "_locks": ("new_lock",),
    "_order": ("await_path",),
    "_verbs": ("read_floor",),
    "bundles.bundle": ("save_listed",),
    "bundles.loading": ("load_compressed_pickle",),
    "bundles.torchfolders": ("is_torch_model", "names_of", "plain_models"),
    "bundles.unpickling": ("load_plain",),
    "distributed.blocks": ("Blocks", "meet_to_load", "should_share_reading"),
    "distributed.group": ("group_verb",),
    "dtypes": ("nbytes", "torch_shape"),
    "errors": ("error_of_system",),
    "files": ("number_of", "read_file", "regular", "state_of_file"),
    "foreign.memory": ("read_components", "read_foreign"),
    "frameworks.memory": ("check_memory",),
    "frameworks.torch": ("torch_dtype",),
    "model.forked": ("is_compressed",),
    "model.joining": ("written",),
    "model.kept": ("forget", "keep"),
    "records": ("OpenRecords",),
    "model.layout": ("MetaRow", "beside", "meta_rows", "place_of", "refuse_urls"),
    "model.opened": ("prepare",),
    "model.options": ("check_switches", "parse_size", "setting"),
    "model.sources": ("resolve",),
    "jobs": ("shown",),
    "offloading.blocks": ("can_store",),
    "offloading.hosted": ("Hosted", "HostedWeight", "listed_blocks"),
    "offloading.offload": ("stream_blocks",),
    "paths": ("is_remote", "local", "path_of", "without_scheme"),
    "stores": ("FileWriter", "ObjectReader", "ObjectWriter", "presign", "publish", "refuse_planted", "write_bytes"),
    "verbs.deltas": ("apply_part",),
    "verbs.into": ("landing", "states_of", "table_of"),
    "verbs.preload": ("honour_nyacomp",),
    "verbs.save": ("bytes_of_plain", "save_bytes"),
}

if not TYPE_CHECKING:
    __all__ = sorted(name for names in _HOMES.values() for name in names)
    __getattr__ = lazy_names(_HOMES, globals())
