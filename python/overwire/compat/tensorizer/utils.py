"""Implements tensorizer.utils: formats sizes, measures memory, and makes modules without weights."""

from __future__ import annotations

import contextlib
import contextvars
import os
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ._swap import Swap

if TYPE_CHECKING:
    import torch

__all__ = [
    "CPUMemoryUsage", "GlobalGPUMemoryUsage", "MemoryUsage", "TorchGPUMemoryUsage", "convert_bytes", "get_device",
    "get_gpu_name", "get_mem_usage", "no_init_or_tensor",
]  # fmt: skip


def convert_bytes(num: float, decimal: bool = True) -> str:
    """Formats bytes: "123.4 MB", or with decimal=False "117.7 MiB"."""
    step, letter = (1000.0, "B") if decimal else (1024.0, "iB")
    unit = "bytes"
    for prefix in "KMGTP":
        if num < step:
            break
        num /= step
        unit = prefix + letter
    return f"{num:3.1f} {unit}"


def get_device() -> torch.device:
    """Returns the device "cuda" if there is a GPU, otherwise the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_gpu_name() -> str:
    """Returns the name of the current GPU, or "N/A"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "N/A"


class GlobalGPUMemoryUsage(NamedTuple):
    """The memory of one GPU that all processes use, in bytes."""

    total: int
    free: int
    used: int

    @classmethod
    def now(cls, device: Any = None) -> GlobalGPUMemoryUsage | None:
        """Measures the memory. Returns None without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, total - free)

    def __str__(self) -> str:
        return f"GPU: (U: {self.used >> 20:,}MiB F: {self.free >> 20:,}MiB T: {self.total >> 20:,}MiB)"


class TorchGPUMemoryUsage(NamedTuple):
    """The memory of one GPU that torch has reserved, and the part that it uses, in bytes."""

    reserved: int
    reserved_max: int
    used: int
    used_max: int

    @classmethod
    def now(cls, device: Any = None) -> TorchGPUMemoryUsage | None:
        """Measures the memory. Returns None without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return None
        stats = torch.cuda.memory_stats(device)
        kinds = [f"{kind}_bytes.all.{when}" for kind in ("reserved", "allocated") for when in ("current", "peak")]
        return cls(*(stats.get(kind, 0) for kind in kinds))

    def __str__(self) -> str:
        return (
            f"TORCH: (R: {self.reserved >> 20:,}MiB/{self.reserved_max >> 20:,}MiB,"
            f" A: {self.used >> 20:,}MiB/{self.used_max >> 20:,}MiB)"
        )


class CPUMemoryUsage(NamedTuple):
    """Host memory in bytes: the peak of this process and its children, and the available memory."""

    maxrss: int
    free: int

    @classmethod
    def now(cls) -> CPUMemoryUsage:
        """Measures the memory."""
        most = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) << 10
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) << 10
        return cls(most, free)

    def __str__(self) -> str:
        return f"CPU: (maxrss: {self.maxrss >> 20:,}MiB F: {self.free >> 20:,}MiB)"


class MemoryUsage(NamedTuple):
    """The memory of the host, the GPU and torch. gpu and torch are None without a GPU."""

    cpu: CPUMemoryUsage
    gpu: GlobalGPUMemoryUsage | None
    torch: TorchGPUMemoryUsage | None

    @classmethod
    def now(cls, device: Any = None) -> MemoryUsage:
        """Measures the memory."""
        return cls(CPUMemoryUsage.now(), GlobalGPUMemoryUsage.now(device), TorchGPUMemoryUsage.now(device))

    def __str__(self) -> str:
        return " ".join(str(part) for part in self if part)


def get_mem_usage() -> str:
    """Returns `MemoryUsage.now()` as text."""
    return str(MemoryUsage.now())


_without: contextvars.ContextVar[bool] = contextvars.ContextVar("overwire_no_init_or_tensor", default=False)


def no_init_or_tensor(loading_code: Callable[[], Any] | None = None) -> Any:
    """A context for making modules without weights. Inside the context, in this thread or task only, `torch.empty`
    makes meta tensors, and `reset_parameters` of Linear, Embedding and LayerNorm does nothing.

    Returns a context manager. If loading_code is given, calls it in the context and returns its result. Raises
    TypeError if loading_code is not callable.
    """
    if loading_code is None:
        return _swap.on(_without, True)
    if not callable(loading_code):
        text = "no_init_or_tensor() expected a callable to evaluate, or None if being used as a context manager;"
        text += f' got an object of type "{type(loading_code).__name__}" instead.'
        raise TypeError(text)
    with _swap.on(_without, True):
        return loading_code()


def _stand_ins() -> list[tuple[Any, str, Any]]:
    import torch

    empty = torch.empty

    def meta_empty(*args: Any, **kwargs: Any) -> Any:
        if _without.get():
            kwargs["device"] = "meta"
        return empty(*args, **kwargs)

    def quiet(reset: Callable[..., None]) -> Callable[..., None]:
        def reset_parameters(*args: Any, **kwargs: Any) -> None:
            if not _without.get():
                reset(*args, **kwargs)

        return reset_parameters

    kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)
    return [(torch, "empty", meta_empty), *((kind, "reset_parameters", quiet(kind.reset_parameters)) for kind in kinds)]


_swap = Swap(_stand_ins)
