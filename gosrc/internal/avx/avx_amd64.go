//go:build goexperiment.simd && amd64

package avx

// For binaries that use AVX in Go code and in preemption.

import "simd/archsimd"

var has = archsimd.X86.AVX()

// Clear clears the upper halves of the vector registers.
func Clear() {
	if has {
		archsimd.ClearAVXUpperBits()
	}
}
