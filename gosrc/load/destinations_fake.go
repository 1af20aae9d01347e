//go:build owfake

package load

// This file lets tests postpone small allocations.

// FakeAllotment lets a test postpone allocations of a few bytes, until it calls restore.
func FakeAllotment(part, left int64) (restore func()) {
	a, s := allotment, spare
	allotment, spare = part, left
	return func() { allotment, spare = a, s }
}
