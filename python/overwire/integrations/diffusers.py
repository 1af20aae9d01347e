"""Patches diffusers' loader for `overwire.patch_safetensors`.

A model's tensors load in one pass, each to the device and dtype of its parameter. In a pipeline, while
diffusers builds one model, that model and the next model of diffusers or transformers load.

diffusers reads a whole file to the CPU before it chooses devices. The patch gives it tensors that have not been read.
`_load_shard_file` loads them, because its arguments show the device and dtype of each parameter. The loaded tensor
becomes the parameter and is not copied again.

Models that are quantised or offloaded to disk are read file by file, because loading ahead would need the memory that
quantisation or offloading saves. Plain files for the CPU stay mapped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .._compat_api import new_lock
from . import Lazy, uses_disk

__all__ = ["MODULES", "pair_replacements"]

_MODEL = "diffusers.models.modeling_utils"
_CONFIG = "diffusers.configuration_utils"
_PIPELINE = "diffusers.pipelines.pipeline_utils"

#: The modules of diffusers that `pair_replacements` uses.
MODULES = (_CONFIG, _MODEL, _PIPELINE)

# The largest config.json or shard index that this module reads, in bytes. Larger files are left to diffusers.
_JSON_BYTES = 64 << 20

# The engine loads tensors of at least this many bytes into memory of torch's allocator.
_LARGE = 1 << 20

_thread = threading.local()


def pair_replacements(found: Callable[[str, str], Any], lazy: Lazy) -> list[tuple[Any, Any]]:
    """Returns the objects to replace, each with its replacement."""
    model, read = found(_MODEL, "ModelMixin"), found(_MODEL, "load_state_dict")
    names = ("_load_shard_file", "_get_checkpoint_shard_files", "_caching_allocator_warmup")
    shard, shards, warm = (found(_MODEL, name) for name in names)
    if model is None or read is None or shard is None:
        return []
    pairs: list[tuple[Any, Any]] = [
        ((model, "from_pretrained"), _wrap_from_pretrained(model, lazy, False)),
        (read, _wrap_state_reading(read)),
        (shard, _wrap_shard_loading(shard, read)),
    ]
    if shards is not None:
        pairs.append((shards, _wrap_shard_names(shards)))
    if warm is not None:
        pairs.append((warm, _skip_warmup(warm)))
    pipeline, part, config = (
        found(_PIPELINE, "DiffusionPipeline"), found(_PIPELINE, "load_sub_model"), found(_CONFIG, "ConfigMixin")
    )
    if pipeline is not None and part is not None and config is not None:
        pairs += [
            ((pipeline, "from_pretrained"), _wrap_from_pretrained(pipeline, lazy, True)),
            ((config, "extract_init_dict"), _note_components(config)),
            (part, _wrap_component_loading(part, lazy)),
        ]
    return pairs


class _Model:
    # The files of one model. Requests for tensors, with device and dtype, are collected, and loaded in one pass when
    # the first tensor is taken. Worker threads may share this object.

    def __init__(self, paths: list[str], lazy: Lazy) -> None:
        self.paths = paths
        self.begun = False
        self.whole = new_lock()  # held while the tensors of all files are noted
        self._ahead, self._slice = lazy.ahead(), lazy.slice
        self._lock = new_lock()
        self._files: dict[str, dict[str, Any]] = {}
        self._targets: dict[tuple[str, Any], str | None] = {}  # the engine's device, by file and requested device
        self._large: dict[str, int] = {}  # bytes of tensors from torch's allocator, by GPU
        self._noted: dict[tuple[str, str, str, str], Callable[[], Any]] = {}

    def slices_of(self, path: str) -> dict[str, Any]:
        """Returns the unread tensors of one of the files by name, in the order of their data."""
        with self._lock:
            if path not in self._files:
                import safetensors

                reader: Any = safetensors.safe_open
                file = reader(path, "pt")
                self._files[path] = {name: file.get_slice(name) for name in getattr(file, "offset_keys", file.keys)()}
            return self._files[path]

    def note_tensor(self, path: str, name: str, device: Any, dtype: Any) -> tuple[str, str, str, str] | None:
        """Notes a tensor to load and returns its key for `give_tensor`, or None if safetensors should read it."""
        tensor = self.slices_of(path)[name]
        if (path, device) not in self._targets:  # the result is the same for all tensors of a file
            self._targets[path, device] = tensor.device(device) if isinstance(tensor, self._slice) else None
        target = self._targets[path, device]
        if target is None:
            return None
        cast = tensor.cast(dtype)
        key = (path, name, target, cast)
        with self._lock:
            if key not in self._noted:
                self._noted[key] = self._ahead.want(tensor, target, dtype)
                if target != "cpu":
                    size = math.prod(tensor.get_shape()) * _itemsize_of(cast or tensor.get_dtype())
                    self._large[target] = self._large.get(target, 0) + (size if size >= _LARGE else 0)
        return key

    def begin(self) -> bool:
        """Starts to load the noted tensors. Returns False if there are none."""
        self.begun = bool(self._noted)
        _reserve_memory(self._large)
        self._large = {}
        self._ahead.begin()
        return self.begun

    def give_tensor(self, key: tuple[str, str, str, str]) -> Any:
        """Returns a noted tensor. Each key can be used once."""
        with self._lock:
            give = self._noted.pop(key)
        return give()

    def pass_loads(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the loader of another library uses these loads, on this thread."""
        return self._ahead.pass_on()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the loads, and frees tensors that were not taken."""
        self._ahead.close()
        self._noted, self._files = {}, {}


@functools.cache
def _itemsize_of(dtype: str) -> int:
    # dtype: a name as in files or as in torch.
    import torch

    from .._compat_api import torch_dtype

    kind = getattr(torch, dtype, None) or torch_dtype(dtype)
    return kind.itemsize if isinstance(kind, torch.dtype) else 1


def _reserve_memory(sizes: Mapping[str, int]) -> None:
    # Makes torch's allocator reserve one large block for the tensors, because hundreds of driver calls would take
    # longer. The libraries' own warm-ups do the same, but at a later time.
    import torch

    for device, size in sizes.items():
        with contextlib.suppress(RuntimeError, AssertionError):  # the load reports the error
            if size:
                torch.empty(size, dtype=torch.uint8, device=device)


class _Scope:
    # One call of from_pretrained, for a pipeline or a single model.

    def __init__(self, lazy: Lazy, given: Mapping[str, Any] | None = None) -> None:
        self.given = given  # a pipeline's arguments
        self.parts: dict[str, Any] | None = None  # library and class of each component, in loading order
        self.model: _Model | None = None  # the model that is being loaded
        self.ahead: dict[str, _Model] = {}  # models that load before diffusers asks for them, by name
        self._lazy = lazy

    def take_model(self, paths: list[str]) -> _Model:
        """Returns the model of these files: a model that is loaded ahead, or a new model."""
        self.end()
        name_of_model = next((name for name, model in self.ahead.items() if model.paths == paths), None)
        self.model = _Model(paths, self._lazy) if name_of_model is None else self.ahead.pop(name_of_model)
        return self.model

    def end(self) -> None:
        """Closes the model that was being loaded, whether or not it is complete."""
        if self.model is not None:
            self.model.close()
        self.model = None

    def drop_component(self, name: str) -> None:
        """Frees the tensors that were loaded ahead for a component and not taken."""
        model = self.ahead.pop(name, None)
        if model is not None:
            model.close()

    def close(self) -> None:
        self.end()
        for name in list(self.ahead):
            self.drop_component(name)


@contextlib.contextmanager
def _within_scope(lazy: Lazy, given: Mapping[str, Any] | None = None) -> Iterator[_Scope]:
    before = getattr(_thread, "scope", None)
    _thread.scope = scope = _Scope(lazy, given)
    try:
        yield scope
    finally:
        _thread.scope = before
        scope.close()


def _current_scope() -> _Scope | None:
    return getattr(_thread, "scope", None)


def _wrap_from_pretrained(owner: Any, lazy: Lazy, is_pipeline: bool) -> Any:
    from .._compat_api import many_objects

    original = inspect.getattr_static(owner, "from_pretrained")

    @functools.wraps(original.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        scope = None if is_pipeline else _current_scope()
        if scope is None or scope.given is None:  # not a component of a pipeline
            lazy.prepare(kwargs.get("device_map"))
            with _within_scope(lazy, kwargs.copy() if is_pipeline else None), many_objects():
                return original.__get__(None, cls)(*args, **kwargs)
        try:
            return original.__get__(None, cls)(*args, **kwargs)
        finally:
            scope.end()

    return classmethod(from_pretrained)


def _note_components(owner: Any) -> Any:
    original = inspect.getattr_static(owner, "extract_init_dict")

    @functools.wraps(original.__func__)
    def extract_init_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.__get__(None, cls)(*args, **kwargs)
        scope = _current_scope()
        # The pipeline calls this function before its models do.
        if scope is not None and scope.given is not None and scope.parts is None:
            scope.parts = dict(result[0])
        return result

    return classmethod(extract_init_dict)


class _Shard(str):
    # The path of one shard. Worker threads read from it which model the file belongs to.
    model: _Model


def _wrap_shard_names(original: Any) -> Any:
    @functools.wraps(original)
    def _get_checkpoint_shard_files(*args: Any, **kwargs: Any) -> Any:
        files, metadata = original(*args, **kwargs)
        scope = _current_scope()
        if scope is None or not all(isinstance(file, str) and file.endswith(".safetensors") for file in files):
            return files, metadata
        model = scope.take_model([os.path.abspath(file) for file in files])
        shards = [_Shard(file) for file in files]
        for file in shards:
            file.model = model
        return shards, metadata

    return _get_checkpoint_shard_files


def _wrap_state_reading(original: Any) -> Any:
    @functools.wraps(original)
    def load_state_dict(checkpoint_file: Any, *args: Any, **kwargs: Any) -> Any:
        from .._compat_api import torch_dtype

        scope = _current_scope()
        special = args or any(kwargs.values())
        if scope is None or special or not isinstance(checkpoint_file, (str, os.PathLike)):
            return original(checkpoint_file, *args, **kwargs)
        path = os.path.abspath(checkpoint_file)
        if not path.endswith(".safetensors") or not os.path.isfile(path):
            return original(checkpoint_file, *args, **kwargs)
        with open(path, "rb") as file:
            if file.read(7) == b"version":  # a git-lfs pointer: git-lfs is not installed, and diffusers reports this
                return original(checkpoint_file, *args, **kwargs)
        model = scope.take_model([path])
        tensors = model.slices_of(path)
        kinds = {name: tensor.get_dtype() for name, tensor in tensors.items()}
        dtypes = {kind: torch_dtype(kind) for kind in set(kinds.values())}
        if None in dtypes.values() or "F4" in dtypes:  # torch lacks the dtype, or F4 has another shape in torch
            return original(checkpoint_file)
        state = _unread_maker()
        return {
            name: state(tensors[name].get_shape(), dtypes[kind], _Where(model, path, name, original))
            for name, kind in kinds.items()
        }

    return load_state_dict


class _Where(NamedTuple):
    # A tensor in a file, and diffusers' own function to read the file.
    model: _Model
    path: str
    name: str
    read: Callable[[str], Any]


@functools.cache
def _unread_maker() -> Callable[[Any, Any, _Where], Any]:
    """Returns a function that creates unread tensors of a given shape and dtype. Any operation on an unread tensor
    reads it."""
    import torch
    from torch.utils._pytree import tree_map

    def read_value(value: Any) -> Any:
        where = getattr(value, "overwire", None)
        return where.read(where.path)[where.name] if isinstance(where, _Where) else value

    class Unread(torch.Tensor):
        overwire: _Where

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            return func(*tree_map(read_value, args), **tree_map(read_value, kwargs or {}))

    def make_unread(shape: Any, dtype: Any, where: _Where) -> Any:
        tensor = torch.Tensor._make_wrapper_subclass(Unread, tuple(shape), dtype=dtype)
        tensor.overwire = where
        return tensor

    return make_unread


def _wrap_shard_loading(original: Any, read: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _load_shard_file(shard_file: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(shard_file, *args, **kwargs).arguments
        notes: dict[str, Any] = {}
        if isinstance(shard_file, _Shard) and not arguments.get("disable_mmap"):
            model, path = shard_file.model, os.path.abspath(shard_file)
            notes = {name: _Where(model, path, name, read) for name in model.slices_of(path)}
            if arguments.get("hf_quantizer") is None and not uses_disk(arguments.get("device_map")):
                with model.whole:  # no other worker may start the load before the tensors of all shards are noted
                    for other in model.paths if not model.begun else ():
                        _note_targets(
                            arguments, {name: _Where(model, other, name, read) for name in model.slices_of(other)}
                        )
                    model.begin()
        elif isinstance(shard_file, dict):
            notes = {name: getattr(value, "overwire", value) for name, value in shard_file.items()}
        if not any(isinstance(where, _Where) for where in notes.values()):
            return original(shard_file, *args, **kwargs)
        state = _fill_state(notes, _note_targets(arguments, notes))
        del notes
        return original(state, *args, **kwargs)

    return _load_shard_file


def _note_targets(given: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    # Maps each name in the model to the key for `give_tensor`, or to None if safetensors reads the tensor.
    quantizer, keep, dtype = given.get("hf_quantizer"), given.get("keep_in_fp32_modules"), given.get("dtype")
    keys: dict[str, Any] = {}
    for name, where in held.items():
        if not isinstance(where, _Where):
            continue
        goal = given["model_state_dict"].get(name)
        if goal is None and quantizer is None:
            continue  # the model has no such tensor
        # A quantiser gets the same tensors as without the patch, on the CPU.
        device = "cpu" if quantizer is not None else _device_of(given.get("device_map"), name)
        cast = None if quantizer is not None or goal is None else _dtype_for(name, dtype or goal.dtype, keep)
        keys[name] = where.model.note_tensor(where.path, where.name, device, cast)
    return keys


def _fill_state(held: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    # Returns the state dict. Tensors that the model lacks stay unread.
    from .._compat_api import torch_dtype

    whole: dict[str, Any] = {}  # plain files that safetensors has mapped
    tensors: dict[str, Any] = {}
    for name, where in held.items():
        if not isinstance(where, _Where):
            tensors[name] = where
        elif name not in keys:
            slice_ = where.model.slices_of(where.path)[where.name]
            tensors[name] = _unread_maker()(slice_.get_shape(), torch_dtype(slice_.get_dtype()), where)
        elif keys[name] is not None:
            tensors[name] = where.model.give_tensor(keys[name])
        else:
            if where.path not in whole:
                whole[where.path] = where.read(where.path)
            tensors[name] = whole[where.path][where.name]
    return tensors


def _device_of(device_map: Any, name: str) -> Any:
    # Returns the device of the longest module name in the map that contains the tensor, as diffusers does.
    if device_map is None:
        return "cpu"
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    place = device_map.get(name, "cpu")  # diffusers reports a missing entry
    return "cpu" if place == "disk" else place


def _dtype_for(name: str, dtype: Any, keep: Any) -> Any:
    import torch

    is_kept = keep is not None and any(module in name.split(".") for module in keep)
    return torch.float32 if is_kept else dtype


def _skip_warmup(original: Any) -> Any:
    @functools.wraps(original)
    def _caching_allocator_warmup(*args: Any, **kwargs: Any) -> Any:
        # overwire's tensors already have memory, and a warm-up would allocate the same amount again.
        scope = _current_scope()
        if scope is None or scope.model is None or not scope.model.begun:
            original(*args, **kwargs)

    return _caching_allocator_warmup


def _wrap_component_loading(original: Any, lazy: Lazy) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_sub_model(*args: Any, **kwargs: Any) -> Any:
        scope = _current_scope()
        if scope is None or scope.given is None:
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        name = arguments["name"]
        _look_ahead(scope, arguments, lazy)
        try:
            with _pass_to_transformers(scope, name):
                return original(*args, **kwargs)
        finally:
            scope.drop_component(name)

    return load_sub_model


def _pass_to_transformers(scope: _Scope, name: str) -> contextlib.AbstractContextManager[None]:
    # Passes the loads that began ahead for a transformers model to the loader of transformers.
    model = scope.ahead.get(name)
    if model is None or scope.parts is None or scope.parts[name][0] != "transformers":
        return contextlib.nullcontext()
    return model.pass_loads()


def _look_ahead(scope: _Scope, given: Mapping[str, Any], lazy: Lazy) -> None:
    """Starts to load a component of a pipeline if it is a model, and also the next model after it."""
    assert scope.given is not None
    device = "cpu" if given.get("device_map") is None else given["device_map"]
    if any(scope.given.get(name) for name in ("quantization_config", "disable_mmap", "dduf_file", "use_flashpack")):
        return
    if scope.given.get("use_safetensors") is False or not _is_device(device):
        return
    names = list(scope.parts or ())
    for name in names[names.index(given["name"]) :] if given["name"] in names else ():
        has_begun = name in scope.ahead or _begin_component(scope, name, given, device, lazy)
        if has_begun and name != given["name"]:
            return


def _begin_component(scope: _Scope, name: str, given: Mapping[str, Any], device: str, lazy: Lazy) -> bool:
    # Starts to load a component. Returns False if the component is not a model that can be loaded ahead.
    assert scope.given is not None and scope.parts is not None
    about = scope.parts[name]
    if name in scope.given or not isinstance(about, (list, tuple)) or len(about) != 2 or about[0] not in _WEIGHTS:
        return False
    library, kind = str(about[0]), str(about[1])
    folder = os.path.join(given["cached_folder"], name)
    files = _weights_files(folder, given.get("variant"), library)
    if not files or _read_json(os.path.join(folder, "config.json")).get("quantization_config") is not None:
        return False
    model = _Model(files, lazy)
    try:
        _note_component(model, name, library, kind, device, scope.given)
        if model.begin():
            scope.ahead[name] = model
            return True
    except Exception:  # the component's library raises the error again when it loads the files
        pass
    model.close()
    return False


def _note_component(model: _Model, name: str, library: str, kind: str, device: str, asked: Mapping[str, Any]) -> None:
    import torch

    dtype = asked.get("torch_dtype", asked.get("dtype"))
    if isinstance(dtype, dict):
        dtype = dtype.get(name, dtype.get("default", torch.float32))
    dtype = dtype or torch.get_default_dtype()
    owner = getattr(sys.modules.get(library), kind, None)
    keep = getattr(owner, "_keep_in_fp32_modules", None)
    if library == "transformers":
        keep = set(keep or ()) if dtype == torch.float16 else set()
        if dtype in (torch.float16, torch.bfloat16):
            keep |= set(getattr(owner, "_keep_in_fp32_modules_strict", None) or ())
        if "transformers.core_model_loading" not in sys.modules:
            dtype, keep = None, None  # transformers 4 casts tensors after loading
    for path in model.paths:
        for tensor in model.slices_of(path):
            model.note_tensor(path, tensor, device, _dtype_for(tensor, dtype, keep))


def _is_device(name: Any) -> bool:
    import torch

    try:
        return isinstance(name, str) and torch.device(name) is not None
    except RuntimeError:  # a strategy like "balanced", which is resolved when each model is loaded
        return False


# The stems of the libraries' weight files.
_WEIGHTS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}


def _weights_files(folder: str, variant: str | None, library: str) -> list[str]:
    """Returns the paths of the weight files that a model's library would read, or [] if there are none."""
    stem = _WEIGHTS[library]
    for kind in ([f".{variant}"] if variant else []) + [""]:
        index = f"{kind}.index.json" if library == "diffusers" else f".index{kind}.json"
        index = os.path.join(folder, f"{stem}.safetensors{index}")
        if os.path.isfile(index):
            weight_map = _read_json(index).get("weight_map")
            files = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
            return [os.path.abspath(os.path.join(folder, file)) for file in files if os.path.basename(file) == file]
        alone = os.path.join(folder, f"{stem}{kind}.safetensors")
        if os.path.isfile(alone):
            return [os.path.abspath(alone)]
    return []


def _read_json(path: str) -> dict[str, Any]:
    # Returns {} for an unreadable file, which diffusers reports.
    try:
        with open(path, encoding="utf-8") as file:
            document = json.loads(file.read(_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
