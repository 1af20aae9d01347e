"""overwire: compresses model weights without loss and loads them back fast.

Importing this does no work: no engine, no thread, no torch, no numpy. Each name
below is fetched from its module when it is first used. The exceptions are what an
environment variable asks for: a preload (`OVERWIRE_PRELOAD`), which starts here, in
the engine's own threads; and `patch_safetensors` (`OVERWIRE_PATCH`).
"""

import os as _os
import sys as _sys

from ._imports import Undisturbed as _Undisturbed

if "t" in _sys.abiflags:  # there the engine's file, of the stable ABI, is not even looked for
    raise ImportError(
        "overwire does not run in a free-threaded CPython, which has no stable ABI: use the usual build of CPython"
    )

# A name of our own instead of typing's: importing typing would cost more than
# everything else here. Type checkers take both.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from . import codecs, compat, distributed, errors
    from ._tables import __version__
    from .bundles.bundle import (
        compress,
        compress_pickle,
        load_bundle,
        load_compressed,
        load_compressed_pickle,
        save_bundle,
    )
    from .bundles.torchfolders import convert
    from .compat.safetensors.patching import SafetensorsPatch, patch_safetensors
    from .errors import (
        AccessError,
        ArgumentError,
        CancelledError,
        CorruptError,
        CryptographyError,
        DeadlineError,
        DeltaBaseError,
        DeviceError,
        EngineError,
        ForkedError,
        FormatError,
        IOFailure,
        MissingPackageError,
        ModelMismatchError,
        NotFoundError,
        NotSupportedError,
        OutOfMemoryError,
        OverwireError,
        SliceError,
        TensorNotFoundError,
        UntrustedPickleError,
    )
    from .frameworks.spec import TensorSpec
    from .jobs import last_report
    from .metering import CacheMetrics, Metrics, VerbMetrics, metrics
    from .model.options import LoadOptions, StorageOptions
    from .model.plan import LoadPlan, PlannedFile, PlannedOffload, PlannedTensor, plan
    from .model.reading import read_bytes
    from .model.selection import experts
    from .offloading.offload import Offloaded, offload
    from .progress import Progress
    from .verbs.deltas import (
        Delta,
        DeltaReport,
        DeltaRow,
        Diff,
        apply_delta,
        diff,
        merge_deltas,
        open_delta,
        save_delta,
    )
    from .verbs.digest import Comparison, digest
    from .verbs.inspecting import doctor, inspect, verify
    from .verbs.load import load_file
    from .verbs.modules import load_model, save_model
    from .verbs.open import TensorSlice, safe_open
    from .verbs.pin import Pinned, empty_cache, pin
    from .verbs.preload import Preload, preload
    from .verbs.results import Diagnosis, Inspection, Verification
    from .verbs.save import save_file
    from .verbs.saving import Report, Saving
    from .verbs.sleeping import Asleep, SleepMemory, prepare_sleep, sleep
    from .verbs.stream import stream

__all__ = [
    "AccessError",
    "ArgumentError",
    "Asleep",
    "CacheMetrics",
    "CancelledError",
    "Comparison",
    "CorruptError",
    "DeadlineError",
    "CryptographyError",
    "Delta",
    "DeltaBaseError",
    "DeltaReport",
    "DeltaRow",
    "DeviceError",
    "Diagnosis",
    "Diff",
    "EngineError",
    "ForkedError",
    "FormatError",
    "IOFailure",
    "Inspection",
    "LoadOptions",
    "LoadPlan",
    "Metrics",
    "MissingPackageError",
    "ModelMismatchError",
    "NotFoundError",
    "NotSupportedError",
    "Offloaded",
    "OutOfMemoryError",
    "OverwireError",
    "Pinned",
    "PlannedFile",
    "PlannedOffload",
    "PlannedTensor",
    "Preload",
    "Progress",
    "Report",
    "SafetensorsPatch",
    "Saving",
    "SleepMemory",
    "SliceError",
    "StorageOptions",
    "TensorNotFoundError",
    "TensorSlice",
    "TensorSpec",
    "UntrustedPickleError",
    "VerbMetrics",
    "Verification",
    "__version__",
    "apply_delta",
    "codecs",
    "compat",
    "compress",
    "compress_pickle",
    "convert",
    "diff",
    "digest",
    "distributed",
    "doctor",
    "empty_cache",
    "errors",
    "experts",
    "inspect",
    "last_report",
    "load_bundle",
    "load_compressed",
    "load_compressed_pickle",
    "load_file",
    "load_model",
    "merge_deltas",
    "metrics",
    "offload",
    "open_delta",
    "patch_safetensors",
    "pin",
    "plan",
    "preload",
    "prepare_sleep",
    "read_bytes",
    "safe_open",
    "save_bundle",
    "save_delta",
    "save_file",
    "save_model",
    "sleep",
    "stream",
    "verify",
]

# Module -> the functions and plain classes that live there. Every other name of __all__ is
# an exception, or a module of its own.
_HOMES = {
    "_tables": ("__version__",),
    "bundles.bundle": (
        "compress", "compress_pickle", "load_bundle", "load_compressed", "load_compressed_pickle", "save_bundle"
    ),
    "bundles.torchfolders": ("convert",),
    "compat.safetensors.patching": ("SafetensorsPatch", "patch_safetensors"),
    "frameworks.spec": ("TensorSpec",),
    "jobs": ("last_report",),
    "metering": ("CacheMetrics", "Metrics", "VerbMetrics", "metrics"),
    "model.options": ("LoadOptions", "StorageOptions"),
    "model.plan": ("LoadPlan", "PlannedFile", "PlannedOffload", "PlannedTensor", "plan"),
    "model.reading": ("read_bytes",),
    "model.selection": ("experts",),
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
    "verbs.pin": ("Pinned", "empty_cache", "pin"),
    "verbs.preload": ("Preload", "preload"),
    "verbs.results": ("Diagnosis", "Inspection", "Verification"),
    "verbs.save": ("save_file",),
    "verbs.saving": ("Report", "Saving"),
    "verbs.sleeping": ("Asleep", "SleepMemory", "prepare_sleep", "sleep"),
    "verbs.stream": ("stream",),
}

if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'overwire' has no attribute {name!r}{_nearest_name(name)}")
        from importlib import import_module

        with _Undisturbed():
            if name in ("codecs", "compat", "distributed", "errors"):
                return import_module(f"overwire.{name}")
            home = next((module for module, names in _HOMES.items() if name in names), "errors")
            value = globals()[name] = getattr(import_module("overwire." + home), name)
            return value

    def _nearest_name(name):
        if name.startswith("_"):  # also a module that is being imported
            return ""
        from .errors import did_you_mean

        replacements = [public for public in __all__ if public in (f"{name}_file", f"safe_{name}")]
        return f"; did you mean {replacements[0]!r}?" if replacements else did_you_mean(name, __all__)

    def __dir__():
        return sorted(__all__)


if _os.environ.get("OVERWIRE_PRELOAD"):
    from .verbs.preload import start_from_environment as _start

    _start()

if _os.environ.get("OVERWIRE_PATCH"):
    from .compat.safetensors.patching import patch_from_environment as _patch

    _patch()
