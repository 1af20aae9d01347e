"""The patches of other libraries' loaders while `overwire.patch_safetensors` is in
force, one module for each library.

Each module has `hooks(found, lazy)`: found looks up a name in a loaded module of
the library, lazy is what the patch offers (`Lazy`). It returns pairs of a public
name of the library and what stands for it. A version of the library that lacks a
name is served without that hook: its files are read as before, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["Ahead", "Lazy", "LazySlice"]


class LazySlice(Protocol):
    """A tensor of a file that is open and not read: what `get_slice` gives while
    the patch is in force."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any) -> Any: ...

    def device(self, asked: Any) -> str | None:
        """Where the engine is to land it for a library that asks for it on a
        device; None where safetensors' own reading is as good, or the device is
        none of the engine's."""

    def on(self, device: str) -> Any:
        """The same tensor as something to index whose results are on the device."""


class Ahead(Protocol):
    """One load, of all tensors that it was asked for before it gives the first."""

    def want(self, tensor: Any, device: str, dtype: Any = None) -> Callable[[], Any]:
        """Notes a whole tensor, to be cast to dtype as it lands where that is
        exact for the engine. Returns what gives it, once: the first call begins
        the load of all that were noted till then."""

    def close(self) -> None:
        """Ends it; what landed and was not given is freed."""


class Lazy(NamedTuple):
    """What a patch offers to hooks.

    slice: the class of a `LazySlice`. ahead: makes an `Ahead`. plan: a context
    manager for calls that open files themselves: while it lasts, slices that this
    thread opens are loaded ahead, if plan(name) gives their device."""

    slice: type[Any]
    ahead: Callable[[], Any]
    plan: Callable[[Callable[[str], Any]], Any]
    compressed: Callable[[Any], bool | None]
    open: Callable[..., Any]
