//go:build owfake

package load

// This file lets tests postpone small allocations.

// FakeAllotment replaces allotment and spare until restore is called, so tests can postpone small allocations.
func FakeAllotment(part, left int64) (restore func()) {
	a, s := allotment, spare
	allotment, spare = part, left
	return func() { allotment, spare = a, s }
}
