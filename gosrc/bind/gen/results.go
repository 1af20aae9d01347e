package main

// This file writes the types of what inspect, verify and doctor return.

import (
	"reflect"
	"strings"

	"github.com/overwire/overwire/gosrc/cli"
	"github.com/overwire/overwire/gosrc/verify"
)

// pythonNames are what users see of types whose names in Go also say their package.
var pythonNames = map[string]string{
	"VerifyInspection": "Inspection", "VerifyInspectedFile": "InspectedFile",
	"VerifyInspectedTensor": "InspectedTensor", "StoredTotal": "Total", "VerifyReport": "Verification",
	"VerifyVerifiedFile": "VerifiedFile",
	"OriginalSummary":    "VerifiedOriginal", "CliDiagnosis": "Diagnosis", "BenchMachine": "Machine",
	"CliMemory": "HostMemory", "NodesNode": "HostNode", "CliGPU": "Gpu", "CliGPUDevice": "Device",
	"CliPreload": "PreloadSetting", "GdsReport": "DirectStorage", "KnobRow": "Setting",
}

// fieldTypes are fields of which Go's type says less than is true; "" leaves one out.
var fieldTypes = map[string]string{
	"InspectedFile.format": "Format", "VerifiedFile.format": "Format",
	"VerifiedFile.checked": `Literal["contents", "structure"]`, "Verification.ok": "Literal[True]",
	"Inspection.totals": "dict[str, Total]", "VerifiedFile.original": "NotRequired[VerifiedOriginal]",
	"Diagnosis.model": "", // of a command line that names one
}

// docs are the docstrings of the classes.
var docs = map[string]string{
	"InspectedTensor": `One tensor.

bytes, stored: in memory, and in the file.
ratio: stored / bytes.
alias_of: the tensor whose bytes it shares.`,
	"InspectedFile": `One file.

header: bytes before the data section.`,
	"Total": "Sums over tensors.",
	"Inspection": "What `inspect` returns." + `

totals: by dtype; "all" for all together.`,
	"VerifiedOriginal": `The plain file that a compressed one was made from.

file: the compressed one. sha256: of the plain one, in hex. compared: it equals the
one that the compressed file keeps, which keeps none if False.`,
	"VerifiedFile": `One file.

checked: every byte of its contents, or its structure alone.
original: with ` + "`verify(original=True)`" + `, of a file that keeps what it was made from.`,
	"Verification": "What `verify` returns." + `

note: what could not be proven.`,
	"Machine": "The host.",
	"HostMemory": `Bytes of host memory.

limit: of the control group, 0 for none.`,
	"HostNode": "One NUMA node with cores, and the numbers of these.",
	"Device": `One GPU.

memory: bytes.
node: the NUMA node that it is near, -1 if the system does not tell. unplaced: on a
    host of several, why neither slots nor readers can be put there.
coherent: it reads the host's memory where it lies, as over the link of Grace, and so
    do loads to it.
kernels, unusable: what it runs, or why nothing.
wire: GB/s of pinned copies to it, where that was measured.`,
	"Gpu":            "NVIDIA's driver and its devices, or the reason why there is none.",
	"PreloadSetting": "What the environment asks to preload. from: the variable that names it.",
	"DirectStorage":  "Whether GPUDirect Storage is real here, and why (not).",
	"Setting":        "One setting. from: the variable that set it.",
	"Diagnosis": "What `doctor` returns." + `

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
	b.WriteString(head + `"""What inspect, verify and doctor return, as the engine has it."""

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
