"""Defines the options of loads, saves, bundles and stores as types, and checks the values that are passed."""

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

#: A value that can be saved: a torch tensor, a numpy array, or a `TensorSpec`.
TensorLike = Union["torch.Tensor", "numpy.ndarray[Any, Any]", "numpy.generic", "TensorSpec"]

TorchName = Literal["pt", "torch", "pytorch"]
ArrayName = Literal["np", "numpy"]
BytesName = Literal["bytes"]
#: Values of `framework=` other than None.
FrameworkName = Literal["pt", "torch", "pytorch", "np", "numpy", "bytes"]

#: Values of `read=` other than None.
ReadWay = Literal["auto", "buffered", "direct", "gds"]

#: Values of `level=`.
Level = Literal["default", "smaller"]

#: Values of the argument `placement=` of `experts`.
Placement = Literal["linear", "round_robin"]

#: The dimension to cut each tensor along: a mapping by name, or a callable of
#: (name, shape) that returns it. None keeps a tensor whole.
ShardLike = Mapping[str, int] | Callable[[str, tuple[int, ...]], int | None] | None

_Text = Union[str, "PathLike[str]", None]
_Secret = str | bytes | None


class StorageOptions(TypedDict, total=False):
    """How to reach URIs other than local files, by scheme. None means not given. An option of
    another scheme is an ArgumentError.

    http, https, hf: headers (a mapping), token (bearer), cacert, capath, insecure; timeout (seconds without
    progress, 30), connections (at most, 64: connections are added while they make the load faster), retries (8; a
    server that has never answered is asked 3 times in all). Headers, token, and a URL's user and password are sent
    only to the scheme, host and port that they were given for, and never to another one after a redirect. A server
    without ETags and dates is read by a single request, in order. Files of hf:// all come from one commit. `cache`, a
    folder, or "on" for the user's cache, keeps whole files: they are fetched once, compared with their hash on every
    use, and used if the store cannot be reached; "" keeps none. Without it OVERWIRE_CACHE decides.

    s3 (s3://bucket/key, s3://bucket/folder/): key, secret, token; profile; anon (unsigned); region,
    endpoint_url, path_style, sse_customer_key (32 bytes or their base64), cacert, timeout, connections, retries. The
    names of boto3 and obstore are accepted also: aws_access_key_id, access_key_id, aws_secret_access_key,
    secret_access_key, aws_session_token, session_token, region_name, aws_region, aws_endpoint_url, endpoint,
    profile_name. By default credentials, region and endpoint are found as AWS's own tools find them: AWS_* in
    os.environ, shared files, web identity, SSO, processes, containers, machines. If there are no credentials,
    requests are unsigned. A store without ETags and dates is also read by a single request.

    redis, rediss (redis://user:password@host:port/key, everything but host and key optional): username, password
    (default: from the URI, or else REDISCLI_AUTH), db, cacert, timeout, connections, retries. Reads a
    single value, or tensorizer's keys `key:...:offset`.

    .tensors files, in any location: decryption_key (32 bytes or 64 hex digits) or decryption_password to read,
    encryption_key or encryption_password to write; other_dtypes_as_bytes loads tensors with a dtype that
    safetensors lacks as "U8" with an extra dimension; verify_crc32 checks the CRC32 of plain tensors.

    If an object is replaced in a store while it is read, the read raises CorruptError and never mixes both.
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
    """The options of `load_file` in addition to source, device and framework. All are optional. Other functions take
    some of them, under the same names.

    dtype: casts every floating-point tensor (F16, BF16, F32, F64 and the fp8 dtypes). For common dtypes on a GPU it
        casts while loading, otherwise afterwards. A torch or numpy dtype, or a name ("bfloat16", "bf16",
        "torch.bfloat16", "BF16"). Integers, BOOL and packed dtypes are not cast.
    keys, filter: load only these names; only names for which filter returns true (see `experts`). Of a model with an
        index.json only shards with such tensors are opened, and filter gets the names in the index.
    progress: True for a bar, or a callable that gets a `Progress`.
    mmap: whether plain tensors of local files are mapped copy-on-write instead of read; None means True.
        Compressed tensors are never mapped, nor is a file for less than 64 KiB. One mapping serves all loads of an
        opened file. A mapped file must not be truncated while its tensors exist.
    read: how local files are read; None means OVERWIRE_READ. "auto", "buffered" (through the page cache), "direct"
        (by direct I/O), "gds": plain tensors go to a GPU by GPUDirect Storage. If that is not available
        (`doctor()["gpudirect_storage"]`) or does not support a file, a warning is given once, and "auto" is used.
        Not with group.
    storage_options: how to reach URIs other than local files; see `StorageOptions`.
    lenient: accepts plain files with errors that other readers ignore: bytes after the last tensor, a name or key
        that appears twice (the last one counts), metadata that is not strings (kept as its JSON text). False
        enforces the format's rules.
    max_memory: the most bytes that tensors may take on the device (int, "20GB", "512MiB"). A load that would
        take more is refused with the numbers before anything is allocated. `plan` returns them in advance, and the
        memory that reading takes in addition. The engine counts, so this does not work in a forked child.
    group: a torch.distributed process group. All its ranks make this call and share the reading, and an error on one
        rank is raised on all. None: no collective.
    shard: with group: the dimension to cut a tensor along, by name. This rank gets its block of ceil(size / ranks).
    base: source is a delta (or a list of deltas, a chain) of this model: a path or URI, or tensors by name or a
        module, which are copied. See `apply_delta`.
    """

    base: Any


class BundleOptions(TypedDict, total=False):
    """The options of `save_bundle`, and of `compress` for objects.

    compress: False stores the tensors' bytes uncompressed, in a container that every safetensors reader reads.
    storage_options: as for `load_file`, for a path that is a URI.
    max_memory: as for `save_file`.
    """

    compress: bool
    progress: ProgressLike
    storage_options: StorageOptions | None
    max_memory: int | str | None


class SaveOptions(BundleOptions, total=False):
    """The options of `save_file` and `save_model`.

    compress: write overwire's container, whose tensors are compressed without loss
        where that gains at least 1 %; only overwire can read them. False writes a
        plain file for every safetensors reader.
    level: "default" decodes at full speed, on a GPU too. "smaller" takes 0.2 to 1.5 % of
        the original less, but saving is slow, and its tensors are decoded by the CPU
        alone, some ten times as slowly, on their way to a GPU too; overwire must be as
        new as format 1.2.
    digests: keep the digest of each tensor in a compressed file (see `digest`), so that
        `verify(path, tensors=)` need not read the file's tensors.
    max_shard_size: the most tensor bytes in one file ("5GB", "512MiB", int). A
        larger model becomes model-00001-of-00002.safetensors and so on, with
        model.safetensors.index.json. Where an earlier set is, or weights that no index
        lists, the names get a mark (model-ow1f2e3d4c-00001-of-00002.safetensors), so that
        both sets are whole until the index is replaced; then the old one is removed.
    storage_options: as for `load_file`, if path is a URI. If several processes write
        one key at once, one of their files stays.
        `encryption_key` (32 bytes or 64 hex digits) or `encryption_password`
        encrypts a .tensors file, by tensorizer's XSalsa20-Poly1305: the bytes
        of tensors, not their names and shapes.
    max_memory: with wait=False, the most host memory for that ("20GB", int); None: what
        there is. A save that could need more, were nothing to compress, is refused before
        it begins. For tensors of a GPU the memory is pinned, and kept for the next save
        or sleep until `empty_cache`.
    """

    level: Level
    digests: bool
    max_shard_size: int | str | None


class UnpickleOptions(TypedDict, total=False):
    """The options of `load_bundle`.

    trust: a pickle can run any code. False allows containers, plain data, tensors, parameters, numpy arrays and
        torch.nn's own modules, and raises UntrustedPickleError, which names the first other global. True allows all.
    device: where to put torch tensors, wherever they were when saved: "cpu", "cuda", "cuda:1". None puts each where
        it was; DeviceError if that device is not available. numpy arrays stay on the host. Tensors for a GPU are
        decoded there.
    tensors: the container, if it is not in its usual place next to the pickle: a path or URI.
    storage_options: as for `load_file`, for a path that is a URI.
    """

    trust: bool
    device: Any
    tensors: Any
    progress: ProgressLike
    storage_options: StorageOptions | None


for _kind in (LoadOptions, StorageOptions):
    _kind.__module__ = "overwire"  # where users find them


# Options with a default other than False and None.
_DEFAULTS = {"compress": True, "level": "default"}

# Options of other libraries, for functions that have the named option: the advice what to write instead.
_INSTEAD = {
    "map_location": ("device", "write device='cpu' or device='cuda'"),
    "device_map": ("device", "write device='cuda', or offload(model) for a model larger than the GPU"),
    "torch_dtype": ("dtype", "write dtype="),
    "weights_only": ("mmap", "leave it out: no file that overwire loads runs code"),
}


class _Source(str):
    # An annotation as the source has it: `inspect` quotes other texts.
    __repr__ = str.__str__


class _Signature(inspect.Signature):
    """A signature for `help`: a long one has a parameter in each line."""

    __slots__ = ()

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= 80:
            return text
        lines, is_marked = [], False
        for one in self.parameters.values():
            if one.kind is one.KEYWORD_ONLY and not is_marked:
                lines.append("*")
            is_marked = is_marked or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
            lines.append(str(one))
        return "(\n    " + ",\n    ".join(lines) + f",\n) -> {self.return_annotation}"


def spell_out(function: Callable[..., Any], kind: Any = None, owner: Any = None) -> None:
    """Makes `inspect.signature`, and so `help` and a notebook's Tab key, show the types as the source has them, and
    each option that a function takes as **options: `kind`. The docstring then explains each, with the text of `kind`
    or else of `LoadOptions`. owner: has the function's docstring; None: the function itself.
    """
    here = inspect.signature(function)
    named = [one for one in here.parameters.values() if kind is None or one.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, annotation in kind.__annotations__.items() if kind else ():
        text = getattr(annotation, "__forward_arg__", annotation)
        default = _DEFAULTS.get(name, False if text == "bool" else None)
        named.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=text))
    plain = [one.replace(annotation=_as_source(one.annotation)) for one in named]
    signature = _Signature(plain, return_annotation=_as_source(here.return_annotation))
    function.__signature__ = signature  # type: ignore[attr-defined]
    if kind and (owner or function).__doc__:  # None with python -OO
        _explain_options(owner or function, kind)


def _as_source(annotation: Any) -> Any:
    return _Source(annotation) if isinstance(annotation, str) else annotation


def _fields_of(docstring: str) -> dict[str, str]:
    """Returns the lines that explain arguments, `name, name: text` and the indented ones after each, by names."""
    fields = re.finditer(r"^([a-z]\w*(?:, \w+)*): .*(?:\n    .*)*", inspect.cleandoc(docstring), re.M)
    return {found[1]: found[0] for found in fields}


def _explain_options(owner: Any, kind: Any) -> None:
    # In place of the field `options`, or else at the end, unless the docstring explains an option itself.
    own = _fields_of(owner.__doc__)
    missing = kind.__annotations__.keys() - {name for names in own for name in names.split(", ")}
    fields = _fields_of(kind.__doc__)
    fields |= {names: field for names, field in _fields_of(LoadOptions.__doc__ or "").items() if names not in fields}
    added = "\n".join(field for names, field in fields.items() if missing.intersection(names.split(", ")))
    text = inspect.cleandoc(owner.__doc__)
    if "options" in own:
        text = text.replace(own["options"], added)
    elif added:
        text += "\n\n" + added
    owner.__doc__ = text


def check_choice(value: object, what: str, literal: Any) -> None:
    """Raises ArgumentError for a value outside of a Literal. what: the name of the argument."""
    choices = literal.__args__
    if not isinstance(value, str) or value not in choices:
        names = ", ".join(map(repr, choices[:-1]))
        raise ArgumentError(f"overwire: {what} {value!r}: expected {names} or {choices[-1]!r}")


def check_switches(**switches: object) -> None:
    """Raises ArgumentError for a value that is not a bool, because "no" would count as true."""
    for what, value in switches.items():
        if not isinstance(value, int) or value not in (0, 1):
            raise ArgumentError(f"overwire: {what} {value!r}: expected True or False")


_SWITCHES = frozenset("compress digests measure missing original release sha256 strict trust wait".split())
_CHOICES = {"level": Level, "read": ReadWay}


def check_values(**values: object) -> None:
    """Raises ArgumentError for a value that no function accepts for an argument with that name. Functions call it
    before they open or start anything. Names that differ in meaning between functions are not checked."""
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
            raise ArgumentError(f"overwire: filter: expected a callable, got {type(value).__name__}: keys= takes names")


def check_options(verb: str, options: Mapping[str, object], kind: Any) -> None:
    """Raises TypeError, like a call with a wrong keyword, for names outside of these options, and
    ArgumentError for their values: see `check_values`."""
    names = kind.__optional_keys__
    for name in options:
        if name not in names:
            # Loads have these as named arguments.
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
    """Returns the value of one of overwire's environment variables, or its default."""
    return next(row["value"] for row in knobs() if row["name"] == name)


def parse_size(size: object, what: str = "max_shard_size") -> int:
    """Returns the bytes of "5GB" (10^9), "512MiB" (2^20) or a number; 0 for None."""
    if size is None:
        return 0
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match and unit and float(match[1]) * unit >= 1:
            return int(float(match[1]) * unit)
    raise ArgumentError(f"overwire: {what} {size!r}: expected a number of bytes, or a text like '5GB' or '512MiB'")
