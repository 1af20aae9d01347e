// Package avxtest tests that code with AVX or AVX-512 leaves the upper halves of the vector registers clear, as package
// avx demands.
package avxtest

import (
	"runtime"
	"testing"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// The upper halves of YMM0-15 and of ZMM0-15 among the components of XSAVE. (ZMM16-31 do not slow anything down, and
// VZEROUPPER does not change them.)
const upper = 1<<2 | 1<<6

// attempts: a preempted goroutine gets its registers reloaded, so all are in use.
const attempts = 50

// Need skips a test on processors that do not report which components are in use.
func Need(t testing.TB) {
	t.Helper()
	if !tells() {
		t.Skip("no XGETBV of the components in use on this machine")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for range attempts {
		if dirty, clean := probe(); dirty&upper != 0 && clean&upper == 0 {
			return
		}
	}
	t.Skip("this processor does not track the upper halves")
}

// Clear tests that f leaves the upper halves clear if they were clear before. The test has called Need.
func Clear(t testing.TB, what string, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	used := uint64(0)
	for range attempts {
		avx.Clear()
		f()
		if used = inUse(); used&upper == 0 {
			return
		}
	}
	t.Errorf("%s leaves the vector registers dirty: components in use %#x", what, used)
}
