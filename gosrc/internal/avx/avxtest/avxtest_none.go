//go:build !goexperiment.simd || !amd64

package avxtest

// Only x86-64 has such registers, and without the package simd there is nothing to
// clear.

func tells() bool { return false }

func inUse() uint64 { return 0 }

func probe() (dirty, clean uint64) { return 0, 0 }

// Dirty does nothing.
func Dirty() {}
