package main

// Writes the types of the results of inspect, verify and doctor.

import (
	"reflect"
	"strings"

	"github.com/overwire/overwire/gosrc/cli"
	"github.com/overwire/overwire/gosrc/verify"
)

// pythonNames has the names that users see, for types with the package in their Go names.
var pythonNames = map[string]string{
	"VerifyInspection": "Inspection", "VerifyInspectedFile": "InspectedFile",
	"VerifyInspectedTensor": "InspectedTensor", "StoredTotal": "Total", "VerifyReport": "Verification",
	"VerifyVerifiedFile": "VerifiedFile",
	"OriginalSummary":    "VerifiedOriginal", "CliDiagnosis": "Diagnosis", "BenchMachine": "Machine",
	"CliMemory": "HostMemory", "NodesNode": "HostNode", "CliGPU": "Gpu", "CliGPUDevice": "Device",
	"CliPreload": "PreloadSetting", "GdsReport": "DirectStorage", "KnobRow": "Setting",
}

// fieldTypes has more precise types than Go's for some fields; "" leaves a field out.
var fieldTypes = map[string]string{
	"InspectedFile.format": "Format", "VerifiedFile.format": "Format",
	"VerifiedFile.checked": `Literal["contents", "structure"]`, "Verification.ok": "Literal[True]",
	"Inspection.totals": "dict[str, Total]", "VerifiedFile.original": "NotRequired[VerifiedOriginal]",
	"Diagnosis.model": "", // only for a command line that names one
}

// docs are the docstrings of the classes.
var docs = map[string]string{
	"InspectedTensor": `One tensor.

bytes, stored: its bytes in memory, and in the file.
ratio: stored / bytes.
alias_of: the tensor with which it shares its bytes.`,
	"InspectedFile": `One file.

header: bytes before the data section.`,
	"Total": "Sums over tensors.",
	"Inspection": "The result of `inspect`." + `

totals: by dtype; "all" is the sum.`,
	"VerifiedOriginal": `The plain file that a compressed one was made from.

file: the compressed file. sha256: of the plain file, in hex. compared: True if it equals
the sum stored in the compressed file; False if none is stored there.`,
	"VerifiedFile": `One file.

checked: every byte of its contents, or only its structure.
sha256: the Hugging Face Hub's SHA-256 of the file, if the download recorded it; the file has it.
original: with ` + "`verify(original=True)`" + `, for a file that can restore its plain file.`,
	"Verification": "The result of `verify`." + `

note: what could not be verified.`,
	"Machine": "The host.",
	"HostMemory": `Bytes of host memory.

limit: of the control group; 0: none.`,
	"HostNode": "One NUMA node with cores, and the cores' numbers.",
	"Device": `One GPU.

memory: bytes.
node: its NUMA-local node; -1 if the system does not tell. unplaced: on a host with
    several nodes, why slots and readers cannot be placed there.
coherent: it reads host memory in place, as on Grace, and so do loads to it.
kernels, unusable: the kernels that it runs, or why it cannot run any.
wire: GB/s of pinned copies to it, if measured.`,
	"Gpu":            "NVIDIA's driver and its devices, or why there is no driver.",
	"PreloadSetting": "The preload that the environment asks for. from: the variable that names it.",
	"DirectStorage":  "Whether GPUDirect Storage works here, and the reason.",
	"Setting":        "One setting. from: the variable that set it.",
	"Diagnosis": "The result of `doctor`." + `

engine: "ok", or what failed.`,
}

// resultTypes writes the module of these types, which users find in overwire.
func resultTypes() string {
	c := &classes{texts: map[string]string{}, names: pythonNames, kinds: fieldTypes, docs: docs, flat: true}
	for _, t := range []reflect.Type{
		reflect.TypeFor[verify.Inspection](), reflect.TypeFor[verify.Report](), reflect.TypeFor[cli.Diagnosis](),
	} {
		c.class(t, false)
	}
	var b strings.Builder
	b.WriteString(head + `"""The results of inspect, verify and doctor, as the engine defines them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

Format = Literal["overwire", "safetensors", "tensors", "gguf"]
`)
	for _, name := range c.order {
		b.WriteString(c.texts[name])
	}
	b.WriteString("\n\nfor _kind in (Diagnosis, Inspection, Verification):\n" +
		"    _kind.__module__ = \"overwire\"  # where users find them\n")
	return b.String()
}
