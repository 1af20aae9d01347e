"""Runs a model that is larger than its device: its blocks stay compressed, and each is decoded while it runs."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from .. import _verbs, errors
from .._engine import forked
from .._undo import after_error, pass_error_to
from ..errors import ArgumentError, NotSupportedError, OutOfMemoryError
from ..frameworks.choose import check_device, frame_for, prepare_gpu
from ..jobs import log
from ..model.options import parse_size
from ..progress import spell_count

if TYPE_CHECKING:
    import torch

    from ..distributed.group import Members
    from ..model.options import DeviceLike
    from ..model.sourcelike import SourceLike
    from .away import Record
    from .binding import Binding
    from .blocks import Block
    from .ring import Ring, Slot
    from .sharing import BlockGroup
    from .source import Source
    from .stored import StoredBlock
    from .tiers import Tiers


class _Away:
    # A streamed block: its stored weights, and the records for its parameters while they are offloaded.

    def __init__(self, block: Block, stored: StoredBlock, records: list[Record]) -> None:
        self.block, self.stored, self.records = block, stored, records
        self.binding: Binding | None = None  # set while the weights are on the device
        self.was_held = False  # whether something else has used the memory since the last comparison
        self.is_changed = False  # whether the weights differ from the stored ones, permanently
        self.runs = 0


class Offloaded:
    """A model with streamed weights; see `offload`. It is a context manager that calls `close`. Several threads may run
    the model at the same time."""

    __module__ = "overwire"

    def __init__(self, device: torch.device, inference: bool) -> None:
        # inference: whether the tensors were created in inference mode. They stay inference tensors.
        #: Bytes of the streamed weights, and bytes of host memory that this process's compressed weights take.
        self.nbytes: int = 0
        self.stored: int = 0
        #: Bytes of device memory that the compressed weights take, with where="device" or "auto".
        self.stored_on_device: int = 0
        #: Bytes of device memory that the ring takes initially, in addition to the weights that stay on the device.
        self.ring: int = 0
        #: Bytes of the blocks that stay on the device.
        self.kept: int = 0
        #: Names of the streamed blocks, in the order of the model.
        self.blocks: list[str] = []
        self._device = device
        self._inference = inference
        self._away: list[_Away] = []
        self._moved: list[tuple[torch.Tensor, torch.device]] = []
        self._hooks: list[Any] = []
        self._ring: Ring | None = None
        self._group: BlockGroup | None = None
        self._closed = False

    def close(self) -> None:
        """Restores the weights on their original devices, bit for bit, and frees the offload's host and device memory.
        A second call does nothing. A call in a forked child also does nothing; streamed blocks raise ForkedError there.

        Raises NotSupportedError while a block runs, OutOfMemoryError if there is no memory for the weights, and
        CorruptError if stored bytes have changed. Weights that are not restored yet stay offloaded, and `close`
        can be called again.
        """
        import torch

        if forked():
            return
        if (ring := self._ring) is not None:  # this variable keeps the ring alive until all weights are restored
            ring.close()
        self._ring = None
        if self._group is not None:
            self._group.close_ring()
        with torch.inference_mode(self._inference), torch.no_grad():
            self._put_back()
        if self._group is not None:
            self._group.close_all()
        self._group = None
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.blocks, self._closed = [], [], True
        self.nbytes = self.stored = self.stored_on_device = self.ring = self.kept = 0

    def _close_after(self, error: BaseException) -> None:
        # If the weights cannot be restored after an error, the error refers to this object, so that the caller can try
        # again.
        with after_error(setattr, error, "offloaded", self):
            self.close()

    def _put_back(self) -> None:
        import torch

        from .away import bring, is_away
        from .stored import SharedMemory, copy_to_host

        while self._away:
            one = self._away[-1]
            if one.binding is not None:  # the weights keep their memory if something else uses it
                is_held = one.binding.compare_states()[0]
                for parameter, device in ((weight.parameter, weight.device) for weight in one.block.weights):
                    if parameter.device != device or one.binding.has_memory_of(parameter) and not is_held:
                        parameter.data = _copy_to(parameter.data, device)
                self._away.pop()
                continue
            if isinstance(one.stored.memory, SharedMemory):  # page-locked in parts, which no copy may span
                one.stored = copy_to_host(one.stored)
            values = None
            with contextlib.suppress(OutOfMemoryError):  # the device may be full of compressed blocks
                values = _decode_block(one, self._device)
            if values is None:  # the memory that the error referred to is free now
                one.stored = copy_to_host(one.stored)
                values = _decode_block(one, torch.device("cpu"))
            for weight, tensor in zip(one.block.weights, values, strict=True):
                if is_away(weight.parameter):
                    bring(weight.parameter, tensor)
                else:
                    weight.parameter.data = tensor
            self._away.pop()
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        while self._moved:
            tensor, device = self._moved[-1]
            tensor.data = _copy_once(tensor.data, device, copies)
            self._moved.pop()

    def _begin_streaming(
        self,
        blocks: list[Block],
        tensors: list[torch.Tensor],
        keep: int,
        slots: int,
        limit: int = 0,
        source: Source | None = None,
        where: Literal["host", "device", "auto"] = "host",
        room: int = 0,
        members: Members | None = None,
    ) -> None:
        # Starts to stream blocks, except for `keep` bytes of them, and moves all other tensors to the device.
        from .tiers import Tiers

        staying = set(_verbs.kept_blocks(keep, array("q", (block.nbytes for block in blocks)).tobytes()))
        away = [block for at, block in enumerate(blocks) if at not in staying]
        if members is not None:
            from .sharing import BlockGroup

            alike = {"where": where, "room": room, "slots": slots, "max_memory": limit}
            self._group = BlockGroup(members, self._device, [one for one in away if one.weights], alike, source)
        going = {id(weight.parameter) for block in away for weight in block.weights}
        rest = [tensor for tensor in tensors if id(tensor) not in going]
        self._move_rest(rest)
        if source is not None:
            source.load_tensors(rest)
        tiers = Tiers(self._device, away, slots, where, room, self._group)
        self._encode_blocks(blocks, staying, limit, source, tiers)
        self._run_by(slots)

    def _encode_blocks(
        self, blocks: list[Block], staying: set[int], limit: int, source: Source | None, tiers: Tiers
    ) -> None:
        from .away import record_of

        away = [block for at, block in enumerate(blocks) if at not in staying and block.weights]
        self.kept += sum(block.nbytes for block in blocks) - sum(block.nbytes for block in away)
        with contextlib.closing(tiers.compress_blocks(away, source)) as compressed:

            def store_block() -> StoredBlock:
                result = next(compressed)
                total = self.stored + result.bytes_on_host()
                if limit and total > limit:
                    text = f"the stored weights take more than max_memory, {limit} bytes of host memory"
                    raise OutOfMemoryError(f"overwire: offload: {text}", asked=total)
                return result

            for block in away:
                # With a group, each block is on all ranks before its weights are sent away.
                stored = store_block() if self._group is None else self._group.agree_on(block.name, store_block)
                self.stored += stored.bytes_on_host()
                if stored.memory.is_on_device:
                    self.stored_on_device += stored.memory.nbytes
                self.nbytes += block.nbytes
                records = [record_of(weight.parameter, weight.name, self._device) for weight in block.weights]
                self._away.append(_Away(block, stored, records))
                self.blocks.append(block.name)
                self._send_away(len(self._away) - 1)

    def _move_rest(self, tensors: Iterable[torch.Tensor]) -> None:
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        for tensor in tensors:
            if tensor.device == self._device:
                continue
            before = tensor.data
            copy = _copy_once(before, self._device, copies)
            self._moved.append((tensor, before.device))
            tensor.data = copy

    def _run_by(self, slots: int) -> None:
        from .ring import Ring

        if not self._away:
            return
        self._ring = Ring([one.stored for one in self._away], self._device, slots, self._vacate_block, self._group)
        self.ring = self._ring.nbytes
        for at, one in enumerate(self._away):
            before, after = self._hooks_of(at)
            self._hooks.append(one.block.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(one.block.module.register_forward_hook(after, always_call=True))

    def _hooks_of(self, at: int) -> tuple[_Hook, _Hook]:
        def before_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._before_run(at, module, args, kwargs)

        def after_forward(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._after_run(at, module, output)

        return _Hook(before_forward), _Hook(after_forward)

    def _before_run(self, at: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        ring = self._ring
        if ring is None:
            return
        one = self._away[at]
        block = one.block
        if module is not block.module:  # a copy of the module has the hooks, but its weights are not streamed
            return
        if forked():  # runs of the parent's threads hold slots, and never end in this process
            raise errors.forked()
        if torch.is_grad_enabled() and _needs_grad(module, args, kwargs):
            self._meet_gradients(block.name)
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotSupportedError(f"overwire: offload: {block.name}: a CUDA graph cannot capture streamed weights")
        with ring.lock:
            slot = ring.acquire(at, _frame_of_run(sys._getframe(1)))
            one.runs += 1
            self._bring_weights(at, slot)

    def _after_run(self, at: int, module: torch.nn.Module, output: Any) -> None:
        import torch

        ring = self._ring
        if ring is None or module is not self._away[at].block.module:
            return
        with ring.lock:
            if not ring.runs(at):
                return
            ring.release(at)
        if torch.is_grad_enabled() and any(value.requires_grad for value in _tensors_in(output)):
            self._meet_gradients(self._away[at].block.name, ran=True)

    def _vacate_block(self, at: int) -> bool:
        # Offloads the weights of a block that is not running, and returns True. If something else uses their memory, or
        # they have changed, they stay on the device, and it returns False.
        one, ring = self._away[at], self._ring
        if one.binding is None or ring is None:
            self._send_away(at)
            return True
        is_held, is_changed = self._compare_states(at)
        one.was_held = one.was_held or is_held
        if is_held and not is_changed and not one.is_changed:
            return False
        may_differ = one.was_held or not one.binding.counts_changes() or ring.compares_bytes(one.runs)
        if not is_changed and not one.is_changed and may_differ:
            is_changed = not ring.is_as_stored(at)
        if is_changed and not one.is_changed:
            one.is_changed = True
            words = "overwire: offload: %s changes its weights when it runs, so they stay on the device"
            log.warning(words, one.block.name)
        if not one.is_changed:
            one.was_held = False
            self._send_away(at)
        return not one.is_changed

    def _compare_states(self, at: int) -> tuple[bool, bool]:
        # Returns whether something else uses the weights of a loaded block, and whether the weights were changed.
        binding = self._away[at].binding
        assert binding is not None
        return binding.compare_states()

    def _meet_gradients(self, name: str, ran: bool = False) -> None:
        # Raises an error for a forward with gradients, because its backward would need the weights again. It is called
        # before or after the block runs.
        text = "a forward with gradients needs weights again after they are offloaded"
        raise NotSupportedError(f"overwire: offload: {name}: {text}: use torch.inference_mode() or torch.no_grad()")

    def _bring_weights(self, at: int, slot: Slot) -> None:
        from .away import bring
        from .binding import binding_of

        one = self._away[at]
        if one.binding is None:
            for weight, view in zip(one.block.weights, slot.views[at], strict=True):
                bring(weight.parameter, view)
            one.binding = binding_of(slot.memory, (weight.parameter for weight in one.block.weights))

    def _send_away(self, at: int) -> None:
        from .away import send_away

        one = self._away[at]
        one.binding = None  # set first, so that all weights are offloaded again after Ctrl-C between two of them
        for weight, record in zip(one.block.weights, one.records, strict=True):
            send_away(weight.parameter, record)

    def __repr__(self) -> str:
        if self._closed:
            return "Offloaded(closed)"
        count = spell_count(len(self.blocks), "block")
        texts = [f"{self.stored} of host memory"] if self.stored or not self.stored_on_device else []
        texts += [f"{self.stored_on_device} of device memory"] if self.stored_on_device else []
        return f"Offloaded({count}, {self.nbytes} bytes in {' and '.join(texts)})"

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_copied()


class _Hook:
    # A hook of a block. It is neither copied nor pickled with the model.

    def __init__(self, call: Callable[..., None]) -> None:
        self._call, self._compiles = call, True

    def __call__(self, *args: Any) -> None:
        # Hooks of a compiled block would be compiled as well, but this one must run as plain Python. The import of
        # torch._dynamo takes seconds, so it is left to programs that compile.
        if self._compiles and "torch._dynamo" in sys.modules:
            import torch

            self._call, self._compiles = torch.compiler.disable(self._call), False  # type: ignore[no-untyped-call]
        self._call(*args)

    def __deepcopy__(self, memo: object) -> _Hook:
        return self  # the hook does nothing for a copy of its module

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_copied()


def offload(
    model: Any,
    device: DeviceLike = "cuda",
    *,
    keep: int | str | None = None,
    where: Literal["host", "device", "auto"] = "host",
    room: int | str | None = None,
    source: SourceLike | None = None,
    blocks: Iterable[torch.nn.Module | str] | None = None,
    max_memory: int | str | None = None,
    slots: int = 2,
    group: Any = None,
) -> Offloaded:
    """Runs a model on a device that is too small for its weights. They stay compressed in pinned host memory or in
    device memory, and the weights of each block are loaded while the previous block runs.

        with ow.offload(model, "cuda", keep="8GB"), torch.inference_mode():
            model.generate(...)

    model: a `torch.nn.Module`, or a diffusers pipeline for all its models. Everything outside of blocks is
        moved to the device, including buffers.
    device: "cuda", "cuda:1", or "cpu". On the CPU, bf16 weights take two thirds of their uncompressed size.
    keep: bytes of device memory ("8GB", int) for blocks that stay on the device, spread evenly over the model; None
        streams all blocks.
    where: the memory for compressed weights: "host"; "device", for a model that almost fits; or "auto", which puts as
        many blocks on the device as `room` allows, spread evenly over the model, and the others on the host.
    room: the most device memory that compressed weights may take ("40GB", int). The default for "auto" is the free
        memory, minus (`slots` + 2) times the largest block, minus a fifth of the GPU's memory; on the CPU it is 0.
    source: a file or folder, as for `load_file`, with the model's names. The weights are read from there instead of
        from the model, which may be on the meta device. Stored chunks of compressed files are used as they are. With a
        group, each rank reads only the chunks of its parts.
    blocks: modules, or their names, each of which is loaded as one block. By default the blocks are the children of
        the model's ModuleLists, and a child with more than a sixteenth of the model is divided further.
    max_memory: the most host memory that the stored weights may take ("12GB", int).
    slots: the number of blocks that are on the device at a time. At least 2 are needed to overlap copies and
        decoding with computation. They take device memory for `slots` times the largest block, and for twice the stored
        bytes of the largest block that is stored on the host.
    group: a torch.distributed process group of one host, with a GPU per rank and the same model on all ranks, which all
        call `offload`. Each rank stores, pins and copies only its part of each block, and gets the other parts from the
        other GPUs. The ranks must run the same blocks in the same order, each in one thread.

    Only inference is supported. Outputs equal those of the resident model, bit for bit. Parameters stay the same
    objects, with their names, dtypes, shapes and ties. Values from a source are cast to the parameters' dtypes. While a
    block does not run, reading or writing its parameters raises NotSupportedError, which names the parameter.

    Some weights stay on the device: weights that several modules share, weights with dtypes that files do not support,
    and views of other memory. If something still uses a block's weights after a run (a view that the block has returned
    or kept, numpy, DLPack, tensors saved by autograd), the block stays on the device as long as they are used. A
    block that changes its weights in `forward` stays on the device permanently, and a warning is logged. It never runs
    with older weights. In-place changes that torch records (`_version`) are noticed after each run. Other changes
    (`.data`, numpy, kernels) are noticed on the CPU after each run, and on a GPU after a block's 1st, 2nd, 4th ... run.

    Returns an `Offloaded`. Keep a reference to it. The model stays offloaded until its `close` is called. After an
    error the model is unchanged, but with a source, a model that had weights may have some old and some new ones. If
    the weights cannot be restored for lack of memory, the error's `offloaded` is the `Offloaded`: call `close` later.
    Raises ArgumentError, for example for a model that is already offloaded. Raises NotSupportedError for parameters
    that consist of other tensors, and for a model that is compiled as a whole. Raises ModelMismatchError for a source
    that lacks weights, OutOfMemoryError for max_memory, room, host and device, and the errors of `load_file`. A forward
    with gradients, or during the capture of a CUDA graph, raises NotSupportedError.

    With a group, errors of this call are raised on all ranks, also ArgumentError if their models or arguments differ.
    Afterwards the ranks only share memory, and `close` is not collective. If a rank runs another block than the others,
    has ended, or does not reach the block within the group's timeout, the others raise ArgumentError or IOFailure,
    which names the block. `close` still restores the weights of each rank that has not ended.
    """
    arguments = model, device, keep, where, room, source, blocks, max_memory, slots
    if group is None:
        return _offload_model(*arguments)
    from ..distributed.group import group_verb

    with group_verb(group, device) as members:
        return _offload_model(*arguments, members)


def _offload_model(
    model: Any,
    device: DeviceLike,
    keep: int | str | None,
    where: Literal["host", "device", "auto"],
    room: int | str | None,
    source: SourceLike | None,
    blocks: Iterable[torch.nn.Module | str] | None,
    max_memory: int | str | None,
    slots: int,
    members: Members | None = None,
) -> Offloaded:
    frame = frame_for("torch")  # if torch is missing, the error says how to install it
    import torch

    from ..frameworks.torch import _errors_of
    from .away import is_away
    from .blocks import blocks_of, find_models

    budget, limit = parse_size(keep, "keep"), parse_size(max_memory, "max_memory")
    device_room = _check_tier(where, room)
    if members is not None and where == "device":
        raise ArgumentError("overwire: offload: where='device' leaves nothing for a group to share: omit group=")
    if not isinstance(slots, int) or slots < 1:
        raise ArgumentError(f"overwire: offload: slots {slots!r}: expected 1 or more")
    models = find_models(model)
    if any(is_away(parameter) for part in models.values() for parameter in part.parameters()):
        raise ArgumentError("overwire: offload: the model is already offloaded: call Offloaded.close() first")
    if len(models) != 1 and (source is not None or blocks is not None):
        raise ArgumentError("overwire: offload: source= and blocks= need a single model, but got a pipeline")
    inference = any(t.is_inference() for part in models.values() for t in [*part.parameters(), *part.buffers()])
    if inference and not torch.is_inference_mode_enabled():
        text = "the model was created in inference mode: call offload inside torch.inference_mode()"
        raise NotSupportedError(f"overwire: offload: {text}")
    name = check_device(device, frame)
    with _errors_of(name):
        torch.empty(0, device=name)  # raises before anything changes if the device does not exist
    handle = Offloaded(torch.device(name), inference)
    weights: Source | None = None
    if source is not None:
        from .source import Source

        prepare_gpu(name)
        weights = Source(models[""], source, handle._device, is_shared=members is not None)
    with contextlib.ExitStack() as stack:
        if weights is not None:
            stack.callback(weights.close_files)
            stack.enter_context(after_error(weights.take_memory))
        stack.enter_context(pass_error_to(handle._close_after))
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.no_grad())
        if weights is not None:
            weights.give_memory()
        parts = models.items()
        every = [block for name, part in parts for block in blocks_of(part, blocks, name, len(models) > 1)]
        whole = [t for part in models.values() for t in [*part.parameters(), *part.buffers()]]
        handle._begin_streaming(every, whole, budget, slots, limit, weights, where, device_room, members)
    return handle


def _check_tier(where: object, room: object) -> int:
    if where not in ("host", "device", "auto"):
        raise ArgumentError(f"overwire: offload: where {where!r}: expected 'host', 'device' or 'auto'")
    if room is not None and where == "host":
        raise ArgumentError(f"overwire: offload: room {room!r}: it needs where='device' or where='auto'")
    return parse_size(room, "room")


def _copy_once(tensor: torch.Tensor, device: torch.device, copies: dict[tuple[Any, ...], torch.Tensor]) -> torch.Tensor:
    # Returns a copy on the device. Tensors that share memory get the same copy.
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), device)
    if key not in copies:
        copies[key] = _copy_to(tensor, device)
    return copies[key]


def _decode_block(away: _Away, device: torch.device) -> list[torch.Tensor]:
    # Decodes a stored block on a device, and returns copies of its weights on their original devices.
    from .ring import Ring

    ring = Ring([away.stored], device, 1)
    try:
        views = ring.acquire(0, sys._getframe()).views[0]
        return [_copy_to(view, weight.device) for view, weight in zip(views, away.block.weights, strict=True)]
    finally:
        ring.release(0)
        ring.close()


def _copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    import torch

    from ..frameworks.torch import _errors_of

    with _errors_of(str(device), tensor.nbytes):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _needs_grad(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    return any(value.requires_grad for value in _tensors_in((args, kwargs)))


def _not_copied() -> NotSupportedError:
    text = "a model cannot be pickled or copied while it is offloaded: save it after Offloaded.close()"
    return NotSupportedError(f"overwire: offload: {text}")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(one)


def _frame_of_run(frame: FrameType) -> FrameType:
    # Returns the frame of the module's call, which ends when the block has run.
    one: FrameType | None = frame
    for _ in range(8):
        if one is None or one.f_code.co_name in ("_call_impl", "_wrapped_call_impl"):
            break
        one = one.f_back
    return one or frame
