//go:build !arm64

package built

// This file embeds the modules for the GPUs of all machines except aarch64.

import _ "embed"

// X16 is the module of the kernels that loads need, a CUDA fat binary with machine code for sm_80, 90, 100 and
// 120, and PTX for later GPUs.
//
//go:embed x16.fatbin
var X16 []byte

// Resident is the module for weights that stay on the device, for the same GPUs. It is loaded when it is first
// needed.
//
//go:embed resident.fatbin
var Resident []byte
