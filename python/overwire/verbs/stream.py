"""Implements stream, which yields whole tensors as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

from ..model.options import (
    ArrayName,
    BytesName,
    DeviceLike,
    FrameworkName,
    StreamOptions,
    TorchName,
    check_switches,
    spell_out,
)
from ..model.sourcelike import SourceLike
from .starting import open_loader

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import Unpack


@overload
def stream(
    source: SourceLike, device: DeviceLike = "cpu", *, framework: TorchName | None = None, in_order: bool = False,
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[str, torch.Tensor]]: ...  # fmt: skip


@overload
def stream(
    source: SourceLike, device: DeviceLike = "cpu", *, framework: ArrayName, in_order: bool = False,
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[str, numpy.ndarray[Any, Any]]]: ...  # fmt: skip


@overload
def stream(
    source: SourceLike, device: DeviceLike = "cpu", *, framework: BytesName, in_order: bool = False,
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[str, memoryview]]: ...  # fmt: skip


@overload
def stream(
    source: SourceLike, device: DeviceLike = "cpu", *, framework: FrameworkName | None, in_order: bool = False,
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[str, Any]]: ...  # fmt: skip


def stream(
    source: SourceLike, device: Any = "cpu", *, framework: Any = None, in_order: bool = False, **options: Any
) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) in the order of arrival. Arguments and tensors are those of `load_file`, except:

    in_order: whether to yield in the order of `load_file`'s dict instead. Tensors that arrive too early are held back,
        so after an error some tensors that have arrived may be lost.
    max_memory: the most bytes of tensors that are being loaded or not yet yielded. The caller frees yielded tensors.
        The model is loaded in windows of half this size. A larger tensor raises OutOfMemoryError.

    This call opens the file and starts the load. Each tensor is complete when it is yielded. Threads may share the
    iterator; each thread gets the next tensor. Ending the iteration early (`break`, `close`, an exception in the loop)
    cancels the load and frees the remaining tensors. An error of the load is raised after the tensors that arrived
    before it. In a forked child, a stream that the parent began raises ForkedError.

    group, shard: as for `load_file`. All ranks must iterate to the end. If one rank stops early, the stream ends on all
        ranks. max_memory is the smallest value that any rank has passed. If the ranks map each other's memory
        (`OVERWIRE_EXCHANGE=mapped`), tensors are yielded as they arrive, otherwise after each GiB.
    """
    with open_loader(
        "stream", StreamOptions, options, source, device, framework, check=lambda _: check_switches(in_order=in_order)
    ) as loader:
        return loader.iter_tensors(in_order)


spell_out(stream, StreamOptions)
