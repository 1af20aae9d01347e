"""Prepares the models of device_offload.py for other programs: EntroPack and DFloat11, which keep compressed weights in
GPU memory, and vLLM's prefetching offloader.

All three run their own released code, which must be importable. DFloat11's encoder is a Python loop that takes more
than an hour for 7.78 GB. `encode_exponents` writes the same bytes on the GPU, and `check_encoder` compares them. The
decoder is DFloat11's. vLLM's offloader runs without the rest of vLLM.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch

# Bits of a code stream that a thread of DFloat11's kernel decodes.
THREAD_BITS = 64


def blocks_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the children of the model's lists."""
    for part in model.modules():
        if isinstance(part, torch.nn.ModuleList):
            yield from part


def linears_of(block: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Returns a block's linear layers, each with its parent and its name there."""
    return [
        (parent, name, child)
        for parent in block.modules()
        for name, child in parent.named_children()
        if isinstance(child, torch.nn.Linear)
    ]


def compress_with_entropack(model: torch.nn.Module, gpu: torch.device, scheme: str) -> None:
    """Replaces all linear layers. scheme: "DFloat11" or "TileANS"."""
    import entropack

    for block in blocks_of(model):
        block.to(gpu)
        for parent, name, linear in linears_of(block):
            config = getattr(entropack, f"{scheme}Config")()
            setattr(parent, name, entropack.CompressedLinear.from_linear(linear, config=config))
    for tensor in [*model.parameters(), *model.buffers()]:
        assert tensor.device == gpu


def compress_with_dfloat11(model: torch.nn.Module, gpu: torch.device) -> None:
    """Compresses all linear layers of each block together, as DFloat11's own models do."""
    from dfloat11 import dfloat11, dfloat11_utils

    check_encoder(dfloat11_utils, gpu)
    threads = dfloat11.threads_per_block
    for block in blocks_of(model):
        block.to(gpu)
        linears = [linear for _, _, linear in linears_of(block)]
        weights = torch.cat([linear.weight.data.flatten() for linear in linears])
        with contextlib.redirect_stdout(io.StringIO()):
            codec, _, table = dfloat11_utils.get_32bit_codec(dfloat11_utils.get_codec(weights)[1])
            luts = dfloat11_utils.get_luts(table)
        bits = weights.view(torch.int16)
        encoded, gaps, positions = encode_exponents(((bits >> 7) & 255).to(torch.uint8), codec, threads[0])
        block.register_buffer("luts", luts.to(gpu))
        block.register_buffer("encoded_exponent", encoded)
        block.register_buffer("sign_mantissa", ((bits >> 8) & 128 | (bits & 127)).to(torch.uint8))
        block.register_buffer("output_positions", positions.to(torch.uint32).view(torch.uint8))
        block.register_buffer("gaps", gaps)
        sizes = torch.tensor([linear.weight.numel() for linear in linears])
        block.split_positions = sizes.cumsum(0)[:-1].tolist()
        block.shared_mem_size = threads[0] * 4 + 4 + int((positions[1:] - positions[:-1]).max()) * 2
        block.weight_injection_modules = linears
        for linear in linears:
            del linear.weight
        block.register_forward_pre_hook(dfloat11.get_hook(threads, dfloat11.bytes_per_thread))


def encode_exponents(
    exponents: torch.Tensor, codec: Any, threads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the code stream, the gaps and the output positions of DFloat11's format, on the device of `exponents`."""
    device = exponents.device
    lengths, values = torch.zeros(2, 256, dtype=torch.int64)
    for symbol, (length, value) in codec._table.items():
        if isinstance(symbol, int):
            lengths[symbol], values[symbol] = length, value
    symbols = exponents.long()
    length = lengths.to(device)[symbols]
    ends = length.cumsum(0)
    starts, total = ends - length, int(ends[-1])
    nbytes = -(-total // 8)
    words = torch.zeros(total // 32 + 2, dtype=torch.int64, device=device)
    shifted = values.to(device)[symbols] << (64 - length - starts % 32)
    words.index_add_(0, starts // 32, (shifted >> 32) & 0xFFFFFFFF)
    words.index_add_(0, starts // 32 + 1, shifted & 0xFFFFFFFF)
    stream = torch.stack([(words >> shift) & 255 for shift in (24, 16, 8, 0)], 1).to(torch.uint8).flatten()[:nbytes]
    gap, first = starts[_firsts(starts // THREAD_BITS)] % THREAD_BITS, _firsts(starts // (THREAD_BITS * threads))
    if rest := total % 8:  # the last byte has the first bits of the end's code
        end_length, end = codec._table[codec._eof]
        left = 8 - rest - end_length
        stream[-1] |= (end << left if left >= 0 else end >> -left) & 255
        if total // THREAD_BITS + 1 > len(gap):
            gap = torch.cat([gap, gap.new_tensor([total % THREAD_BITS])])
        if total // (THREAD_BITS * threads) + 1 > len(first):
            first = torch.cat([first, first.new_tensor([len(symbols)])])
    gap = torch.nn.functional.pad(gap, (0, -(-nbytes // (8 * threads)) * threads - len(gap)))
    flags = ((gap[:, None] >> torch.tensor([4, 3, 2, 1, 0], device=device)) & 1).flatten()
    flags = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8)
    weight = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], device=device)
    positions = torch.cat([first, first.new_tensor([len(symbols)])])
    return stream, (flags * weight).sum(1).to(torch.uint8), positions


def _firsts(numbers: torch.Tensor) -> torch.Tensor:
    # Returns the first position of each number in a sorted tensor.
    return torch.cat([numbers.new_zeros(1), (numbers[1:] != numbers[:-1]).nonzero().flatten() + 1])


def check_encoder(utils: Any, device: torch.device) -> None:
    """Compares `encode_exponents` with DFloat11's own encoder on several small inputs."""
    for count in (1, 2, 1000, 50_001, 50_002, 50_003, 50_004):
        weights = torch.randn(count, generator=torch.Generator().manual_seed(count)).bfloat16()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            codec = utils.get_32bit_codec(utils.get_codec(weights)[1])[0]
            exponents = ((weights.view(torch.int16) >> 7) & 255).to(torch.uint8)
            stream, gaps, positions = utils.encode(exponents.tolist(), codec, THREAD_BITS // 8, 512)
        ours = [one.cpu() for one in encode_exponents(exponents.to(device), codec, 512)]
        theirs = [torch.tensor(one.tolist()) for one in (stream, gaps, positions)]
        assert all(map(torch.equal, (one.long() for one in ours), theirs)), count


def prefetch_with_vllm(model: Any, gpu: torch.device, step: int = 2) -> None:
    """Streams all layers with vLLM's offloader. step: the number of layers that are loaded ahead. With 1, vLLM's
    default, copies do not overlap with computation if all layers are offloaded."""
    import vllm.logger
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    platform = UnspecifiedPlatform()  # CUDA's needs vLLM's compiled code, which the offloader does not use
    platform.dispatch_key = "CUDA"
    vllm.platforms._current_platform = platform
    vllm.logger._should_log_with_scope = lambda scope: False  # it would ask vLLM's process groups
    from vllm.model_executor.offloader.base import set_offloader
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    offloader = PrefetchOffloader(group_size=1, num_in_group=1, prefetch_step=step)
    set_offloader(offloader)
    model.layers = torch.nn.ModuleList(offloader.wrap_modules(layer.to(gpu) for layer in model.layers))
    offloader.post_init()
