//go:build !arm64

package built

// This file has the module for the GPUs of all machines but aarch64.

import _ "embed"

// X16 is the module of all kernels as a CUDA fat binary: machine code for
// sm_80, 90, 100 and 120, and PTX for what comes later.
//
//go:embed x16.fatbin
var X16 []byte
