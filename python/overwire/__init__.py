"""overwire: compresses model weights without loss and loads them back fast.

Importing the package does not load the engine, torch or numpy, and starts no thread. Each name
below is imported from its module on first use. Two environment variables change that:
`OVERWIRE_PRELOAD` starts a preload on the engine's threads, and `OVERWIRE_PATCH` calls
`patch_safetensors`.

Files: `load_file`, `save_file`, `compress`, `decompress`. Modules: `load_model`, `save_model`. Other
objects with tensors: `save_bundle`, `load_bundle`. nyacomp's names (`compress(model, path)`,
`compress_pickle`, `load_compressed`, `load_compressed_pickle`) are in `overwire.compat.nyacomp`, and
scripts can still import them from here.
"""

import os as _os
import sys as _sys

from ._imports import lazy_names as _lazy_names

if "t" in _sys.abiflags:  # a free-threaded CPython cannot find the engine, because it ignores stable-ABI files
    raise ImportError(
        "overwire does not support free-threaded CPython, which has no stable ABI: use the standard build of CPython"
    )

# Defined here because importing typing takes longer than the rest of this module. Type checkers recognize the name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from . import codecs as codecs
    from . import compat as compat
    from . import distributed as distributed
    from . import errors as errors
    from ._tables import __version__ as __version__
    from .bundles.bundle import compress_pickle as compress_pickle
    from .bundles.bundle import save_bundle as save_bundle
    from .bundles.loading import load_bundle as load_bundle
    from .bundles.loading import load_compressed as load_compressed
    from .bundles.loading import load_compressed_pickle as load_compressed_pickle
    from .bundles.rewriting import compress as compress
    from .bundles.rewriting import decompress as decompress
    from .bundles.torchfolders import convert as convert
    from .compat.safetensors.patching import SafetensorsPatch as SafetensorsPatch
    from .compat.safetensors.patching import patch_safetensors as patch_safetensors
    from .errors import AccessError as AccessError
    from .errors import ArgumentError as ArgumentError
    from .errors import CancelledError as CancelledError
    from .errors import CorruptError as CorruptError
    from .errors import CryptographyError as CryptographyError
    from .errors import DeadlineError as DeadlineError
    from .errors import DeltaBaseError as DeltaBaseError
    from .errors import DeviceError as DeviceError
    from .errors import EngineError as EngineError
    from .errors import ForkedError as ForkedError
    from .errors import FormatError as FormatError
    from .errors import IOFailure as IOFailure
    from .errors import MissingPackageError as MissingPackageError
    from .errors import ModelMismatchError as ModelMismatchError
    from .errors import NotFoundError as NotFoundError
    from .errors import NotSupportedError as NotSupportedError
    from .errors import OutOfMemoryError as OutOfMemoryError
    from .errors import OverwireError as OverwireError
    from .errors import SliceError as SliceError
    from .errors import TensorNotFoundError as TensorNotFoundError
    from .errors import UntrustedPickleError as UntrustedPickleError
    from .frameworks.spec import TensorSpec as TensorSpec
    from .jobs import last_report as last_report
    from .metering import CacheMetrics as CacheMetrics
    from .metering import HostMetrics as HostMetrics
    from .metering import Metrics as Metrics
    from .metering import VerbMetrics as VerbMetrics
    from .metering import metrics as metrics
    from .model.options import LoadOptions as LoadOptions
    from .model.plan import LoadPlan as LoadPlan
    from .model.plan import PlannedFile as PlannedFile
    from .model.plan import PlannedOffload as PlannedOffload
    from .model.plan import PlannedTensor as PlannedTensor
    from .model.plan import PlannedTier as PlannedTier
    from .model.plan import plan as plan
    from .model.reading import read_bytes as read_bytes
    from .model.selection import experts as experts
    from .model.storageoptions import StorageOptions as StorageOptions
    from .offloading.offload import Offloaded as Offloaded
    from .offloading.offload import offload as offload
    from .progress import Progress as Progress
    from .verbs.deltas import Delta as Delta
    from .verbs.deltas import DeltaReport as DeltaReport
    from .verbs.deltas import DeltaRow as DeltaRow
    from .verbs.deltas import Diff as Diff
    from .verbs.deltas import apply_delta as apply_delta
    from .verbs.deltas import diff as diff
    from .verbs.deltas import merge_deltas as merge_deltas
    from .verbs.deltas import open_delta as open_delta
    from .verbs.deltas import save_delta as save_delta
    from .verbs.digest import Comparison as Comparison
    from .verbs.digest import digest as digest
    from .verbs.inspecting import doctor as doctor
    from .verbs.inspecting import inspect as inspect
    from .verbs.inspecting import verify as verify
    from .verbs.load import load_file as load_file
    from .verbs.modules import load_model as load_model
    from .verbs.modules import save_model as save_model
    from .verbs.open import TensorSlice as TensorSlice
    from .verbs.open import safe_open as safe_open
    from .verbs.pin import Pinned as Pinned
    from .verbs.pin import empty_cache as empty_cache
    from .verbs.pin import pin as pin
    from .verbs.pin import quiesce as quiesce
    from .verbs.preload import Preload as Preload
    from .verbs.preload import preload as preload
    from .verbs.results import Diagnosis as Diagnosis
    from .verbs.results import Inspection as Inspection
    from .verbs.results import Verification as Verification
    from .verbs.save import save_file as save_file
    from .verbs.saving import Report as Report
    from .verbs.saving import Saving as Saving
    from .verbs.sleeping import Asleep as Asleep
    from .verbs.sleeping import SleepMemory as SleepMemory
    from .verbs.sleeping import prepare_sleep as prepare_sleep
    from .verbs.sleeping import sleep as sleep
    from .verbs.stream import stream as stream

# Maps each module to its names. The entry "" lists names that are modules themselves.
_HOMES = {
    "": ("codecs", "compat", "distributed", "errors"),
    "_tables": ("__version__",),
    "bundles.bundle": ("compress_pickle", "save_bundle"),
    "bundles.loading": ("load_bundle", "load_compressed", "load_compressed_pickle"),
    "bundles.rewriting": ("compress", "decompress"),
    "bundles.torchfolders": ("convert",),
    "compat.safetensors.patching": ("SafetensorsPatch", "patch_safetensors"),
    "errors": (
        "AccessError", "ArgumentError", "CancelledError", "CorruptError", "CryptographyError", "DeadlineError",
        "DeltaBaseError", "DeviceError", "EngineError", "ForkedError", "FormatError", "IOFailure",
        "MissingPackageError", "ModelMismatchError", "NotFoundError", "NotSupportedError", "OutOfMemoryError",
        "OverwireError", "SliceError", "TensorNotFoundError", "UntrustedPickleError",
    ),
    "frameworks.spec": ("TensorSpec",),
    "jobs": ("last_report",),
    "metering": ("CacheMetrics", "HostMetrics", "Metrics", "VerbMetrics", "metrics"),
    "model.options": ("LoadOptions",),
    "model.plan": ("LoadPlan", "PlannedFile", "PlannedOffload", "PlannedTensor", "PlannedTier", "plan"),
    "model.reading": ("read_bytes",),
    "model.selection": ("experts",),
    "model.storageoptions": ("StorageOptions",),
    "offloading.offload": ("Offloaded", "offload"),
    "progress": ("Progress",),
    "verbs.deltas": (
        "Delta", "DeltaReport", "DeltaRow", "Diff", "apply_delta", "diff", "merge_deltas", "open_delta", "save_delta"
    ),
    "verbs.digest": ("Comparison", "digest"),
    "verbs.inspecting": ("doctor", "inspect", "verify"),
    "verbs.load": ("load_file",),
    "verbs.modules": ("load_model", "save_model"),
    "verbs.open": ("TensorSlice", "safe_open"),
    "verbs.pin": ("Pinned", "empty_cache", "pin", "quiesce"),
    "verbs.preload": ("Preload", "preload"),
    "verbs.results": ("Diagnosis", "Inspection", "Verification"),
    "verbs.save": ("save_file",),
    "verbs.saving": ("Report", "Saving"),
    "verbs.sleeping": ("Asleep", "SleepMemory", "prepare_sleep", "sleep"),
    "verbs.stream": ("stream",),
}

# nyacomp's names. Scripts can still import them from here, but `overwire.compat.nyacomp` exports them.
_NYACOMP = {"compress_pickle", "load_compressed", "load_compressed_pickle"}

if not TYPE_CHECKING:
    __all__ = sorted({name for names in _HOMES.values() for name in names} - _NYACOMP)

    def _nearest_name(name):
        if name.startswith("_"):  # the import system also looks up such names
            return ""
        from .errors import did_you_mean

        replacements = [public for public in __all__ if public in (f"{name}_file", f"safe_{name}")]
        return f"; did you mean {replacements[0]!r}?" if replacements else did_you_mean(name, __all__)

    def _spell_out(function):
        from .model.options import spell_out

        spell_out(function)

    __getattr__ = _lazy_names(_HOMES, globals(), _nearest_name, _spell_out)

    def __dir__():
        return __all__


if _os.environ.get("OVERWIRE_PRELOAD"):
    from .verbs.preload import start_from_environment as _start

    _start()

if _os.environ.get("OVERWIRE_PATCH"):
    from .compat.safetensors.patching import patch_from_environment as _patch

    _patch()
