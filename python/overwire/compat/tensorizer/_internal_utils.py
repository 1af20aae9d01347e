"""tensorizer._internal_utils: how many chunks a size has."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Chunked:
    """total_size in chunks of chunk_size: `count` of them, the last with
    `remainder` bytes unless that is 0."""

    count: int = field(init=False)
    total_size: int
    chunk_size: int
    remainder: int = field(init=False)

    def __post_init__(self) -> None:
        whole, self.remainder = divmod(self.total_size, self.chunk_size)
        self.count = whole + (self.remainder > 0)
