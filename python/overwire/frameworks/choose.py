"""Chooses the framework and device for an argument or a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from os import PathLike, fspath
from typing import Any

from .. import _verbs
from .._imports import Undisturbed, imported
from ..errors import ArgumentError, MissingPackageError, NotSupportedError
from . import PACKAGES, check_framework
from .frame import ODD, Columns, Frame

HOST = -2  # the engine's number for the host


def frame_for(framework: str | None) -> Frame:
    """Returns the frame for a `framework=` argument. None selects torch if it is installed, otherwise numpy."""
    check_framework(framework)
    if framework is None:
        name = "torch" if imported("torch") is not None or find_spec("torch") else "numpy"
    else:
        name = PACKAGES[framework]
    frame = _find_frame(name)
    frame.refuse_mode()
    return frame


@cache
def _find_frame(name: str) -> Frame:
    try:
        if name != "bytes":
            import_module(name)
            if imported(name) is None:  # a signal handler interrupted the import
                why = f"this thread is still importing {name}: call overwire after that"
                raise MissingPackageError(f"overwire: framework {name!r}: {why}")
        with Undisturbed():
            if name == "torch":
                from .torch import TorchFrame

                return TorchFrame()
            if name == "bytes":
                from .bytes import BytesFrame

                return BytesFrame()
            from .numpy import NumpyFrame

            return NumpyFrame()
    except ImportError as error:
        text = f"overwire: framework {name!r} needs the package {name}: pip install {name}"
        raise MissingPackageError(f"{text}; loads to the host with framework='bytes' need no package") from error


def frame_of(tensor: Any) -> Frame:
    """Returns the frame of a tensor."""
    torch = imported("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return frame_for("torch")
    numpy = imported("numpy")
    if numpy is not None and isinstance(tensor, (numpy.ndarray, numpy.generic)):
        return frame_for("numpy")
    bare = isinstance(tensor, (bytes, bytearray, memoryview))
    advice = "use TensorSpec.of(dtype, shape, data) for bytes" if bare else "use save_bundle for other objects"
    if isinstance(tensor, (str, PathLike)):
        advice = f"load_file({fspath(tensor)!r}) returns the tensors of a file"
    raise ArgumentError(f"overwire: expected a torch tensor or a numpy array, got {type(tensor).__name__}; {advice}")


def columns_of(tensors: Sequence[Any]) -> Columns:
    """Describes tensors in columns, in one pass over the torch tensors. Tensors that columns cannot describe become
    ODD."""
    columns = Columns()
    if imported("torch") is not None:
        from .memory import refuse_fakes
        from .torch import describe_all

        refuse_fakes()
        describe_all(tensors, columns)
    else:
        columns.kinds = [ODD] * len(tensors)
        columns.pointers, columns.sizes, columns.cuda = ([0] * len(tensors) for _ in range(3))
    return columns


def check_dtype(frame: Frame, dtype: Any) -> Any:
    """Converts a `dtype=` argument to the frame's dtype. Returns None for None. Raises ArgumentError for a dtype that
    is not a floating-point type."""
    if dtype is None:
        return None
    frame_dtype = frame.dtype(dtype)
    if not frame.floating(frame_dtype):
        why = "floating tensors can only be cast to floating types ('bfloat16', 'F32')"
        raise ArgumentError(f"overwire: dtype {dtype!r}: {why}; load without dtype= and convert the tensors")
    return frame_dtype


def device_number(device: Any) -> int:
    """Returns the GPU number of a `device=` argument, -1 for a GPU without a number, or -2 for the host. Raises
    ArgumentError and NotSupportedError."""
    if str(device) in ("cpu", "cpu:0"):
        return HOST  # answered without the engine, so that loads to the host work in a forked child
    if isinstance(device, int) and not isinstance(device, bool):
        return _verbs.device(f"cuda:{device}")
    if isinstance(device, str) and device in PACKAGES:
        raise ArgumentError(f"overwire: device {device!r}: this is a framework: write framework={device!r}")
    if not isinstance(device, str) and type(device).__module__ != "torch":
        raise ArgumentError(f"overwire: device {device!r}: expected 'cpu', 'cuda', 'cuda:1', a torch.device or an int")
    return _verbs.device(str(device))


def check_device(device: Any, frame: Frame | None = None) -> str:
    """Returns the engine's name for a `device=` argument: "cpu" or "cuda:N".

    Accepts "cpu", "cuda" (torch's current GPU if torch is imported, otherwise the first GPU), "cuda:1", a
    `torch.device`, or an int (a CUDA number). Only torch tensors can be on a GPU. Without a frame, only the host is
    allowed.
    """
    number = device_number(device)
    if number == HOST:
        return "cpu"
    if frame is not None and frame.name == "torch":
        return _name_gpu(number)
    why = "this function only loads to the host; move the tensors with .to()"
    if frame is not None:
        why = f"{frame.name} arrays cannot be on a GPU; load with framework='pt'"
    raise NotSupportedError(f"overwire: device {device!r}: {why}")


def _name_gpu(number: int) -> str:
    if number < 0:
        torch = imported("torch")
        number = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0
    return f"cuda:{number}"


def prepare_gpu(device: Any, exchange: bool = False) -> None:
    """Starts to initialise the GPU of a `device=` argument before a load needs it. exchange: whether ranks will
    exchange bytes."""
    number = device_number(device)
    if number != HOST:
        _verbs.prepare(_name_gpu(number), int(exchange))
