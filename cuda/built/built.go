// Package built holds the compiled GPU kernels. cuda/built/build.sh writes the
// files here; tests/test_kernels.py compares them with the sources.
package built

import _ "embed"

// X16 is the module of all kernels as a CUDA fat binary: machine code for
// sm_80, 86, 89, 90, 100 and 120, and PTX for what comes later.
//
//go:embed x16.fatbin
var X16 []byte
