package built

// Kernel modules for the GPUs of aarch64 machines.

import _ "embed"

// X16 is the module of the kernels for loads and codecs. It is a CUDA fat binary with machine code for the GPUs of
// Grace machines and DGX Spark (sm_90, sm_100 and sm_121), and PTX for sm_80 and later.
//
//go:embed x16_aarch64.fatbin
var X16 []byte

// Resident is the module of the kernels for weights that stay on the device, for the same GPUs. It is loaded on
// first use.
//
//go:embed resident_aarch64.fatbin
var Resident []byte
