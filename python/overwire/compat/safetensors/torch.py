"""Implements safetensors.torch: saves and loads dicts of torch tensors, and modules."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

import overwire
from overwire._compat_api import check_memory, torch_dtype
from overwire.compat.safetensors import TensorSpec, deserialize, safe_open, serialize, serialize_file
from overwire.compat.safetensors._bytes import bytes_file
from overwire.compat.safetensors._errors import not_contiguous, reading

__all__ = [
    "TensorSpec", "deserialize", "load", "load_file", "load_model", "safe_open", "save", "save_file", "save_model",
    "serialize", "serialize_file", "storage_ptr", "storage_size",
]  # fmt: skip

_HELP = "https://huggingface.co/docs/safetensors/torch_shared_tensors"


def load_file(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> dict[str, torch.Tensor]:
    """Returns the tensors of a file, plain or compressed, on a device.

    backend: "mmap" or "pread". Raises FileNotFoundError, SafetensorError.
    """
    with safe_open(filename, framework="pt", device=device, backend=backend) as f:
        return f.get_tensors()


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Returns the tensors in a file's bytes, plain or compressed, on the CPU."""
    source = bytes_file(data)
    with reading("<bytes>", "Error while deserializing"):
        return overwire.load_file(source, framework="pt")


def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes a plain safetensors file atomically.

    Raises ValueError for tensors that are not dense, RuntimeError if two tensors share memory (see `save_model`), and
    SafetensorError.
    """
    keep: list[Any] = []
    serialize_file(_flatten_as_ptr(tensors, keep), filename, metadata=metadata)


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Returns a plain safetensors file as bytes. Raises the errors of `save_file`."""
    keep: list[Any] = []
    return serialize(_flatten_as_ptr(tensors, keep), metadata=metadata)


def save_model(
    model: torch.nn.Module, filename: Any, metadata: dict[str, str] | None = None, force_contiguous: bool = True
) -> None:
    """Writes a module's state dict. If tensors share memory, only one of them is saved. The metadata
    maps each dropped name to the saved one, unless it already has an entry for that name.

    force_contiguous: whether to copy tensors that are not dense instead of refusing them.
    """
    state = model.state_dict()
    for kept_name, duplicates in _remove_duplicate_names(state).items():
        for name in duplicates:
            metadata = {} if metadata is None else metadata
            metadata.setdefault(name, kept_name)
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(state, filename, metadata=metadata)
    except ValueError as error:
        hint = " Or use save_model(..., force_contiguous=True), read the docs for potential caveats."
        raise ValueError(f"{error}{hint}") from error


def load_model(
    model: torch.nn.Module, filename: Any, strict: bool = True, device: Any = "cpu", *, backend: str = "mmap"
) -> tuple[set[str], list[str]]:
    """Loads a file into a module, with the module's `load_state_dict`.

    strict: whether to raise RuntimeError if names are missing or unexpected; all other tensors are loaded before.
    Returns (missing, unexpected). A tensor that shares memory with a loaded tensor is in neither of them.
    """
    state = load_file(filename, device=device, backend=backend)
    groups = _remove_duplicate_names(model.state_dict(), preferred_names=list(state))
    absent, surplus = model.load_state_dict(state, strict=False)
    missing = set(absent)
    for name in [name for duplicates in groups.values() for name in duplicates]:
        if name in missing:
            missing.remove(name)
        else:
            surplus.append(name)
    if strict and (missing or surplus):
        text = f"Error(s) in loading state_dict for {type(model).__name__}:"
        for what, names in (("Missing", missing), ("Unexpected", surplus)):
            if names:
                listing = ", ".join(f'"{name}"' for name in sorted(names))
                text += f"\n    {what} key(s) in state_dict: {listing}"
        raise RuntimeError(text)
    return missing, surplus


def storage_ptr(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage, or 0 on the meta device."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """Returns the size of a tensor's storage in bytes."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return tensor.nelement() * _SIZE[tensor.dtype]


def _end_ptr(tensor: torch.Tensor) -> int:
    if tensor.nelement() == 0:
        return tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * _SIZE[tensor.dtype]


def _filter_shared_not_shared(tensors: list[set[str]], state_dict: dict[str, torch.Tensor]) -> list[set[str]]:
    """Splits groups of names that share a storage, if their bytes do not overlap."""
    groups: list[set[str]] = []
    for group in tensors:
        end = None
        for start, stop, name in sorted((state_dict[n].data_ptr(), _end_ptr(state_dict[n]), n) for n in group):
            if end is None or start >= end:
                groups.append({name})
            else:
                groups[-1].add(name)
            end = stop  # the end of the last tensor, as in the original, because the names in files depend on this
    return groups


def _find_shared_tensors(state_dict: dict[str, torch.Tensor]) -> list[set[str]]:
    """Groups names of tensors that share memory."""
    storages: dict[Any, set[str]] = defaultdict(set)
    for name, tensor in state_dict.items():
        if tensor.device.type != "meta" and storage_ptr(tensor) != 0 and storage_size(tensor) != 0:
            storages[(tensor.device, storage_ptr(tensor), storage_size(tensor))].add(name)
    return _filter_shared_not_shared(list(storages.values()), state_dict)


def _is_complete(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor covers its storage."""
    return tensor.data_ptr() == storage_ptr(tensor) and tensor.nelement() * _SIZE[tensor.dtype] == storage_size(tensor)


def _remove_duplicate_names(
    state_dict: dict[str, torch.Tensor],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """For each group of tensors that share memory, returns the name to keep and the names to drop.

    The name to keep belongs to a tensor that covers the whole storage. It is a preferred name if possible, otherwise a
    name that is not in `discard_names`, and the alphabetically first of several such names.
    """
    preference, discard = set(preferred_names or ()), set(discard_names or ())
    drop: dict[str, list[str]] = defaultdict(list)
    for group in _find_shared_tensors(state_dict):
        complete = {name for name in group if _is_complete(state_dict[name])}
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no suitable name to keep"
                f" for saving amongst: {group}. None is covering the entire storage.Refusing to save/load the model"
                f" since you could be storing much more memory than needed. Please refer to {_HELP} for more"
                " information. Or open an issue."
            )
        keep = min(complete & preference or complete - discard or complete)
        for name in sorted(group - {keep}):
            drop[keep].append(name)
    return drop


_NAMES = "F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ C64 U64 U32 U16"
_TYPES: dict[str, torch.dtype] = {name: kind for name in _NAMES.split() if (kind := torch_dtype(name)) is not None}
_float8_e4m3fn = getattr(torch, "float8_e4m3fn", None)
_float8_e4m3fnuz = getattr(torch, "float8_e4m3fnuz", None)
_float8_e5m2 = getattr(torch, "float8_e5m2", None)
_float8_e5m2fnuz = getattr(torch, "float8_e5m2fnuz", None)
_float8_e8m0 = getattr(torch, "float8_e8m0fnu", None)
_float4_e2m1_x2 = getattr(torch, "float4_e2m1fn_x2", None)
_KINDS = (*_TYPES.values(), _float8_e8m0, _float4_e2m1_x2)
_SIZE: dict[Any, int] = {kind: kind.itemsize for kind in _KINDS if kind is not None}


def _getdtype(dtype_str: str) -> torch.dtype:
    return _TYPES[dtype_str]


def _view2torch(safeview: Any) -> dict[str, torch.Tensor]:
    """Makes tensors over the bytes that `deserialize` returned."""
    result = {}
    for name, view in safeview:
        kind = _getdtype(view["dtype"])
        if len(view["data"]) == 0:
            result[name] = torch.empty(view["shape"], dtype=kind)
        else:
            result[name] = torch.frombuffer(view["data"], dtype=kind).reshape(view["shape"])
    return result


def _to_ndarray(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Returns a tensor's bytes as a numpy array, and an object that keeps the bytes alive."""
    import numpy as np

    tensor = tensor.to("cpu")
    size = tensor.nelement() * _SIZE[tensor.dtype]
    if (pointer := tensor.data_ptr()) == 0:
        return np.empty(0, np.uint8), tensor
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_ubyte)), (size,)), tensor


def _evaluate_tensors_for_save(tensors: dict[str, torch.Tensor]) -> None:
    """Raises the original's error for tensors that it does not save."""
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}")
    if sparse := [name for name, tensor in tensors.items() if tensor.layout != torch.strided]:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support."
            " You can make it a dense tensor before saving with `.to_dense()` but be aware this might"
            " make a much larger file than needed."
        )
    if failing := [names for names in _find_shared_tensors(tensors) if len(names) > 1]:
        pad = "\n" + " " * 12
        raise RuntimeError(
            f"{pad}Some tensors share memory, this will lead to duplicate memory on disk and potential differences when"
            f" loading them again: {failing}.{pad}A potential way to correctly save your model is to use `save_model`."
            f"{pad}More information at {_HELP}{pad}"
        )


def _flatten_as_ptr(tensors: dict[str, torch.Tensor], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    """Converts tensors to specs. Appends objects that keep the tensors' memory alive to `keep_alive_buffer`."""
    _evaluate_tensors_for_save(tensors)
    flat = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise not_contiguous(name)
        size = tensor.nelement() * _SIZE[tensor.dtype]
        dense = tensor.detach().to("cpu")
        check_memory(tensor, f"overwire: save_file: {name!r}", name)
        if dense.is_conj() or dense.is_neg():
            dense = dense.resolve_conj().resolve_neg()
        keep_alive_buffer.append(dense)
        dtype, pointer = str(tensor.dtype).split(".")[-1], dense.data_ptr() if size else 0
        flat[name] = TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=pointer, data_len=size)
    return flat
