"""The frameworks of safe_open: how each gets its tensors out of overwire's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import overwire

from ._errors import SafetensorError

__all__ = ["Framework", "framework_of", "from_mlx", "to_mlx", "to_paddle"]


class Framework(NamedTuple):
    """native: what overwire loads. finish: makes of that (with the file, the
    name and the device) the framework's own tensor."""

    native: Any
    finish: Callable[[Any, overwire.safe_open, str, str], Any]


def _torch(tensor: Any, file: overwire.safe_open, name: str, device: str) -> Any:
    return tensor if device == "cpu" or device.startswith("cuda") else tensor.to(device)


def _on_cpu(framework: str, device: str) -> None:
    if device != "cpu":
        raise SafetensorError(f"Device {device} is not supported for framework {framework}")


def _numpy(tensor: Any, file: overwire.safe_open, name: str, device: str) -> Any:
    _on_cpu("numpy", device)
    return tensor


def _tensorflow(tensor: Any, file: overwire.safe_open, name: str, device: str) -> Any:
    _on_cpu("tensorflow", device)
    return import_module("tensorflow").convert_to_tensor(tensor)


def _flax(tensor: Any, file: overwire.safe_open, name: str, device: str) -> Any:
    _on_cpu("flax", device)
    return import_module("jax.numpy").array(tensor)


def _mlx(tensor: Any, file: overwire.safe_open, name: str, device: str) -> Any:
    _on_cpu("mlx", device)
    return to_mlx(tensor)


def to_mlx(array: Any) -> Any:
    """An mlx array of a numpy one; mlx takes bfloat16 only as bits."""
    mx = import_module("mlx.core")
    if array.dtype.name == "bfloat16":
        return mx.array(array.view("uint16")).view(mx.bfloat16)
    return mx.array(array)


def from_mlx(array: Any) -> Any:
    """A numpy array of an mlx one."""
    mx, np = import_module("mlx.core"), import_module("numpy")
    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)).view(import_module("ml_dtypes").bfloat16)
    return np.asarray(array)


def _paddle(tensor: Any, file: overwire.safe_open, name: str, device: str) -> Any:
    return to_paddle(tensor, device)


def to_paddle(array: Any, device: str = "cpu") -> Any:
    """A paddle tensor of a numpy array; types that paddle lacks are refused."""
    paddle = import_module("paddle")
    kind = getattr(paddle, array.dtype.name, None)
    if kind is None:
        raise SafetensorError(f"paddle has no {array.dtype.name}")
    bits = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(array.dtype.name)
    place = "gpu" + device[4:] if device.startswith("cuda") else device
    if bits is None:
        return paddle.to_tensor(array, place=place)
    return paddle.to_tensor(array.view(bits), place=place).view(kind)


_NAMES = {
    "pt": "torch",
    "torch": "torch",
    "pytorch": "torch",
    "np": "numpy",
    "numpy": "numpy",
    "tf": "tensorflow",
    "tensorflow": "tensorflow",
    "flax": "flax",
    "jax": "flax",
    "mlx": "mlx",
    "paddle": "paddle",
}
_FRAMEWORKS = {
    "torch": Framework("pt", _torch),
    "numpy": Framework("np", _numpy),
    "tensorflow": Framework("np", _tensorflow),
    "flax": Framework("np", _flax),
    "mlx": Framework("np", _mlx),
    "paddle": Framework("np", _paddle),
}


def framework_of(name: str) -> Framework:
    """The framework of a `framework=` argument; SafetensorError if it is none."""
    if name not in _NAMES:
        raise SafetensorError(f"framework {name} is invalid")
    if name == "paddle":
        import_module("paddle")  # the original imports it here
    return _FRAMEWORKS[_NAMES[name]]
