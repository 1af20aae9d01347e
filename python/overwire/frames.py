"""The frameworks that tensors are handed out in and taken from.

A frame turns what the engine landed (a DLPack capsule and its address) into a
tensor that owns the memory, and describes a tensor's bytes for saving. torch
and numpy are both optional; neither is imported before it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from .dtypes import nbytes
from .errors import ArgumentError, MissingPackageError, NotSupportedError

__all__ = ["Bytes", "Frame", "check_device", "check_empty", "frame_for", "frame_of"]


class Bytes(NamedTuple):
    """A tensor's bytes as they are saved: contiguous, on the host, or on the
    CUDA device `cuda` - 1, where all work on them has ended.

    `keep` holds the memory at `pointer` and must outlive its use.
    """

    dtype: str
    shape: tuple[int, ...]
    pointer: int
    nbytes: int
    keep: Any
    cuda: int = 0


class Frame(Protocol):
    """What the rest of this package needs of a framework.

    Dtypes are safetensors' names, shapes count elements as the file's header
    does. Every returned tensor is writable and owns its memory.
    """

    name: str

    @property
    def make(self) -> Callable[[Any], Any] | None:
        """Makes a tensor of a capsule, taken over, that is exported as it is and has
        bytes, where one C call does; else None."""

    def raw(self, dtypes: Iterable[str]) -> bool:
        """Whether the engine must export these dtypes as plain integers."""

    def adopt(self, capsule: Any, pointer: int, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        """The tensor of one landed request. Takes over the capsule."""

    def adopt_all(
        self,
        landed: Sequence[tuple[Any, int]],
        rows: Sequence[tuple[Any, ...]],
        raw: bool,
        places: Mapping[int, Any],
        device: str,
    ) -> list[Any]:
        """`adopt` for many at once: rows are those of the model's table. places
        are tensors that landed where they are, by position."""

    def empty(self, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        """A new tensor; what is in it is undefined."""

    def empty_on(self, device: str, rows: Sequence[Any], again: bool = True) -> list[Any]:
        """New tensors for rows of the table, on a GPU. again: when its memory is
        full, once more without what the engine keeps there."""

    def dtype(self, wanted: Any) -> Any:
        """The framework's own dtype for a `dtype=` argument."""

    def cast(self, tensor: Any, dtype: str, wanted: Any) -> Any:
        """The tensor in another dtype, if `dtype` is one that is cast."""

    def index(self, tensor: Any, index: tuple[Any, ...], dtype: str) -> Any:
        """`tensor[index]`, negative steps included, owning only its result."""

    def describe(self, tensor: Any) -> Bytes:
        """A tensor's logical bytes; copies what is not dense or not on the host."""


def check_empty(dtype: str, shape: tuple[int, ...], name: str | None = None) -> None:
    """Raise NotSupportedError for an empty tensor whose other dimensions overflow.

    safetensors allows that; torch and numpy count the bytes of its strides in 63 bits.
    """
    if nbytes(dtype, tuple(d for d in shape if d)) >= 1 << 63:
        what = "" if name is None else f"tensor {name!r}: "
        raise NotSupportedError(
            f"overwire: {what}shape {list(shape)} of {dtype}: beside the zero its dimensions overflow; only framework='bytes' takes it",
            tensor=name,
        )


_NAMES = {
    "pt": "torch",
    "torch": "torch",
    "pytorch": "torch",
    "np": "numpy",
    "numpy": "numpy",
    "bytes": "bytes",
}
_frames: dict[str, Frame] = {}


def frame_for(framework: str | None) -> Frame:
    """The frame of a `framework=` argument; None: torch if it is installed,
    else numpy."""
    if framework is None:
        name = "torch" if "torch" in sys.modules or find_spec("torch") else "numpy"
    else:
        name = _NAMES.get(framework, "") if isinstance(framework, str) else ""
        if not name:
            raise ArgumentError(f"overwire: framework {framework!r}: expected 'pt' (torch), 'np' (numpy) or 'bytes'")
    frame = _frames.get(name)
    if frame is None:
        try:
            if name == "torch":
                from .frame_torch import TorchFrame

                frame = TorchFrame()
            elif name == "bytes":
                from .frame_bytes import BytesFrame

                frame = BytesFrame()
            else:
                from .frame_numpy import NumpyFrame

                frame = NumpyFrame()
        except ImportError as error:
            raise MissingPackageError(f"overwire: framework {name!r} needs the package {name}: pip install {name}") from error
        _frames[name] = frame
    return frame


def frame_of(tensor: Any) -> Frame:
    """The frame that a tensor belongs to."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return frame_for("torch")
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, (numpy.ndarray, numpy.generic)):
        return frame_for("numpy")
    raise ArgumentError(f"overwire: expected a torch tensor or a numpy array, got {type(tensor).__name__}")


def check_device(device: Any, frame: Frame | None = None) -> str:
    """The device a `device=` argument names, in the engine's words: "cpu" or
    "cuda:N".

    Takes "cpu", "cuda" (torch's current one where torch is imported, else the
    first), "cuda:1", a `torch.device`, or an int (a CUDA number). Tensors land
    on a GPU only as torch tensors; without a frame, only the host is allowed.
    """
    if isinstance(device, bool) or device is None:
        text = ""
    elif isinstance(device, int):
        text = f"cuda:{device}" if device >= 0 else ""
    elif isinstance(device, str) or type(device).__module__ == "torch":
        text = str(device)
    else:
        text = ""
    kind, _, number = text.partition(":")
    if not kind or (":" in text and not number.isdecimal()):
        raise ArgumentError(f"overwire: device {device!r}: expected 'cpu', 'cuda', 'cuda:1', a torch.device or an int")
    if kind == "cpu":
        return "cpu"
    if kind != "cuda":
        raise NotSupportedError(f"overwire: device {text!r}: only 'cpu' and 'cuda' are supported")
    if frame is None:
        raise NotSupportedError(f"overwire: device {text!r}: this goes to the host only; move the tensors with .to()")
    if frame.name != "torch":
        raise NotSupportedError(f"overwire: device {text!r}: {frame.name} has no arrays on a GPU; load with framework='pt'")
    if number:
        return f"cuda:{int(number)}"
    torch = sys.modules.get("torch")
    return f"cuda:{torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0}"
