package queue

import "testing"

// The other rings have more and smaller slots than the default ring. They take at most the memory of the first queue.
func TestFinerRings(t *testing.T) {
	slots, size := DefaultRing()
	fine, fineSize := RemoteRing()
	finest, finestSize := ExchangeRing(11)
	for _, cut := range [][2]int64{{int64(fine), fineSize}, {int64(finest), finestSize}} {
		if cut[0] <= int64(slots) || cut[1] >= size ||
			cut[0]*slotStride(cut[1]) > int64(ring.divided)*slotStride(size) {
			t.Errorf("%d slots of %d bytes, and %d slots of %d bytes by default", cut[0], cut[1], slots, size)
		}
	}
}
