"""Facts about the full package. The build writes this file anew in the wheel for all machines."""

from __future__ import annotations

#: The public names of the full package.
NAMES: tuple[str, ...] = ()
__version__: str = "0"
