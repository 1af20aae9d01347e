//go:build !goexperiment.simd || !amd64

package avx

// This file is for binaries in which Go code does not use AVX.

// Clear does nothing.
func Clear() {}
