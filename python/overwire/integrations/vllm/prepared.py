"""Stores models that vLLM has processed, so that the next start can restore them.

vLLM's own weight cache defines how to load weights that are already processed: the model is built on the meta device
and gets its tensors, and each quantisation method only rebuilds its Python objects. The restored model is compared,
attribute by attribute, with the stored description. If anything differs, the model is loaded as usual.
Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.logger import init_logger

from ..._compat_api import start_thread
from ..._undo import after_error
from ..devices import all_agree
from ..kept_model import keep_files
from ..kept_model.check_origins import Foreign, digest_of_code
from ..kept_model.describe_model import Describer, is_plain
from ..kept_model.keep_files import Damaged, Kept, Refused
from ..kept_model.move_tensors import Arriving, match_processed, put_tensors, take_tensors
from .identity import CODE, OPAQUE, fingerprint_of_load, fingerprint_prefix

log = init_logger("vllm.overwire")

# _waiting: the models to write when the engine is up, each with the function that writes it. A model that is freed
# earlier, after a failed start, is not written. _writers: the threads that write.
_waiting: dict[weakref.ref[torch.nn.Module], Callable[[], None]] = {}
_writers: list[threading.Thread] = []


def begin_writing() -> None:
    """Starts to write the noted models of this process in the background. Call it when the engine is up."""
    works = list(_waiting.values())
    _waiting.clear()
    if works:
        thread = threading.Thread(target=lambda: [work() for work in works], name="overwire prepared", daemon=True)
        _writers.append(thread)
        try:
            start_thread(thread.start)
        except RuntimeError as error:
            log.info("overwire: cannot store prepared state: %s", error)


def finish_writing() -> None:
    """Waits for writes that have begun, and drops the others. Call it before weights change or their memory is
    freed."""
    _waiting.clear()
    while _writers:
        if _writers[-1].ident is not None:  # the thread was started
            _writers[-1].join()  # Ctrl-C may interrupt this, so the thread stays in the list until it has ended
        _writers.pop()


class PreparedStart:
    """One start of a model with prepared state. It restores the model from a file, or notes it for writing."""

    def __init__(self, chosen: bool | str, config: Any, model_config: Any, prefix: str, loader: Any) -> None:
        """Finds a stored file and starts to load it. loader: the loader that knows the model's files.

        Raises no Exception, because other ranks wait. If prepared state cannot be used, logs the reason. Errors of the
        model's files are raised by the load itself.
        """
        self._config, self._model_config, self._prefix, self._loader = config, model_config, prefix, loader
        load_config = loader.load_config
        self._device = torch.device(config.device_config.device if load_config.device is None else load_config.device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._folder: str | None = None
        self._name = ""
        self._kept: Kept | None = None
        self._arriving: Arriving | None = None
        with after_error(self._drop_kept_file):
            try:
                self._folder = keep_files.ensure_folder(chosen)
                start = fingerprint_prefix(config, model_config, prefix, self._device)
                likely = keep_files.newest_name(self._folder, start)
                if likely is not None:
                    self._begin_early(self._folder, likely)
                self._name = fingerprint_of_load(config, model_config, prefix, loader, self._device)
                if self._kept is None or self._name != likely:
                    self._drop_kept_file()
                    self._kept = keep_files.find_file(self._folder, self._name)
            except Exception as error:
                log.info("overwire: no prepared state: %s", error)
                self._drop_kept_file()
                if not isinstance(error, Damaged):
                    self._folder = None

    def _begin_early(self, folder: str, likely: str) -> None:
        # Starts to load the most recently used file. The fingerprint, which is computed at the same time, decides
        # whether the file is used.
        try:
            self._kept = keep_files.find_file(folder, likely)
            if self._kept is not None:
                self._arriving = Arriving(self._kept.path, self._kept.record["tensors"], self._device)
        except Damaged as error:
            log.info("overwire: no prepared state: %s", error)
        except Exception:
            self._kept = None  # if the fingerprint matches, the file is opened again and raises the error
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _drop_kept_file(self) -> None:
        # Drops the file, and frees the memory for its tensors.
        arriving, self._arriving, self._kept = self._arriving, None, None
        if arriving is not None:
            arriving.close()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def load_model(self) -> torch.nn.Module | None:
        """Returns the model restored from a file, or None if the model must be loaded as usual. Of the ranks that
        divide tensors, either all get a model or none does."""
        try:
            file = self._kept if all_agree(parallel_state, self._kept is not None) else None
            return None if file is None else self._load_kept(file)
        finally:
            self._drop_kept_file()

    def _load_kept(self, kept: Kept) -> torch.nn.Module | None:
        from ..._compat_api import many_objects

        model: torch.nn.Module | None = None
        with _restore_registries_unless(self._config, lambda: model is not None), many_objects():
            reason = None
            began = time.perf_counter()
            try:
                model = self._make_model(kept)
            except Exception as error:
                reason = error
            if not all_agree(parallel_state, reason is None):
                model = None
        if model is None:
            self._reject_kept(kept, reason)
            reason = None  # the error's traceback keeps the new model alive, but vLLM's own load needs the memory
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return None
        keep_files.note_use(kept.path)
        count = len(kept.record["tensors"])
        log.info("overwire: restored prepared state: %d tensors in %.2f s", count, time.perf_counter() - began)
        return model

    def _reject_kept(self, kept: Kept, reason: Exception | None) -> None:
        import overwire

        if reason is None:
            log.info("overwire: loads the model as usual: another rank has no matching prepared state")
        elif isinstance(reason, overwire.CorruptError | overwire.FormatError):
            log.warning("overwire: loads the model as usual, and will store its prepared state again: %s", reason)
            keep_files.try_remove(kept.path)
        else:
            log.info("overwire: loads the model as usual: the prepared state %s does not match: %s", kept.path, reason)
            # After a temporary error, a note would replace a usable file.
            if not isinstance(reason, Foreign) and not keep_files.is_passing(reason) and self._folder is not None:
                keep_files.note_refusal(self._folder, self._name, f"the model does not match: {reason}")
            self._folder = None

    def _make_model(self, kept: Kept) -> torch.nn.Module:
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
        from vllm.model_executor.utils import weights_already_processed
        from vllm.utils.torch_utils import set_default_torch_dtype

        model: torch.nn.Module
        names = kept.record["names"]
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            arriving = Arriving(kept.path, kept.record["tensors"], self._device)
        with contextlib.closing(arriving), set_default_torch_dtype(self._model_config.dtype):
            with torch.device("meta"):
                model = initialize_model(vllm_config=self._config, model_config=self._model_config, prefix=self._prefix)
            _check_supported(model)
            tensors = put_tensors(model, arriving, names, "vllm")
            arriving.finish_loading()
            with weights_already_processed():
                process_weights_after_loading(model, self._model_config, self._device)
            match_processed(model, names, tensors)
        _set_restore_device(model, self._device)
        model.eval()
        _compare_model(model, kept.record)
        return model

    def note_model(self, model: torch.nn.Module) -> None:
        """Notes a model that was loaded as usual, so that `begin_writing` stores it."""
        if self._folder is None:
            return
        import overwire

        try:
            _check_supported(model)
            tensors, record = _describe_model(model)
            digests = overwire.digest(tensors)
        except Exception as error:  # the model is loaded and usable
            log.info("overwire: cannot store prepared state: %s", error or type(error).__name__)
            return
        work = functools.partial(_write_prepared, self._folder, self._name, tensors, record, digests)
        _waiting[weakref.ref(model, lambda reference: _waiting.pop(reference, None))] = work


def _write_prepared(
    folder: str, name: str, tensors: dict[str, torch.Tensor], record: dict[str, Any], digests: dict[str, str]
) -> None:
    began = time.perf_counter()
    try:
        path = keep_files.keep_file(folder, name, tensors, record, digests)
    except Exception as error:
        log.info("overwire: cannot store prepared state: %s", error or type(error).__name__)
        return
    log.info("overwire: stored prepared state in %.1f s: %s", time.perf_counter() - began, path)


@contextlib.contextmanager
def _restore_registries_unless(config: Any, done: Callable[[], bool]) -> Iterator[None]:
    # Restores vLLM's registries of layers and shared modules, which change when a model is built, unless `done` returns
    # True.
    from vllm.model_executor.layers import rotary_embedding

    compilation = config.compilation_config
    layers: dict[str, Any] = compilation.static_forward_context
    experts: list[str] = getattr(compilation, "static_all_moe_layers", [])
    ropes: dict[Any, Any] = rotary_embedding._ROPE_DICT
    before = dict(layers), list(experts), dict(ropes)
    ropes.clear()  # modules shared with an earlier model would not be restored from this file
    try:
        yield
    finally:
        if not done():
            layers.clear()
            layers.update(before[0])
            experts[:] = before[1]
            ropes.clear()
            ropes.update(before[2])


def _check_supported(model: torch.nn.Module) -> None:
    # Raises Refused for a model that vLLM's own weight cache does not support.
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name in ("secondary_weights", "allow_patterns_overrides"):
        if getattr(model, name, None):
            raise Refused(f"it has {name}, and its fingerprint does not cover those files")
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            raise Refused(f"{path}: vLLM's {type(method).__name__} does not support processed weights")


def _describe_model(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    # Returns the tensors to store, and the record that describes the model.
    tensors, rows, names = take_tensors(model)
    modules = Describer(model, tensors, "vllm", OPAQUE).describe_modules()
    return tensors, {
        "names": names, "tensors": rows, "modules": modules, "origins": digest_of_code(model, "vllm", CODE),
    }


def _compare_model(model: torch.nn.Module, record: dict[str, Any]) -> None:
    # Compares a model with its record. Sets attributes with plain values that differ, because only `load_weights` would
    # have set them.
    tensors, rows, names = take_tensors(model)
    for current, was in ((names, record["names"]), (rows, record["tensors"])):
        if current != was:
            name = next(name for name in [*current, *was] if current.get(name) != was.get(name))
            raise Refused(f"{name} is {current.get(name)}, but was {was.get(name)}")
    modules = dict(model.named_modules())
    if absent := record["modules"].keys() - modules.keys():
        raise Refused(f"it has no module {min(absent)}")
    for path, entry in Describer(model, tensors, "vllm", OPAQUE).describe_modules().items():
        was = record["modules"].get(path, {})
        if entry == was:
            continue
        for name in entry.keys() | was.keys():
            if entry.get(name) != was.get(name) and not _set_attribute(modules[path], name, was.get(name)):
                raise Refused(f"{path}.{name} is {entry.get(name)}, but was {was.get(name)}")
    if digest_of_code(model, "vllm", CODE) != record["origins"]:
        raise Foreign("vLLM's code, or code that replaces it, has changed")


def _set_attribute(module: torch.nn.Module, name: str, text: str | None) -> bool:
    # Sets an attribute to the plain value that a text describes. Returns False if it cannot.
    if text is None or not name or "." in name or isinstance(module.__dict__.get(name), torch.Tensor):
        return False
    if name not in vars(module) and not is_plain(getattr(type(module), name, None)):
        return False  # the value would replace a method
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    if not is_plain(value):
        return False
    setattr(module, name, value)
    return True


def _set_restore_device(model: torch.nn.Module, device: torch.device) -> None:
    # Corrects the device that vLLM has noted for reloads, which is the meta device, because the model was built there.
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    with device:
        default = torch.get_default_device()
    for module in model.modules():
        info = LAYERWISE_INFO.get(module)
        if info is not None:
            info.restore_device = default
