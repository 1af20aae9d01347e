//go:build owfake

package stream

// FakePackSlot makes a Packer's slots smaller, for tests, until end is called.
func FakePackSlot(n int64) (end func()) {
	usual := packSlot
	packSlot = n
	return func() { packSlot = usual }
}
