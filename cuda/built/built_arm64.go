package built

// This file embeds the modules for the GPUs of aarch64 machines.

import _ "embed"

// X16 is the module of the kernels that loads need, a CUDA fat binary with machine code for sm_90, 100 and 121,
// the GPUs of Grace and of DGX Spark, and PTX for sm_80 and later.
//
//go:embed x16_aarch64.fatbin
var X16 []byte

// Resident is the module for weights that stay on the device, for the same GPUs. It is loaded when it is first
// needed.
//
//go:embed resident_aarch64.fatbin
var Resident []byte
