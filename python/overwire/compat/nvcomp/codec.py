"""Implements nvCOMP's Codec, which encodes and decodes Arrays, with overwire.codecs and overwire.gpu."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ... import codecs, gpu
from ...errors import CorruptError, FormatError, NotSupportedError, OverwireError
from . import onboard, original, placing, streams
from .arrays import Array, BatchArray
from .dtypes import BYTE, Kind, integers_name, kind_of, safetensors_name
from .enums import BitshuffleMode, BitstreamKind, ChecksumPolicy, DecompressBackend

if TYPE_CHECKING:
    from typing_extensions import Self

_OPTIONS: dict[str, type | tuple[type, ...]] = {
    "algorithm": str, "device_id": int, "cuda_stream": int, "uncomp_chunk_size": int, "algorithm_type": int,
    "bitstream_kind": BitstreamKind, "checksum_policy": ChecksumPolicy, "decompress_backend": DecompressBackend,
    "bitshuffle_mode": BitshuffleMode, "data_type": object, "execution_policy": object, "use_de_sort": bool,
    "num_rles": int, "num_deltas": int, "use_bitpack": (bool, int),
    # Hints for Cascaded (since nvCOMP 6.0), and options of algorithms that only nvCOMP implements.
    **dict.fromkeys(
        ("mode", "compression_level", "terminal_codecs", "fine_grained_encodings", "coarse_grained_encodings", "delta",
         "states_per_lane", "histogram_reduction_log2", "max_sub_chunk_count", "skip_validate"), object,
    ),
    "strict": bool, "ask_nvcomp": bool,  # overwire's own options
}  # fmt: skip

_COMPUTE = (
    ChecksumPolicy.COMPUTE_AND_NO_VERIFY,
    ChecksumPolicy.COMPUTE_AND_VERIFY_IF_PRESENT,
    ChecksumPolicy.COMPUTE_AND_VERIFY,
)
_VERIFY: dict[ChecksumPolicy, bool | str] = {
    ChecksumPolicy.NO_COMPUTE_NO_VERIFY: False,
    ChecksumPolicy.COMPUTE_AND_NO_VERIFY: False,
    ChecksumPolicy.NO_COMPUTE_AND_VERIFY_IF_PRESENT: True,
    ChecksumPolicy.COMPUTE_AND_VERIFY_IF_PRESENT: True,
    ChecksumPolicy.COMPUTE_AND_VERIFY: "always",
}


# Options for reading, which are passed to nvCOMP if it must read its own streams.
_READING = ("algorithm", "device_id", "cuda_stream", "bitstream_kind", "checksum_policy", "data_type")


class _ForeignStreams(Exception):
    """Raised if some streams are not in overwire's formats. at: the positions of these streams in the batch. error: the
    error of the first one."""

    def __init__(self, at: list[int], error: OverwireError) -> None:
        super().__init__(at, error)
        self.at, self.error = at, error


class _Config:
    _codec: Any
    _sizes: list[int]
    _shapes: Any = None
    _many: bool
    _foreign: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"nvidia.nvcomp.nvcomp_impl.{type(self).__name__}: No constructor defined!")

    @classmethod
    def _of(cls, codec: Codec, sizes: list[int], many: bool, shapes: Any = None, theirs: Any = None) -> Self:
        config = cls.__new__(cls)
        config._codec, config._sizes, config._many, config._shapes, config._foreign = codec, sizes, many, shapes, theirs
        return config


class CompressConfig(_Config):
    """The result of `Codec.compression_config`: the lengths that will be encoded."""


class DecompressConfig(_Config):
    """The result of `Codec.decompression_config`: the lengths that will be decoded, and for GPU
    streams the lengths of their chunks. For nvCOMP's streams it contains nvCOMP's own config."""


class Codec:
    """Encodes and decodes an Array, or a list of Arrays, on all cores.

    The keywords are nvCOMP's, and all of them are optional: `algorithm` (decoding detects it by default),
    `device_id`, `cuda_stream`, `uncomp_chunk_size`, `bitstream_kind`, `checksum_policy`,
    `data_type`, `algorithm_type` and others. Two keywords are new. `strict`: whether a wrong checksum raises an error
    in `decode` instead of on the first access to the bytes. `ask_nvcomp`: False never passes streams that overwire
    refuses to an installed nvCOMP, because nvCOMP's decoders trust their input.

    LZ4, Snappy, Cascaded and X16 streams on a GPU are decoded there, on `cuda_stream` (by default torch's current
    stream). With a DecompressConfig the call does not wait. Errors in the data are then raised on the first access to a
    finished Array (`cpu()` waits for the Array), or by `decode` if the Codec is `strict`. X16 is also encoded on the
    GPU, and that call waits for the lengths. All other work, including checksums, runs on the CPU, and Arrays are
    copied there and back; see `backends()`. If there is a GPU, results are on the GPU. Cascaded uses elements of type
    `data_type`. By default these have the Arrays' type, or are bytes if the Arrays differ in type.

    Native streams, sized streams and Cascaded are overwire's own formats (docs/nvcomp.md). RAW streams of the other
    algorithms are standard. ANS and Bitcomp streams, and native, sized and Cascaded streams that nvCOMP wrote, are
    passed to an installed nvCOMP, and the call waits for the result. Without nvCOMP, the error names the wheel to
    install. Threads may share a Codec.

    Raises ValueError for unknown keywords and algorithms, RuntimeError for values of the wrong type.
    """

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in _OPTIONS:
                raise ValueError(f'Unsupported argument: "{name}".')
            if not isinstance(value, _OPTIONS[name]):
                text = f"of type {type(value)} to the type of {name}: {_OPTIONS[name]}"
                raise RuntimeError(f"Unable to cast Python instance {text}")
        self._closed = False
        self._kwargs = kwargs
        self._strict: bool = kwargs.get("strict", False)
        self._policy: ChecksumPolicy = kwargs.get("checksum_policy", ChecksumPolicy.NO_COMPUTE_NO_VERIFY)
        self._verifies: bool | str = _VERIFY[self._policy]
        kind: BitstreamKind = kwargs.get("bitstream_kind", BitstreamKind.NVCOMP_NATIVE)
        self._bitstream = codecs.BITSTREAMS[int(kind)]
        self._chunk: int | None = kwargs.get("uncomp_chunk_size")
        self._level: int = kwargs.get("algorithm_type", 1)
        layers = [kwargs.get(name) for name in ("num_rles", "num_deltas", "use_bitpack")]
        self._cascaded: Any = None
        if layers != [None, None, None]:
            rles, deltas, pack = (n if n is not None else d for n, d in zip(layers, (2, 1, True), strict=True))
            self._cascaded = (rles, deltas, bool(pack))
        self._type: Kind | None = kind_of(kwargs["data_type"]) if kwargs.get("data_type") else None
        self._algorithm = _algorithm_named(kwargs.get("algorithm", ""))
        self._original: original.Original | None = None  # set if only nvCOMP supports the algorithm
        self._reader: original.Original | None = None  # set once nvCOMP was needed to read a stream
        self._device_id: int | None = kwargs.get("device_id")
        self._stream: int | None = int(kwargs["cuda_stream"]) or 1 if "cuda_stream" in kwargs else None
        if self._device_id is not None and self._device_id >= 0 and gpu.count() and self._device_id >= gpu.count():
            raise ValueError(f"device_id {self._device_id}: expected less than {gpu.count()}, the number of GPUs")
        if self._stream is not None and self._stream > 2 and gpu.count():
            streams.check_device(self._stream, self._device([]) or 0)
        if self._algorithm in original.ALGORITHMS:
            own = {k: v for k, v in kwargs.items() if k not in ("strict", "ask_nvcomp")}
            self._original = original.Original(self._algorithm, own | {"algorithm": self._algorithm})
            return
        if kwargs.get("bitshuffle_mode") not in (None, BitshuffleMode.NVCOMP_BITSHUFFLE_NONE):
            raise NotSupportedError("overwire: nvcomp: bit shuffling is not supported: leave bitshuffle_mode out")
        if kwargs.get("decompress_backend") is DecompressBackend.NVCOMP_DECOMPRESS_BACKEND_HARDWARE:
            why = "decompression engines are not supported: leave decompress_backend out"
            raise NotSupportedError(f"overwire: nvcomp: {why}")
        if self._policy is not ChecksumPolicy.NO_COMPUTE_NO_VERIFY and self._bitstream != "native":
            raise ValueError("only BitstreamKind.NVCOMP_NATIVE has checksums")
        if self._chunk is not None and self._chunk <= 0:
            raise ValueError(f"uncomp_chunk_size {self._chunk}: expected more than 0")
        if self._algorithm:  # check level and chunk size before anything is encoded
            self._max_sizes([1])
            if self._level != 1 or self._cascaded is not None:
                codecs.encode(b"", self._algorithm, level=self._level, cascaded=self._cascaded)

    def encode(self, array: Any, out: Any = None, compression_config: CompressConfig | None = None) -> Any:
        """Compresses an Array (or any object that `as_array` accepts), or each item of a list.

        Returns an Array of `|i1`, or a BatchArray. `out` is an Array from a Codec, which is resized, or writable
        memory, which the result shares. If the source is a list, `out` is a list of these. Raises ValueError if `out`
        is too small or overlaps a source or another `out`, or if the lengths differ from the config's.
        """
        self._check_open()
        many, sources = placing.as_list(array)
        device = self._device(sources)
        outs = placing.prepare_outputs(out, many, sources, 1 if device is None else self._stream_for(device))
        if self._original is not None:
            return self._original.run("encode", sources, many, outs=outs, compression_config=compression_config)
        if compression_config is not None:
            self._check_config(compression_config, CompressConfig)
            sizes = [a.buffer_size for a in sources]
            if compression_config._sizes != sizes:
                raise ValueError(f"the CompressConfig is for {compression_config._sizes} bytes, not {sizes}")
        if not self._algorithm:
            raise ValueError("this Codec has no algorithm: it can only decode; pass algorithm= to encode")
        results = None
        if device is not None and sources and self._algorithm == "X16" and self._policy not in _COMPUTE:
            there = self._sources_on(sources, device)
            if there is not None:
                names = [safetensors_name(self._type or a._kind) for a in sources]
                chunk = self._chunk or codecs.default_chunk("X16")
                results = onboard.encode(there, names, self._bitstream, chunk, outs, device, self._stream_for(device))
        if results is None:
            results = self._run_on_host("encode", sources, outs, BYTE)
        return BatchArray(results) if many else results[0]

    def decode(
        self, src: Any, data_type: Any = "", out: Any = None, decompression_config: DecompressConfig | None = None
    ) -> Any:
        """Decompresses an Array, or each item of a list. `out` is as in `encode`.

        `data_type` is a type string, a name ("bfloat16") or a dtype of numpy or torch. The default is the Codec's
        data_type, or `|i1` if it has none. data_type only labels the bytes, which are never converted.

        A list may contain both overwire's and nvCOMP's streams.

        Raises CorruptError and FormatError (ValueErrors) for bad bytes. A wrong
        checksum raises RuntimeError on first access to the Array, unless the Codec is `strict`.
        Raises RuntimeError if checksums must be verified and the stream has none.
        """
        self._check_open()
        kind = kind_of(data_type) if data_type else self._type or BYTE
        many, sources = placing.as_list(src)
        device = self._device(sources)
        outs = placing.prepare_outputs(out, many, sources, 1 if device is None else self._stream_for(device))
        if self._original is not None:
            config = decompression_config
            return self._original.run("decode", sources, many, data_type, outs=outs, decompression_config=config)
        sizes = shapes = None
        if decompression_config is not None:
            self._check_config(decompression_config, DecompressConfig)
            if decompression_config._foreign is not None and self._reader is not None:
                config = decompression_config._foreign
                foreign = self._reader.run("decode", sources, many, outs=outs, decompression_config=config)
                return placing.with_kind(foreign, kind)
            sizes, shapes = decompression_config._sizes, decompression_config._shapes
            if len(sizes) != len(sources):
                raise ValueError(f"the config is for {len(sizes)} buffers, not {len(sources)}")
        try:
            outputs = None
            if device is not None and sources and self._verifies is False:
                outputs = self._run_on_gpu(sources, outs, kind, shapes, device)
            if outputs is None:
                outputs = self._run_on_host("decode", sources, outs, kind, sizes)
            return BatchArray(outputs) if many else outputs[0]
        except _ForeignStreams as found:
            nvcomp, at = self._ask_nvcomp(found), found.at
        if not many:
            return placing.with_kind(nvcomp.run("decode", sources, False, outs=outs), kind)
        native = [i for i in range(len(sources)) if i not in at]
        parts = [outs and [outs[i] for i in part] for part in (at, native)]
        foreign = placing.with_kind(nvcomp.run("decode", [sources[i] for i in at], True, outs=parts[0]), kind)
        own = self.decode([sources[i] for i in native], data_type, parts[1])
        results = dict(zip(at + native, [*foreign, *own], strict=True))
        return BatchArray(results[i] for i in range(len(sources)))

    def _run_on_gpu(
        self,
        sources: list[Array],
        outs: list[Array | None] | None,
        kind: Kind,
        shapes: list[onboard.Shape] | None,
        device: int,
    ) -> list[Array] | None:
        """Decodes on a GPU. Returns None if the kernels do not support the streams. Raises _ForeignStreams."""
        if self._algorithm and self._algorithm not in gpu.algorithms():
            return None
        stream = self._stream_for(device)
        if (there := self._sources_on(sources, device)) is None:
            return None
        results = onboard.decode(there, shapes, self._algorithm, self._bitstream, kind, outs, device, stream)
        if results is None:
            return None
        if shapes is None and self._bitstream == "with_size" and self._algorithm != "X16" and self._may_ask():
            # Only decoding shows whether nvCOMP wrote a sized stream, so this waits for the result.
            errors = enumerate(array._pending_error() for array in results)
            if corrupt := {i: error for i, error in errors if isinstance(error, CorruptError)}:
                raise _ForeignStreams(list(corrupt), next(iter(corrupt.values())))
        if self._strict:
            for array in results:
                array._wait_until_ready()
        return results

    def _sources_on(self, sources: list[Array], device: int) -> list[Array] | None:
        """Returns the sources on a device. Copies sources that are elsewhere."""
        there = []
        where = (2, device)
        for a in sources:
            placing.check_dense(a)
            if a._pending is not None:
                a._wait_until_ready(a._device != where)
            source = a if a._device == where else a._copy_to_device(stream=self._stream_for(device), index=device)
            if source is None:
                return None
            there.append(source)
        return there

    def _stream_for(self, device: int) -> int:
        """Returns the stream for this Codec's work: its `cuda_stream`, or torch's current stream by default."""
        return self._stream if self._stream is not None else gpu.current_stream(device)

    def _run_on_host(
        self,
        op: str,
        sources: list[Array],
        outs: list[Array | None] | None,
        kind: Kind,
        sizes: Sequence[int] | None = None,
    ) -> list[Array]:
        """Encodes or decodes on the CPU. Raises _ForeignStreams."""
        device = self._device(sources)
        hosts = [placing.on_host(a) for a in sources]
        spans = [a._span for a in hosts]
        into: list[codecs.Span | None] = [None] * len(sources)
        need: list[int] = []
        if outs is not None:
            if any(o is not None and o._native for o in outs):
                need = self._bytes_needed(op, hosts, spans)
            into = [placing.span_of(o, need[i] if need else 0) for i, o in enumerate(outs)]
        if streams.has_allocator("host") and device is None and None in into:
            # Allocates the maximum that may be needed.
            need = need or self._bytes_needed(op, hosts, spans)
            into = [s if s is not None else streams.allocate("host", n) for s, n in zip(into, need, strict=True)]
        coded_buffers = codecs.run(
            op, spans, algorithm=self._algorithm or None, bitstream=self._bitstream,
            chunk_size=self._chunk if op == "encode" else None, level=self._level,
            dtype=self._dtype(hosts) if op == "encode" else None, cascaded=self._cascaded,
            checksums=op == "encode" and self._policy in _COMPUTE, verify=self._verifies if op == "decode" else False,
            out=into,
        )  # fmt: skip
        self._find_foreign(coded_buffers, spans)
        results = []
        for i, result in enumerate(coded_buffers):
            late = self._error_of(result)
            if sizes is not None and result.nbytes != sizes[i]:
                raise ValueError(f"buffer {i} decodes to {result.nbytes} bytes, but the config says {sizes[i]}")
            target = outs[i] if outs is not None else None
            stream = 1 if device is None else self._stream_for(device)
            results.append(placing.place_result(result, into[i], target, kind, device, stream))
            results[i]._pending = late
        return results

    def _dtype(self, hosts: list[Array]) -> str | None:
        """Returns the dtype for an encoder."""
        kinds = {a._kind for a in hosts} if self._type is None else {self._type}
        kind = kinds.pop() if len(kinds) == 1 else (1, 8, 1)
        return integers_name(kind) if self._algorithm == "Cascaded" else safetensors_name(kind)

    def _bytes_needed(self, op: str, hosts: list[Array], spans: list[codecs.Span]) -> list[int]:
        if op == "encode":
            return self._max_sizes([a.buffer_size for a in hosts])
        # decode raises the error
        return [0 if c.error is not None else c.nbytes for c in self._ask_lengths(spans)]

    def _ask_lengths(self, spans: list[codecs.Span]) -> list[codecs.Coded]:
        """Reads the lengths of the contents from the streams' headers."""
        return codecs.run("size", spans, algorithm=self._algorithm or None, bitstream=self._bitstream)

    def _find_foreign(self, made: Sequence[codecs.Coded], spans: Sequence[codecs.Span]) -> None:
        """Raises _ForeignStreams if nvCOMP may have written some of the refused streams."""
        at = [i for i, (result, span) in enumerate(zip(made, spans, strict=True)) if self._may_be_foreign(result, span)]
        if at:
            error = made[at[0]].error
            assert isinstance(error, OverwireError)
            raise _ForeignStreams(at, error)

    def _may_be_foreign(self, coded: codecs.Coded, span: codecs.Span) -> bool:
        if coded.error is None or self._algorithm == "X16":
            return False
        if self._bitstream == "native":
            return isinstance(coded.error, (FormatError, NotSupportedError)) and not codecs.is_native(span)
        is_own_format = self._bitstream == "with_size" or self._algorithm == "Cascaded"
        return is_own_format and isinstance(coded.error, CorruptError)

    def _may_ask(self) -> bool:
        return self._kwargs.get("ask_nvcomp", True) and original.usable()

    def _ask_nvcomp(self, found: _ForeignStreams) -> original.Original:
        """Returns nvCOMP for reading its own streams. Without nvCOMP, raises overwire's error with the name of what is
        missing."""
        if self._reader is None:
            if not self._may_ask():
                raise original.hinted(found.error) if self._kwargs.get("ask_nvcomp", True) else found.error
            options = {name: self._kwargs[name] for name in _READING if name in self._kwargs}
            if not isinstance(options.get("data_type", ""), str) or options.get("data_type", "<")[:1] not in "<|":
                del options["data_type"]  # only overwire knows this name
            self._reader = original.Original(self._algorithm or "the stream", options, self._verifies is not False)
        return self._reader

    def _error_of(self, coded: codecs.Coded) -> RuntimeError | None:
        """Raises the error of a buffer, or returns an error to be raised later."""
        if (error := coded.error) is None:
            return None
        if isinstance(error, OverwireError) and error.rule == "NoChecksums":
            raise RuntimeError("The stream has no checksums, and the policy is COMPUTE_AND_VERIFY.") from error
        if coded.summed and isinstance(error, CorruptError) and not self._strict:
            late = RuntimeError("Checksum doesn't match.")
            late.__cause__ = error
            return late
        raise error

    def compression_config(self, uncompressed_size: int | Sequence[int]) -> CompressConfig:
        """Makes a config for contents of these lengths in bytes, each above 0."""
        self._check_open()
        if self._original is not None:
            config: CompressConfig = self._original.codec.compression_config(uncompressed_size)
            return config
        many = not isinstance(uncompressed_size, int)
        sizes = [uncompressed_size] if isinstance(uncompressed_size, int) else list(uncompressed_size)
        if not sizes or min(sizes) <= 0:
            raise ValueError("uncompressed sizes: expected at least one, each greater than zero")
        return CompressConfig._of(self, sizes, many)

    def decompression_config(self, src: Any) -> DecompressConfig:
        """Makes a config for decoding these streams, or streams that this Codec encodes with a CompressConfig. Raises
        the errors of `decode` for headers."""
        self._check_open()
        if self._original is not None:
            codec = self._original.codec
            many, sources = (False, []) if isinstance(src, self._original.impl.CompressConfig) else placing.as_list(src)
            inputs = self._original.to_theirs(sources, many) if sources else src
            config: DecompressConfig = codec.decompression_config(inputs)
            return config
        if isinstance(src, CompressConfig):
            self._check_config(src, CompressConfig)
            chunk = self._chunk or codecs.default_chunk(self._algorithm)
            native = self._bitstream == "native"
            shapes = [(n, chunk if native else max(n, 1), self._algorithm) for n in src._sizes]
            return DecompressConfig._of(self, list(src._sizes), src._many, shapes)
        many, sources = placing.as_list(src)
        peeks = [self._peek_stream(a) for a in sources]
        if None not in peeks:
            return DecompressConfig._of(self, [shape[0] for shape in peeks if shape is not None], many, peeks)
        try:
            return DecompressConfig._of(self, self._sizes(sources), many)
        except _ForeignStreams as theirs_all:
            nvcomp, at = self._ask_nvcomp(theirs_all), theirs_all.at
        if len(at) < len(sources):
            why = "one config cannot describe both overwire's and nvCOMP's streams: make two configs"
            raise NotSupportedError(f"overwire: nvcomp: {why}")
        config = nvcomp.codec.decompression_config(nvcomp.to_theirs(sources, many))
        return DecompressConfig._of(self, [], many, theirs=config)

    def _peek_stream(self, array: Array) -> onboard.Shape | None:
        """Reads the header of a stream on a GPU. Returns None if only the host can read the header."""
        if self._device([array]) is None or array._strides is not None or not array._span.nbytes:
            return None
        there = array if array._device != streams.HOST else array._copy_to_device()
        return None if there is None else onboard.shape_of(there, self._algorithm, self._bitstream, there._stream)

    def get_max_comp_buffer_size(self, source: Any) -> int:
        """Returns the maximum number of bytes that encoding an Array can produce."""
        self._check_open()
        array = placing.as_list(source)[1][0]
        if self._original is not None:
            return self._original.ask_size("get_max_comp_buffer_size", array)
        return self._max_sizes([array.buffer_size])[0]

    get_max_compressed_buffer_size = get_max_comp_buffer_size  # the name in the release notes of nvCOMP 5.3

    def get_uncomp_buffer_size(self, source: Any) -> int:
        """Returns the number of bytes that a stream decodes to."""
        self._check_open()
        array = placing.as_list(source)[1][0]
        if self._original is not None:
            return self._original.ask_size("get_uncomp_buffer_size", array)
        shape = self._peek_stream(array)
        try:
            return shape[0] if shape is not None else self._sizes([array])[0]
        except _ForeignStreams as found:
            nvcomp = self._ask_nvcomp(found)
        return nvcomp.ask_size("get_uncomp_buffer_size", array)

    def get_required_compression_alignment(self) -> int:
        """Returns an alignment that nvCOMP also accepts. This package requires none."""
        return 8 if self._algorithm else 16

    get_required_decompression_alignment = get_required_compression_alignment

    def _sizes(self, sources: list[Array]) -> list[int]:
        spans = [placing.on_host(a)._span for a in sources]
        lengths = self._ask_lengths(spans)
        self._find_foreign(lengths, spans)
        for length in lengths:
            self._error_of(length)
        return [c.nbytes for c in lengths]

    def _max_sizes(self, sizes: list[int]) -> list[int]:
        how: Any = {"bitstream": self._bitstream, "chunk_size": self._chunk, "checksums": self._policy in _COMPUTE}
        bounds: list[int] = codecs.max_size(sizes, self._algorithm, **how)
        return bounds

    def _check_config(self, config: Any, kind: type[Any]) -> None:
        if not isinstance(config, kind):
            raise TypeError(f"expected a {kind.__name__}, got {type(config).__name__}")
        if config._codec is not self:
            raise ValueError(f"the {kind.__name__} belongs to another Codec")

    def _device(self, sources: list[Array]) -> int | None:
        """Returns the GPU for results: the Codec's `device_id`, or the sources' GPU, or the current GPU. Returns None
        without a GPU; results then stay on the host."""
        if self._device_id is not None and self._device_id >= 0 and gpu.count():
            return self._device_id
        for a in sources:
            if a._device != streams.HOST:
                return a._device[1]
        return streams.current() if gpu.count() else None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the Codec was closed")

    def __enter__(self) -> Codec:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._original = self._reader = None


def _algorithm_named(algorithm: str) -> str:
    for name in (*codecs.algorithms(), *original.ALGORITHMS):
        if name.lower() == algorithm.lower():
            return name
    if algorithm:
        raise ValueError(f'Unknown algorithm: "{algorithm}".')
    return ""


def backends() -> dict[str, str]:
    """Returns where each algorithm runs on this machine: "cpu", or on a machine with a GPU, where its Arrays are
    decoded and encoded. For nvCOMP's own algorithms the text is "nvcomp VERSION", or names the missing wheel."""
    places = {name: "cpu" for name in codecs.algorithms()}
    if gpu.count():
        for name in places:
            decodes = "cuda" if name in gpu.algorithms() else "cpu, copied from and to the GPU"
            encodes = "cuda" if name == "X16" else "cpu, copied from and to the GPU"
            places[name] = f"decode: {decodes}; encode: {encodes}"
    return places | dict.fromkeys(original.ALGORITHMS, original.backend())
