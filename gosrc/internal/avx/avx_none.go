//go:build !goexperiment.simd || !amd64

package avx

// This file is for binaries without AVX in Go code.

// Clear does nothing.
func Clear() {}
