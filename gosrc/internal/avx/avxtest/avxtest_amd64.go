//go:build goexperiment.simd

package avxtest

// Declares the assembly functions.

// tells reports whether inUse works here.
func tells() bool

// inUse returns the XSAVE components that are in use (XGETBV of 1).
func inUse() uint64

// probe returns the components in use with the upper half of YMM0 in use, and after
// VZEROUPPER.
func probe() (dirty, clean uint64)

// Dirty writes the upper half of YMM0.
func Dirty()
