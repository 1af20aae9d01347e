package main

// This file writes the types of the results of inspect, verify and doctor.

import (
	"reflect"
	"strings"

	"github.com/overwire/overwire/gosrc/cli"
	"github.com/overwire/overwire/gosrc/verify"
)

// pythonNames maps Go types, named by package and type, to the names that users see.
var pythonNames = map[string]string{
	"VerifyInspection": "Inspection", "VerifyInspectedFile": "InspectedFile",
	"VerifyInspectedTensor": "InspectedTensor", "StoredTotal": "Total", "VerifyReport": "Verification",
	"VerifyVerifiedFile": "VerifiedFile",
	"OriginalSummary":    "VerifiedOriginal", "CliDiagnosis": "Diagnosis", "BenchMachine": "Machine",
	"CliMemory": "HostMemory", "NodesNode": "HostNode", "CliGPU": "Gpu", "CliGPUDevice": "Device",
	"CliPreload": "PreloadSetting", "GdsReport": "DirectStorage", "KnobRow": "Setting",
}

// fieldTypes has more precise types than Go for some fields. "" omits a field.
var fieldTypes = map[string]string{
	"InspectedFile.format": "Format", "VerifiedFile.format": "Format",
	"VerifiedFile.checked": `Literal["contents", "structure"]`, "Verification.ok": "Literal[True]",
	"Inspection.totals": "dict[str, Total]", "VerifiedFile.original": "NotRequired[VerifiedOriginal]",
	"Diagnosis.model": "", // only set for a command line with a model
}

// docs has the docstrings of the classes.
var docs = map[string]string{
	"InspectedTensor": `One tensor.

bytes, stored: the sizes in memory and in the file.
ratio: stored / bytes.
alias_of: the tensor that stores its bytes.`,
	"InspectedFile": `One file.

header: number of bytes before the data section.`,
	"Total": "Sums over tensors.",
	"Inspection": "The result of `inspect`." + `

totals: sums by dtype; "all" has the sums over all dtypes.`,
	"VerifiedOriginal": `The plain file from which a compressed file was made.

file: the compressed file. sha256: the SHA-256 of the plain file, in hex. compared: True if it equals
the hash stored in the compressed file, False if the file stores none.`,
	"VerifiedFile": `One file.

checked: "contents" if every byte was checked, otherwise "structure".
sha256: the file's SHA-256 on the Hugging Face Hub, if the download recorded it and it matches.
original: set by ` + "`verify(original=True)`" + ` if the file can restore its plain file.`,
	"Verification": "The result of `verify`." + `

note: describes parts that could not be verified.`,
	"Machine": "The host.",
	"HostMemory": `Bytes of host memory.

limit: the limit of the control group, or 0.`,
	"HostNode": "One NUMA node that has cores, and the numbers of its cores.",
	"Device": `One GPU.

memory: size in bytes.
node: the NUMA-local node, or -1 if the system does not report it. unplaced: on a host with
    several nodes, why buffers and workers cannot be placed on the node.
coherent: whether kernels, and loads to the device, read host memory in place, as on Grace.
kernels, unusable: the kernels that the device runs, or why it cannot run any.
wire: the rate of pinned copies to the device in GB/s, if measured.`,
	"Gpu":            "NVIDIA's driver and its devices, or why there is no driver.",
	"PreloadSetting": "The preload set by the environment. from: environment variable that sets it.",
	"DirectStorage":  "Whether GPUDirect Storage works on this machine, and why or why not.",
	"Setting":        "One setting. from: environment variable that sets it.",
	"Diagnosis": "The result of `doctor`." + `

engine: "ok", or the error.`,
}

// resultTypes returns the text of the module overwire.verbs.results.
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
		"    _kind.__module__ = \"overwire\"  # where users find it\n")
	return b.String()
}
