"""Implements nyacomp's functions that save and load bundles."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import overwire
from overwire import load_compressed_pickle as load_object  # import it now, not at the first call
from overwire._compat_api import Manifest, regular, save_listed

from . import _nyacomp, manifests, partition, settings
from .merging import split_tensors, tensor_size

PathLike = Union[str, "os.PathLike[str]"]
DEFAULT = Path("./boneless_model.pth")
DEFAULT_META = "data/nya/meta.csv"


def compress(model: Any, path: PathLike = DEFAULT, *, empty: bool = False) -> float:
    """Saves a module, a pipeline or a state dict. Returns stored / original bytes.

    Writes the pickle to `path`, its tensors to nya/, and meta.csv, metadata.pkl and
    merged_tensors.csv to both folders. UNCOMPRESSED stores plain bytes.
    empty: whether to remove the parameters from the model afterwards, as nyacomp does.
    """
    ratio = _save_listed(model, path, True)
    if empty:
        import torch

        for param in _parameters(model):
            param.data = torch.empty(0, dtype=param.dtype)
    return ratio


def compress_pickle(obj: Any, path: PathLike = DEFAULT, algo: int = 0) -> float:
    """Saves any object, like `compress`. In nyacomp, `algo` (0, 1 or 2) selects one of nvCOMP's settings; here it has
    no effect."""
    settings.check_algo(algo)
    return _save_listed(obj, path, False)


def _save_listed(obj: Any, path: PathLike, is_model: bool) -> float:
    # An overwire bundle has one tensor file, the container. The manifest lists it as one tensor of bytes.
    def write_manifests(target: str, container: str, report: overwire.Report, _: Any) -> None:
        folder, size = Path(path).parent, report.bytes_out
        name = os.path.basename(container) if "\n" in container else container
        if settings.host():
            name = manifests.host_name(folder / manifests.FOLDER / os.path.basename(container))
        row = dict(filename=name, shape=[size], dtype="uint8", decompressed_size=size, compressed_size=size)
        manifests.write(folder, [row], [[0]], ",".join(map(str, range(report.tensors))))

    return save_listed(obj, path, not settings.flag("UNCOMPRESSED"), is_model, write_manifests)


def _parameters(model: Any) -> list[Any]:
    import torch

    if isinstance(model, torch.nn.Module):
        return list(model.parameters())
    if isinstance(model, Mapping):
        return [value for value in model.values() if isinstance(value, torch.Tensor)]
    return get_pipeline_params(model)


def get_pipeline_params(pipeline: Any) -> list[Any]:
    """Returns the parameters of all modules that a pipeline's `config` names, in that order."""
    import torch

    params = []
    attributes = getattr(pipeline, "__dict__", {})
    for name in pipeline.config:
        # diffusers warns if getattr is called with a key that is not a component.
        part = attributes.get(name) or (getattr(pipeline, name, None) if hasattr(type(pipeline), name) else None)
        if isinstance(part, torch.nn.Module) and not name.startswith("_"):
            params += list(part.parameters())
    return params


def tensor_bytes(tensor: Any) -> bytes:
    """Returns a copy of a tensor's elements as bytes, in row-major order."""
    from overwire._compat_api import check_memory  # imports torch

    check_memory(tensor, "overwire: tensor_bytes")
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # ctypes.string_at takes a 32-bit size before Python 3.14.
    return (ctypes.c_char * tensor_size(dense)).from_address(dense.data_ptr()).raw if dense.numel() else b""


def compress_parameter(param: Any, path: PathLike, algo: int = 0) -> tuple[dict[str, Any], int, int]:
    """Writes one tensor to `path` (".gz"). If plain bytes are smaller, UNCOMPRESSED is set, or containers lack the
    tensor's dtype, writes plain bytes to the same name with ".raw" instead. An existing file is replaced regardless of
    RECOMPRESS. The tensor does not change.

    Returns the dict for `to_csv`, the tensor's bytes, and the file's bytes.
    """
    settings.check_algo(algo)
    target, raw = Path(path), Path(path).with_suffix(".raw")
    tensor = param.detach()
    size = stored_size = tensor_size(tensor)
    if size > 1 and not settings.flag("UNCOMPRESSED"):
        with contextlib.suppress(overwire.NotSupportedError):
            stored_size = _nyacomp.write_tensor(tensor, target)
    is_smaller = stored_size < size
    if not is_smaller:
        stored_size = size
        manifests.write_file(raw, tensor_bytes(tensor))
    (raw if is_smaller else target).unlink(missing_ok=True)
    filename, dtype = manifests.host_name(target if is_smaller else raw), str(tensor.dtype).removeprefix("torch.")
    meta = {"filename": filename, "shape": list(tensor.shape), "dtype": dtype}
    return {**meta, "decompressed_size": size, "compressed_size": stored_size}, size, stored_size


#: The load that the import of this package has started, or None.
decompressor: _nyacomp.AsyncDecompressor | None = None


def start_preload() -> None:
    """Starts the preload when this package is imported. Does nothing if PRELOAD_PATH is not set and no file is at its
    default path."""
    global decompressor
    if any(map(settings.flag, ("OVERWIRE_NO_PRELOAD", "NO_PRELOAD", "LOAD_UNCOMPRESSED"))):
        return
    path = settings.text("PRELOAD_PATH")
    if path.endswith(".csv"):
        # Importing overwire has started the preload, and get() attaches to it.
        decompressor = _nyacomp.AsyncDecompressor(path, start=False)
    elif not path and os.path.exists(DEFAULT_META):
        start = False
        with contextlib.suppress(overwire.OverwireError):  # get() raises the same error when it is called
            Manifest.read_csv(os.path.abspath(DEFAULT_META)).refuse_urls()
            start = True
        decompressor = _nyacomp.AsyncDecompressor(DEFAULT_META, start=start)


def load_compressed(path: PathLike = DEFAULT) -> Any:
    """Loads a file that `compress` or nyacomp itself saved, and trusts it. Uses the preload of its bundle."""
    return load_compressed_pickle(path)


def load_compressed_pickle(path: PathLike = DEFAULT) -> Any:
    """Loads a file that `compress_pickle` or nyacomp itself saved, and trusts it."""
    try:
        return load_object(path, trust=True, tensors=_remote(path))
    except (overwire.NotFoundError, overwire.FormatError):  # FormatError means that torch.save wrote the pickle
        if not os.path.exists(path) or manifests.find(path, manifests.MERGE_INFO) is None or not _foreign(path):
            raise
    tensors = split_tensors(_stored(path, keep=False), manifests.read_merge_info(path))
    with open(path, "rb", opener=regular) as file:
        if file.read(2) == b"PK":
            return _filled(path, tensors)
        file.seek(0)
        return _References(file, tensors, os.fspath(path)).load()


def _listed(path: PathLike) -> list[Any] | None:
    """Returns the files in the manifest of a bundle, or in the one at PRELOAD_PATH, or None without a manifest."""
    meta = manifests.find(path, manifests.META) or settings.text("PRELOAD_PATH")
    return manifests.read_csv(meta).rows if meta else None


def _remote(path: PathLike) -> str | None:
    """Returns the URL of a bundle's container if DOWNLOAD is set, otherwise None."""
    rows = _listed(path) or [] if settings.flag("DOWNLOAD") else []
    urls = [row.filename for row in rows if "://" in row.filename and row.filename.endswith(".safetensors")]
    return urls[0] if len(urls) == len(rows) == 1 else None


def _foreign(path: PathLike) -> bool:
    """Returns whether the manifest lists nyacomp's files instead of an overwire container."""
    rows = _listed(path)
    return rows is not None and not any(row.filename.endswith(".safetensors") for row in rows)


class _References(pickle.Unpickler):
    # Reads nyacomp's pickles, in which persistent ids are positions of tensors.

    def __init__(self, file: Any, tensors: list[Any], path: str) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._path = path

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int or not 0 <= pid < len(self._tensors):
            text = f"overwire: unpickle {self._path}: it refers to tensor {pid!r} of {len(self._tensors)}"
            raise overwire.FormatError(text, source=self._path)
        return self._tensors[pid]


def _filled(path: PathLike, tensors: list[Any]) -> Any:
    """Puts tensors into a model from which nyacomp has removed the parameters."""
    import torch

    model = torch.load(path, map_location="cpu", weights_only=False)
    empty = [param for param in _parameters(model) if param.shape == (0,)]
    if len(empty) != len(tensors):
        text = f"overwire: load {os.fspath(path)}: it has {len(empty)} empty parameters for {len(tensors)} tensors"
        raise overwire.FormatError(text, source=os.fspath(path))
    for param, tensor in zip(empty, tensors, strict=True):
        param.data = tensor
    return model


def get_args(path: PathLike) -> tuple[list[_nyacomp.CompressedFile], list[list[int]]]:
    """Returns the arguments of `batch_decompress` for the bundle at `path`, from its metadata.pkl. The files are
    partitioned again if the stored bins are for a different number of threads, or if REDO_PARTITION is set."""
    rows, bins = manifests.read_metadata(path)
    meta = [row for row in rows if row]
    folder = Path(path).absolute().parent
    files = []
    for row in meta:
        name = row["filename"]
        beside = folder / manifests.FOLDER / os.path.basename(name)
        if "://" not in name and beside.exists():
            name = str(beside)
        files.append(
            _nyacomp.CompressedFile(name, row["shape"], row["dtype"], row["decompressed_size"], row["compressed_size"])
        )
    if len(bins) != settings.num_threads() or settings.flag("REDO_PARTITION"):
        bins = partition.massage([row["compressed_size"] for row in meta], settings.num_threads())
    return files, bins


def get_tensors(path: PathLike) -> list[Any]:
    """Returns the stored (merged) tensors of the bundle at `path`. They come from the preload if it has loaded this
    bundle. Otherwise they are read now. The files are listed in the bundle's meta.csv (or metadata.pkl if PYTHON_ARGS
    is set), or at PRELOAD_PATH if there is no meta.csv."""
    return _stored(path, keep=True)


def _stored(path: PathLike, keep: bool) -> list[Any]:
    # keep: whether the preload also keeps the tensors that this function returns.
    meta = manifests.find(path, manifests.META)
    if decompressor is not None and (meta is None or _same(decompressor.path, path)):
        return decompressor.get() if keep else decompressor.take()
    if settings.flag("PYTHON_ARGS"):
        return _nyacomp.batch_decompress(*get_args(path))
    return _nyacomp.decompress_from_meta(meta or settings.text("PRELOAD_PATH", DEFAULT_META))


def _same(csv: str, path: PathLike) -> bool:
    folder = Path(path).absolute().parent
    here = {os.path.realpath(folder / manifests.META), os.path.realpath(folder / manifests.FOLDER / manifests.META)}
    return os.path.realpath(csv) in here
