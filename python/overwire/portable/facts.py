"""What the wheel for all machines says of the whole package; the build writes it anew there."""

from __future__ import annotations

#: The public names of the whole package.
NAMES: tuple[str, ...] = ()
__version__: str = "0"
