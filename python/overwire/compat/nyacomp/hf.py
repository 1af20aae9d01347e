"""Compresses and loads checkpoints of Hugging Face's libraries, with each large tensor in a separate file.

For D/x.bin it writes D/nya/boneless_x.bin, a torch file with the state dict. In this file a large tensor is {"shape",
"dtype", "len", "len_compressed", "digest"}, its data are in D/nya/KEY.gz, and "meta" has the bins. The checkpoint
itself stays. Checkpoints in the same folder share the file of a key that they have in common. The file has the tensor
of the last checkpoint, and the digest shows which checkpoint that is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Union
from urllib.parse import quote

import overwire
from overwire._compat_api import regular
from overwire.stores import open_writer

from . import _nyacomp, partition, settings
from .merging import tensor_size

__all__ = [
    "compress_components", "compress_model", "compress_state_dict", "dry_load", "good_load", "stats",
    "toggle_diffusers", "toggle_patch", "toggle_transformers",
]  # fmt: skip

_PathLike = Union[str, "os.PathLike[str]"]


def compress_model(model: str | None = None) -> float:
    """Runs `compress_components` on all "*.bin" files of a diffusers model in the user's cache.
    model: "runwayml/..." or the name of its folder; None means all models. Returns stored / original bytes."""
    cache = Path("~/.cache/huggingface").expanduser()
    names = ["*"] if model is None else [model, "models--" + model.replace("/", "--")]
    folders = [
        folder for top in ("diffusers", "hub") for name in names for folder in (cache / top).glob(f"{name}/snapshots")
    ]
    return compress_components(path for folder in folders for path in sorted(folder.glob("**/*bin")))


def compress_components(components: Iterable[_PathLike]) -> float:
    """Runs `compress_state_dict` for several checkpoints, and skips files that this function has written.
    Returns stored / original bytes, or 1.0 if there are no checkpoints."""
    size = stored_size = 0
    for component in map(Path, components):
        if component.parent.name == "nya" or component.name.startswith("boneless"):
            continue
        plain, small = compress_state_dict(component)
        size, stored_size = size + plain, stored_size + small
    return stored_size / size if size else 1.0


def compress_state_dict(path: _PathLike, treshold: int = 16000) -> tuple[int, int]:
    """Compresses those tensors of a torch or safetensors checkpoint that have more than `treshold` bytes, into nya/ in
    the checkpoint's folder. Replaces the files of an earlier run, and the files of other checkpoints in the folder that
    have the same keys. `good_load` of those checkpoints then raises CorruptError, unless the tensors are equal.

    Returns the original and the stored bytes of all tensors. Raises NotSupportedError for a
    checkpoint with a key "meta".
    """
    import torch

    place = Path(path)
    state: dict[str, Any] = dict(_read_state(place))
    if "meta" in state:
        text = f"overwire: save {place}: it has a key 'meta', which nyacomp's layout uses for its bins"
        raise overwire.NotSupportedError(text, source=str(place))
    folder = place.parent / "nya"
    folder.mkdir(exist_ok=True)
    total = stored_size = 0
    sizes, keys = [], []
    for key, value in list(state.items()):
        if not isinstance(value, torch.Tensor):
            continue
        size = small = tensor_size(value)
        if size > treshold:
            file = _file(folder, key)
            digest = overwire.digest(value)
            small = _nyacomp.write_tensor(value, file, digest)
            if small < size:
                keys.append(key)
                sizes.append(small)
                state[key] = {
                    "shape": value.shape, "dtype": value.dtype, "len": size, "len_compressed": small, "digest": digest
                }
            else:
                small = size
                file.unlink()
        total, stored_size = total + size, stored_size + small
    bins = partition.massage(sizes, settings.num_threads())
    state["meta"] = [[keys[at] for at in part] for part in bins]
    with open_writer(str(_boneless(place).absolute())) as whole:
        torch.save(state, whole)
    return total, stored_size


def _read_state(path: Path) -> Mapping[str, Any]:
    import torch

    if path.suffix == ".safetensors":
        return overwire.load_file(path, framework="pt")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        text = f"overwire: open {path}: expected a state dict, got {type(state).__name__}"
        raise overwire.FormatError(text, source=str(path))
    return state


def _boneless(path: _PathLike) -> Path:
    return Path(path).parent / "nya" / f"boneless_{Path(path).name}"


def _file(folder: Path, key: str) -> Path:
    # Keys are usually dotted names. Quoting keeps the file of any other key inside the folder.
    return folder / f"{quote(key, safe=' ')}.gz"


def _read_boneless(boneless: Path) -> dict[str, Any]:
    """Reads a file of `compress_state_dict`. Raises FormatError if torch cannot read the file."""
    import torch

    try:  # for a path, torch would choose the reader by its extension
        with torch.serialization.safe_globals([torch.Size]), open(boneless, "rb", opener=regular) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
        if type(state) is not dict or not all(type(key) is str for key in state):
            raise ValueError("it is not a dict with names as keys")
        return state
    except FileNotFoundError as error:
        text = f"overwire: open {boneless}: not found: create it with compress_state_dict"
        raise overwire.NotFoundError(text, source=str(boneless)) from error
    except (overwire.OverwireError, PermissionError, MemoryError):
        raise
    except Exception as error:  # also OSError, because torch seeks to offsets that it reads from the file
        reason = str(error).partition("\n")[0]
        text = f"overwire: open {boneless}: compress_state_dict did not write this file: {reason:.200}"
        raise overwire.FormatError(text, source=str(boneless)) from error


def _is_row(row: dict[str, Any]) -> bool:
    import torch

    sizes = [row.get("len"), row["len_compressed"], *(row["shape"] if isinstance(row.get("shape"), tuple) else [None])]
    return all(type(size) is int and size >= 0 for size in sizes) and isinstance(row.get("dtype"), torch.dtype)


def _read_layout(path: _PathLike) -> tuple[dict[str, Any], list[str], list[_nyacomp.CompressedFile]]:
    """Returns the state dict without its bins, and the keys and files of its large tensors, the largest first."""
    boneless = _boneless(path)
    state = _read_boneless(boneless)
    state.pop("meta", None)
    keys = [key for key, value in state.items() if isinstance(value, dict) and "len_compressed" in value]
    keys.sort(key=lambda key: size if type(size := state[key].get("len")) is int else 0, reverse=True)
    files = []
    for key in keys:
        row = state[key]
        if not _is_row(row):
            text = f"overwire: open {boneless}: the sizes of {key!r:.200} are missing or invalid"
            raise overwire.FormatError(text, source=str(boneless), tensor=str(key))
        shape, dtype = list(row["shape"]), str(row["dtype"]).removeprefix("torch.")
        if math.prod(shape) * row["dtype"].itemsize != row["len"]:
            text = f"overwire: open {boneless}: the sizes of {key!r} do not match its shape"
            raise overwire.FormatError(text, source=str(boneless), tensor=key)
        place = str(_file(boneless.parent, key))
        files.append(
            _nyacomp.CompressedFile(place, shape, dtype, row["len"], row["len_compressed"], digest=row.get("digest"))
        )  # fmt: skip
    return state, keys, files


def dry_load(path: _PathLike) -> list[list[Any]]:
    """Lists the file names, shapes and dtypes that `good_load` would read."""
    _, _, files = _read_layout(path)
    return [[file.filename for file in files], [list(file.shape) for file in files], [file.dtype for file in files]]


def good_load(path: _PathLike) -> dict[str, Any]:
    """Returns the state dict of a checkpoint that `compress_state_dict` has compressed, with the
    same keys in the same order. `path` itself need not exist any more.

    Raises CorruptError if another checkpoint in the folder has replaced the file of a tensor."""
    state, keys, files = _read_layout(path)
    assignments = partition.massage([file.compressed_size for file in files], settings.num_threads())
    state.update(zip(keys, _nyacomp.batch_decompress(files, assignments), strict=True))
    return state


# By id: the modules that `toggle_patch` has patched, and their patches.
_toggled: dict[int, tuple[Any, list[_Toggle]]] = {}


def toggle_patch(module: Any) -> None:
    """Patches a module (diffusers' or transformers' modeling_utils). Its `load_state_dict`, and its `safe_open` if it
    has one, then load checkpoints that `compress_state_dict` has compressed, and read other checkpoints as before. A
    second call removes the patch, but leaves wrappers that another tool has put around it."""
    if id(module) in _toggled:
        for toggle in _toggled.pop(id(module))[1]:
            toggle.on = False
            if getattr(module, toggle.name, None) is toggle.either:
                setattr(module, toggle.name, toggle.original)
        return
    names: dict[str, Callable[..., Any]] = {"load_state_dict": _load_state_dict, "safe_open": _Opened}
    toggles = [
        _Toggle(name, getattr(module, name), replacement)
        for name, replacement in names.items()
        if getattr(module, name, None) is not None
    ]
    for toggle in toggles:
        setattr(module, toggle.name, toggle.either)
    _toggled[id(module)] = (module, toggles)


class _Toggle:
    # Calls our function for compressed checkpoints, and the original for all others.

    def __init__(self, name: str, original: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self.name, self.original, self.on = name, original, True

        @wraps(original, updated=())  # `original` may be a class
        def either(*args: Any, **kwargs: Any) -> Any:
            file = args[0] if args else kwargs.get("checkpoint_file", kwargs.get("filename"))
            is_compressed = self.on and isinstance(file, (str, os.PathLike)) and _fresh(Path(file))
            return (ours if is_compressed else original)(*args, **kwargs)

        self.either = either


def _load_state_dict(checkpoint_file: _PathLike, *args: Any, **kwargs: Any) -> dict[str, Any]:
    where = kwargs.get("map_location")
    state = _shapes(checkpoint_file) if where == "meta" else good_load(checkpoint_file)
    return {
        key: value.to("cpu" if where is None else where) if hasattr(value, "to") else value
        for key, value in state.items()
    }


def _shapes(path: _PathLike) -> dict[str, Any]:
    # Returns a state dict in which empty tensors replace the large ones.
    import torch

    state, keys, _ = _read_layout(path)
    state.update({key: torch.empty(state[key]["shape"], dtype=state[key]["dtype"], device="meta") for key in keys})
    return state


class _Opened:
    # safetensors' safe_open for a compressed checkpoint. It reads when the first tensor is requested.

    def __init__(self, filename: _PathLike, framework: str = "pt", device: Any = "cpu") -> None:
        self._path, self._device = filename, device
        self._state: dict[str, Any] | None = None

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self._state = None

    def metadata(self) -> dict[str, str] | None:
        return {"format": "pt"}

    def keys(self) -> list[str]:
        return list(_read_layout(self._path)[0])

    offset_keys = keys

    def get_tensor(self, name: str) -> Any:
        if self._state is None:
            self._state = good_load(self._path)
        if name not in self._state:
            raise overwire.TensorNotFoundError(f"overwire: load {os.fspath(self._path)}: no tensor {name!r}")
        return self._state[name].to(self._device)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.get_tensor(name))


class _Slice:
    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Any:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        # Examples: float8_e4m3fn becomes F8_E4M3, bfloat16 BF16, int64 I64, and bool BOOL.
        kind, rest = str(self._tensor.dtype).removeprefix("torch."), ""
        if kind.startswith("float8"):
            kind, rest = "float8", kind[6:].upper().removesuffix("FNU").removesuffix("FN")
        letters = kind.rstrip("0123456789")
        short = {"bool": "BOOL", "bfloat": "BF"}.get(letters, letters[0].upper())
        return short + kind[len(letters) :] + rest


def _fresh(path: Path) -> bool:
    # Returns whether nya/ is newer than the checkpoint, which may otherwise have other tensors. Tools such as cp -p and
    # rsync keep older modification times, so the status change times are compared as well.
    boneless = _boneless(path)
    try:
        container, now = boneless.stat(), path.stat()
        return container.st_mtime_ns >= now.st_mtime_ns and container.st_ctime_ns >= now.st_ctime_ns
    except FileNotFoundError:
        return boneless.exists()


def toggle_diffusers() -> None:
    """Runs `toggle_patch` for diffusers."""
    import diffusers.models.model_loading_utils as utils
    import diffusers.models.modeling_utils as modeling

    for module in (modeling, utils):
        toggle_patch(module)


def toggle_transformers() -> None:
    """Runs `toggle_patch` for transformers."""
    import transformers.modeling_utils as modeling

    toggle_patch(modeling)


def stats(times: Sequence[float]) -> str:
    """Formats mean, standard deviation and minimum in one line, rounded to 4 digits."""
    import statistics

    values = {"mean": statistics.mean(times), "stdev": statistics.stdev(times), "min": min(times)}
    return " ".join(f"{name}: {round(value, 4)}" for name, value in values.items())
