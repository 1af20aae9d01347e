"""Defines nvCOMP's enumerations with its names, numbers, texts and equality."""

from __future__ import annotations

from enum import Enum


class _Number(Enum):
    """The base of the enumerations. A member equals only itself, but has its number's hash, and int() returns the
    number."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __hash__(self) -> int:
        return int(self.value)


class ArrayBufferKind(_Number):
    """The memory of an Array."""

    STRIDED_DEVICE = 1
    STRIDED_HOST = 2


class BitstreamKind(_Number):
    """The framing of compressed bytes."""

    NVCOMP_NATIVE = 0
    RAW = 1
    WITH_UNCOMPRESSED_SIZE = 2


class ChecksumPolicy(_Number):
    """Whether encoding computes checksums and decoding verifies them."""

    NO_COMPUTE_NO_VERIFY = 0
    COMPUTE_AND_NO_VERIFY = 1
    NO_COMPUTE_AND_VERIFY_IF_PRESENT = 2
    COMPUTE_AND_VERIFY_IF_PRESENT = 3
    COMPUTE_AND_VERIFY = 4


class DecompressBackend(_Number):
    """The hardware that decodes. Decompression engines are not supported here."""

    NVCOMP_DECOMPRESS_BACKEND_DEFAULT = 0
    NVCOMP_DECOMPRESS_BACKEND_HARDWARE = 1
    NVCOMP_DECOMPRESS_BACKEND_CUDA = 2


class BitshuffleMode(_Number):
    """Bit shuffling before LZ4."""

    NVCOMP_BITSHUFFLE_NONE = 0
    NVCOMP_BITSHUFFLE_MSB_FIRST = 1
    NVCOMP_BITSHUFFLE_LSB_FIRST = 2


class ExecutionPolicy(_Number):
    """The tuning target of nvCOMP's kernels. It has no effect here."""

    CONCURRENCY = 0
    LATENCY = 1


class BitcompMode(_Number):
    """Whether Bitcomp is lossless or lossy."""

    BITCOMP_LOSSLESS = 0
    BITCOMP_LOSSY_FP_TO_SIGNED = 1
    BITCOMP_LOSSY_FP_TO_UNSIGNED = 2


class CascadedMode(_Number):
    """Whether Cascaded optimizes compression or decompression."""

    ASYMMETRIC = 1
    SYMMETRIC = 2


class CascadedCoarseGrainedEncoding(_Number):
    """The encodings of whole chunks in Cascaded."""

    NONE = 0


class CascadedFineGrainedEncoding(_Number):
    """The encodings inside chunks in Cascaded."""

    NONE = 0
    DELTA = 1
    RLE = 2
    FOR = 4


class CascadedTerminalCodec(_Number):
    """The last step of Cascaded."""

    UNSPECIFIED = 0
    CASCADED_BITPACK = 1
