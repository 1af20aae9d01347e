// Package avxtest tests that code with AVX or AVX-512 leaves the upper halves of the vector registers clear, as
// package avx requires.
package avxtest

import (
	"runtime"
	"testing"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// upper selects the upper halves of YMM0-15 and of ZMM0-15 in the XSAVE components. (ZMM16-31 do not slow
// anything down, and VZEROUPPER does not change them.)
const upper = 1<<2 | 1<<6

// attempts is how often a probe is repeated: if a goroutine is preempted, its registers are reloaded, and then
// all components count as in use.
const attempts = 50

// Need skips a test on processors that do not report which components are in use.
func Need(t testing.TB) {
	t.Helper()
	if !tells() {
		t.Skip("this processor cannot report the components in use (XGETBV)")
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

// Clear tests that f leaves the upper halves clear if they were clear before. The test must have called Need.
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
