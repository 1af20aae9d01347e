"""Defines the types of the options of loads, and checks the values of all options.

Every load imports this module. Types that loads need only for annotations are in `saveoptions` and `storageoptions`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from ..errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    import numpy
    import torch

    from ..frameworks.spec import TensorSpec
    from ..progress import ProgressLike
    from .storageoptions import StorageOptions

#: "cpu", "cuda", "cuda:1", a torch.device, or the number of a GPU.
DeviceLike: TypeAlias = "str | int | torch.device"

#: A torch or numpy dtype, or a name: "bfloat16", "bf16", "torch.bfloat16", "BF16".
DTypeLike: TypeAlias = "str | torch.dtype | numpy.dtype[Any] | type[Any]"

#: A value that can be saved: a torch tensor, a numpy array, or a `TensorSpec`.
TensorLike: TypeAlias = "torch.Tensor | numpy.ndarray[Any, Any] | numpy.generic | TensorSpec"

TorchName: TypeAlias = 'Literal["pt", "torch", "pytorch"]'
ArrayName: TypeAlias = 'Literal["np", "numpy"]'
BytesName: TypeAlias = 'Literal["bytes"]'
#: Values of `framework=` other than None.
FrameworkName: TypeAlias = 'Literal["pt", "torch", "pytorch", "np", "numpy", "bytes"]'

#: Values of `read=` other than None.
ReadWay = Literal["auto", "buffered", "direct", "gds"]

#: Values of `level=`.
Level = Literal["default", "smaller"]

#: Values of the argument `placement=` of `experts`.
Placement = Literal["linear", "round_robin"]

#: The dimension along which each tensor is split: a mapping by name, or a callable that takes (name, shape) and
#: returns the dimension. None keeps a tensor whole.
ShardLike = Mapping[str, int] | Callable[[str, tuple[int, ...]], int | None] | None


class _Reach(TypedDict, total=False):
    ray: bool | None
    storage_options: StorageOptions | None
    lenient: bool


class _Together(TypedDict, total=False):
    group: Any
    shard: ShardLike


class _Hosted(TypedDict, total=False):
    host: bool | None


class OpenOptions(_Reach, _Hosted, total=False):
    """The options of `safe_open`; see `LoadOptions`."""

    dtype: DTypeLike | None
    mmap: bool | None


class ModuleOptions(_Reach, _Together, _Hosted, total=False):
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


class StreamOptions(PlanOptions, _Together, _Hosted, total=False):
    """The options of `stream`; see `LoadOptions`."""

    progress: ProgressLike
    mmap: bool | None
    read: ReadWay | None
    max_memory: int | str | None


class LoadOptions(StreamOptions, total=False):
    """The options of `load_file` in addition to source, device and framework. All are optional. Other functions have
    some of these options, under the same names.

    dtype: the dtype to which every floating-point tensor (F16, BF16, F32, F64 and the fp8 dtypes) is cast: a torch or
        numpy dtype, or a name ("bfloat16", "bf16", "torch.bfloat16", "BF16"). On a GPU, common dtypes are cast while
        loading, others afterwards. Integers, BOOL and packed dtypes are not cast.
    keys, filter: the names to load, and a function that returns true for a name to load (see `experts`). If a model has
        an index.json, only shards with such tensors are opened, and filter gets the names in the index.
    progress: True for a progress bar, or a callable that gets a `Progress`.
    mmap: whether plain tensors of local files are mapped copy-on-write instead of read; None means True. Compressed
        tensors are not mapped, and files from which less than 64 KiB are loaded are not mapped either. All loads of an
        open file share one mapping. A mapped file must not be truncated while its tensors exist.
    read: how local files are read: "auto", "buffered" (through the page cache), "direct" (direct I/O) or "gds" (plain
        tensors go to a GPU by GPUDirect Storage); None means OVERWIRE_READ. If GPUDirect Storage is not available
        (`doctor()["gpudirect_storage"]`) or does not support a file, overwire warns once and uses "auto". Cannot be
        combined with group.
    storage_options: how to reach URIs other than local files; see `StorageOptions`.
    ray: whether the nodes of a Ray cluster read objects in stores once, and send each other the bytes that they read.
        True raises an error if Ray is not installed or the process is not in a cluster. If Ray fails later, each node
        reads the store itself. None means OVERWIRE_RAY.
    lenient: whether to accept plain files with errors that other readers ignore: bytes after the last tensor, a name or
        key that appears twice (the last one counts), metadata values that are not strings (returned as JSON text).
        False enforces the rules of the format.
    max_memory: the most bytes that tensors may take on the device (int, "20GB", "512MiB"). A load that would take more
        raises an error with both numbers before it allocates anything. `plan` returns these bytes in advance, and also
        the memory for reading. max_memory needs the engine, so it does not work in a forked child.
    host: whether files come from the host store (`overwire host`), which keeps the stored bytes of models in memory for
        all processes of this user. True uses the store of `OVERWIRE_HOST`, or the user's own store if the variable is
        not set. None means that `OVERWIRE_HOST` decides. A local file that the store does not have is read as usual,
        and put into the store in the background when the load has ended and the file is closed. If the store cannot be
        reached, or its bytes are wrong, overwire logs a warning and reads the files. The store does not keep files
        other than safetensors, or plain files that were changed in the last seconds.
    group: a torch.distributed process group. All its ranks must make this call, and share the reading. An error on one
        rank is raised on all ranks. By default this process reads everything itself.
    shard: with group, the dimension along which each tensor is split, by name; see `ShardLike`. This rank gets its
        block of ceil(size / ranks).
    base: if source is a delta or a list of chained deltas, the model to which it is applied: a path or URI, tensors by
        name, or a module. Tensors are copied first. See `apply_delta`.
    """

    base: Any


LoadOptions.__module__ = "overwire"  # users import it from there


# Options with a default other than False or None.
_DEFAULTS = {"compress": True, "level": "default"}

# Maps options of other libraries to overwire's option for the same purpose, and to the advice in the error.
_INSTEAD = {
    "map_location": ("device", "write device='cpu' or device='cuda'"),
    "device_map": ("device", "write device='cuda', or offload(model) for a model larger than the GPU"),
    "torch_dtype": ("dtype", "write dtype="),
    "weights_only": ("mmap", "leave it out: no file that overwire loads runs code"),
}


class _Source(str):
    # An annotation that `inspect` shows without quotes.
    __repr__ = str.__str__


class _Signature(inspect.Signature):
    """A signature for `help`. If it is long, each parameter is on a separate line."""

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
    """Sets the signature that `inspect.signature`, `help` and notebooks show. The signature has the types as written in
    the source, and a keyword for each option of `kind` instead of **options. Also adds the options to the docstring,
    with the explanations in `kind` or in `LoadOptions`. owner: the object with the docstring, by default the function.
    """
    here = inspect.signature(function)
    named = [one for one in here.parameters.values() if kind is None or one.kind is not inspect.Parameter.VAR_KEYWORD]
    plain = [one.replace(annotation=_as_source(one.annotation)) for one in named]
    for name, annotation in kind.__annotations__.items() if kind else ():
        text = _as_source(getattr(annotation, "__forward_arg__", annotation))
        default = _DEFAULTS.get(name, False if text == "bool" else None)
        plain.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=text))
    signature = _Signature(plain, return_annotation=_as_source(here.return_annotation))
    function.__signature__ = signature  # type: ignore[attr-defined]
    if kind and (owner or function).__doc__:  # there is no docstring with python -OO
        _explain_options(owner or function, kind)


def _as_source(annotation: Any) -> Any:
    return _Source(annotation) if isinstance(annotation, str) else annotation


def _fields_of(docstring: str) -> dict[str, str]:
    """Returns the parts of a docstring that explain arguments, by the text before the colon."""
    fields: dict[str, str] = {}
    names = ""
    for line in inspect.cleandoc(docstring).splitlines():
        title, colon, text = line.partition(":")
        if names and line.startswith("    "):
            fields[names] += f"\n{line}"
        elif colon and text.startswith(" ") and all(map(_is_argument, title.split(", "))):
            names = title
            fields[names] = line
        else:
            names = ""
    return fields


def _is_argument(name: str) -> bool:
    return name.isidentifier() and name.islower()


def _explain_options(owner: Any, kind: Any) -> None:
    # The text replaces the field `options`, or is added at the end. It omits options that the docstring already
    # explains.
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
    """Raises ArgumentError for a value that is not in a Literal. what: the name of the argument."""
    choices = literal.__args__
    if not isinstance(value, str) or value not in choices:
        names = ", ".join(map(repr, choices[:-1]))
        raise ArgumentError(f"overwire: {what} {value!r}: expected {names} or {choices[-1]!r}")


def check_switches(**switches: object) -> None:
    """Raises ArgumentError for a value that is not a bool, such as "no", which would count as true."""
    for what, value in switches.items():
        if not isinstance(value, int) or value not in (0, 1):
            raise ArgumentError(f"overwire: {what} {value!r}: expected True or False")


_SWITCHES = frozenset("compress digests measure missing original release sha256 strict trust wait".split())
_CHOICES = {"level": Level, "read": ReadWay}


def check_values(**values: object) -> None:
    """Raises ArgumentError for a value that no function accepts for an argument of that name. Functions call this
    before they open or start anything. Names that have different meanings in different functions are not checked."""
    for what, value in values.items():
        if what in _SWITCHES or what in ("lenient", "mmap", "host") and value is not None:
            check_switches(**{what: value})
        elif what == "level" or what == "read" and value is not None:
            check_choice(value, what, _CHOICES[what])
        elif value is None:
            continue
        elif what in ("max_memory", "max_shard_size"):
            parse_size(value, what)
        elif what == "progress":
            from ..progress import check_progress

            check_progress(value)
        elif what == "storage_options" and not isinstance(value, Mapping):
            raise ArgumentError(f"overwire: storage_options: expected a mapping, got {type(value).__name__}")
        elif what == "keys" and (isinstance(value, str) or not isinstance(value, Iterable)):
            kind = "one str: put it into a list" if isinstance(value, str) else type(value).__name__
            raise ArgumentError(f"overwire: keys: expected several names, got {kind}")
        elif what == "filter" and not callable(value):
            raise ArgumentError(f"overwire: filter: expected a callable, got {type(value).__name__}: keys= takes names")


def check_options(verb: str, options: Mapping[str, object], kind: Any) -> None:
    """Raises TypeError for names that are not options of this kind, as a call with a wrong keyword does, and
    ArgumentError for invalid values; see `check_values`."""
    names = kind.__optional_keys__
    for name in options:
        if name not in names:
            # Load functions have these as named arguments.
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
    from .._verbs import knobs  # few loads read a setting

    return next(row["value"] for row in knobs() if row["name"] == name)


def parse_size(size: object, what: str = "max_shard_size") -> int:
    """Converts "5GB" (5 * 10^9), "512MiB" (512 * 2^20) or a number to a number of bytes, and None to 0."""
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
