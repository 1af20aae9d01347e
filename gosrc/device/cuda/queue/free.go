package queue

// This file manages the free slots of a queue.

import (
	"context"
	"slices"
	"sync"
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
