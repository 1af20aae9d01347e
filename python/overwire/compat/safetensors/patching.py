"""Implements patch_safetensors, which makes libraries that use safetensors read through overwire."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

import overwire
from overwire._compat_api import KeptFile, await_path, forked, is_compressed, new_lock
from overwire._undo import after_error
from overwire.integrations import AfterImport, Lazy

from . import _bytes, _files, _lazy

# Functions that read, by safetensors' modules. A framework's module exists if the framework is installed.
_READERS = {
    "safetensors": ("safe_open", "_safe_open_handle", "deserialize"),
    "safetensors.torch": ("load_file", "load", "load_model"),
    "safetensors.numpy": ("load_file", "load"),
    "safetensors.flax": ("load_file", "load"),
    "safetensors.mlx": ("load_file", "load"),
    "safetensors.tensorflow": ("load_file", "load"),
    "safetensors.paddle": ("load_file", "load"),
}
# Functions that write: `serialize_file`, which writes all files, and the functions for torch and numpy, which pass
# addresses to `serialize_file` and `serialize`. The modules for flax, mlx and tensorflow use numpy's functions.
# paddle's functions refuse tensors that are not in C order.
_WRITERS = {
    "safetensors": ("serialize_file",), "safetensors.torch": ("save_file", "save"),
    "safetensors.numpy": ("save_file", "save"),
}  # fmt: skip
# Libraries with loaders that are also patched, by modules of overwire.integrations.
_LIBRARIES = ("transformers", "accelerate", "diffusers")

# Modules of these libraries that the hooks use.
_WATCHED = {library: import_module(f"overwire.integrations.{library}").MODULES for library in _LIBRARIES}

# Packages that are not searched for safetensors' functions. They have thousands of modules, and import safetensors only
# inside functions or not at all. Searching them would take longer than loading a model.
_OTHERS = frozenset(sys.stdlib_module_names - {"__main__"}) | {"mpmath", "numpy", "sympy", "torch", "triton"}

log = logging.getLogger("overwire")

_lock = new_lock()
_patches: list[SafetensorsPatch] = []  # active patches, in the order of their start
_swapped: dict[int, tuple[Any, Any]] = {}  # keyed by id: the original and its replacement
# By class and name: the class, the name, the original member and the current member.
_members: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
_seen: dict[str, int] = {}  # how many modules of a library existed when `_hook` last looked
# By module: the id of the module's dict, and how many names the dict had when `_rebind` last searched it.
_looked: dict[str, tuple[int, int]] = {}
_bound: list[tuple[dict[str, Any], str]] = []  # the names that `_rebind` has replaced


def _device() -> str | None:
    """Returns the device of the latest patch that has one."""
    return next((patch.device for patch in reversed(_patches) if patch.device is not None), None)


def _stand_in(module: str, name: str, original: Any) -> Any:
    """Makes the replacement for one of the original's functions. The replacement is a new object, so `undo` can find
    it."""
    if name in _WRITERS.get(module, ()):
        return _writes(original) if module == "safetensors" else _puts_in_order(original)
    if module != "safetensors":
        return _calls(lambda: getattr(import_module(f"overwire.compat.{module}"), name), original)
    if name == "deserialize":
        return _calls(lambda: _bytes.deserialize, original)
    return _opens(name, original)


def _opens(name: str, original: Any) -> type[Any]:
    lazy = name == "safe_open"
    base: Any = _files.safe_open if lazy else _files._safe_open_handle

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = _Call(original, args, kwargs)
        if forked():
            return object.__new__(cls) if is_compressed(call.subject) else original(*args, **kwargs)
        _hook()
        if not call.left_to_safetensors():
            return object.__new__(cls)
        file = original(*args, **kwargs)
        return _lazy.PlainFile(file, _lazy.path_of(call.subject)) if lazy and call.torch else file

    def opened(self: Any, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> None:
        if lazy and backend == "mmap" and not forked():  # libraries open a file for metadata and again for tensors
            self._open(_lazy.kept(filename), filename, framework, _where(device))
        else:
            base.__init__(self, filename, framework, _where(device), backend=backend)
        self._path = _lazy.path_of(filename) if lazy else ""
        self._elsewhere = {}

    def get_slice(self: Any, key: str) -> Any:
        inner = base.get_slice(self, key)
        if not lazy or forked() or self._framework.native != "pt":
            return inner
        return _lazy.Slice(inner, self._path, key, self._device, self._elsewhere)

    body = {"__slots__": ("_elsewhere", "_path"), "__new__": made, "__init__": opened, "get_slice": get_slice}
    get_slice.__doc__ = base.get_slice.__doc__
    return type(name, (base,), body | {"__doc__": base.__doc__, "__module__": base.__module__})


def _where(device: Any) -> Any:
    # A "cpu" that a library passes may only be its default, so the patch's `device=` overrides it.
    return _device() or device if device is None or str(device) == "cpu" else device


def _calls(ours: Callable[[], Any], original: Any) -> Any:
    @functools.wraps(original)
    def through_overwire(*args: Any, **kwargs: Any) -> Any:
        call = _Call(original, args, kwargs)
        if forked():
            return (ours() if is_compressed(call.subject) else original)(*args, **kwargs)
        _hook()
        if call.left_to_safetensors():
            return original(*args, **kwargs)
        device = _device()
        if device is not None and call.takes_device and _where(call.device) != call.device:
            call.given["device"] = device
            return ours()(**call.given)
        return ours()(*args, **kwargs)

    through_overwire.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return through_overwire


def _writes(original: Any) -> Any:
    @functools.wraps(original)
    def serialize_file(tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
        if forked() or not any(patch.compress for patch in _patches):
            await_path(os.fsdecode(filename))
            original(tensor_dict, filename, metadata)
            return
        replacements = {
            name: _bytes.TensorSpec(dtype=spec.dtype, shape=spec.shape, data_ptr=spec.data_ptr, data_len=spec.data_len)
            for name, spec in tensor_dict.items()
        }
        _bytes.write(replacements, filename, metadata, compress=True)

    return serialize_file


def _puts_in_order(original: Any) -> Any:
    signature = inspect.signature(original)
    first = next(iter(signature.parameters))

    @functools.wraps(original)
    def save_in_order(*args: Any, **kwargs: Any) -> Any:
        # The original writes memory as it is, without regard to strides or lazy conjugation.
        tensors = args[0] if args else kwargs.get(first)
        if isinstance(tensors, Mapping) and not forked() and any(patch.compress for patch in _patches):
            ordered = {name: _in_order(value) for name, value in tensors.items()}
            if args:
                args = (ordered, *args[1:])
            else:
                kwargs[first] = ordered
        return original(*args, **kwargs)

    save_in_order.__signature__ = signature  # type: ignore[attr-defined]
    return save_in_order


def _in_order(value: Any) -> Any:
    """Resolves a torch tensor's lazy conjugation and negation, and converts a numpy array to C order. Returns other
    objects, and tensors that safetensors' torch functions refuse, unchanged."""
    if hasattr(value, "is_conj"):
        is_lazy = (value.is_conj() or value.is_neg()) and value.is_contiguous()
        return value.resolve_conj().resolve_neg() if is_lazy else value
    numpy = sys.modules.get("numpy")
    return numpy.asarray(value, order="C") if numpy and isinstance(value, numpy.ndarray) else value


# The names of the original's parameter for the file or for its bytes.
_SUBJECTS = ("filename", "f", "data", "bytes")

_signature = functools.lru_cache(maxsize=64)(inspect.signature)


class _Call:
    # The arguments of a call to one of the original functions.

    def __init__(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given: dict[str, Any] = {}
        self.takes_device = False
        with contextlib.suppress(TypeError, ValueError):  # the original reports wrong arguments
            signature = _signature(original)
            self.given = dict(signature.bind(*args, **kwargs).arguments)
            self.takes_device = "device" in signature.parameters
        self.subject = next((self.given[name] for name in _SUBJECTS if name in self.given), None)
        self.device = self.given.get("device", "cpu")
        self.torch = self.given.get("framework") in ("pt", "torch", "pytorch")

    def left_to_safetensors(self) -> bool:
        """Returns whether the original should read the file. On the CPU it maps plain files, which is as fast. overwire
        reads, and refuses, files that violate a rule of the format, because the original would accept them."""
        where = "cpu" if self.device is None else str(self.device)
        if where != "cpu" or _device() is not None:
            return False
        plain: Any = self.subject
        try:
            if isinstance(plain, (str, os.PathLike)):
                return not KeptFile.open_file(plain).compressed
            if is_compressed(plain) is not False:
                return False
            with overwire.safe_open(plain, "bytes"):
                return True
        except (overwire.OverwireError, OSError, TypeError, ValueError):
            return False


def behind(found: Any) -> Any:
    """Returns the original of a replacement. Returns other objects unchanged."""
    return next((original for original, replacement in _swapped.values() if replacement is found), found)


def _namespaces() -> list[tuple[str, dict[str, Any]]]:
    # Returns all modules except this one. The copy is needed because other threads may import modules.
    namespaces = [(name, getattr(module, "__dict__", None)) for name, module in list(sys.modules.items())]
    return [(name, names) for name, names in namespaces if type(names) is dict and names is not globals()]


def _rebind(swap: dict[int, tuple[Any, Any]], tops: tuple[str, ...] = ()) -> None:
    # A module with `from safetensors.torch import load_file` has its own reference.
    for module_name, names in _namespaces():
        top = module_name.partition(".")[0]
        if top not in tops if tops else top in _OTHERS:
            continue
        if not tops:
            _looked[module_name] = (id(names), len(names))
        if not swap.keys().isdisjoint(map(id, tuple(names.values()))):
            _put(swap, names, names.copy())


def _put(swap: dict[int, tuple[Any, Any]], names: dict[str, Any], chosen: Iterable[str]) -> None:
    for name in chosen:
        value = names.get(name)
        pair = swap.get(id(value))
        if pair is not None and pair[0] is value:
            names[name] = pair[1]
            _bound.append((names, name))


def _unbind(swap: dict[int, tuple[Any, Any]]) -> None:
    # Restores the names that were replaced, also in modules that were imported or changed since then.
    for namespace, name in _bound.copy():
        _put(swap, namespace, (name,))
    for module_name, names in _namespaces():
        if _looked.get(module_name) != (id(names), len(names)) and module_name.partition(".")[0] not in _OTHERS:
            _put(swap, names, names.copy())
    _bound.clear()
    _looked.clear()


def _readers() -> dict[int, tuple[Any, Any]]:
    # Returns the originals by id, each with its replacement.
    try:
        import safetensors
    except ImportError as error:
        text = "overwire: patch_safetensors: the package safetensors is not installed"
        raise overwire.MissingPackageError(text) from error
    swap = {}
    for module in _READERS:
        target = safetensors if module == "safetensors" else _module(module)
        if target is not None:
            swap.update(_readers_of(module, target))
    return swap


def _readers_of(module: str, held: Any) -> dict[int, tuple[Any, Any]]:
    swap = {}
    for name in (*_READERS[module], *_WRITERS.get(module, ())):
        original = getattr(held, name, None)
        # an older version lacks some names, and imports others from safetensors
        if original is not None and behind(original) is original:
            swap[id(original)] = (original, _stand_in(module, name, original))
    return swap


def _hook(readers: dict[int, tuple[Any, Any]] | None = None) -> None:
    # Libraries and parts of them may be imported after the patch, so this function is called after imports and whenever
    # a file is opened. readers: safetensors' functions, which the first patch also replaces.
    if readers is None and all(_present(library) == _seen.get(library, 0) for library in _LIBRARIES):
        return
    with _lock:
        swap = dict(readers or {})
        _swapped.update(swap)
        for library in _LIBRARIES:
            there = _present(library)
            if there == _seen.get(library, 0) or not _patches:
                continue
            _seen[library] = there
            try:
                swap.update(_hooked(import_module(f"overwire.integrations.{library}")))
            except Exception as error:  # an unknown version, or a change by another tool
                text = "overwire: patch_safetensors: %s could not be hooked, so it reads tensor by tensor: %r"
                log.warning(text, library, error)
        if swap:
            _swapped.update(swap)
            _rebind(swap, () if readers else _LIBRARIES)


def _replace_readers(name: str, module: Any) -> None:
    # Replaces the readers in a safetensors module that was imported after the patch.
    with _lock:
        if _patches:
            swap = _readers_of(name, module)
            _swapped.update(swap)
            _put(swap, module.__dict__, list(module.__dict__))


def _hooked(library: Any) -> dict[int, tuple[Any, Any]]:
    # Installs all hooks of a library in its classes, or none. Returns the hooks that replace names in modules, by id.
    swap: dict[int, tuple[Any, Any]] = {}
    with contextlib.ExitStack() as stack:
        for original, replacement in library.pair_replacements(_found, _LAZY):
            if not isinstance(original, tuple):
                if id(original) not in _swapped:
                    swap[id(original)] = (original, replacement)
            elif (id(original[0]), original[1]) not in _members:
                owner, name = original
                _replace(owner, name, replacement)
                stack.enter_context(after_error(_restore, (id(owner), name)))
    return swap


def _present(library: str) -> int:
    return sum(module in sys.modules for module in _WATCHED[library])


def _replace(owner: Any, name: str, ours: classmethod[Any, Any, Any]) -> None:
    key = (id(owner), name)
    original = inspect.getattr_static(owner, name)

    @functools.wraps(ours.__func__)
    def member(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Another tool may have wrapped this function, and may call it after the patch has ended.
        current = _members.get(key)
        choice = ours if current is not None and current[3] is put else original
        return choice.__get__(None, cls)(*args, **kwargs)

    put = classmethod(member)
    setattr(owner, name, put)
    _members[key] = (owner, name, original, put)


def _restore(key: tuple[int, str]) -> None:
    owner, name, original, put = _members.pop(key)
    if inspect.getattr_static(owner, name, None) is put:  # another tool's wrapper stays
        setattr(owner, name, original)


def _look_at_import(module: ModuleType) -> None:
    # Runs the hooks when a module that they use was imported, and replaces readers in safetensors' own modules.
    name = module.__name__
    if name in _READERS:
        _replace_readers(name, module)
        return
    for library, modules in _WATCHED.items():
        if name in modules:
            _seen.pop(library, None)  # `_hook` may have run during the import
    _hook()


_imports = AfterImport({*_READERS, *itertools.chain(*_WATCHED.values())}, _look_at_import)


def _found(module: str, name: str) -> Any:
    return behind(getattr(sys.modules.get(module), name, None))


_LAZY = Lazy(
    _lazy.Slice, _lazy.ahead, _lazy.passed, _lazy.slice_plan, is_compressed, _files.safe_open, _lazy.ready,
    lambda: any(patch.offload for patch in _patches),
)  # fmt: skip


def _module(name: str) -> Any:
    # Returns a module of safetensors if it or its framework is loaded. `_imports` handles later imports.
    if name in sys.modules or name.rpartition(".")[2] in sys.modules:
        with contextlib.suppress(ImportError):
            return import_module(name)
    return None


def _undo() -> None:
    swap = {id(replacement): (replacement, original) for original, replacement in _swapped.values()}
    with contextlib.suppress(ValueError):  # a program may have replaced the list
        sys.meta_path.remove(_imports)
    _unbind(swap)
    for key in list(_members):
        _restore(key)
    _swapped.clear()
    _seen.clear()
    KeptFile.forget_last()


class SafetensorsPatch:
    """The result of `patch_safetensors`. It is active until `undo`, or until the end of its
    `with` block."""

    __slots__ = ("_on", "compress", "device", "offload")

    def __init__(self, device: Any = None, compress: bool = False, offload: bool = False) -> None:
        self._on = False
        self.device = None if device is None else _files._device(device)
        self.compress: bool = bool(compress)
        self.offload: bool = bool(offload)
        with _lock:
            readers = None if _patches else _readers()
            if readers is not None:
                sys.meta_path.insert(0, _imports)
            _patches.append(self)
            self._on = True
            with after_error(self.undo):
                _hook(readers)

    def __repr__(self) -> str:
        state = "active" if self._on else "ended"
        return f"<overwire.SafetensorsPatch {state}, device={self.device!r}, compress={self.compress}>"

    def undo(self) -> None:
        """Ends the patch. The last active patch restores everything. A second call does nothing."""
        with _lock:
            if not self._on:
                return
            self._on = False
            _patches.remove(self)
            if not _patches:
                _undo()

    def __enter__(self) -> SafetensorsPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch_safetensors(*, device: Any = None, compress: bool = False, offload: bool = False) -> SafetensorsPatch:
    """Makes every library in this process that uses the package safetensors read through
    overwire. The libraries can then also read compressed files.

        with overwire.patch_safetensors():
            model = AutoModel.from_pretrained(folder, device_map="cuda")

    The patch takes effect immediately, in all threads. It replaces `safe_open`, `deserialize`, `load_file`, `load` and
    `load_model` of safetensors' modules, in all modules that have imported them or import them later. transformers,
    diffusers, accelerate and peft need no other changes, and file names stay the same. transformers and diffusers load
    models in one pass, each tensor directly to its device in `device_map`.

    device: the device for tensors if a library requests none or the CPU ("cuda", "cuda:1", a
        torch.device). transformers, diffusers and accelerate always follow their
        `device_map`. None: the library's device; plain files on the CPU are then left to safetensors, which maps them.
        With "cpu", overwire reads these files as well.
    compress: whether files that libraries write with safetensors (`save_file`,
        `save_pretrained`) are compressed. Reading such files needs overwire.
        torch.save files (a Trainer's optimizer.pt) are not compressed. The bytes that `save` and
        `serialize` return stay plain, because programs that store them parse their header.
    offload: whether weights that accelerate keeps on the CPU for a GPU (a `device_map` with
        both "cpu" and a GPU, `cpu_offload`) are compressed in memory and streamed as by
        `offload`, as long as the model exists. The ring takes device memory for two of the
        largest blocks, and twice the stored bytes of one.

    Forked children, such as DataLoader workers, cannot use the engine. There, safetensors' own functions read and write
    plain files, including files opened before the fork. Compressed files are read without the engine, which is slow.

    Returns a context manager with `undo`. Patches may be nested and may overlap. The latest
    `device` applies; `compress` and `offload` apply if any patch sets them. When the last patch ends, the originals are
    restored, except where another tool has wrapped a replacement. If a library's classes are not as expected, a warning
    is logged, and the library reads its files tensor by tensor, as without hooks.

    Raises MissingPackageError if safetensors is not installed, and SafetensorError for an invalid device.
    """
    from overwire._compat_api import check_switches

    check_switches(compress=compress, offload=offload)
    return SafetensorsPatch(device, compress, offload)


def patch_from_environment() -> None:
    """Patches safetensors for the rest of the process if OVERWIRE_PATCH is set. The import of overwire
    calls this. Never raises."""
    if os.environ["OVERWIRE_PATCH"].strip().lower() not in ("1", "true", "yes", "on", "y", "t"):
        return
    try:
        patch_safetensors()
    except Exception as error:  # the import of overwire must not fail
        log.warning("overwire: OVERWIRE_PATCH: safetensors is not patched: %s", error)
