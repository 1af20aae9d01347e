//go:build owfake

package queue

// FakeRing makes the default ring smaller, for tests, until end is called.
func FakeRing(slots, divided int, bytes int64) (end func()) {
	usual := ring
	ring.slots, ring.divided, ring.bytes = slots, divided, bytes
	return func() { ring = usual }
}

// FakeMaking makes a pool behave as if it were making a queue, until end is called.
func FakeMaking(p *Pool) (end func()) {
	p.making.Lock()
	return p.making.Unlock
}
