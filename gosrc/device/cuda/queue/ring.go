package queue

// This file divides a queue into slots.

import (
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// The default ring has enough slots for readers, copies and decoders, and each slot is large enough for the copy
// engine. Including tables, the slots take 70 MiB of pinned memory and, unless the device is coherent, the same amount
// of staging memory. Scratch memory on the device may take another 16 MiB.
const (
	DefaultSlots     = 8
	DefaultSlotBytes = 8 << 20
)

// dividedSlots is the number of default slots that RemoteRing divides into smaller slots.
const dividedSlots = 12

// ring is the default ring. Tests on the fake driver make it smaller.
var ring = struct {
	slots, divided int
	bytes          int64
}{DefaultSlots, dividedSlots, DefaultSlotBytes}

// headBytes is the size of a slot's status words and tables. The tables of any single chunk fit: it has at most 64 Ki
// segments of 8 bytes.
const headBytes = 576 << 10

// slotStride returns the space taken by a slot of n bytes.
func slotStride(n int64) int64 { return headBytes + sizes.RoundUp(n, 4096) }

// MostBytes is the maximum pinned memory of the first queue.
const MostBytes = dividedSlots * (headBytes + DefaultSlotBytes)

// StagingSize returns the memory of a queue with these slots: pinned host memory, and the same amount on the device
// unless the device is coherent.
func StagingSize(slots int, slotBytes int64) int64 {
	return sizes.RoundUp(int64(slots)*slotStride(slotBytes), memory.HugePage)
}

// DefaultRing returns the number of slots and their size for most loads.
func DefaultRing() (slots int, bytes int64) { return ring.slots, ring.bytes }

// RemoteRing returns a ring with 1.5 times the memory of DefaultRing, divided into more and smaller slots. It is for
// remote sources, where each connection fills a slot.
func RemoteRing() (slots int, bytes int64) { return redivideSlots(ring.divided, ring.bytes/2) }

// ExchangeRing returns a ring with three slots per reader, as far as the memory of DefaultRing allows. Two slots fit
// the L2 cache of the reader's core. It is for ranks that exchange what they read from local files (see SubmitAll).
// With more slots, four ranks together would have more bytes in flight than fit the processor's caches, and both
// reading and copying would be slower.
func ExchangeRing(readers int) (slots int, bytes int64) {
	slots, bytes = redivideSlots(ring.slots, ring.bytes/8)
	return min(slots, 3*readers), bytes
}

// roundUpToRing returns n, or the slightly larger memory of one of the rings.
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

// redivideSlots divides the memory of `slots` default slots into slots of `bytes` bytes.
func redivideSlots(slots int, bytes int64) (int, int64) {
	return int(int64(slots) * slotStride(ring.bytes) / slotStride(bytes)), bytes
}

// TablesOnly is the slotBytes of a queue with slots that only view device memory. Such a queue takes almost no pinned
// memory. A pool caches one of them in addition to another queue.
const TablesOnly = 4096
