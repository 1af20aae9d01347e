//go:build !arm64

package built

// Kernel modules for the GPUs of all machines except aarch64.

import _ "embed"

// X16 is the module of the kernels for loads and codecs. It is a CUDA fat binary with machine code for sm_80, sm_90,
// sm_100 and sm_120, and PTX for sm_80 and later.
//
//go:embed x16.fatbin
var X16 []byte

// Resident is the module of the kernels for weights that stay on the device, for the same GPUs. It is loaded on
// first use.
//
//go:embed resident.fatbin
var Resident []byte
