"""What saves report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """What was written.

    bytes_in, bytes_out: bytes of the tensors, and of the files that hold them.
    bytes_copied: of the files in copied.
    ratio: out / in, 1.0 without tensors.
    seconds: wall time.
    stages: seconds by what they went into, summed over threads, which work side by side:
        "plan" (samples of the tensors, ties, memory for the save), "read" (bytes of files,
        and of GPUs' memory), "encode" (by the host, or waiting for a GPU), "hash"
        (checksums and hashes by the host), "write" (to the files, until they are on the
        disk; to a store; with wait=False to memory first) and "publish" (names of the files).
    compressed, aliases: how many tensors are stored compressed, and how many as
        another's bytes (tied or identical).
    files: absolute paths, or URIs, in the order written, an index.json last.
    copied: those of files that a converted folder had beside its weights, as they were.
    left: what of a converted folder was not copied: weights that are not the model's
        (of 64 MiB and more, if they are not safetensors), hidden files, and links that
        lead out of the folder to anything but the blobs of its Hugging Face cache.
    originals: of `convert`, files by name with the SHA-256, in hex, of the plain
        file that a compressed one keeps, or that a decompressed one is, byte for byte;
        "" where it was not hashed: it came over a network, `sha256=False`, or the
        compressed file keeps none.
    on_gpu: how many of bytes_in were encoded by the GPU that they were on; the rest, by
        the host.
    staged: seconds after which the tensors could change, with wait=False; else 0.
    anew: plain files made of compressed ones that keep no original: their tensors are
        the same, the header is new.
    """

    __module__ = "overwire"

    bytes_in: int
    bytes_out: int
    ratio: float
    seconds: float
    tensors: int
    compressed: int
    aliases: int
    files: tuple[str, ...]
    left: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    originals: Mapping[str, str] = field(default_factory=dict, hash=False)
    anew: tuple[str, ...] = ()
    on_gpu: int = 0
    staged: float = 0.0
    bytes_copied: int = 0
    stages: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        return (
            f"Report({self.tensors} tensors, {self.compressed} compressed, in {len(self.files)} files: "
            f"bytes_in={self.bytes_in}, "
            f"bytes_out={self.bytes_out}, ratio={self.ratio:.4f}, seconds={self.seconds:.3f})"
        )

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        facts = [
            ("tensors", f"{self.tensors:,}"),
            ("compressed", f"{self.compressed:,}"),
            ("in", html.size(self.bytes_in)),
            ("out", html.size(self.bytes_out)),
            ("ratio", f"{self.ratio:.3f}"),
            ("seconds", f"{self.seconds:.2f}"),
            *((f"  {name}", f"{seconds:.2f}") for name, seconds in self.stages.items()),
        ]
        columns = ("file", "SHA-256 of the original") if self.originals else ("file",)
        rows = ((file, self.originals.get(file, ""))[: len(columns)] for file in self.files)
        tables = [html.table("Files written", columns, rows, len(self.files))]
        if self.left:
            tables.append(html.table("Not copied", ("file",), ((f,) for f in self.left), len(self.left)))
        return html.block("Report", facts, *tables)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Report:
        """The report from the engine's JSON."""
        fields: dict[str, Any] = {name: float(report[name]) for name in ("ratio", "seconds")}
        fields |= {name: tuple(report.get(name) or ()) for name in ("files", "left", "copied", "anew")}
        fields["originals"] = {one["file"]: one["sha256"] for one in report.get("originals") or ()}
        stages: Mapping[str, int] = report.get("stages") or {}
        fields["stages"] = {name.removesuffix("_ns"): count / 1e9 for name, count in stages.items()}
        return cls(**{**report, **fields})
