//go:build goexperiment.simd && amd64

package avx

// This file clears vector registers in binaries in which Go code and preemption use AVX.

import "simd/archsimd"

var has = archsimd.X86.AVX()

// Clear clears the upper halves of the vector registers.
func Clear() {
	if has {
		archsimd.ClearAVXUpperBits()
	}
}
