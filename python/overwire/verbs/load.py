"""load_file: whole tensors in a dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .. import _engine
from ..errors import ArgumentError
from ..frameworks.choose import check_device, frame_for
from ..model.opened import Model, many_objects, prepare
from ..model.options import StorageOptions
from ..model.plan import fit
from ..model.sources import SourceLike
from ..progress import ProgressLike, watch

if TYPE_CHECKING:
    from ..distributed import ShardLike

__all__ = ["load_file"]


def load_file(
    source: SourceLike,
    *,
    device: Any = "cpu",
    dtype: Any = None,
    keys: Iterable[str] | None = None,
    filter: Callable[[str], bool] | None = None,
    framework: str | None = None,
    progress: ProgressLike = None,
    mmap: bool | None = None,
    read: str | None = None,
    storage_options: StorageOptions | None = None,
    lenient: bool = False,
    max_memory: int | str | None = None,
    group: Any = None,
    shard: ShardLike = None,
) -> dict[str, Any]:
    """Loads tensors from plain or compressed safetensors files.

    source: a path of a file, a folder or an index.json; a list of paths; a file
        open for reading in binary mode; or a `Pinned` model. A name that stands in two files
        is an error.
    device: where the tensors shall be: "cpu", "cuda", "cuda:1", a torch.device.
        On a GPU they are torch tensors out of torch's own allocator, and
        compressed ones are decoded there.
    dtype: casts every floating tensor (F16, BF16, F32, F64 and the fp8 kinds):
        on a GPU as it lands, where source and target are of the usual kinds,
        else after it; a torch or numpy dtype, or a name ("bfloat16",
        "BF16"). Integers, BOOL and packed types stay as they are.
    keys, filter: read only these names; only names for which filter is true
        (see `experts`). Of a model with an index.json only the shards that hold
        some of them are opened, and filter chooses among the names of the index.
    framework: "pt", "np", or "bytes" for writable memoryviews of the bytes;
        None: torch if it is installed, else numpy.
    progress: True for a bar, or a callable that gets a `Progress`.
    mmap: whether plain tensors of local files are mapped copy-on-write instead
        of read; None: yes. Compressed tensors are never mapped. A file that is
        mapped must not be truncated while its tensors live.
    read: how local files are read, as OVERWIRE_READ says it, which None means:
        "auto", "buffered" (through the page cache), "direct" (past it), "gds":
        plain tensors to a GPU by GPUDirect Storage. Where that is not real
        (`doctor()["gpudirect_storage"]`), or does not reach a file, a warning
        says so once, and reading is "auto". Not with group.
    storage_options: how to reach URIs that are no local files, by names of the
        scheme. Values are texts, numbers or bools; None is as if not given.
        http, https, hf: headers (a mapping), token (bearer), cacert, capath,
        insecure; timeout (seconds without progress, 30), connections (at most,
        64: as many are open as bring more than fewer did), retries (8; a server
        that has not answered once is asked 3 times in all). Headers, token, and a
        URL's user and password go to the scheme, host and port that they were
        given for, and over no redirect to others. A server with neither an ETag
        nor a date is read by one request, in order. Files of hf:// are those of
        one commit. `cache`, a folder, keeps whole files: they are
        fetched once, and compared with their hash on every use; nothing is evicted.
        s3 (s3://bucket/key, s3://bucket/folder/): key, secret, token; profile;
        anon (unsigned); region, endpoint_url, path_style, sse_customer_key (32
        bytes or their base64), cacert, timeout, connections, retries. Without
        them credentials, region and endpoint are found as AWS's own tools find
        them: AWS_* of os.environ, shared files, web identity, SSO, processes,
        containers, machines; where there are none, requests are unsigned. redis, rediss (redis://host:port/key): username,
        password (else REDISCLI_AUTH), db, cacert, timeout, connections, retries;
        one value, or tensorizer's keys `key:...:offset`. What is replaced in a
        store while it is read is a CorruptError, never a mixture.
    lenient: accepts plain files that other readers let pass: bytes after the
        last tensor, a name or key twice (the last one counts), metadata that is
        not strings (kept as its JSON text). False holds the format's rules.
    max_memory: the most bytes that tensors may take on the device (int,
        "20GB", "512MiB"); a load that would take more is refused with the
        numbers before anything is allocated. `plan` tells them in advance.
    group: a torch.distributed process group whose ranks all make this call:
        they share the reading, and what fails on one raises on all. None: no
        collective.
    shard: with group: name -> dimension to cut a tensor along; this rank gets
        its block of ceil(size / ranks). See `distributed`.

    Returns name -> tensor, in the order of the files (with keys: of keys).
    The tensors are the caller's: writable, each in a storage of its own, valid
    after the file is closed or deleted; freeing one frees its memory. F4 comes
    as torch.float4_e2m1fn_x2 with the last dimension halved, or unpacked in
    numpy; F6 comes as its bytes, U8.

    Raises NotFoundError, FormatError, CorruptError (which tensor, chunk and
    offset), TensorNotFoundError for keys, OutOfMemoryError, NotSupportedError,
    ArgumentError. Ctrl-C cancels the load and frees what had landed. In a child of
    fork, where the engine cannot run, plain local files are read through the package
    safetensors, and all else is ForkedError.
    """
    if group is not None or shard is not None:
        if read is not None:
            raise ArgumentError("overwire: read: a group's way of reading is set by OVERWIRE_READ, for all its ranks alike")
        from ..distributed import load

        return load(
            source, group, shard, device=device, dtype=dtype, keys=keys, filter=filter, framework=framework, progress=progress,
            mmap=mmap, storage_options=storage_options, lenient=lenient, max_memory=max_memory,
        )  # fmt: skip
    frame = frame_for(framework)
    where = check_device(device, frame)
    wanted = None if dtype is None else frame.dtype(dtype)  # a wrong one is refused before anything is read
    if _engine.forked():
        from ..model.forked import ForkedModel

        alone = ForkedModel(source, where, keys, filter, storage_options)
        fit(alone, frame, wanted, max_memory)
        return alone.load(alone.chosen, frame, dtype, None)
    prepare(where)
    with ExitStack() as stack:
        stack.enter_context(many_objects())  # the table has as many as the tensors, and is gone before the collector looks
        model = stack.enter_context(
            Model(source, mmap, where, lenient=lenient, keys=keys, filter=filter, storage_options=storage_options, read=read)
        )
        fit(model, frame, wanted, max_memory)
        return model.load(model.chosen, frame, dtype, watch(progress, "load"))
