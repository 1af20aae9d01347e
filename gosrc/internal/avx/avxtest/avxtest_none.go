//go:build !goexperiment.simd || !amd64

package avxtest

// Only x86-64 has these registers, and without the package simd they need not be cleared.

func tells() bool { return false }

func inUse() uint64 { return 0 }

func probe() (dirty, clean uint64) { return 0, 0 }

// Dirty does nothing.
func Dirty() {}
