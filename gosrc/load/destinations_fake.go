//go:build owfake

package load

// Tests postpone small allocations.

// FakeAllotment lets a test postpone memory of few bytes, until it calls restore.
func FakeAllotment(part, left int64) (restore func()) {
	a, s := allotment, spare
	allotment, spare = part, left
	return func() { allotment, spare = a, s }
}
