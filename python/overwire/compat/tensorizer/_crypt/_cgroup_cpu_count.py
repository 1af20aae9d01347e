"""tensorizer._crypt._cgroup_cpu_count: how many cores this process may use."""

from __future__ import annotations

import enum
import math
import os
from fractions import Fraction
from pathlib import Path

# Where a container finds its own limit: cgroup version 2, then version 1.
_ONE = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/user.slice/cpu.max")
_TWO = "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us"


class RoundingMode(enum.Enum):
    """What becomes of a part of a core."""

    UP = 1
    DOWN = 2
    HALF_EVEN = 3


def _quota() -> Fraction | None:
    """Cores by the control group; None where it sets no limit."""
    for texts in (*((name,) for name in _ONE), _TWO):
        try:
            quota, period = " ".join(Path(text).read_text() for text in texts).split()
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                return Fraction(int(quota), int(period))
        except (OSError, ValueError):
            continue
    return None


def effective_cpu_count(rounding: RoundingMode | None = RoundingMode.UP) -> int | Fraction:
    """Cores that a control group leaves to this process, else all of the machine;
    rounding None: not rounded. TypeError for another rounding."""
    if not isinstance(rounding, (RoundingMode, type(None))):
        raise TypeError("Invalid type for rounding mode")
    quota = _quota()
    if quota is None:
        return os.cpu_count() or 1
    if rounding is None:
        return quota
    if rounding is RoundingMode.HALF_EVEN:
        return round(quota)
    return math.ceil(quota) if rounding is RoundingMode.UP else math.floor(quota)
