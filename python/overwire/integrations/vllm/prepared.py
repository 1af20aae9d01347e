"""Keeps models that vLLM has processed, so that the next start can make the model from them.

vLLM has a contract for weights that are already processed, which it made for its own weight
cache: the model is built on the meta device, gets its tensors, and each quantisation method only
rebuilds its Python objects. The contents of such a model are compared, attribute by attribute,
with the description that was kept. Unless everything is equal, the model is loaded as usual.
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

from ...plumbing import start_thread
from ..shared import prepared
from ..shared.described import Describer, is_plain
from ..shared.devices import tensor_parallel_group
from ..shared.origins import Foreign, digest_of_code
from ..shared.parts import Arriving, match_processed, put_tensors, take_tensors
from ..shared.prepared import Damaged, Kept, Refused
from .identity import CODE, OPAQUE, fingerprint_of_load, fingerprint_prefix

log = init_logger("vllm.overwire")

# Models to be written when the engine is up, unless they are gone by then (a failed start), and the writing threads.
_waiting: dict[weakref.ref[torch.nn.Module], Callable[[], None]] = {}
_writers: list[threading.Thread] = []


def begin_writing() -> None:
    """Begins to write in the background what the loads of this process have left to be kept. Call it
    when the engine is up."""
    works = list(_waiting.values())
    _waiting.clear()
    if works:
        thread = threading.Thread(target=lambda: [work() for work in works], name="overwire prepared", daemon=True)
        _writers.append(thread)
        try:
            start_thread(thread.start)
        except RuntimeError as error:
            log.info("overwire: keeps no prepared state: %s", error)


def finish_writing() -> None:
    """Waits for the writes that `begin_writing` has begun. Others are dropped. Call it before weights change
    or their memory is freed."""
    _waiting.clear()
    while _writers:
        if _writers[-1].ident is not None:  # it was started
            _writers[-1].join()  # keep it in the list until it has ended, also if Ctrl-C comes
        _writers.pop()


class PreparedStart:
    """One start of a model with prepared state: loads a kept file, or collects what is to be kept."""

    def __init__(self, chosen: bool | str, config: Any, model_config: Any, prefix: str, loader: Any) -> None:
        """loader: vLLM's, which knows the files. Never raises, because other ranks wait: if nothing can
        be kept the log says why, and the load itself raises errors of the files."""
        self._config, self._model_config, self._prefix, self._loader = config, model_config, prefix, loader
        load_config = loader.load_config
        self._device = torch.device(config.device_config.device if load_config.device is None else load_config.device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._folder: str | None = None
        self._name = ""
        self._kept: Kept | None = None
        self._arriving: Arriving | None = None
        try:
            self._folder = prepared.ensure_folder(chosen)
            likely = prepared.newest_name(self._folder, fingerprint_prefix(config, model_config, prefix, self._device))
            if likely is not None:
                self._begin_early(self._folder, likely)
            self._name = fingerprint_of_load(config, model_config, prefix, loader, self._device)
            if self._kept is None or self._name != likely:
                self._drop_kept_file()
                self._kept = prepared.find_file(self._folder, self._name)
        except Exception as error:
            log.info("overwire: no prepared state: %s", error)
            self._drop_kept_file()
            if not isinstance(error, Damaged):
                self._folder = None
        except BaseException:
            self._drop_kept_file()
            raise

    def _begin_early(self, folder: str, likely: str) -> None:
        # Loads the file that was last used here while its fingerprint, which decides whether it counts, is computed.
        try:
            self._kept = prepared.find_file(folder, likely)
            if self._kept is not None:
                self._arriving = Arriving(self._kept.path, self._kept.record["tensors"], self._device)
        except Damaged as error:
            log.info("overwire: no prepared state: %s", error)
        except Exception:
            self._kept = None  # if the file counts, the error is raised again later
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _drop_kept_file(self) -> None:
        # Drops a file that does not count, and the memory that was taken for it.
        arriving, self._arriving, self._kept = self._arriving, None, None
        if arriving is not None:
            arriving.close()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def load_model(self) -> torch.nn.Module | None:
        """Returns the model, made from a kept file. None if it must be loaded as usual: on all ranks that
        share tensors, or on none."""
        try:
            file = self._kept if _all_agree(self._kept is not None) else None
            return None if file is None else self._load_kept(file)
        finally:
            self._drop_kept_file()

    def _load_kept(self, kept: Kept) -> torch.nn.Module | None:
        from ...plumbing import many_objects

        model: torch.nn.Module | None = None
        with _restore_registries_unless(self._config, lambda: model is not None), many_objects():
            reason = None
            began = time.perf_counter()
            try:
                model = self._make_model(kept)
            except Exception as error:
                reason = error
            if not _all_agree(reason is None):
                model = None
        if model is None:
            self._reject_kept(kept, reason)
            reason = None  # its traceback holds the new model: vLLM's own load needs that memory
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return None
        prepared.note_use(kept.path)
        count = len(kept.record["tensors"])
        log.info("overwire: made of prepared state: %d tensors, in %.2f s", count, time.perf_counter() - began)
        return model

    def _reject_kept(self, kept: Kept, reason: Exception | None) -> None:
        import overwire

        if reason is None:
            log.info("overwire: loads as always: another rank has no prepared state that fits")
        elif isinstance(reason, overwire.CorruptError | overwire.FormatError):
            log.warning("overwire: loads as always, and keeps the prepared state anew: %s", reason)
            prepared.try_remove(kept.path)
        else:
            log.info("overwire: loads as always: the prepared state %s does not fit: %s", kept.path, reason)
            # A note would replace a good file.
            if not isinstance(reason, Foreign) and not prepared.is_passing(reason) and self._folder is not None:
                prepared.note_refusal(self._folder, self._name, f"the model does not fit: {reason}")
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
        """Notes what to keep of a model that was loaded as usual, for `begin_writing`."""
        if self._folder is None:
            return
        import overwire

        try:
            _check_supported(model)
            tensors, record = _describe_model(model)
            digests = overwire.digest(tensors)
        except Exception as error:  # the model is loaded and usable
            log.info("overwire: keeps no prepared state: %s", error or type(error).__name__)
            return
        work = functools.partial(_write_prepared, self._folder, self._name, tensors, record, digests)
        _waiting[weakref.ref(model, lambda reference: _waiting.pop(reference, None))] = work


def _write_prepared(
    folder: str, name: str, tensors: dict[str, torch.Tensor], record: dict[str, Any], digests: dict[str, str]
) -> None:
    began = time.perf_counter()
    try:
        path = prepared.keep_file(folder, name, tensors, record, digests)
    except Exception as error:
        log.info("overwire: keeps no prepared state: %s", error or type(error).__name__)
        return
    log.info("overwire: prepared state kept in %.1f s: %s", time.perf_counter() - began, path)


def _all_agree(mine: bool) -> bool:
    # Collective among the ranks that load together: whether all agree.
    group = tensor_parallel_group(parallel_state, "cpu_group")
    if group is None:
        return mine
    every = torch.tensor([mine], dtype=torch.int32)
    torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MIN, group)
    return bool(every.item())


@contextlib.contextmanager
def _restore_registries_unless(config: Any, done: Callable[[], bool]) -> Iterator[None]:
    # Restores what building a model leaves outside of it: layers by name, and modules that models share.
    from vllm.model_executor.layers import rotary_embedding

    compilation = config.compilation_config
    layers: dict[str, Any] = compilation.static_forward_context
    experts: list[str] = getattr(compilation, "static_all_moe_layers", [])
    ropes: dict[Any, Any] = rotary_embedding._ROPE_DICT
    before = dict(layers), list(experts), dict(ropes)
    ropes.clear()  # modules of an earlier model would not come from this file
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
    # Applies the rule of vLLM's own weight cache.
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name in ("secondary_weights", "allow_patterns_overrides"):
        if getattr(model, name, None):
            raise Refused(f"it has {name}: files that its fingerprint does not know")
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            raise Refused(f"{path}: vLLM's {type(method).__name__} takes no weights that are already processed")


def _describe_model(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    # Returns the tensors to store, and the record of the model.
    tensors, rows, names = take_tensors(model)
    modules = Describer(model, tensors, "vllm", OPAQUE).describe_modules()
    return tensors, {
        "names": names, "tensors": rows, "modules": modules, "origins": digest_of_code(model, "vllm", CODE),
    }


def _compare_model(model: torch.nn.Module, record: dict[str, Any]) -> None:
    # Compares a model with its record, and sets flags and numbers that only `load_weights` sets.
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
        raise Foreign("vLLM's code, or what was put in its place, has changed")


def _set_attribute(module: torch.nn.Module, name: str, text: str | None) -> bool:
    # Sets an attribute to the plain value that a text describes. Returns False if it cannot.
    if text is None or not name or "." in name or isinstance(module.__dict__.get(name), torch.Tensor):
        return False
    if name not in vars(module) and not is_plain(getattr(type(module), name, None)):
        return False  # it would replace a method
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    if not is_plain(value):
        return False
    setattr(module, name, value)
    return True


def _set_restore_device(model: torch.nn.Module, device: torch.device) -> None:
    # vLLM notes the device on which a model was built, for reloads.
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    with device:
        default = torch.get_default_device()
    for module in model.modules():
        info = LAYERWISE_INFO.get(module)
        if info is not None:
            info.restore_device = default
