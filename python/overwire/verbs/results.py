"""What inspect, verify and doctor return, as the engine has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

Format = Literal["overwire", "safetensors", "tensors"]


class InspectedTensor(TypedDict):
    """One tensor.

    bytes, stored: in memory, and in the file.
    ratio: stored / bytes.
    alias_of: the tensor whose bytes it shares.
    """

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    stored: int
    ratio: float
    coding: str
    chunks: int
    parts: NotRequired[int]
    alias_of: NotRequired[str]


class InspectedFile(TypedDict):
    """One file.

    header: bytes before the data section.
    """

    uri: str
    format: Format
    size: int
    header: int
    metadata: dict[str, str]
    tensors: list[InspectedTensor]


class Total(TypedDict):
    """Sums over tensors."""

    tensors: int
    bytes: int
    stored: int
    ratio: float


class Inspection(TypedDict):
    """What `inspect` returns.

    totals: by dtype; "all" for all together.
    """

    sources: list[InspectedFile]
    totals: dict[str, Total]


class InspectionDict(dict[str, Any]):
    """What an `Inspection` is at run time: a dict that prints in one line, and in a
    notebook as tables. Pickles and copies of it are plain dicts."""

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        every = self["totals"]["all"]
        return (
            f"Inspection({every['tensors']} tensors of {len(self['sources'])} files, bytes={every['bytes']}, "
            f"stored={every['stored']}; a dict with the keys 'sources' and 'totals')"
        )

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        every = self["totals"]["all"]
        rows = [t for source in self["sources"] for t in source["tensors"]]
        files = html.table(
            "Files",
            ("file", "format", "size", "tensors"),
            ((s["uri"], s["format"], html.size(s["size"]), f"{len(s['tensors']):,}") for s in self["sources"]),
            len(self["sources"]),
        )
        dtypes = html.table(
            "Dtypes",
            ("dtype", "tensors", "in memory", "stored", "ratio"),
            (
                (name, f"{t['tensors']:,}", html.size(t["bytes"]), html.size(t["stored"]), f"{t['ratio']:.3f}")
                for name, t in self["totals"].items()
                if name != "all"
            ),
        )
        tensors = html.table(
            f"{len(rows):,} tensors, the largest first",
            ("tensor", "dtype", "shape", "in memory", "stored", "ratio", "stored as"),
            (
                (
                    t["name"],
                    t["dtype"],
                    t["shape"],
                    html.size(t["bytes"]),
                    html.size(t["stored"]),
                    f"{t['ratio']:.3f}",
                    t["coding"],
                )
                for t in html.largest(rows, lambda t: int(t["bytes"]))
            ),
            len(rows),
            folded=True,
        )
        facts = [
            ("in memory", html.size(every["bytes"])),
            ("stored", html.size(every["stored"])),
            ("ratio", f"{every['ratio']:.3f}"),
        ]
        return html.block("Inspection", facts, files, dtypes, tensors)


class VerifiedOriginal(TypedDict):
    """The plain file that a compressed one was made from.

    file: the compressed one. sha256: of the plain one, in hex. compared: it equals the
    one that the compressed file keeps, which keeps none if False.
    """

    file: str
    sha256: str
    compared: bool


class VerifiedFile(TypedDict):
    """One file.

    checked: every byte of its contents, or its structure alone.
    original: with `verify(original=True)`, of a file that keeps what it was made from.
    """

    uri: str
    format: Format
    checked: Literal["contents", "structure"]
    tensors: int
    bytes: int
    stored: int
    original: NotRequired[VerifiedOriginal]


class Verification(TypedDict):
    """What `verify` returns.

    note: what could not be proven.
    """

    ok: Literal[True]
    tensors: int
    bytes: int
    stored: int
    seconds: float
    files: list[VerifiedFile]
    note: NotRequired[str]


class Comparison(TypedDict):
    """What `verify` returns of a file and tensors in memory.

    differ: names of tensors whose bytes, dtype or shape are not the file's.
    missing: names in the file that the model lacks.
    surplus: names in the model that the file lacks, unless they are tied to one it has.
    tensors: how many were compared. kept: how many by a digest that the file keeps.
    bytes: of the file's tensors, decoded for the others. on_gpu: those of them that GPUs
        have decoded.
    """

    ok: bool
    differ: list[str]
    missing: list[str]
    surplus: list[str]
    tensors: int
    kept: int
    bytes: int
    on_gpu: int
    seconds: float


class Machine(TypedDict):
    """The host."""

    os: str
    arch: str
    cpu: str
    cores: int
    decoder: str
    transparent_huge_pages: str
    go: str


class HostMemory(TypedDict):
    """Bytes of host memory.

    limit: of the control group, 0 for none.
    """

    total: int
    available: int
    limit: int


class HostNode(TypedDict):
    """One NUMA node with cores, and the numbers of these."""

    node: int
    cores: list[int]


class Device(TypedDict):
    """One GPU.

    memory: bytes.
    node: the NUMA node that it is near, -1 if the system does not tell. unplaced: on a
        host of several, why neither slots nor readers can be put there.
    coherent: it reads the host's memory where it lies, as over the link of Grace, and so
        do loads to it.
    kernels, unusable: what it runs, or why nothing.
    wire: GB/s of pinned copies to it, where that was measured.
    """

    index: int
    name: str
    memory: int
    compute: str
    processors: int
    pci: str
    node: int
    link_width: int
    link_gen: int
    coherent: bool
    driver: str
    kernels: NotRequired[str]
    unusable: NotRequired[str]
    unplaced: NotRequired[str]
    wire: NotRequired[float]


class Gpu(TypedDict):
    """NVIDIA's driver and its devices, or the reason why there is none."""

    reason: NotRequired[str]
    driver: NotRequired[str]
    cuda: NotRequired[str]
    devices: list[Device]


#: What the environment asks to preload. from: the variable that names it.
PreloadSetting = TypedDict("PreloadSetting", {"path": str, "from": str, "device": str, "off": bool, "found": bool})


class DirectStorage(TypedDict):
    """Whether GPUDirect Storage is real here, and why (not)."""

    real: bool
    why: str
    library: str
    version: str
    module: str


#: One setting. from: the variable that set it.
Setting = TypedDict(
    "Setting",
    {
        "name": str,
        "type": str,
        "default": str,
        "value": str,
        "from": "NotRequired[str]",
        "aliases": "NotRequired[list[str]]",
        "doc": str,
    },
)


class Diagnosis(TypedDict):
    """What `doctor` returns.

    engine: "ok", or what failed.
    """

    version: str
    python: NotRequired[str]
    machine: Machine
    cpu_features: list[str]
    cipher: str
    memory: HostMemory
    nodes: list[HostNode]
    gpu: Gpu
    preload: PreloadSetting
    gpudirect_storage: DirectStorage
    engine: str
    goroutines: int
    settings: list[Setting]
    advice: list[str]


for _kind in (Comparison, Diagnosis, Inspection, Verification):
    _kind.__module__ = "overwire"  # where users find them
