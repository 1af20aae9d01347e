"""Converts overwire's tensors to each framework of safe_open."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from ._errors import SafetensorError


class Framework(NamedTuple):
    """One of safe_open's frameworks. native: the framework in which overwire loads. make: converts a tensor of `native`
    to this framework, on a device. Its last argument is the tensor's name, for errors."""

    native: Any
    make: Callable[[Any, str, str], Any]


def _torch(tensor: Any, device: str, name: str) -> Any:
    return tensor if device == "cpu" or device.startswith("cuda") else tensor.to(device)


def _on_cpu(framework: str, make: Callable[[Any, str], Any]) -> Framework:
    def checked(array: Any, device: str, name: str) -> Any:
        if device != "cpu":
            raise SafetensorError(f"Device {device} is not supported for framework {framework}")
        return make(array, name)

    return Framework("np", checked)


def _to_jax(array: Any, name: str) -> Any:
    # Without x64, jax keeps only the lower half of a 64-bit integer.
    result = import_module("jax.numpy").array(array)
    if result.dtype != array.dtype and array.dtype.kind in "iu" and array.size:
        bounds = import_module("numpy").iinfo(result.dtype)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise SafetensorError(
                f"tensor {name!r}: a value of {array.dtype} does not fit into jax's {result.dtype}: "
                'enable 64-bit types with jax.config.update("jax_enable_x64", True)'
            )
    return result


def _to_mlx(array: Any, name: str) -> Any:
    # mlx accepts the bits of bfloat16 only as integers.
    mx = import_module("mlx.core")
    if array.dtype.name == "bfloat16":
        return mx.array(array.view("uint16")).view(mx.bfloat16)
    return mx.array(array)


def from_mlx(array: Any) -> Any:
    """Converts an mlx array to a numpy array."""
    mx, np = import_module("mlx.core"), import_module("numpy")
    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)).view(import_module("ml_dtypes").bfloat16)
    return np.asarray(array)


def to_paddle(array: Any, device: str = "cpu", name: str = "") -> Any:
    """Converts a numpy array to a paddle tensor. Raises SafetensorError for dtypes that paddle lacks."""
    paddle = import_module("paddle")
    if (kind := getattr(paddle, array.dtype.name, None)) is None:
        raise SafetensorError(f"paddle does not have the dtype {array.dtype.name}")
    bits = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(array.dtype.name)
    place = "gpu" + device[4:] if device.startswith("cuda") else device
    if bits is None:
        return paddle.to_tensor(array, place=place)
    return paddle.to_tensor(array.view(bits), place=place).view(kind)


_FRAMEWORKS = {
    **dict.fromkeys(("pt", "torch", "pytorch"), Framework("pt", _torch)),
    **dict.fromkeys(("np", "numpy"), _on_cpu("numpy", lambda array, name: array)),
    **dict.fromkeys(
        ("tf", "tensorflow"),
        _on_cpu("tensorflow", lambda array, name: import_module("tensorflow").convert_to_tensor(array)),
    ),
    **dict.fromkeys(("flax", "jax"), _on_cpu("flax", _to_jax)),
    "mlx": _on_cpu("mlx", _to_mlx),
    "paddle": Framework("np", to_paddle),
}


def framework_of(name: str) -> Framework:
    """Returns the framework of a `framework=` argument. Raises SafetensorError for an unknown one."""
    if name not in _FRAMEWORKS:
        raise SafetensorError(f"framework {name} is invalid")
    if name == "paddle":
        import_module("paddle")  # the original also imports it here
    return _FRAMEWORKS[name]
