package queue

// This file divides a queue into slots.

import (
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// The default geometry of a queue has enough slots for readers, copies and decoders, and each slot is large
// enough for the copy engine. With their tables they take 70 MiB, pinned and, unless the device is coherent, in
// staging on it. Scratch on the device may take another 16 MiB.
const (
	DefaultSlots     = 8
	DefaultSlotBytes = 8 << 20
)

// dividedSlots is how many of the default slots RemoteRing divides into smaller ones.
const dividedSlots = 12

// ring is the default geometry. Tests on the fake driver make it smaller.
var ring = struct {
	slots, divided int
	bytes          int64
}{DefaultSlots, dividedSlots, DefaultSlotBytes}

// headBytes is the size of a slot's status words and tables. Those of any single chunk fit: it has at most 64 Ki
// segments of 8 bytes.
const headBytes = 576 << 10

// slotStride is the space of a slot of n bytes.
func slotStride(n int64) int64 { return headBytes + sizes.RoundUp(n, 4096) }

// MostBytes is the most pinned memory of a first queue.
const MostBytes = dividedSlots * (headBytes + DefaultSlotBytes)

// StagingSize is the memory of a queue with these slots: pinned host memory, and the same amount on the device
// unless that is coherent.
func StagingSize(slots int, slotBytes int64) int64 {
	return sizes.RoundUp(int64(slots)*slotStride(slotBytes), memory.HugePage)
}

// DefaultRing is the number of slots of a queue, and their size, for loads of no special size.
func DefaultRing() (slots int, bytes int64) { return ring.slots, ring.bytes }

// RemoteRing has half as much memory again, divided into more and smaller slots. It is for remote sources, where
// each connection fills a slot of its own.
func RemoteRing() (slots int, bytes int64) { return redivideSlots(ring.divided, ring.bytes/2) }

// ExchangeRing has three slots for each reader, as long as DefaultRing has enough memory. Two of them fit the
// second-level cache of the reader's core. It is for ranks that exchange what they read from local files; see
// SubmitAll. With more slots, four ranks together have more bytes in flight than the processor's caches hold, and
// both reading and copying become slower.
func ExchangeRing(readers int) (slots int, bytes int64) {
	slots, bytes = redivideSlots(ring.slots, ring.bytes/8)
	return min(slots, 3*readers), bytes
}

// roundUpToRing is n, or a little more if that is the memory of another division.
func roundUpToRing(n int64) int64 {
	one := slotStride(ring.bytes)
	base, whole := int64(ring.slots)*one, int64(ring.divided)*one
	switch {
	case n > base && n < whole:
		return whole
	case n > base/2 && n < base:
		return base
	}
	return n
}

// redivideSlots divides the memory of some default slots into slots of a size.
func redivideSlots(slots int, bytes int64) (int, int64) {
	return int(int64(slots) * slotStride(ring.bytes) / slotStride(bytes)), bytes
}

// TablesOnly is the slotBytes of a queue with slots that only view device memory. Such a queue takes almost no
// pinned memory. A pool keeps one such queue in addition to the other.
const TablesOnly = 4096
