//go:build !arm64

package built

// This file has the module for the GPUs of all machines but aarch64.

import _ "embed"

// X16 is the module of the kernels that loads need as a CUDA fat binary: machine code for
// sm_80, 90, 100 and 120, and PTX for what comes later.
//
//go:embed x16.fatbin
var X16 []byte

// Resident is the module for weights that stay on the device, which is loaded when it is
// first needed, for the same GPUs.
//
//go:embed resident.fatbin
var Resident []byte
