"""Which framework an argument or a tensor names, and which device."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from ..errors import ArgumentError, MissingPackageError, NotSupportedError
from .frame import Frame

__all__ = ["check_device", "check_dtype", "frame_for", "frame_of"]

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
                from .torch import TorchFrame

                frame = TorchFrame()
            elif name == "bytes":
                from .bytes import BytesFrame

                frame = BytesFrame()
            else:
                from .numpy import NumpyFrame

                frame = NumpyFrame()
        except ImportError as error:
            raise MissingPackageError(
                f"overwire: framework {name!r} needs the package {name}: pip install {name}, or load with framework='bytes'"
            ) from error
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
    raise ArgumentError(
        f"overwire: expected a torch tensor or a numpy array, got {type(tensor).__name__}; compress_pickle stores other objects"
    )


def check_dtype(frame: Frame, dtype: Any) -> Any:
    """The frame's own dtype for a `dtype=` argument, None for None. ArgumentError for
    one that floating tensors would lose their values in."""
    if dtype is None:
        return None
    wanted = frame.dtype(dtype)
    if not frame.floating(wanted):
        raise ArgumentError(
            f"overwire: dtype {dtype!r}: floating tensors can only be cast to floating types ('bfloat16', 'F32'); "
            "load without dtype= and convert the tensors"
        )
    return wanted


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
        raise NotSupportedError(f"overwire: device {text!r}: this loads to the host only; move the tensors with .to()")
    if frame.name != "torch":
        raise NotSupportedError(f"overwire: device {text!r}: {frame.name} has no arrays on a GPU; load with framework='pt'")
    if number:
        return f"cuda:{int(number)}"
    torch = sys.modules.get("torch")
    return f"cuda:{torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0}"
