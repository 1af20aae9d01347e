"""Saves and loads dicts of another framework's tensors through numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overwire.compat.safetensors import numpy, safe_open
from overwire.compat.safetensors._frameworks import framework_of


def functions(module: str, framework: str, to_numpy: Callable[[Any], Any]) -> tuple[Callable[..., Any], ...]:
    """Makes a framework's functions `save`, `save_file`, `load` and `load_file` for the module to export.
    to_numpy: a function that converts one of the framework's tensors to an array."""
    make = framework_of(framework).make

    def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
        """Returns a plain safetensors file as bytes."""
        return numpy.save({name: to_numpy(tensor) for name, tensor in tensors.items()}, metadata=metadata)

    def save_file(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
        """Writes a plain safetensors file atomically."""
        numpy.save_file({name: to_numpy(tensor) for name, tensor in tensors.items()}, filename, metadata=metadata)

    def load(data: bytes) -> dict[str, Any]:
        """Returns the tensors in a file's bytes, plain or compressed."""
        return {name: make(array, "cpu", name) for name, array in numpy.load(data).items()}

    def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
        """Returns the tensors of a file, plain or compressed. backend: "mmap" or "pread"."""
        with safe_open(filename, framework=framework, backend=backend) as f:
            return f.get_tensors()

    verbs: tuple[Callable[..., Any], ...] = (save, save_file, load, load_file)
    for function in verbs:  # pickle finds functions by module and name
        function.__module__, function.__qualname__ = module, function.__name__
    return verbs
