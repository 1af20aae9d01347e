"""The options of the verbs, as types, of loads, saves, bundles and stores; and the checks of what is passed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union

from .._verbs import knobs
from ..errors import ArgumentError, did_you_mean
from ..progress import ProgressLike, check_progress

if TYPE_CHECKING:
    import numpy
    import torch

    from ..frameworks.spec import TensorSpec

#: "cpu", "cuda", "cuda:1", a torch.device, or the number of a GPU.
DeviceLike = Union[str, int, "torch.device"]

#: A torch or numpy dtype, or a name: "bfloat16", "bf16", "torch.bfloat16", "BF16".
DTypeLike = Union[str, "torch.dtype", "numpy.dtype[Any]", type[Any]]

#: What can be saved: a torch tensor, a numpy array, or a `TensorSpec`.
TensorLike = Union["torch.Tensor", "numpy.ndarray[Any, Any]", "numpy.generic", "TensorSpec"]

TorchName = Literal["pt", "torch", "pytorch"]
ArrayName = Literal["np", "numpy"]
BytesName = Literal["bytes"]
#: What `framework=` takes beside None.
FrameworkName = Literal["pt", "torch", "pytorch", "np", "numpy", "bytes"]

#: What `read=` takes beside None.
ReadWay = Literal["auto", "buffered", "direct", "gds"]

#: What `level=` takes.
Level = Literal["default", "smaller"]

#: What `placement=` of `experts` takes.
Placement = Literal["linear", "round_robin"]

#: Which dimension each tensor is cut along: a mapping by name, or a callable of
#: (name, shape) that returns it, or None for a tensor that stays whole.
ShardLike = Mapping[str, int] | Callable[[str, tuple[int, ...]], int | None] | None

_Text = Union[str, "PathLike[str]", None]
_Secret = str | bytes | None


class StorageOptions(TypedDict, total=False):
    """How to reach URIs that are no local files, by names of the scheme. None is as if
    not given; an option of another scheme is an ArgumentError.

    http, https, hf: headers (a mapping), token (bearer), cacert, capath, insecure;
    timeout (seconds without progress, 30), connections (at most, 64: as many are open as
    bring more than fewer did), retries (8; a server that has not answered once is asked 3
    times in all). Headers, token, and a URL's user and password go to the scheme, host
    and port that they were given for, and over no redirect to others. A server with
    neither an ETag nor a date is read by one request, in order. Files of hf:// are those
    of one commit. `cache`, a folder, or "on" for the user's, keeps whole files: they are
    fetched once, compared with their hash on every use, and used if the store cannot be
    reached; "" keeps none. Without it OVERWIRE_CACHE decides.

    s3 (s3://bucket/key, s3://bucket/folder/): key, secret, token; profile; anon
    (unsigned); region, endpoint_url, path_style, sse_customer_key (32 bytes or their
    base64), cacert, timeout, connections, retries; the names of boto3 and obstore are the same
    options: aws_access_key_id, access_key_id, aws_secret_access_key, secret_access_key,
    aws_session_token, session_token, region_name, aws_region, aws_endpoint_url, endpoint,
    profile_name. Without them credentials, region and
    endpoint are found as AWS's own tools find them: AWS_* of os.environ, shared files,
    web identity, SSO, processes, containers, machines; where there are none, requests are
    unsigned. A store with neither ETags nor dates is read as such a server is.

    redis, rediss (redis://user:password@host:port/key, all but host and key optional):
    username, password (else those of the URI, else REDISCLI_AUTH), db,
    cacert, timeout, connections, retries; one value, or tensorizer's keys
    `key:...:offset`.

    .tensors files, wherever they lie: decryption_key (32 bytes or 64 hex digits) or
    decryption_password to read, encryption_key or encryption_password to write them;
    other_dtypes_as_bytes takes tensors whose dtype safetensors lacks as "U8" with one
    dimension more; verify_crc32 holds plain tensors to their CRC32.

    What is replaced in a store while it is read is a CorruptError, never a mixture.
    """

    headers: Mapping[str, str] | None
    token: str | None
    cacert: _Text
    capath: _Text
    insecure: bool | None
    timeout: float | None
    connections: int | None
    retries: int | None
    cache: _Text
    key: str | None
    secret: str | None
    profile: str | None
    anon: bool | None
    region: str | None
    endpoint_url: str | None
    path_style: bool | None
    sse_customer_key: str | None
    aws_access_key_id: str | None
    access_key_id: str | None
    aws_secret_access_key: str | None
    secret_access_key: str | None
    aws_session_token: str | None
    session_token: str | None
    region_name: str | None
    aws_region: str | None
    aws_endpoint_url: str | None
    endpoint: str | None
    profile_name: str | None
    username: str | None
    password: str | None
    db: int | None
    decryption_key: _Secret
    decryption_password: _Secret
    encryption_key: _Secret
    encryption_password: _Secret
    other_dtypes_as_bytes: bool | None
    verify_crc32: bool | None


class _Reach(TypedDict, total=False):
    storage_options: StorageOptions | None
    lenient: bool


class _Together(TypedDict, total=False):
    group: Any
    shard: ShardLike


class OpenOptions(_Reach, total=False):
    """The options of `safe_open`; see `LoadOptions`."""

    dtype: DTypeLike | None
    mmap: bool | None


class ModuleOptions(_Reach, _Together, total=False):
    """The options of `load_model`; see `LoadOptions`."""

    progress: ProgressLike
    mmap: bool | None
    max_memory: int | str | None


class _Selection(TypedDict, total=False):
    dtype: DTypeLike | None
    keys: Iterable[str] | None
    filter: Callable[[str], bool] | None


class PinnedOptions(_Selection, total=False):
    """The options of loads of a pinned model; see `LoadOptions`."""

    progress: ProgressLike


class PlanOptions(_Selection, _Reach, total=False):
    """The options of `plan`; see `LoadOptions`."""


class StreamOptions(PlanOptions, _Together, total=False):
    """The options of `stream`; see `LoadOptions`."""

    progress: ProgressLike
    mmap: bool | None
    read: ReadWay | None
    max_memory: int | str | None


class LoadOptions(StreamOptions, total=False):
    """What `load_file` takes beside source, device and framework. Each may be left out;
    other verbs take some of them, by the same names.

    dtype: casts every floating tensor (F16, BF16, F32, F64 and the fp8 kinds):
        on a GPU as it lands, where source and target are of the usual kinds,
        else after it; a torch or numpy dtype, or a name ("bfloat16", "bf16",
        "torch.bfloat16", "BF16"). Integers, BOOL and packed types stay as they are.
    keys, filter: read only these names; only names for which filter is true
        (see `experts`). Of a model with an index.json only the shards that hold
        some of them are opened, and filter chooses among the names of the index.
    progress: True for a bar, or a callable that gets a `Progress`.
    mmap: whether plain tensors of local files are mapped copy-on-write instead
        of read; None: yes. Compressed tensors are never mapped, nor is a file for
        less than 64 KiB. One mapping serves all loads of an opened file. A file that
        is mapped must not be truncated while its tensors live.
    read: how local files are read, as OVERWIRE_READ says it, which None means:
        "auto", "buffered" (through the page cache), "direct" (past it), "gds":
        plain tensors to a GPU by GPUDirect Storage. Where that is not real
        (`doctor()["gpudirect_storage"]`), or does not reach a file, a warning
        says so once, and reading is "auto". Not with group.
    storage_options: how to reach URIs that are no local files; see `StorageOptions`.
    lenient: accepts plain files that other readers let pass: bytes after the
        last tensor, a name or key twice (the last one counts), metadata that is
        not strings (kept as its JSON text). False holds the format's rules.
    max_memory: the most bytes that tensors may take on the device (int,
        "20GB", "512MiB"); a load that would take more is refused with the
        numbers before anything is allocated. `plan` tells them in advance, and what
        reading takes beside the tensors. The engine counts: not in a forked child.
    group: a torch.distributed process group whose ranks all make this call:
        they share the reading, and what fails on one raises on all. None: no
        collective.
    shard: with group: name -> dimension to cut a tensor along; this rank gets
        its block of ceil(size / ranks).
    base: source is a delta (or a list of them, a chain) of this model: a path or URI, or
        tensors by name or a module, which are copied. See `apply_delta`.
    """

    base: Any


class BundleOptions(TypedDict, total=False):
    """The options of `save_bundle`, `compress` and `compress_pickle`, which explains them."""

    compress: bool
    progress: ProgressLike
    storage_options: StorageOptions | None
    max_memory: int | str | None


class SaveOptions(BundleOptions, total=False):
    """The options of `save_file` and `save_model`, which `save_file` explains."""

    level: Level
    digests: bool
    max_shard_size: int | str | None


class UnpickleOptions(TypedDict, total=False):
    """The options of `load_bundle` and its twins, which `load_compressed_pickle` explains."""

    trust: bool
    device: Any
    tensors: Any
    progress: ProgressLike
    storage_options: StorageOptions | None


for _kind in (LoadOptions, StorageOptions):
    _kind.__module__ = "overwire"  # where users find them


# Options whose default is neither False nor None.
_DEFAULTS = {"compress": True, "level": "default"}

# Options of other libraries, and what stands for them here in the verbs that have another option.
_INSTEAD = {
    "map_location": ("device", "write device='cpu' or device='cuda'"),
    "device_map": ("device", "write device='cuda', or offload(model) for a model larger than the GPU"),
    "torch_dtype": ("dtype", "write dtype="),
    "weights_only": ("mmap", "leave it out: no file that overwire loads runs code"),
}


def spell_out(function: Callable[..., Any], kind: Any) -> None:
    """Lets `inspect.signature`, and so the Tab key of a notebook, show the options that a
    function takes as **options: those of a kind of options."""
    here = inspect.signature(function)
    options = []
    for name, annotation in kind.__annotations__.items():
        text = getattr(annotation, "__forward_arg__", annotation)
        default = _DEFAULTS.get(name, False if text == "bool" else None)
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=text))
    others = [one for one in here.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = here.replace(parameters=[*others, *options])  # type: ignore[attr-defined]


def check_choice(value: object, what: str, literal: Any) -> None:
    """Raises ArgumentError for a value that is none of a Literal's; `what` names the argument."""
    choices = literal.__args__
    if not isinstance(value, str) or value not in choices:
        names = ", ".join(map(repr, choices[:-1]))
        raise ArgumentError(f"overwire: {what} {value!r}: expected {names} or {choices[-1]!r}")


def check_switches(**switches: object) -> None:
    """Raises ArgumentError for a value that is no bool: "no" would count as yes."""
    for what, value in switches.items():
        if not isinstance(value, int) or value not in (0, 1):
            raise ArgumentError(f"overwire: {what} {value!r}: expected True or False")


_SWITCHES = frozenset("compress digests measure missing original release sha256 strict trust wait".split())
_CHOICES = {"level": Level, "read": ReadWay}


def check_values(**values: object) -> None:
    """Raises ArgumentError for a value that no verb takes for an argument of that name. A verb asks
    this before it opens or starts anything; names that mean something else in each verb pass."""
    for what, value in values.items():
        if what in _SWITCHES or what in ("lenient", "mmap") and value is not None:
            check_switches(**{what: value})
        elif what == "level" or what == "read" and value is not None:
            check_choice(value, what, _CHOICES[what])
        elif value is None:
            continue
        elif what in ("max_memory", "max_shard_size"):
            parse_size(value, what)
        elif what == "progress":
            check_progress(value)
        elif what == "storage_options" and not isinstance(value, Mapping):
            raise ArgumentError(f"overwire: storage_options: expected a mapping, got {type(value).__name__}")
        elif what == "keys" and (isinstance(value, str) or not isinstance(value, Iterable)):
            kind = "one str: put it into a list" if isinstance(value, str) else type(value).__name__
            raise ArgumentError(f"overwire: keys: expected several names, got {kind}")
        elif what == "filter" and not callable(value):
            raise ArgumentError(f"overwire: filter: expected a callable, got {type(value).__name__}; keys= takes names")


def check_options(verb: str, options: Mapping[str, object], kind: Any) -> None:
    """Raises TypeError, as a call with a wrong keyword does, for names that are not those of a kind of options,
    and ArgumentError for their values: see `check_values`."""
    names = kind.__optional_keys__
    for name in options:
        if name not in names:
            # Loads have these by name.
            own = {"device", "framework"} if "dtype" in names else {"device"} if "lenient" in names else set[str]()
            option, text = _INSTEAD.get(name, ("", ""))
            hint = f"; {text}" if option in names | own else did_you_mean(name, (names | own) - {name})
            raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}{hint}")
    check_values(**options)


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = 1024**_power


def setting(name: str) -> str | int | bool:
    """What an environment variable of overwire's says, or its default."""
    return next(row["value"] for row in knobs() if row["name"] == name)


def parse_size(size: object, what: str = "max_shard_size") -> int:
    """Bytes of "5GB" (10^9), "512MiB" (2^20) or a number; 0 for None."""
    if size is None:
        return 0
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match and unit and float(match[1]) * unit >= 1:
            return int(float(match[1]) * unit)
    raise ArgumentError(f"overwire: {what} {size!r}: expected bytes, or a text as '5GB' or '512MiB'")
