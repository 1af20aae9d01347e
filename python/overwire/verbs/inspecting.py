"""Implements inspect, verify, doctor, and convert for files that the engine reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast, overload

from .. import _verbs
from .._engine import program
from .._notebook import Facts
from ..bundles.manifest import uris_of
from ..counting import note
from ..errors import ArgumentError, OverwireError
from ..foreign.memory import read_components
from ..jobs import Job, heed, shown
from ..model.options import check_values, parse_size
from ..model.sourcelike import SourceLike
from ..model.sources import Opened, resolve, resolve_plain
from ..model.storage import storage
from ..model.storageoptions import StorageOptions
from ..paths import local
from ..progress import ProgressLike, spell_count, watch
from .results import Diagnosis, Inspection, Verification
from .save import notes_of
from .saving import Report

if TYPE_CHECKING:
    import torch

    from .._requests import ConvertRequest, VerifyRequest
    from .digest import Comparison


def _plain_uris_of(source: SourceLike, options: Mapping[str, object] | None, is_header: bool) -> Opened:
    opened = resolve_plain(source, is_header)
    if opened.keep is None:
        uris = [uri for path in opened.uris for uri in uris_of(path, options)]
        return Opened(uris, uris, None, opened.copies)
    return opened


def _with_components(opened: Opened, source: SourceLike) -> Opened:
    """Adds the parts of a pipeline that are files of other libraries."""
    if opened.keep is not None or not isinstance(source, (str, bytes, os.PathLike)):
        return opened
    files, has_others = read_components(local(source))
    if not files:
        return opened
    uris = [*(opened.uris if has_others else ()), *(one.uri for one in files)]
    names = [*(opened.names if has_others else ()), *(one.name for one in files)]
    return Opened(uris, names, files, {one.uri: one.original for one in files})


def _with_names(files: list[Any], opened: Opened) -> None:
    """Replaces the names of temporary plain files in a report by those of their sources."""
    names = dict(zip(opened.uris, opened.names, strict=True))
    for file in files:
        file["uri"] = names.get(file["uri"], file["uri"])


def _uris_of(source: SourceLike, options: Mapping[str, object] | None) -> tuple[list[str], Any]:
    uris, keep = resolve(source)
    if keep is None:
        uris = [uri for path in uris for uri in uris_of(path, options)]
    return uris, keep


class InspectionDict(Facts):
    """The class of an `Inspection` at run time: a dict that prints as one line, and in a notebook as tables. Its
    pickles and copies are plain dicts."""

    def __repr__(self) -> str:
        every = self["totals"]["all"]
        return (
            f"Inspection({spell_count(every['tensors'], 'tensor')} of {spell_count(len(self['sources']), 'file')}, "
            f"bytes={every['bytes']}, "
            f"stored={every['stored']}; a dict with the keys 'sources' and 'totals')"
        )

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        every = self["totals"]["all"]
        rows = [t for source in self["sources"] for t in source["tensors"]]
        lines: Iterator[tuple[Any, ...]]
        lines = ((s["uri"], s["format"], html.size(s["size"]), f"{len(s['tensors']):,}") for s in self["sources"])
        files = html.table("Files", ("file", "format", "size", "tensors"), lines, len(self["sources"]))
        totals = [(name, total) for name, total in self["totals"].items() if name != "all"]
        lines = ((name, f"{total['tensors']:,}", *_sizes_of(html, total)) for name, total in totals)
        dtypes = html.table("Dtypes", ("dtype", "tensors", "in memory", "stored", "ratio"), lines)
        largest = html.largest(rows, lambda t: int(t["bytes"]))
        lines = ((t["name"], t["dtype"], t["shape"], *_sizes_of(html, t), t["coding"]) for t in largest)
        title = f"{len(rows):,} tensor{'' if len(rows) == 1 else 's'}, the largest first"
        head = ("tensor", "dtype", "shape", "in memory", "stored", "ratio", "stored as")
        tensors = html.table(title, head, lines, len(rows), folded=True)
        facts = zip(("in memory", "stored", "ratio"), _sizes_of(html, every), strict=True)
        return html.block("Inspection", facts, files, dtypes, tensors)


def _sizes_of(html: Any, row: Mapping[str, Any]) -> tuple[str, str, str]:
    return html.size(row["bytes"]), html.size(row["stored"]), f"{row['ratio']:.3f}"


def inspect(source: str | os.PathLike[str], *, storage_options: StorageOptions | None = None) -> Inspection:
    """Lists the tensors of a model from its headers, without reading a tensor.

    source: a plain or compressed file, a folder, an index.json, a bundle's pickle or meta.csv, or a GGUF file.
    storage_options: as for `load_file`.

    Returns a dict, which prints as one line: "sources", each with uri, format ("safetensors", "overwire", "tensors" or
    "gguf"; for files of other libraries "torch", "numpy", "nemo", "dcp" or "shards"), size, metadata and "tensors"
    (name, dtype, shape, bytes, stored, ratio, coding, chunks), and "totals" over all of them. For files of other
    libraries, "stored" is as in a plain file with these tensors. Raises NotFoundError, FormatError, CorruptError.
    """
    opened = _plain_uris_of(local(source), storage_options, True)
    uris = opened.uris
    if len(uris) != 1 and not opened.copies:
        raise ArgumentError(f"overwire: inspect {shown(str(source))}: it lists {len(uris)} files: inspect each one")
    try:
        report = _verbs.inspect({"uris": uris, "storage": storage(storage_options, uris), "copies": opened.copies})
    except OverwireError as error:
        note("open", "", type(error).__name__)
        raise
    finally:
        heed(uris)
    _with_names(report["sources"], opened)
    return cast("Inspection", InspectionDict("Inspection", report))


@overload
def verify(
    source: SourceLike, *, original: bool = False, progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Verification: ...  # fmt: skip
@overload
def verify(
    source: SourceLike, *, tensors: Mapping[str, Any] | torch.nn.Module, progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Comparison: ...  # fmt: skip
def verify(
    source: SourceLike,
    *,
    tensors: Mapping[str, Any] | torch.nn.Module | None = None,
    original: bool = False,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Verification | Comparison:
    """Reads and decodes every byte, and compares the checksums of the stored bytes and the hash
    of every tensor. With tensors, compares a model in memory with the file.

    source: as for `inspect`, or a list of files.
    tensors: a running model: a torch module, or a dict of tensors, on the host or on GPUs. The digest of each tensor
        (see `digest`) is computed on the tensor's device, so no tensor is copied to the host. The digests are compared
        with those in the file (`save_file(digests=True)`). If the file has none, its tensors are decoded and every
        chunk's checksum is compared. The GPU that has the model's tensor decodes in batches of 256 MiB (a larger tensor
        by itself). For tensors on the host, or if the GPU lacks memory, the CPU decodes block by block.
    original: whether to also restore the safetensors file that was given to `convert`, in bounded memory and without
        writing it, and to compare its SHA-256. One core hashes it, at about 1.5 GB/s. Cannot be combined with tensors.
    storage_options: as for `load_file`.

    Returns a dict: ok (always True, because damage raises an error), tensors, bytes, stored, seconds, and "files". For
    each file, "checked" is "contents", or only "structure" for files without checksums: plain safetensors, GGUF, and
    files of other libraries except torch.save, .nemo and .npz. If a plain file was downloaded from the Hugging Face Hub
    (its cache, or a local folder with `.cache/huggingface`), or is an hf:// URI of a large file, the Hub's "sha256" is
    compared. With original, a file that can restore its plain file has "original": the plain file's "sha256", and
    whether this was "compared" (False if the file stores no hash, for example because the original came over a
    network). With tensors the dict is a `Comparison`: ok, and the names of tensors that "differ", are "missing" in the
    model, or are "surplus" there. Raises CorruptError with tensor, chunk and offset, FormatError, NotFoundError, and
    with tensors also the errors of `digest`. A tensor that differs raises no error.
    """
    check_values(original=original, storage_options=storage_options)
    if original and tensors is not None:
        raise ArgumentError("overwire: verify: original= cannot be used with tensors=")
    watcher = watch(progress, "verify")
    opened = _plain_uris_of(source, storage_options, False)
    if tensors is None:
        opened = _with_components(opened, source)
    uris = opened.uris
    request: VerifyRequest = {"uris": uris, "storage": storage(storage_options, uris), "original": bool(original)}
    request["copies"] = opened.copies
    if tensors is not None:
        from .digest import compare

        comparison = compare(tensors, {"uris": request["uris"], "storage": request["storage"]}, watcher)
        return cast("Comparison", Facts("Comparison", comparison))
    try:
        with Job(_verbs.verify(request), "verify", watcher) as job:
            verified = Facts("Verification", job.finish())
    finally:
        heed(uris)
    _with_names(verified["files"], opened)
    return cast("Verification", verified)


def rewrite(source: SourceLike, path: str | os.PathLike[str], options: Mapping[str, Any]) -> Report:
    """Implements `convert`, with all of its options, for files that the engine reads."""
    names = ("level", "compress", "sha256", "metadata", "storage_options")
    level, compress, sha256, metadata, storage_options = (options[name] for name in names)
    check_values(level=level, compress=compress, sha256=sha256, storage_options=storage_options)
    watcher, most = watch(options["progress"], "convert"), parse_size(options["max_shard_size"])
    reach = {name: value for name, value in (storage_options or {}).items() if not name.startswith("encryption_")}
    uris, keep = _uris_of(source, reach or None)
    target = local(path)
    if os.fsdecode(path).endswith("/") and not target.endswith("/"):
        target += "/"  # marks it as a folder
    spec: ConvertRequest = {"uris": uris, "path": target, "compress": bool(compress), "level": level, "shard": most}
    spec["no_sha256"], spec["storage"] = not sha256, storage(storage_options, [*uris, target], writes=True)
    if metadata is not None:
        spec["metadata"] = notes_of(metadata)
    try:
        with Job(_verbs.convert(spec), "rewrite", watcher) as job:
            report = job.finish()
    finally:
        heed(uris)
    del keep
    return Report.of(report)


def doctor(*, measure: bool = False) -> Diagnosis:
    """Reports on this machine: CPU, decoder, memory, versions, and the settings with their environment variables.

    "gpu" has the versions of NVIDIA's driver, and "devices", each with name, memory (bytes), compute capability, PCI
    link (0 if unknown) and the kernels that it would run. If no GPU can be used, "gpu" has the "reason".
    "gpudirect_storage" says whether GPUDirect Storage is "usable", and "why". The call loads the driver if there is
    one, but creates no context on a GPU.
    measure: whether to copy to each GPU for about 0.2 s and add "wire", in GB/s. This creates a context on each GPU. A
        process with such a context cannot use CUDA after a fork.

    Returns a dict. If something is missing or broken, the dict reports it; no error is raised.
    """
    check_values(measure=measure)
    return cast("Diagnosis", Facts("Diagnosis", _verbs.doctor({**program([]), "measure": measure})))
