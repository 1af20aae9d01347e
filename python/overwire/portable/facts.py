"""Contains facts about the full package. In the platform-independent wheel, the build replaces this file."""

from __future__ import annotations

#: The public names of the full package.
NAMES: tuple[str, ...] = ()
__version__: str = "0"
