//go:build !goexperiment.simd || !amd64

package avx

// For binaries without AVX in Go code.

// Clear does nothing.
func Clear() {}
