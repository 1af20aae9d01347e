"""Makes and describes torch tensors, numpy arrays and plain bytes."""

from typing import Any

from ..errors import ArgumentError

#: The package of each value of `framework=` other than None.
PACKAGES = {"pt": "torch", "torch": "torch", "pytorch": "torch", "np": "numpy", "numpy": "numpy", "bytes": "bytes"}


def check_framework(framework: Any) -> None:
    """Raises ArgumentError for an invalid `framework=` argument."""
    if framework is not None and (not isinstance(framework, str) or framework not in PACKAGES):
        raise ArgumentError(f"overwire: framework {framework!r}: expected 'pt' (torch), 'np' (numpy) or 'bytes'")
