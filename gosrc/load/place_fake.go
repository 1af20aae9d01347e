//go:build owfake

package load

// FakePlaces lets a test postpone memory of few bytes, until it calls restore.
func FakePlaces(part, left int64) (restore func()) {
	a, s := allotment, spare
	allotment, spare = part, left
	return func() { allotment, spare = a, s }
}
