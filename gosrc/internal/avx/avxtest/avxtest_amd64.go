//go:build goexperiment.simd

package avxtest

// This file declares the assembly functions.

// tells reports whether this processor supports inUse.
func tells() bool

// inUse returns the XSAVE components in use (XGETBV with ECX = 1).
func inUse() uint64

// probe returns the components in use after writing the upper half of YMM0, and after VZEROUPPER.
func probe() (dirty, clean uint64)

// Dirty writes the upper half of YMM0.
func Dirty()
