package queue

// This file divides a queue into slots, and manages the free ones.

import (
	"context"
	"slices"
	"sync"

	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// freeSlots holds free slots and returns those that are probably still in the processor's cache, so that filling and
// copying them needs less memory bandwidth. A reader with its own slots gets one that it has filled. Others get the
// slot that was freed last.
type freeSlots struct {
	tokens chan struct{} // one per free slot
	mu     sync.Mutex
	slots  []*Slot // in the order in which they were freed
}

// anyone replaces the reader's number if several readers fill a slot.
const anyone = -1

func newFreeSlots(most int) *freeSlots { return &freeSlots{tokens: make(chan struct{}, most)} }

func (f *freeSlots) putSlot(s *Slot) {
	f.mu.Lock()
	f.slots = append(f.slots, s)
	f.mu.Unlock()
	f.tokens <- struct{}{}
}

// putSlotAndJoined frees the slots that are joined to a slot, and then the slot. After that, its next user may join
// other slots to it.
func (f *freeSlots) putSlotAndJoined(s *Slot) {
	for _, m := range s.joined {
		f.putSlotAndJoined(m)
	}
	s.joined, s.result.done, s.build.tasks = s.joined[:0], nil, nil
	f.putSlot(s)
}

// takeSlotFor waits for a slot for a reader, or until ctx ends.
func (f *freeSlots) takeSlotFor(ctx context.Context, reader int) (*Slot, error) {
	select {
	case <-f.tokens:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return f.popSlotFor(reader), nil
}

// tryTakeSlotFor takes a slot for a reader, or returns nil if none is free.
func (f *freeSlots) tryTakeSlotFor(reader int) *Slot {
	select {
	case <-f.tokens:
		return f.popSlotFor(reader)
	default:
		return nil
	}
}

// popSlotFor takes a slot for a reader. The caller has taken a token, so a slot is free.
func (f *freeSlots) popSlotFor(reader int) *Slot {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.slots) - 1
	if reader != anyone {
		for n > 0 && f.slots[n].reader != reader {
			n-- // if it filled none, use the oldest, and leave newer ones to the readers that filled them
		}
	}
	s := f.slots[n]
	s.reader = reader
	f.slots = slices.Delete(f.slots, n, n+1)
	return s
}

// takeSlots takes n slots and waits until they are free.
func (f *freeSlots) takeSlots(n int) {
	for range n {
		_, _ = f.takeSlotFor(context.Background(), anyone) // cannot fail, because this context does not end
	}
}

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

// HalfRing returns a ring for few cores, with half of the slots of DefaultRing.
func HalfRing() (slots int, bytes int64) { return ring.slots / 2, ring.bytes }

// RemoteRing returns a ring with 1.5 times the memory of DefaultRing, divided into more and smaller slots. It is for
// remote sources, where each connection fills a slot.
func RemoteRing() (slots int, bytes int64) { return redivideSlots(ring.divided, ring.bytes/2) }

// ExchangeRing returns a ring with three slots per reader, as far as the memory of DefaultRing allows. Two slots fit
// the L2 cache of the reader's core. It is for ranks that exchange what they read from local files (see SubmitAll).
// With more slots, four ranks together would have more bytes in flight than fit in the processor's caches, and both
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
